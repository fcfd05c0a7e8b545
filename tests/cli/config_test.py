"""`spillway config`: what a configuration says, key by key; the schema; the reference."""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import ROOT, CliTest, published_configs, spillway  # noqa: E402

REFERENCE = ROOT / "docs/configuration.md"


def leaves(schema, path=""):
    """Path and schema of every key, sections among them."""
    for form in [schema, *schema.get("anyOf", [])]:
        for name, value in form.get("properties", {}).items():
            yield f"{path}{name}", value
            yield from leaves(value, f"{path}{name}.")
        if "items" in form:
            yield from leaves(form["items"], path)


class Config(CliTest):
    def keys(self, *arguments):
        run = spillway("config", *arguments, "--json")
        self.assert_done(run)
        report = json.loads(run.out)
        return report["config"], {key["key"]: key for key in report["keys"]}

    def file(self, name, text):
        path = self.place.folder / name
        path.write_text(text)
        return path

    def test_AByteOrderMarkIsNoPartOfTheText(self):
        config, _ = self.keys(self.file("c.json", '\ufeff{"train_micro_batch_size_per_gpu": 3}'))
        self.assertEqual(3, config["train_micro_batch_size_per_gpu"])

    def test_EveryValueSaysWhereItCameFrom(self):
        config = self.file("c.json", """{
  "train_micro_batch_size_per_gpu": "auto",
  "steps_per_print": 10,
  "optimizer": {"params": {"lr": 3e-4}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "cpu_offload": true, "stage3_prefetch_bucket_size": "auto"},
  "spillway": {"host_bytes": "12GiB"}
}
""")
        aio = self.file("aio.json", '{\n"aio": {"queue_depth": 64}}')
        model = self.place.init_model()
        _, keys = self.keys(config, "--aio", aio, "--model", model, "--steps", 70)

        def origin(key):
            found = keys[key]
            return found["value"], found["origin"], found.get("line")

        self.assertEqual((8, "auto", 2), origin("train_micro_batch_size_per_gpu"))
        self.assertEqual((8, "derived", None), origin("train_batch_size"))
        self.assertEqual((3e-4, "file", 4), origin("optimizer.params.lr"))
        self.assertEqual((70, "auto", 5), origin("scheduler.params.total_num_steps"))
        self.assertEqual((72 * 72 * 9 // 10, "auto", 6), origin("zero_optimization.stage3_prefetch_bucket_size"))
        self.assertEqual(("cpu", "file", 6), origin("zero_optimization.offload_optimizer.device"))
        self.assertEqual("zero_optimization.cpu_offload", keys["zero_optimization.offload_optimizer.device"]["name"])
        self.assertEqual((12 << 30, "file", 7), origin("spillway.host_bytes"))
        self.assertEqual((64, "sweep", 2), origin("aio.queue_depth"))
        self.assertEqual((1 << 20, "default", None), origin("aio.block_size"))
        self.assertEqual((None, "default", None), origin("spillway.hbm_bytes"))
        self.assertEqual((False, "logging and profiling"),
                         (keys["steps_per_print"]["effect"], keys["steps_per_print"]["why"]))

        text = spillway("config", config, "--aio", aio, "--model", model, "--steps", 70)
        self.assert_done(text)
        lines = {line.split()[0]: line for line in text.out.splitlines()}
        self.assertEqual(sorted(keys), sorted(lines))
        self.assertRegex(lines["aio.queue_depth"], r" 64 +sweep \S+aio\.json:2$")
        self.assertRegex(lines["spillway.host_bytes"], r' 12884901888 +\S+c\.json:7, as "12GiB"$')
        self.assertRegex(lines["steps_per_print"], r"c\.json:3; no effect: logging and profiling$")
        self.assertRegex(lines["train_micro_batch_size_per_gpu"], r" 8 +auto \S+c\.json:2: ")

    def test_ThePrintedConfigurationIsAFileThatMeansTheSame(self):
        config, keys = self.keys(self.place.published_config("hf_zero3"), "--steps", 9)
        again, same = self.keys(self.file("again.json", json.dumps(config)))
        self.assertEqual(config, again)
        for key, said in same.items():
            self.assertEqual(keys[key]["value"], said["value"], key)

    def test_ErrorsAreOnStderrEachWithItsLineShown(self):
        config = self.file("c.json", '{\n  "train_batch_size": 8,\n  "gradient_cliping": 1,\n'
                                     '  "bf16": {"enabled": 1}\n}\n')
        run = spillway("config", config)
        self.assertEqual((1, ""), (run.status, run.out))
        self.assertEqual([
            f'spillway: {config}:3:3: unknown key "gradient_cliping"; closest key: gradient_clipping',
            '    3 |   "gradient_cliping": 1,',
            "      |   ^^^^^^^^^^^^^^^^^^",
            f"{config}:4:23: bf16.enabled: expected true or false, found 1; write true",
            '    4 |   "bf16": {"enabled": 1}',
            "      |                       ^",
        ], run.err.splitlines())

    def test_StepsThatAScheduleNeedsAreAskedFor(self):
        config = self.place.published_config("hf_warmup_decay")
        self.assert_refused(spillway("config", config), "total_num_steps", "--steps")
        self.assert_done(spillway("config", config, "--steps", 10))

    def test_AModelWithoutAWidthIsRefused(self):
        self.file("config.json", "{}")
        config = self.place.published_config("hf_zero3")
        self.assert_refused(spillway("config", config, "--model", self.place.folder), "config.json", "no width")
        self.assert_refused(spillway("config", config, "--model", self.place.folder / "none"), "No such file")

    def test_FinetuneResolvesAutoAndSaysSo(self):
        values = json.loads(self.place.config(accumulation="auto", clip="auto", lr="auto").read_text())
        values["zero_optimization"]["stage3_param_persistence_threshold"] = "auto"
        values["scheduler"] = {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 2}}
        config = self.file("ds_config.json", json.dumps(values))
        run = self.place.finetune(config, self.place.init_model(), steps=2)
        self.assert_done(run)
        said = next(line for line in run.err.splitlines() if '"auto" is' in line)
        for words in ("gradient_accumulation_steps 1", "gradient_clipping 1", "optimizer.params.lr 5e-05",
                      "stage3_param_persistence_threshold 720", "total_num_steps 2"):
            self.assertIn(words, said)

    def test_TheSchemaHasEveryKeyOfTheReferenceAndItsFiles(self):
        run = spillway("config", "--schema")
        self.assert_done(run)
        schema = json.loads(run.out)
        self.assertEqual("https://json-schema.org/draft/2020-12/schema", schema["$schema"])
        paths = dict(leaves(schema))
        self.assertGreater(len(paths), 180)
        for path, value in paths.items():
            self.assertTrue(value["description"], path)
            explained = spillway("config", "--explain", path)
            self.assertEqual((0, path), (explained.status, explained.out.split("\n")[0]))
            self.assertIn("`" + path.rpartition(".")[2] + "`", REFERENCE.read_text())
        self.assertTrue(paths["zero_optimization.cpu_offload"]["deprecated"])
        self.assertEqual(1e-3, paths["optimizer.params.lr"]["default"])

    def test_TheSchemaIsOneThatAValidatorTakes(self):
        try:
            from jsonschema import Draft202012Validator
        except ImportError:
            self.skipTest("the Python package jsonschema is not installed")
        schema = json.loads(spillway("config", "--schema").out)
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        checked = 0
        for name, (text, loads) in published_configs().items():
            if not loads:
                continue
            try:
                values = json.loads(text)
            except json.JSONDecodeError:
                continue  # comments
            self.assertEqual([], [error.message for error in validator.iter_errors(values)], name)
            checked += 1
            values["gradient_cliping"] = 1
            self.assertFalse(validator.is_valid(values), name)
        self.assertGreater(checked, 40)

    def test_AKeyIsExplained(self):
        run = spillway("config", "--explain", "aio.block_size")
        self.assert_done(run)
        self.assertEqual(["aio.block_size", "  kind      a whole number, 4096 to 1073741824, a multiple of 4096",
                          "  default   1048576", "  meaning   largest request, in bytes"], run.out.splitlines())
        self.assertIn('  "auto"    the trainer\'s learning_rate, 5e-5', spillway("config", "--explain", "lr").out)
        self.assertIn("  no effect one thread drives the queue", spillway("config", "--explain", "num_threads").out)
        self.assertIn("  keys      block_size, queue_depth, ", spillway("config", "--explain", "aio").out)
        self.assert_refused(spillway("config", "--explain", "aio.blocksize"), "aio.blocksize", "aio.block_size")
        self.assert_refused(spillway("config", "--explain", "qwertyuiop"), "qwertyuiop", "--reference")

    def test_TheReferenceIsUpToDate(self):
        run = spillway("config", "--reference")
        self.assert_done(run)
        self.assertEqual(run.out, REFERENCE.read_text(), f"run: spillway config --reference > {REFERENCE}")

    def test_OptionsThatDoNotGoTogetherAreRefused(self):
        self.assert_refused(spillway("config"), "no file is named")
        self.assert_refused(spillway("config", "--schema", "--explain", "aio"), "--schema", "--explain")
        self.assert_refused(spillway("config", "--json"), "--json")
        self.assert_refused(spillway("config", self.place.folder / "absent.json"), "absent.json", "No such file")


if __name__ == "__main__":
    main()
