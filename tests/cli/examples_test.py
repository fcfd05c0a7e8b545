"""The C++ and C programs of examples/, built as their README says against what `meson install` leaves, and run.

SPILLWAY_BUILD names the build directory; everything in it is built.
"""
import hashlib
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402

BUILD = os.environ["SPILLWAY_BUILD"]
EXAMPLES = ROOT / "examples"
TEXT = ROOT / "LICENSE"


def run_ok(*command, cwd=None, **environment):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, timeout=180, cwd=cwd,
                          env={**os.environ, **environment})
    if done.returncode != 0:
        raise AssertionError(f"{shlex.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def weights_of(folder):
    """Name: (shape, values), of fp32."""
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for name, tensor in json.loads(data[8:start]).items():
        if name != "__metadata__":
            first, end = tensor["data_offsets"]
            values = struct.unpack(f"<{(end - first) // 4}f", data[start + first:start + end])
            found[name] = (tensor["shape"], values)
    return found


def dot(one, other):
    return sum(map(lambda a, b: a * b, one, other))


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-examples-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.root = cls.folder / "root"
        run_ok("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", cls.root)
        described = next(cls.root.rglob("spillway.pc"))
        cls.libraries, cls.prefix = described.parents[1], next(cls.root.rglob("include/spillway")).parents[1]
        cls.pkg_config = {"PKG_CONFIG_PATH": str(described.parent), "PKG_CONFIG_SYSROOT_DIR": str(cls.root)}

    def compiled(self, compiler, source):
        """By pkg-config."""
        flags = run_ok("pkg-config", "--cflags", "--libs", "spillway", **self.pkg_config).split()
        program = self.folder / pathlib.Path(source).stem
        run_ok(*shlex.split(compiler), "-O2", "-Wall", "-Wextra", "-Wpedantic", "-Werror",
               "-Wno-missing-field-initializers", EXAMPLES / source, "-o", program, *flags,
               f"-Wl,-rpath,{self.libraries}", "-lm")
        return program

    def trained(self, program, *arguments):
        """What it prints, and the losses in it, run in a folder of its own, where the shipped configuration's store
        is."""
        said = run_ok(program, *arguments, cwd=self.folder)
        return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", said, re.MULTILINE)]


class Cpp(Case):
    CONFIG, DATA = EXAMPLES / "cpp/ds_config.json", EXAMPLES / "data/iris.csv"

    def right(self, folder):
        """The share of the table's rows that the exported weights classify as it does."""
        weights = weights_of(folder)
        layers = [(weights[f"layers.{l}.weight"], weights[f"layers.{l}.bias"][1]) for l in range(len(weights) // 2)]
        rows = [list(map(float, line.split(","))) for line in self.DATA.read_text().splitlines()[1:]]
        found = 0
        for *x, wanted in rows:
            for number, (((out, columns), weight), bias) in enumerate(layers, 1):
                x = [dot(x, weight[o * columns:(o + 1) * columns]) + bias[o] for o in range(out)]
                x = x if number == len(layers) else [max(0, value) for value in x]
            found += max(range(len(x)), key=x.__getitem__) == wanted
        return found / len(rows)

    def test_TrainsIsStoppedAndGoesOnWithTheSameBits(self):
        program = self.compiled("c++ -std=c++20", "cpp/train.cc")
        losses = self.trained(program, self.CONFIG, self.DATA, "whole", 60, 3, 32)
        self.assertEqual(60, len(losses))
        self.assertGreater(losses[0], 0.8)
        self.assertLess(sum(losses[-3:]) / 3, 0.3)
        self.assertGreater(self.right(self.folder / "whole"), 0.9)
        self.assertEqual(20, len(self.trained(program, self.CONFIG, self.DATA, "parts", 20, 3, 32)))
        self.assertEqual(losses[20:], self.trained(program, self.CONFIG, self.DATA, "parts", 60, 3, 32, "--resume"))
        whole, parts = (hashlib.sha256((self.folder / name / "model.safetensors").read_bytes()).hexdigest()
                        for name in ("whole", "parts"))
        self.assertEqual(whole, parts)

        def refused(status, message, *arguments):
            done = subprocess.run([program, *map(str, arguments)], cwd=self.folder, capture_output=True, text=True,
                                  check=False, timeout=60)
            self.assertEqual(status, done.returncode)
            self.assertRegex(done.stderr, message)

        refused(2, "usage: train ds_config.json", self.CONFIG)
        refused(1, r"train: .*none\.json: cannot be", "none.json", self.DATA, "out", 1)
        refused(1, r"train: none\.csv: has fewer rows than a step", self.CONFIG, "none.csv", "out", 1)
        refused(1, r"train: \S*store: made with parameter 0 of block layers\.0", self.CONFIG, self.DATA, "out", 61, 3, 16, "--resume")

    def built_by(self, name, *command, **environment):
        """The program of a build system, which trains as any other."""
        shutil.copytree(EXAMPLES / "cpp", self.folder / name)
        run_ok(*command, cwd=self.folder / name, **environment)
        run_ok("ninja", "-C", self.folder / name / "build")
        self.assertEqual(1, len(self.trained(self.folder / name / "build/train", self.CONFIG, self.DATA, name, 1)))

    def test_IsBuiltByCMake(self):
        if not shutil.which("cmake"):
            self.skipTest("no cmake here; `apt-get install cmake` brings it")
        if not list(self.root.rglob("spillway*[cC]onfig.cmake")):
            self.skipTest("this build installs no CMake package file")
        self.built_by("cmake", "cmake", "-B", "build", "-GNinja", "-DCMAKE_BUILD_TYPE=Release",
                      f"-DCMAKE_PREFIX_PATH={self.prefix}")

    def test_IsBuiltByMeson(self):
        self.built_by("meson", "meson", "setup", "build", LDFLAGS=f"-Wl,-rpath,{self.libraries}", **self.pkg_config)


class C(Case):
    def loss_of(self, folder, text, positions):
        """The mean over these positions, by the exported weights."""
        weights = weights_of(folder)
        (_, width), rows = weights["embedding.weight"]
        embedding = [rows[v * width:(v + 1) * width] for v in range(256)]
        (context, _), mix = weights["mix.weight"]
        total = 0
        for end in positions:
            before = [embedding[byte] for byte in text[end - context:end]]
            h = [dot(mix[i::width], [row[i] for row in before]) for i in range(width)]
            logits = [dot(row, h) for row in embedding]
            total += math.log(sum(map(math.exp, logits))) - logits[text[end]]
        return total / len(positions)

    def test_ATiedEmbeddingIsTrained(self):
        program = self.compiled("cc -std=c11", "c/tied.c")
        losses = self.trained(program, EXAMPLES / "c/ds_config.json", TEXT, "tied-out", 150)
        self.assertEqual(150, len(losses))
        self.assertAlmostEqual(math.log(256), losses[0], delta=0.1)
        self.assertLess(losses[-1], 3.6)
        text = TEXT.read_bytes()
        self.assertLess(self.loss_of(self.folder / "tied-out", text, range(8, len(text), 131)), 3.6)
        (self.folder / "bad.json").write_text("{")
        done = subprocess.run([program, "bad.json", TEXT, "out", "1"], cwd=self.folder, capture_output=True, text=True,
                              check=False, timeout=60)
        self.assertEqual(1, done.returncode)
        self.assertRegex(done.stderr, r"tied: bad\.json:1:\d+: ")


if __name__ == "__main__":
    main()
