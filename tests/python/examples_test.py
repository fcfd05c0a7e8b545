"""The PyTorch programs of examples/, run as its README has them, on tiny models that examples/tiny_model.py writes."""
import hashlib
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"
from case import ROOT, Case as Folder, main, need  # noqa: E402

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

from toy_model import DEVICE  # noqa: E402

EXAMPLES = ROOT / "examples"
STEPS = int(os.environ.get("SPILLWAY_STEPS", "6"))
NO_PEFT = importlib.util.find_spec("peft") is None


def sha256(folder, name="model.safetensors"):
    return hashlib.sha256((folder / name).read_bytes()).hexdigest()


def commands(name):
    """The README's that run this program, in turn: their arguments."""
    shown = re.findall(r"(?<=\n```sh\n).*?(?=^```$)", (EXAMPLES / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    return [line.split()[2:] for line in "".join(shown).splitlines() if line.startswith(f"python examples/{name}.py ")]


class Case(Folder):
    def run_example(self, name, *arguments):
        """In a folder of its own, which is where a store of the shipped configuration lies. Returns what it prints."""
        arguments = [argument for argument in arguments if argument != "--cpu" or DEVICE == "cpu"]
        command = [sys.executable, EXAMPLES / f"{name}.py", *arguments]
        done = subprocess.run([*map(str, command)], cwd=self.folder, capture_output=True, text=True, check=False,
                              timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(0, done.returncode, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return done.stdout

    def run_commands(self, name, kind):
        """The README's that run this program, on the model of this kind; returns what the last one prints."""
        self.run_example("tiny_model", *next(command for command in commands("tiny_model") if command[0] == kind))
        return self.run_shown(name)

    def run_shown(self, name):
        return [self.run_example(name, *arguments) for arguments in commands(name)][-1]

    def imported(self, name):
        sys.path.insert(0, str(EXAMPLES))
        self.addCleanup(sys.path.remove, str(EXAMPLES))
        return importlib.import_module(name)

    def assert_trained(self, kind, before, after):
        weights = kind.from_pretrained(self.folder / after).state_dict()
        for name, value in kind.from_pretrained(self.folder / before).state_dict().items():
            if value.dim() > 1:  # in bf16 a norm's weight of 1 needs more steps to become another
                self.assertFalse(torch.equal(value.float(), weights[name].float()), name)


class Readme(Case):
    def test_TranslationEvaluatesByBeamSearch(self):
        said = self.run_commands("t5_translation", "t5")
        self.assertEqual(3, len(re.findall("eval_exact", said)))
        self.assert_trained(transformers.AutoModelForSeq2SeqLM, "tiny-t5", "translated")
        # What it shows is what transformers alone generates with the weights that it saved.
        shown = re.findall(r"^(translate English to German: .*?)  ->  (.*)$", said, re.MULTILINE)
        self.assertEqual(6, len(shown))
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(self.folder / "translated").eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder / "translated")
        lines = (EXAMPLES / "data/en_de.jsonl").read_text(encoding="utf-8").splitlines()[-6:]
        asked = ["translate English to German: " + json.loads(line)["translation"]["en"] for line in lines]
        inputs = tokenizer(asked, max_length=40, truncation=True, padding=True, return_tensors="pt")
        found = model.generate(**inputs, num_beams=4, max_length=40)
        self.assertEqual([text for _, text in shown], tokenizer.batch_decode(found, skip_special_tokens=True))

    def test_TuningGoesOnFromACheckpointWithTheSameBits(self):
        self.run_commands("llama_sft", "llama")
        self.assert_trained(transformers.AutoModelForCausalLM, "tiny-llama", "tuned")
        out = self.folder / "tuned"
        states = {path: json.loads((path / "trainer_state.json").read_text()) for path in out.glob("checkpoint-*")}
        last = max(states, key=lambda path: states[path]["epoch"])
        self.assertEqual([3, 4], sorted(round(state["epoch"]) for state in states.values()))  # the two newest
        losses = [entry["eval_loss"] for entry in states[last]["log_history"] if "eval_loss" in entry]
        self.assertLess(losses[-1], losses[0])
        whole = sha256(out)
        shutil.rmtree(last)
        (out / "model.safetensors").unlink()
        self.run_example("llama_sft", *commands("llama_sft")[-1])
        self.assertEqual(whole, sha256(out))

    @unittest.skipIf(NO_PEFT, "no peft in this Python; `pip install peft` brings it")
    def test_AdaptersAreTrainedOverTheBaseAndResumedWithTheSameBits(self):
        import peft
        said, folder = self.run_commands("lora_nvme", "llama"), self.folder / "tiny-llama"
        losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", said, re.MULTILINE)]
        self.assertEqual(10, len(losses))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rows = self.imported("lora_nvme").rows_of(EXAMPLES / "data/instructions.jsonl", tokenizer, 1024)

        def loss_of(model, rows):
            with torch.no_grad():
                return model(**transformers.DataCollatorForSeq2Seq(tokenizer)(rows)).loss.item()

        # Adapters begin as nothing, so the first loss is the base's; it shows that of a step's last micro-batch.
        base, shuffled = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), random.Random(0)
        batches = [shuffled.sample(rows, 2) for _ in range(4)]
        self.assertAlmostEqual(loss_of(base, batches[-1]), losses[0], delta=2e-4)
        alone = loss_of(base, rows)
        adapted = peft.PeftModel.from_pretrained(base, self.folder / "adapters").eval()
        self.assertLess(loss_of(adapted, rows), alone - 0.01)

        options, = commands("lora_nvme")
        options[options.index("adapters")] = "parts"
        options[options.index("10")] = str(min(STEPS, 9))
        self.run_example("lora_nvme", *options)
        options[-1] = "10"
        self.run_example("lora_nvme", *options, "--resume")
        self.assertEqual(*(sha256(self.folder / name, "adapter_model.safetensors") for name in ("adapters", "parts")))

    def test_TheOptimizersLoopRuns(self):
        shutil.copy(ROOT / "LICENSE", self.folder)
        self.assertIn("step 40", self.run_shown("adamw_loop"))

    @unittest.skipUnless(importlib.util.find_spec("lightning"), "no lightning in this Python; pip brings it")
    def test_LightningRuns(self):
        try:
            import torch.distributed._shard.sharded_tensor  # noqa: F401
        except ValueError:
            self.skipTest("Lightning needs a part of PyTorch 1.13 that Python 3.11 cannot import; the program's own "
                          "suite puts something in its place")
        shutil.copy(ROOT / "LICENSE", self.folder)
        self.run_commands("lightning_finetune", "llama")
        self.assert_trained(transformers.AutoModelForCausalLM, "tiny-llama", "lightning")

    def test_EveryProgramIsShown(self):
        for path in EXAMPLES.glob("*.py"):
            self.assertTrue(commands(path.stem), path.name)

    def test_CountsCompletionsAlone(self):
        tokens_of = self.imported("llama_sft").tokens_of
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
        row = tokens_of("What is it?", "A dog.", tokenizer, 100)
        counted = [one for one, label in zip(row["input_ids"], row["labels"]) if label != -100]
        self.assertEqual("A dog.</s>", tokenizer.decode(counted))
        self.assertEqual("What is it?\nA dog.</s>", tokenizer.decode(row["input_ids"]))
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}" \
            "{% if add_generation_prompt %}<assistant>{% endif %}"
        if importlib.util.find_spec("jinja2"):
            row = tokens_of("What is it?", "A dog.", tokenizer, 100)
            self.assertEqual("<user>What is it?<assistant>A dog.", tokenizer.decode(row["input_ids"]))
            self.assertEqual(len("<user>What is it?<assistant>"), row["labels"].count(-100))


if __name__ == "__main__":
    main()
