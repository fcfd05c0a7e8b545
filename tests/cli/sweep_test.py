"""`spillway sweep` as a user runs it: what it writes is taken as it is, and nothing stays on the drive in any case.

The environment variable SPILLWAY_PRINT_CONFIG names the program that prints what our loader reads.
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CRASH, CliTest, mounted, spillway  # noqa: E402

PRINT_CONFIG = os.environ.get("SPILLWAY_PRINT_CONFIG", "")
# A temporary directory may lie on anything.
QUICK = ["--seconds", "2", "--size", "64MiB", "--allow-buffered"]


class SweepTest(CliTest):
    def setUp(self):
        super().setUp()
        self.drive = self.place.nvme
        self.json = self.place.folder / "aio.json"

    def assert_nothing_left(self, folder=None):
        self.assertEqual([], sorted(p.name for p in (folder or self.drive).iterdir() if p.name != "lost+found"))


class Results(SweepTest):
    def loaded(self):
        """What our loader reads from an ordinary configuration with the sweep's file over it."""
        config = self.place.config()
        done = subprocess.run([PRINT_CONFIG, config, self.json], capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stderr)
        return json.loads(done.stdout)

    def test_JsonIsReadBackWithEqualValues(self):
        run = spillway("sweep", self.drive, *QUICK, "--json", self.json, "--params", "7B")
        self.assert_done(run)
        self.assert_nothing_left()
        written = json.loads(self.json.read_text())
        self.assertEqual({"aio", "spillway"}, set(written))
        aio = written["aio"]
        for key in ("block_size", "queue_depth", "intra_op_parallelism"):
            self.assertIs(int, type(aio[key]), key)
        for key in ("single_submit", "overlap_events", "use_gds"):
            self.assertIs(bool, type(aio[key]), key)
        loaded = self.loaded()
        self.assertEqual(aio["block_size"], loaded["block_size"])
        self.assertEqual(aio["queue_depth"], loaded["queue_depth"])
        self.assertEqual(written["spillway"]["io_engine"], loaded["io_engine"])
        for word in ("chosen: ", "to check it with fio:", "s a step, if nothing but the drive", "writes at most"):
            self.assertIn(word, run.out)
        self.assertIn(f'"queue_depth": {aio["queue_depth"]}', run.out, "the fragment is shown, too")

    def test_FinetuneTakesTheJsonAsItIs(self):
        self.assert_done(spillway("sweep", self.drive, *QUICK, "--json", self.json))
        model = self.place.init_model()
        arguments = self.place.arguments(self.place.config(), model, steps=1)
        run = spillway(*arguments, "--aio", self.json)
        self.assert_done(run)
        found = json.loads(self.json.read_text())["aio"]
        size, depth = found["block_size"], found["queue_depth"]
        self.assertIn(f"{self.json}: put over the configuration: aio.block_size {size}, aio.queue_depth {depth}, ",
                      run.err)
        self.assertNotIn("without effect here: aio", run.err)
        self.assertRegex(run.out, rf"(?m)^io: .*, {depth} requests of {size // 1024} KiB, ")

    def test_WritesNoMoreThanItSaidAndPagesAreSelfContained(self):
        page = self.place.folder / "report.html"
        run = spillway("sweep", self.drive, *QUICK, "--report", page, "--sustained", "0.1")
        self.assert_done(run)
        units = {"MiB": 1 << 20, "GiB": 1 << 30}
        most, written = (float(found.group(1)) * units[found.group(2)] for found in (
            re.search(r"writes at most ([\d.]+) (\w+)", run.out), re.search(r"s, ([\d.]+) (\w+) written to", run.out)))
        self.assertLessEqual(written, most * 1.001)
        self.assertIn("written at full speed", run.out)
        self.assertTrue(page.read_text().startswith("<!doctype html>"))
        self.assertNotIn("http", page.read_text())
        self.assert_nothing_left()

    def test_WithoutReservingNothingIsWrittenButWhatItCounts(self):
        with mounted(self, "ext2", 1 << 30) as folder:  # it has no fallocate()
            device = os.stat(folder).st_dev
            statistics = pathlib.Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
            before = int(statistics.read_text().split()[6])
            run = spillway("sweep", folder, "--seconds", "1", "--size", "64MiB", "--sustained", "0.5")
            self.assert_done(run)
            sectors = int(statistics.read_text().split()[6]) - before
            self.assertIn("512 MiB in", run.out)
            self.assertNotIn("over and over", run.out)
            number, unit = re.search(r"s, ([\d.]+) (\w+) written to", run.out).groups()
            # With the blocks that say where the others are.
            self.assertLess(512 * sectors, 1.05 * float(number) * {"MiB": 1 << 20, "GiB": 1 << 30}[unit])

    def test_JsonToStdoutIsAloneThere(self):
        run = spillway("sweep", self.drive, "--seconds", "1", *QUICK[2:], "--json", "-")
        self.assert_done(run)
        self.assertIn("aio", json.loads(run.out))
        self.assertIn("chosen: ", run.err)

    def test_SeveralPathsAreStriped(self):
        other = self.place.folder / "other"
        other.mkdir()
        run = spillway("sweep", self.drive, other, *QUICK, "--json", self.json)
        self.assert_done(run)
        self.assertIn("all, striped", run.out)
        written = json.loads(self.json.read_text())["spillway"]
        self.assertEqual(len(written["nvme_paths"]), len(written["nvme_rates"]))
        self.assertLessEqual(set(written["nvme_paths"]), {str(self.drive.resolve()), str(other.resolve())})
        self.assertTrue(all(rate > 0 for rate in written["nvme_rates"]))
        # The configuration names one directory, and the measured ones take its place, in whatever order they are.
        self.assertEqual(written["nvme_paths"], self.loaded()["nvme_paths"])
        written["nvme_paths"].reverse()
        self.json.write_text(json.dumps({"spillway": written}))
        self.assertEqual(written["nvme_paths"], self.loaded()["nvme_paths"])
        self.assert_nothing_left()
        self.assert_nothing_left(other)


class Endings(SweepTest):
    def start(self):
        command = [BINARY, "sweep", str(self.drive), "--seconds", "60", "--size", "64MiB", "--allow-buffered", "--json",
                   str(self.json)]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in run.stdout:
            if "coarse grid" in line:  # the file is filled and in use
                self.assert_nothing_left()
                return run
        self.fail(f"the sweep ended early: {run.stderr.read()}")

    def test_CtrlCEndsItAndLeavesNothing(self):
        with self.start() as run:
            run.send_signal(signal.SIGINT)
            out, err = run.communicate(timeout=60)
        self.assertEqual(130, run.returncode, err)
        self.assertIsNone(CRASH.search(out + err), err)
        self.assertIn("stopped", out)
        self.assertFalse(self.json.exists())
        self.assert_nothing_left()

    def test_KillLeavesNothing(self):
        with self.start() as run:
            time.sleep(0.3)
            run.kill()
            run.communicate(timeout=60)
        self.assertEqual(-signal.SIGKILL, run.returncode)
        self.assertFalse(self.json.exists())
        self.assert_nothing_left()


class BadInput(SweepTest):
    def refused(self, *arguments, words, folder=None):
        line = self.assert_refused(spillway("sweep", *arguments), *words)
        self.assert_nothing_left(folder)
        return line

    def test_MissingPathIsRefused(self):
        path = self.place.folder / "absent"
        self.refused(path, words=[path, "No such file"])

    def test_FileInPlaceOfADirectoryIsRefused(self):
        path = self.place.folder / "file"
        path.write_text("not a directory\n")
        self.refused(path, words=[path, "not a directory"])
        self.assertEqual("not a directory\n", path.read_text())

    def test_PathNamedTwiceIsRefused(self):
        self.refused(self.drive, self.drive, *QUICK, words=[self.drive, "twice"])

    def test_SizeLargerThanTheSpaceIsRefused(self):
        self.refused(self.drive, "--size", "100TiB", "--allow-buffered", words=[self.drive, "No space left", "--size"])

    def test_ASizeInMBIsOfMillions(self):
        run = spillway("sweep", self.drive, "--seconds", "1", "--size", "64MB", "--allow-buffered")
        self.assert_done(run)
        self.assertIn("a file of 48 MiB ", run.out + run.err)  # the next multiple of 16 MiB below

    def test_WrongNumbersAreRefused(self):
        for option, value in (("--size", "1KiB"), ("--size", "much"), ("--seconds", "0"), ("--seconds", "nan"),
                              ("--params", "many"), ("--params", "-7B"), ("--sustained", "0")):
            with self.subTest(option=option, value=value):
                self.refused(self.drive, option, value, "--allow-buffered", words=[option])

    def test_OutputThatCannotBeWrittenIsRefusedFirst(self):
        for option in ("--json", "--report"):
            with self.subTest(option=option):
                path = self.place.folder / "absent" / "file"
                self.refused(self.drive, option, path, words=[path, option])
                self.refused(self.drive, option, self.place.folder, words=[self.place.folder, option, "Is a directory"])

    def test_APathThatJsonCannotNameIsRefusedFirst(self):
        odd = os.fsencode(self.place.folder) + b"/d\xff"
        os.mkdir(odd)
        run = subprocess.run([BINARY, "sweep", odd, self.drive, *QUICK, "--json", self.json], capture_output=True,
                             text=True, errors="replace", timeout=60, check=False)
        self.assertEqual((1, ""), (run.returncode, run.stdout), run.stderr)
        self.assertIn("is no UTF-8, so that --json cannot name it", run.stderr)
        self.assertFalse(self.json.exists())

    def test_ReadOnlyPathIsRefused(self):
        if os.geteuid() == 0:
            with mounted(self, "tmpfs", 64 << 20) as folder:
                subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
                self.refused(folder, "--allow-buffered", words=[folder, "Read-only file system"], folder=folder)
        else:
            self.drive.chmod(0o500)
            self.refused(self.drive, "--allow-buffered", words=[self.drive, "Permission denied"])

    def test_MemoryIsNoDriveUnlessTold(self):
        with mounted(self, "tmpfs", 128 << 20) as folder:
            self.refused(folder, words=[folder, "tmpfs", "--allow-buffered"], folder=folder)
            run = spillway("sweep", folder, "--seconds", "1", "--size", "16MiB", "--allow-buffered")
            self.assert_done(run)
            self.assertIn("memory, not a drive", run.out)
            self.assert_nothing_left(folder)

    def test_FullFileSystemIsRefused(self):
        for kind in ("tmpfs", "ext4"):
            with self.subTest(kind=kind), mounted(self, kind, 8 << 20) as folder:
                self.refused(folder, "--allow-buffered", words=[folder, "No space left on device"], folder=folder)

    def test_FragmentMayHoldItsTwoSectionsOnly(self):
        model = self.place.init_model()
        self.json.write_text('{\n  "aio": {"queue_depth": 8},\n  "bf16": {"enabled": true}\n}\n')
        arguments = self.place.arguments(self.place.config(), model, steps=1)
        self.assert_refused(spillway(*arguments, "--aio", self.json), f"{self.json}:3:3:", "bf16")
        self.json.write_text('{"aio": {"queue_depth": "8"}}\n')
        self.assert_refused(spillway(*arguments, "--aio", self.json), f"{self.json}:1:25:", "aio.queue_depth")


if __name__ == "__main__":
    main()
