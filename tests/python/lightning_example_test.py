"""examples/lightning_finetune.py as it is shown, on a tiny random model, and the bits of a loop by hand."""
import contextlib
import gc
import io
import os
import runpy
import unittest.mock

os.environ["HF_HUB_OFFLINE"] = "1"
import lightning_case  # first: where there is no Lightning, it ends the program  # noqa: E402
from case import ROOT, main, need  # noqa: E402
from lightning_case import LightningCase, lightning  # noqa: E402

need("transformers", "no transformers in this Python; `pip install transformers` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

from toy_model import DEVICE  # noqa: E402

EXAMPLE = ROOT / "examples/lightning_finetune.py"
LENGTH, BATCH, ACCUMULATION, RATE = 32, 2, 2, 1e-3
transformers.utils.logging.disable_progress_bar()


class Example(LightningCase):
    def setUp(self):
        super().setUp()
        torch.manual_seed(1)
        tokenizer = transformers.ByT5Tokenizer(extra_ids=0)  # whose tokens are bytes
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=1))
        self.model.save_pretrained(self.folder / "model")
        tokenizer.save_pretrained(self.folder / "model")
        self.text = self.folder / "text"
        self.text.write_text(EXAMPLE.read_text()[:32 * 20])

    def run_example(self, output, *more):
        words = ["--model", "model", "--text", "text", "--output", output, "--length", LENGTH, "--batch", BATCH,
                 "--accumulation", ACCUMULATION, "--lr", RATE, *(["--cpu"] if DEVICE == "cpu" else []), *more]
        here = os.getcwd()
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()), \
                    unittest.mock.patch("sys.argv", ["lightning_finetune.py", *map(str, words)]):
                runpy.run_path(str(EXAMPLE), run_name="__main__")
        finally:
            os.chdir(here)
            gc.collect()  # the module, and its engine with it, before the folder goes
        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / output).state_dict()

    def by_hand(self, epochs):
        """The same loop with an engine alone."""
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.folder / "model")
        rows = runpy.run_path(str(EXAMPLE))["rows_of"](self.text.read_text(), tokenizer, LENGTH)
        rows = rows[:-(len(rows) // 10)]
        spared = [name for name, parameter in self.model.named_parameters() if parameter.dim() < 2]
        engine = self.engine(self.model, self.configuration(
            "hand", train_micro_batch_size_per_gpu=BATCH, gradient_accumulation_steps=ACCUMULATION,
            gradient_clipping=1.0, optimizer={"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
            spillway={"parameter_groups": [{"parameters": spared, "lr": RATE, "weight_decay": 0}]}))
        batches = [torch.stack(rows[first:first + BATCH]) for first in range(0, len(rows), BATCH)]
        steps = epochs * -(-len(batches) // ACCUMULATION)
        shown = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], RATE)
        schedule = transformers.get_cosine_schedule_with_warmup(shown, 2, steps)
        for _ in range(epochs):
            for position, batch in enumerate(batches):
                engine.set_learning_rate(schedule.get_last_lr()[0]) if position % ACCUMULATION == 0 else None
                loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
                engine.backward(loss / ACCUMULATION, scale_wrt_gas=False)
                if (position + 1) % ACCUMULATION == 0 or position + 1 == len(batches):
                    engine.step(early=True)
                    schedule.step()
        self.assertEqual(steps, engine.current_step)
        return self.model.state_dict()

    def test_TrainsToTheBitsOfALoopByHandAndGoesOn(self):
        wanted = self.by_hand(2)
        self.assert_weights(wanted, self.run_example("whole", "--nvme", "store", "--epochs", 2))
        self.assertEqual({"epoch=1.ckpt", "last.ckpt"}, {path.name for path in (self.folder / "whole").glob("*.ckpt")})

        def cut(module):
            if module.current_epoch == 1:
                raise RuntimeError("power cut")

        with unittest.mock.patch.object(lightning.pytorch.LightningModule, "on_train_epoch_start", cut):
            with self.assertRaisesRegex(RuntimeError, "power cut"):
                self.run_example("again", "--nvme", "store", "--epochs", 2)
        self.assertFalse((self.folder / "again/config.json").exists())
        self.assert_weights(wanted, self.run_example("again", "--nvme", "store", "--epochs", 2, "--resume"))

    def test_InHostMemoryInBf16(self):
        trained = self.run_example("out", "--bf16", "--epochs", 1)
        self.assertTrue(all(torch.isfinite(value).all() for value in trained.values()))

    def test_ATextThatIsTooShort(self):
        self.text.write_text("short")
        with self.assertRaisesRegex(SystemExit, "--text: has 5 tokens, and two rows of --length 32 are the least"):
            self.run_example("out")


if __name__ == "__main__":
    main()
