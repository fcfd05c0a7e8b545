"""A configuration that names no device trains on a GPU."""
import json
import pathlib
import sys

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli")]
from report import main  # noqa: E402
from runs import CliTest  # noqa: E402


class NamedDevice(CliTest):
    def test_AGpuTrainsUnlessTheHostIsNamed(self):
        model = self.place.init_model()
        for device, on in ((None, "cuda"), ("host", "host"), ("auto", "cuda")):
            with self.subTest(device=device):
                config = self.place.config()
                values = json.loads(config.read_text())
                del values["spillway"]["device"]
                if device:
                    values["spillway"]["device"] = device
                config.write_text(json.dumps(values))
                run = self.place.finetune(config, model, steps=1, fresh=True)
                self.assert_done(run)
                self.assertIn(f"device: {on}", run.out)
                self.assertEqual(on == "cuda", "hbm_bytes is not set: " in run.out)
                self.assertNotIn("beside an idle GPU", run.err)


if __name__ == "__main__":
    main()
