"""A trained model as a directory: what the model loads, whole or not there, and never lost."""
import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import unittest
import unittest.mock

from case import Case as Folder
from case import main

import torch

from spillway.engine import buffers, safetensors_files
from toy_model import DEVICE, batches, config, model, train


class Export(Folder):
    def engine(self, network=None, **options):
        return super().engine(model() if network is None else network, **options)

    def test_ExportIsWhatTheModelLoads(self):
        network = model()
        network.config = type("Config", (), {"to_json_string": lambda self: '{"model_type": "toy"}'})()
        engine = self.engine(network)
        train(engine, 2)
        engine.export(self.folder / "out")
        self.assertEqual('{"model_type": "toy"}', (self.folder / "out/config.json").read_text())
        self.assertTrue((self.folder / "out/model.safetensors").exists())
        loaded = model(seed=9)
        loaded.load_state_dict(network.state_dict())
        with torch.no_grad():
            loaded.to(DEVICE).eval()
            engine.module.eval()
            self.assertEqual(loaded(batches(1)[0]), engine(batches(1)[0]))
        error = self.assert_error(r"dtype: is 'bf16', which is none of torch.float32, torch.bfloat16, ", engine.export,
                                  self.folder / "none", "bf16")
        self.assertEqual(("invalid_argument", False), (error.code, (self.folder / "none").exists()))

    def test_AnExportThatIsRefusedIsNotLost(self):
        engine = self.engine()
        engine.export(self.folder / "out")
        train(engine, 1)
        for number in (2, 3):
            error = self.assert_error(f"this time it was exported to .*/out-{number}$", engine.export,
                                      self.folder / "out")
            self.assertEqual("exists", error.code)
        first, *others = ((self.folder / name / "model.safetensors").read_bytes() for name in ("out", "out-2", "out-3"))
        self.assertNotEqual(first, others[0])
        self.assertEqual(others[0], others[1])

    def test_AnExportIntoADirectoryThatIsWrittenIsNotLost(self):
        engine = self.engine(model())
        train(engine, 1)
        (self.folder / "out").mkdir()
        lock = os.open(self.folder / "out", os.O_RDONLY)
        self.addCleanup(os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_EX)
        error = self.assert_error("a model is being written there.*out-2$", engine.export, self.folder / "out")
        self.assertEqual("busy", error.code)
        self.assertTrue((self.folder / "out-2/model.safetensors").exists())

    @unittest.skipUnless(importlib.util.find_spec("safetensors"), "no safetensors in this Python")
    def test_AModelWithBuffersGoesWhereAnyGoes(self):
        (self.folder / "there/below").mkdir(parents=True)
        (self.folder / "link").symlink_to(self.folder / "there/below")
        (self.folder / "file").touch()
        network = model()
        network.register_buffer("seen", torch.zeros(1))
        engine = self.engine(network)
        engine.export(self.folder / "link/../out")
        self.assertTrue((self.folder / "there/out/model.safetensors.index.json").exists())
        self.assert_error(f"^{self.folder}/file/out: ", engine.export, self.folder / "file/out")
        self.assert_error(f"^{self.folder}/{'x' * 256}: ", engine.export, self.folder / ("x" * 256))
        self.assertEqual(["below", "out"], sorted(os.listdir(self.folder / "there")))

    @unittest.skipUnless(hasattr(torch, "compile"), "this PyTorch has no torch.compile")
    def test_ACompiledModelIsExportedUnderItsOwnNames(self):
        """As its store is made: one is gone on from with the other. state_dict() has PyTorch's names."""
        plain = model()
        names = sorted(plain.state_dict().keys() - {"head.weight"})
        engine = self.engine(torch.compile(plain, backend="eager"))
        engine.export(self.folder / "out")
        self.assertEqual(names, sorted(self.read(self.folder / "out")))
        self.assertEqual(names, sorted(engine.master_weights()))
        self.assertTrue(all(name.startswith("_orig_mod.") for name in engine.state_dict()))
        engine.close()
        network = model(seed=9)
        network.norm = torch.compile(network.norm, backend="eager")
        engine = self.engine(network, on_existing="resume")
        engine.export(self.folder / "again")
        for name, value in self.read(self.folder / "again").items():
            self.assertTrue(torch.equal(value, self.read(self.folder / "out")[name]), name)

    def read(self, folder):
        import safetensors.torch
        return {name: value for path in folder.glob("*.safetensors")
                for name, value in safetensors.torch.load_file(path).items()}

    @unittest.skipUnless(importlib.util.find_spec("safetensors"), "no safetensors in this Python")
    def test_NamesAreTurnedBackGroupByGroup(self):
        """By a function as transformers 5 has it, here one that splits, joins and renames, of no more than needed."""
        asked, refuse = [], []

        def revert(network, tensors):
            self.assertIsInstance(network, type(model()))
            made = {}
            for name, value in tensors.items():
                if name.endswith("up.weight"):
                    for number, part in enumerate(value.chunk(4)):
                        made[name.replace("up", f"experts.{number}")] = part
                elif name.endswith("norm.weight"):
                    made[name.replace("weight", "both")] = torch.stack([value, tensors[name.replace("weight", "bias")]])
                elif not name.endswith("norm.bias"):
                    made[name.replace("embedding.", "wte.")] = value
            if all(not value.is_meta for value in tensors.values()):
                asked.append(sorted(tensors))
                refuse and refuse[0]()
            return made

        network = model()
        network.register_buffer("seen", torch.tensor([7]))
        text = '{"model_type": "toy", "dtype": "float32"}'
        network.config = type("Config", (), {"to_json_string": lambda self: text})()
        loading = type(sys)("transformers.core_model_loading")
        loading.revert_weight_conversion = revert
        transformers = type(sys)("transformers")
        transformers.PreTrainedModel = torch.nn.Module
        engine = self.engine(network)
        train(engine, 1)
        out = self.folder / "out"
        with unittest.mock.patch.dict(sys.modules, {"transformers": transformers,
                                                    "transformers.core_model_loading": loading}), \
                unittest.mock.patch.object(safetensors_files, "MOST_BYTES", 40000):
            engine.export(out)
            self.assertEqual(sorted([[f"layers.{i}.up.weight"] for i in range(3)] + [
                [f"{at}norm.bias", f"{at}norm.weight"] for at in ("", "layers.0.", "layers.1.", "layers.2.")]),
                sorted(asked))
            self.assertGreater(len(list(out.glob("model-0000?-of-*.safetensors"))), 1)
            index = json.loads((out / "model.safetensors.index.json").read_text())
            self.assertEqual({*self.read(out)}, {*index["weight_map"]})
            wanted = revert(network, {**engine.master_weights(), "seen": network.seen.cpu()})
            self.assertEqual({*wanted}, {*index["weight_map"]})
            for name, value in self.read(out).items():
                self.assertTrue(torch.equal(wanted[name], value), name)
            self.assert_error("a model is there; name another directory, or say replace=True; this time it was "
                              "exported to .*/out-2$", engine.export, out)
            before = {path.name: path.read_bytes() for path in out.iterdir()}

            def fails():
                raise OSError(28, "No space left on device")

            refuse.append(fails)
            for place in (out, self.folder / "new"):
                error = self.assert_error(rf"^{place}: .* \(No space left on device\); free some space, or name "
                                          "another directory$", engine.export, place, replace=True)
                self.assertEqual("io", error.code)
            with unittest.mock.patch("fcntl.flock", side_effect=OSError(37, "No locks available")):
                self.assert_error("No space left on device", engine.export, out, replace=True)
            self.assertEqual(before, {path.name: path.read_bytes() for path in out.iterdir()})
            self.assertEqual(["ds_config.json", "out", "out-2", "store"], sorted(os.listdir(self.folder)))
            refuse.clear()
            (out / "mine").touch()
            with unittest.mock.patch.object(safetensors_files, "MOST_BYTES", 10**9):
                engine.export(out, dtype=torch.bfloat16, replace=True)
        self.assertEqual(["config.json", "mine", "model.safetensors"], sorted(os.listdir(out)))
        self.assertEqual({"model_type": "toy", "dtype": "bfloat16"}, json.loads((out / "config.json").read_text()))
        found = self.read(out)
        self.assertEqual({*wanted}, {*found})
        for name, value in found.items():
            self.assertTrue(torch.equal(wanted[name].to(value.dtype), value), name)
            self.assertEqual(torch.int64 if name == "seen" else torch.bfloat16, value.dtype)

    @unittest.skipUnless(importlib.util.find_spec("safetensors"), "no safetensors in this Python")
    def test_StoresAndSnapshotsKnowTheNamesInFiles(self):
        """Renamed tensors and pieces, of copies made for contiguous memory, too. What is neither is refused."""
        turned = [False]

        def revert(network, tensors):
            made = {}
            for name, value in tensors.items():
                if name.endswith("up.weight"):
                    for half, part in zip(("gate", "up"), torch.chunk(value.view(2, -1, value.shape[1]), 2, dim=1)):
                        for number, expert in enumerate(torch.chunk(part.contiguous(), 2, dim=0)):
                            made[name.replace("up", f"experts.{number}.{half}")] = expert.squeeze(0).contiguous()
                elif turned[0] and name.endswith("down.weight"):
                    made[name] = value.t().contiguous()
                else:
                    made[name.replace("embedding.", "wte.")] = value
            return made

        loading = type(sys)("transformers.core_model_loading")
        loading.revert_weight_conversion = revert
        transformers = type(sys)("transformers")
        transformers.PreTrainedModel = torch.nn.Module
        with unittest.mock.patch.dict(sys.modules, {"transformers": transformers,
                                                    "transformers.core_model_loading": loading}):
            engine = self.engine(model())
            train(engine, 1)
            engine.save(self.folder / "snapshot")
            engine.export(self.folder / "engine")
            engine.export_weights(self.folder / "library", torch.float32, False)
            engine.close()
            self.by_command("store", "from_store")
            self.by_command("snapshot", "from_snapshot")
            wanted = self.read(self.folder / "engine")
            self.assertIn("layers.0.experts.1.gate.weight", wanted)
            for folder in ("library", "from_store", "from_snapshot"):
                found = self.read(self.folder / folder)
                self.assertEqual({*wanted}, {*found})
                self.assertNotIn("spillway_names.json", os.listdir(self.folder / folder))
                for name, value in found.items():
                    self.assertTrue(torch.equal(wanted[name], value), name)
            turned[0] = True
            engine = self.engine(model(), on_existing="replace")
            engine.export(self.folder / "turned")
            engine.close()
        self.assertEqual((192, 48), tuple(self.read(self.folder / "turned")["layers.0.down.weight"].shape))
        self.assertIn("layers.0.down.weight: is in no file of this model as it is in memory",
                      self.by_command("store", "none"))
        self.assertFalse((self.folder / "none").exists())

    def by_command(self, source, to):
        """What `spillway export` says."""
        run = subprocess.run([os.environ["SPILLWAY_BINARY"], "export", self.folder / source, self.folder / to],
                             capture_output=True, text=True)
        return run.stderr

    def test_AModelOfTransformersInsideOfAnotherModuleIsSaid(self):
        class Inner(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.up = torch.nn.Linear(8, 8)

        class Around(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.pretrained_model, self.v_head = Inner(), torch.nn.Linear(8, 1)

        loading = type(sys)("transformers.core_model_loading")
        loading.revert_weight_conversion = lambda network, tensors: {
            name.replace("up", "wi"): value for name, value in tensors.items()}
        transformers = type(sys)("transformers")
        transformers.PreTrainedModel = Inner
        with unittest.mock.patch.dict(sys.modules, {"transformers": transformers,
                                                    "transformers.core_model_loading": loading}), \
                self.assertLogs("spillway", "WARNING") as heard:
            engine = self.engine(Around())
            engine.export(self.folder / "out")
        said = [line for line in heard.output if "pretrained_model: its files have other tensors than up." in line]
        self.assertEqual(1, len(said))
        self.assertIn("call pretrained_model.save_pretrained()", said[0])

    def test_ATrainersCheckpointKeepsBuffersUnderTheirNamesInMemory(self):
        """An export beside them may have others."""
        kept, given = model(), model()
        kept.register_buffer("seen", torch.tensor([7.0]))
        given.register_buffer("seen", torch.tensor([0.0]))
        buffers.load(given, self.folder)
        self.assertEqual([0.0], given.seen.tolist())
        buffers.keep(kept, self.folder)
        buffers.load(given, self.folder)
        self.assertEqual([7.0], given.seen.tolist())
        buffers.keep(model(), self.folder / "none")  # which has none to keep

    def test_WhatAnExportWillNeedIsSaidAtTheStart(self):
        network = model()
        network.register_buffer("seen", torch.zeros(1))
        with unittest.mock.patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None}), \
                self.assertLogs("spillway", "WARNING") as heard:
            self.engine(network)
        self.assertIn("`pip install safetensors` brings it", heard.output[0])

    @unittest.skipUnless(importlib.util.find_spec("safetensors"), "no safetensors in this Python")
    def test_AModelWithBuffersIsWholeOrNotThere(self):
        import safetensors.torch
        network, place, save = model(), self.folder / "models", safetensors.torch.save
        network.register_buffer("seen", torch.tensor([7.0]))
        engine = self.engine(network)

        def export(name, event):
            """`event`: what happens when the weights are written, and the buffers are not."""
            def happens(*arguments, **options):
                unwritten = [path for path in place.iterdir() if path.name.startswith(".spillway-")]
                self.assertEqual((1, False), (len(unwritten), (place / name / "model.safetensors").exists()))
                event(*unwritten)
                return save(*arguments, **options)

            with unittest.mock.patch.object(safetensors.torch, "save", happens):
                engine.export(place / name)

        def fails(_):
            raise OSError(28, "No space left on device")

        def is_killed(unwritten):  # it is not locked any more then
            os.rename(unwritten, place / ".killed.partial")
            raise OSError(0, "killed")

        for event, left in ((fails, []), (is_killed, [".killed.partial"])):
            self.assert_error(f"^{place}/out: the model cannot be written ", export, "out", event)
            self.assertEqual(left, os.listdir(place))
        # A neighbour removes what a killed process left, and nothing else.
        export("out", lambda _: engine.export_weights(place / "neighbour", torch.float32, False))
        self.assertEqual(["neighbour", "out"], sorted(os.listdir(place)))
        self.assertEqual(["model-buffers.safetensors", "model-weights.safetensors", "model.safetensors.index.json"],
                         sorted(os.listdir(place / "out")))
        loaded = safetensors.torch.load_file(place / "out/model-buffers.safetensors")
        self.assertEqual([7.0], loaded["seen"].tolist())

        def comes(_):
            (place / "late").mkdir(exist_ok=True)
            (place / "late/mine").touch()

        self.assert_error("late-2$", export, "late", comes)
        self.assertEqual(["mine"], os.listdir(place / "late"))
        self.assertTrue((place / "late-2/model-buffers.safetensors").exists())


if __name__ == "__main__":
    main()
