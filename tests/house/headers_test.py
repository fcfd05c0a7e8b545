"""Every header of the library compiles alone, and twice in one source file."""
import concurrent.futures
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402

COMPILER = shlex.split(os.environ.get("SPILLWAY_CXX", "c++"))
# Highway's own pkg-config file asks for the definition.
FLAGS = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-DHWY_SHARED_DEFINE"]
ROOMS = ("include", "aio", "kernels", "swap", "src")


def errors(header, base):
    """What the compiler says about a file that includes `header`, a path below `base`, twice and nothing else."""
    include = header.relative_to(base).as_posix()
    source = f'#include "{include}"\n#include "{include}"\nint main() {{}}\n'
    command = [*COMPILER, *FLAGS, "-I", str(ROOT / "include"), "-I", str(base), "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


class Headers(unittest.TestCase):
    def test_EachCompilesAlone(self):
        # Highway's *-inl.h are included once per instruction set, by design.
        headers = [h for room in ROOMS for h in sorted((ROOT / room).rglob("*.h")) if not h.name.endswith("-inl.h")]
        self.assertGreater(len(headers), 5)
        base = {h: ROOT / "include" if h.is_relative_to(ROOT / "include") else ROOT for h in headers}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda h: errors(h, base[h]), headers))
        for header, said in zip(headers, results):
            with self.subTest(header=header.relative_to(ROOT).as_posix()):
                self.assertEqual("", said)

    def check_caught(self, text):
        with tempfile.TemporaryDirectory() as folder:
            header = pathlib.Path(folder) / "case.h"
            header.write_text(text)
            self.assertNotEqual("", errors(header, pathlib.Path(folder)))

    def test_MissingIncludeIsCaught(self):
        self.check_caught("#pragma once\ninline std::string name() { return {}; }\n")

    def test_MissingGuardIsCaught(self):
        self.check_caught("struct Twice {};\n")


if __name__ == "__main__":
    main()
