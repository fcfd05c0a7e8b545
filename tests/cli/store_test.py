"""`spillway store`: what it says of a store, what it finds in a damaged one, and that it changes nothing."""
import errno
import hashlib
import json
import lzma
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CRASH, CliTest, Workplace, mounted, sha256_of_model, spillway  # noqa: E402

STORE = "spillway.store"
WHOLE, REFUSED, DAMAGED = 0, 1, 2


def flip(file, offset):
    with open(file, "r+b") as opened:
        opened.seek(offset)
        byte = opened.read(1)[0]
        opened.seek(offset)
        opened.write(bytes([byte ^ 1]))


def fill(file):
    """Takes all room of a file system, to the last block."""
    with open(file, "wb", buffering=0) as opened:
        for size in (1 << 20, 1 << 16, 1 << 12):
            try:
                while True:
                    opened.write(bytes(size))
                    os.fsync(opened.fileno())
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


class StoreTest(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.paths = [self.place.nvme]

    def train(self, steps=3, **options):
        section = {"nvme_paths": [str(path) for path in self.paths], "nvme_rates": [1] * len(self.paths)}
        config = self.place.config(nvme=self.paths[0], spillway_section=section if len(self.paths) > 1 else None)
        self.assert_done(self.place.finetune(config, self.model, steps=steps, **options))
        return config

    def show(self, *options, status=WHOLE):
        run = spillway("store", *self.paths, *options)
        self.assertEqual(status, run.status, run.out + run.err)
        self.assertIsNone(CRASH.search(run.out + run.err), run.err)
        return run

    def as_json(self, *options, status=WHOLE):
        return json.loads(self.show("--json", *options, status=status).out)

    def damage_a_committed_extent(self, part="states"):
        """Flips a byte of the committed step; returns what --verify then says of it."""
        size = (self.paths[0] / STORE).stat().st_size
        for offset in range(size // 3, size, 40_000):
            flip(self.paths[0] / STORE, offset)
            run = spillway("store", *self.paths, "--verify", "--json")
            if run.status == DAMAGED and json.loads(run.out)["verified"]["bad"][0]["name"].startswith(part):
                return json.loads(run.out)["verified"]["bad"]
            flip(self.paths[0] / STORE, offset)
        self.fail("no committed extent was hit")


class Shown(StoreTest):
    def test_AWholeStoreIsShownWithoutTheModel(self):
        self.train()
        shutil.rmtree(self.model)
        (self.place.folder / "ds_config.json").unlink()
        text = self.show().out
        for words in ("4 blocks", "bf16 weights, optimizer Adam", "17 of at most 16384 elements, 2 slots each",
                      f"{self.place.nvme / STORE}, ", "1 of 1 parts",
                      'step      3, with "row 6 of sequence 32 of data of ',
                      "commit 4 of step 3; its copy: commit 4 of step 3   <- the newest",
                      "commit 3 of step 2; its copy: commit 3 of step 2\n", "lock      free", "with config.json"):
            self.assertIn(words, text)
        shown = self.as_json()
        self.assertEqual((3, 2, False, []), tuple(shown[key] for key in ("step", "older_step", "in_use", "damage")))
        self.assertEqual(17, shown["tiles"])
        self.assertEqual((self.place.nvme / STORE).stat().st_size, shown["files"][0]["bytes"])
        verified = self.as_json("--verify")["verified"]
        self.assertEqual((3, shown["weight_bytes"] + shown["state_bytes"], []),
                         tuple(verified[key] for key in ("step", "bytes", "bad")))
        self.assertIn("step 3: every byte is intact", self.show("--verify").out)

    def test_NothingIsChanged(self):
        self.train()
        file = self.place.nvme / STORE

        def state():
            status = file.stat()
            return (hashlib.sha256(file.read_bytes()).hexdigest(), status.st_mtime_ns, status.st_size, status.st_mode,
                    self.place.stored_files())
        before = state()
        for options in ((), ("--json",), ("--verify",)):
            self.show(*options)
            self.assertEqual(before, state(), options)
        self.assert_done(spillway("export", self.place.nvme, self.place.folder / "out"))
        self.assertEqual(before, state(), "export")

    def test_AStoreThatNothingCanBeWrittenToIsExported(self):
        out = self.place.folder / "out"
        with mounted(self, "ext4", 64 << 20) as drive:  # which is what the kernel makes of one with errors
            self.paths = [drive / "store"]
            self.train()
            subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
            self.assert_done(spillway("export", self.paths[0], out))
        self.assertTrue((out / "model.safetensors").exists())

    def test_SeveralPathsAreOneStore(self):
        self.paths = [self.place.folder / "a", self.place.folder / "b"]
        self.train()
        shown = self.as_json("--verify")
        self.assertEqual([str(path / STORE) for path in self.paths], [file["path"] for file in shown["files"]])
        self.assertEqual([1, 1], [file["share"] for file in shown["files"]])
        self.assertIn("1 of 2 parts", self.show().out)
        whole, self.paths = self.paths, self.paths[:1]
        self.assertIn("is part 1 of 2 of its store", self.show(status=REFUSED).err)
        self.paths = whole[::-1]
        self.assertIn("named as part 1", self.show(status=REFUSED).err)

    def test_AStoreInUseIsShownAndNotVerified(self):
        config = self.train()
        command = [BINARY, *Workplace.arguments(config, self.model, steps=1_000_000, resume=True, log=self.place.log)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as holder:
            try:
                deadline = time.monotonic() + 60
                while not (self.place.log.exists() and self.place.log.read_text()):
                    self.assertIsNone(holder.poll())
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.02)
                self.assertIn("held by a running process", self.show().out)
                self.assertTrue(self.as_json()["in_use"])
                self.assertIn("in use", self.show("--verify", status=REFUSED).err)
            finally:
                holder.send_signal(signal.SIGINT)
            self.assertEqual(130, holder.wait(60))
        self.assertFalse(self.as_json("--verify")["in_use"])

    def test_WhatIsNoStoreIsRefused(self):
        # What no run was asked to do is not to be done without --resume.
        self.assertIn("holds no store; check the path: its run's configuration has it", self.show(status=REFUSED).err)
        self.assert_refused(spillway("export", self.place.nvme, self.place.folder / "out"), "has it as nvme_path")
        self.assert_refused(self.place.finetune(self.place.config(), self.place.folder / "model", resume=True),
                            "start a run without --resume")
        (self.place.nvme / STORE).write_bytes(b"x" * 200_000)
        self.assertIn("not a Spillway store", self.show(status=REFUSED).err)
        self.assertIn("Exit code: 0", spillway("store", "--help").out)

    def test_NewerFormatIsRefusedByName(self):
        self.train()
        file = self.place.nvme / STORE
        with open(file, "r+b") as opened:
            for copy in 0, file.stat().st_size - 65536:
                opened.seek(copy + 8)
                opened.write((99).to_bytes(4, "little"))
        self.assertIn("written by a newer version (store format 99", self.show(status=REFUSED).err)
        resumed = self.place.finetune(self.place.config(), self.model, steps=4, resume=True)
        self.assert_refused(resumed, file, "written by a newer version (store format 99")


class OfFormat3(StoreTest):
    """A store that the last version of format 3 has written: 3 steps of a model of one layer."""
    EXPORTED = {2: "d5ffd1f227c8849204fdb6eff2bb65ed1c8db45c55d08a239e0e444b5ae1400b",
                3: "5a5c9672dafab018bd02ad802b706389afaa11f4e3f08639f14261108a9daa4d"}

    def setUp(self):
        super().setUp()
        self.model = self.place.init_model("small", layers=1, width=4, heads=1, vocab=128, context=8)
        packed = pathlib.Path(__file__).parent / "stores" / "format_3.xz"
        self.file = self.place.nvme / STORE
        self.file.write_bytes(lzma.decompress(packed.read_bytes()))

    def tune(self, nvme=None, **options):
        config = self.place.config(nvme=nvme or self.place.nvme, spillway_section={"tile_elements": 4096})
        return self.place.finetune(config, self.model, seq=8, **options)

    def exported(self):
        out = self.place.folder / "exported"
        shutil.rmtree(out, ignore_errors=True)
        self.assert_done(spillway("export", self.place.nvme, out))
        return sha256_of_model(out)

    def test_ItIsShownVerifiedExportedAndRolledBack(self):
        shown = self.as_json("--verify")
        self.assertEqual((3, 3, 2, ""), tuple(shown[key] for key in ("format", "step", "older_step", "run")))
        self.assertEqual(self.EXPORTED[3], self.exported())
        self.assertIn(": back at step 2, ", self.show("--rollback").out)
        self.assertEqual(self.EXPORTED[2], self.exported())

    def test_ItIsResumedInItsOwnFormatWithTheBitsOfANewOne(self):
        size = self.file.stat().st_size
        kept, other = self.place.folder / "kept", self.place.folder / "other"
        self.assert_done(self.tune(steps=4, resume=True, save=kept, every=1))
        self.assert_done(self.tune(steps=6, resume=True, out=self.place.folder / "a"))
        self.assert_done(self.tune(nvme=other, steps=6, load=kept, out=self.place.folder / "b"))
        self.assertEqual(sha256_of_model(self.place.folder / "b"), sha256_of_model(self.place.folder / "a"))
        self.assertEqual((3, 6), tuple(self.as_json("--verify")[key] for key in ("format", "step")))
        self.assertEqual(size, self.file.stat().st_size)
        self.paths = [other]
        self.assertEqual((4, 6), tuple(self.as_json("--verify")[key] for key in ("format", "step")))

    def test_ADamagedDescriptionIsWrittenAnewByAResumedRun(self):
        flip(self.file, 65536 + 20)
        self.assertIn("the model description is damaged", self.show(status=REFUSED).err)
        self.assertIn("was damaged; it is whole again", self.tune(steps=4, resume=True).err)
        self.assertEqual(4, self.as_json()["step"])


class Damaged(StoreTest):
    def test_ASuperblockIsReadFromItsCopyAndWrittenAnewByTheNextRun(self):
        self.train()
        file = self.place.nvme / STORE
        flip(file, 40)
        before = file.read_bytes()
        self.assertIn(f"one of the two superblocks of {file}: the next run", self.show(status=DAMAGED).out)
        self.show("--verify", status=DAMAGED)
        self.assert_done(spillway("export", self.place.nvme, self.place.folder / "out"))
        self.assertEqual(before, file.read_bytes())
        self.assertIn("one of its two superblocks was damaged and is written anew", self.train_again().err)
        self.assertEqual(4, self.as_json("--verify")["step"])

    def train_again(self):
        run = self.place.finetune(self.place.config(), self.model, steps=4, resume=True)
        self.assert_done(run)
        return run

    def test_EveryBadExtentIsNamedWithItsPlace(self):
        self.train()
        bad = self.damage_a_committed_extent()
        self.assertEqual(1, len(bad))
        self.assertRegex(bad[0]["name"], r"^states of tile \d+ of block layer \d+ \(transformer\..+\)$")
        self.assertEqual(str(self.place.nvme / STORE), bad[0]["file"])
        run = self.show("--verify", status=DAMAGED)
        self.assertIn(f"{bad[0]['file']}: {bad[0]['name']} at offset {bad[0]['offset']} ", run.err)
        self.assertIn("one extent is not as written", run.out)
        self.assertIn("--rollback goes back to step 2", run.out)
        self.show()  # the records are whole
        # A run that is resumed finds it too, before it uses a byte.
        resumed = self.place.finetune(self.place.config(), self.model, steps=6, resume=True)
        self.assert_refused(resumed, bad[0]["file"], bad[0]["name"], f"offset {bad[0]['offset']}", "checksum", "step 3")

    def test_RolledBackItTrainsTheSameBits(self):
        config = self.train()
        self.damage_a_committed_extent()
        run = self.show("--rollback")
        self.assertIn(": back at step 2, ", run.out)
        self.assertEqual(2, self.as_json("--verify")["step"])
        out = self.place.folder / "out"
        self.assert_done(self.place.finetune(config, self.model, steps=5, out=out, resume=True))
        other = Workplace(self.place.folder / "undisturbed")
        self.assert_done(other.finetune(other.config(), self.model, steps=5, out=other.folder / "out"))
        self.assertEqual(sha256_of_model(other.folder / "out"), sha256_of_model(out))

    def test_WhatAResumedRunMeasuresLeavesTheStepToGoBackTo(self):
        self.model = self.place.init_model("wide", width=512, heads=8)
        config = self.place.config(spillway_section={"tile_elements": 1 << 19})
        self.assert_done(self.place.finetune(config, self.model, steps=3))
        resumed = self.place.finetune(config, self.model, steps=3, resume=True)
        self.assertIn("nvme link: ", resumed.out + resumed.err)
        self.assertIn(": back at step 2, ", self.show("--rollback").out)

    def test_ASecondRollbackTakesTheFirstOneBack(self):
        self.train()
        self.assertIn(": back at step 2, ", self.show("--rollback").out)
        self.assertIn(": the last --rollback is taken back, on at step 3, ", self.show("--rollback").out)

    def test_ADamagedRecordIsShownAndItsCopyServes(self):
        self.train()
        offsets = self.record_offsets()
        for n, offset in enumerate(offsets):
            flip(self.place.nvme / STORE, offset + 40)
            shown = self.as_json(status=WHOLE if n == 0 else DAMAGED)
            self.assertEqual(1 + n, sum(c["state"] == "damaged" for record in shown["records"] for c in record))
            self.assertEqual(3 - n, shown["step"])
        self.assertIn("the next run goes back to step 2", self.show("--verify", status=DAMAGED).out)

    def record_offsets(self):
        """Where the two copies of the newest record begin: at multiples of 64 KiB, and they say `SPWMAN02`."""
        content = (self.place.nvme / STORE).read_bytes()
        records = [at for at in range(0, len(content), 65536) if content[at:at + 8] == b"SPWMAN02"]
        self.assertEqual(4, len(records))
        newest = max(int.from_bytes(content[at + 24:at + 32], "little") for at in records)
        return [at for at in records if int.from_bytes(content[at + 24:at + 32], "little") == newest]


class Kept(StoreTest):
    def test_FilesAndDirectoriesAreTheOwnersOnly(self):
        before = os.umask(0)
        try:
            self.paths = [self.place.folder / "deep" / "er" / "a", self.place.folder / "b/"]
            self.train()
        finally:
            os.umask(before)
        for path in self.paths:
            self.assertEqual(0o700, stat.S_IMODE(path.stat().st_mode))
            self.assertEqual(0o600, stat.S_IMODE((path / STORE).stat().st_mode))

    def test_NobodyElseCanWriteWhatARunLeaves(self):
        before = os.umask(0)
        try:
            kept, out, exported = (self.place.folder / "deep" / name for name in ("kept", "out", "exported"))
            self.train(save=kept, every=1, out=out, log=self.place.log)
            self.assert_done(spillway("export", self.place.nvme, exported))
        finally:
            os.umask(before)
        left = [self.place.log, *(self.place.folder / "deep").rglob("*"), self.place.folder / "deep"]
        self.assertGreater(len(left), 8)
        for path in left:
            with self.subTest(path):
                self.assertEqual(0o755 if path.is_dir() else 0o644, stat.S_IMODE(path.stat().st_mode))

    def test_AFullDriveIsEnoughToResumeAndToReplace(self):
        for kind in ("ext4", "xfs", "btrfs"):
            with self.subTest(kind), mounted(self, kind, 320 << 20) as drive:
                self.paths = [drive / "store"]
                self.train()
                fill(drive / "filler")
                self.train(steps=5, resume=True)
                self.assertEqual(5, self.as_json("--verify")["step"])
                self.train(steps=2, fresh=True)
                self.assertEqual(2, self.as_json("--verify")["step"])

    def test_WhatARunIsNotMadeForIsNamed(self):
        self.train()
        other = self.place.init_model("other", width=80)
        for how, model, words in (
                ({"dtype": "fp32"}, self.model, "bf16 weights (here: fp32)"),
                ({"spillway_section": {"tile_elements": 8192}}, self.model, "tiles of 16384 elements (here: 8192)"),
                ({}, other, "wte.weight [256, 72] (here: ")):
            with self.subTest(words):
                run = self.place.finetune(self.place.config(**how), model, steps=5, resume=True)
                self.assert_refused(run, self.place.nvme / STORE, words)
        self.train(steps=4, resume=True)


if __name__ == "__main__":
    main()
