"""A GPU that dies in the middle of a step: the run ends with an error, and the store goes on from its last commit."""
import os
import pathlib
import random
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli")]
from report import main  # noqa: E402
from runs import CRASH, CliTest, sha256_of_model  # noqa: E402
from seed import test_seed  # noqa: E402

STEPS = 3
DEATH = re.compile(r"^spillway: (GPU|cuBLASLt): .* failed: (an illegal memory access was encountered|"
                   r"CUBLAS_STATUS_EXECUTION_FAILED); .*; a store is at its last commit$")
DEATHS = int(os.environ.get("SPILLWAY_CASES", "12"))


class GpuDeath(CliTest):
    def run_with(self, config, environment, **how):
        return self.place.finetune(config, self.model, environment, steps=STEPS, out=self.place.folder / "out", **how)

    def check(self, **how):
        random.seed(test_seed())
        self.model = self.place.init_model()
        config = self.place.config(**how)
        log = self.place.folder / "calls"
        self.assert_done(self.run_with(config, {"SPILLWAY_EMULATED_GPU_LOG": str(log)}, fresh=True))
        wanted = sha256_of_model(self.place.folder / "out")
        calls = log.read_text().splitlines()
        first_step = next(i for i, call in enumerate(calls) if call.startswith("product"))
        resumed = 0
        # One in each part of the run, and none near its end: a run that is faster makes fewer calls, since some poll.
        most = len(calls) * 3 // 4 - first_step
        for death in range(DEATHS):
            at = first_step + random.randrange(most * death // DEATHS, most * (death + 1) // DEATHS)
            with self.subTest(dies_at_call=at):
                died = self.run_with(config, {"SPILLWAY_EMULATED_GPU_DIES_AT": str(at)}, fresh=True)
                self.assertEqual(1, died.status, died.out + died.err)
                self.assertIsNone(CRASH.search(died.out + died.err), died.err)
                self.assertRegex(died.err.splitlines()[-1], DEATH)
                done = self.run_with(config, {}, resume=True)
                self.assert_done(done)
                self.assertEqual(wanted, sha256_of_model(self.place.folder / "out"))
                resumed += f"\nstep 1/{STEPS} " not in done.out
        self.assertGreater(resumed, 0, "every run began anew")

    def test_ARunFromNvmeGoesOnWithTheSameBits(self):
        self.check(parameters="nvme", states="nvme")

    def test_ARunWithStatesOnNvmeGoesOnWithTheSameBits(self):
        self.check(parameters="cpu", states="nvme")


if __name__ == "__main__":
    main()
