"""Every header of the library compiles alone, and twice in one source file. A header that a source file of the library
includes before anything else has been compiled alone by the build, and for twice there is `#pragma once`; all others
are compiled here, those that include CUDA's where its toolkit is."""
import concurrent.futures
import os
import pathlib
import re
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
# Meson's; empty on a machine without the toolkit.
CUDA = os.environ.get("SPILLWAY_CUDA_INCLUDE", "")
ROOMS = ("include", "aio", "kernels", "swap", "src")


def errors(header, base):
    """What the compiler says about a file that includes `header`, a path below `base`, twice and nothing else."""
    include = header.relative_to(base).as_posix()
    source = f'#include "{include}"\n#include "{include}"\nint main() {{}}\n'
    cuda = ["-isystem", CUDA] if CUDA else []
    command = [*COMPILER, *FLAGS, *cuda, "-I", str(ROOT / "include"), "-I", str(base), "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def first_directive(path):
    return next((line for line in path.read_text().splitlines() if line.startswith("#")), "")


def compiled_by_the_build(root):
    """The headers that come first in a source file of the library and are guarded."""
    found = set()
    for source in (s for room in ROOMS for s in (root / room).rglob("*.cc")):
        include = re.fullmatch('#include "(.+)"', first_directive(source))
        paths = [root / include[1], root / "include" / include[1]] if include else []
        found |= {path for path in paths if path.exists() and first_directive(path) == "#pragma once"}
    return found


def needs_cuda(header, root):
    """Whether the header, or one of the house that it includes, includes one of CUDA's."""
    includes = re.findall('^#include ["<](.+)[">]', header.read_text(), re.MULTILINE)
    inner = [root / name for name in includes if (root / name).exists()]
    return any(name.startswith(("cuda", "cublas")) for name in includes) or any(needs_cuda(h, root) for h in inner)


class Headers(unittest.TestCase):
    def check_each(self, headers):
        base = {h: ROOT / "include" if h.is_relative_to(ROOT / "include") else ROOT for h in headers}
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            results = list(pool.map(lambda h: errors(h, base[h]), headers))
        for header, said in zip(headers, results):
            with self.subTest(header=header.relative_to(ROOT).as_posix()):
                self.assertEqual("", said)

    def left_to_compile(self):
        # Highway's *-inl.h are included once per instruction set, by design.
        headers = [h for room in ROOMS for h in sorted((ROOT / room).rglob("*.h")) if not h.name.endswith("-inl.h")]
        self.assertGreater(len(headers), 5)
        built = compiled_by_the_build(ROOT)
        self.assertLess(built, set(headers))
        return [h for h in headers if h not in built]

    def test_EachCompilesAlone(self):
        self.check_each([h for h in self.left_to_compile() if not needs_cuda(h, ROOT)])

    @unittest.skipUnless(CUDA, "no CUDA toolkit")
    def test_EachOfCudasCompilesAlone(self):
        self.check_each([h for h in self.left_to_compile() if needs_cuda(h, ROOT)])

    def test_WhatNeedsCudaIsFoundThroughOtherHeaders(self):
        files = {"kernels/cuda/event.h": "#include <cuda_runtime_api.h>\n", "kernels/cpu.h": "#include <cmath>\n",
                 "kernels/cuda/stream.h": '#include "kernels/cuda/event.h"\n'}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            self.assertEqual([True, False, True], [needs_cuda(root / name, root) for name in files])

    def check_caught(self, text):
        with tempfile.TemporaryDirectory() as folder:
            header = pathlib.Path(folder) / "case.h"
            header.write_text(text)
            self.assertNotEqual("", errors(header, pathlib.Path(folder)))

    def test_MissingIncludeIsCaught(self):
        self.check_caught("#pragma once\ninline std::string name() { return {}; }\n")

    def test_MissingGuardIsCaught(self):
        self.check_caught("struct Twice {};\n")

    def test_OnlyTheFirstIncludeOfASourceFileProvesAHeader(self):
        files = {"src/first.h": "// why\n#pragma once\n", "src/first.cc": '#include "src/first.h"\n',
                 "src/twice.h": "#include <map>\nstruct Twice {};\n",
                 "src/twice.cc": '#include "src/twice.h"\n',
                 "src/later.h": "#pragma once\n", "src/later.cc": '#include <string>\n#include "src/later.h"\n',
                 "src/defined.h": "#pragma once\n", "src/defined.cc": '#define X 1\n#include "src/defined.h"\n',
                 "include/spillway/api.h": "#pragma once\n", "swap/api.cc": '#include "spillway/api.h"\n'}
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            self.assertEqual({root / "src/first.h", root / "include/spillway/api.h"}, compiled_by_the_build(root))


if __name__ == "__main__":
    main()
