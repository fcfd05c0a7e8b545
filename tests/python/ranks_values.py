"""DeepSpeed's behaviours on several ranks: values by name, memory and checkpoints. several_ranks.py runs them."""
import os
from unittest import mock

import torch

import spillway as deepspeed
from behaviours import WIDTH, simple
from several_ranks import COUNT, RANK, Several, batches, everyones, mine
from spillway.utils import (safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state,
                            safe_set_full_fp32_param, safe_set_full_grad, safe_set_full_optimizer_state)
from spillway.utils.zero_to_fp32 import (convert_zero_checkpoint_to_fp32_state_dict,
                                         get_fp32_state_dict_from_zero_checkpoint)


class Values(Several):
    def weight(self, steps=1, **settings):
        self.held = self.engine_of(simple(), **settings)
        self.train_mine(self.held, batches(steps))
        return self.held.module.linears[0].weight

    def beside_pytorch(self, steps=1, **settings):
        """A weight of an engine, and PyTorch's one process after the same steps."""
        network = simple()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
        self.pytorch(batches(steps), network, lambda _: optimizer)
        return self.weight(steps, **settings), network, optimizer

    def assert_goes_on_as(self, network, optimizer, within=1e-5):
        more = batches(1, seed=7)
        self.pytorch(more, network, lambda _: optimizer)
        self.train_mine(self.held, more)
        self.assert_same_weights(self.held, network, within)
        self.assert_alike(self.held)
        self.held.close()

    def test_GatheredAfterAStep(self):
        for settings in ({}, {"device": "nvme"}, {"stage": 2}, {"bf16": {"enabled": True}}):
            weight = self.weight(2, **settings)
            with deepspeed.zero.GatheredParameters(weight):
                kept = weight.detach().clone().float()
            self.assertTrue(torch.equal(kept, everyones(kept)[0]))
            master = self.held.master_weights()["linears.0.weight"]
            self.assertTrue(torch.equal(kept, master.to(self.held.dtype).float()))
            self.held.close()

    def test_WritingWithoutAModifierIsAnErrorOnAllRanks(self):
        def write():
            with deepspeed.zero.GatheredParameters(weight), torch.no_grad():
                weight.add_(float(RANK == 1))  # of one of them

        def fail(rank):
            with deepspeed.zero.GatheredParameters(weight):
                if RANK == rank:
                    raise ValueError("of one rank")

        weight = self.weight()
        self.assert_error("written to in GatheredParameters without modifier_rank", write)
        self.assert_alike(self.held)
        for rank in range(COUNT):  # so is an exception
            with self.assertRaisesRegex(ValueError if RANK == rank else deepspeed.Error, "of one rank$") as raised:
                fail(rank)
            self.assertEqual(RANK != rank, str(raised.exception).startswith(f"rank {rank}: "))
        self.assert_alike(self.held)

    def test_WritingByOneRank(self):
        """Its values are everyone's, whatever the others have written."""
        for writer, settings in enumerate(({}, {"device": "nvme"})):
            weight, network, optimizer = self.beside_pytorch(**settings)
            exact = safe_get_full_fp32_param(weight)
            with deepspeed.zero.GatheredParameters(self.held.module.parameters(), modifier_rank=writer), \
                    torch.no_grad():
                weight[0] = 2.0 + RANK
            found = safe_get_full_fp32_param(weight)
            self.assertTrue(found[0].eq(2.0 + writer).all())
            self.assertTrue(torch.equal(exact[1:], found[1:]))
            with torch.no_grad():
                network.linears[0].weight[0] = 2.0 + writer
            self.assert_goes_on_as(network, optimizer)
        with self.assertRaisesRegex(deepspeed.Error, f"modifier_rank is {COUNT}, and ranks are 0 to"), \
                deepspeed.zero.GatheredParameters(self.weight(), modifier_rank=COUNT):
            pass

    def test_Fp32ValuesByName(self):
        weight, network, optimizer = self.beside_pytorch()
        found = safe_get_full_fp32_param(weight)
        self.assertLess((found - network.linears[0].weight).abs().max().item(), 1e-5)
        self.assertTrue(torch.equal(found, self.held.master_weights()["linears.0.weight"]))
        self.assertTrue(torch.equal(found, everyones(found)[0]))
        self.assert_goes_on_as(network, optimizer)

    def test_Fp32ValuesSetByName(self):
        value = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
        for settings in ({}, {"device": "nvme"}, {"stage": 1}, {"stage": 0}):
            weight, network, optimizer = self.beside_pytorch(**settings)
            safe_set_full_fp32_param(weight, value)
            self.assertTrue(torch.equal(value, safe_get_full_fp32_param(weight)))
            with torch.no_grad():
                network.linears[0].weight.copy_(value)
            self.assert_goes_on_as(network, optimizer)
        weight = self.weight()
        self.assert_error("holds NaN at index 0", safe_set_full_fp32_param, weight, value.clone().fill_(torch.nan))
        self.assert_error("and has .16, 16." if RANK == 0 else "and is given 0", safe_set_full_fp32_param, weight,
                          torch.ones(3))

    def test_StatesByName(self):
        weight, network, optimizer = self.beside_pytorch(2)
        for key in ("exp_avg", "exp_avg_sq"):
            found = safe_get_full_optimizer_state(weight, key)
            wanted = optimizer.state[network.linears[0].weight][key]
            self.assertLess((found - wanted).abs().max().item(), 1e-6, key)
            self.assertTrue(torch.equal(found, everyones(found)[0]))
        state = self.held.optimizer.state_dict()["state"]
        self.assertTrue(torch.equal(found, state[0]["exp_avg_sq"]))
        self.assert_goes_on_as(network, optimizer)

    def test_StatesSetByName(self):
        for settings in ({}, {"device": "nvme"}):
            weight, network, optimizer = self.beside_pytorch(**settings)
            for key, most in (("exp_avg", 0.1), ("exp_avg_sq", 0.01)):
                value = torch.linspace(most / 2, most, WIDTH * WIDTH).view(WIDTH, WIDTH)
                safe_set_full_optimizer_state(weight, value, key)
                self.assertTrue(torch.equal(value, safe_get_full_optimizer_state(weight, key)))
                optimizer.state[network.linears[0].weight][key].copy_(value)
            self.assert_goes_on_as(network, optimizer)

    def brought(self, **settings):
        """A weight of an engine after a backward pass, and PyTorch's network, which has gradients of all rows."""
        network, batch = simple(), batches()[0]
        network(*batch).backward()
        weight = self.weight(0, **settings)
        self.held.backward(self.held(*mine(batch)))
        return weight, network

    def test_GradientsByName(self):
        for settings in ({}, {"device": "nvme"}, {"stage": 1}):
            _, network = self.brought(**settings)
            for name, parameter in network.named_parameters():
                found = safe_get_full_grad(self.held.module.get_parameter(name))
                self.assertLess((found - parameter.grad).abs().max().item(), 1e-6, name)
                self.assertTrue(torch.equal(found, everyones(found)[0]), name)
            self.held.step()
            self.assertIsNone(safe_get_full_grad(self.held.module.linears[0].weight))
            self.held.close()

    def test_GradientsSetByName(self):
        for settings in ({}, {"device": "nvme"}, {"stage": 0}):
            weight, network = self.brought(**settings)
            value = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
            safe_set_full_grad(weight, value)
            self.assertTrue(torch.equal(value, safe_get_full_grad(weight)))
            report = self.held.step()
            network.linears[0].weight.grad.copy_(value)
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
            self.assertAlmostEqual(norm, report.gradient_norm, delta=1e-4)
            optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            self.assert_same_weights(self.held, network)
            self.assert_goes_on_as(network, optimizer)

    def test_StateDictOfTheModule(self):
        self.weight()
        state = self.held.module_state_dict()
        first = everyones(state)[0]
        for name, value in self.held.master_weights().items():
            self.assertTrue(torch.equal(value, state[name]) and torch.equal(first[name], state[name]), name)

    def assert_comes_back(self, **settings):
        _, network, optimizer = self.beside_pytorch(**settings)
        before = self.held.master_weights()
        self.held.offload_states()
        self.assert_error("states are offloaded; call reload_states", self.held, *mine(batches()[0]))
        self.held.reload_states()
        for name, value in self.held.master_weights().items():
            self.assertTrue(torch.equal(before[name], value), name)
        self.assertEqual(1, self.held.global_steps)
        self.assert_goes_on_as(network, optimizer)

    def test_OffloadedStates(self):
        self.assert_comes_back(device="nvme")

    def test_OffloadedStatesWithoutAStore(self):
        for stage in (3, 1):
            self.assert_comes_back(stage=stage)

    def test_GenerationUnwrapped(self):
        self.weight()
        with deepspeed.zero.unwrap_model_for_generation(self.held) as network, torch.no_grad():
            loss = network(*batches()[0]).item()
        self.assertEqual([loss] * COUNT, everyones(loss))


class Checkpoints(Several):
    def saved(self, steps=2, network=None, tag=None, save=None, **settings):
        engine, _, _, scheduler = self.start(network or simple(), **settings)
        self.train_mine(engine, batches(steps))
        self.assertTrue(engine.save_checkpoint(self.folder / "saved", tag, client_state={"epoch": 3}, **(save or {})))
        return engine

    def assert_goes_on(self, engine, other, steps=1):
        """Both with the same bits."""
        more = batches(steps, seed=6)
        self.assertEqual(self.train_mine(engine, more), self.train_mine(other, more))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(value, other.master_weights()[name]), name)

    def test_CheckpointWithStates(self):
        for stage in range(4):
            engine = self.saved(stage=stage)
            other = self.engine_of(simple(), stage=stage)
            load = torch.load
            with mock.patch("torch.load", load if RANK == 0 else mock.Mock(side_effect=EOFError)):  # on another host
                self.assert_error("is empty, cut short or damaged; take another", other.load_checkpoint,
                                  self.folder / "saved")
            _, client = other.load_checkpoint(self.folder / "saved")
            self.assertEqual({"epoch": 3}, client)
            self.assert_goes_on(engine, other)

    def test_CheckpointOfAnotherStage(self):
        engine, other = self.saved(stage=2), self.engine_of(simple())
        other.load_checkpoint(self.folder / "saved")
        self.assert_goes_on(engine, other)

    def loaded(self, **load):
        """An engine with the weights of a checkpoint alone. It goes on as PyTorch does from them with a new AdamW, and
        PyTorch's one process has made the steps before."""
        weights = self.saved().master_weights()
        network, _ = self.pytorch(batches(2))
        for name, parameter in network.named_parameters():
            self.assertLess((weights[name] - parameter).abs().max().item(), 1e-5, name)
        engine = self.engine_of(simple())
        folder, client = engine.load_checkpoint(self.folder / "saved", **load)
        self.assertEqual((str(self.folder / "saved/global_step2"), {"epoch": 3}), (folder, client))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)
        counted = engine.global_steps
        self.assertTrue(safe_get_full_optimizer_state(engine.module.linears[0].weight, "exp_avg").eq(0).all())
        more = batches(1, seed=6)
        self.pytorch(more, network)
        self.train_mine(engine, more)
        self.assert_same_weights(engine, network)
        self.assert_alike(engine)
        return counted

    def test_CheckpointWithoutStates(self):
        self.assertEqual(2, self.loaded(load_optimizer_states=False))

    def test_CheckpointOfTheModuleAlone(self):
        self.assertEqual(0, self.loaded(load_module_only=True))

        def fill(src, dst):
            with torch.no_grad():
                for name, parameter in dst.named_parameters():
                    parameter.copy_(src[name] if RANK == 0 else torch.zeros(()))  # which nobody takes

        engine = self.engine_of(simple())
        engine.load_checkpoint(self.folder / "saved", custom_load_fn=fill)
        for name, value in get_fp32_state_dict_from_zero_checkpoint(self.folder / "saved").items():
            self.assertTrue(torch.equal(value, safe_get_full_fp32_param(engine.module.get_parameter(name))), name)
        other = self.engine_of(simple(layers=3))
        self.assert_error("missing are linears.2.weight, linears.2.bias", other.load_checkpoint, self.folder / "saved",
                          load_module_only=True)

    def test_CheckpointBeforeTheFirstStep(self):
        engine, other = self.saved(steps=0), self.engine_of(simple())
        other.load_checkpoint(self.folder / "saved")
        self.assert_goes_on(engine, other)

    def test_CheckpointLoadedWhereItWasSaved(self):
        engine = self.saved()
        weights = engine.master_weights()
        self.train_mine(engine, batches())
        engine.load_checkpoint(self.folder / "saved")
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(value, weights[name]), name)

    def test_CheckpointInMidAccumulation(self):
        engine = self.engine_of(simple(), accumulation=2)
        self.train_mine(engine, batches(3))
        engine.save_checkpoint(self.folder / "saved")
        other = self.engine_of(simple(), accumulation=2)
        other.load_checkpoint(self.folder / "saved")
        self.assertEqual(1, other.global_steps)

    def test_CheckpointOnAnotherNumberOfRanks(self):
        """All ranks' goes on in one process, on all rows, and that one's on all ranks."""
        engine = self.saved()
        alone = self.start(simple(), {"ranks": None}, train_micro_batch_size_per_gpu=4 * COUNT)[0]
        alone.load_checkpoint(self.folder / "saved")
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(value, alone.master_weights()[name]), name)
        more = batches(1, seed=6)
        for here, there in zip(self.train_mine(engine, more), self.train(alone, more)):
            self.assertAlmostEqual(here, there, delta=1e-6)
        if RANK == 0:
            alone.save_checkpoint(self.folder / "one", "one")
        everyones(None)
        engine.load_checkpoint(self.folder / "one", "one")
        self.assertEqual(3, engine.global_steps)
        for name, value in alone.master_weights().items():
            self.assertTrue(torch.equal(value, engine.master_weights()[name]), name)

    def frozen(self):
        network = simple(layers=3)
        network.linears[1].requires_grad_(False)
        return network

    def test_CheckpointOfFrozenWeights(self):
        engine = self.saved(network=self.frozen())
        other = self.engine_of(self.frozen())
        other.load_checkpoint(self.folder / "saved")
        self.assert_goes_on(engine, other)

    def test_CheckpointWithoutFrozenWeights(self):
        engine = self.saved(network=self.frozen(), save={"exclude_frozen_parameters": True})
        other = self.engine_of(self.frozen())
        other.load_checkpoint(self.folder / "saved")
        self.assert_goes_on(engine, other)

    def test_ScheduleOfACheckpoint(self):
        schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}}
        engine, other = self.saved(scheduler=schedule), self.engine_of(simple(), scheduler=schedule)
        other.load_checkpoint(self.folder / "saved")
        self.assertEqual(engine.get_lr(), other.get_lr())
        self.assert_goes_on(engine, other)

    def test_TagsThatDiffer(self):
        """checkpoint.tag_validation Fail."""
        self.assert_refused_by_all(self.saved, tag=f"rank{RANK}", checkpoint={"tag_validation": "Fail"})

    def test_DirectoryThatIsNotThere(self):
        engine = self.engine_of(simple())
        self.assertEqual((None, None), engine.load_checkpoint(self.folder / "nowhere"))

    def test_WeightsOfACheckpointInFp32(self):
        """zero_to_fp32, of one group and of two, with frozen weights and without."""
        for tag, network in (("one", simple()), ("other", self.frozen())):
            engine = self.saved(network=network, tag=tag)
            found = get_fp32_state_dict_from_zero_checkpoint(self.folder / "saved", tag)
            for name, value in engine.master_weights().items():
                self.assertTrue(torch.equal(value, found[name]), name)
            engine.close()
        if RANK == 0:
            convert_zero_checkpoint_to_fp32_state_dict(self.folder / "saved", self.folder / "fp32")
            self.assertTrue(os.listdir(self.folder / "fp32"))

    def test_WeightsIn16Bits(self):
        network = simple()
        network.linears[1].requires_grad_(False)
        engine = self.saved(network=network, bf16={"enabled": True})
        for left_out in (False, True):
            engine.save_16bit_model(self.folder / "whole", exclude_frozen_parameters=left_out)
            found = torch.load(self.folder / "whole/pytorch_model.bin")
            self.assertEqual(2 if left_out else 4, len(found))
            for name, value in found.items():
                self.assertEqual(torch.bfloat16, value.dtype)
                self.assertLess((value.float() - engine.master_weights([name])[name]).abs().max().item(), 1e-2)
            everyones(None)
