"""`spillway finetune --resume` under mpirun with another number of ranks than before: the bits of a run that never
changed, whatever is killed on the way, and one refusal for all."""
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from mpirun import ONE_HOST, processes_of  # noqa: E402
from report import main  # noqa: E402
import runs  # noqa: E402
from runs import BINARY, CRASH, CliTest, Run, Workplace, sha256_of_model, spillway  # noqa: E402
from seed import test_seed  # noqa: E402

MPIRUN = os.environ.get("SPILLWAY_MPIRUN", "")
MICRO_BATCHES = 4  # of a step, on all ranks
GROUPS = {"sum_groups": 4}
STORE = "spillway.store"


def command_line(ranks, command):
    return ([MPIRUN, "-n", str(ranks)] if ranks > 1 else []) + [BINARY, *map(str, command)]


def on_ranks(ranks, command):
    done = subprocess.run(command_line(ranks, command), env=ONE_HOST, capture_output=True, text=True, timeout=120,
                          check=False)
    return Run(done.returncode, done.stdout, done.stderr)


@unittest.skipIf(not MPIRUN, "SPILLWAY_MPIRUN names no mpirun: this build or machine has none")
class RanksResume(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def command(self, ranks, steps, place=None, micro_batches=MICRO_BATCHES, section=None, resume=True, **how):
        place = place or self.place
        config = place.config(accumulation=micro_batches // ranks,
                              spillway_section=GROUPS if section is None else section)
        return place.arguments(config, self.model, steps=steps, log=place.log, resume=resume, **how)

    def train(self, ranks, steps, **how):
        run = on_ranks(ranks, self.command(ranks, steps, **how))
        self.assert_done(run)
        return run

    def never_changed(self, steps, section=None):
        place = Workplace(self.place.folder / "alone")
        self.train(1, steps, place=place, section=section, resume=False, out=place.folder / "out")
        return sha256_of_model(place.folder / "out"), [(s["loss"], s["grad_norm"]) for s in place.steps()]

    def export(self, name):
        out = self.place.folder / name
        run = spillway("export", self.place.nvme, out)
        self.assert_done(run)
        return sha256_of_model(out), run.out

    def test_OneTwoAndFourGoOnWithEachOthersStores(self):
        wanted, losses = self.never_changed(5)
        self.train(1, 1, resume=False)
        for step, ranks in ((2, 2), (3, 4), (4, 2)):
            run = self.train(ranks, step)
            self.assertIn(f"at step {step - 1}, become those of {ranks} ranks: together they take ", run.err)
            self.assertEqual([f"rank{rank}/{STORE}" for rank in range(ranks)], self.place.stored_files())
            self.assertEqual([f"rank{rank}" for rank in range(ranks)], sorted(os.listdir(self.place.nvme)))
        self.train(1, 5, out=self.place.folder / "out")
        self.assertEqual([STORE], self.place.stored_files())
        self.assertEqual(wanted, sha256_of_model(self.place.folder / "out"))
        self.assertEqual(losses, [(s["loss"], s["grad_norm"]) for s in self.place.steps()])

    def test_StatesOf8BitsOnTwoDrives(self):
        drives = [self.place.nvme, self.place.folder / "other"]
        section = {**GROUPS, "states": "int8", "nvme_paths": [str(drive) for drive in drives],
                   "nvme_rates": [1, 2]}
        wanted, _ = self.never_changed(4, {**GROUPS, "states": "int8"})
        self.train(4, 1, section=section, resume=False)
        self.train(2, 2, section=section)
        self.train(1, 3, section=section)
        self.train(2, 4, section=section, out=self.place.folder / "out")
        self.assertEqual(wanted, sha256_of_model(self.place.folder / "out"))
        for drive in drives:
            self.assertEqual([f"rank0/{STORE}", f"rank1/{STORE}"],
                             sorted(str(file.relative_to(drive)) for file in drive.rglob(STORE)))

    def test_ThreeGoOnFromTheSameStep(self):
        how = {"micro_batches": 12, "section": {}}
        self.train(2, 2, resume=False, **how)
        wanted, _ = self.export("of2")
        for ranks in (3, 1, 3, 4):
            self.train(ranks, 2, **how)
            found, said = self.export(f"of{ranks}")
            self.assertEqual(wanted, found)
            self.assertIn("step 2", said)
            shutil.rmtree(self.place.folder / f"of{ranks}")
        self.train(2, 3, **how)

    def test_WithoutResumeAStoreOfAnotherNumberOfRanksStays(self):
        self.train(2, 1, resume=False)
        self.assert_refused(spillway(*self.command(1, 1, resume=False)), "holds a store of several ranks", "--resume")
        self.train(1, 1)
        run = on_ranks(2, self.command(2, 1, resume=False))
        self.assert_refused(run, "holds a store of one process alone, and 2 are training", "--resume")

    def test_WhatIsMissingOrDamagedIsSaidOnce(self):
        self.train(4, 1, resume=False)
        aside = self.place.folder / "aside"
        shutil.move(self.place.nvme / "rank2", aside)
        for ranks in (1, 2):
            self.assert_refused(on_ranks(ranks, self.command(ranks, 2)), self.place.nvme / "rank2",
                                "rank 2 of 4 has none")
        shutil.move(aside, self.place.nvme / "rank2")
        store = self.place.nvme / "rank2" / STORE
        whole = store.read_bytes()
        for offset in range(len(whole) // 3, len(whole), 40_000):
            with open(store, "r+b") as file:
                file.seek(offset)
                file.write(bytes([whole[offset] ^ 1]))
            if spillway("store", self.place.nvme, "--verify").status == 2:
                break
        files = self.place.stored_files()
        for ranks in (1, 2):
            self.assert_refused(on_ranks(ranks, self.command(ranks, 2)), f"{store}: ", "do not match their checksum")
            self.assertEqual(files, self.place.stored_files())
        store.write_bytes(whole)
        self.train(2, 2)

    def test_ADiskWithoutRoomForBothIsRefusedAndNothingIsWritten(self):
        self.train(1, 1, resume=False)
        bytes_of_one = (self.place.nvme / STORE).stat().st_size
        with runs.mounted(self, "tmpfs", 2 * bytes_of_one - (256 << 10)) as disk:
            shutil.copy2(self.place.nvme / STORE, disk)
            self.place.nvme = disk
            run = on_ranks(2, self.command(2, 2))
            self.assert_refused(run, f"{disk}: the new stores take ", "stay until they are complete", "No space left")
            self.assertIn("become those of 2 ranks: together they take ", run.err)
            self.assertEqual([STORE], os.listdir(disk))
            self.train(1, 2)

    def test_KilledAtAnyMomentOneOfBothIsWhole(self):
        generator = random.Random(test_seed())
        steps, kills = 6, 6
        wanted, _ = self.never_changed(steps)
        self.train(2, 1, resume=False)
        before = 1
        for kill in range(kills):
            ranks = generator.choice((1, 2, 4))
            with subprocess.Popen(command_line(ranks, self.command(ranks, steps - 1)), env=ONE_HOST,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True) as run:
                # Before there are new stores, while they are made, and a little later.
                time.sleep(generator.uniform(0.1, 1.0))
                end = time.monotonic() + 60
                while processes := processes_of(self.place.folder):  # mpirun may start one meanwhile
                    for process in processes:
                        try:
                            os.kill(process, signal.SIGKILL)
                        except ProcessLookupError:
                            pass
                    self.assertLess(time.monotonic(), end, "ranks that nothing ends")
                    time.sleep(0.02)
                run.wait(60)
            shown = spillway("store", self.place.nvme, "--verify")
            while "in use" in shown.err:
                self.assertLess(time.monotonic(), end, shown.err)
                time.sleep(0.1)
                shown = spillway("store", self.place.nvme, "--verify")
            self.assertEqual(0, shown.status, shown.out + shown.err)
            self.assertIsNone(CRASH.search(shown.out + shown.err))
            step = int(shown.out.rpartition("verified  step ")[2].partition(":")[0])
            self.assertGreaterEqual(step, before)
            before = step
            shutil.rmtree(self.place.folder / "kept", ignore_errors=True)
            self.assertIn(f"step {step}", self.export("kept")[1])
        self.train(4, steps, out=self.place.folder / "out")
        self.assertEqual(wanted, sha256_of_model(self.place.folder / "out"))
        self.assertEqual([f"rank{rank}" for rank in range(4)], sorted(os.listdir(self.place.nvme)))


if __name__ == "__main__":
    main()
