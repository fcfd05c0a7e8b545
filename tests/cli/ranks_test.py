"""`spillway finetune` under mpirun: the bits of one process, words of one, and one refusal for all."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from mpirun import ONE_HOST  # noqa: E402
from report import main  # noqa: E402
import runs  # noqa: E402
from runs import BINARY, CRASH, CliTest, Run, Workplace, sha256_of_model  # noqa: E402

MPIRUN = os.environ.get("SPILLWAY_MPIRUN", "")
MICRO_BATCHES = 4  # of a step, on all ranks
STEPS = 3
GROUPS = {"sum_groups": 4}


def on_ranks(*commands):
    """Runs each of these commands as a rank, in their order."""
    line = [MPIRUN]
    for command in commands:
        line += ([":"] if len(line) > 1 else []) + ["-n", "1", BINARY, *map(str, command)]
    done = subprocess.run(line, env=ONE_HOST, capture_output=True, text=True, timeout=120, check=False)
    return Run(done.returncode, done.stdout, done.stderr)


@unittest.skipIf(not MPIRUN, "SPILLWAY_MPIRUN names no mpirun: this build or machine has none")
class Ranks(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def config(self, ranks, section=None, place=None, **how):
        return (place or self.place).config(accumulation=MICRO_BATCHES // ranks,
                                            spillway_section={**GROUPS, **(section or {})}, **how)

    def train(self, ranks, name, section=None, steps=STEPS, config=None, **how):
        """A run of its own place; returns the place and what the run said."""
        place = Workplace(self.place.folder / name)
        command = place.arguments(self.config(ranks, section, place, **(config or {})), self.model, steps=steps,
                                  out=place.folder / "out", log=place.log, **how)
        run = on_ranks(*[command] * ranks) if ranks > 1 else runs.spillway(*command)
        self.assert_done(run)
        return place, run

    def assert_the_same_training(self, name, **config):
        wanted = None
        for ranks in (1, 2, 4):
            place, run = self.train(ranks, f"{name}-{ranks}", config=config)
            steps = place.steps()
            self.assertEqual(list(range(1, STEPS + 1)), [step["step"] for step in steps])
            found = ([(step["loss"], step["grad_norm"], step["tokens"]) for step in steps],
                     sha256_of_model(place.folder / "out"))
            self.assertEqual(wanted or found, found, f"{ranks} ranks")
            wanted = found
            self.assertEqual(1, len(re.findall("^trained model: ", run.out, re.MULTILINE)), run.out)
            self.assertEqual(STEPS, len(re.findall(r"^step \d/", run.out, re.MULTILINE)), run.out)
            self.assertIn(f"{MICRO_BATCHES} rows a step\n", run.out)
            if "nvme" in (config["parameters"], config["states"]):
                stores = [f"rank{rank}/spillway.store" for rank in range(ranks)] if ranks > 1 else ["spillway.store"]
                self.assertEqual(stores, place.stored_files())

    def test_OneTwoAndFourTrainTheSameModelOnDrives(self):
        self.assert_the_same_training("drives", parameters="nvme", states="nvme")

    def test_OneTwoAndFourTrainTheSameModelInMemory(self):
        self.assert_the_same_training("memory", parameters="cpu", states="cpu", dtype="fp32", clip=0)

    def test_OneTwoAndFourEvaluateAlike(self):
        held_out = self.place.folder / "held-out.txt"
        held_out.write_bytes(runs.TEXT.read_bytes()[-1000:])  # 31 rows: the last pass of 4 has 3
        wanted = None
        for ranks in (1, 2, 4):
            place, run = self.train(ranks, f"evaluations-{ranks}", evaluate=2, held_out=held_out,
                                    best=self.place.folder / f"best-{ranks}")
            found = ([(line["step"], line["eval_loss"], line["eval_tokens"]) for line in place.evaluations()],
                     sha256_of_model(self.place.folder / f"best-{ranks}"), sha256_of_model(place.folder / "out"))
            self.assertEqual(wanted or found, found, f"{ranks} ranks")
            wanted = found
            self.assertEqual(3, len(re.findall("^evaluation at step ", run.out, re.MULTILINE)), run.out)

    def test_AdaptersOfOneTwoAndFourAreTheSame(self):
        lora = {"lora": {"rank": 4, "alpha": 8, "targets": ["all-linear"]}}
        wanted = None
        for ranks in (1, 2, 4):
            place, _ = self.train(ranks, f"adapters-{ranks}", lora, config={"parameters": "nvme", "states": "nvme"})
            exported = place.folder / "exported"
            self.assert_done(runs.spillway("export", place.nvme, exported))
            found = [sha256_of_model(place.folder / "out"), sha256_of_model(exported)]
            self.assertEqual(wanted or found, found, f"{ranks} ranks")
            self.assertEqual(found[0], found[1])
            wanted = found

    def test_TheBatchIsDividedByTheRanks(self):
        place = Workplace(self.place.folder / "batch")
        config = place.config(train_batch_size=8, gradient_accumulation_steps=2, parameters="none", states="none")
        text = config.read_text().replace('"train_micro_batch_size_per_gpu": 1,', "")
        config.write_text(text)
        command = place.arguments(config, self.model, steps=1, out=place.folder / "out")
        run = on_ranks(command, command)
        self.assert_done(run)
        self.assertIn("8 rows a step\n", run.out)
        self.assertRegex(run.out, r"ranks: 2 do 2 of a step's 4 micro-batches each; this is rank 0 of 2, over Open MPI "
                                  r".*; 2 on its machine, \d+ cores? for it\n")
        refused = on_ranks(*[command] * 3)
        self.assert_refused(refused, "train_batch_size: 8 is not 1 (micro batch) × 2 (accumulation) × 3 (ranks)")

    def test_TheLedgerIsWhatIsPlanned(self):
        ledger = re.compile(r"^  (?:hbm|host|nvme) .*$", re.MULTILINE)
        for stage, parameters, states in ((0, "none", "none"), (1, "none", "cpu"), (2, "none", "nvme"),
                                          (3, "nvme", "nvme")):
            for ranks in (2, 4):
                with self.subTest(stage=stage, ranks=ranks):
                    place = Workplace(self.place.folder / f"ledger-{stage}-{ranks}")
                    config = self.config(ranks, place=place, parameters=parameters, states=states)
                    config.write_text(config.read_text().replace('"stage": 3', f'"stage": {stage}'))
                    command = place.arguments(config, self.model, steps=1, out=place.folder / "out")
                    run = on_ranks(*[command] * ranks)
                    self.assert_done(run)
                    planned = runs.spillway("plan", "--config", config, "--model", self.model, "--seq", 32, "--ranks",
                                            ranks, "--no-probe")
                    self.assert_done(planned)
                    memory = planned.out[planned.out.index("memory, reserved"):planned.out.index("\nranks: ")]
                    self.assertEqual(ledger.findall(run.out), ledger.findall(memory))
                    self.assertGreater(len(ledger.findall(memory)), 3)

    def start(self, ranks, command):
        """A run that has logged a step."""
        run = subprocess.Popen([MPIRUN, "-n", str(ranks), BINARY, *command], env=ONE_HOST, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not self.place.log.exists() or not self.place.log.read_text():
            if run.poll() is not None or time.monotonic() > deadline:
                run.kill()
                self.fail(f"no step: {run.communicate()}")
            time.sleep(0.01)
        return run

    def refuse(self, *commands, words):
        run = on_ranks(*commands)
        line = self.assert_refused(run, *words)
        said = [line for line in run.err.splitlines() if line.startswith("spillway: ")]
        self.assertEqual([line], said, run.err)
        self.assertEqual("", run.out)
        self.assertEqual([], self.place.stored_files())
        return line

    def test_RanksThatAreGivenDifferentThingsAreRefusedOnceAndNothingIsWritten(self):
        config, out = self.config(2), self.place.folder / "out"
        first = self.place.arguments(config, self.model, out=out, log=self.place.log)
        shorter = self.place.folder / "shorter.txt"
        shorter.write_bytes(runs.TEXT.read_bytes()[:5000])
        larger = self.place.init_model("larger", layers=4)
        other = Workplace(self.place.folder / "other")
        for what, how in (("--data", {"data": shorter}), ("--steps", {"steps": 4}), ("--seq", {"seq": 31}),
                          ("--model", {"model": larger}), ("--fresh", {"fresh": True}),
                          ("--config", {"config": self.config(2, place=other, lr=1e-2, nvme=self.place.nvme)})):
            with self.subTest(what):
                options = {"config": config, "model": self.model, "out": out, **how}
                second = self.place.arguments(options.pop("config"), options.pop("model"), **options)
                self.refuse(first, second, words=(f"spillway: {what}: ", " on rank 0, ", " on rank 1; "))
                self.assertFalse(out.exists() or self.place.log.exists())

    def test_WhatOneRankCannotReadIsSaidOnce(self):
        command = self.place.arguments(self.config(2), self.model)
        gone = self.place.arguments(self.config(2), self.model, data="/not/there.txt")
        self.refuse(command, gone, words=("spillway: rank 1: /not/there.txt: cannot be opened (No such file",))
        self.refuse(gone, command, words=("spillway: /not/there.txt: cannot be opened (No such file",))
        self.refuse(gone, gone, words=("spillway: /not/there.txt: cannot be opened (No such file",))

    def test_PartsThatAreNoMultipleOfTheRanksAreRefusedOnce(self):
        command = self.place.arguments(self.config(4, {"sum_groups": 2}), self.model)
        self.refuse(*[command] * 4, words=("spillway.sum_groups: 2 parts of 4 micro-batches", "on 4 ranks; take a"))

    def test_OneRankWithResumeIsRefused(self):
        place, _ = self.train(2, "half", steps=2)
        command = place.arguments(place.folder / "ds_config.json", self.model, steps=STEPS, log=place.log)
        run = on_ranks(command, [*command, "--resume"])
        self.assert_refused(run, "spillway: --resume: not given on rank 0, given on rank 1; ")
        run = on_ranks(*[[*command, "--resume"]] * 2)
        self.assert_done(run)
        self.assertEqual([1, 2, 3], [step["step"] for step in place.steps()])

    def test_AStoreOfAnotherNumberOfRanksIsRefused(self):
        place, _ = self.train(2, "two")
        alone = runs.spillway(*place.arguments(self.config(1, place=place), self.model))
        self.assert_refused(alone, "holds a store of several ranks, and this is one process alone")
        place, _ = self.train(1, "one")
        command = place.arguments(self.config(2, place=place), self.model)
        self.assert_refused(on_ranks(command, command), "holds a store of one process alone, and 2 are training")

    def test_SnapshotsAreOfAllRanksAndBeginRunsOfAnyNumber(self):
        saved = self.place.folder / "saved"
        place, run = self.train(2, "saving", save=saved, every=2, steps=4, config={"parameters": "none",
                                                                                  "states": "none"})
        self.assertEqual(2, run.out.count("snapshot: "), run.out)
        wanted = sha256_of_model(place.folder / "out")
        for ranks in (1, 2, 4):
            again, _ = self.train(ranks, f"loading-{ranks}", load=saved / "step-000002", steps=4)
            self.assertEqual(wanted, sha256_of_model(again.folder / "out"), f"{ranks} ranks")
            self.assertEqual([3, 4], [step["step"] for step in again.steps()])
        newer, older = (self.place.arguments(self.config(2), self.model, load=saved / name)
                        for name in ("step-000004", "step-000002"))
        self.refuse(newer, older, words=("spillway: rank 1: ", "step-000002: is at step 2 here, and at step 4 where "
                                                               "rank 0 reads it; bring one snapshot"))

    def test_AModelThatCannotBeWrittenIsSaidOnceByAll(self):
        out = self.place.folder / "out"
        config = self.config(2, parameters="none", states="none")
        with self.start(2, self.place.arguments(config, self.model, steps=100_000, log=self.place.log, out=out)) as run:
            out.write_text("in the way")
            os.kill(rank_process(run.pid, 1), signal.SIGTERM)
            printed, err = run.communicate(timeout=60)
        self.assertEqual(1, run.returncode, err)
        errors = [line for line in err.splitlines() if line.startswith("spillway: ") and "network: " not in line]
        self.assertEqual(1, len(errors), err)  # beside how fast the network is
        self.assertTrue(errors[0].startswith(f"spillway: {out}"), err)
        self.assertNotIn("its model is in", printed)

    def test_ASignalToOneRankEndsAllAtTheSameStep(self):
        config = self.config(2)
        command = self.place.arguments(config, self.model, steps=100_000, log=self.place.log)
        with self.start(2, command) as run:
            os.kill(rank_process(run.pid, 1), signal.SIGTERM)
            out, err = run.communicate(timeout=60)
        self.assertEqual(128 + signal.SIGTERM, run.returncode, err)
        self.assertIsNone(CRASH.search(out + err), err)
        done = self.place.steps()[-1]["step"]
        self.assertIn(f"stopped after step {done}; --resume continues", out)
        shutil.copy(self.place.log, self.place.folder / "before.jsonl")
        command = self.place.arguments(config, self.model, steps=done + 1, log=self.place.log, resume=True)
        self.assert_done(on_ranks(command, command))
        self.assertEqual(done + 1, self.place.steps()[-1]["step"])


def rank_process(launcher, rank):
    """The process of that rank."""
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"OMPI_COMM_WORLD_RANK={rank}".encode() in variables:
            return int(folder.name)
    raise AssertionError(f"no rank {rank} of {launcher}")


if __name__ == "__main__":
    main()
