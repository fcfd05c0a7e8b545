"""spillway.Trainer on several processes, over Gloo: that it trains, evaluates, saves and goes on as transformers' does
by DistributedDataParallel, and as one process does on all rows."""
import importlib.util
import json
import pathlib
import re
import shutil

from ranks_case import ROOT, RanksCase, need
from report import main

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")

import torch
import transformers

import spillway
import trainer_ranks_script as script
from spillway.trainer.config import filled, read, refuse

PAGE = ROOT / "docs/ranks_trainer.md"
WHOLE = {"case": "train", "examples": 24, "rank_rows": 1, "num_train_epochs": 3}  # six steps of twelve rows
SAVING = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}


class TrainerRanksTest(RanksCase):
    script = pathlib.Path(script.__file__)

    def saved(self, folder):
        """Weights as from_pretrained() has them."""
        return dict(transformers.AutoModelForCausalLM.from_pretrained(str(folder)).named_parameters())

    def assert_near(self, found, expected):
        for name in ("loss", "eval_loss", "learning_rate"):
            self.assertGreater(len(expected[name]), 0, name)
            for one, other in zip(expected[name], found[name][-len(expected[name]):], strict=True):
                self.assertAlmostEqual(one, other, delta=1e-5 if name != "loss" else 1.1e-4)  # transformers 4 rounds it
        for one, other in zip(expected["grad_norm"], found["grad_norm"], strict=True):
            self.assertAlmostEqual(one, other, delta=2e-5 * one)
        torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=0, atol=1e-4)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-5)
        self.assertEqual(expected["step"], found["step"])

    def assert_as_one_process(self, results, expected):
        for result in results:
            self.assertEqual(result["batch"], 12)
            self.assertEqual(result["grad_norm"], results[0]["grad_norm"])
            self.assert_same_weights(result["weights"], results[0]["weights"])
            self.assert_near(result, expected)
        means = [sum(losses) / len(losses) for losses in zip(*(result["losses"] for result in results), strict=True)]
        for one, other in zip(expected["losses"], means, strict=True):
            self.assertAlmostEqual(one, other, delta=1e-5)

    def test_TrainsAsDistributedDataParallelAndOneProcessDo(self):
        # With dropout, other numbers of tokens that count, and an epoch's last micro-batches, which fill no step.
        options = {"case": "train", "masked": True, "dropout": 0.1}
        plain, spilled, together = (self.folder_of(name) for name in ("plain", "spilled", "together"))
        alone, two, four = (self.folder_of(name) for name in ("alone", "two", "four"))
        script.train(alone, plain=True)  # of plain PyTorch in this process, on all rows
        self.run_all(2, [{**options, "folder": plain, "plain": True}, {**options, "folder": spilled},
                         {**options, "folder": together, "own": {"micro_batches_together": True}},
                         {"case": "train", "folder": two}])
        self.run_all(4, [{"case": "train", "folder": four}])
        for folder in (spilled, together):  # of transformers before 4.46 both are one
            for found, expected in zip(self.results(folder, 2), self.results(plain, 2), strict=True):
                self.assert_near(found, expected)
                if folder == spilled:  # until the first update the arithmetic is PyTorch's own, and so are the bits
                    self.assertEqual(expected["losses"][:3], found["losses"][:3])
                    for one, other in zip(expected["losses"], found["losses"], strict=True):
                        self.assertAlmostEqual(one, other, delta=1e-5)
        expected, = self.results(alone, 1)
        for folder, count in ((two, 2), (four, 4)):
            with self.subTest(count=count):
                self.assert_as_one_process(self.results(folder, count), expected)

    def test_SavesAndGoesOnWithTheSameBitsAndWithAnotherNumber(self):
        whole, going_on, moved, other = (self.folder_of(name) for name in ("whole", "going_on", "moved", "other"))
        out, adapted = pathlib.Path(whole, "out"), self.folder_of("adapted")
        of_two = {**WHOLE, **SAVING, "gradient_accumulation_steps": 6}
        peft = [{"case": "train", "folder": adapted, "adapted": True, "save": True, "max_steps": 2}] \
            if importlib.util.find_spec("peft") else []
        self.run_all(2, [{**of_two, "folder": whole, "load_best_model_at_end": True, "save": True},
                         {**of_two, "folder": going_on, "resume": str(out / "checkpoint-3")},
                         {"case": "generate", "folder": other}, {"case": "refused", "folder": other}, *peft])
        shutil.copytree(out / "checkpoint-3", pathlib.Path(moved, "out/checkpoint-3"))
        self.run_all(4, [{**WHOLE, **SAVING, "folder": moved, "resume": True, "gradient_accumulation_steps": 3}])
        names = {"config.json", "generation_config.json", "model.safetensors", "rng_state_0.pth", "rng_state_1.pth",
                 "scheduler.pt", "spillway", "trainer_state.json", "training_args.bin"}
        self.assertEqual({path.name for path in (out / "checkpoint-6").iterdir()}, names)
        self.assertEqual({path.name for path in out.iterdir()}, {
            "checkpoint-3", "checkpoint-6", "config.json", "generation_config.json", "model.safetensors",
            "training_args.bin"})
        first, last = (self.saved(out / f"checkpoint-{step}") for step in (3, 6))
        state = json.loads((out / "checkpoint-6/trainer_state.json").read_text())
        self.assertEqual("checkpoint-3", pathlib.Path(state["best_model_checkpoint"]).name)
        self.assert_same_weights(self.saved(out), first)
        for result in self.results(whole, 2):
            self.assert_same_weights(result["weights"], first)
        for result in self.results(going_on, 2):
            self.assert_same_weights(result["weights"], last)
        for result in self.results(moved, 4):  # another order of sums
            self.assertEqual((6, 9), (result["step"], len(result["losses"])))
            for name, value in last.items():
                torch.testing.assert_close(result["weights"][name], value.detach(), rtol=0, atol=1e-5)
        if peft:
            self.check_adapters(adapted)
        self.check_other(other)

    def test_TheProgramOfThePageTrainsAndGoesOn(self):
        program, = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        path = self.folder / "train.py"  # with what accelerate 0.33 needs of an older PyTorch
        path.write_text(f"import sys\nsys.path.append({str(self.script.parent)!r})\nimport trainer_ranks_script\n" +
                        program)
        for steps in ("5", "10"):
            said = re.findall(r"rank (\d) of (\d): step (\d+)", self.torchrun(2, path, steps))
            self.assertEqual([("0", "2", steps), ("1", "2", steps)], sorted(said))
        self.assertEqual({path.name for path in (self.folder / "out").iterdir()}, {"checkpoint-5", "checkpoint-10"})
        state = json.loads((self.folder / "out/checkpoint-10/trainer_state.json").read_text())
        evaluated = [line["eval_loss"] for line in state["log_history"] if "eval_loss" in line]
        self.assertEqual(2, len(evaluated))  # those of the first run are the second's as well
        self.assertLess(evaluated[1], evaluated[0])
        self.assert_same_weights(self.saved(self.folder / "trained"),
                                 self.saved(self.folder / "out/checkpoint-10"))

    def test_ProcessesOnAGpuEachAreTaken(self):
        class OnAGpu(transformers.TrainingArguments):
            world_size, n_gpu = 2, 1
            device = property(lambda self: torch.device("cuda", 1))

        args = OnAGpu(self.folder_of("gpus"), report_to=[])
        refuse(args)
        planned = filled(read({}), args, torch.nn.Linear(2, 2), [], 1)
        self.assertEqual("cuda", planned["spillway"]["device"])
        args.save_on_each_node = True
        self.assert_error("TrainingArguments: not with Spillway:\n  save_on_each_node", refuse, args)

    def test_DeepSpeedsWayIsRefusedBeforeAModelIsLoaded(self):
        class Loads(transformers.Trainer):
            def __init__(self, *_, **__):
                raise AssertionError("a model is loaded")

        class Spilled(spillway.trainer.Mixin, Loads):
            pass

        arguments = transformers.TrainingArguments(str(self.folder), use_cpu=True, report_to=[])
        arguments.deepspeed = "ds_config.json"
        for given, named in ((("model", arguments), {}), (("model",), {"args": arguments})):
            self.assert_error("deepspeed: give the file to the trainer, as spillway=", Spilled, *given, spillway={},
                              **named)

    def check_adapters(self, folder):
        import safetensors.torch

        saved = safetensors.torch.load_file(pathlib.Path(folder, "out/adapter_model.safetensors"))
        for result in self.results(folder, 2):
            self.assert_same_weights(saved, {name.replace(".default.", "."): value
                                             for name, value in result["weights"].items() if "lora" in name})

    def check_other(self, folder):
        """Text of another length on each rank, and what is refused."""
        for rank in range(2):
            expected, found = json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text())
            self.assertEqual(expected, found)
            self.assertEqual(6 + 4 * rank, len(found[0][0]))
            arguments, groups, batch = json.loads(pathlib.Path(folder, f"refused{rank}.json").read_text())
            self.assertIn("\n  save_on_each_node: one rank writes what all have; ", arguments)
            self.assertIn("\n  even_batches false: ranks would have different numbers of batches", arguments)
            self.assertIn("sum_groups", groups)
            self.assertIn("train_batch_size is 6, the product of these arguments and of 2 processes 12", batch)


if __name__ == "__main__":
    main()
