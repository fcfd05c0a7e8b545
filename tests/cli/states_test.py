"""Moments in bf16 and int8 as a user has them: the same bits in every layout, killed runs, conversions, refusals."""
import json
import pathlib
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CliTest, sha256_of_model, spillway  # noqa: E402

FORMS = ("bf16", "int8")
STEPS = 6


class States(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.out = self.place.folder / "out"

    def config(self, form, parameters="nvme", states="nvme", **section):
        return self.place.config(parameters=parameters, states=states, spillway_section={"states": form, **section})

    def train(self, config, **how):
        self.assert_done(self.place.finetune(config, self.model, steps=STEPS, out=self.out, **how))
        return sha256_of_model(self.out)

    def test_EveryLayoutTrainsTheSameBits(self):
        exact = self.train(self.config("fp32"), fresh=True)
        for form in FORMS:
            wanted = self.train(self.config(form), fresh=True)
            self.assertNotEqual(exact, wanted)
            for layout in ({"parameters": "none", "states": "none"}, {"parameters": "cpu", "states": "cpu"},
                           {"parameters": "cpu", "states": "nvme", "threads": 1, "tile_elements": 8192}):
                fresh = "nvme" in layout.values()
                self.assertEqual(wanted, self.train(self.config(form, **layout), fresh=fresh), layout)

    def test_AKilledRunGoesOnToTheBitsOfOneThatWasNot(self):
        for form in FORMS:
            config = self.config(form)
            wanted = self.train(config, fresh=True)
            arguments = self.place.arguments(config, self.model, steps=STEPS, out=self.out, log=self.place.log,
                                             fresh=True)
            self.place.log.unlink(missing_ok=True)
            with subprocess.Popen([BINARY, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
                while run.poll() is None and not (self.place.log.exists() and len(self.place.steps()) >= 2):
                    time.sleep(0.005)
                run.kill()
            # Waits, as the kernel may hold a dead process's files for a moment.
            self.assertEqual(wanted, self.train(config, resume=True), form)
            verified = spillway("store", self.place.nvme, "--verify", "--json")
            self.assert_done(verified)
            self.assertEqual(form, json.loads(verified.out)["states"])

    def test_AnotherFormIsRefusedOnResumeAndConvertedFromASnapshot(self):
        saved = self.place.folder / "saved"
        config = self.config("fp32")
        self.assert_done(self.place.finetune(config, self.model, steps=2, fresh=True, save=saved, every=2))
        snapshot = next(path.parent for path in saved.rglob("spillway.json"))
        for form in FORMS:
            config = self.config(form)
            done = self.place.finetune(config, self.model, steps=STEPS, resume=True)
            self.assert_refused(done, f"made with fp32 states (here: {form})", "--load SNAPSHOT")
            done = self.place.finetune(config, self.model, steps=STEPS, load=snapshot, fresh=True)
            self.assert_done(done)
            self.assertEqual(1, (done.out + done.err).count(f"its fp32 states become {form}"))
            self.assertIn(f"optimizer Adam, {form} states;", spillway("store", self.place.nvme).out)
            self.assert_done(self.place.finetune(self.config("fp32"), self.model, steps=2, fresh=True))

    def test_WhatIsNoFormIsRefusedByTheKey(self):
        config = self.config("int4")
        self.assert_refused(self.place.finetune(config, self.model, fresh=True), "spillway.states", "fp32, bf16, int8")
        config = self.config("int8", exact_states=["no.such*"])
        self.assert_refused(self.place.finetune(config, self.model, fresh=True), "spillway.exact_states", "no.such*")
        values = json.loads(self.config("bf16").read_text())
        values["optimizer"] = {"type": "SGD"}
        config.write_text(json.dumps(values))
        self.assert_refused(self.place.finetune(config, self.model, fresh=True), "spillway.states", "SGD")


if __name__ == "__main__":
    main()
