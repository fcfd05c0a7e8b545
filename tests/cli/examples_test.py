"""The C++ and C programs of examples/, built as their README says against what `meson install` leaves, and run.

SPILLWAY_BUILD names the build directory; everything in it is built.
"""
import hashlib
import json
import math
import os
import pathlib
import re
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


def run(command, folder, environment):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180, cwd=folder,
                          shell=isinstance(command, str), env={**os.environ, **environment})


def run_ok(command, folder, environment):
    done = run(command, folder, environment)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def commands():
    """Those of the README that build and run programs, in turn."""
    block, = (block for block in re.findall(r"(?<=\n```sh\n).*?(?=^```$)", (EXAMPLES / "README.md").read_text(),
                                            re.DOTALL | re.MULTILINE) if "pkg-config" in block)
    return [line for line in block.splitlines() if line]


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


def losses_in(said):
    return [float(loss) for loss in re.findall(r"^step \d+  loss ([\d.]+)", said, re.MULTILINE)]


class Programs(unittest.TestCase):
    """Built and run in a folder that has the examples in it, where their configurations' stores come to lie, too."""

    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-examples-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        root = cls.folder / "root"
        run_ok(["meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", root], cls.folder, {})
        described = next(root.rglob("spillway.pc"))
        cls.prefix = next(root.rglob("include/spillway")).parents[1]
        cls.installed = {"PKG_CONFIG_PATH": str(described.parent), "PKG_CONFIG_SYSROOT_DIR": str(root),
                         "CMAKE_PREFIX_PATH": str(cls.prefix), "LD_LIBRARY_PATH": str(described.parents[1])}
        shutil.copytree(EXAMPLES, cls.folder / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "LICENSE", cls.folder)

    def command(self, *parts):
        """That of the README which begins so."""
        found, = (line for line in commands() if line.startswith(parts))
        return found

    def run_command(self, *parts):
        return run_ok(self.command(*parts), self.folder, self.installed)

    def assert_no_warnings(self, source, standard, *compilers):
        flags = run_ok(["pkg-config", "--cflags", "spillway"], self.folder, self.installed).split()
        for compiler in filter(shutil.which, compilers):
            run_ok([compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Werror",
                    "-Wno-missing-field-initializers", "-fsyntax-only", EXAMPLES / source, *flags], self.folder, {})

    def assert_refused(self, message, *command, status=1):
        done = run([*map(str, command)], self.folder, self.installed)
        self.assertEqual(status, done.returncode)
        self.assertRegex(done.stderr, message)


class Cpp(Programs):
    DATA = EXAMPLES / "data/iris.csv"
    CONFIG = EXAMPLES / "cpp/ds_config.json"

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
        self.assert_no_warnings("cpp/train.cc", "c++20", "c++", "clang++")
        self.run_command("c++")
        first, second = (line for line in commands() if line.startswith("./train "))
        losses = losses_in(run_ok(first, self.folder, self.installed))
        self.assertEqual(60, len(losses))
        losses += losses_in(run_ok(second, self.folder, self.installed))
        self.assertEqual(90, len(losses))
        self.assertGreater(losses[0], 0.8)
        self.assertLess(sum(losses[-3:]) / 3, 0.3)
        self.assertGreater(self.right(self.folder / "classifier"), 0.9)
        whole = run_ok(["./train", self.CONFIG, self.DATA, "whole", "90"], self.folder, self.installed)
        self.assertEqual(losses, losses_in(whole))
        one, other = (hashlib.sha256((self.folder / name / "model.safetensors").read_bytes()).hexdigest()
                      for name in ("classifier", "whole"))
        self.assertEqual(one, other)

        self.assert_refused("usage: train ds_config.json", "./train", self.CONFIG, status=2)
        self.assert_refused(r"train: none\.json: cannot be", "./train", "none.json", self.DATA, "out", 1)
        self.assert_refused(r"train: none\.csv: has fewer rows than a step", "./train", self.CONFIG, "none.csv", "out",
                            1)
        self.assert_refused(r"train: \S*store: made with parameter 0 of block layers\.0: ", "./train", self.CONFIG,
                            self.DATA, "out", 91, 4, 16, "--resume")

    def assert_built(self, system):
        said = run_ok([f"build-{system}/train", self.CONFIG, self.DATA, system, "1"], self.folder, self.installed)
        self.assertEqual(1, len(losses_in(said)))

    def test_IsBuiltByCMake(self):
        if not shutil.which("cmake"):
            self.skipTest("no cmake here; `apt-get install cmake` brings it")
        if not list(self.prefix.rglob("spillway*[cC]onfig.cmake")):
            self.skipTest("this build installs no CMake package file")
        self.run_command("cmake")
        self.assert_built("cmake")

    def test_IsBuiltByMeson(self):
        self.run_command("meson")
        self.assert_built("meson")


class C(Programs):
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
        self.assert_no_warnings("c/tied.c", "c11", "cc", "clang")
        self.run_command("cc ")
        losses = losses_in(self.run_command("./tied "))
        self.assertEqual(200, len(losses))
        self.assertAlmostEqual(math.log(256), losses[0], delta=0.1)
        self.assertLess(losses[-1], 3.6)
        text = (ROOT / "LICENSE").read_bytes()
        self.assertLess(self.loss_of(self.folder / "language-model", text, range(8, len(text), 131)), 3.6)

        (self.folder / "bad.json").write_text("{")
        self.assert_refused("usage: tied ds_config.json", "./tied", status=2)
        self.assert_refused(r"tied: bad\.json:1:\d+: ", "./tied", "bad.json", "LICENSE", "out", 1)
        self.assert_refused("bad.json: has no more than 8 bytes", "./tied", EXAMPLES / "c/ds_config.json", "bad.json",
                            "out", 1)


if __name__ == "__main__":
    main()
