"""Ranks that are processes, under Open MPI's mpirun: the behaviour suite with one to five of them, processes that are
killed, stopped, or leave without a word, and the example of docs/ranks_example.md."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from launch import MPIRUN, ONE_HOST, PATIENCE, Ranks, run_suite  # noqa: E402
from report import main  # noqa: E402


class Suite(unittest.TestCase):
    def test_OneRank(self):
        run_suite(self, 1)

    def test_TwoRanks(self):
        run_suite(self, 2)

    def test_ThreeRanks(self):
        run_suite(self, 3)

    def test_FourRanks(self):
        run_suite(self, 4)

    def test_FiveRanks(self):
        run_suite(self, 5)


class LostRanks(unittest.TestCase):
    def start(self, *arguments, **keywords):
        ranks = Ranks(*arguments, **keywords)
        self.addCleanup(ranks.close)
        return ranks

    def assert_missed(self, ranks, who, lost):
        for rank in who:
            end = ranks.wait_for(rank, "end")
            self.assertRegex(end, r"^(reduce_scatter|all_gather|barrier) of block \d \(collective \d+\): ")
            self.assertIn(f"no progress in {PATIENCE} s: rank {lost} (", end)
            self.assertIn(" does not answer; ", end)

    def test_AnEndInPeaceIsOne(self):
        ranks = self.start(3, 30, "well")
        said = ranks.process.communicate(timeout=60)
        self.assertEqual((0, ""), (ranks.process.returncode, said[1]))
        self.assertEqual(["well"] * 3, [ranks.wait_for(rank, "end") for rank in range(3)])

    def test_ARankThatIsKilledIsNamedByTheOthers(self):
        ranks = self.start(4, 10**9, "well")
        for rank in range(4):
            ranks.wait_for(rank, "began")
        ranks.signal(2, signal.SIGKILL)
        self.assert_missed(ranks, (0, 1, 3), 2)

    def test_ARankThatIsStoppedIsNamedByTheOthersAndHearsOfItLater(self):
        ranks = self.start(3, 10**9, "well")
        for rank in range(3):
            ranks.wait_for(rank, "began")
        ranks.signal(0, signal.SIGSTOP)
        self.assert_missed(ranks, (1, 2), 0)
        ranks.signal(0, signal.SIGCONT)
        self.assertIn("collective", ranks.wait_for(0, "end"))

    def test_ARankThatExitsWithoutAWordIsNamed(self):
        ranks = self.start(3, 20, "exit")
        self.assert_missed(ranks, (0, 1), 2)

    def test_ARankThatSleepsIsNamedAndToldSo(self):
        ranks = self.start(3, 20, "sleep")
        for rank in (0, 1):
            self.assertIn(f"barrier of block 6 (collective 41): no progress in {PATIENCE} s: rank 2 has not come to it "
                          "(its last one is 40); ", ranks.wait_for(rank, "end"))

    def test_AnotherLaunchersProcessesAreRefused(self):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([os.environ["SPILLWAY_RANK_PROGRAM"], folder, PATIENCE, "1", "well"],
                                  env={**ONE_HOST, "PMI_SIZE": "2", "PMI_RANK": "0"},
                                  capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(4, done.returncode, done.stderr)
        self.assertIn("communicator mpi: the launcher has started 2 processes, and Open MPI v", done.stderr)
        self.assertIn("; start them with Open MPI's own mpirun", done.stderr)


class Example(unittest.TestCase):
    def norms(self, ranks):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder, "ds_config.json")
            config.write_text(json.dumps({
                "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "spillway": {"device": "host"}}))
            done = subprocess.run([MPIRUN, "-n", str(ranks), os.environ["SPILLWAY_MPI_EXAMPLE"], config],
                                  env=ONE_HOST, capture_output=True, text=True, timeout=120, check=False)
            self.assertEqual(0, done.returncode, done.stderr)
            found = {rank: [] for rank in range(ranks)}
            for rank, norm in re.findall(r"rank (\d) step \d+: gradient norm (\S+)", done.stdout):
                found[int(rank)].append(norm)
            return found

    def test_TheExampleTrainsTheSameModelOnEveryRank(self):
        found = self.norms(3)
        self.assertEqual(10, len(found[0]))
        self.assertEqual([found[0]] * 3, list(found.values()))
        self.assertEqual(sorted(map(float, found[0]), reverse=True), [float(norm) for norm in found[0]])
        # The sum of 0.1, 0.2 and 0.3 of weights that are one.
        self.assertAlmostEqual(0.6 * (4 * 512 * 300) ** 0.5, float(found[0][0]), delta=1e-3)


class Doctor(unittest.TestCase):
    def doctor(self, *command):
        done = subprocess.run([*command, os.environ["SPILLWAY_BINARY"], "doctor", "--ranks", "--json"],
                              env=ONE_HOST, capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(0, done.returncode, done.stderr)
        return {one["check"]: one["seen"] for one in json.loads(done.stdout)["findings"]}

    def test_RanksAreLookedAtTogether(self):
        seen = self.doctor(MPIRUN, "-n", "3")
        self.assertRegex(seen["ranks"], r"^rank 0 of 3, over Open MPI v4[\d.]+: 3 on \S+$")
        self.assertRegex(seen["all_gather"], r"^[\d.]+ GB/s into each rank")
        self.assertRegex(seen["reduce_scatter"], r"^[\d.]+ GB/s out of each rank in the fixed tree, [\d.]+ the lib")
        self.assertRegex(seen["all_reduce"], r"^\d+ µs for 16 values$")

    def test_OneRankIsToldHowToBeMore(self):
        self.assertIn("mpirun -n 2 spillway doctor --ranks", self.doctor()["ranks"])


if __name__ == "__main__":
    main()
