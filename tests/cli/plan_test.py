"""`spillway plan` as a user runs it: what it says of memory is what a run reserves, what it says of bytes is what a run
moves; every problem of a command line is named; nothing stays on a drive.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CRASH, ERROR_FORM, LIMIT_SECONDS, ROOT, CliTest, hinted_budget, mounted, spillway  # noqa: E402

GIVEN = ["--device-rate", "0.1", "--h2d-rate", "8", "--read-rate", "2", "--write-rate", "1", "--memory-rate", "30"]
MIB = 1 << 20
LEDGER = re.compile(r"^  (?:hbm|host|nvme) .*$", re.MULTILINE)


class Plan(CliTest):
    def plan(self, *arguments):
        """The answer as JSON."""
        run = spillway("plan", *arguments, "--json")
        self.assert_done(run)
        return json.loads(run.out)

    def test_TheLedgerIsThatOfTheRun(self):
        model = self.place.init_model()
        for parameters, states, section in (("nvme", "nvme", {"host_bytes": "24MiB"}), ("cpu", "nvme", {}),
                                            ("none", "cpu", {"hbm_bytes": "24MiB"}), ("none", "none", {})):
            with self.subTest(parameters=parameters, states=states):
                config = self.place.config(parameters=parameters, states=states, spillway_section=section)
                self.assert_planned(config, model)

    def assert_planned(self, config, model):
        """Line by line, to the byte."""
        run = self.place.finetune(config, model, steps=1, fresh=True)
        self.assert_done(run)
        planned = spillway("plan", "--config", config, "--model", model, "--seq", 32, "--loop", "finetune", *GIVEN)
        self.assert_done(planned)
        memory = planned.out[planned.out.index("memory, reserved"):planned.out.index("\nstep\n")]
        self.assertEqual(LEDGER.findall(run.out), LEDGER.findall(memory))
        self.assertGreater(len(LEDGER.findall(memory)), 3)

    def test_SoIsThatOfEveryFamily(self):
        families = sorted(path.stem for path in (ROOT / "tests/references/families").glob("*.json"))
        self.assertGreater(len(families), 6)
        for family in families:
            for parameters, states in (("cpu", "nvme"), ("none", "cpu")):
                with self.subTest(family=family, parameters=parameters):
                    self.assert_planned(self.place.config(parameters=parameters, states=states),
                                        self.place.init_family(family))
                    shutil.rmtree(self.place.folder / family)

    def test_TheBytesAreThoseOfTheRun(self):
        model = self.place.init_model(layers=4, width=96)
        config = self.place.config(spillway_section={"host_bytes": "8MiB", "speculative_blocks": 0})
        self.assert_done(self.place.finetune(config, model, steps=12, log=self.place.log))
        lines = self.place.steps()[2:]
        answer = self.plan("--config", config, "--model", model, "--seq", 32, *GIVEN)
        host = answer["memory"]["host"]["purposes"]
        in_flight = host["tiles being updated"] + host["weights in flight"]
        for key in ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes"):
            moved = sum(line[key] for line in lines)
            with self.subTest(key=key):
                self.assertGreater(moved, 0)
                self.assertAlmostEqual(moved, answer["step"][key] * len(lines), delta=in_flight)

    def test_TheMachineIsLookedAtOnce(self):
        run = ["--config", self.place.config(parameters="cpu", states="cpu"), "--model", self.place.init_model()]
        for probe in ("--no-probe", "--probe"):
            said = spillway("plan", *run, "--seq", 32, probe,
                            env={**os.environ, "HWLOC_SYNTHETIC": "numa:1 core:2 pu:1"})
            self.assert_done(said)
            self.assertEqual(1, said.err.count("hwloc does not know this machine"), said.err)

    def test_AConfigurationOfTheTrainersWordsIsPlanned(self):
        config = self.place.published_config("hf_warmup_decay")
        said = spillway("plan", "--config", config, "--model", self.place.init_model(), "--seq", 32, *GIVEN)
        self.assert_done(said)
        self.assertIn("total_num_steps", spillway("config", config).err)  # which nobody can know here
        self.assertNotIn("total_num_steps", said.err)  # nor is told of

    def test_AnswersForATrillionParametersAndSaysWhatItAssumes(self):
        answer = self.plan("--params", "1T", "--hbm", "80GiB", "--host", "512GiB", "--nvme", "/nowhere=30TB",
                           "--device", "cuda", *GIVEN)
        self.assertAlmostEqual(answer["model"]["parameters"] / 1e12, 1, delta=0.02)
        self.assertFalse(answer["model"]["exact"])
        self.assertTrue(answer["model"]["estimates"])
        self.assertLessEqual(answer["memory"]["hbm"]["bytes"], 80 << 30)
        self.assertLessEqual(answer["memory"]["nvme"]["bytes"], 30e12)
        self.assertGreater(answer["schedule"]["joined_tiles"], 1)
        self.assertEqual("--read-rate", answer["rates"]["nvme_read"]["source"])
        self.assertEqual("typical", answer["rates"]["sync"]["source"])

    def test_KeysThatAreNotPlannedForAreNamed(self):
        model = self.place.init_model()
        run = ["--model", model, "--seq", 32, *GIVEN, "--loop"]
        keys = {"block_inputs": "cpu", "micro_batches_together": True, "logit_slices": 2, "block_slices": 2}
        config = self.place.config(spillway_section=keys)
        said = str(self.plan("--config", config, *run, "pytorch")["model"]["estimates"])
        self.assertIn("as without ", said)
        self.assertEqual(sorted(keys), sorted(re.findall(r"spillway\.(\w+_\w+)", said)))
        self.assertEqual([], self.plan("--config", config, *run, "finetune")["model"]["estimates"])
        config = self.place.config(activation_checkpointing={"cpu_checkpointing": True})
        self.assertIn("cpu_checkpointing", str(self.plan("--config", config, *run, "pytorch")["model"]["estimates"]))
        for section in ({}, {"block_inputs": "none", "logit_slices": 1}):
            config = self.place.config(spillway_section=section)
            self.assertNotIn("as without", str(self.plan("--config", config, *run, "pytorch")["model"]["estimates"]))

    def test_AModelWhoseHeadsAreNotKnownIsRefused(self):
        """Where the file does not say, transformers takes 8 for Mistral, 32 for Qwen and 4 for Gemma."""
        for family in ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text"):
            model = self.place.init_family(family)
            about = json.loads((model / "config.json").read_text())
            del about["num_key_value_heads"]
            (model / "config.json").write_text(json.dumps(about))
            for loop in ("pytorch", "finetune"):
                with self.subTest(family=family, loop=loop):
                    self.assert_refused(spillway("plan", "--model", model, "--seq", 32, *GIVEN, "--loop", loop),
                                        '"num_key_value_heads" is missing')

    def test_SaysWhatARankAHostAndAllTake(self):
        run = ["--params", "350M", "--nvme", "/nowhere", "--device", "cuda", *GIVEN]
        one = self.plan(*run)
        self.assertNotIn("ranks", one)
        self.assertNotIn("network_gathered_bytes", one["step"])
        self.assertNotIn("network", one["rates"])
        four = self.plan(*run, "--ranks", 4, "--ranks-per-host", 2, "--network", "80,7")
        self.assertEqual((4, 2), (four["ranks"]["count"], four["ranks"]["on_a_host"]))
        self.assertEqual(4 * one["model"]["tokens_per_step"], four["model"]["tokens_per_step"])
        for tier in ("hbm", "host", "nvme"):
            rank = four["memory"][tier]["bytes"]
            self.assertEqual({"rank_bytes": rank, "host_bytes": 2 * rank, "all_bytes": 4 * rank}, four["ranks"][tier])
        self.assertAlmostEqual(four["ranks"]["nvme"]["rank_bytes"] / one["memory"]["nvme"]["bytes"], 0.25, delta=0.02)
        self.assertEqual((1e10, "--network"), tuple(four["rates"]["network"][key] for key in ("value", "source")))
        self.assertAlmostEqual(7e-6, four["rates"]["network_call"]["value"])
        step, bytes_of_sums = four["step"], 3 * four["model"]["parameters"]  # 4 bytes of 3 of 4 elements
        self.assertAlmostEqual(step["network_scattered_bytes"] / bytes_of_sums, 1, delta=0.01)
        self.assertAlmostEqual(step["network_norm_bytes"] * 512 / bytes_of_sums, 1, delta=0.01)
        # Weights come for forward and for backward, but for the head, which is the embedding, and the last layer.
        self.assertGreater(step["network_gathered_bytes"], 0.7 * bytes_of_sums)
        self.assertLessEqual(step["network_gathered_bytes"], 1.01 * bytes_of_sums)
        stages = [(row["states"], row["parameters"], row["stages"]) for row in four["placements"]]
        self.assertEqual([("hbm", "hbm", stage) for stage in ("0", "1-2", "3")], stages[:3])
        whole, states, parts = (row["hbm_bytes"] for row in four["placements"][:3])
        self.assertGreater(whole, states)
        self.assertGreater(states, parts)
        self.assertEqual(1, sum(row["chosen"] for row in four["placements"]))
        said = spillway("plan", *run, "--ranks", 4, "--ranks-per-host", 2)
        self.assert_done(said)
        self.assertIn("ranks: 4, 2 on a host", said.out)
        self.assertIn("typical: 100 Gbit/s a rank", said.out)
        self.assertRegex(said.out, r"network .* of weights gathered, .* of sums scattered, .* of the norm")

    def test_ASlowNetworkIsWhatLimits(self):
        run = ["--params", "350M", "--nvme", "/nowhere", "--device", "cuda", "--ranks", 8, *GIVEN]
        slow, fast = (self.plan(*run, "--network", rate) for rate in ("0.1", "4000,0"))
        self.assertEqual("network", slow["schedule"]["limit"])
        self.assertNotEqual("network", fast["schedule"]["limit"])
        moved = sum(slow["step"][f"network_{part}_bytes"] for part in ("gathered", "scattered", "norm"))
        self.assertAlmostEqual(slow["schedule"]["busy_seconds"]["network"], moved / (0.1e9 / 8), delta=1)
        self.assertGreater(slow["schedule"]["stall_seconds"]["network"], 0.5 * slow["step"]["seconds"])
        self.assertGreaterEqual(slow["step"]["seconds"], slow["schedule"]["busy_seconds"]["network"])

    def test_AFileOfSeveralRanksIsSaidToNeedTheirNumber(self):
        model = ["--model", self.place.init_model(), "--seq", 32, "--no-probe"]
        for words in ({"train_batch_size": 4}, {"spillway_section": {"sum_groups": 4}}):
            with self.subTest(words=words):
                config = self.place.config(accumulation=1, **words)
                self.assert_refused(spillway("plan", "--config", config, *model),
                                    "--ranks: was taken as 1; say --ranks N if N processes train by the file together")
                self.assert_done(spillway("plan", "--config", config, *model, "--ranks", 4))

    def test_NamesWhatIsWrongWithRanks(self):
        for words, said in ((["--ranks", "0"], '--ranks: "0" is not a whole number'),
                            (["--ranks", "2", "--ranks-per-host", "4"], "4 are more than the 2 ranks"),
                            (["--ranks", "2", "--network", "fast"], '--network: "fast" is not a rate'),
                            (["--ranks", "2", "--network", "10,soon"], '"soon" is no number of microseconds'),
                            (["--network", "10"], "--network: one rank has none; add --ranks")):
            with self.subTest(words=words):
                run = spillway("plan", "--params", "350M", *words)
                self.assertEqual(1, run.status)
                self.assertIn(said, run.err)

    def test_KnowsTheFamilies(self):
        sizes = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                 "num_key_value_heads": 2, "vocab_size": 300}
        for family, values in (("llama", sizes), ("mistral", sizes), ("qwen2", sizes), ("qwen3", sizes),
                               ("t5", {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2,
                                       "vocab_size": 300})):
            with self.subTest(family=family):
                model = self.place.folder / family
                model.mkdir()
                (model / "config.json").write_text(json.dumps({"model_type": family, **values}))
                answer = self.plan("--model", model, "--hbm", "64MiB", "--nvme", "/nowhere", *GIVEN)
                self.assertEqual(family, answer["model"]["family"])
                self.assertFalse(answer["model"]["exact"])
                self.assertGreater(answer["step"]["nvme_read_bytes"], 0)
                self.assertEqual("pytorch", answer["model"]["loop"])

    def test_ALoopAroundTheModelBringsWeightsForEachMicroBatch(self):
        config = self.place.folder / "accumulates.json"
        config.write_text(json.dumps({
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                                  "offload_optimizer": {"device": "cpu"}},
            "spillway": {"hbm_bytes": "1GiB"}}))
        answers = [self.plan("--config", config, "--params", "350M", *loop, *GIVEN)
                   for loop in ([], ["--loop", "finetune"], ["--loop", "pytorch"])]
        usual, inside, around = answers
        self.assertEqual(["finetune", "finetune", "pytorch"], [answer["model"]["loop"] for answer in answers])
        self.assertEqual(usual["memory"], inside["memory"])
        parameters = inside["model"]["parameters"]
        self.assertLess(inside["step"]["h2d_bytes"], 5 * parameters)
        self.assertGreater(around["step"]["h2d_bytes"], 12 * parameters)  # twice for each micro-batch, what stays apart
        self.assertIn("gradient accumulators (fp32)", around["memory"]["host"]["purposes"])
        self.assertNotIn("gradient accumulators (fp32)", inside["memory"]["host"]["purposes"])
        self.assert_refused(spillway("plan", "--params", "350M", "--loop", "deepspeed"), "--loop")

    def test_TheTableHasWhatFitsAndWhatDoesNot(self):
        answer = self.plan("--params", "124M", "--hbm", "448MiB", "--host", "448MiB", "--nvme", "/nowhere=1TB", *GIVEN)
        rows = {(row["states"], row["parameters"]): row for row in answer["placements"]}
        self.assertEqual(7, len(rows))
        chosen = rows["nvme", "nvme"]
        self.assertTrue(chosen["chosen"] and chosen["fits"])
        self.assertAlmostEqual(answer["step"]["seconds"], chosen["seconds"], delta=0.1 * chosen["seconds"])
        everything = rows["hbm", "hbm"]
        self.assertFalse(everything["fits"])
        self.assertIn("hbm_bytes", everything["refused"])
        self.assertGreater(everything["hbm_bytes"], 448 << 20)
        effects = [change["effect"] for change in answer["changes"]]
        self.assertTrue(effects)
        self.assertEqual(sorted(effects), effects)
        self.assertTrue(all(effect <= -0.01 for effect in effects))

    def test_ADriveThatNobodyNamedIsAsFastAsOneThatSomebodyNamed(self):
        common = ["--params", "124M", "--hbm", "2GiB", "--host", "4GiB"]
        for given, source in ((GIVEN, "--read-rate"), (["--no-probe"], "typical of a drive: none is named")):
            named, nameless = self.plan(*common, "--nvme", "/nowhere=1TB", *given), self.plan(*common, *given)
            self.assertEqual(source, nameless["rates"]["nvme_read"]["source"])
            self.assertEqual(*([rate["value"] for rate in answer["rates"].values()] for answer in (named, nameless)))
            rows, others = ({(row["states"], row["parameters"]): row["seconds"] for row in answer["placements"]
                             if "nvme" in (row["states"], row["parameters"])} for answer in (named, nameless))
            self.assertEqual(4, len(rows))
            self.assertEqual(rows, others)

    def test_WhatACrashLosesIsSaid(self):
        common = ["--params", "124M", "--hbm", "2GiB", "--nvme", "/nowhere=1TB", *GIVEN]
        cached, alone = (spillway("plan", *common, *host).out for host in (["--host", "4GiB"], []))
        self.assertRegex(cached, r"\n  a crash loses up to \d+ steps: a commit takes ")
        self.assertIn("\n  every step survives a crash\n", alone)

    def test_ADriveCountsOnceHoweverManyPathsItHas(self):
        with mounted(self, "ext4", 64 * MIB) as folder:
            paths = [folder / name for name in ("a", "b")]
            for path in paths:
                path.mkdir()
            common = ["--params", "124M", "--hbm", "448MiB", "--no-probe", "--nvme", paths[0]]
            one, two = self.plan(*common), self.plan(*common, "--nvme", paths[1])
            self.assertEqual(one["rates"], two["rates"])
            self.assertEqual(one["drive"]["life_bytes"], two["drive"]["life_bytes"])
            said = [fact for fact in two["facts"] if "on the same drive, loop" in fact]
            self.assertEqual(1, len(said), two["facts"])
            self.assertTrue(all(str(path) in said[0] for path in paths), said)
            elsewhere = self.plan(*common, "--nvme", "/nowhere")
            self.assertEqual(2 * one["rates"]["nvme_read"]["value"], elsewhere["rates"]["nvme_read"]["value"])

    def test_MoreHostMemoryDoesWhatItSays(self):
        common = ["--params", "124M", "--seq", "64", "--hbm", "448MiB", "--nvme", "/nowhere=1TB", *GIVEN]
        before = self.plan(*common, "--host", "448MiB")
        change = next(change for change in before["changes"] if "host memory" in change["what"])
        more = re.match(r"([\d.]+) MiB more", change["what"])
        after = self.plan(*common, "--host", f"{448 + round(float(more.group(1)))}MiB")
        self.assertAlmostEqual(1 + change["effect"], after["step"]["seconds"] / before["step"]["seconds"], delta=0.02)

    def test_ABudgetThatIsTooSmallNamesTheSmallestThatWorks(self):
        common = ["--params", "30M", "--hbm", "1GiB", "--nvme", "/nowhere=1TB", *GIVEN]
        run = spillway("plan", *common, "--host", "1MiB")
        line = self.assert_refused(run, "host_bytes", "too small")
        self.assertIn("placements", run.out)  # what would fit is still said
        _, least = hinted_budget(line)
        self.assert_done(spillway("plan", *common, "--host", f"{least}B"))
        self.assert_refused(spillway("plan", *common, "--host", f"{least - 4096}B"), "host_bytes")

    def test_APlacementThatFitsIsNamed(self):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {
            "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
        path = self.place.folder / "z3.json"
        path.write_text(json.dumps(config))
        common = ["--params", "300M", "--hbm", "2GiB", "--host", "1GiB", "--nvme", "/nowhere=1TB", *GIVEN]
        nowhere = [option for option in common if "nowhere" not in option and option != "--nvme"]
        self.assertNotIn("nvme", self.assert_refused(spillway("plan", "--config", path, *nowhere), "host_bytes"))
        line = self.assert_refused(spillway("plan", "--config", path, *common), "host_bytes", "too small")
        placement = r'or (?:stage to 3, )?offload_optimizer to "(\w+)" and offload_param to "(\w+)", which fits$'
        states, parameters = re.search(placement, line).groups()
        for name, device in (("offload_optimizer", states), ("offload_param", parameters)):
            config["zero_optimization"][name] = {"device": device, "nvme_path": "/nowhere"}
        path.write_text(json.dumps(config))
        self.assert_done(spillway("plan", "--config", path, *common))

    def test_EveryProblemIsNamedAtOnce(self):
        run = spillway("plan", "--hbm", "24 bananas", "--nvme", "=2TB", "--seq", "0", "--device", "tpu", "--read-rate",
                       "fast")
        self.assertEqual(1, run.status)
        self.assertIsNone(CRASH.search(run.err))
        lines = run.err.splitlines()
        self.assertEqual(6, len(lines), run.err)
        for line in lines:
            self.assertRegex(line, ERROR_FORM)
        self.assert_refused(spillway("plan", "--model", self.place.folder / "none"), "config.json")
        self.assert_refused(spillway("plan", "--params", "7B", "--no-such-option"), "no-such-option")
        config = self.place.folder / "bad.json"
        config.write_text('{"zero_optimisation": {}, "bf16": 3}')
        run = spillway("plan", "--config", config, "--params", "x")
        self.assertEqual(1, run.status)
        self.assertIn("--params", run.err)
        self.assertIn("zero_optimisation", run.err)

    def test_TheReportIsOnePageOfItsOwn(self):
        page = self.place.folder / "plan.html"
        self.assert_done(spillway("plan", "--params", "124M", "--hbm", "1GiB", "--host", "1GiB", "--nvme",
                                  "/nowhere=1TB", *GIVEN, "--report", page))
        text = page.read_text()
        self.assertTrue(text.startswith("<!doctype html>"))
        self.assertTrue(text.rstrip().endswith("</html>"))
        self.assertIsNone(re.search(r"(?:src|href)=|https?://|@import|url\(", text))
        self.assertEqual(text.count("<svg"), text.count("</svg>"))
        self.assertEqual(5, text.count("<svg"))  # three tiers, the timeline, the links
        self.assertIn("optimizer states / parameters", text)
        self.assert_refused(spillway("plan", "--params", "124M", "--report", self.place.folder / "none/plan.html"),
                            "--report")

    def test_TheReportGoesThroughWhatIsNoFileAndWhereALinkLeads(self):
        page, link, pipe = (self.place.folder / name for name in ("plan.html", "link", "pipe"))
        page.write_text("old")
        link.symlink_to(page)
        os.mkfifo(pipe)
        arguments = ["plan", "--params", "124M", "--host", "8GiB", "--hbm", "1GiB", *GIVEN, "--report"]
        self.assert_done(spillway(*arguments, link))
        self.assertTrue(link.is_symlink())
        with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
            self.assert_done(spillway(*arguments, pipe))
            if not pipe.is_fifo():
                reader.kill()
            read = reader.communicate(timeout=60)[0]
        for text in (page.read_text(), read):
            self.assertEqual(("<!doctype html>", "</html>"), (text[:15], text.rstrip()[-7:]))
        with open(self.place.folder / "both", "w+", encoding="utf-8") as both:
            subprocess.run([BINARY, *arguments, "/dev/stdout"], stdout=both, check=True, timeout=LIMIT_SECONDS)
            both.seek(0)
            self.assertRegex(both.read(), "(?s)memory, reserved.*<!doctype html>.*</html>")
        self.assertEqual({"both", "link", "nvme", "pipe", "plan.html"}, set(os.listdir(self.place.folder)))

    def test_MeasuresTheMachineAndLeavesNothing(self):
        model = self.place.init_model()
        config = self.place.config()
        answer = self.plan("--config", config, "--model", model, "--seq", 32, "--probe")
        for rate in ("nvme_read", "nvme_write", "nvme_mixed", "h2d", "memory", "forward", "backward", "head"):
            self.assertEqual("measured here", answer["rates"][rate]["source"], rate)
            self.assertGreater(answer["rates"][rate]["value"], 0)
        self.assertEqual([], self.place.stored_files())
        self.assertEqual([], list(self.place.nvme.iterdir()))
        self.assertTrue(answer["measured"])
        self.assert_refused(spillway("plan", "--params", "7B", "--device", "cuda", "--probe",
                                     env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}), "--probe")
        quiet = self.plan("--config", config, "--model", model, "--seq", 32, "--no-probe")
        self.assertEqual([], quiet["measured"])
        self.assertNotEqual("measured here", quiet["rates"]["nvme_read"]["source"])

    def wait_for_files(self, run, there):
        """Until the drive has files, or none, or the run is over."""
        while bool(list(self.place.nvme.iterdir())) != there and run.poll() is None:
            time.sleep(0.001)

    def test_CtrlCLeavesNothingOnTheDrive(self):
        model, config = self.place.init_model(), self.place.config()
        # As early and as often as a user can: at once, when there is something there, and again.
        for seconds in (0, 0.3, None):
            with subprocess.Popen([BINARY, "plan", "--config", config, "--model", model, "--seq", "32", "--probe"],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
                if seconds is None:
                    self.wait_for_files(run, True)
                else:
                    time.sleep(seconds)
                for _ in range(3):
                    run.send_signal(signal.SIGINT)
                _, err = run.communicate(timeout=LIMIT_SECONDS)
            self.assertIsNone(CRASH.search(err), err)
            self.assertIn(run.returncode, (-signal.SIGINT, 0))
            self.assertEqual([], list(self.place.nvme.iterdir()))

    def test_ALongProbeTakesMoreOfTheDriveAndEndsAtCtrlC(self):
        model, config = self.place.init_model(), self.place.config()
        command = ["plan", "--config", config, "--model", model, "--seq", "32", "--probe-seconds"]
        took = {}
        for seconds in ("0.1", "1.5"):
            said = self.plan(*command[1:], seconds)["measured"][0]
            read, written = map(int, re.search(r"(\d+) MiB read, (\d+) MiB written", said).groups())
            self.assertIn(f"{seconds} s", said)
            took[seconds] = read + written
        self.assertGreater(took["1.5"], took["0.1"])
        with subprocess.Popen([BINARY, *command, "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as run:
            self.wait_for_files(run, True)
            self.wait_for_files(run, False)
            run.send_signal(signal.SIGINT)
            _, err = run.communicate(timeout=LIMIT_SECONDS)
        self.assertIsNone(CRASH.search(err), err)
        self.assertEqual(-signal.SIGINT, run.returncode)
        self.assert_refused(spillway(*command, "1", "--no-probe"), "--probe-seconds")
        self.assert_refused(spillway(*command, "0"), "--probe-seconds")

    def test_TheHelpShowsAnExampleThatWorks(self):
        run = spillway("plan", "--help")
        self.assert_done(run)
        example = re.search(r"^  spillway (plan .*)$", run.out, re.MULTILINE).group(1).split()
        self.assert_done(spillway(*example, "--no-probe"))


if __name__ == "__main__":
    main()
