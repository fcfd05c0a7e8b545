"""Ranks on two hosts: right results over a network alone, a link that is slow, and one that is cut, after which every
rank on both sides ends with an error and none hangs."""
import json
import os
import pathlib
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from launch import PATIENCE, Ranks, run_suite  # noqa: E402
from report import main  # noqa: E402
from two_hosts import ENVIRONMENT, TwoHosts, as_root  # noqa: E402

HOSTS = None


def setUpModule():
    global HOSTS
    try:
        HOSTS = TwoHosts()
    except OSError as error:
        raise unittest.SkipTest(f"no two hosts on this machine: {error}") from error


def tearDownModule():
    HOSTS.close()


class OverANetwork(unittest.TestCase):
    def test_TwoRanks(self):
        run_suite(self, 2, HOSTS.mpirun(1), ENVIRONMENT)

    def test_FourRanksHaveTheSameResults(self):
        run_suite(self, 4, HOSTS.mpirun(2), ENVIRONMENT, "Processes/CommunicatorSuite.*")

    def test_TheDoctorNamesBoth(self):
        done = subprocess.run([*HOSTS.mpirun(1), "-n", "2", os.environ["SPILLWAY_BINARY"], "doctor", "--ranks",
                               "--json"], env=ENVIRONMENT, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(0, done.returncode, done.stderr)
        seen = {one["check"]: one["seen"] for one in json.loads(done.stdout)["findings"]}
        self.assertRegex(seen["ranks"], r"^rank 0 of 2, over Open MPI v4[\d.]+: 1 on host-a, 1 on host-b$")


class SlowLink(unittest.TestCase):
    def test_DataThatComesSlowlyIsNoAlarm(self):
        HOSTS.slow_down("200mbit")  # 64 MB to each rank in each of two collectives take longer than the patience is
        self.addCleanup(HOSTS.full_speed)
        ranks = Ranks(2, 1, "well", mpirun=HOSTS.mpirun(1), environment=ENVIRONMENT, values=16_000_000)
        self.addCleanup(ranks.close)
        said = ranks.process.communicate(timeout=120)
        self.assertEqual(0, ranks.process.returncode, said)
        self.assertEqual(["well"] * 2, [ranks.wait_for(rank, "end") for rank in range(2)])


class Cut(unittest.TestCase):
    """One cut, and three programs of four ranks: one that works, one between two collectives, one about to leave."""
    programs = {}

    @classmethod
    def setUpClass(cls):
        cls.addClassCleanup(HOSTS.mend)
        for how, calls in {"well": 10**9, "idle": 20, "leave": 20}.items():
            # mpirun ends all ranks when one ends by itself; with recovery these say themselves what they miss.
            ranks = Ranks(4, calls, how, mpirun=HOSTS.mpirun(2, "--enable-recovery"), environment=ENVIRONMENT)
            cls.addClassCleanup(ranks.close)
            cls.addClassCleanup(HOSTS.clear)  # before that: a launcher that is cut off does not end
            cls.programs[how] = ranks
        for how, ranks in cls.programs.items():
            for rank in range(4):
                ranks.wait_for(rank, "began" if how == "well" else "called")
        HOSTS.cut()
        for ranks in cls.programs.values():
            ranks.directory.joinpath("go").touch()

    def assert_each_side_misses_the_other(self, how, name):
        ranks = self.programs[how]
        for rank, missed in enumerate(["ranks 2 and 3 (host-b)"] * 2 + ["ranks 0 and 1 (host-a)"] * 2):
            end = ranks.wait_for(rank, "end")
            self.assertRegex(end, rf"^{name} \(collective \d+\): ")
            self.assertIn(f": no progress in {PATIENCE} s: {missed} do not answer; look at ", end)
        self.assert_all_end(ranks)

    def assert_all_end(self, ranks):
        pids = {int(ranks.wait_for(rank, "pid")) for rank in range(4)}
        end = time.monotonic() + 30
        while left := pids & set(HOSTS.processes()):
            self.assertLess(time.monotonic(), end, f"{left} of {pids} have not ended")
            time.sleep(0.01)

    def test_WhileRanksWork(self):
        self.assert_each_side_misses_the_other("well", r"(reduce_scatter of block 4|all_gather of block 5)")

    def test_BetweenTwoCollectives(self):
        self.assert_each_side_misses_the_other("idle", "barrier of block 6")

    def test_BeforeRanksLeave(self):
        ranks = self.programs["leave"]
        self.assertEqual(["well"] * 4, [ranks.wait_for(rank, "end") for rank in range(4)])
        self.assert_all_end(ranks)


if __name__ == "__main__":
    as_root()
    main()
