"""Snapshots of a fine-tune, and exports: whole or not there, and enough to go on from with the same bits."""
import json
import os
import pathlib
import random
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CliTest, Workplace, mounted, sha256_of_model, spillway  # noqa: E402
from seed import test_seed  # noqa: E402

STEPS = 6
TENSORS = {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"}


def header(file):
    """Names, dtypes, shapes and offsets, as safetensors' own library reads them: offsets cover the data exactly."""
    data = pathlib.Path(file).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    tensors = json.loads(data[8:8 + length])
    assert tensors.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
        count = 1
        for extent in tensor["shape"]:
            count *= extent
        assert tensor["data_offsets"] == [end, end + count * {"F32": 4, "BF16": 2}[tensor["dtype"]]], name
        end = tensor["data_offsets"][1]
    assert 8 + length + end == len(data), f"{file} is cut short"
    return tensors


def tensors_of(folder, stem="model"):
    """All tensors of a model, through its index where it has one, as Hugging Face's loaders find them."""
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.exists():
        return header(single)
    found = {}
    content = json.loads(index.read_text())
    for name, file in content["weight_map"].items():
        found[name] = header(folder / file)[name]
    begin_end = [tensor["data_offsets"] for tensor in found.values()]
    assert content["metadata"]["total_size"] == sum(end - begin for begin, end in begin_end)
    return found


class Snapshots(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.config = self.place.config()
        self.saved = self.place.folder / "saved"

    def finetune(self, config=None, **options):
        return self.place.finetune(config or self.config, self.model, **options)

    def whole(self, steps=STEPS):
        """Hash of a run that nothing happened to."""
        place = Workplace(self.place.folder / "whole")
        self.assert_done(place.finetune(place.config(), self.model, steps=steps, out=place.folder / "out"))
        return sha256_of_model(place.folder / "out")

    def there(self):
        return sorted(path.name for path in self.saved.iterdir())

    def assert_whole(self, snapshot):
        record = json.loads((snapshot / "spillway.json").read_text())
        self.assertEqual(f"step-{record['step']:06}", snapshot.name)
        self.assertEqual(sorted([*record["files"], "spillway.json"]), sorted(p.name for p in snapshot.iterdir()))
        weights = tensors_of(snapshot)
        self.assertLessEqual(TENSORS, set(weights))
        self.assertEqual({"F32"}, {tensor["dtype"] for tensor in weights.values()})
        for stem in ("exp_avg", "exp_avg_sq"):
            states = tensors_of(snapshot, stem)
            self.assertEqual({f"{name}.{stem}": tensor["shape"] for name, tensor in weights.items()},
                             {name: tensor["shape"] for name, tensor in states.items()})
            self.assertEqual({"F32"}, {tensor["dtype"] for tensor in states.values()})

    def test_ASnapshotIsWholeAndGoesOnElsewhereWithTheSameBits(self):
        wanted = self.whole()
        run = self.finetune(steps=STEPS, save=self.saved, every=2)
        self.assert_done(run)
        self.assertEqual(["step-000002", "step-000004", "step-000006"], self.there())
        self.assertIn(f"snapshot: {self.saved}/step-000002\n", run.out)
        for name in self.there():
            self.assert_whole(self.saved / name)
        for name, config in (("memory", {"parameters": "none", "states": "none"}),
                             ("host", {"parameters": "nvme", "states": "cpu"}),
                             ("tiles", {"spillway_section": {"tile_elements": 5120}})):
            with self.subTest(name):
                other = Workplace(self.place.folder / name)
                out, snapshot = other.folder / "out", self.saved / "step-000004"
                self.assert_done(other.finetune(other.config(**config), snapshot, steps=STEPS, out=out, load=snapshot))
                self.assertEqual(wanted, sha256_of_model(out))

    def test_ExportOfASnapshotEqualsThatOfTheStore(self):
        self.assert_done(self.finetune(steps=2, save=self.saved, every=2))
        for dtype in ("fp32", "bf16"):
            values = []
            for source in (self.place.nvme, self.saved / "step-000002"):
                out = self.place.folder / f"{source.name}-{dtype}"
                run = spillway("export", source, out, "--dtype", dtype)
                self.assert_done(run)
                self.assertIn("the model of step 2 of the", run.out)
                data = (out / "model.safetensors").read_bytes()
                start = 8 + struct.unpack("<Q", data[:8])[0]
                values.append({name: data[start + tensor["data_offsets"][0]:start + tensor["data_offsets"][1]]
                               for name, tensor in header(out / "model.safetensors").items()})
                self.assertTrue((out / "config.json").exists())
            self.assertTrue(values[0] == values[1], dtype)

    def test_ExportTakesTheNewestOfADirectoryThatIsNoStore(self):
        self.assert_done(self.finetune(steps=3, save=self.saved, every=1))
        out = self.place.folder / "out"
        run = spillway("export", self.saved, out)
        self.assert_done(run)
        self.assertEqual(f"{out}: the model of step 3 of the snapshot in {self.saved}/step-000003\n", run.out)
        # In the store's own directory they are beside what was named.
        self.assert_done(self.finetune(steps=5, save=self.place.nvme, every=4, resume=True))
        shutil.rmtree(self.place.nvme / "step-000005")
        run = spillway("export", self.place.nvme, out)
        self.assert_done(run)
        self.assertIn("the model of step 5 of the store", run.out)

    def test_LoadTakesTheNewestOfADirectory(self):
        self.assert_done(self.finetune(steps=3, save=self.saved, every=1))
        (self.saved / "step-000009").mkdir()
        other = Workplace(self.place.folder / "other")
        run = other.finetune(other.config(), self.model, steps=4, load=self.saved, log=other.log)
        self.assert_done(run)
        self.assertIn(f"begun with {self.saved}/step-000003, step 3", run.out)
        self.assertEqual([4], [step["step"] for step in other.steps()])
        self.assertIn("step-000009: is no snapshot: it has no spillway.json; no snapshot of step 9", run.err)
        self.assert_refused(other.finetune(other.config(), self.model, load=self.place.nvme), "holds none")
        self.assert_refused(other.finetune(other.config(), self.model, load=self.saved), "--resume", "--fresh")

    def test_LoadSaysWhichDamagedSnapshotItPassesOver(self):
        self.assert_done(self.finetune(steps=4, save=self.saved, every=1))
        record = self.saved / "step-000004" / "spillway.json"
        record.write_bytes(record.read_bytes()[:100])
        (self.saved / "step-000003" / "exp_avg.safetensors").unlink()
        (self.saved / "step-000001" / "exp_avg.safetensors").unlink()
        (self.saved / "step-of-mine").mkdir()
        other = Workplace(self.place.folder / "other")
        run = other.finetune(other.config(), self.model, steps=3, load=self.saved)
        self.assert_done(run)
        self.assertIn(f"begun with {self.saved}/step-000002, step 2", run.out)
        self.assertEqual([f"spillway: {self.saved}/step-000003/exp_avg.safetensors: is missing; "
                          "no snapshot of step 3, looking for an older one",
                          f"spillway: {record}: is not as it was written; "
                          "no snapshot of step 4, looking for an older one"],
                         [line for line in run.err.splitlines() if "no snapshot" in line])

    def test_WhatAKilledRunWasReplacingIsLoadedAndGetsItsNameBack(self):
        """On a file system that cannot exchange two names (NFS), a run may be killed between its two renames."""
        self.assert_done(self.finetune(steps=3, save=self.saved, every=1))
        newest = self.saved / "step-000003"
        (newest / ".spillway-partial").touch()
        shutil.copytree(newest, self.saved / ".step-000003.partial")
        newest.rename(newest.with_suffix(".replaced"))
        other = Workplace(self.place.folder / "other")
        run = other.finetune(other.config(), self.model, steps=4, load=self.saved)
        self.assert_done(run)
        self.assertIn(f"begun with {newest}.replaced, step 3", run.out)
        run = self.finetune(steps=3, save=self.saved, every=3, fresh=True)
        self.assert_done(run)
        self.assertIn(f"snapshot: {newest}\n", run.out)
        self.assertEqual(["step-000001", "step-000002", "step-000003"], self.there())
        self.assert_whole(newest)

    def test_ASnapshotBehindALinkIsReplacedWhereItLies(self):
        self.assert_done(self.finetune(steps=2, save=self.saved, every=2))
        elsewhere = self.place.folder / "elsewhere"
        elsewhere.mkdir()
        lies = (self.saved / "step-000002").rename(elsewhere / "step-000002")
        (self.saved / "step-000002").symlink_to(lies)
        for _ in range(2):
            run = self.finetune(steps=2, save=self.saved, every=2, fresh=True)
            self.assert_done(run)
            self.assertNotIn("no snapshot", run.err)
            self.assertEqual(["step-000002"], self.there())
            self.assertTrue((self.saved / "step-000002").is_symlink())
            self.assertEqual(["step-000002"], [path.name for path in elsewhere.iterdir()])
            self.assert_whole(elsewhere / "step-000002")

    def test_ASnapshotBehindALinkIsFoundAndKept(self):
        self.assert_done(self.finetune(steps=3, save=self.saved, every=1))
        archived = (self.saved / "step-000003").rename(self.place.folder / "archived")
        (self.saved / "step-000003").symlink_to(archived)
        other = Workplace(self.place.folder / "other")
        run = other.finetune(other.config(), self.model, steps=4, load=self.saved)
        self.assertIn(f"begun with {self.saved}/step-000003, step 3", run.out)
        exported = spillway("export", self.saved, self.place.folder / "out")
        self.assertIn(f"the model of step 3 of the snapshot in {self.saved}/step-000003", exported.out)
        self.assert_done(self.finetune(steps=6, save=self.saved, every=1, keep=1, resume=True))
        self.assertEqual(["step-000003", "step-000006"], self.there())
        self.assertTrue((self.saved / "step-000003").is_symlink())
        self.assertTrue((archived / "spillway.json").exists())

    def test_TheLastStepIsSavedWhateverTheInterval(self):
        self.assert_done(self.finetune(steps=5, save=self.saved, every=2, keep=2))
        self.assertEqual(["step-000004", "step-000005"], self.there())
        self.assert_done(self.finetune(steps=6, save=self.saved, every=1000, resume=True))
        self.assertEqual(["step-000004", "step-000005", "step-000006"], self.there())
        self.assert_whole(self.saved / "step-000006")

    def test_KeepRemovesTheOldestOfItsOwnAndNothingElse(self):
        self.saved.mkdir()
        (self.saved / "step-000001").mkdir()
        (self.saved / "step-000001" / "work").write_text("of years\n")
        (self.saved / ".mine.partial").mkdir()
        (self.saved / ".mine.partial" / "work").write_text("of years\n")
        stranger = Workplace(self.place.folder / "stranger")
        small = stranger.init_model(layers=1)
        self.assert_done(stranger.finetune(stranger.config(), small, steps=2, save=stranger.folder / "saved", every=2))
        (stranger.folder / "saved" / "step-000002").rename(self.saved / "step-000002")
        self.assert_done(self.finetune(steps=3, save=self.saved, every=3))
        (self.saved / "step-000003" / "notes").write_text("mine\n")
        run = self.finetune(steps=9, save=self.saved, every=1, keep=2, resume=True)
        self.assert_done(run)
        mine = [".mine.partial", "step-000001", "step-000002", "step-000003"]
        self.assertEqual([*mine, "step-000008", "step-000009"], self.there())
        self.assertEqual(1, run.err.count("notes: was not saved with the snapshot"), run.err)
        # Taken back to an earlier step: later snapshots stay until the run comes there again.
        shutil.rmtree(self.saved / "step-000008")
        self.assert_done(self.finetune(steps=5, save=self.saved, every=1, keep=2, fresh=True))
        self.assertEqual([*mine, "step-000004", "step-000005", "step-000009"], self.there())

    def test_AFullDiskCostsASnapshotAndNoStep(self):
        wanted = self.whole()
        with mounted(self, "tmpfs", 1 << 20) as folder:
            out = self.place.folder / "out"
            run = self.finetune(steps=STEPS, save=folder / "saved", every=3, out=out)
            self.assert_done(run)
            for step in (3, 6):
                self.assertRegex(run.err, rf"no snapshot of step {step}: {folder}.*No space left")
            self.assertEqual([], list((folder / "saved").iterdir()))
            self.assertEqual(wanted, sha256_of_model(out))

    def test_ADiskThatFillsUpKeepsWhatItHas(self):
        # A snapshot takes 12 bytes for each of 215 Ki parameters, about 2.6 MB: two of them find room.
        with mounted(self, "tmpfs", 7 << 20) as folder:
            self.saved = folder / "saved"
            run = self.finetune(steps=4, save=self.saved, every=1)
            self.assert_done(run)
            self.assertEqual(["step-000001", "step-000002"], self.there())
            for name in self.there():
                self.assert_whole(self.saved / name)
            self.assertRegex(run.err, "no snapshot of step 4: .*No space left on device")

    def test_ASaveDirectoryThatCannotBeIsRefusedBeforeTheFirstStep(self):
        path = self.place.folder / "file"
        path.write_text("in the way\n")
        self.assert_refused(self.finetune(save=path / "saved", every=1), path / "saved", "Not a directory")
        self.assertEqual([], self.place.stored_files())
        for options, word in (({"save": self.saved}, "--save-every"), ({"every": 1}, "--save"),
                              ({"keep": 1}, "--save-every"), ({"load": self.saved, "resume": True}, "--load")):
            self.assert_refused(self.finetune(**options), word)

    def test_KilledAtAnyMomentLeavesWholeSnapshotsOnly(self):
        wanted = self.whole()
        moments = random.Random(test_seed())
        options = {"steps": STEPS - 1, "save": self.saved, "every": 1, "log": self.place.log}
        for _ in range(int(os.environ.get("SPILLWAY_KILLS", "6"))):
            lines = len(self.place.steps()) if self.place.log.exists() else 0
            command = [BINARY, *Workplace.arguments(self.config, self.model, resume=lines > 0, **options)]
            with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
                deadline = time.monotonic() + 60
                while run.poll() is None and len(self.place.log.read_text().splitlines()
                                                 if self.place.log.exists() else []) <= lines:
                    self.assertLess(time.monotonic(), deadline)
                    time.sleep(0.001)
                time.sleep(moments.uniform(0, 0.03))  # in a snapshot, most often
                run.kill()
                run.communicate(timeout=60)
            self.assertIn(run.returncode, (-signal.SIGKILL, 0))
            for name in self.there():
                if not name.startswith("."):
                    self.assert_whole(self.saved / name)
            if self.place.steps()[-1]["step"] >= STEPS - 1:
                break
        out = self.place.folder / "out"
        self.assert_done(self.finetune(steps=STEPS, save=self.saved, every=1, out=out, resume=True))
        self.assertEqual(wanted, sha256_of_model(out))
        self.assertNotIn(True, [name.startswith(".") for name in self.there()], "a leftover was not removed")
        other = Workplace(self.place.folder / "other")
        self.assert_done(other.finetune(other.config(), self.model, steps=STEPS, load=self.saved / self.there()[0],
                                        out=other.folder / "out"))
        self.assertEqual(wanted, sha256_of_model(other.folder / "out"))


class Exports(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.assert_done(self.place.finetune(self.place.config(), self.model, steps=1))
        self.out = self.place.folder / "out"

    def export(self, *options):
        return spillway("export", self.place.nvme, self.out, *options)

    def test_ShardsHaveTheSizeThatWasAskedForAndTheFieldsNames(self):
        for size, most in (("100KB", 100_000), ("100KiB", 102_400), ("123456", 123_456)):
            with self.subTest(size):
                shutil.rmtree(self.out, ignore_errors=True)
                self.assert_done(self.export("--max-shard-size", size, "--dtype", "bf16"))
                files = sorted(path.name for path in self.out.glob("*.safetensors"))
                self.assertGreater(len(files), 2)
                self.assertEqual([f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))], files)
                tensors = tensors_of(self.out)
                self.assertLessEqual(TENSORS, set(tensors))
                for file in files:
                    held = header(self.out / file)
                    data = max(tensor["data_offsets"][1] for tensor in held.values())
                    self.assertTrue(data <= most or len(held) == 1, f"{file}: {data} bytes")

    def test_ConfigJsonNamesTheTypeOfTheTensorsBesideIt(self):
        place = Workplace(self.place.folder / "types")
        model = place.init_model(dtype="bf16")
        config = json.loads((model / "config.json").read_text())
        self.assertEqual("bfloat16", config["torch_dtype"])
        (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "prefix": "mine"}))
        trained, saved = place.folder / "trained", place.folder / "saved"
        self.assert_done(place.finetune(place.config(), model, out=trained, save=saved, every=3))
        for dtype, name in (("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")):
            for source in (place.nvme, saved / "step-000003"):
                self.assert_done(spillway("export", source, place.folder / f"{source.name}-{dtype}", "--dtype", dtype))
                found = json.loads((place.folder / f"{source.name}-{dtype}" / "config.json").read_text())
                self.assertEqual({**config, "torch_dtype": name, "dtype": name, "prefix": "mine"}, found)
        for written in (trained, saved / "step-000003"):
            found = json.loads((written / "config.json").read_text())
            self.assertEqual({**config, "torch_dtype": "float32", "dtype": "float32", "prefix": "mine"}, found)

    def test_AWrongSizeIsRefused(self):
        for size in ("0", "-1", "5 parsecs", "much"):
            self.assert_refused(self.export("--max-shard-size", size), "--max-shard-size")
        self.assertFalse(self.out.exists())

    def test_AFullDiskLeavesNoDirectory(self):
        with mounted(self, "tmpfs", 256 << 10) as folder:
            self.out = folder / "out"
            self.assert_refused(self.export(), folder, "No space left on device")
            self.assertEqual([], list(folder.iterdir()))


if __name__ == "__main__":
    main()
