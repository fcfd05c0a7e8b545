"""spillway.integrations as far as it goes without LLaMA-Factory and Axolotl, in whose environments
tools/integrations.sh compares whole runs."""
import importlib
import os
import subprocess
import sys
import types
import unittest.mock

os.environ["HF_HUB_OFFLINE"] = "1"
from case import ROOT, Case as Folder, main, need  # noqa: E402

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from spillway.integrations import llamafactory, recipes  # noqa: E402

transformers.utils.logging.disable_progress_bar()
IN_HOST = {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}


def command(*words, **variables):
    """(exit status, all that it prints)."""
    ended = subprocess.run([sys.executable, "-m", "spillway.integrations.llamafactory", *words], text=True, check=False,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           env=os.environ | variables | {"PYTHONPATH": str(ROOT / "python")})
    return ended.returncode, ended.stdout


def parsed(**more):
    """What LLaMA-Factory has parsed, as far as it is looked at: the model's, training's and finetuning's."""
    model = types.SimpleNamespace(device_map={"": "cuda:0"}, disable_gradient_checkpointing=False)
    training = types.SimpleNamespace(overwrite_output_dir=more.pop("overwrite_output_dir", False))
    return model, training, types.SimpleNamespace(**{"stage": "sft", "loraplus_lr_ratio": None, **more})


class Own(transformers.Trainer):
    """As the programs' classes: a create_optimizer() that makes nothing of its own."""

    def create_optimizer(self, *arguments, **keywords):
        raise AssertionError("the engine's optimizer comes first")

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


class Plain(Own):
    def create_optimizer(self, *arguments, **keywords):
        return transformers.Trainer.create_optimizer(self, *arguments, **keywords)


class Recipes(Folder):
    def test_TheFileNamesTheConfigurationThenAVariableThenHostMemory(self):
        for name in ("file", "variable"):
            (self.folder / name).write_text(f'{{"gradient_clipping": {len(name)}}}')
        named, variable = str(self.folder / "file"), {"SPILLWAY_CONFIG": str(self.folder / "variable")}
        with unittest.mock.patch.dict(os.environ, variable):
            self.assertEqual({"gradient_clipping": 4}, recipes.configuration(named))
            self.assertEqual({"gradient_clipping": 8}, recipes.configuration(None))
        self.assertEqual({"bf16": {"enabled": True}}, recipes.configuration({"bf16": {"enabled": True}}))
        with unittest.mock.patch.dict(os.environ):
            os.environ.pop("SPILLWAY_CONFIG", None)
            self.assertEqual({"zero_optimization": IN_HOST}, recipes.configuration(None))
        self.assert_error("missing.json", recipes.configuration, str(self.folder / "missing.json"))

    def trainer(self, kind, **more):
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2))
        args = transformers.TrainingArguments(str(self.folder / "out"), **{
            "use_cpu": True, "report_to": [], "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
            "learning_rate": 1e-3, "max_steps": 4, "save_strategy": "no", "weight_decay": 0.01, "disable_tqdm": True,
            **more})
        rows = torch.randint(1, 96, (16, 12), generator=torch.Generator().manual_seed(2))
        return kind(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in rows])

    def test_ATrainerOfTheirsTrainsAsWithoutAnEngine(self):
        plain, made = self.trainer(Plain), self.trainer(recipes.trainer_of(Own, recipes.configuration(None), None, ""))
        for trainer in (plain, made):
            trainer.train()
        self.addCleanup(made.engine.close)
        self.assertEqual(("Own", 8), (type(made).__name__, len(made.losses)))
        self.assertEqual(plain.losses[0], made.losses[0])
        for expected, loss in zip(plain.losses, made.losses):
            self.assertLess(abs(loss - expected), 1e-5 * expected)

    def test_AStoreThatIsThereInWordsOfTheFile(self):
        place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
        nvme = {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}}
        kind = recipes.trainer_of(Own, nvme, None, "overwrite_output_dir: true")
        first = self.trainer(kind, save_strategy="steps", save_steps=2)
        first.train()
        first.engine.close()
        self.assert_error("resume_from_checkpoint=.*checkpoint-4, or start over with on_existing=.*; "
                          "in the YAML file that is overwrite_output_dir: true$",
                          self.trainer(kind).train)
        again = self.trainer(recipes.trainer_of(Own, nvme, "replace", ""))
        again.train()
        self.addCleanup(again.engine.close)
        self.assertEqual(first.losses, again.losses)

class LlamaFactory(Folder):
    def test_TheCommandSaysWhatItTakes(self):
        for words, status, text in (((), 2, "usage: .*train FILE.yaml"), (("--help",), 0, "usage: "),
                                    (("chat", "x.yaml"), 1, "`llamafactory-cli chat x.yaml` does it"),
                                    (("train",), 1, "train: names no file")):
            with self.subTest(words):
                found, printed = command(*words)
                self.assertEqual(status, found, printed)
                self.assertRegex(printed, text)
                self.assertNotIn("Traceback", printed)

    @unittest.skipIf(importlib.util.find_spec("llamafactory"), "LLaMA-Factory is installed here")
    def test_ThePackageIsMissing(self):
        self.assertEqual((1, "spillway: llamafactory: is not installed in this Python; `pip install llamafactory` "
                             "brings it\n"), command("train", "x.yaml"))

    def test_OtherProgramsOfItsAreRefused(self):
        status, printed = command("train", "x.yaml", USE_RAY="1", USE_KT="true")
        self.assertEqual(1, status)
        self.assertRegex(printed, "USE_RAY: .*; USE_KT: .*: not with Spillway, .*; unset it")

    def test_DeepSpeedIsNotAsked(self):
        asked = llamafactory.without_deepspeed
        settings = {"stage": "sft", "deepspeed": "ds.json"}
        self.assertEqual(({"stage": "sft"}, "ds.json"), asked(settings))
        self.assertEqual({"stage": "sft", "deepspeed": "ds.json"}, settings)
        self.assertEqual(({"stage": "sft"}, None), asked({"stage": "sft"}))
        self.assertEqual((["--stage", "sft"], "ds.json"), asked(["--deepspeed", "ds.json", "--stage", "sft"]))
        self.assertEqual((["--stage", "sft"], "ds.json"), asked(["--stage", "sft", "--deepspeed=ds.json"]))
        self.assert_error("--deepspeed: names no file", asked, ["--stage", "sft", "--deepspeed"])

    def test_OneErrorOfAllThatIsNotTrained(self):
        llamafactory.check(*parsed())
        error = str(self.assert_error("LLaMA-Factory: not with Spillway", llamafactory.check,
                                      *parsed(stage="ppo", use_galore=True, loraplus_lr_ratio=16.0)))
        self.assertRegex(error, "stage: ppo has a loop of its own")
        self.assertRegex(error, "use_galore: .*optimizer.type")
        self.assertRegex(error, "loraplus_lr_ratio: .*parameter_groups")

    def test_TheStagesClassIsReplacedWhereverItIsImportedUntilTheRunEnds(self):
        def package(name, **values):
            made = types.ModuleType(name)
            made.__dict__.update(values)
            return made

        name = "llamafactory.train.dpo"
        modules = {"llamafactory": package("llamafactory"), "llamafactory.train": package("llamafactory.train"),
                   name: package(name), f"{name}.trainer": package(f"{name}.trainer", CustomDPOTrainer=Own),
                   f"{name}.workflow": package(f"{name}.workflow")}  # which imports the class when it runs
        model, training, finetuning = parsed(stage="dpo", overwrite_output_dir=True)
        parse = lambda args: (model, None, training, finetuning, None)  # noqa: E731
        tuner = types.SimpleNamespace(get_train_args=parse)
        with unittest.mock.patch.dict(sys.modules, modules):
            with llamafactory._with_engine(tuner, {}):
                tuner.get_train_args({})
                made = modules[f"{name}.trainer"].CustomDPOTrainer
        self.assertEqual((parse, Own), (tuner.get_train_args, modules[f"{name}.trainer"].CustomDPOTrainer))
        self.assertTrue(issubclass(made, spillway.trainer.Mixin) and issubclass(made, Own))
        self.assertFalse(hasattr(modules[f"{name}.workflow"], "CustomDPOTrainer"))
        self.assertEqual((None, True), (model.device_map, model.disable_gradient_checkpointing))


class Axolotl(Folder):
    """With a stub of the one name that the plugin is made of; Axolotl's calls of it are tools/integrations.sh's."""

    def setUp(self):
        super().setUp()
        stub = types.ModuleType("axolotl.integrations.base")
        stub.BasePlugin = type("BasePlugin", (), {})
        stubs = {name: types.ModuleType(name) for name in ("axolotl", "axolotl.integrations")} | {stub.__name__: stub}
        patched = unittest.mock.patch.dict(sys.modules, stubs)
        patched.start()
        self.addCleanup(patched.stop)
        sys.modules.pop("spillway.integrations.axolotl", None)
        self.plugin = importlib.import_module("spillway.integrations.axolotl").SpillwayPlugin()

    def test_TheFileIsTakenOutOfAxolotlsSight(self):
        cfg = {"deepspeed": {"gradient_clipping": 2}, "gradient_checkpointing": True}
        self.plugin.register(cfg)
        self.assertEqual({"gradient_checkpointing": False}, cfg)
        self.assertEqual({"gradient_clipping": 2}, self.plugin._configuration)

    def test_WeightsToBeTrainedAreLoadedIntoHostMemory(self):
        for preprocess, more, place in ((False, {}, "cpu"), (True, {}, "auto"), (False, {"load_in_4bit": True}, "auto"),
                                        (False, {"load_in_8bit": True}, "auto")):
            cfg = {"device_map": "auto", **more}
            self.assertIsNone(self.plugin.load_datasets(cfg, preprocess))
            self.assertEqual({"device_map": place, **more}, cfg)

    def test_OneErrorOfAllThatIsNotTrained(self):
        error = str(self.assert_error("Axolotl: not with Spillway", self.plugin.register,
                                      {"rl": "dpo", "lr_groups": [{}], "fsdp": ["full_shard"]}))
        self.assertRegex(error, "rl: dpo has a trainer that a plugin cannot give")
        self.assertRegex(error, "lr_groups: .*parameter_groups")
        self.assertRegex(error, "fsdp: .*tiers")

    def test_AnotherPluginsTrainer(self):
        self.assert_error("plugins: the trainer is Other, of another plugin", self.plugin.post_trainer_create, {},
                          type("Other", (), {})())

    @unittest.skipIf(importlib.util.find_spec("axolotl"), "Axolotl is installed here")
    def test_ThePackageIsMissing(self):
        ended = subprocess.run([sys.executable, "-c", "import spillway.integrations.axolotl"], text=True, check=False,
                               stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT / "python")})
        self.assertIn("No module named 'axolotl'", ended.stderr)


if __name__ == "__main__":
    main()
