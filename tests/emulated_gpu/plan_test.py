"""What the program says beforehand of a run on the cuda device is what the run says: its operations are asked for their
scratch memory, not those of the host device. And a GPU that cannot serve is refused beforehand."""
import json
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli")]
from report import main  # noqa: E402
from runs import CliTest, sha256_of_model, spillway  # noqa: E402


class SaidBefore(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def test_TheDoctorAndThePlanRefuseWithTheBudgetOfTheRun(self):
        config = self.place.config(spillway_section={"hbm_bytes": "64KiB"})
        run = ["--config", config, "--model", self.model, "--seq", 32]
        refused = spillway(*self.place.arguments(config, run[3], steps=1))
        self.assert_refused(refused, "hbm_bytes")
        said = json.loads(spillway("doctor", *run, "--no-probe", "--json").out)["findings"]
        plan = next(finding for finding in said if finding["check"] == "plan")
        self.assertEqual(refused.err, f"spillway: {plan['seen']}; {plan['repair']}\n")
        self.assertEqual(refused.err, f"spillway: {json.loads(spillway('plan', *run, '--json').out)['refused']}\n")

    def refused_by(self, environment):
        run = self.finetune(self.place.config(), environment)
        self.assertEqual([], self.place.stored_files())
        return run

    def finetune(self, config, environment, **options):
        return self.place.finetune(config, self.model, environment, steps=1, fresh=True, **options)

    def test_AGpuThatThereIsNoCodeForIsRefusedBeforeAnythingIsWritten(self):
        why = "the GPU is of compute capability {}, and this was built for 8.0, 8.6, 9.0"
        self.assert_refused(self.refused_by({"SPILLWAY_EMULATED_GPU_SM": "75"}), "spillway.device", why.format("7.5"))
        auto = self.place.config(spillway_section={"device": "auto"})
        run = self.finetune(auto, {"SPILLWAY_EMULATED_GPU_SM": "75"})
        self.assert_done(run)
        self.assertIn(f"no cuda device: {why.format('7.5')}\n", run.out)
        for sm in ("89", "120"):  # code of its family, and what the driver makes of PTX
            self.assert_done(self.finetune(self.place.config(), {"SPILLWAY_EMULATED_GPU_SM": sm}))

    def test_AGpuThatIsCurrentIsTakenAndNoOtherTouched(self):
        place = {"parameters": "nvme", "states": "nvme"}
        self.assert_done(self.finetune(self.place.config(**place), {}, out=self.place.folder / "first"))
        current = {"SPILLWAY_EMULATED_GPUS": "2", "SPILLWAY_EMULATED_GPU_CURRENT": "1",
                   "SPILLWAY_EMULATED_GPU_SPARED": "0"}
        self.assert_done(self.finetune(self.place.config(**place), current, out=self.place.folder / "second"))
        self.assertEqual(*(sha256_of_model(self.place.folder / name) for name in ("first", "second")))


if __name__ == "__main__":
    main()
