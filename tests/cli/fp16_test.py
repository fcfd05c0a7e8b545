"""Training in fp16 as a user sees it: skipped steps in line and log, runs that are interrupted around them, models that
come and go in fp16."""
import json
import pathlib
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import EMULATED, CliTest, sha256_of_model, spillway  # noqa: E402

STEPS = 9
# The first steps overflow; every third without an overflow doubles the scale.
SCALE = {"initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 2}


def dtypes(folder):
    data = (pathlib.Path(folder) / "model.safetensors").read_bytes()
    header = json.loads(data[8:8 + struct.unpack("<Q", data[:8])[0]])
    return {tensor["dtype"] for name, tensor in header.items() if name != "__metadata__"}


class Fp16(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.out = self.place.folder / "out"

    def config(self, **more):
        return self.place.config(**{"dtype": "fp16", "fp16": SCALE, **more})

    def train(self, config, **more):
        done = self.place.finetune(config, self.model, **{"steps": STEPS, "log": self.place.log, **more})
        self.assert_done(done)
        return done

    def scales(self):
        return [(s["step"], s["loss_scale"], s["skipped"], s["loss"], s["grad_norm"], s["lr"])
                for s in self.place.steps()]

    def test_SkippedStepsAreShownAndARunInterruptedAroundThemIsTheSame(self):
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 4}}
        done = self.train(self.config(scheduler=schedule), out=self.out)
        whole, bits = self.scales(), sha256_of_model(self.out)
        skipped = [step[2] for step in whole]
        self.assertTrue(skipped[0] and skipped[1] and not all(skipped), whole)
        self.assertEqual([2 ** 18, 2 ** 18, 2 ** 17], [step[1] for step in whole[:3]], "hysteresis 2")
        self.assertRegex(done.out, r"step 1/9  loss \d+\.\d+  norm overflowed, skipped  loss scale 262144  lr 0 ")
        self.assertRegex(done.err, r"step 1 is skipped: NaN or Inf in the gradient of \S+ of block \S+.* at loss scale")
        # The schedule has not seen them: the rates of the others are those of a run without them.
        self.place.log.unlink()
        self.train(self.config(dtype="bf16", scheduler=schedule), fresh=True)
        rates = [step["lr"] for step in self.place.steps()]
        self.assertEqual(rates[:skipped.count(False)], [step[5] for step in whole if not step[2]])
        for before, after in zip(whole, whole[1:]):
            self.assertTrue(not before[2] or before[5] == after[5], (before, after))
        # Each step in a process of its own; on an emulated GPU, which takes minutes for that, every fourth begins one.
        every = 4 if EMULATED else 1
        sections = ({}, {"commit_every": 2}, {"speculative_blocks": 4})
        for section in sections[:1] if EMULATED else sections:
            with self.subTest(**section):
                config = self.config(scheduler=schedule, clip=0.5, spillway_section=section)
                self.place.log.unlink()
                for last in range(1, STEPS + 1, every):
                    self.train(config, steps=last, **({"fresh": True} if last == 1 else {"resume": True}),
                               out=self.out if last == STEPS else None)
                self.assertEqual(whole, self.scales())
                self.assertEqual(bits, sha256_of_model(self.out))

    def test_TheStoreShowsItsScale(self):
        self.train(self.config(), steps=3)
        scales = self.scales()
        shown = spillway("store", self.place.nvme)
        self.assert_done(shown)
        skipped = sum(step[2] for step in scales)
        self.assertRegex(shown.out, rf"scale +\d+ is the loss scale of the next step; {skipped} steps skipped so far")
        self.assertIn('step      3, with "row 6 of sequence 32 of data of ', shown.out)
        facts = json.loads(spillway("store", self.place.nvme, "--json").out)
        self.train(self.config(), steps=4, resume=True)
        self.assertEqual(self.scales()[-1][1], facts["loss_scale"])
        self.assertEqual(skipped, facts["skipped_steps"])

    def test_ASnapshotGoesOnWithTheScale(self):
        saved = self.place.folder / "saved"
        self.train(self.config(), out=self.out, save=saved, every=3)
        whole, bits = self.scales(), sha256_of_model(self.out)
        self.assertEqual({"F32"}, dtypes(saved / "step-000003"))
        for step in (3, 6):
            self.place.log.unlink()
            self.train(self.config(parameters="cpu", states="cpu"), out=self.out, load=saved / f"step-{step:06}")
            self.assertEqual(whole[step:], self.scales())
            self.assertEqual(bits, sha256_of_model(self.out))

    def test_AnFp16ModelIsTrainedAndExported(self):
        self.model = self.place.init_model("half", dtype="fp16")
        self.assertEqual({"F16"}, dtypes(self.model))
        self.train(self.config(), out=self.out)
        self.assertEqual({"F32"}, dtypes(self.out))
        half, exact = self.place.folder / "exported-half", self.place.folder / "exported"
        self.assert_done(spillway("export", self.place.nvme, half, "--dtype", "fp16"))
        self.assertEqual({"F16"}, dtypes(half))
        self.assert_done(spillway("export", self.place.nvme, exact))
        self.assertEqual(sha256_of_model(self.out), sha256_of_model(exact))
        # The 16-bit weights are what training goes on from, but for the states.
        self.model = half
        self.train(self.config(parameters="none", states="none"), steps=1)

    def test_AWeightThatFp16DoesNotHoldIsRefusedBeforeTheStoreThatIsThere(self):
        self.train(self.config(), steps=2)
        file = self.model / "model.safetensors"
        data = bytearray(file.read_bytes())
        length, = struct.unpack("<Q", data[:8])
        tensor = json.loads(data[8:8 + length])["transformer.h.1.mlp.c_fc.bias"]
        at = 8 + length + tensor["data_offsets"][0] + 8
        data[at:at + 4] = struct.pack("<f", -70000.0)
        file.write_bytes(data)
        line = self.assert_refused(self.place.finetune(self.config(), self.model, fresh=True),
                                   "transformer.h.1.mlp.c_fc.bias holds -70000, and fp16 ends at 65,504")
        self.assertIn(str(file), line)
        self.assertIn('step      2, with', spillway("store", self.place.nvme).out)
        self.assert_done(self.place.finetune(self.place.config(dtype="bf16"), self.model, steps=1, fresh=True))

    def test_WhatContradictsItselfIsRefused(self):
        config = self.config(bf16={"enabled": True})
        self.assert_refused(self.place.finetune(config, self.model), "fp16.enabled: contradicts bf16.enabled")


if __name__ == "__main__":
    main()
