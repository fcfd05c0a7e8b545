"""Training equals PyTorch's, step by step. The values were made by tools/compare_pytorch.sh --write, which says how in
the first line of each file; the model is made anew by `spillway init-model`, the text is LICENSE."""
import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import ROOT, CliTest  # noqa: E402

STEPS = int(os.environ.get("SPILLWAY_STEPS", "20"))  # of the 20 that there are
REFERENCES = ROOT / "tests/references"
# PyTorch differs from itself (threads, instruction sets) by 2e-7 in the loss and 1e-6 in the norm in fp32. In bf16
# every operation rounds to 8 bits, in an order that is PyTorch's own.
LOSS = {"fp32": 1e-5, "bf16": 1e-2}
NORM = {"fp32": 1e-4, "bf16": math.inf}


class Reference(CliTest):
    def check(self, dtype):
        text = (REFERENCES / f"gpt2_4x256_{dtype}.jsonl").read_text()
        about, *wanted = [json.loads(line) for line in text.splitlines()]
        self.assertEqual(20, len(wanted), about)
        model = self.place.init_model(layers=4, width=256, heads=4, vocab=50257, context=256)
        config = self.place.config(dtype=dtype, micro=4, accumulation=1, clip=1.0, lr=3e-4)
        self.assert_done(self.place.finetune(config, model, steps=STEPS, seq=256, log=self.place.log))
        for got, reference in zip(self.place.steps(), wanted[:STEPS], strict=True):
            with self.subTest(step=reference["step"]):
                self.assertEqual(reference["step"], got["step"])
                self.assertLessEqual(abs(got["loss"] / reference["loss"] - 1), LOSS[dtype])
                self.assertLessEqual(abs(got["grad_norm"] / reference["grad_norm"] - 1), NORM[dtype])

    def test_Fp32TrainsLikePyTorch(self):
        self.check("fp32")

    def test_Bf16TrainsLikePyTorch(self):
        self.check("bf16")


if __name__ == "__main__":
    main()
