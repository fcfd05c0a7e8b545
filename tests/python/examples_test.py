"""The PyTorch programs of examples/, run as its README has them, on tiny models that examples/tiny_model.py writes."""
import hashlib
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


class Case(Folder):
    def run_example(self, name, *arguments):
        """In a folder of its own, which is where a store of the shipped configuration lies. Returns what it prints."""
        cpu = ["--cpu"] if DEVICE == "cpu" and name in ("t5_translation", "llama_sft") else []
        command = [sys.executable, EXAMPLES / f"{name}.py", *arguments, *cpu]
        done = subprocess.run([*map(str, command)], cwd=self.folder, capture_output=True, text=True, check=False,
                              timeout=250, env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(0, done.returncode, done.stdout[-3000:] + done.stderr[-3000:])
        return done.stdout

    def tiny(self, kind):
        self.run_example("tiny_model", kind, "model")
        return self.folder / "model"

    def lines_of(self, name, count):
        """The first ones of the shipped data."""
        lines = (EXAMPLES / "data" / name).read_text(encoding="utf-8").splitlines()[:count]
        (self.folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return [json.loads(line) for line in lines]


class Translation(Case):
    def test_TrainsAndEvaluatesByBeamSearch(self):
        self.tiny("t5")
        self.lines_of("en_de.jsonl", 16)
        said = self.run_example("t5_translation", "--model", "model", "--output", "out", "--data", "en_de.jsonl",
                                "--epochs", 1, "--batch", 14 // min(STEPS, 7), "--lr", 1e-2, "--beams", 3,
                                "--max-length", 24)
        self.assertRegex(said, r"'eval_exact': '?0")
        shown = re.findall(r"^(translate English.*?)  ->  (.*)$", said, re.MULTILINE)
        self.assertEqual(2, len(shown))
        # What it shows is what transformers alone generates with the weights that it saved.
        model = transformers.AutoModelForSeq2SeqLM.from_pretrained(self.folder / "out").eval()
        before = transformers.AutoModelForSeq2SeqLM.from_pretrained(self.folder / "model")
        self.assertFalse(torch.equal(before.shared.weight, model.shared.weight))
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder / "out")
        rows = [json.loads(line)["translation"]["en"] for line in open(self.folder / "en_de.jsonl", encoding="utf-8")]
        inputs = tokenizer([f"translate English to German: {row}" for row in rows[-2:]], max_length=24,
                           truncation=True, padding=True, return_tensors="pt")
        found = model.generate(**inputs, num_beams=3, max_length=24)
        self.assertEqual([text for _, text in shown], tokenizer.batch_decode(found, skip_special_tokens=True))


class Tuning(Case):
    def test_GoesOnFromACheckpointWithTheSameBits(self):
        self.tiny("llama")
        self.lines_of("instructions.jsonl", 20)  # 3 whole steps an epoch; some versions take the rest to the next one
        options = ("--model", "model", "--output", "out", "--data", "instructions.jsonl", "--accumulation", 3,
                   "--epochs", 2, "--lr", 1e-2, "--bf16")
        self.run_example("llama_sft", *options)
        whole, out = sha256(self.folder / "out"), self.folder / "out"
        steps = sorted(int(path.name.partition("-")[2]) for path in out.glob("checkpoint-*"))
        self.assertEqual(2, len(steps))
        trained = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
        before = transformers.AutoModelForCausalLM.from_pretrained(self.folder / "model").state_dict()
        self.assertEqual([], [name for name, value in before.items() if torch.equal(value, trained[name].float())])
        shutil.rmtree(out / f"checkpoint-{steps[1]}")
        (out / "model.safetensors").unlink()
        said = self.run_example("llama_sft", *options, "--resume")
        self.assertEqual(whole, sha256(out))
        state = json.loads((out / f"checkpoint-{steps[1]}/trainer_state.json").read_text())
        self.assertLess(state["log_history"][-2]["loss"], state["log_history"][0]["loss"], said)

    def test_CountsCompletionsAlone(self):
        sys.path.insert(0, str(EXAMPLES))
        self.addCleanup(sys.path.remove, str(EXAMPLES))
        from llama_sft import tokens_of
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


@unittest.skipIf(NO_PEFT, "no peft in this Python; `pip install peft` brings it")
class Adapters(Case):
    def test_AreTrainedOverABaseThatTheirModelHas(self):
        import peft
        folder, out = self.tiny("llama"), self.folder / "adapters"
        options = ("--model", "model", "--output", "adapters", "--lr", 2e-2, "--accumulation", 2)
        said = self.run_example("lora_nvme", *options, "--steps", STEPS)
        losses = [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", said, re.MULTILINE)]
        self.assertEqual(STEPS, len(losses))
        whole = sha256(out, "adapter_model.safetensors")

        def loss_of(model, rows):
            collated = transformers.DataCollatorForSeq2Seq(tokenizer)(rows)
            with torch.no_grad():
                return model(**collated).loss.item()

        sys.path.insert(0, str(EXAMPLES))
        self.addCleanup(sys.path.remove, str(EXAMPLES))
        from lora_nvme import rows_of
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        rows = rows_of(EXAMPLES / "data/instructions.jsonl", tokenizer, 1024)
        base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        # Adapters begin as nothing, so the first loss is the base's.
        shuffled = random.Random(0)
        batches = [shuffled.sample(rows, 2) for _ in range(2)]
        self.assertAlmostEqual(loss_of(base, batches[-1]), losses[0], delta=2e-4)
        alone = loss_of(base, rows)
        adapted = peft.PeftModel.from_pretrained(base, out).eval()
        self.assertLess(loss_of(adapted, rows), alone - 0.01)
        # Interrupted and resumed it ends with the same bits.
        self.run_example("lora_nvme", *options, "--steps", STEPS // 2)
        self.run_example("lora_nvme", *options, "--steps", STEPS, "--resume")
        self.assertEqual(whole, sha256(out, "adapter_model.safetensors"))


if __name__ == "__main__":
    main()
