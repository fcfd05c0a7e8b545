"""Spillway in a PyTorch loop: the same training as PyTorch's own, whatever the tiers, and clear errors."""
import json
import re

from case import Case as Folder
from case import main

import unittest.mock
import warnings

import torch

import spillway
from toy_model import DEVICE, Widened, batches, config, model, train


def reference(steps, accumulation=1, trained=None):
    """The same in PyTorch alone: losses, norms, final weights."""
    network = (trained or model()).to(DEVICE)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    data = batches(steps * accumulation)
    losses, norms = [], []
    for step in range(steps):
        torch.manual_seed(step)
        for micro in range(accumulation):
            loss = network(data[step * accumulation + micro])
            (loss / accumulation).backward()
            losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, network.cpu().state_dict()


class Case(Folder):
    def engine(self, network=None, configuration=None, **options):
        return super().engine(network or model(), configuration, **options)


class Training(Case):
    def assert_trains_as_pytorch(self, engine, steps=5, accumulation=1, trained=None, unplanned=0):
        """`unplanned`: visits of the first step."""
        losses, reports = train(engine, steps, accumulation=accumulation)
        expected_losses, expected_norms, expected = reference(steps, accumulation, trained)
        # Until the first update the arithmetic is PyTorch's own, and so are the bits.
        self.assertEqual(expected_losses[:accumulation], losses[:accumulation])
        # After it the optimizers round differently, by an ulp of a weight a step.
        for found, wanted in zip(losses, expected_losses):
            self.assertAlmostEqual(wanted, found, delta=2e-6 * wanted)
        for report, wanted in zip(reports, expected_norms):
            self.assertAlmostEqual(wanted, report.gradient_norm, delta=2e-5 * wanted)
        self.assertEqual([unplanned] + [0] * (steps - 1), [report.unplanned_visits for report in reports])
        state = engine.module.state_dict()
        self.assertEqual(list(expected), list(state))
        for name, value in expected.items():
            self.assertLess((state[name] - value).abs().max().item(), 1e-5, name)

    def test_TrainsAsPyTorchDoes(self):
        self.assert_trains_as_pytorch(self.engine())

    def test_TrainsAsPyTorchDoesWithMicroBatches(self):
        self.assert_trains_as_pytorch(self.engine(configuration=config(self.folder, accumulation=3)), accumulation=3)

    def little_hbm(self, accumulation):
        """Too little for the sums of all blocks' gradients, which take turns there."""
        with self.assertRaises(spillway.Error) as refused:
            self.engine(configuration=config(self.folder, accumulation=accumulation, spillway={"hbm_bytes": 1}))
        least = re.search(r'hbm_bytes to "(\d+)KiB"', str(refused.exception))
        return {"hbm_bytes": int(least[1]) * 1024 + 64 * 1024}  # a place more

    def test_TrainsAsPyTorchDoesWithSumsInHostMemory(self):
        little = self.little_hbm(3)
        engine = self.engine(configuration=config(self.folder, accumulation=3, spillway=little))
        self.assertIn(("host", "gradient accumulators (fp32)"), [entry[:2] for entry in engine.ledger()])
        self.assert_trains_as_pytorch(engine, accumulation=3)

    def test_AStepOfFewerMicroBatches(self):
        self.assert_trains_in_shorter_steps()

    def test_AStepOfFewerMicroBatchesWithSumsInHostMemory(self):
        self.assert_trains_in_shorter_steps(self.little_hbm(2))

    def assert_trains_in_shorter_steps(self, budgets=None):
        data = batches(3)
        network = model().to(DEVICE).eval()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
        engine = self.engine(model().eval(), config(self.folder, accumulation=2, spillway=budgets))
        for step in (data[:2], data[2:], data[:2]):
            for ids in step:  # weighted by the caller
                wanted, loss = network(ids), engine(ids)
                (wanted * 3 / len(step)).backward()
                engine.backward(loss * 3 / len(step), scale_wrt_gas=False)
                self.assertAlmostEqual(wanted.item(), loss.item(), delta=2e-6 * loss.item())
            report = engine.step(early=True)
            wanted = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
            self.assertAlmostEqual(wanted, report.gradient_norm, delta=2e-5 * wanted)
            optimizer.step()
            optimizer.zero_grad()
            self.assertIsNone(engine.step(early=True))  # of no micro-batches there is none
        state = engine.module.state_dict()
        for name, value in network.cpu().state_dict().items():
            self.assertLess((state[name] - value).abs().max().item(), 1e-5, name)

    def test_ASchedulersRates(self):
        network = model().to(DEVICE).eval()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        engine = self.engine(model().eval())
        for ids in batches(3):
            network(ids).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            engine.set_learning_rate(optimizer.param_groups[0]["lr"])
            engine.backward(engine(ids))
            self.assert_error("set what a step updates by before its first gradient", engine.set_learning_rate, 1.0)
            self.assertEqual(optimizer.param_groups[0]["lr"], engine.step().learning_rate)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        weights = engine.master_weights(names={"norm.bias"})
        self.assertEqual(["norm.bias"], list(weights))
        self.assertLess((weights["norm.bias"] - network.norm.bias.cpu()).abs().max().item(), 1e-5)
        self.assert_error("nan is no learning rate", engine.set_learning_rate, float("nan"))

    def test_RatesThatALoopSetsByItself(self):
        engine = self.engine()  # whose configuration says 1e-3: a warm-up ends there
        rates = []
        for step, ids in enumerate(batches(5), start=1):
            engine.optimizer.param_groups[0]["lr"] = 1e-3 * min(1, step / 3)
            engine.backward(engine(ids))
            rates.append(engine.step().learning_rate)
        self.assertEqual([1e-3 / 3, 1e-3 * 2 / 3, 1e-3, 1e-3, 1e-3], rates)

    def test_ASchedulerOfPyTorchs(self):
        for factor in (0.5, 1.0):  # one that changes nothing counts as well, against a scheduler of the configuration
            folder = self.folder / str(factor)
            folder.mkdir()
            engine = self.engine(configuration=config(folder, scheduler={
                "type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-3, "warmup_min_lr": 1e-4}}))
            first = engine.optimizer.param_groups[0]["lr"]
            self.assertEqual(1e-4, first)
            schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, factor)
            rates = []
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # PyTorch's, of schedulers that come before their optimizer
                for step in range(4):
                    rates.append(train(engine, 1, first=step)[1][0].learning_rate)
                    schedule.step()
            self.assertEqual([first * factor ** step for step in range(4)], rates)
            engine.backward(engine(batches(1)[0]))
            engine.optimizer.param_groups[0]["lr"] = 1.0
            self.assert_error("learning rate: was .* in the step's backward pass", engine.optimizer.step)
            engine.discard_step()
        for call in (engine.optimizer.state_dict, lambda: engine.optimizer.load_state_dict({})):
            self.assert_error("optimizer: its states are Spillway's", call)

    def test_WhatAnEngineDoesNotHaveIsTheModules(self):
        network = model()
        network.config = "of the model"
        engine = self.engine(network)
        engine.eval()
        self.assertFalse(network.training)
        engine.train()
        self.assertTrue(network.training)
        self.assertEqual(("of the model", 10, DEVICE), (
            engine.config, len(list(engine.layers[0].parameters())) + len(list(engine.norm.parameters())) + 2,
            engine.device.type))
        for name in ("steps", "_parameters"):
            with self.assertRaisesRegex(AttributeError, f"'{name}'"):
                getattr(engine, name)

    def test_BlocksMayBeLarger(self):
        network = model()
        self.assert_trains_as_pytorch(self.engine(network, blocks=[network]), steps=3)

    def test_FrozenParametersKeepTheirBits(self):
        networks = [model(), model()]
        for network in networks:
            network.embedding.weight.requires_grad_(False)
            network.layers[1].up.weight.requires_grad_(False)
        before = networks[0].layers[1].up.weight.detach().clone()
        engine = self.engine(networks[0])
        self.assert_trains_as_pytorch(engine, trained=networks[1])
        self.assertTrue(torch.equal(before, engine.master_weights()["layers.1.up.weight"]))

    def test_AnExampleShowsWhatRunsTwice(self):
        def twice():
            network = model()
            network.layers.append(network.layers[0])
            return network
        order = self.engine(twice(), example=(batches(1)[0],))
        self.assert_trains_as_pytorch(order, trained=twice())
        order.close()
        unknown = self.engine(twice(), on_existing="replace")
        self.assert_trains_as_pytorch(unknown, trained=twice(), unplanned=1)  # the first shows it, too

    def test_WhatAStepDoesNotUseHasNoGradient(self):
        network = model()
        network.layers.append(torch.nn.Linear(4, 4))
        network.forward = lambda ids: type(network).forward(shortened, ids)
        shortened = model()
        for name in ("embedding", "norm", "head"):
            setattr(shortened, name, getattr(network, name))
        shortened.layers = network.layers[:3]
        before = network.layers[3].weight.detach().clone()
        engine = self.engine(network)
        _, reports = train(engine, 2)
        self.assertGreater(reports[1].gradient_norm, 0)
        self.assertTrue(torch.equal(before, engine.master_weights()["layers.3.weight"]))

    def test_Bf16Trains(self):
        engine = self.engine(configuration=config(self.folder, bf16={"enabled": True}))
        losses, reports = train(engine, 20)
        self.assertLess(losses[-1], losses[0] - 0.05)
        self.assertEqual((1, 1), (reports[-1].loss_scale, engine.current_loss_scale))
        self.assertEqual(torch.bfloat16, engine.module.state_dict()["layers.0.up.weight"].dtype)

    def test_Bf16RoundsTiesAwayFromZeroAndPyTorchToEven(self):
        """So a model that is loaded in bf16 has PyTorch's losses, and one in fp32 has where no value is midway."""
        tie = 1 + 2 ** -8  # between 1, which is even, and 1 + 2 ** -7
        for network in (model(), model().bfloat16()):
            narrow = network.norm.weight.dtype
            with torch.no_grad():
                network.norm.weight[3] = tie
            alone = model().bfloat16()
            alone.load_state_dict(network.state_dict())
            engine = self.engine(network, config(self.folder, "cpu", bf16={"enabled": True}))
            engine.eval()
            alone.eval()
            with torch.no_grad():
                found, wanted = engine(batches(1)[0]).item(), alone.to(DEVICE)(batches(1)[0]).item()
            weights = engine.module.state_dict()["norm.weight"][3].item(), alone.norm.weight[3].item()
            if narrow == torch.float32:
                self.assertEqual((1 + 2 ** -7, 1.0), weights)
                self.assertEqual(tie, engine.master_weights({"norm.weight"})["norm.weight"][3].item())
                self.assertNotEqual(wanted, found)
            else:
                self.assertEqual(((1.0, 1.0), wanted), (weights, found))

    def test_Fp16ScalesItsLoss(self):
        network = torch.nn.Sequential(*(Widened() for _ in range(3)))
        engine = self.engine(network, config(self.folder, fp16={"enabled": True, "initial_scale_power": 4}))
        before = engine.master_weights()["1.weight"]

        def step(factor):
            torch.manual_seed(0)
            engine.backward(engine(torch.randn(8, 16, device=DEVICE)).pow(2).mean() * factor)
            return engine.step()

        reports = [step(1e-4), step(1e30), step(1e30), step(1e-4)]
        self.assertEqual([False, True, True, False], [report.skipped for report in reports])
        # The second overflow halves the scale: hysteresis is 2.
        self.assertEqual([16, 16, 16, 8], [report.loss_scale for report in reports])
        self.assertAlmostEqual(reports[0].gradient_norm, reports[3].gradient_norm, delta=0.2 * reports[0].gradient_norm)
        moved = (engine.master_weights()["1.weight"] - before).abs().max().item()
        self.assertTrue(1e-3 < moved < 2.1e-3, moved)  # two of Adam's steps


class Promises(Case):
    def run_of(self, name, steps=4, **options):
        folder = self.folder / name
        folder.mkdir()
        engine = self.engine(configuration=config(folder, **options))
        losses, _ = train(engine, steps)
        weights = engine.master_weights()
        engine.close()
        return losses, weights

    def assert_same_bits(self, one, other):
        self.assertEqual(one[0], other[0])
        for name, value in one[1].items():
            self.assertTrue(torch.equal(value, other[1][name]), name)

    def test_SameBitsInEveryTier(self):
        resident = self.run_of("hbm", device="none")
        self.assert_same_bits(resident, self.run_of("host", device="cpu"))
        self.assert_same_bits(resident, self.run_of("nvme"))
        engine = self.engine()
        hbm = sum(size for tier, _, size in engine.ledger() if tier == "hbm")
        engine.close()
        tight = {"hbm_bytes": hbm, "threads": 1}
        self.assert_same_bits(resident, self.run_of("tight", spillway=tight))

    def test_ARunGoesOnWhereItStood(self):
        whole = self.run_of("whole", steps=5)
        engine = self.engine()
        train(engine, 3, blob=b"three batches")
        engine.close()
        again = self.engine(model(seed=9), on_existing="resume")  # with other values, which do not count
        self.assertEqual((3, b"three batches"), (again.current_step, again.blob))
        losses, _ = train(again, 2, first=3)
        self.assert_same_bits((whole[0][3:], whole[1]), (losses, again.master_weights()))

    def test_ASnapshotBeginsAnotherRun(self):
        whole = self.run_of("whole", steps=4)
        engine = self.engine()
        train(engine, 2)
        engine.save(self.folder / "saved")
        engine.close()
        again = self.engine(model(seed=9), config(self.folder, device="cpu"), snapshot=self.folder / "saved")
        losses, _ = train(again, 2, first=2)
        self.assert_same_bits((whole[0][2:], whole[1]), (losses, again.master_weights()))

    def test_AnExceptionInBackwardCostsTheStepAlone(self):
        class Stopped(Exception):
            pass

        def stop(*_):
            raise Stopped

        folder = self.folder / "whole"
        folder.mkdir()
        whole = self.engine(configuration=config(folder, accumulation=2))
        losses, _ = train(whole, 3, accumulation=2)
        network = model()
        engine = self.engine(network, config(self.folder, accumulation=2))
        data = batches(2)
        for step in range(3):
            for backwards in (False, True):  # the block's first run, and the one in backward
                engine.backward(engine(data[0]) * 3)  # of the first micro-batch, which is forgotten
                loss = engine(data[1]) if backwards else None
                handle = network.layers[1].down.register_forward_hook(stop)
                with self.assertRaises(Stopped):
                    engine.backward(loss if backwards else engine(data[1]))
                handle.remove()
                if not backwards:
                    engine.discard_step()
                self.assertIsNone(engine.step())
            again, reports = train(engine, 1, first=step, accumulation=2)
            self.assertEqual(losses[2 * step:2 * step + 2], again)
            self.assertEqual((step + 1, 0), (reports[0].step, reports[0].unplanned_visits))
        expected = whole.master_weights()
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(value, expected[name]), name)

    def test_AnEvaluationInBetweenIsFetchedAsPlanned(self):
        whole = self.run_of("whole", steps=3)
        engine = self.engine()
        losses = []
        for step in range(3):
            with torch.no_grad():
                for batch in batches(3):
                    engine(batch)
            more, reports = train(engine, 1, first=step)
            losses += more
            self.assertEqual(0, reports[0].unplanned_visits)
        self.assert_same_bits(whole, (losses, engine.master_weights()))

    def test_AnAllocationIsInTheLedger(self):
        engine = self.engine()
        self.assertEqual({"hbm", "host", "nvme"}, {tier for tier, _, _ in engine.ledger()})
        self.assertIn("model workspace", {purpose for _, purpose, _ in engine.ledger()})
        self.assertTrue(any(line.startswith("device: ") for line in engine.describe()))

    def test_ASweepsResultGoesOverTheConfiguration(self):
        tuned = {"aio": {"block_size": 65536, "queue_depth": 4}, "spillway": {"hbm_bytes": "16KiB"}}
        (self.folder / "aio.json").write_text(json.dumps(tuned))
        for aio in (tuned, self.folder / "aio.json"):
            self.assert_error("spillway.hbm_bytes", self.engine, aio=aio)
        del tuned["spillway"]
        train(self.engine(aio=tuned), 1)
        self.assert_error(r"aio:.*unknown key \"aio.depth\"", self.engine, aio={"aio": {"depth": 4}})

    def test_AModelOnMetaGetsItsWeightsByName(self):
        real = model()
        values = real.state_dict()
        empty = model().to("meta")
        empty.head.weight = empty.embedding.weight
        empty.scale = real.scale
        asked = []

        def weights(name):
            asked.append(name)
            return values[name]

        losses, _ = train(self.engine(empty, weights=weights), 1)
        self.assertEqual(reference(1)[0], losses)
        self.assertEqual(sorted(name for name, _ in real.named_parameters()), sorted(asked))


class Errors(Case):
    def test_OfTheConfiguration(self):
        path = config(self.folder, optimizr={})
        error = self.assert_error(r"ds_config\.json:1:\d+: .*optimizr", spillway.Engine, model(), path)
        self.assertEqual("invalid_argument", error.code)
        self.assert_error("none.json: cannot be read", spillway.Engine, model(), self.folder / "none.json")
        self.assert_error("on_existing: 'maybe' is none of", self.engine, on_existing="maybe")
        self.assert_error("config:.*lr", spillway.Engine, model(),
                          {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": "fast"}}})

    def test_AnExistingStoreIsLeftAlone(self):
        engine = self.engine()
        train(engine, 1)
        self.assertEqual("busy", self.assert_error("store", self.engine, on_existing="replace").code)
        engine.close()
        there = self.assert_error('go on with on_existing="resume", or start over with on_existing="replace"',
                                  self.engine)
        self.assertEqual(("exists", "resume_or_replace"), (there.code, there.remedy))
        self.assertEqual(1, self.engine(on_existing="resume").current_step)

    def test_ABudgetThatDoesNotFit(self):
        error = self.assert_error("hbm_bytes", self.engine, configuration=config(
            self.folder, spillway={"hbm_bytes": "16KiB"}))
        self.assertEqual(("does_not_fit", "raise_budget"), (error.code, error.remedy))
        self.assertFalse((self.folder / "store").exists() and list((self.folder / "store").iterdir()))

    def test_AWeightOutsideOfItsBlock(self):
        network = model()
        engine = self.engine(network)
        outside = r"embedding\.weight: was written to outside of its block"
        self.assertFalse(network.embedding.weight.isnan().any())
        self.assert_error(outside, network.embedding.weight.detach().zero_)
        self.assertEqual((90, 48), tuple(network.embedding.weight.shape))
        with engine.weights_of("embedding"):
            self.assertTrue(torch.equal(model().embedding.weight, network.embedding.weight.cpu()))
        self.assert_error(outside, network.embedding.weight.detach().zero_)
        self.assert_error("Dropout: is no block; blocks are embedding, layers.0", engine.weights_of(
            "layers.0.drop").__enter__)

    def test_OfWhatAModelMustNotDo(self):
        engine = self.engine()
        for move in (engine.module.half, engine.module.double, lambda: engine.module.to("meta")):
            self.assert_error("its weights are Spillway's", move)
        self.assert_error("layers.0: is given a cache of keys and values", engine.module.layers[0],
                          torch.zeros(1, 48, device=DEVICE), past_key_values=[])

    def test_OfBlocksWithinBlocks(self):
        network = torch.nn.Sequential(model(), torch.nn.Linear(2, 2))
        self.assert_error("0: block 0.layers.1 is inside it; a module that holds parameters and blocks",
                          self.engine, network, blocks=[network[0], network[0].layers[1]])
        self.assert_error("Linear is no module of the model", self.engine, blocks=[torch.nn.Linear(2, 2)])
        self.assert_error("layers is a ModuleList, which does not run as a whole", self.engine, blocks=["layers"])

    def test_OfValuesForTheWeights(self):
        empty = model().to("meta")
        self.assert_error("scale: is a buffer on device meta and has no values; give it some first", self.engine, empty)
        empty.scale = model().scale
        self.assert_error(r"embedding\.weight: is a parameter on device meta and has no values; give weights=",
                          self.engine, empty)
        for value in (torch.zeros(48, 90), torch.zeros(90, 48, dtype=torch.int64)):
            self.assert_error(r"weights= gave .* where the model has \(90, 48\) of floating point", self.engine,
                              on_existing="replace", weights=lambda name: value)

        def fails(name):
            raise KeyError(name)
        with self.assertRaisesRegex(KeyError, "embedding.weight"):
            self.engine(on_existing="replace", weights=fails)

    def test_AWeightThatIsNotFiniteIsNamedBeforeTraining(self):
        network = model()
        with torch.no_grad():
            network.layers[1].up.bias[7] = float("nan")
        error = self.assert_error(r"^layers\.1\.up\.bias: holds NaN at index 7, before any training; its values are "
                                  "damaged", self.engine, network)
        self.assertEqual("invalid_argument", error.code)

    def test_Float64IsNotNarrowedSilently(self):
        network = model()
        network.norm.double()
        error = self.assert_error(r"^norm\.weight: is float64, in which PyTorch would train it, .*; call "
                                  r"model\.float\(\) before$", self.engine, network)
        self.assertEqual("unsupported", error.code)
        train(self.engine(network.float()), 1)

    def test_ANonFiniteGradientChangesNothing(self):
        engine = self.engine()
        train(engine, 1)
        before = engine.master_weights()
        engine.backward(engine(batches(1)[0]) * float("inf"))
        self.assertEqual("non_finite", self.assert_error(
            "nothing was changed; .*; native code that reads a weight outside of its block", engine.step).code)
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(before[name], value), name)
        _, reports = train(engine, 1, first=1)
        self.assertEqual(2, reports[0].step)

    def test_AClosedEngine(self):
        engine = self.engine()
        engine.close()
        engine.close()
        for call in (lambda: engine(batches(1)[0]), engine.step, engine.flush, engine.describe, engine.ledger,
                     engine.master_weights, lambda: engine.blob, lambda: engine.current_step):
            self.assert_error("engine: it is closed", call)
        self.assert_error("an engine has taken its weights before", self.engine, engine.module, on_existing="resume")
        engine = self.engine(on_existing="resume")
        with engine.weights_of("embedding"):
            self.assert_error("a block's weights are in use", engine.close)


if __name__ == "__main__":
    main()
