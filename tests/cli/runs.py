"""Runs of the `spillway` binary as a user types them: models, configurations, fine-tunes, what they print and leave.

The binary's path comes from the environment variable SPILLWAY_BINARY.
"""
import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = os.environ.get("SPILLWAY_BINARY", "")
# What trains: `host`, `cuda`, or `emulated`: the cuda device on an emulated GPU (kernels/cuda/emulator), which is slow.
EMULATED = os.environ.get("SPILLWAY_DEVICE") == "emulated"
DEVICE = "cuda" if EMULATED else os.environ.get("SPILLWAY_DEVICE", "host")
# The same text on every machine, about 11 KB: the licence that travels with the source.
TEXT = ROOT / "LICENSE"
LIMIT_SECONDS = 1000 if EMULATED else 300

# object: what happened (errno); what to do
ERROR_FORM = re.compile(r"^(?:spillway: )?(?:error: )?(?P<object>\S.*?): (?P<happened>.+); (?P<hint>\S.*)$")
CRASH = re.compile(r"terminate called|check failed|Sanitizer|runtime error|core dumped|Segmentation fault")
UNITS = {None: 1, "": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
HINTED_BUDGET = re.compile(r"(hbm|host|nvme)_bytes\"?\D*?(\d[\d.]*)\s*(KiB|MiB|GiB|B)?\b")


@dataclass
class Run:
    """A finished program."""
    status: int
    out: str
    err: str


def spillway(*arguments, **keywords):
    done = subprocess.run([BINARY, *map(str, arguments)], capture_output=True, text=True, timeout=LIMIT_SECONDS,
                          check=False, **keywords)
    return Run(done.returncode, done.stdout, done.stderr)


def published_configs():
    """{name: (text, whether it loads)} of tests/tools/config/corpus.txt."""
    entries = (ROOT / "tests/tools/config/corpus.txt").read_text().split("\n== ")[1:]
    return {name: (text, loads == "loads") for name, text, loads in (
        re.match(r"(\S+)\n(.*?\n)-- (\w+)", entry, re.DOTALL).groups() for entry in entries)}


def sha256_of_model(folder):
    """One hash over every weight file of an exported model."""
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    assert files, f"{folder} holds no weights"
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Workplace:
    """A directory with models, a configuration, a log and a place for the store."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.nvme = self.folder / "nvme"
        self.nvme.mkdir(parents=True, exist_ok=True)
        self.log = self.folder / "steps.jsonl"

    def init_model(self, name="model", *, layers=3, width=72, heads=4, vocab=256, context=64, seed=1, dtype="fp32"):
        model = self.folder / name
        done = spillway("init-model", model, "--layers", layers, "--width", width, "--heads", heads, "--vocab", vocab,
                        "--context", context, "--seed", seed, "--dtype", dtype)
        assert done.status == 0, done.err
        return model

    def init_family(self, family, *, seed=1):
        """A small model of it: tests/references/families."""
        model = self.folder / family
        config = ROOT / f"tests/references/families/{family}.json"
        done = spillway("init-model", model, "--from", config, "--seed", seed)
        assert done.status == 0, done.err
        return model

    def config(self, *, parameters="nvme", states="nvme", dtype="bf16", micro=1, accumulation=2, clip=0.5, lr=1e-3,
               nvme=None, spillway_section=None, fp16=None, **more):
        """A ds_config.json; `more` is put over the top level. Returns its path."""
        offload = {}
        for key, device in (("offload_param", parameters), ("offload_optimizer", states)):
            offload[key] = {"device": device}
            if device == "nvme":
                offload[key]["nvme_path"] = str(nvme or self.nvme)
        values = {
            "train_micro_batch_size_per_gpu": micro,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip,
            "bf16": {"enabled": dtype == "bf16"},
            "fp16": {"enabled": dtype == "fp16", **(fp16 or {})},
            "optimizer": {"type": "AdamW",
                          "params": {"lr": lr, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, **offload},
            "spillway": {"device": DEVICE, "tile_elements": 16384, **(spillway_section or {})},
            **more,
        }
        path = self.folder / "ds_config.json"
        path.write_text(json.dumps(values, indent=2) + "\n")
        return path

    def published_config(self, name):
        """A file of one of tests/tools/config/corpus.txt."""
        path = self.folder / f"{name}.json"
        path.write_text(published_configs()[name][0])
        return path

    @staticmethod
    def arguments(config, model, *, data=TEXT, steps=3, seq=32, out=None, log=None, trace=None, resume=False,
                  fresh=False, save=None, every=None, keep=None, load=None, evaluate=None, held_out=None, best=None,
                 adapter=None):
        arguments = ["finetune", "--config", config, "--model", model, "--data", data, "--steps", steps, "--seq", seq]
        for option, value in (("--out", out), ("--log", log), ("--trace", trace), ("--save", save),
                              ("--save-every", every), ("--keep", keep), ("--load", load), ("--eval", evaluate),
                              ("--eval-data", held_out), ("--best", best), ("--adapter", adapter)):
            arguments += [option, value] if value else []
        return [*map(str, arguments), *(["--resume"] if resume else []), *(["--fresh"] if fresh else [])]

    def finetune(self, config, model, environment=None, **options):
        """`environment`: variables that the program sees besides those of this one."""
        return spillway(*self.arguments(config, model, **options), env={**os.environ, **(environment or {})})

    def steps(self, log=None):
        return [json.loads(line) for line in (log or self.log).read_text().splitlines()]

    def evaluations(self, log=None):
        return [line for line in self.steps(log) if "eval_loss" in line]

    def stored_files(self):
        return sorted(p.relative_to(self.nvme).as_posix() for p in self.nvme.rglob("*") if p.is_file())


class CliTest(unittest.TestCase):
    """A test with a fresh Workplace in self.place."""

    def setUp(self):
        folder = tempfile.mkdtemp(prefix="spillway-cli-")
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        self.place = Workplace(folder)

    def assert_done(self, run):
        self.assertEqual(0, run.status, f"stdout:\n{run.out}\nstderr:\n{run.err}")

    def assert_refused(self, run, *words):
        """Exit code 1 and exactly one error line of Spillway's form that holds each of `words`; returns that line."""
        everything = f"stdout:\n{run.out}\nstderr:\n{run.err}"
        self.assertEqual(1, run.status, everything)
        self.assertIsNone(CRASH.search(run.out + run.err), everything)
        # What begins with a space shows the line of a file that an error is about.
        lines = [line for line in run.err.splitlines()
                 if not line.startswith(" ") and all(str(word) in line for word in words)]
        self.assertEqual(1, len(lines), f"expected one line with {words}\n{everything}")
        self.assertRegex(lines[0], ERROR_FORM)
        return lines[0]


def hinted_budget(line):
    """('hbm_bytes', 12345) out of the what-to-do part of an error, or None."""
    found = HINTED_BUDGET.search(line.rpartition(";")[2])
    if not found:
        return None
    # A hint rounded to two digits must be rounded up to be true, so taking it literally has to work.
    return f"{found.group(1)}_bytes", int(float(found.group(2)) * UNITS[found.group(3)] + 0.999)


def unmount(folder):
    # The kernel lets go of a ring's files a moment after the process that had it has ended.
    for _ in range(600):
        done = subprocess.run(["umount", folder], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        time.sleep(0.1)
    raise AssertionError(f"umount {folder}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(test, kind, size_bytes, sector_bytes=512):
    """A small file system of its own, `tmpfs`, or `ext2`, `ext4`, `xfs`, `btrfs` in a loop device with sectors of that
    size; skips where that is not allowed."""
    if os.geteuid() != 0:
        test.skipTest("mounting a small file system needs root")
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="spillway-mount-")
        stack.callback(os.rmdir, folder)
        if kind == "tmpfs":
            command = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", folder]
        else:
            image = f"{folder}.img"
            with open(image, "wb") as file:
                file.truncate(size_bytes)
            stack.callback(os.remove, image)
            make_file_system(test, kind, image, sector_bytes)
            command = ["mount", "-o", "loop", image, folder]
            if sector_bytes != 512:
                command = ["mount", loop_device(test, stack, image, sector_bytes), folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            test.skipTest(f"this machine does not let us mount {kind}: {done.stderr.strip()}")
        stack.callback(unmount, folder)
        yield pathlib.Path(folder)


def make_file_system(test, kind, image, sector_bytes):
    options = ["-q", "-F", "-m", "0"] if kind.startswith("ext") else ["-q"]
    if sector_bytes != 512:
        options += {"ext2": ["-b", "4096"], "ext4": ["-b", "4096"], "xfs": ["-s", f"size={sector_bytes}"],
                    "btrfs": []}[kind]
    if shutil.which(f"mkfs.{kind}") is None:
        test.skipTest(f"mkfs.{kind} is not installed")
    made = subprocess.run([f"mkfs.{kind}", *options, image], capture_output=True, text=True, check=False)
    if made.returncode:
        test.skipTest(f"mkfs.{kind} failed: {made.stderr.strip()}")


def loop_device(test, stack, image, sector_bytes):
    command = ["losetup", "--find", "--show", "--sector-size", str(sector_bytes), image]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        test.skipTest(f"no loop device with sectors of {sector_bytes} bytes: {done.stderr.strip()}")
    device = done.stdout.strip()
    stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
    return device


@contextlib.contextmanager
def cgroup(test, controller, limits):
    """The directory of a cgroup of its own with these limits, file by file."""
    own = re.search(rf"^\d+:{controller}:(.*)$", pathlib.Path("/proc/self/cgroup").read_text(), re.MULTILINE)
    parent = pathlib.Path(f"/sys/fs/cgroup/{controller}" + (own.group(1) if own else ""))
    if os.geteuid() != 0 or not own or not all((parent / file).exists() for file in limits):
        test.skipTest(f"needs root and a {controller} cgroup of version 1 at /sys/fs/cgroup/{controller}")
    group = parent / f"spillway-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        test.skipTest(f"no {controller} cgroup can be made here: {error}")
    try:
        for file, limit in limits.items():
            (group / file).write_text(str(limit))
        yield group
    finally:
        group.rmdir()


def entering(group):
    """What a process calls to enter a cgroup."""
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid()))


@contextlib.contextmanager
def memory_cgroup(test, limit):
    """A memory cgroup of so many bytes: what a process calls to enter it."""
    with cgroup(test, "memory", {"memory.limit_in_bytes": limit}) as group:
        try:
            (group / "memory.memsw.limit_in_bytes").write_text(str(limit))
        except OSError:
            pass  # a kernel without swap accounting; nothing to forbid where there is no swap
        yield entering(group)


def cpu_cgroup(test, cores):
    """A cgroup with the CPU time of so many cores."""
    return cgroup(test, "cpu", {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": int(100_000 * cores)})
