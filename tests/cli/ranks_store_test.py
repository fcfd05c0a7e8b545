"""`spillway store` and `spillway export` over the stores of several ranks, as a run of threads leaves them."""
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import CRASH, LIMIT_SECONDS, CliTest, sha256_of_model, spillway  # noqa: E402
from seed import test_seed  # noqa: E402

PROGRAM = os.environ.get("SPILLWAY_RANKS_PROGRAM", "")
STORE = "spillway.store"
WHOLE, REFUSED, DAMAGED = 0, 1, 2


class RanksStoreTest(CliTest):
    def command(self, ranks, steps, how):
        return [PROGRAM, str(self.place.nvme), str(ranks), str(steps), how]

    def train(self, ranks=2, steps=2, how="new"):
        done = subprocess.run(self.command(ranks, steps, how), capture_output=True, text=True, check=False,
                              timeout=LIMIT_SECONDS)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        return done.stdout

    def show(self, *options, status=WHOLE):
        run = spillway("store", self.place.nvme, *options)
        self.assertEqual(status, run.status, run.out + run.err)
        self.assertIsNone(CRASH.search(run.out + run.err), run.err)
        return run

    def as_json(self, *options, status=WHOLE):
        return json.loads(self.show("--json", *options, status=status).out)

    def export(self, name):
        out = self.place.folder / name
        run = spillway("export", self.place.nvme, out)
        self.assert_done(run)
        return sha256_of_model(out), run.out

    def flip(self, rank, offset):
        with open(self.place.nvme / f"rank{rank}" / STORE, "r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 1]))


class Together(RanksStoreTest):
    def test_AllRanksAreShown(self):
        self.train(ranks=4)
        text = self.show().out
        for words in ("4 ranks", f"rank 0    {self.place.nvme / 'rank0' / STORE}, ", "rank 3    ",
                      "steps     ranks 0 to 3 have steps 2 and 1\n", "step      2, the newest that all have\n"):
            self.assertIn(words, text)
        shown = self.as_json("--verify")
        self.assertEqual((2, [], []), (shown["step"], shown["damage"], shown["verified"]["bad"]))
        self.assertEqual([0, 1, 2, 3], [rank["rank"] for rank in shown["ranks"]])
        self.assertEqual({shown["run"]}, {rank["run"] for rank in shown["ranks"]})
        self.assertIn("step 2: every byte is intact", self.show("--verify").out)
        one = spillway("store", self.place.nvme / "rank1")
        self.assertIn("rank 1 of 4", one.out)

    def test_TheModelIsThatOfAnyNumberOfRanks(self):
        hashes = set()
        for ranks in (2, 4):
            self.train(ranks, steps=3, how="replace")
            digest, said = self.export(f"of{ranks}")
            self.assertIn(f"step 3 of the stores of {ranks} ranks in", said)
            hashes.add(digest)
        self.assertEqual(1, len(hashes))
        self.train(2, steps=1, how="replace")  # all four stores
        text = self.show().out
        self.assertNotIn("another run", text)
        self.assertIn("2 ranks", text)
        self.assertFalse((self.place.nvme / "rank3" / STORE).exists())

    def test_AllGoBackTogether(self):
        self.train(steps=3)
        self.assertIn("back at step 2 on all ranks, every byte of which is intact", self.show("--rollback").out)
        self.assertEqual(2, self.as_json("--verify")["step"])
        self.assertIn("begins with step 2", self.train(steps=2, how="resume"))
        self.assertIn("taken back, on at step 3 on all ranks", self.show("--rollback").out)
        self.assertEqual(3, self.as_json()["step"])
        self.assertIn("go back together", spillway("store", self.place.nvme / "rank0", "--rollback").err)

    def test_DamageIsFoundOnAnyRank(self):
        self.train(ranks=2)
        size = (self.place.nvme / "rank1" / STORE).stat().st_size
        for offset in range(size // 3, size, 40_000):
            self.flip(1, offset)
            run = spillway("store", self.place.nvme, "--verify")
            if run.status == DAMAGED:
                break
            self.flip(1, offset)
        self.assertEqual(DAMAGED, run.status, "no committed extent was hit")
        self.assertIn(f"{self.place.nvme / 'rank1' / STORE}: ", run.out + run.err)
        self.assertIn("--rollback goes back to the step before on all ranks", run.out)
        self.assert_refused(spillway("export", self.place.nvme, self.place.folder / "out"), "checksum")
        self.assertFalse((self.place.folder / "out").exists())
        self.show("--rollback")
        self.export("out")

    def test_WhatIsMissingOrMixedIsNamed(self):
        self.train(ranks=4)
        shutil.move(self.place.nvme / "rank2", self.place.folder / "aside")
        out = self.place.folder / "out"
        for command in (["store", self.place.nvme], ["store", self.place.nvme, "--verify"],
                        ["store", self.place.nvme, "--rollback"], ["export", self.place.nvme, out]):
            self.assert_refused(spillway(*command), "rank2", "rank 2 of 4 has none")
        self.assertFalse(out.exists())
        self.train(ranks=4, steps=1, how="replace")
        shutil.rmtree(self.place.nvme / "rank2")
        shutil.move(self.place.folder / "aside", self.place.nvme / "rank2")
        self.assert_refused(spillway("store", self.place.nvme), "rank 2 is not of the run of rank 0")

    def test_AReplacementThatWasCutShortIsShownAsTheNextRunFindsIt(self):
        self.train(steps=3)
        old = self.place.folder / "old"
        shutil.copytree(self.place.nvme / "rank1", old)
        self.train(steps=0, how="replace")
        new = self.place.nvme / "rank1" / STORE
        new.rename(new.with_name(STORE + ".new"))
        (old / STORE).rename(new)
        shown = self.as_json()
        self.assertEqual((0, [1]), (shown["step"], shown["unnamed"]))
        self.assertIn("that was cut short, and the next run finishes it", self.show("--verify").out)
        self.assertIn("step 0", self.export("out")[1])
        self.assertIn("begins with step 0", self.train(steps=1, how="resume"))
        self.assertEqual([], self.as_json("--verify")["unnamed"])


class Killed(RanksStoreTest):
    def test_AKilledRunGoesOnWithTheSameBits(self):
        steps, kills = 60, 6
        whole = self.place.nvme
        self.train(steps=steps)
        expected, _ = self.export("expected")
        shutil.rmtree(whole)
        whole.mkdir()
        generator = random.Random(test_seed())
        how = "new"
        for kill in range(kills):
            with subprocess.Popen(self.command(2, steps, how), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                  text=True) as run:
                self.assertIn("begins with", run.stdout.readline())
                time.sleep(generator.uniform(0, 0.1))
                run.kill()
            how = "resume"
            self.export(f"killed{kill}")  # reads and verifies, and waits until the kernel has let go of the stores
        self.train(steps=steps, how="resume")
        self.assertEqual(expected, self.export("out")[0])


if __name__ == "__main__":
    main()
