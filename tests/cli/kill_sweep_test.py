"""The short form of kill_sweep.py: a few kills at random moments, and the bits of a run never killed."""
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from kill_sweep import KillSweep  # noqa: E402
from report import main  # noqa: E402
from runs import CliTest  # noqa: E402
from seed import test_seed  # noqa: E402


class Kills(CliTest):
    def sweep(self, dtype, kills):
        kills = int(os.environ.get("SPILLWAY_KILLS", kills))
        sweep = KillSweep(self.place.folder / "kills", test_seed(), print, dtype)
        sweep.run(kills)
        self.assertEqual(kills, sweep.kills)
        self.assertGreater(sweep.ends, 0)

    def test_EveryKilledRunEndsWithTheBitsOfOneThatWasNot(self):
        self.sweep("bf16", 8)

    def test_ByHandItAsksForTheProgram(self):
        script = pathlib.Path(__file__).with_name("kill_sweep.py")
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_BINARY"}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(2, done.returncode)
        self.assertIn("error: SPILLWAY_BINARY is not set;", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_EveryKilledRunInFp16EndsWithTheBitsOfOneThatWasNot(self):
        self.sweep("fp16", 4)


if __name__ == "__main__":
    main()
