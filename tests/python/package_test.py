"""The package as pip installs it: with its own library and program, without PyTorch, and where it is not served."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402


class Package(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="spillway-package-")
        self.addCleanup(folder.cleanup)
        self.site = pathlib.Path(folder.name)
        self.package = self.site / "spillway"
        shutil.copytree(ROOT / "python/spillway", self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def install(self):
        """What pip puts beside the package's own files."""
        for place, file in (("bin/spillway", "SPILLWAY_BINARY"), ("lib/libspillway.so.0", "SPILLWAY_LIBRARY")):
            path = self.package / place
            path.parent.mkdir()
            path.symlink_to(pathlib.Path(os.environ[file]).resolve())
        for place in ("lib/cmake/spillway", "lib/pkgconfig"):
            (self.package / place).mkdir(parents=True)

    def python(self, *arguments):
        """A Python that sees the standard library and this package: no PyTorch, and no library by its environment."""
        environment = {name: value for name, value in os.environ.items() if name != "SPILLWAY_LIBRARY"}
        start = f"import sys; sys.path.insert(0, {str(self.site)!r}); "
        if arguments[0] == "-c":
            arguments = ("-c", start + arguments[1], *arguments[2:])
        else:
            run = f"import runpy; sys.argv = {['spillway', *arguments]!r}; "
            arguments = ("-c", start + run + "runpy.run_module('spillway', run_name='__main__', alter_sys=False)")
        return subprocess.run([sys.executable, "-I", "-S", *arguments], capture_output=True, text=True, check=False,
                              timeout=120, env=environment)

    def assert_fails(self, pattern, *arguments):
        done = self.python(*arguments)
        self.assertNotEqual(0, done.returncode, done.stdout)
        self.assertRegex(done.stderr, pattern)

    def test_ItsOwnLibraryIsLoaded(self):
        self.install()
        done = self.python("-c", "import spillway; print(spillway.library.library().model_create() != 0);"
                                 "maps = open('/proc/self/maps').read().splitlines();"
                                 "print([line.split()[-1] for line in maps if 'libspillway' in line][0])")
        self.assertEqual(0, done.returncode, done.stderr)
        library = pathlib.Path(os.environ["SPILLWAY_LIBRARY"]).resolve()
        self.assertEqual(f"True\n{library}\n", done.stdout)

    def test_ItsProgramNeedsNoPyTorch(self):
        self.install()
        done = self.python("--version")
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertRegex(done.stdout, r"^spillway \d+\.\d+\.\d+\n")
        self.assertIn("paths is required", self.python("sweep").stderr)  # in the program's own words

    def test_ItSaysWhereOtherProgramsFindIt(self):
        self.install()
        for option, place in (("--cmake-dir", "lib/cmake/spillway"), ("--pkgconfig-dir", "lib/pkgconfig")):
            self.assertEqual(f"{self.package / place}\n", self.python(option).stdout)

    def test_ACheckoutHasNone(self):
        self.assert_fails(r"bin/spillway is not there, so this package was not installed; `pip install \.`", "sweep")
        self.assert_fails(r"lib/cmake/spillway is not there, so this package was not installed", "--cmake-dir")

    def test_WhatNeedsPyTorchSaysSo(self):
        self.assert_fails(r"ImportError: spillway\.Engine: PyTorch is not installed; `pip install torch` brings it",
                          "-c", "import spillway; spillway.Engine")
        self.assert_fails("has no attribute 'Motor'", "-c", "import spillway; spillway.Motor")

    def test_AnOldPyTorchIsRefused(self):
        (self.site / "torch.py").write_text("__version__ = '1.12.1+cpu'\n")
        self.assert_fails(r"ImportError: spillway\.Engine: this is PyTorch 1\.12\.1\+cpu; install 1\.13 or newer",
                          "-c", "import spillway; spillway.Engine")

    def test_AnOldPythonIsRefused(self):
        self.assert_fails(r"ImportError: spillway: this is Python 3\.\S+; use Python 3\.10 or newer",
                          "-c", "sys.version_info = (3, 9, 2); import spillway")


if __name__ == "__main__":
    main()
