"""Checkpoints as DeepSpeed saves them: runs go on with the bits of one that was never cut, or say what to do."""
import collections
import ctypes
import fcntl
import functools
import logging
import operator
import os
import resource
import signal
import sys
import unittest
import unittest.mock

from case import ROOT, Case as Folder, main

sys.path.append(str(ROOT / "tests/cli"))
import torch  # noqa: E402
import torch_files  # noqa: E402

import spillway  # noqa: E402
from deepspeed_files import deepspeeds  # noqa: E402
from toy_model import batches, config, model, train  # noqa: E402


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)


def as_pytorch(value):
    """What torch_files describes, for torch.save() itself."""
    if isinstance(value, torch_files.Tensor):
        data = torch.frombuffer(bytearray(value.storage.data), dtype=torch.float32)
        return data.view(value.shape)
    if isinstance(value, torch_files.Call):
        return (torch.Size if value.function is torch_files.NAMES["Size"] else int)(*value.arguments)
    if isinstance(value, dict):
        return type(value)((key, as_pytorch(each)) for key, each in value.items())
    return [as_pytorch(each) for each in value] if isinstance(value, list) else value


class Case(Folder):
    def trained(self, steps, network=None, **options):
        """An engine after so many steps, and a snapshot of it."""
        engine = self.engine(network or model(), config(self.folder), **options)
        train(engine, steps)
        engine.save(self.folder / "own")
        return engine, self.folder / "own"

    def initialize(self, network=None, configuration=None, **options):
        made = spillway.initialize(model=network or model(seed=9), config=configuration or config(self.folder),
                                   **{"on_existing": "replace", **options})
        self.addCleanup(made[0].close)
        return made[0]

    def assert_same_weights(self, wanted, engine):
        found = engine.master_weights()
        self.assertEqual(set(wanted), set(found))
        for name, value in found.items():
            self.assertTrue(torch.equal(wanted[name], value), name)


class LoadCheckpoint(Case):
    def test_ARunGoesOnWithTheSameBits(self):
        whole = self.initialize(model(), lr_scheduler=halving)
        wanted = train(whole, 2)[0]
        whole.save_checkpoint(self.folder / "own")
        wanted += train(whole, 2, first=2)[0]
        weights = whole.master_weights()
        whole.close()
        for name, options in (("stage3", {"ranks": 3, "group_elements": 4000}), ("stage1", {"ranks": 2, "stage": 1}),
                              ("swapped", {"ranks": 2, "swapped": True})):
            with self.subTest(name):
                made = deepspeeds(self.folder / "own/global_step2/spillway", model(), 2, **options)
                made.scheduler, made.more = {"last_epoch": 2}, {"epoch": 7, "rng": [1]}
                made.shared, made.settings[0]["lr"] = {"head.weight": "embedding.weight"}, 2.5e-4
                saved = made.write(self.folder / name)
                again = self.initialize(lr_scheduler=halving)
                with self.assertLogs("spillway", logging.WARNING) as logged:
                    path, client = again.load_checkpoint(saved)
                self.assertEqual((str(saved / "global_step2"), {}), (path, client))
                self.assertEqual(
                    [f"WARNING:spillway:{path}: is DeepSpeed's; taken are weights, exp_avg, exp_avg_sq and Adam's 2 "
                     "steps, after 4 samples; not carried: client state (epoch, rng)"], logged.output)
                self.assertEqual({"latest", "global_step2"}, set(os.listdir(saved)))
                self.assertEqual((2, 2, [2.5e-4]), (again.current_step, again.global_steps, again.get_lr()))
                self.assertEqual(wanted[2:], train(again, 2, first=2)[0])
                self.assert_same_weights(weights, again)
                again.close()
        # The store holds what was loaded.
        again = self.initialize(on_existing="resume")
        self.assertEqual(4, again.current_step)

    def test_StepsAreCountedAsDeepSpeedDid(self):
        """Adam's, its engine's and its schedule's are three different numbers."""
        engine, snapshot = self.trained(2)
        engine.close()
        made = deepspeeds(snapshot, model(), 2)
        made.more = {"global_steps": 6, "skipped_steps": 3, "global_samples": 0}  # as where there are none
        made.scheduler, made.settings[0]["lr"] = {"last_epoch": 4}, 1e-3 / 16
        made.write(self.folder / "saved")
        engine = self.initialize(lr_scheduler=halving)
        with self.assertLogs("spillway", logging.INFO) as logged:
            engine.load_checkpoint(self.folder / "saved")
        self.assertRegex(logged.output[-1], r"INFO:.*Adam's 2 steps \(DeepSpeed's engine counted 6, 3 of them "
                                            r"skipped\)$")
        self.assertEqual((2, 6, 24, [1e-3 / 16]), (engine.current_step, engine.global_steps, engine.global_samples,
                                                   engine.get_lr()))
        engine.backward(engine(batches(1)[0]))
        self.assertEqual(1e-3 / 16, engine.step(blob=b"row 9").learning_rate)
        self.assertEqual((3, 7, b"row 9"), (engine.current_step, engine.global_steps, engine.blob))
        engine.save_checkpoint(self.folder / "saved")
        self.assertEqual("global_step7", (self.folder / "saved/latest").read_text())
        engine.close()
        again = self.initialize()
        again.load_checkpoint(self.folder / "saved")
        self.assertEqual((3, 7), (again.current_step, again.global_steps))
        again.close()
        resumed = self.initialize(on_existing="resume")
        self.assertEqual((3, 7, b"row 9"), (resumed.current_step, resumed.global_steps, resumed.blob))
        resumed.backward(resumed(batches(1)[0]))
        self.assert_error("blob: is a str", resumed.step, blob="row 9")
        resumed.close()
        plain = self.engine(model(seed=9), config(self.folder), snapshot=self.folder / "saved/global_step7/spillway",
                            on_existing="replace")
        self.assertEqual(b"row 9", plain.blob)
        plain.backward(plain(batches(1)[0]))
        plain.step(blob=bytes(16000))
        self.assertEqual(bytes(16000), plain.blob)
        plain.close()
        resumed = self.initialize(on_existing="resume")
        self.assertEqual((4, 8, bytes(16000)), (resumed.current_step, resumed.global_steps, resumed.blob))

    def test_OneOfTwoInADirectoryIsNotChosenSilently(self):
        engine, snapshot = self.trained(2)
        engine.close()
        made = deepspeeds(snapshot, model(), 2)
        made.tag = "best"
        saved = made.write(self.folder / "saved")
        engine = self.initialize()
        train(engine, 1)
        code = self.assert_error("saved/best: already has a checkpoint of DeepSpeed's, .*; save under another tag",
                                 engine.save_checkpoint, saved, "best").code
        self.assertEqual("exists", code)
        self.assertEqual(3, len(os.listdir(saved / "best")) + len(os.listdir(saved)) - 1, os.listdir(saved / "best"))
        engine.save_checkpoint(saved, "own")
        engine.close()
        for part in ("spillway", "client_state.pt"):
            os.rename(saved / "own" / part, saved / "best" / part)
            again = self.initialize()
            self.assert_error("saved/best: has a checkpoint of DeepSpeed's and one of Spillway's",
                              again.load_checkpoint, saved, tag="best")
            self.assertEqual(0, again.current_step)
            again.close()
            os.rename(saved / "best" / part, saved / "own" / part)

    def test_BuffersAreNotCarried(self):
        engine, snapshot = self.trained(1)
        engine.close()
        deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        network = model()
        network.register_buffer("seen", torch.tensor([0]))
        engine = self.initialize(network)
        with self.assertLogs("spillway", logging.WARNING) as logged:
            engine.load_checkpoint(self.folder / "saved")
        self.assertRegex(logged.output[-1], r"; not carried: buffers \(seen\)")

    def test_WhatCannotBeLoaded(self):
        engine, snapshot = self.trained(1)
        engine.close()
        saved = deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        other = config(self.folder, optimizer={"type": "Lion", "params": {"lr": 1e-4}})
        engine = self.initialize(configuration=other)
        error = self.assert_error("^.*/saved: is of a run with the optimizer .*", engine.load_checkpoint, saved)
        self.assertNotIn(".spillway-", str(error))
        train(engine, 1)  # it goes on
        engine.close()
        engine = self.initialize()
        (saved / "empty").mkdir()
        self.assert_error("empty/spillway: is not there", engine.load_checkpoint, saved, tag="empty")
        (saved / "other").mkdir()
        (saved / "other/mp_rank_00_model_states.pt").touch()
        self.assert_error(r"saved/other: has no file \*_optim_states.pt; name a checkpoint of ZeRO",
                          engine.load_checkpoint, saved, tag="other")
        for place, words in (("tempfile.TemporaryDirectory", "saved: no snapshot of it can be made there"),
                             ("os.listdir", "saved/global_step1: cannot be read")):
            with unittest.mock.patch(place, side_effect=PermissionError(13, "Permission denied")):
                self.assert_error(rf"{words} \(Permission denied\); let this process", engine.load_checkpoint, saved)
        latest = (saved / "latest").read_bytes()
        (saved / "latest").write_bytes(b"\xff\xfe")
        self.assert_error(r"saved/latest: cannot be read \(no text\); name the checkpoint with tag=",
                          engine.load_checkpoint, saved)
        (saved / "latest").write_bytes(latest)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(signal.signal, signal.SIGXFSZ, signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, limits[1]))
        try:
            error = self.assert_error(f"^the snapshot beside {saved}, 12 bytes a parameter: .* cannot be reserved",
                                      engine.load_checkpoint, saved)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        self.assertNotIn(".spillway-", str(error))
        train(engine, 1)
        self.assert_error("global_step1: is DeepSpeed's, and cannot be loaded after step 1", engine.load_checkpoint,
                          saved)
        self.assertEqual({"latest", "global_step1", "empty", "other"}, set(os.listdir(saved)))

    def test_WhatAKilledImportLeftGoesWithTheNext(self):
        engine, snapshot = self.trained(1)
        engine.close()
        saved = deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        here = os.uname().nodename
        left, *others = (saved / name for name in (
            f".spillway-import-left@{here}", f".spillway-import-more@{here}", ".spillway-import-left@elsewhere",
            f".spillway-store@{here}", f"spillway-import-mine@{here}"))
        for folder in (left, *others):
            (folder / "snapshot").mkdir(parents=True)
            (folder / "snapshot/model.safetensors").touch()
        (others[0] / "precious").touch()
        others = {folder.name for folder in others}
        working = os.open(saved, os.O_RDONLY)
        fcntl.flock(working, fcntl.LOCK_SH)  # as another import holds it, which may be that directory's
        engine = self.initialize()
        engine.load_checkpoint(saved)
        engine.close()
        self.assertEqual({"latest", "global_step1", left.name, *others}, set(os.listdir(saved)))
        os.close(working)
        engine = self.initialize()
        with unittest.mock.patch.object(engine, "load_snapshot", side_effect=KeyboardInterrupt) as begin, \
                self.assertRaises(KeyboardInterrupt):
            engine.load_checkpoint(saved)
        self.assertRegex(begin.call_args[0][0], rf"/\.spillway-import-[^/]+@{here}/snapshot$")
        self.assertEqual({"latest", "global_step1", *others}, set(os.listdir(saved)))

    def test_Fp16GoesOnWithItsLossScale(self):
        engine, snapshot = self.trained(2)
        engine.close()
        made = deepspeeds(snapshot, model(), 2)
        made.more, made.scheduler = {"global_steps": 3}, None
        made.train_in_fp16(64.0, 9, 7, 2, skipped=1)
        made.settings[0]["lr"] = 2.5e-4  # the schedule's after two steps
        saved = made.write(self.folder / "saved")
        fp16 = {"enabled": True, "loss_scale_window": 2, "hysteresis": 2}
        warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}
        engine = self.initialize(configuration=config(self.folder, fp16=fp16, scheduler=warmup))
        with self.assertLogs("spillway", logging.INFO) as logged:
            engine.load_checkpoint(saved)
        self.assertRegex(logged.output[-1], r"INFO:.*exp_avg_sq, loss scale 64 and Adam's 2 steps \(DeepSpeed's engine "
                                            r"counted 3, 1 of them skipped\), after 4 samples$")
        self.assertEqual((3, 3, [2.5e-4]), (engine.current_step, engine.global_steps, engine.get_lr()))
        # One step lies after the overflow, so the scale grows after the second from here.
        reports = []
        for _ in range(3):  # without a forward pass, which PyTorch 1.13 has not in fp16 on a CPU
            engine.backward(torch.zeros((), requires_grad=True))
            reports.append(engine.step())
        self.assertEqual([64, 64, 128], [report.loss_scale for report in reports])
        self.assertEqual([2.5e-4, 5e-4, 7.5e-4], [report.learning_rate for report in reports])
        engine.close()
        engine = self.initialize(configuration=config(self.folder, bf16={"enabled": True}, scheduler=warmup))
        with self.assertLogs("spillway", logging.WARNING) as logged:
            engine.load_checkpoint(saved)
        self.assertEqual((2, 3), (engine.current_step, engine.global_steps))
        self.assertRegex(logged.output[-1], "not carried: loss scale 64; trained otherwise from here: bf16, not fp16$")


class Function(Case):
    def test_AnEngineBeginsWithWhatPyTorchSaved(self):
        """Files of this PyTorch's own torch.save(); a frozen parameter, a scalar, and a model on device meta."""
        def network(seed):
            made = model(seed)
            made.norm.weight.requires_grad_(False)
            made.layers[1].down.bias = torch.nn.Parameter(torch.tensor(0.5))
            return made

        engine, snapshot = self.trained(2, network(1))
        wanted, weights = train(engine, 2, first=2)[0], engine.master_weights()
        engine.close()
        made = deepspeeds(snapshot, network(1), 2, ranks=2)
        frozen = torch_files.read_safetensors(snapshot / "model.safetensors")["norm.weight"][1]
        parts = iter((frozen[:len(frozen) // 2], frozen[len(frozen) // 2:]))
        model_state = made.model_state

        def with_frozen():
            part = next(parts)
            return {**model_state(), "frozen_param_shapes": {"norm.weight": torch_files.size(48)},
                    "frozen_param_fragments": {"norm.weight": torch_files.Tensor(torch_files.Storage(part), (24,))}}

        made.model_state, made.prefix = with_frozen, ""
        with unittest.mock.patch("torch_files.save", lambda value, path: torch.save(as_pytorch(value), path)):
            saved = made.write(self.folder / "saved")
        empty = network(9).to("meta")
        empty.scale, empty.head.weight = torch.tensor(0.5), empty.embedding.weight
        facts = spillway.import_deepspeed(saved, empty, self.folder / "snapshot")
        self.assertEqual((2, 2, 0, "fp32", 2, str(self.folder / "snapshot"), []),
                         tuple(facts[key] for key in ("step", "global_steps", "skipped_steps", "trained_in", "ranks",
                                                      "snapshot", "client_state")))
        again = self.engine(empty, config(self.folder), snapshot=self.folder / "snapshot", on_existing="replace")
        self.assertEqual(2, again.current_step)
        self.assertEqual(wanted, train(again, 2, first=2)[0])
        self.assert_same_weights(weights, again)

    def test_ATagATypeAndWhatIsRefused(self):
        engine, snapshot = self.trained(1)
        engine.close()
        made = deepspeeds(snapshot, model(), 1)
        saved = made.write(self.folder / "saved")
        facts = spillway.import_deepspeed(saved, model(), self.folder / "narrow", tag="global_step1",
                                          dtype=torch.bfloat16)
        self.assertEqual("global_step1", facts["tag"])
        self.assertEqual(1, self.engine(model(), config(self.folder, bf16={"enabled": True}), on_existing="replace",
                                        snapshot=self.folder / "narrow").current_step)
        out = self.folder / "out"
        code = self.assert_error("narrow: is there already; name another", spillway.import_deepspeed, saved, model(),
                                 self.folder / "narrow").code
        self.assertEqual("exists", code)
        self.assert_error(r"tag9: is not there; name another one with tag=$", spillway.import_deepspeed, saved, model(),
                          out, tag="tag9")
        self.assert_error("dtype: torch.int8 is none of torch.float32", spillway.import_deepspeed, saved, model(), out,
                          dtype=torch.int8)
        self.assert_error("has no parameter layers.3", spillway.import_deepspeed, saved, model(layers=4), out)
        for file in (saved / "global_step1").glob("*.pt"):
            torch_files.spoil_checksums(file)
        self.assert_error(r"make a snapshot of it with spillway.import_deepspeed\(…, verify=False\)",
                          spillway.import_deepspeed, saved, model(), out)
        self.assertFalse(out.exists())
        spillway.import_deepspeed(saved, model(), out, verify=False)

    def test_FrozenParametersThatACheckpointDoesNotHaveAreTheModels(self):
        """As DeepSpeed saves it with exclude_frozen_parameters, which transformers says for peft's models."""
        def network(seed):
            made = model(seed)
            made.layers[0].up.requires_grad_(False)
            return made

        engine, snapshot = self.trained(2, network(1))
        wanted, weights = train(engine, 2, first=2)[0], engine.master_weights()
        engine.close()
        made, shape = deepspeeds(snapshot, network(1), 2), (192, 48)
        made.scheduler = None
        saved = made.write(self.folder / "saved")
        own = dict(network(1).named_parameters())
        for name, begins, options in (("given", network(1), {}), ("meta", network(9).to("meta"), {"weights": own.get})):
            if name == "meta":
                begins.scale, begins.head.weight = torch.tensor(0.5), begins.embedding.weight
                self.assert_error(r"layers.0.up.weight: is on device meta, .*; give weights=",
                                  spillway.import_deepspeed, saved, begins, self.folder / name)
            facts = spillway.import_deepspeed(saved, begins, self.folder / name, **options)
            self.assertEqual(2, facts["frozen_given"])
            again = self.engine(begins, config(self.folder), snapshot=self.folder / name, on_existing="replace")
            self.assertEqual(wanted, train(again, 2, first=2)[0])
            self.assert_same_weights(weights, again)
            again.close()
        loading = self.initialize(network(1))
        loading.backward(loading(batches(1)[0]))
        with self.assertLogs("spillway", logging.INFO) as logged:
            loading.load_checkpoint(saved)
        self.assertRegex(logged.output[-1], "WARNING.*; it has no frozen parameters, so the model's own 2 stay$")
        self.assertEqual(wanted, train(loading, 2, first=2)[0])
        self.assert_same_weights(weights, loading)
        loading.close()
        spillway.import_deepspeed(saved, network(1), self.folder / "narrow", dtype=torch.bfloat16)
        found = torch_files.read_safetensors(self.folder / "narrow/model.safetensors")["layers.0.up.weight"]
        self.assertTrue(torch.equal(own["layers.0.up.weight"].detach().bfloat16().reshape(-1),
                                    torch.frombuffer(bytearray(found[1]), dtype=torch.bfloat16)))
        library = spillway.library.library()
        described = spillway.deepspeed.checkpoints.layout_of(network(1), None).describe(library, 4)
        self.addCleanup(library.model_destroy, described)
        self.assert_error("has no frozen parameters, and the model has layers.0.up.weight; it was saved with exclude_f",
                          library.import_deepspeed, os.fsencode(saved), described, os.fsencode(self.folder / "none"),
                          None, spillway.library.Line(), None)
        state = made.model_state()
        state |= {"frozen_param_shapes": {"layers.0.up.weight": torch_files.size(*shape)},
                  "frozen_param_fragments": {"layers.0.up.weight": torch_files.Tensor(
                      torch_files.Storage(bytes(4 * 192 * 48)), (192 * 48,))}}
        made.model_state, made.tag = lambda: state, "some"
        self.assert_error("has no parameter layers.0.up.bias; model and checkpoint must belong together",
                          spillway.import_deepspeed, made.write(saved), network(1), self.folder / "none")
        self.assertFalse((self.folder / "none").exists())

    def test_FrozenParametersOfStage1AreInItsModule(self):
        """With what is trained, buffers and other names, as PyTorch's own torch.save() has a state_dict()."""
        def network(seed):
            made = model(seed)
            made.layers[0].up.requires_grad_(False)
            made.register_buffer("seen", torch.tensor([5]))
            return made

        engine, snapshot = self.trained(2, network(1))
        wanted, weights = train(engine, 2, first=2)[0], engine.master_weights()
        engine.close()
        made, module = deepspeeds(snapshot, network(1), 2, ranks=2, stage=1), network(1).state_dict()
        made.scheduler, made.shared = None, {"head.weight": "embedding.weight"}

        def written(tag):
            def save(value, path):
                torch.save(as_pytorch(value) | ({"module": module} if "module" in value else {}), path)

            made.tag = tag
            with unittest.mock.patch("torch_files.save", save):
                return made.write(self.folder / "saved")

        saved = written("whole")
        loading = self.initialize(network(9))
        with self.assertLogs("spillway", logging.INFO) as logged:
            loading.load_checkpoint(saved)
        self.assertRegex(logged.output[-1], r"after 4 samples; not carried: buffers \(seen\)$")
        self.assertEqual(wanted, train(loading, 2, first=2)[0])
        self.assert_same_weights(weights, loading)
        facts = spillway.import_deepspeed(saved, network(9), self.folder / "facts")
        self.assertEqual((len(weights), 0), (facts["parameters"], facts.get("frozen_given", 0)))
        file, frozen = saved / "whole/mp_rank_00_model_states.pt", module["layers.0.up.weight"].numpy().tobytes()
        self.assertEqual(1, file.read_bytes().count(frozen))
        file.write_bytes(file.read_bytes().replace(frozen, frozen[::-1]))
        self.assert_error("does not match its CRC-32", spillway.import_deepspeed, saved, network(9),
                          self.folder / "none")
        module["layers.0.up.weight"] = module["layers.0.up.weight"][:-1]
        self.assert_error(r"layers.0.up.weight has shape \[191, 48\], the model asks for \[192, 48\]",
                          spillway.import_deepspeed, written("short"), network(9), self.folder / "none")
        del module["layers.0.up.weight"]
        self.assert_error("has no parameter layers.0.up.weight; model and checkpoint must belong together",
                          spillway.import_deepspeed, written("part"), network(9), self.folder / "none")

    def test_CtrlCEndsAnImport(self):
        """Also where it comes in C, just before the facts do: what is called then must not run Python's own code."""
        engine, snapshot = self.trained(1)
        engine.close()
        saved = deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        library = spillway.library.library()
        whole = library.import_deepspeed

        def interrupted(*arguments):
            texts = {}
            whole(*arguments[:4], spillway.library.Line(texts.__setitem__), None)
            calls = [ctypes.pythonapi.PyErr_SetInterrupt, functools.partial(arguments[4], None, texts[None])]
            collections.deque(map(operator.methodcaller("__call__"), calls), 0)  # no bytecode between the two

        lost = []
        with unittest.mock.patch.object(library, "import_deepspeed", interrupted), \
                unittest.mock.patch("sys.unraisablehook", lost.append), self.assertRaises(KeyboardInterrupt):
            spillway.import_deepspeed(saved, model(), self.folder / "snapshot")
        self.assertEqual([], lost)
        self.assertFalse((self.folder / "snapshot").exists())
        spillway.import_deepspeed(saved, model(), self.folder / "snapshot")

    def test_APathThatIsNoText(self):
        engine, snapshot = self.trained(1)
        engine.close()
        saved = deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        place = os.path.join(os.fspath(self.folder), os.fsdecode(b"sn\xff"))
        self.assertEqual(place, spillway.import_deepspeed(saved, model(), place)["snapshot"])
        self.assertTrue(os.path.isdir(place))

    def test_BlocksAreThoseOfTheEngine(self):
        """A snapshot that the engine saves later may take the place of the imported one."""
        engine, snapshot = self.trained(1, blocks=[""])
        engine.close()
        saved = deepspeeds(snapshot, model(), 1).write(self.folder / "saved")
        spillway.import_deepspeed(saved, model(), self.folder / "snapshot", blocks=[""])
        again = self.engine(model(), config(self.folder), snapshot=self.folder / "snapshot", on_existing="replace",
                            blocks=[""])  # all of it
        again.save(self.folder / "snapshot", replace=True)


if __name__ == "__main__":
    main()
