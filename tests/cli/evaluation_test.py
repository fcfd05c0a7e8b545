"""`spillway finetune --eval`: the loss of held-out rows, the same bits wherever tensors live, in training that has the
bits of a run without; the best model; what is refused."""
import collections
import json
import math
import pathlib
import re
import signal
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from prepared_data import LENGTH, documents, write_prepared  # noqa: E402
from report import main  # noqa: E402
from runs import BINARY, CRASH, ROOT, CliTest, hinted_budget, sha256_of_model, spillway  # noqa: E402
from seed import test_seed  # noqa: E402

SEED = test_seed()
REFERENCES = ROOT / "tests/references"


def rows(seed, count=4):
    some = documents(seed)
    return [some[i::4] for i in range(count)]


class EvaluationTest(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_family("gemma2")
        self.data = write_prepared(self.place.folder / "data", rows(SEED))
        write_prepared(self.data / "eval", rows(SEED + 1, 3))  # the last pass is not full

    def run_of(self, config, **how):
        """What it did: its evaluations, its steps, the run."""
        self.place.log.unlink(missing_ok=True)
        how = {"data": self.data, "seq": LENGTH, "steps": 5, "evaluate": 2, **how}
        run = self.place.finetune(config, how.pop("model", self.model), log=self.place.log, **how)
        self.assert_done(run)
        lines = self.place.steps()
        return ([line for line in lines if "eval_loss" in line],
                [line for line in lines if "eval_loss" not in line], run)


def values_of(lines, *keys):
    return [[line[key] for key in keys] for line in lines]


class Evaluations(EvaluationTest):
    def test_ComeBeforeTheFirstStepEverySoManyAndAfterTheLast(self):
        evaluations, steps, run = self.run_of(self.place.config())
        self.assertEqual([0, 2, 4, 5], [line["step"] for line in evaluations])
        self.assertEqual([1, 2, 3, 4, 5], [line["step"] for line in steps])
        learned = sum(learns for document in documents(SEED + 1)[:12] for _, learns in document[1:])
        held_out = json.loads((self.data / "eval/header.json").read_text())["targets"]
        self.assertLess(0, held_out)
        self.assertLessEqual(held_out, learned)
        for line in evaluations:
            self.assertEqual(held_out, line["eval_tokens"])
            self.assertAlmostEqual(1, line["perplexity"] / math.exp(line["eval_loss"]), 7)
            said = f"evaluation at step {line['step']}/5  loss {line['eval_loss']:.4f}  perplexity "
            self.assertEqual(1, run.out.count(said), run.out)
        self.assertIn("evaluation: 3 rows of 40 tokens with 9 documents, ", run.out)
        # A run that goes on begins with one.
        again, _, _ = self.run_of(self.place.config(), steps=7, resume=True)
        self.assertEqual([5, 6, 7], [line["step"] for line in again])
        self.assertEqual(evaluations[-1]["eval_loss"], again[0]["eval_loss"])

    def test_HaveTheSameBitsInEveryTierAndLeaveTheTrainingsAsTheyAre(self):
        for family in ("gemma2", "llama", "phi3"):  # phi3's head is not tied
            model = self.model if family == "gemma2" else self.place.init_family(family)
            out = self.place.folder / "out"
            wanted = trained = None
            for parameters, states, section in (("none", "none", {}), ("none", "none", {"threads": 1}),
                                                ("cpu", "cpu", {}), ("nvme", "nvme", {}),
                                                ("nvme", "nvme", {"hbm_bytes": 4096})):
                how = {"fresh": states == "nvme", "model": model, "out": out}
                with self.subTest(family=family, parameters=parameters, section=section):
                    section = self.least(section, model, parameters, states)
                    config = self.place.config(parameters=parameters, states=states, spillway_section=section)
                    if trained is None:
                        _, steps, _ = self.run_of(config, evaluate=None, **how)
                        trained = values_of(steps, "loss", "grad_norm"), sha256_of_model(out)
                    evaluations, steps, _ = self.run_of(config, best=self.place.folder / "best", **how)
                    found = values_of(evaluations, "step", "eval_loss"), sha256_of_model(self.place.folder / "best")
                    self.assertEqual(wanted or found, found)
                    self.assertEqual(trained, (values_of(steps, "loss", "grad_norm"), sha256_of_model(out)))
                    wanted = found

    def least(self, section, model, parameters, states):
        """With the smallest memory in place of one that is too small."""
        if "hbm_bytes" not in section:
            return section
        config = self.place.config(parameters=parameters, states=states, spillway_section=section)
        refused = self.place.finetune(config, model, data=self.data, seq=LENGTH, fresh=True)
        key, size = hinted_budget(self.assert_refused(refused, "hbm_bytes"))
        self.assertEqual("hbm_bytes", key)
        return {**section, "hbm_bytes": size}

    def test_TakeNoMemoryAndAreInThePlan(self):
        ledger = re.compile(r"^  (?:hbm|host|nvme) .*$", re.MULTILINE)
        config = self.place.config()
        found = []
        for how in ({"evaluate": None}, {"evaluate": 1}):
            _, _, run = self.run_of(config, steps=1, fresh=True, out=self.place.folder / "out", **how)
            found.append(ledger.findall(run.out))
        planned = spillway("plan", "--config", config, "--model", self.model, "--seq", LENGTH, "--no-probe", "--loop",
                           "finetune")
        self.assert_done(planned)
        memory = planned.out[planned.out.index("memory, reserved"):].partition("\n\n")[0]
        self.assertGreater(len(found[0]), 5)
        self.assertEqual(found[0], found[1])
        self.assertEqual(found[0], ledger.findall(memory))

    def test_WeightsAreReadOnceForEachPass(self):
        for family in ("gemma2", "llama"):  # a head that is tied, and one of its own
            model = self.model if family == "gemma2" else self.place.init_family(family)
            config = self.place.config(spillway_section=self.least({"hbm_bytes": 4096}, model, "nvme", "nvme"))
            reads = []
            for passes in (3, 8):
                held_out = write_prepared(self.place.folder / f"{family}-{passes}", rows(SEED, 2) * passes)
                trace = self.place.folder / f"{family}-{passes}.json"
                self.run_of(config, model=model, held_out=held_out, steps=1, trace=trace, fresh=True)
                events = json.loads(trace.read_text())["traceEvents"]
                reads.append(collections.Counter(event["name"] for event in events if event.get("ph") == "X"
                                                 and event["name"].startswith("weights of tile ")))
            self.assertGreater(len(reads[0]), 8)
            for tile in reads[0]:
                with self.subTest(family=family, tile=tile):
                    self.assertEqual(2 * (8 - 3), reads[1][tile] - reads[0][tile])  # two evaluations

    def test_TheFirstIsTheSameHoweverRowsAreCut(self):
        values = set()
        for micro, accumulation in ((1, 1), (2, 1), (1, 2), (4, 2)):
            config = self.place.config(micro=micro, accumulation=accumulation, parameters="none", states="none")
            evaluations, _, _ = self.run_of(config, steps=1)
            values.add(evaluations[0]["eval_loss"])
        self.assertEqual(1, len(values), values)

    def test_SnapshotsAreTakenBetweenThem(self):
        config, saved = self.place.config(), self.place.folder / "saved"
        straight, _, _ = self.run_of(config, save=saved, every=2, steps=6)
        on, _, _ = self.run_of(config, load=saved / "step-000004", fresh=True, steps=6)
        self.assertEqual(values_of(straight[2:], "step", "eval_loss"), values_of(on, "step", "eval_loss"))

    def test_AFileHasNoHeldOutPartButTakesOne(self):
        model, file = self.place.init_model(), self.place.folder / "held-out.bin"
        file.write_bytes(bytes(byte for i in range(130) for byte in (i % 250, 0)))
        evaluations, _, run = self.run_of(self.place.config(), model=model, data=ROOT / "LICENSE", held_out=file)
        self.assertEqual(4 * [3 * LENGTH], [line["eval_tokens"] for line in evaluations])
        self.assertEqual("", re.sub(".*takes .* of disk.*\n", "", run.err))
        _, _, run = self.run_of(self.place.config(), model=model, data=file, held_out=file, fresh=True)
        self.assertIn(f"{file}: is the training data: nothing is held out", run.err)


class Best(EvaluationTest):
    def setUp(self):
        super().setUp()
        # What is held out is learned first, and then forgotten.
        write_prepared(self.place.folder / "course", [rows(SEED + 1)[0]] * 8 + [rows(SEED + 2)[0]] * 12)
        self.best = self.place.folder / "best"
        self.how = {"data": self.place.folder / "course", "held_out": self.data / "eval", "evaluate": 1}
        self.config = self.place.config(micro=1, accumulation=1, lr=1e-2)

    def test_TheModelOfTheLowestLossIsKept(self):
        out = self.place.folder / "out"
        evaluations, _, run = self.run_of(self.config, steps=16, best=self.best, out=out, **self.how)
        lowest = min(evaluations, key=lambda line: line["eval_loss"])
        self.assertTrue(0 < lowest["step"] < 16, lowest)
        self.assertIn(f"lowest evaluation loss: {lowest['eval_loss']:.4f}, at step {lowest['step']}; its model is in "
                      f"{self.best}\n", run.out)
        least = math.inf
        for line in evaluations:
            self.assertEqual(line["eval_loss"] < least, line["best"], line)
            least = min(least, line["eval_loss"])
        last, kept = sha256_of_model(out), sha256_of_model(self.best)
        self.assertNotEqual(last, kept)
        self.run_of(self.config, steps=lowest["step"], out=out, fresh=True,
                    **{**self.how, "evaluate": None, "held_out": None})
        self.assertEqual(sha256_of_model(out), kept)

        # As it was, by a run that goes on at any moment.
        self.run_of(self.config, steps=lowest["step"] + 2, fresh=True, best=self.best, **self.how)
        again, _, run = self.run_of(self.config, steps=16, resume=True, best=self.best, **self.how)
        self.assertFalse(any(line["best"] for line in again))
        self.assertIn(f"lowest evaluation loss: {lowest['eval_loss']:.4f}, at step {lowest['step']};", run.out)
        self.assertEqual(sha256_of_model(self.best), kept)
        # Not where it is gone, nor beside other rows.
        for file in self.best.iterdir():
            file.unlink()
        again, _, _ = self.run_of(self.config, steps=16, resume=True, best=self.best, **self.how)
        self.assertEqual([True], [line["best"] for line in again])
        self.assertEqual(sha256_of_model(self.best), last)
        other = write_prepared(self.place.folder / "other", rows(SEED + 5))
        again, _, run = self.run_of(self.config, steps=17, resume=True, best=self.best,
                                    **{**self.how, "held_out": other})
        self.assertTrue(again[0]["best"])
        self.assertIn(f"{other}: holds other rows than those that were evaluated before", run.err)

    def test_OneThatCannotBeWrittenStopsNothing(self):
        run = self.place.finetune(self.config, self.model, seq=LENGTH, steps=2, best=self.best, **self.how)
        self.assert_done(run)
        for file in self.best.iterdir():
            file.unlink()
            file.mkdir()  # where a file is to go
        run = self.place.finetune(self.config, self.model, seq=LENGTH, steps=4, best=self.best, fresh=True, **self.how)
        self.assert_done(run)
        self.assertIn("the best model is not kept: ", run.err)


class Refused(EvaluationTest):
    def refuse(self, *words, config=None, **how):
        how = {"data": self.data, "seq": LENGTH, "evaluate": 2, **how}
        self.assert_refused(self.place.finetune(config or self.place.config(), how.pop("model", self.model), **how),
                            *words)
        self.assertEqual([], self.place.stored_files())

    def test_WhatIsWrongWithHeldOutRowsIsSaidBeforeTheFirstStep(self):
        folder = self.place.folder
        self.refuse("--eval", "LICENSE", "--eval-data", data=ROOT / "LICENSE")
        bare = write_prepared(folder / "bare", rows(SEED))
        self.refuse("--eval", bare, "--holdout", data=bare)
        self.refuse(folder / "none", "cannot be opened", held_out=folder / "none")
        longer = write_prepared(folder / "longer", rows(SEED), length=LENGTH + 1)
        self.refuse(longer, "rows of 41 tokens", "rows of 40", held_out=longer)
        beyond = write_prepared(folder / "beyond", rows(SEED), largest_token=300)
        self.refuse(beyond, "outside the model's vocabulary of 300", held_out=beyond)
        nothing = write_prepared(folder / "nothing", [[[(1, False), (2, False)]]])
        self.refuse(nothing, '"targets" is not a whole number from 1', held_out=nothing)
        one, two = (write_prepared(folder / name, rows(SEED), tokenizer={"sha256": {"tokenizer.json": name}})
                    for name in ("one", "two"))
        self.refuse(two, "another tokenizer", one, data=one, held_out=two)
        cut = write_prepared(folder / "cut", rows(SEED))
        (cut / "targets.bin").write_bytes(b"")
        self.refuse(cut / "targets.bin", "holds 0 bytes", held_out=cut)
        short = folder / "short.txt"
        short.write_text("too short")
        self.refuse(short, "holds 9 tokens", held_out=short)
        gpt2 = self.place.init_model(vocab=300)
        self.refuse(self.data / "eval", "several documents", "--no-packing", model=gpt2, held_out=self.data / "eval",
                    data=ROOT / "LICENSE")

    def test_ABestModelNeedsAPlaceOfItsOwn(self):
        self.refuse("--best", "is the model that is trained", best=self.model)
        self.refuse("--best", "is the directory of --out", best=self.place.folder / "one",
                    out=self.place.folder / "data" / ".." / "one")
        (self.place.folder / "file").write_text("")
        self.refuse(self.place.folder / "file", "cannot take the best model", "--best", best=self.place.folder / "file")

    def test_AHeaderThatPromisesTargetsIsNotBelieved(self):
        lies = write_prepared(self.place.folder / "lies", [[[(1, False), (2, False)]]], targets=5)
        run = self.place.finetune(self.place.config(), self.model, data=self.data, seq=LENGTH, evaluate=2,
                                  held_out=lies, log=self.place.log)
        self.assert_refused(run, lies, "no token of it is to be predicted")
        self.assertEqual("", self.place.log.read_text())

    def test_OptionsOfEvaluationsNeedIt(self):
        for option in ("--eval-data", "--best"):
            run = spillway(*self.place.arguments(self.place.config(), self.model, data=self.data, seq=LENGTH), option,
                           self.place.folder / "some")
            self.assertNotEqual(0, run.status)
            self.assertIn(f"{option} requires --eval", run.err)


class Stopped(EvaluationTest):
    def test_CtrlCEndsAnEvaluation(self):
        many = write_prepared(self.place.folder / "many", rows(SEED) * 10_000)  # takes far longer than to stop
        command = self.place.arguments(self.place.config(), self.model, data=self.data, seq=LENGTH, steps=3,
                                       evaluate=1, held_out=many, log=self.place.log)
        with subprocess.Popen([BINARY, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            for line in run.stdout:
                if line.startswith("memory ledger"):
                    break
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=60)
        self.assertEqual(130, run.returncode, err)
        self.assertIsNone(CRASH.search(out + err), err)
        self.assertIn("stopped after step 0; --resume continues\n", out)
        self.assertNotIn("evaluation at", out)
        self.assertEqual("", self.place.log.read_text())
        evaluations, _, _ = self.run_of(self.place.config(), steps=2, resume=True)
        self.assertEqual([0, 2], [line["step"] for line in evaluations])


class References(CliTest):
    def test_FamiliesLoseWhatTransformersDo(self):
        """Values and rows were made by bench/peers/evaluate.py; tests/references/README.md."""
        about, *wanted = [json.loads(line) for line in (REFERENCES / "evaluation.jsonl").read_text().splitlines()]
        data = write_prepared(self.place.folder / "data", about["rows"], length=about["seq"])
        for reference in wanted:
            family, dtype = reference["family"], reference["dtype"]
            with self.subTest(family=family, dtype=dtype):
                model = self.place.folder / family
                if not model.exists():
                    self.place.init_family(family)
                self.place.log.unlink(missing_ok=True)
                config = self.place.config(dtype=dtype, parameters="none", states="none")
                self.assert_done(self.place.finetune(config, model, data=data, seq=about["seq"], steps=1, evaluate=1,
                                                     held_out=data, log=self.place.log))
                found = self.place.evaluations()[0]
                self.assertEqual(reference["tokens"], found["eval_tokens"])
                # PyTorch sums products in an order of its own.
                limit = {"fp32": 1e-6, "bf16": 1e-2}[dtype]
                self.assertLessEqual(abs(found["eval_loss"] / reference["loss"] - 1), limit)


if __name__ == "__main__":
    main()
