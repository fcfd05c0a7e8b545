"""What the suites of the Python package share: where it is, PyTorch, and a case with a folder of its own.

Import it first: where there is no PyTorch, it reports the suite as skipped and ends the program.
"""
import importlib
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]
from report import main  # noqa: E402


def need(module, reason):
    """Where the module is missing, the suite is reported as skipped, and the program ends."""
    try:
        importlib.import_module(module)
    except ImportError:
        class Everything(unittest.TestCase):
            @unittest.skip(reason)
            def test_ThatNeedsWhatIsMissing(self):
                pass

        sys.modules["__main__"].Everything = Everything
        main()


need("torch", "no Python with PyTorch here; `apt-get install python3-torch` brings one")

import spillway  # noqa: E402
from toy_model import config  # noqa: E402


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="spillway-python-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def engine(self, network, configuration=None, **options):
        made = spillway.Engine(network, configuration or config(self.folder), **options)
        self.addCleanup(made.close)
        return made

    def assert_error(self, pattern, function, *arguments, **options):
        with self.assertRaisesRegex(spillway.Error, pattern) as raised:
            function(*arguments, **options)
        return raised.exception

    def assert_links_move_the_same(self, one, other):
        """Reports of two runs' steps."""
        moved = [[(r.visits, r.unplanned_visits, r.h2d_bytes, r.d2h_bytes, r.nvme_write_bytes) for r in reports]
                 for reports in (one, other)]
        read = [sum(r.nvme_read_bytes for r in reports) for reports in (one, other)]
        self.assertEqual(*moved)
        self.assertGreater(read[0], 0)
        self.assertLess(abs(read[1] - read[0]), read[0] / 8)  # what was read ahead of the next step
