"""`spillway sweep --ranks` under mpirun: all ranks load the drive, one speaks, and nothing stays on it in any case."""
import json
import pathlib
import re
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from ranks_test import MPIRUN, on_ranks  # noqa: E402
from runs import CliTest, spillway  # noqa: E402

QUICK = ["--seconds", "2", "--size", "32MiB", "--allow-buffered"]
UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


@unittest.skipIf(not MPIRUN, "SPILLWAY_MPIRUN names no mpirun: this build or machine has none")
class SweepOnRanks(CliTest):
    def setUp(self):
        super().setUp()
        self.drive = self.place.nvme
        self.json = self.place.folder / "aio.json"

    def sweep(self, *options, ranks=2):
        command = ["sweep", self.drive, "--ranks", *QUICK, *options]
        return on_ranks(*[command] * ranks)

    def assert_nothing_left(self):
        self.assertEqual([], sorted(path.name for path in self.drive.iterdir()))

    def bytes_after(self, words, text):
        number, unit = re.search(rf"{words} ([\d.]+) (\w+)", text).groups()
        return float(number) * UNITS[unit]

    def test_TwoMeasureTogetherAndOneSpeaks(self):
        run = self.sweep("--json", self.json)
        self.assert_done(run)
        self.assert_nothing_left()
        self.assertRegex(run.out, r"(?m)^ranks: 2 at the same time, 2 on this machine, \d+ cores? for each; ")
        self.assertIn(" s  filling 64 MiB with random data\n", run.out)  # 32 MiB of each
        self.assertEqual(1, len(re.findall(r"(?m)^chosen: block_size ", run.out)), run.out)
        self.assertLessEqual(self.bytes_after(r"(?m)^[\d.]+ s,", run.out),
                             1.001 * self.bytes_after("writes at most", run.out))
        written = json.loads(self.json.read_text())
        self.assertEqual({"aio", "spillway"}, set(written))
        self.assertIn(f'"queue_depth": {written["aio"]["queue_depth"]}', run.out)

    def test_PathsAreNamedWithoutTheDirectoriesOfTheRanks(self):
        other = self.place.folder / "other"
        (other / "rank1").mkdir(parents=True)
        kept = other / "rank1" / "kept"
        kept.write_text("of a store\n")
        run = self.sweep(other, "--json", self.json)
        self.assert_done(run)
        self.assert_nothing_left()
        self.assertIn("all, striped", run.out)
        self.assertEqual(([other / "rank1"], [kept]), (list(other.iterdir()), list((other / "rank1").iterdir())))
        paths = json.loads(self.json.read_text())["spillway"]["nvme_paths"]
        self.assertLessEqual(set(paths), {str(self.drive.resolve()), str(other.resolve())})

    def refuse(self, run, *words):
        line = self.assert_refused(run, *words)
        said = [line for line in run.err.splitlines() if line.startswith("spillway: ")]
        self.assertEqual([line], said, run.err)
        self.assertEqual("", run.out)
        self.assertFalse(self.json.exists())
        self.assert_nothing_left()

    def test_WhatOneRankCannotDoEndsAllWithItsWords(self):
        (self.drive / "rank1").write_text("no directory\n")
        run = self.sweep("--json", self.json)
        (self.drive / "rank1").unlink()
        self.refuse(run, f"spillway: rank 1: {self.drive / 'rank1'}")

    def test_RanksThatWereNotStartedAlikeAreRefusedOnce(self):
        command = ["sweep", self.drive, "--ranks", *QUICK]
        self.refuse(on_ranks(command, [*command[:-3], "--size", "48MiB", "--allow-buffered"]),
                    "spillway: --size: 33554432 bytes on rank 0, 50331648 bytes on rank 1; ")

    def test_OneProcessIsToldWhatToDo(self):
        self.refuse(spillway("sweep", self.drive, "--ranks", *QUICK),
                    "spillway: --ranks: there is one process, and none beside it; put mpirun -n 2 before the command")
        self.refuse(self.sweep("--sustained", "0.1"), "spillway: --sustained: is not measured with --ranks; ")


if __name__ == "__main__":
    main()
