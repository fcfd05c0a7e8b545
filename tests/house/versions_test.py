"""One version, wherever it stands; and what the public headers say to a compiler that is too old for them."""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402

COMPILER = shlex.split(os.environ.get("SPILLWAY_CXX", "c++"))
PUBLIC = ROOT / "include/spillway"
FOR_C = {"c_api.h", "c_base.h", "c_io.h", "c_ranks.h", "c_tensors.h", "version.h"}


def found(pattern, path):
    return re.search(pattern, (ROOT / path).read_text(), re.MULTILINE)[1]


class Versions(unittest.TestCase):
    def test_AllPlacesAgree(self):
        version = found(r"^  version: '([\d.]+)',$", "meson.build")
        self.assertEqual(version, found(r'^#define SPILLWAY_VERSION "(.+)"$', "include/spillway/version.h"))
        self.assertEqual(version, found(r'^VERSION = "(.+)"', "python/spillway/library.py"))
        for line in (r'^version = "(.+)"$', r'"spillway==([^"]+)"'):
            self.assertEqual(version, found(line, "tools/wheel/cuda/pyproject.toml"))
        self.assertEqual(version, found(r'^cuda = \["spillway-cuda==(.+)"\]$', "pyproject.toml"))
        parts = [found(rf"^#define SPILLWAY_VERSION_{part} (\d+)$", "include/spillway/version.h")
                 for part in ("MAJOR", "MINOR", "PATCH")]
        self.assertEqual(version, ".".join(parts))

    def test_PythonPackageSaysWhatItNeedsAsItsFilesDo(self):
        least = found(r'^requires-python = ">=(.+)"$', "pyproject.toml")
        self.assertIn(f"use Python {least} or newer", (ROOT / "python/spillway/__init__.py").read_text())
        torch = found(r'^torch = \["torch>=(.+)"\]$', "pyproject.toml")
        least = found(r"^LEAST_TORCH = (.+)$", "python/spillway/__init__.py")
        self.assertEqual(torch, ".".join(re.findall(r"\d+", least)))


class OldCompilers(unittest.TestCase):
    @staticmethod
    def first_error(language, header):
        source = f'#include "spillway/{header}"\n'
        done = subprocess.run([*COMPILER, "-fsyntax-only", *language, "-I", str(ROOT / "include"), "-"], input=source,
                              capture_output=True, text=True, check=False)
        return next((line for line in done.stderr.splitlines() if "error:" in line), "")

    def test_HeadersForCPlusPlusAskForItsStandard(self):
        for header in sorted(path.name for path in PUBLIC.glob("*.h") if path.name not in FOR_C):
            with self.subTest(header=header):
                self.assertIn("need C++20; compile with -std=c++20", self.first_error(["-xc++", "-std=c++17"], header))

    def test_HeadersForCTakeAny(self):
        for header in sorted(FOR_C):
            for language in (["-xc++", "-std=c++11"], ["-xc", "-std=c11"]):
                self.assertEqual("", self.first_error(language, header), language)
        self.assertIn("C programs include spillway/c_api.h", self.first_error(["-xc", "-std=c11"], "cplusplus.h"))


if __name__ == "__main__":
    main()
