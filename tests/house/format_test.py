"""The C++ source is formatted as .clang-format says."""
import pathlib
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402
sys.path.insert(0, str(ROOT / "tests/house"))
from rules import CODE, source_files  # noqa: E402

# Other versions break lines elsewhere; this is Debian 12's.
VERSION = "version 14."


class Format(unittest.TestCase):
    def test_SourceIsFormatted(self):
        program = shutil.which("clang-format-14") or shutil.which("clang-format")
        if not program:
            self.skipTest("clang-format is not installed")
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
        if VERSION not in version:
            self.skipTest(f"{version} is not the version the source is formatted with ({VERSION}x)")
        files = [str(f) for f in source_files(ROOT) if f.suffix in CODE]
        done = subprocess.run([program, "--dry-run", *files], cwd=ROOT, capture_output=True, text=True, check=False)
        wrong = sorted({line.split(":")[0] for line in done.stderr.splitlines() if "clang-format-violations" in line})
        self.assertEqual((0, []), (done.returncode, wrong), "run clang-format -i on these files")


if __name__ == "__main__":
    main()
