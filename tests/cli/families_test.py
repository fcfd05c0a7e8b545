"""The model families of transformers train natively: the same losses and norms as there, step by step, and the same
bits wherever tensors live. The values were made by tools/compare_pytorch.sh --write; tests/references/README.md."""
import json
import math
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import EMULATED, ROOT, CliTest, sha256_of_model, spillway  # noqa: E402

STEPS = int(os.environ.get("SPILLWAY_STEPS", "20"))  # of the 20 that there are
HALF = 2 if STEPS >= 4 else 1  # of the steps of a run whose bits are compared
FAMILIES = ROOT / "tests/references/families"
LOSS = {"fp32": 1e-5, "bf16": 1e-2}
NORM = {"fp32": 1e-4, "bf16": math.inf}


class Families(CliTest):
    def check(self, family, dtype, data=""):
        file = FAMILIES / f"{family}{data}_{dtype}.jsonl"
        about, *wanted = [json.loads(line) for line in file.read_text().splitlines()]
        self.assertEqual(20, len(wanted), about)
        model = self.place.init_family(family)
        config = self.place.config(dtype=dtype, micro=about["batch"], accumulation=1, clip=1.0, lr=about["lr"])
        self.place.log.unlink(missing_ok=True)
        self.assert_done(self.place.finetune(config, model, data=ROOT / about["data"], steps=STEPS, seq=about["seq"],
                                             log=self.place.log, fresh=True))
        for got, reference in zip(self.place.steps(), wanted[:STEPS], strict=True):
            with self.subTest(step=reference["step"], dtype=dtype, data=data):
                self.assertLessEqual(abs(got["loss"] / reference["loss"] - 1), LOSS[dtype])
                self.assertLessEqual(abs(got["grad_norm"] / reference["grad_norm"] - 1), NORM[dtype])


def trains_like_transformers(family):
    def test(self):
        for dtype, data in (("fp32", ""), ("bf16", ""), ("fp32", "_packed")):
            self.check(family, dtype, data)
            (self.place.folder / family).rename(self.place.folder / f"{family}-{dtype}{data}")
    return test


class NewModels(CliTest):
    def test_AConfigurationNamesTheTypeOfTheTensors(self):
        about = json.loads((ROOT / "tests/references/families/llama.json").read_text())
        source = self.place.folder / "config.json"
        source.write_text(json.dumps({**about, "torch_dtype": "bfloat16"}))
        for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
            model = self.place.folder / dtype
            self.assert_done(spillway("init-model", model, "--from", source, "--dtype", dtype))
            self.assertEqual({**about, "torch_dtype": name}, json.loads((model / "config.json").read_text()))


class LongRows(CliTest):
    def test_TheyGoOnAfterTheFilesPositions(self):
        model = self.place.init_family("llama")
        path = self.place.config(parameters="none", states="none")
        losses = []
        for positions in (64, 16):
            config = json.loads((model / "config.json").read_text())
            (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}))
            self.place.log.unlink(missing_ok=True)
            done = self.place.finetune(path, model, steps=1, seq=48, log=self.place.log, out=self.place.folder / "out")
            self.assert_done(done)
            self.assertEqual("rows of 48 tokens are longer than the 16 positions of config.json" in done.out,
                             positions == 16)
            losses.append(self.place.steps()[0]["loss"])
        self.assertEqual(*losses)


class SameBits(CliTest):
    """Of every family, in one micro-batch after another, wherever it lives."""

    def hash_of(self, model, *, steps=2 * HALF, seq=48, resume_at=None, **config):
        out = self.place.folder / "out"
        how = {"seq": seq, "out": out}
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
        self.assertEqual(wanted, self.hash_of(model, parameters="nvme", states="nvme", resume_at=HALF))


    def test_RowsInSlicesDoToo(self):
        model = self.place.init_family("qwen3")
        slices = {"threads": 1, "slice_tokens": 128}
        everything = {"parameters": "none", "states": "none"}
        wanted = self.hash_of(model, seq=250, **everything, spillway_section=slices)
        nvme = {"parameters": "nvme", "states": "nvme", "spillway_section": slices | {"threads": 2}}
        self.assertEqual(wanted, self.hash_of(model, seq=250, **nvme))
        self.assertEqual(wanted, self.hash_of(model, seq=250, **nvme, resume_at=HALF))
        if EMULATED:
            return  # the losses are looked at by the suite of the operations

        def losses(slice_tokens):
            self.place.log.unlink(missing_ok=True)
            path = self.place.config(micro=2, accumulation=2, dtype="fp32", **everything,
                                     spillway_section={"slice_tokens": slice_tokens})
            self.assert_done(self.place.finetune(path, model, steps=2 * HALF, seq=250, log=self.place.log))
            return [step["loss"] for step in self.place.steps()]
        for one, other in zip(losses(128), losses(0), strict=True):
            self.assertLessEqual(abs(one / other - 1), 1e-5)


def has_the_same_bits(family):
    return lambda self: self.check(family)


for file in sorted(FAMILIES.glob("*.json")):
    name = "".join(part.capitalize() for part in file.stem.split("_"))
    setattr(Families, f"test_{name}TrainsLikeTransformers", trains_like_transformers(file.stem))
    setattr(SameBits, f"test_{name}HasTheSameBitsInEveryTier", has_the_same_bits(file.stem))


if __name__ == "__main__":
    main()
