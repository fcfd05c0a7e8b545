"""The model families of transformers train natively: the same losses and norms as there, step by step, and the same
bits wherever tensors live. The values were made by tools/compare_pytorch.sh --write; tests/references/README.md."""
import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import ROOT, CliTest, sha256_of_model  # noqa: E402

STEPS = int(os.environ.get("SPILLWAY_STEPS", "20"))  # of the 20 that there are
FAMILIES = ROOT / "tests/references/families"
LOSS = {"fp32": 1e-5, "bf16": 1e-2}
NORM = {"fp32": 1e-4, "bf16": math.inf}


class Families(CliTest):
    def check(self, family, dtype):
        about, *wanted = [json.loads(line) for line in (FAMILIES / f"{family}_{dtype}.jsonl").read_text().splitlines()]
        self.assertEqual(20, len(wanted), about)
        model = self.place.init_family(family)
        config = self.place.config(dtype=dtype, micro=about["batch"], accumulation=1, clip=1.0, lr=about["lr"])
        self.place.log.unlink(missing_ok=True)
        self.assert_done(self.place.finetune(config, model, steps=STEPS, seq=about["seq"], log=self.place.log,
                                             fresh=True))
        for got, reference in zip(self.place.steps(), wanted[:STEPS], strict=True):
            with self.subTest(step=reference["step"], dtype=dtype):
                self.assertLessEqual(abs(got["loss"] / reference["loss"] - 1), LOSS[dtype])
                self.assertLessEqual(abs(got["grad_norm"] / reference["grad_norm"] - 1), NORM[dtype])


def trains_like_transformers(family):
    def test(self):
        for dtype in ("fp32", "bf16"):
            self.check(family, dtype)
            (self.place.folder / family).rename(self.place.folder / f"{family}-{dtype}")
    return test


class SameBits(CliTest):
    """Of every family, in one micro-batch after another, wherever it lives."""

    def hash_of(self, model, *, steps=4, resume_at=None, **config):
        out = self.place.folder / "out"
        how = {"seq": 48, "out": out}
        path = self.place.config(micro=2, accumulation=2, **config)
        if resume_at:
            self.assert_done(self.place.finetune(path, model, steps=resume_at, fresh=True, **how))
        self.assert_done(self.place.finetune(path, model, steps=steps, resume=bool(resume_at),
                                             fresh=not resume_at and config.get("states") == "nvme", **how))
        return sha256_of_model(out)

    def check(self, family):
        model = self.place.init_family(family)
        everything = {"parameters": "none", "states": "none"}
        wanted = self.hash_of(model, **everything)
        self.assertEqual(wanted, self.hash_of(model, **everything, spillway_section={"threads": 1}))
        self.assertEqual(wanted, self.hash_of(model, parameters="cpu", states="cpu"))
        self.assertEqual(wanted, self.hash_of(model, parameters="nvme", states="nvme"))
        self.assertEqual(wanted, self.hash_of(model, parameters="nvme", states="nvme", resume_at=2))


def has_the_same_bits(family):
    return lambda self: self.check(family)


for file in sorted(FAMILIES.glob("*.json")):
    name = "".join(part.capitalize() for part in file.stem.split("_"))
    setattr(Families, f"test_{name}TrainsLikeTransformers", trains_like_transformers(file.stem))
    setattr(SameBits, f"test_{name}HasTheSameBitsInEveryTier", has_the_same_bits(file.stem))


if __name__ == "__main__":
    main()
