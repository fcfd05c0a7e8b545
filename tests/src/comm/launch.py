"""Ranks under Open MPI's mpirun, for tests: the behaviour suite, and processes of rank_program that can be stopped and
killed."""
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree

from mpirun import ONE_HOST

MPIRUN = os.environ["SPILLWAY_MPIRUN"]
PATIENCE = "5"


def run_suite(case, ranks, mpirun=(MPIRUN,), environment=None, tests="*"):
    """The behaviour suite, or these tests of it, pass on every rank."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([*mpirun, "-n", str(ranks), os.environ["SPILLWAY_MPI_SUITE"], "--gtest_brief=1",
                               f"--gtest_filter={tests}"],
                              env={**(environment or ONE_HOST), "SPILLWAY_RANK_REPORTS": folder},
                              capture_output=True, text=True, timeout=240, check=False)
        said = done.stdout[-6000:] + done.stderr[-3000:]
        case.assertEqual(0, done.returncode, said)
        reports = sorted(pathlib.Path(folder).glob("*.xml"))
        case.assertEqual(ranks, len(reports), said)
        for report in reports:
            totals = ElementTree.parse(report).getroot().attrib
            case.assertEqual("0", totals["failures"], said)
            case.assertGreaterEqual(int(totals["tests"]), 20 if tests == "*" else 10)


class Ranks:
    """Processes of rank_program."""

    def __init__(self, ranks, calls, how, mpirun=(MPIRUN, "--enable-recovery"), environment=None, patience=PATIENCE,
                 values=2000):
        self.folder = tempfile.TemporaryDirectory()
        self.directory = pathlib.Path(self.folder.name)
        # mpirun ends all ranks when one ends by itself; with recovery these say themselves what they miss.
        self.process = subprocess.Popen(
            [*mpirun, "-n", str(ranks), os.environ["SPILLWAY_RANK_PROGRAM"], self.directory, patience, str(calls), how,
             str(values)],
            env=environment or ONE_HOST, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def wait_for(self, rank, kind, seconds=60):
        file, end = self.directory / f"rank{rank}.{kind}", time.monotonic() + seconds
        while not file.exists():
            if time.monotonic() > end or self.process.poll() not in (None, 0) and not file.exists():
                left = sorted(one.name for one in self.directory.iterdir())
                raise AssertionError(f"no {file.name} after {seconds} s, but {left}: {self.last_words()}")
            time.sleep(0.01)
        return file.read_text()

    def last_words(self):
        self.process.kill()
        try:
            return self.process.communicate(timeout=5)
        except subprocess.TimeoutExpired as error:  # somebody else has its standard output
            return error.stdout, error.stderr

    def signal(self, rank, what):
        os.kill(int(self.wait_for(rank, "pid")), what)

    def close(self):
        for file in self.directory.glob("*.pid"):
            try:
                os.kill(int(file.read_text()), signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            self.process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        self.folder.cleanup()
