"""What a training step asks of CUDA, as the emulated GPU wrote it down: nothing that would make the GPU wait for the
host without need."""
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli")]
from report import main  # noqa: E402
from runs import CliTest  # noqa: E402

# Each of these stops all of the GPU's work, or takes memory that no plan knows.
STOPPING = ("cudaMalloc", "cudaFree", "cudaDeviceSynchronize", "cudaHostRegister", "cudaHostUnregister",
            "cudaStreamCreate", "cudaStreamDestroy", "cudaEventCreate")


class GpuCalls(CliTest):
    def calls(self, **how):
        log = self.place.folder / "calls"
        done = self.place.finetune(self.place.config(**how), self.place.init_model(),
                                   {"SPILLWAY_EMULATED_GPU_LOG": str(log)}, steps=3, fresh=True)
        self.assert_done(done)
        calls = log.read_text().splitlines()
        steps = [i for i, call in enumerate(calls) if call.startswith("product")]
        self.assertGreater(len(steps), 3 * 2 * 3 * 12, "the trainer's matrix products")
        return calls, calls[steps[0]:steps[-1]]

    def check(self, **how):
        calls, in_steps = self.calls(**how)
        self.assertEqual([], [call for call in in_steps if call.startswith(STOPPING)])
        self.assertEqual([], [call for call in calls if "pageable" in call or "default stream" in call])
        self.assertTrue(any(call.startswith(STOPPING) for call in calls), "the log shows such calls at all")

    def test_StepsOnNvmeAllocateNothingAndStopNothing(self):
        self.check(parameters="nvme", states="nvme")

    def test_StepsInHbmAllocateNothingAndStopNothing(self):
        self.check(parameters="none", states="none")


if __name__ == "__main__":
    main()
