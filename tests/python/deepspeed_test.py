"""Loops written for DeepSpeed: they train, save and go on as they are, or are told what to write instead."""
import argparse
import contextlib
import io
import logging
import os
import unittest.mock

from case import Case as Folder
from case import main

import torch

import spillway
from spillway.deepspeed import comm
from toy_model import DEVICE, Widened, batches, config, model, train


class Case(Folder):
    def initialize(self, network=None, configuration=None, **options):
        made = spillway.initialize(model=network or model(), config=configuration or config(self.folder), **options)
        self.addCleanup(made[0].close)
        return made

    def run_of(self, engine, steps, first=0):
        return train(engine, steps, first=first)[0]


def halving(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)


class Loop(Case):
    def test_TrainsAsTheEngineDoes(self):
        """Every line of it as DeepSpeed's examples have it."""
        args = argparse.Namespace(deepspeed_config=str(config(self.folder, accumulation=2)), local_rank=-1)
        network = model()
        network.norm.requires_grad_(False)  # those that are frozen may be among them
        engine, optimizer, loader, scheduler = spillway.initialize(
            args=args, model=network, model_parameters=network.parameters(),
            training_data=torch.cat(batches(6)).cpu())
        self.addCleanup(engine.close)
        self.assertIs(engine.optimizer, optimizer)
        self.assertIsNone(scheduler)
        self.assertEqual((4, 2, 8), (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(),
                                     engine.train_batch_size()))
        self.assertEqual((0, 1), (engine.local_rank, engine.world_size))
        engine.train()
        boundaries, seen = [], 0
        for ids in loader:
            loss = engine(ids.to(engine.device))
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.backward(loss)
            boundaries.append(engine.is_gradient_accumulation_boundary())
            engine.step()
            seen += len(ids)
        self.assertEqual([False, False, True, True] * 3, boundaries)
        self.assertEqual((24, 3), (seen, engine.global_steps))
        self.assertGreater(engine.get_global_grad_norm(), 0)
        self.assertEqual([1e-3], engine.get_lr())
        self.assertTrue(engine.was_step_applied())

    def test_ALoaderLeavesOutWhatIsNotWhole(self):
        for drop, micro_batches in (({}, 2), ({"dataloader_drop_last": False}, 2), ({"dataloader_drop_last": True}, 1)):
            engine, _, loader, _ = self.initialize(configuration=config(self.folder, "cpu", **drop),
                                                   training_data=torch.cat(batches(2))[:7].cpu())
            self.assertEqual(micro_batches, len(loader), drop)
            engine.close()

    def test_EveryStepIsAfterItsMicroBatches(self):
        self.assert_error("managed_gradient_accumulation: expected true, found false", self.initialize,
                          configuration=config(self.folder, managed_gradient_accumulation=False))

    def test_ABoundaryIsWhereAStepIsMade(self):
        engine = self.initialize(configuration=config(self.folder, accumulation=2))[0]
        for forgotten in (True, False):
            engine.backward(engine(batches(1)[0]))
            self.assertIsNone(engine.step())
            self.assertTrue(engine.is_gradient_accumulation_boundary())
            if forgotten:
                engine.discard_step()
                self.assertFalse(engine.is_gradient_accumulation_boundary())
        engine.discard_step()
        for boundary in (False, True):  # in a loop that calls step() there alone
            engine.backward(engine(batches(1)[0]))
            self.assertEqual(boundary, engine.is_gradient_accumulation_boundary())
        self.assertEqual(1, engine.step().step)

    def test_ZeroGradWithinAStepIsRefused(self):
        engine, optimizer, _, _ = self.initialize(configuration=config(self.folder, accumulation=2))
        for _ in range(2):
            engine.zero_grad()
            optimizer.zero_grad()
            engine.backward(engine(batches(1)[0]))
            for call in (engine.zero_grad, optimizer.zero_grad, engine.module.zero_grad):
                self.assert_error("zero_grad: the step has had 1 of its 2 micro-batches; leave it out", call)
            engine.backward(engine(batches(1)[0]))
            engine.step()
        self.assertEqual(2, engine.global_steps)

    def test_ASchedulerOfPyTorchsIsSteppedAndCounts(self):
        engine, optimizer, _, scheduler = self.initialize(lr_scheduler=halving)
        rates = [report.learning_rate for report in train(engine, 3)[1]]
        self.assertEqual([1e-3, 5e-4, 2.5e-4], rates)
        self.assertEqual([1.25e-4], scheduler.get_last_lr())
        self.assertEqual(optimizer.param_groups[0]["lr"], engine.get_lr()[0])

    def test_TheConfigurationsSchedulerIsTheEngines(self):
        warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_type": "linear"}}
        engine, _, _, scheduler = self.initialize(configuration=config(self.folder, scheduler=warmup))
        rates = [report.learning_rate for report in train(engine, 4)[1]]
        self.assertEqual([0, 0, 2.5e-4, 5e-4], rates)
        self.assertEqual(([7.5e-4], [7.5e-4]), (scheduler.get_last_lr(), engine.get_lr()))  # the next step's

    def test_WhatIsNotDoneIsRefusedInWords(self):
        network = model()
        error = self.assert_error("not with Spillway", self.initialize, network, mpu=object(),
                                  model_parameters=network.head.parameters())
        self.assertEqual("unsupported", error.code)
        for word in ("model_parameters: are not those", "mpu, "):
            self.assertIn(word, str(error))
        self.assertEqual(3, len(str(error).splitlines()))
        self.assert_error("lr_scheduler: belongs to another optimizer", self.initialize, lr_scheduler=object())
        both = config(self.folder, scheduler={"type": "WarmupLR", "params": {}})
        self.assert_error("the configuration has one, too", self.initialize, None, both, lr_scheduler=halving)
        both.write_text(both.read_text().replace("{", "{ // with a comment\n", 1))
        self.assert_error("the configuration has one, too", self.initialize, None, both, lr_scheduler=halving,
                          on_existing="replace")
        with unittest.mock.patch.dict(os.environ, WORLD_SIZE="2"):
            self.assert_error("WORLD_SIZE 2: and nothing says where they meet", self.initialize)
            self.assert_error("ranks: WORLD_SIZE is 2, and ", self.initialize, dist_init_required=False)
        self.assert_error("no configuration", spillway.initialize, model=network)
        self.assert_error("no model", spillway.initialize, config={})


class Words(Case):
    def test_AScriptIsReadAndStarted(self):
        parser = spillway.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(config(self.folder))])
        self.assertTrue(args.deepspeed and not args.deepscale)
        engine = spillway.initialize(args=args, model=model())[0]
        self.addCleanup(engine.close)
        self.assertEqual(4, engine.train_batch_size())
        self.assertIsNone(spillway.init_distributed("nccl", dist_init_required=None))
        with unittest.mock.patch.dict(os.environ, WORLD_SIZE="2"):
            self.assert_error("init_distributed: WORLD_SIZE 2: and nothing says", spillway.init_distributed)
        self.assert_error("WORLD_SIZE 3: ", spillway.init_distributed, rank=0, world_size=3)

    def test_ProcessesOfMpirunAreSeveral(self):
        open_mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in (
            ("RANK", "1"), ("SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_SIZE", "2"))}
        mpich = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

        def begins(said, **options):
            with unittest.mock.patch.dict(os.environ, said), \
                    unittest.mock.patch.multiple(comm, _begun=False, _asked=1), \
                    unittest.mock.patch.object(torch.distributed, "init_process_group") as begun:
                spillway.init_distributed(**options)
                return begun.call_count, [os.environ.get(name) for name in names]

        for said in (open_mpi, mpich):
            self.assertEqual((1, ["1", "2", "1", "127.0.0.1", "29501"]), begins(said, distributed_port=29501))
            size = next(name for name in said if "LOCAL" in name and "SIZE" in name or name == "MPI_LOCALNRANKS")
            hosts = {**said, size: "1"}
            self.assert_error("mpirun has started 2 processes, and does not say MASTER_ADDR; set", begins, hosts)
            self.assertEqual((1, ["1", "2", "1", "10.0.0.1", "29500"]), begins({**hosts, "MASTER_ADDR": "10.0.0.1"}))
            self.assertEqual((0, [None] * 5), begins(said, auto_mpi_discovery=False))
        self.assertEqual((0, [None] * 5), begins({**open_mpi, "OMPI_COMM_WORLD_SIZE": "1"}))
        self.assert_error("does not say LOCAL_RANK and MASTER_ADDR", begins, {"PMI_RANK": "1", "PMI_SIZE": "2"})

    def test_AModelMadeInInitIsWhatItIsWithout(self):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            with spillway.zero.Init(enabled=False):
                pass
            self.assertEqual("", said.getvalue())
            for _ in range(2):
                with spillway.zero.Init(config_dict_or_path={}, dtype=torch.bfloat16):
                    made = model()
        self.assertEqual(1, said.getvalue().count("zero.Init: has no effect"))
        self.assertEqual(torch.float32, made.head.weight.dtype)
        with self.assertRaisesRegex(AttributeError, "zero.TiledLinear: is not here"):
            spillway.zero.TiledLinear

    def test_AnEngineAnswersAsDeepSpeeds(self):
        engine, optimizer, _, _ = self.initialize(configuration=config(
            self.folder, accumulation=2, clipping=0.5, bf16={"enabled": True}))
        self.assertEqual((3, True, False, 0.5, 0, 1.0), (
            engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.fp16_enabled(),
            engine.gradient_clipping(), engine.loss_scale(), optimizer.cur_scale))
        self.assertEqual([(0.9, 0.999)], engine.get_mom())
        optimizer.set_lr(5e-4)
        loss = engine(batches(1)[0])
        self.assertEqual(loss.item() / 2, engine.backward(loss).item())
        engine.step()
        self.assertEqual((1, 0), (engine.micro_steps, engine.global_samples))
        self.assert_error(r"backward\(retain_graph=True\): more passes may follow it, but the step has earlier",
                          engine.backward, engine(batches(1)[0]), retain_graph=True)
        engine.backward(engine(batches(1)[0]), scale_wrt_gas=False)
        self.assertEqual(5e-4, engine.step().learning_rate)
        self.assertEqual((2, 8, 0), (engine.micro_steps, engine.global_samples, engine.skipped_steps))
        engine.backward(engine(batches(1)[0]))
        engine.step(early=True)
        self.assertEqual((3, 12), (engine.micro_steps, engine.global_samples))
        engine.destroy()
        self.assert_error("engine: it is closed", lambda: engine.global_steps)

    def test_SettingsThatAreLeftOpen(self):
        place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
        for kind, momentum in (("SGD", 0.25), ("Lion", (0.9, 0.999)), ("Adagrad", 0.0)):
            params = {"lr": 1e-3, **({"momentum": 0.25} if kind == "SGD" else {})}
            engine = self.initialize(configuration={
                "train_batch_size": 4, "optimizer": {"type": kind, "params": params},
                "spillway": {"tile_elements": 4096},
                "zero_optimization": {"stage": "auto", "offload_optimizer": place}})[0]
            self.assertEqual(([momentum], 2, 1.0), (engine.get_mom(), engine.zero_optimization_stage(),
                                                    engine.gradient_clipping()))
            engine.close()
            (self.folder / "store/spillway.store").unlink()

        engine = self.initialize(configuration={"train_batch_size": 4, "zero_optimization": True})[0]
        self.assertEqual((1, True), (engine.zero_optimization_stage(), engine.zero_optimization()))

    def test_SkippedStepsAreCountedAndSaved(self):
        half = config(self.folder, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
        engine, optimizer, _, _ = self.initialize(torch.nn.Sequential(Widened(), Widened()), half)
        for factor in (1, 1e30, 1):
            engine.backward(engine(torch.ones(8, 16, device=DEVICE)).pow(2).mean() * factor)
            engine.step()
        self.assertEqual((1, 12, 8, True), (engine.skipped_steps, engine.global_samples, optimizer.loss_scale,
                                            engine.fp16_enabled()))
        engine.save_checkpoint(self.folder / "saved")
        engine.close()
        again = self.initialize(torch.nn.Sequential(Widened(), Widened()), half, on_existing="replace")[0]
        again.load_checkpoint(self.folder / "saved")
        self.assertEqual((1, 12), (again.skipped_steps, again.global_samples))

    def test_NoSyncAccumulates(self):
        ends = []
        for name in ("one", "other"):
            engine = self.initialize(configuration=config(self.folder, accumulation=2), on_existing="replace")[0]
            torch.manual_seed(3)
            with engine.no_sync() if name == "one" else contextlib.nullcontext():
                engine.backward(engine(batches(1)[0]))
                if name == "one":
                    self.assert_error(r"step: is inside of no_sync\(\)", engine.step)
                    self.assert_error("no_sync: is inside", engine.no_sync().__enter__)
            engine.backward(engine(batches(2)[1]))
            if name == "one":
                with engine.no_sync():
                    self.assert_error("its 2 micro-batches; set gradient_accumulation_steps", engine.backward,
                                      engine(batches(3)[2]))
            engine.step()
            ends.append(engine.master_weights())
            engine.close()
        for name, value in ends[0].items():
            self.assertTrue(torch.equal(value, ends[1][name]), name)

    def test_WhatIsElsewhereIsNamed(self):
        engine = self.initialize()[0]
        for name, way in (("deepspeed_io", "DataLoader"), ("allreduce_gradients", "added up in backward"),
                          ("random_ltd_enabled", "neither DeepSpeedEngine nor Model has")):
            with self.subTest(name), self.assertRaisesRegex(AttributeError, way):
                getattr(engine, name)
            self.assertFalse(hasattr(engine, name))
        self.assertEqual(48, engine.norm.weight.numel())  # the model's own


class Saved(Case):
    def test_AModelIsOneFileOf16Bits(self):
        network = model()
        network.norm.requires_grad_(False)
        network.register_buffer("seen", torch.tensor([2]))
        engine = self.initialize(network, config(self.folder, bf16={"enabled": True}))[0]
        train(engine, 1)
        self.assertTrue(engine.save_16bit_model(str(self.folder / "end")))
        state = torch.load(self.folder / "end/pytorch_model.bin")
        self.assertEqual([2], state["seen"].tolist())
        self.assertEqual(state["head.weight"].data_ptr(), state["embedding.weight"].data_ptr())
        other = model(seed=9)
        other.register_buffer("seen", torch.tensor([0]))
        other.load_state_dict(state)
        for name, value in engine.module.state_dict().items():
            self.assertTrue(torch.equal(value, state[name]), name)
            self.assertEqual(torch.bfloat16 if name != "seen" else torch.int64, state[name].dtype)
        engine.save_16bit_model(str(self.folder / "end"), "trained.bin", exclude_frozen_parameters=True)
        self.assertEqual({"norm.weight", "norm.bias"}, {*state} - {*torch.load(self.folder / "end/trained.bin")})
        engine.save_fp16_model(self.folder / "end", "old.bin")
        self.assertEqual({"pytorch_model.bin", "trained.bin", "old.bin"}, {*os.listdir(self.folder / "end")})

    def test_WhatFailsLeavesTheFileThatWasThere(self):
        engine = self.initialize()[0]
        engine.save_16bit_model(self.folder / "end")
        before = (self.folder / "end/pytorch_model.bin").read_bytes()

        def fills(state, file):
            file.write(b"half of it")
            raise OSError(28, "No space left on device")

        with unittest.mock.patch.object(torch, "save", fills), self.assertRaises(OSError):
            engine.save_16bit_model(self.folder / "end")
        self.assertEqual(["pytorch_model.bin"], os.listdir(self.folder / "end"))
        self.assertEqual(before, (self.folder / "end/pytorch_model.bin").read_bytes())


class Checkpoints(Case):
    def test_EachFileIsOnTheDriveBeforeItHasItsName(self):
        engine, saved, order = self.initialize()[0], self.folder / "saved", []
        fsync, replace = os.fsync, os.replace

        def synced(file):
            order.append(("sync", os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), os.path.realpath(saved))))
            fsync(file)

        def named(before, name):
            order.append(("name", os.path.relpath(name, saved)))
            replace(before, name)

        with unittest.mock.patch.object(os, "fsync", synced), unittest.mock.patch.object(os, "replace", named):
            engine.save_checkpoint(saved, tag="best")
        state = "best/client_state.pt"
        self.assertEqual([("sync", f"{state}.new"), ("name", state), ("sync", "best"), ("sync", "."),
                          ("sync", "latest.new"), ("name", "latest"), ("sync", ".")], order)

    def test_ARunGoesOnWithTheSameBits(self):
        whole = self.initialize(lr_scheduler=halving)[0]
        wanted = self.run_of(whole, 4)
        weights = whole.master_weights()
        whole.close()
        first = self.initialize(lr_scheduler=halving, on_existing="replace")[0]
        self.run_of(first, 2)
        first.module.scale.fill_(0.25)  # not persistent, and so not kept
        first.module.register_buffer("seen", torch.tensor([2]))
        self.assertTrue(first.save_checkpoint(self.folder / "saved", client_state={"epoch": 7},
                                              exclude_frozen_parameters=True))
        self.assertEqual("global_step2", (self.folder / "saved/latest").read_text())
        first.close()
        network = model(seed=9)
        network.register_buffer("seen", torch.tensor([0]))
        again = self.initialize(network, lr_scheduler=halving, on_existing="replace")[0]
        path, client = again.load_checkpoint(self.folder / "saved")
        self.assertEqual((str(self.folder / "saved/global_step2"), {"epoch": 7}), (path, client))
        self.assertEqual((2, [2]), (again.global_steps, again.module.seen.tolist()))
        self.assertEqual([2.5e-4], again.get_lr())
        self.assertEqual(wanted[2:], self.run_of(again, 2, first=2))
        for name, value in again.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)

    def test_ATagIsSavedOverAndLoaded(self):
        engine = self.initialize()[0]
        for step in range(2):
            train(engine, 1, first=step)
            engine.save_checkpoint(self.folder / "saved", tag="best", client_state={"step": step}, save_latest=False)
        engine.close()
        again = self.initialize(on_existing="replace")[0]
        self.assertEqual((None, None), again.load_checkpoint(self.folder / "saved"))  # there is no `latest`
        self.assertEqual({"step": 1}, again.load_checkpoint(self.folder / "saved", tag="best")[1])
        self.assertEqual(2, again.global_steps)

    def test_ASaveOverATagThatFailsIsNotTakenForBoth(self):
        engine = self.initialize()[0]
        saved = self.folder / "saved"
        engine.save_checkpoint(saved, tag="best", client_state={"run": 1})
        with unittest.mock.patch.object(spillway.Engine, "save", side_effect=OSError(28, "full")):
            self.assertRaises(OSError, engine.save_checkpoint, saved, tag="best")
        self.assertEqual({"run": 1}, engine.load_checkpoint(saved)[1])  # of both, the earlier one is whole
        with unittest.mock.patch.object(torch, "save", side_effect=OSError(28, "full")):
            self.assertRaises(OSError, engine.save_checkpoint, saved, tag="best")
        self.assert_error("best/client_state.pt: is not there", engine.load_checkpoint, saved)

    def test_AProgramsOwnFilesLieBesideIt(self):
        """Also where they end as DeepSpeed's do."""
        engine = self.initialize()[0]
        for step in range(2):
            train(engine, 1, first=step)
            engine.save_checkpoint(self.folder / "saved", tag="best")
            for name in ("ema_model_states.pt", "my_mp_rank_00_model_states.pt", "rank_0_optim_states.pt"):
                (self.folder / "saved/best" / name).touch()
        engine.close()
        again = self.initialize(on_existing="replace")[0]
        again.load_checkpoint(self.folder / "saved")
        self.assertEqual(2, again.global_steps)
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_12_mp_rank_00_model_states.pt",
                     "zero_pp_rank_0_mp_rank_00_optim_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"):
            theirs = self.folder / "saved/best" / name
            theirs.touch()
            self.assert_error("has a checkpoint of DeepSpeed's", again.save_checkpoint, self.folder / "saved", "best")
            theirs.unlink()

    def test_WhatCannotBeLoaded(self):
        engine = self.initialize()[0]
        train(engine, 1)
        engine.save_checkpoint(self.folder / "saved")
        train(engine, 1, first=1)
        self.assert_error("none/spillway: is not there", engine.load_checkpoint, self.folder / "saved", tag="none")
        engine.save_checkpoint(self.folder / "saved")
        state, latest = (self.folder / "saved" / name for name in ("global_step2/client_state.pt", "latest"))
        whole = state.read_bytes()
        engine.close()
        again = self.initialize(on_existing="replace")[0]
        for length in (0, 1, len(whole) // 2, len(whole) - 1):
            state.write_bytes(whole[:length])
            error = self.assert_error("global_step2/client_state.pt: is empty, cut short or damaged",
                                      again.load_checkpoint, self.folder / "saved")
            self.assertEqual("corrupt", error.code)
        state.write_bytes(whole)
        latest.write_text("\n")
        self.assert_error("saved/latest: is empty; name the checkpoint with tag=", again.load_checkpoint,
                          self.folder / "saved")
        os.replace(self.folder / "saved/global_step2/client_state.pt",
                   self.folder / "saved/global_step1/client_state.pt")
        self.assert_error("snapshot is of step 1, and client_state.pt of step 2", again.load_checkpoint,
                          self.folder / "saved", tag="global_step1")

    def test_TheCheckpointsRateCounts(self):
        """As with DeepSpeed; of its own schedulers the configuration's numbers do. What differs is said."""
        def rated(lr, **more):
            adam = {"type": "AdamW", "params": {"lr": lr, "weight_decay": 0.01}}
            return config(self.folder, optimizer=adam, **more)

        def warmup(rate):
            return {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": rate,
                                                   "warmup_type": "linear"}}

        def rates(engine, tag, configuration, said, scheduler=None, **options):
            engine.close()
            engine = self.initialize(configuration=configuration, on_existing="replace", lr_scheduler=scheduler)[0]
            with self.assertLogs("spillway", "WARNING") as heard:
                spillway.log.say(logging.WARNING, "nothing else")
                engine.load_checkpoint(self.folder / "saved", tag, **options)
            text = "\n".join(record.getMessage() for record in heard.records[1:])
            self.assertRegex(text, said)
            return engine, [report.learning_rate for report in train(engine, 2, first=2)[1]]

        def saved(tag, configuration, scheduler=None, rate=None):
            engine = self.initialize(configuration=configuration, on_existing="replace", lr_scheduler=scheduler)[0]
            if rate is not None:
                engine.optimizer.param_groups[0]["lr"] = rate
            train(engine, 2)
            engine.save_checkpoint(self.folder / "saved", tag)
            return engine

        engine = saved("plain", rated(1e-3))
        engine, found = rates(engine, "plain", rated(5e-4), "plain: its learning rate 0.001 counts, not the "
                              r"configuration's 0.0005; optimizer.param_groups\[0\]\['lr'\] sets another$")
        self.assertEqual([1e-3, 1e-3], found)
        engine, found = rates(engine, "plain", rated(1e-3), "^$")
        engine, found = rates(engine, "plain", rated(5e-4, spillway={"parameter_groups": [
            {"parameters": ["*.norm.*"], "lr": 1e-4}]}), "and rates of spillway.parameter_groups keep their shares of")
        engine.close()
        engine, found = rates(saved("set", rated(1e-3), rate=2e-3), "set", rated(1e-3), "learning rate 0.002 counts")
        self.assertEqual([2e-3, 2e-3], found)
        engine.close()
        engine, found = rates(saved("halved", rated(1e-3), halving), "halved", rated(5e-4), "0.00025 counts", halving)
        self.assertEqual([2.5e-4, 1.25e-4], found)
        engine, found = rates(engine, "halved", rated(1e-3), "^$", halving)
        engine, found = rates(engine, "halved", rated(1e-3), "^$", halving, load_lr_scheduler_states=False)
        self.assertEqual([2.5e-4, 5e-4], found)  # as PyTorch's schedulers do, from the second step on
        engine.close()
        engine = saved("warm", rated(1e-3, scheduler=warmup(1e-3)))
        engine, found = rates(engine, "warm", rated(1e-3, scheduler=warmup(2e-3)), "was saved with the learning rate "
                              "0.00025 for the next step; the configuration's scheduler counts, which says 0.0005$")
        self.assertEqual([5e-4, 1e-3], found)
        engine, found = rates(engine, "warm", rated(1e-3, scheduler=warmup(1e-3)), "^$")
        self.assertEqual([2.5e-4, 5e-4], found)

    def test_ALoadInMidRunGoesBack(self):
        engine = self.initialize(lr_scheduler=halving)[0]
        self.run_of(engine, 2)
        engine.save_checkpoint(self.folder / "saved", client_state={"epoch": 3})
        wanted = self.run_of(engine, 3, first=2)
        weights = engine.master_weights()
        engine.backward(engine(batches(1)[0]))
        with self.assertLogs("spillway", "INFO") as heard:
            self.assertEqual({"epoch": 3}, engine.load_checkpoint(self.folder / "saved")[1])
        self.assertTrue(any("takes the place of step 5, in the store, too" in line for line in heard.output))
        self.assertEqual((2, [2.5e-4]), (engine.global_steps, engine.get_lr()))
        self.assertEqual(wanted, self.run_of(engine, 3, first=2))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)

    def test_MicroBatchesBeforeALoadAreForgotten(self):
        first = self.initialize()[0]
        train(first, 1)
        first.save_checkpoint(self.folder / "saved")
        wanted = self.run_of(first, 1, first=1)
        first.close()
        again = self.initialize(on_existing="replace")[0]
        again.optimizer.param_groups[0]["lr"] = 1.0
        again.backward(again(batches(1)[0]))
        again.load_checkpoint(self.folder / "saved")
        self.assertEqual([1e-3], again.get_lr())
        self.assertEqual(wanted, self.run_of(again, 1, first=1))


if __name__ == "__main__":
    main()
