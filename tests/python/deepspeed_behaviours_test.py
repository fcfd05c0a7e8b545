"""DeepSpeed's behaviours in a loop: what initialize() takes, batches, steps, precisions, checkpoints."""
import argparse
import logging
import os
import unittest.mock

from case import main

import torch

import spillway as deepspeed
from behaviours import WIDTH, Behaviours, SimpleModel, data, simple
from toy_model import DEVICE


class Initialize(Behaviours):
    def trains_as_pytorch(self, network=None, **settings):
        batches = data(4)
        expected, losses = self.pytorch(batches)
        engine = self.engine_of(network, **settings)
        for here, there in zip(self.train(engine, batches), losses):
            self.assertAlmostEqual(here, there, delta=1e-5)
        self.assert_same_weights(engine, expected)
        return engine

    def test_InitializeTrainCpu(self):
        self.trains_as_pytorch()

    def test_InitializeTrainNvme(self):
        self.trains_as_pytorch(device="nvme")

    def test_Stage2Offload(self):
        self.trains_as_pytorch(stage=2)

    def test_Stage0And1(self):
        self.trains_as_pytorch(stage=0)
        self.trains_as_pytorch(stage=1)

    def test_ModelParameters(self):
        network = simple()
        engine = self.start(network, {"model_parameters": network.parameters()})[0]
        self.assertEqual(1, len(engine.optimizer.param_groups))

    def with_groups(self, network):
        return [{"params": [network.linears[0].weight, network.linears[1].weight], "weight_decay": 0.1},
                {"params": [network.linears[0].bias, network.linears[1].bias], "weight_decay": 0.0, "lr": 1e-3}]

    def as_with_groups(self, engine, batches, kind=torch.optim.AdamW, factor=lambda step: 1.0):
        network = simple().to(DEVICE)
        optimizer = kind(self.with_groups(network), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        for x, y in batches:
            network(x, y).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        self.train(engine, batches)
        self.assert_same_weights(engine, network)
        for here, there in zip(engine.optimizer.param_groups, optimizer.param_groups):
            self.assertAlmostEqual(here["lr"], there["lr"], delta=1e-9)

    def test_ModelParametersGroups(self):
        network = simple()
        engine = self.start(network, {"model_parameters": self.with_groups(network)})[0]
        self.assertEqual([1e-2, 1e-3], engine.get_lr())
        self.as_with_groups(engine, data(3))

    def test_GroupsHaveTheDecayOfTorchAdam(self):
        for more, decay in (({"torch_adam": True}, 0.01), ({"torch_adam": True, "adam_w_mode": False}, 0), ({}, 0)):
            network = simple()
            groups = [{"params": [each.weight for each in network.linears]},
                      {"params": [each.bias for each in network.linears], "lr": 1e-3}]
            engine = self.start(network, {"model_parameters": groups}, optimizer={
                "type": "Adam", "params": {"lr": 1e-2, **more}})[0]
            self.assertEqual([decay] * 2, [group["weight_decay"] for group in engine.optimizer.param_groups])
            self.assertEqual(decay, engine.settings["optimizer.params.weight_decay"])
            self.train(engine, data(1))

    def test_OneRateOfASchedulerIsAllGroups(self):
        """Where it is a number in the configuration; else each group's own."""
        warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-3, "warmup_num_steps": 2, "warmup_type": "linear"}}
        cycle = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 2e-3, "cycle_first_step_size": 1,
                                                "cycle_momentum": False}}
        whole = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 8}}
        own = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_type": "linear"}}
        for scheduler, same, heard in ((warmup, True, 1), (cycle, True, 1), (whole, True, 1), (own, False, 0)):
            network, alone, batches = simple(), simple().to(DEVICE), data(4)
            optimizer = torch.optim.AdamW(self.with_groups(alone), lr=1e-2)
            with self.assertLogs("spillway", "WARNING") as said:
                deepspeed.log.say(logging.WARNING, "nothing else")
                engine = self.start(network, {"model_parameters": self.with_groups(network)}, scheduler=scheduler)[0]
            self.assertEqual(heard, sum("gives all of them one" in line for line in said.output))
            for x, y in batches:
                one, other = engine.get_lr()
                self.assertAlmostEqual(one if same else one / 10, other, delta=1e-12)
                for group, rate in zip(optimizer.param_groups, (one, other)):
                    group["lr"] = rate
                alone(x, y).backward()
                torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                self.train(engine, [(x, y)])
            self.assert_same_weights(engine, alone)

    def test_ClientOptimizer(self):
        network, said = simple(), torch.optim.AdamW
        engine, optimizer, _, _ = self.start(network, {"optimizer": said(self.with_groups(network), lr=1e-2)})
        self.assertIs(engine.optimizer, optimizer)
        self.as_with_groups(engine, data(3))
        network = simple()
        self.assert_error("param_groups.1..'lr'.: is 0.001, and groups' rates move together", self.moved_apart,
                          self.start(network, {"optimizer": said(self.with_groups(network), lr=1e-2)})[0])
        for kind, values in ((torch.optim.Adam, {"weight_decay": 0.1}), (torch.optim.Adagrad, {}),
                             (torch.optim.SGD, {"momentum": 0.9, "nesterov": True})):
            network, batches = simple(), data(3)
            engine = self.start(network, {"optimizer": kind(network.parameters(), lr=1e-2, **values)},
                                optimizer=False)[0]
            self.train(engine, batches)
            self.assert_same_weights(engine, self.pytorch(batches, optimizer=lambda p, k=kind, v=values: k(
                p, lr=1e-2, **v))[0])
        network = simple()
        for other, words in ((torch.optim.RMSprop(network.parameters()), "a RMSprop may compute anything"),
                             (torch.optim.AdamW(network.parameters(), amsgrad=True), "amsgrad=True is not computed")):
            self.assert_error(words, deepspeed.initialize, model=network, optimizer=other, config=self.settings())

    def moved_apart(self, engine):
        engine.optimizer.param_groups[0]["lr"] = 5e-3
        self.train(engine, data(1))

    def test_ClientOptimizerCallable(self):
        engine = self.start(initialize={"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, optimizer=False)[0]
        batches = data(2)
        self.train(engine, batches)
        self.assert_same_weights(engine, self.pytorch(batches, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))[0])

    def test_ClientOptimizerCallableOfGroups(self):
        """It is called with what model_parameters= has, as DeepSpeed calls it."""
        network = simple()
        engine = self.start(network, {"optimizer": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
                                      "model_parameters": self.with_groups(network)})[0]
        self.assertEqual([(1e-2, 0.1), (1e-3, 0.0)], [(group["lr"], group["weight_decay"])
                                                      for group in engine.optimizer.param_groups])
        self.as_with_groups(engine, data(3))
        network = simple()
        made = []
        self.start(network, {"optimizer": lambda given: made.append(given) or torch.optim.AdamW(given, lr=1e-2),
                             "model_parameters": network.parameters()})
        self.assertEqual([*map(id, network.parameters())], [*map(id, made[0])])

    def test_ClientLrSchedulerCallable(self):
        engine, _, _, scheduler = self.start(initialize={
            "lr_scheduler": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.5 ** step)})
        self.train(engine, data(2))
        self.assertEqual([2.5e-3], scheduler.get_last_lr())

    def test_ClientLrSchedulerObject(self):
        def halves(step):
            return 0.5 ** step

        network = simple()
        optimizer = torch.optim.AdamW(self.with_groups(network), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, halves)
        engine, _, _, same = self.start(network, {"optimizer": optimizer, "lr_scheduler": scheduler})
        self.assertIs(scheduler, same)
        self.as_with_groups(engine, data(3), factor=halves)
        self.assert_error("lr_scheduler: belongs to another optimizer", self.start, simple(),
                          {"lr_scheduler": scheduler})

    def rates(self, steps, **scheduler):
        engine = self.engine_of(scheduler=scheduler)
        found = []
        for batch in data(steps):
            found.append((engine.get_lr()[0], engine.optimizer.param_groups[0].get("betas")))
            self.train(engine, [batch])
        return found

    def test_ConfigSchedulerWarmup(self):
        rates = self.rates(4, type="WarmupLR", params={"warmup_max_lr": 1e-2, "warmup_num_steps": 4,
                                                       "warmup_type": "linear"})
        self.assertEqual([0, 0, 2.5e-3, 5e-3], [rate for rate, _ in rates])

    def test_ConfigSchedulerOnecycle(self):
        """The first step has the least rate and momentum; then i = 1, 2, … of the cycle (deepspeed 0.19.8)."""
        rates = self.rates(7, type="OneCycle", params={
            "cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 2, "cycle_second_step_size": 2,
            "decay_step_size": 1, "decay_lr_rate": 1.0})
        wanted = [1e-3, 3e-3, 5e-3, 3e-3, 1e-3, 5e-4, 1e-3 / 3]
        momenta = [0.8, 0.85, 0.8, 0.85, 0.9, 0.9, 0.9]
        for (rate, betas), other, momentum in zip(rates, wanted, momenta):
            self.assertAlmostEqual(rate, other, delta=1e-12)
            self.assertAlmostEqual(betas[0], momentum, delta=1e-12)
            self.assertEqual(0.99, betas[1])

    def test_ConfigSchedulerLrrangetest(self):
        for staircase, wanted in ((False, [1e-3, 1.5e-3, 2e-3, 2.5e-3]), (True, [1e-3, 1e-3, 2e-3, 2e-3])):
            rates = self.rates(4, type="LRRangeTest", params={
                "lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2, "lr_range_test_step_rate": 1.0,
                "lr_range_test_staircase": staircase})
            for (rate, _), other in zip(rates, wanted):
                self.assertAlmostEqual(rate, other, delta=1e-12)
        self.assert_error("scheduler.params: .*'min_lr'", self.rates, 1, type="LRRangeTest", params={"min_lr": 1})

    def test_NoOptimizerInConfig(self):
        self.assertEqual([1e-3], self.engine_of(optimizer=False).get_lr())

    def test_DistInitRequiredTrue(self):
        self.start(initialize={"dist_init_required": True})
        with unittest.mock.patch.dict(os.environ, WORLD_SIZE="2"):
            self.assert_error("WORLD_SIZE 2: and nothing says where they meet", self.start)

    def test_DataloaderFromTrainingData(self):
        rows = [(torch.randn(WIDTH), 1) for _ in range(8)]
        self.assertEqual(2, len(self.start(initialize={"training_data": rows})[2]))

    def test_BatchMismatchError(self):
        self.assert_error("train_batch_size", self.start, train_batch_size=6)

    def test_CliArgs(self):
        parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
        args = parser.parse_args(["--deepspeed", "--deepspeed_config", "x.json"])
        self.assertEqual((True, "x.json"), (args.deepspeed, args.deepspeed_config))

    def test_EngineDestroy(self):
        engine = self.engine_of()
        engine.destroy()
        self.assert_error("it is closed", engine.step)

    def test_ZeroInitContext(self):
        with deepspeed.zero.Init(config_dict_or_path=self.settings()):
            network = simple()
        self.train(self.engine_of(network), data(1))

    def test_EngineCompile(self):
        engine = self.engine_of()
        self.assertEqual(hasattr(torch.nn.Module, "compile"), hasattr(engine, "compile"))

    def test_DataTypesGradAccum(self):
        self.engine_of(data_types={"grad_accum_dtype": "fp32"})

    def test_AdamL2Mode(self):
        batches, params = data(3), {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False}
        engine = self.engine_of(optimizer={"type": "Adam", "params": params})
        self.train(engine, batches)
        self.assert_same_weights(engine, self.pytorch(batches, optimizer=lambda p: torch.optim.Adam(
            p, lr=1e-2, weight_decay=0.1))[0])

    def test_LambMuonOnebit(self):
        for kind in ("Lamb", "Muon", "OneBitAdam"):
            self.assert_refused(self.engine_of, optimizer={"type": kind, "params": {"lr": 1e-3}})

    def test_AutocastConfig(self):
        self.assert_refused(self.engine_of, torch_autocast={"enabled": True, "dtype": "bfloat16"})


class Steps(Behaviours):
    def test_GradientAccumulation(self):
        engine = self.engine_of(accumulation=2)
        self.train(engine, data(4))
        self.assertEqual((2, 4), (engine.global_steps, engine.micro_steps))

    def test_GasBoundary(self):
        engine, found = self.engine_of(accumulation=2), []
        for batch in data(4):
            found.append(engine.is_gradient_accumulation_boundary())
            self.train(engine, [batch])
        self.assertEqual([False, True, False, True], found)

    def test_BackwardReturnsAndLossScaling(self):
        engine = self.engine_of(accumulation=2)
        loss = engine(*data()[0])
        self.assertEqual(loss.item() / 2, engine.backward(loss).item())

    def test_SetGasBoundary(self):
        """One step() after all micro-batches, or one for each, and boundaries by hand."""
        ends = []
        for by_hand in (False, True):
            engine = self.engine_of(accumulation=3)
            for number, (x, y) in enumerate(data(3)):
                if by_hand:
                    engine.set_gradient_accumulation_boundary(number == 2)
                    self.assertEqual(number == 2, engine.is_gradient_accumulation_boundary())
                engine.backward(engine(x, y))
                engine.step()
                self.assertEqual(number == 2, engine.was_step_applied())
            ends.append(engine.master_weights())
        for name in ends[0]:
            self.assertTrue(torch.equal(ends[0][name], ends[1][name]), name)
        engine.set_gradient_accumulation_boundary(True)
        self.train(engine, data(1))
        self.assertEqual(2, engine.global_steps)

    def test_SetTrainBatchSize(self):
        for device in ("cpu", "nvme"):
            engine, batches = self.engine_of(device=device), data(5)
            self.train(engine, batches[:1])
            engine.set_train_batch_size(16)
            self.assertEqual((16, 4), (engine.train_batch_size(), engine.gradient_accumulation_steps()))
            self.train(engine, batches[1:])
            self.assertEqual(2, engine.global_steps)
            self.assertRaises(ValueError, engine.set_train_batch_size, 7)
            network = simple().to(DEVICE)
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
            for step in (batches[:1], batches[1:]):
                for x, y in step:
                    (network(x, y) / len(step)).backward()
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            self.assert_same_weights(engine, network)
        engine.set_train_micro_batch_size(2)
        self.assertEqual((2, 8), (engine.train_micro_batch_size_per_gpu(), engine.train_batch_size()))

    def test_GradientClipping(self):
        batches = data(3)
        engine = self.engine_of(gradient_clipping=0.01)
        self.train(engine, batches)
        self.assert_same_weights(engine, self.pytorch(batches, clip=0.01)[0])

    def test_GlobalGradNorm(self):
        engine = self.engine_of()
        self.train(engine, data(1))
        network = simple().to(DEVICE)
        network(*data()[0]).backward()
        norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
        self.assertAlmostEqual(norm, engine.get_global_grad_norm(), delta=1e-5)

    def test_NoSyncAndStepRefused(self):
        engine = self.engine_of()
        with engine.no_sync():
            engine.backward(engine(*data()[0]))
            self.assert_error("inside of no_sync", engine.step)

    def test_NoSyncReentryError(self):
        engine = self.engine_of()
        with engine.no_sync():
            self.assert_error("inside of another", engine.no_sync().__enter__)

    def test_MomentaOfEachGroup(self):
        """As a schedule or the loop has set them."""
        engine = self.engine_of(scheduler={"type": "OneCycle", "params": {
            "cycle_min_lr": 1e-3, "cycle_max_lr": 5e-3, "cycle_first_step_size": 2}})
        self.assertEqual([(0.8, 0.99)], engine.get_mom())
        self.train(engine, data(1))
        self.assertAlmostEqual(0.85, engine.get_mom()[0][0], delta=1e-12)
        network = simple()
        groups = [{"params": [each.weight for each in network.linears]},
                  {"params": [each.bias for each in network.linears]}]
        engine = self.start(network, {"model_parameters": groups})[0]
        self.assertEqual([(0.9, 0.999)] * 2, engine.get_mom())
        engine.optimizer.param_groups[0]["betas"] = [0.5, 0.9]
        self.assertEqual([(0.5, 0.9), (0.9, 0.999)], engine.get_mom())

    def test_BatchSizeQueries(self):
        engine = self.engine_of(accumulation=2)
        self.assertEqual((4, 2, 8), (engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps(),
                                     engine.train_batch_size()))

    def test_GlobalAndMicroSteps(self):
        engine = self.engine_of(accumulation=2)
        self.train(engine, data(4))
        self.assertEqual((2, 4, 16), (engine.global_steps, engine.micro_steps, engine.global_samples))

    def test_EngineEvalTrainModule(self):
        engine = self.engine_of()
        self.assertFalse(engine.eval().training)
        self.assertTrue(engine.train().training)
        self.assertIsInstance(engine.module, SimpleModel)

    def test_EngineSetLr(self):
        engine = self.engine_of()
        engine.set_lr(5e-4)
        self.train(engine, data(1))
        self.assertEqual([5e-4], engine.get_lr())

    def test_OptimizerParamGroupsLr(self):
        engine = self.engine_of()
        engine.optimizer.param_groups[0]["lr"] = 5e-4
        engine.backward(engine(*data()[0]))
        self.assertEqual(5e-4, engine.step().learning_rate)

    def test_FrozenWeights(self):
        network = simple()
        network.linears[0].requires_grad_(False)
        engine = self.engine_of(network)
        self.train(engine, data(1))
        self.assert_same_weights(engine, torch.nn.ModuleDict({"linears": simple().linears[:1]}), within=1e-9)

    def spare(self):
        network = simple()
        network.spare = torch.nn.Linear(WIDTH, 3)
        return network

    def test_UnusedParameters(self):
        engine = self.engine_of(self.spare())
        before = engine.master_weights()["spare.weight"]
        self.train(engine, data(2))
        self.assertTrue(torch.equal(before, engine.master_weights()["spare.weight"]))

    def test_UnusedParametersErrorWhenAsked(self):
        zero = {"ignore_unused_parameters": False}
        engine = self.engine_of(self.spare(), stage=2, zero=zero)
        self.assert_error("spare.weight: has got no gradient in this step, and ignore_unused", self.train, engine,
                          data(1))
        self.train(self.engine_of(stage=2, zero=zero), data(2))

    def test_CsvMonitor(self):
        engine = self.engine_of(accumulation=2, csv_monitor={
            "enabled": True, "output_path": str(self.folder / "out"), "job_name": "job"})
        losses = self.train(engine, data(4))
        lines = (self.folder / "out/job/Train_Samples_train_loss.csv").read_text().splitlines()
        self.assertEqual("step,train_loss", lines[0])
        self.assertEqual([8, 16], [int(line.split(",")[0]) for line in lines[1:]])
        self.assertAlmostEqual(sum(losses[:2]) / 2, float(lines[1].split(",")[1]), delta=1e-6)
        rates = (self.folder / "out/job/Train_Samples_lr.csv").read_text().splitlines()
        self.assertEqual(["step,lr", "8,0.01", "16,0.01"], rates)

    def test_FlopsProfiler(self):
        self.assert_refused(self.engine_of, flops_profiler={"enabled": True})


class Precision(Behaviours):
    def half(self, **fp16):
        return {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, **fp16}

    def engine16(self, **fp16):
        class Widened(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.eye(WIDTH))

            def forward(self, x):
                return x @ self.weight.float()

        return self.engine_of(torch.nn.Sequential(Widened(), Widened()), fp16=self.half(**fp16))

    def step16(self, engine, factor=1.0):
        engine.backward(engine(torch.ones(4, WIDTH, device=DEVICE)).pow(2).mean() * factor)
        return engine.step()

    def test_Fp16DynamicScaleOverflow(self):
        engine = self.engine16()
        self.assertTrue(self.step16(engine, 1e30).skipped)
        self.assertEqual((8, 1, True), (engine.optimizer.cur_scale, engine.skipped_steps, engine.dynamic_loss_scale()))

    def test_Fp16MinScaleRaises(self):
        engine = self.engine16(min_loss_scale=16)
        self.assert_error("smallest loss scale", self.step16, engine, 1e30)

    def test_Fp16StaticScale(self):
        engine = self.engine16(loss_scale=64)
        self.step16(engine, 1e30)
        self.assertEqual(64, engine.optimizer.cur_scale)

    def test_Bf16NanGradient(self):
        engine = self.engine_of(bf16={"enabled": True})
        before = engine.master_weights()
        (x, y), = data(dtype=torch.bfloat16)
        engine.backward(engine(x * float("nan"), y))
        engine.step()
        self.assertEqual((1, 1, False), (engine.skipped_steps, engine.global_steps, engine.was_step_applied()))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(before[name], value), name)
        self.train(engine, data(1))
        self.assertEqual((2, True), (engine.global_steps, engine.was_step_applied()))


if __name__ == "__main__":
    main()
