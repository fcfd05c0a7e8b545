"""The short form of tools/kill_sweep.py: a few kills at random moments, and the bits of a run never killed."""
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
from kill_sweep import KillSweep  # noqa: E402
from report import main  # noqa: E402
from runs import BINARY, CliTest, test_seed  # noqa: E402


class Kills(CliTest):
    def sweep(self, dtype, kills):
        kills = int(os.environ.get("SPILLWAY_KILLS", kills))
        sweep = KillSweep(BINARY, self.place.folder / "kills", test_seed(), print, dtype)
        sweep.run(kills)
        self.assertEqual(kills, sweep.kills)
        self.assertGreater(sweep.ends, 0)

    def test_EveryKilledRunEndsWithTheBitsOfOneThatWasNot(self):
        self.sweep("bf16", 8)

    def test_EveryKilledRunInFp16EndsWithTheBitsOfOneThatWasNot(self):
        self.sweep("fp16", 4)


if __name__ == "__main__":
    main()
