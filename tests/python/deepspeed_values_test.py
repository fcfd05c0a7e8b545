"""DeepSpeed's behaviours of weights, states and gradients that are read and written by name, and of checkpoints."""
import os
import unittest.mock

from case import main

import torch

import spillway as deepspeed
from spillway.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                            safe_get_local_fp32_param, safe_get_local_grad, safe_get_local_optimizer_state,
                            safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state,
                            safe_set_local_fp32_param, safe_set_local_grad, safe_set_local_optimizer_state,
                            safe_update_full_grad_vectorized)
from spillway.utils.zero_to_fp32 import (convert_zero_checkpoint_to_fp32_state_dict,
                                         get_fp32_state_dict_from_zero_checkpoint,
                                         load_state_dict_from_zero_checkpoint)
from behaviours import WIDTH, Behaviours, data, simple
from toy_model import DEVICE

PLACES = ({"device": "cpu"}, {"device": "nvme"}, {"stage": 0}, {"device": "nvme", "bf16": {"enabled": True}},
          {"stage": 0, "bf16": {"enabled": True}}, {"device": "cpu", "fp16": {"enabled": True}},
          {"device": "nvme", "spillway": {"commit_every": 0}}, {"device": "cpu", "gradient_clipping": 0})


class Values(Behaviours):
    def everywhere(self, steps=1, places=PLACES):
        """Engines in every place, after some steps."""
        for place in places:
            if place.get("fp16") and DEVICE == "cpu":
                continue  # PyTorch has few operations in fp16 on a CPU
            engine = self.engine_of(simple(), **place)
            self.train(engine, data(steps))
            yield engine
            engine.close()

    def test_GatheredParametersRead(self):
        for engine in self.everywhere():
            weight = engine.module.linears[0].weight
            with deepspeed.zero.GatheredParameters(weight):
                self.assertIs(torch.nn.Parameter, type(weight))
                kept = weight.detach().cpu()
            self.assertTrue(torch.equal(kept, engine.module_state_dict()["linears.0.weight"]))
            with deepspeed.zero.GatheredParameters(engine.module.parameters()):
                self.train(engine, data(1))  # sends them away by itself
                total = sum(parameter.float().sum().item() for parameter in engine.module.parameters())
            self.assertTrue(total == total)
            with deepspeed.zero.GatheredParameters(weight, enabled=False):
                self.assertIsNot(torch.nn.Parameter, type(weight))

    def written(self, engine):
        weight = engine.module.linears[0].weight
        with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
            with torch.no_grad():
                weight[0] = 2.0

    def test_GatheredParametersWrite(self):
        for engine in self.everywhere():
            before = engine.master_weights()["linears.0.weight"]
            state = safe_get_full_optimizer_state(engine.module.linears[0].weight, "exp_avg")
            self.written(engine)
            after = engine.master_weights()["linears.0.weight"]
            self.assertTrue(torch.equal(torch.full((WIDTH,), 2.0), after[0]))
            self.assertTrue(torch.equal(before[1:], after[1:]), "exact bits of masters that kept their value")
            self.assertTrue(torch.equal(after, safe_get_full_fp32_param(engine.module.linears[0].weight)))
            self.assertTrue(torch.equal(state, safe_get_full_optimizer_state(engine.module.linears[0].weight,
                                                                             "exp_avg")))
            self.train(engine, data(1))
            self.assertAlmostEqual(2.0, engine.master_weights()["linears.0.weight"][0, 0].item(), delta=0.05)
            with self.assertRaisesRegex(deepspeed.Error, "written to in GatheredParameters without modifier_rank"), \
                    deepspeed.zero.GatheredParameters(engine.module.linears[0].weight), torch.no_grad():
                engine.module.linears[0].weight.fill_(1.0)

    def test_MomentsInFewerBytesAreReadAndWrittenAsFp32(self):
        found = {}
        for form in ("fp32", "bf16", "int8"):
            engine = self.engine_of(simple(), device="nvme", spillway={"states": form})
            self.train(engine, data(2))
            linear = engine.module.linears[0]
            for key in ("exp_avg", "exp_avg_sq"):
                found[form, key] = [safe_get_full_optimizer_state(p, key) for p in (linear.weight, linear.bias)]
                if form == "fp32":
                    continue
                (exact, exact_bias), (weight, bias) = found["fp32", key], found[form, key]
                self.assertTrue(torch.allclose(exact_bias, bias, rtol=1e-3, atol=0), "vectors stay exact")
                self.assertFalse(torch.equal(exact, weight))
                self.assertLess((exact - weight).abs().max(), 0.02 * exact.abs().max(), (form, key))
                safe_set_full_optimizer_state(linear.weight, weight, key)
                self.assertTrue(torch.equal(weight, safe_get_full_optimizer_state(linear.weight, key)),
                                "what was widened goes back as it was")
            broken = torch.full((WIDTH, WIDTH), torch.nan)
            self.assert_error(r"linears\.0\.weight\.exp_avg: holds NaN at index 0", safe_set_full_optimizer_state,
                              linear.weight, broken, "exp_avg")
            engine.close()

    def test_WhatWasWrittenIsResumed(self):
        engine = self.engine_of(device="nvme")
        self.train(engine, data(2))
        self.written(engine)
        kept = engine.master_weights()
        engine.close()
        again = self.start(device="nvme", initialize={"on_existing": "resume"})[0]
        self.assertEqual(2, again.global_steps)
        for name, value in again.master_weights().items():
            self.assertTrue(torch.equal(kept[name], value), name)

    def test_WeightsOfEquivalent(self):
        engine = self.engine_of()
        with engine.weights_of(engine.module.linears[0]):
            self.assertEqual(WIDTH, engine.module.linears[0].weight.sum(1).numel())

    def test_RegisterExternalParameter(self):
        engine = self.engine_of()
        deepspeed.zero.register_external_parameter(engine.module, engine.module.linears[0].weight)
        deepspeed.zero.unregister_external_parameter(engine.module, engine.module.linears[0].weight)
        self.assertRaises(RuntimeError, deepspeed.zero.register_external_parameter, None, None)

    def test_ExternalParameterAuto(self):
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.e, self.body = torch.nn.Embedding(8, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

            def forward(self, ids):
                logits = torch.nn.functional.linear(self.body(self.e(ids)), self.e.weight)
                return torch.nn.functional.cross_entropy(logits, ids)

        torch.manual_seed(2)
        network = Tied()
        engine, ids = self.engine_of(network), torch.arange(4, device=DEVICE)
        torch.manual_seed(2)
        reference = Tied().to(DEVICE)
        reference(ids).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
        engine.backward(engine(ids))
        self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5)

    def test_SafeGetFullFp32Param(self):
        for engine in self.everywhere():
            for name, parameter in engine.module.named_parameters():
                self.assertTrue(torch.equal(engine.master_weights([name])[name], safe_get_full_fp32_param(parameter)))
        self.assertIsNone(safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(2))))

    def gradients(self, batch):
        network = simple().to(DEVICE)
        network(*batch).backward()
        return {name: parameter.grad.cpu() for name, parameter in network.named_parameters()}

    def test_SafeGetFullGrad(self):
        for engine in self.everywhere(0, PLACES[:7]):
            (x, y), = data(dtype=engine.dtype)
            engine.backward(engine(x, y))
            within = 1e-6 if engine.dtype == torch.float32 else 0.05
            for name, wanted in self.gradients(data()[0]).items():
                found = safe_get_full_grad(engine.module.get_parameter(name))
                self.assertEqual(torch.float32, found.dtype)
                self.assertLess((found - wanted).abs().max().item(), within, name)
            engine.step()
            self.assertIsNone(safe_get_full_grad(engine.module.linears[0].weight))
        engine = self.engine_of(accumulation=2)
        engine.backward(engine(*data()[0]))
        self.assert_error("has no gradient yet", safe_get_full_grad, engine.module.linears[0].weight)

    def test_SafeGetFullOptimizerState(self):
        batches = data(2)
        network = simple().to(DEVICE)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
        for x, y in batches:
            network(x, y).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        engine = self.engine_of(device="nvme")
        self.train(engine, batches)
        for name, parameter in network.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                found = safe_get_full_optimizer_state(engine.module.get_parameter(name), key)
                self.assertLess((found - optimizer.state[parameter][key].cpu()).abs().max().item(), 1e-6, (name, key))
        self.assert_error("optim_state_key: 'exp' is none of", safe_get_full_optimizer_state,
                          engine.module.linears[0].weight, "exp")
        engine = self.engine_of(optimizer={"type": "SGD", "params": {"lr": 0.1}})
        self.assert_error("linears.0.weight: has no such values", safe_get_full_optimizer_state,
                          engine.module.linears[0].weight, "exp_avg_sq")

    def test_SafeSetFullFp32Param(self):
        for engine in self.everywhere():
            parameter, value = engine.module.linears[1].bias, torch.linspace(0.1, 1, WIDTH)
            safe_set_full_fp32_param(parameter, value)
            self.assertTrue(torch.equal(value, safe_get_full_fp32_param(parameter)))
            with engine.weights_of(engine.module.linears[1]):
                self.assertLess((parameter.cpu().float() - value).abs().max().item(), 0.01)
            self.train(engine, data(1))
        self.assert_error("is given .3.* and has .16", safe_set_full_fp32_param, *self.wrong(3))
        self.assert_error("holds NaN at index 0", safe_set_full_fp32_param, *self.wrong(WIDTH))

    def wrong(self, count):
        self.engine_kept = self.engine_of()
        return self.engine_kept.module.linears[0].bias, torch.full((count,), float("nan"))

    def test_SafeSetFullGrad(self):
        """A step with the gradients of another batch is the step of that batch."""
        ends = {}
        for engine in self.everywhere(0, PLACES[:7]):
            one, other = data(2, dtype=engine.dtype)
            engine.backward(engine(*other))
            wanted = {name: safe_get_full_grad(parameter) for name, parameter in engine.module.named_parameters()}
            engine.discard_step()
            engine.backward(engine(*one))
            for name, parameter in engine.module.named_parameters():
                safe_set_full_grad(parameter, wanted[name])
                self.assertTrue(torch.equal(wanted[name], safe_get_full_grad(parameter)), name)
            engine.step()
            found = engine.master_weights()
            reference = self.engine_of(simple(), stage=0, **({"bf16": {"enabled": True}}
                                                             if engine.dtype == torch.bfloat16 else {}))
            reference.backward(reference(*other))
            reference.step()
            ends = reference.master_weights()
            for name, value in ends.items():
                self.assertTrue(torch.equal(value, found[name]), name)

    def test_SafeSetFullOptimizerState(self):
        for engine in self.everywhere():
            parameter = engine.module.linears[1].weight
            master, other = safe_get_full_fp32_param(parameter), engine.module.linears[1].bias
            before = safe_get_full_optimizer_state(other, "exp_avg")
            for key in ("exp_avg", "exp_avg_sq"):
                safe_set_full_optimizer_state(parameter, torch.full((WIDTH, WIDTH), 0.25), key)
                self.assertTrue(safe_get_full_optimizer_state(parameter, key).eq(0.25).all())
            self.assertTrue(torch.equal(master, safe_get_full_fp32_param(parameter)))
            self.assertTrue(torch.equal(before, safe_get_full_optimizer_state(other, "exp_avg")))
            self.train(engine, data(1))
            moved = safe_get_full_optimizer_state(parameter, "exp_avg")
            self.assertLess((moved - 0.225).abs().max().item(), 0.1)

    def test_SafeLocalApi(self):
        engine = self.engine_of()
        parameter = engine.module.linears[0].bias
        safe_set_local_fp32_param(parameter, torch.ones(WIDTH))
        safe_set_local_optimizer_state(parameter, torch.ones(WIDTH), "exp_avg")
        engine.backward(engine(*data()[0]))
        safe_set_local_grad(parameter, torch.ones(WIDTH))
        for found in (safe_get_local_fp32_param(parameter), safe_get_local_optimizer_state(parameter, "exp_avg"),
                      safe_get_local_grad(parameter)):
            self.assertTrue(found.eq(1).all())

    def test_SafeUpdateFullGradVectorized(self):
        engine = self.engine_of()
        engine.backward(engine(*data()[0]))
        parameters = list(engine.module.parameters())
        before = [safe_get_full_grad(parameter) for parameter in parameters]
        safe_update_full_grad_vectorized(parameters, lambda gradient, _: gradient * 0.5)
        for parameter, gradient in zip(parameters, before):
            self.assertTrue(torch.equal(gradient * 0.5, safe_get_full_grad(parameter)))

    def test_OptimizerStateDict(self):
        engine = self.engine_of()
        self.train(engine, data(2))
        state = engine.optimizer.state_dict()
        self.assertEqual(({0, 1, 2, 3}, [0, 1, 2, 3]), ({*state["state"]}, state["param_groups"][0]["params"]))
        other = self.engine_of()
        other.optimizer.load_state_dict(state)
        for number, parameter in enumerate(other.module.parameters()):
            self.assertTrue(torch.equal(state["state"][number]["exp_avg_sq"],
                                        safe_get_full_optimizer_state(parameter, "exp_avg_sq")))

    def test_OptimizerStateDictIsLoadedByNumber(self):
        engine = self.engine_of()
        self.train(engine, data(2))
        state = engine.optimizer.state_dict()
        self.assertEqual(2, state["state"][0]["step"])
        other = self.engine_of()
        with self.assertLogs("spillway", "WARNING") as heard:
            other.optimizer.load_state_dict({**state, "state": dict(reversed(state["state"].items()))})
        self.assertIn("of 2 updates, and the engine's next one is number 1", heard.output[0])
        other.save(self.folder / "snapshot")
        begun, loaded = self.start(initialize={"snapshot": self.folder / "snapshot"})[0], self.engine_of()
        loaded.load_snapshot(self.folder / "snapshot")
        for each in (other, begun, loaded):
            each.backward(each(*data()[0]), retain_graph=True)  # makes the plan once more
            each.discard_step()
            for number, parameter in enumerate(each.module.parameters()):
                for name in ("exp_avg", "exp_avg_sq"):
                    self.assertTrue(torch.equal(state["state"][number][name],
                                                safe_get_full_optimizer_state(parameter, name)), (number, name))
        with self.assertNoLogs("spillway", "WARNING"):
            engine.optimizer.load_state_dict(state)
        for wrong, words in (({**state, "state": {**state["state"], 1: {}}}, "parameter 1 has no exp_avg and no exp_"),
                             ({**state, "param_groups": []}, r"its groups have \[\] parameters, and those here \[4\]")):
            self.assert_error(words, engine.optimizer.load_state_dict, wrong)

    def test_ModuleStateDict(self):
        network = simple()
        network.linears[0].weight.requires_grad_(False)
        engine = self.engine_of(network)
        self.assertEqual({*network.state_dict()} - {"linears.0.weight"},
                         {*engine.module_state_dict(exclude_frozen_parameters=True)})
        self.train(engine, data(1))
        kept = engine.module_state_dict()
        self.train(engine, data(1))
        engine.load_module_state_dict(kept)
        for name, value in kept.items():
            self.assertTrue(torch.equal(value, engine.module_state_dict()[name]), name)

    def test_OffloadStates(self):
        for engine in self.everywhere(places=PLACES[:6]):
            before = engine.master_weights()
            engine.offload_states()
            self.assert_error("states are offloaded; call reload_states", engine, *data(dtype=engine.dtype)[0])
            engine.reload_states()
            for name, value in engine.master_weights().items():
                self.assertTrue(torch.equal(before[name], value), name)
            self.train(engine, data(1))
            self.assertEqual(2, engine.global_steps)

    def test_AReloadThatFailsIsMadeAgain(self):
        for place in ({"device": "cpu"}, {"device": "nvme"}):
            engine = self.engine_of(**place)
            self.train(engine, data(1))
            before = engine.master_weights()
            engine.offload_states()
            with unittest.mock.patch.object(engine._library, "engine_create_on",
                                            side_effect=deepspeed.Error("out_of_memory", "taken by another")):
                for _ in range(2):
                    self.assert_error("taken by another", engine.reload_states)
            self.assert_error("states are offloaded; call reload_states", engine, *data()[0])
            engine.reload_states()
            self.train(engine, data(1))
            self.assertEqual(2, engine.global_steps)
            self.assertFalse(torch.equal(before["linears.0.weight"], engine.master_weights()["linears.0.weight"]))

    def test_BetasThatWereSetStay(self):
        """When the engine is made once more, by another plan or after its states were offloaded."""
        def replan(engine):
            loss = engine(*data()[0])
            engine.backward(loss, retain_graph=True)
            engine.discard_step()

        def offload(engine):
            engine.offload_states()
            engine.reload_states()

        for device in ("cpu", "nvme"):
            for again in (replan, offload):
                ends = []
                for configured in ({}, {"betas": [0.5, 0.9]}):
                    engine = self.engine_of(device=device, optimizer={
                        "type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, **configured}})
                    if not configured:
                        engine.optimizer.param_groups[0]["betas"] = (0.5, 0.9)
                    self.train(engine, data(2))
                    again(engine)
                    self.train(engine, data(2))
                    ends.append(engine.master_weights())
                    engine.close()
                for name, value in ends[0].items():
                    self.assertTrue(torch.equal(value, ends[1][name]), (device, again.__name__, name))

    def test_EmptyPartitionCache(self):
        self.engine_of().empty_partition_cache()


class Checkpoints(Behaviours):
    def saved(self, steps=2, **settings):
        engine = self.engine_of(**settings)
        self.train(engine, data(steps))
        self.assertTrue(engine.save_checkpoint(self.folder / "saved", client_state={"epoch": 3}))
        weights = engine.master_weights()
        engine.close()
        return weights

    def assert_weights(self, engine, weights):
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)

    def loaded(self, load=None, network=None, **settings):
        weights = self.saved()
        engine = self.engine_of(network or simple(), **settings)
        folder, state = engine.load_checkpoint(self.folder / "saved", **(load or {}))
        self.assertEqual((str(self.folder / "saved/global_step2"), {"epoch": 3}), (folder, state))
        return engine, weights

    def test_CheckpointRoundtrip(self):
        engine, weights = self.loaded()
        self.assert_weights(engine, weights)
        self.assertEqual(2, engine.global_steps)

    def test_CheckpointChangedTiers(self):
        engine, weights = self.loaded(device="nvme")
        self.assert_weights(engine, weights)

    def test_CheckpointChangedLr(self):
        engine, _ = self.loaded(optimizer={"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01}})
        self.assertEqual([1e-2], engine.get_lr())

    def test_CheckpointStageChange(self):
        engine, weights = self.loaded(stage=0)
        self.assert_weights(engine, weights)

    def test_LoadNoOptimizerStates(self):
        engine, weights = self.loaded({"load_optimizer_states": False})
        self.assert_weights(engine, weights)
        self.assertEqual(2, engine.global_steps)
        self.assertTrue(safe_get_full_optimizer_state(engine.module.linears[0].weight, "exp_avg").eq(0).all())
        self.train(engine, data(1))
        self.assertEqual(3, engine.global_steps)

    def test_LoadModuleOnly(self):
        engine, weights = self.loaded({"load_module_only": True})
        self.assert_weights(engine, weights)
        self.assertEqual(0, engine.global_steps)

    def test_LoadNonStrict(self):
        engine, weights = self.loaded({"load_module_strict": False, "load_module_only": True}, simple(layers=3))
        found = engine.master_weights()
        self.assertTrue(torch.equal(weights["linears.1.weight"], found["linears.1.weight"]))
        self.assert_error("missing are linears.2.weight, linears.2.bias", engine.load_checkpoint,
                          self.folder / "saved", load_module_only=True)

    def test_LoadMissingLatest(self):
        self.assertEqual((None, None), self.engine_of().load_checkpoint(self.folder))

    def test_LoadExplicitTag(self):
        engine, weights = self.loaded({"tag": "global_step2"})
        self.assert_weights(engine, weights)

    def test_LoadMidRun(self):
        weights, engine = self.saved(), self.engine_of()
        self.train(engine, data(3))
        engine.load_checkpoint(self.folder / "saved")
        self.assertEqual(2, engine.global_steps)
        self.assert_weights(engine, weights)

    def test_ImmediateSaveLoad(self):
        weights = self.saved(0)
        engine = self.engine_of()
        engine.load_checkpoint(self.folder / "saved")
        self.assert_weights(engine, weights)

    def test_SaveMidAccumulation(self):
        engine = self.engine_of(accumulation=2)
        self.train(engine, data(3))
        engine.save_checkpoint(self.folder / "saved")
        self.train(engine, data(1))
        self.assertEqual(2, engine.global_steps)

    def test_SaveExcludeFrozen(self):
        network = simple()
        network.linears[0].requires_grad_(False)
        engine = self.engine_of(network)
        self.train(engine, data(1))
        engine.save_checkpoint(self.folder / "saved", exclude_frozen_parameters=True)
        engine.load_checkpoint(self.folder / "saved")

    def test_Save16bitModel(self):
        engine = self.engine_of()
        engine.save_16bit_model(self.folder / "end")
        self.assertEqual({*engine.module_state_dict()}, {*torch.load(self.folder / "end/pytorch_model.bin")})

    def test_SharedWeightsCheckpoint(self):
        network = simple()
        network.linears[1].weight = network.linears[0].weight
        engine = self.engine_of(network)
        self.train(engine, data(1))
        engine.save_checkpoint(self.folder / "saved")
        state = get_fp32_state_dict_from_zero_checkpoint(self.folder / "saved")
        self.assertTrue(torch.equal(state["linears.0.weight"], state["linears.1.weight"]))
        self.assertEqual({*simple().state_dict()}, {*state})
        engine.load_checkpoint(self.folder / "saved", load_module_only=True)

    def test_ZeroToFp32(self):
        weights = self.saved()
        state = get_fp32_state_dict_from_zero_checkpoint(self.folder / "saved")
        for name, value in weights.items():
            self.assertTrue(torch.equal(value, state[name]), name)
        convert_zero_checkpoint_to_fp32_state_dict(self.folder / "saved", self.folder / "whole", tag="global_step2")
        self.assertEqual({*state}, {*torch.load(self.folder / "whole/pytorch_model.bin")})
        network = load_state_dict_from_zero_checkpoint(simple(), self.folder / "saved")
        self.assertTrue(torch.equal(weights["linears.0.weight"], network.linears[0].weight))
        self.assertEqual(["global_step2", "latest"], sorted(os.listdir(self.folder / "saved")))
        self.assertEqual(["client_state.pt", "spillway"], sorted(os.listdir(self.folder / "saved/global_step2")))


if __name__ == "__main__":
    main()
