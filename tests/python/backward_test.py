"""Backward passes as PyTorch has them, whoever begins them: losses and gradients of the model without an engine."""
import unittest.mock

from case import Case as Folder, main

import torch

import spillway
from line_blocks import X, lines
from toy_model import DEVICE, VOCABULARY, Widened, batches, config

F = torch.nn.functional
STEPS = 3


class Two(torch.nn.Module):
    """Two heads on a trunk whose first layer runs twice; one of them is tied."""

    def __init__(self, width=24):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))
        self.heads = torch.nn.ModuleList(torch.nn.Linear(width, VOCABULARY, bias=False) for _ in range(2))
        self.heads[0].weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for number in (0, 1, 0):
            x = x + torch.tanh(self.layers[number](x))
        wanted = ids.flip(1).reshape(-1)
        return [F.cross_entropy(head(x).view(-1, VOCABULARY), wanted) for head in self.heads] + [x]


def each_loss(network, backward, ids):
    one, other, _ = network(ids)
    backward(one, retain_graph=True)
    backward(other)
    return one + other


def three_times(network, backward, ids):
    one, other, _ = network(ids)
    for factor in (1.0, 0.5):
        backward(one * factor, retain_graph=True)
    backward(one + other)
    return one + other


def two_forwards_and_one_loss(network, backward, ids):
    loss = network(ids)[0] + network(ids.flip(0))[1]
    backward(loss)
    return loss


def two_forwards_then_two_losses(network, backward, ids):
    one, other = network(ids), network(ids.flip(0))
    backward(other[0])
    backward(one[1])
    return one[1] + other[0]


def lent_and_twice(network, backward, ids):
    one, _, x = network(ids)
    loss = F.linear(x, network.heads[1].weight).pow(2).mean()
    backward(one, retain_graph=True)
    backward(loss)
    return one + loss


def one_after_the_other(network, backward, ids):
    total = 0
    for part in ids.split(2):
        loss = sum(network(part)[:2])
        backward(loss)
        total = total + loss.detach()
    return total


EACH = (each_loss, three_times, two_forwards_and_one_loss, two_forwards_then_two_losses, lent_and_twice)


class Case(Folder):
    def alone(self, loop, network, accumulation=1, clipping=1.0):
        network = network.to(DEVICE)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
        losses, norms = [], []
        for number, ids in enumerate(batches(STEPS * accumulation), start=1):
            losses.append(loop(network, lambda loss, **options: (loss / accumulation).backward(**options), ids).item())
            if number % accumulation == 0:
                norms.append(torch.nn.utils.clip_grad_norm_(network.parameters(), clipping or torch.inf).item())
                optimizer.step()
                optimizer.zero_grad()
        return losses, norms, network.cpu().state_dict()

    def assert_same(self, wanted, found, network):
        for one, other in zip(wanted[0], found[0], strict=True):
            self.assertAlmostEqual(one, other, delta=2e-6 * abs(one))
        for one, other in zip(wanted[1], found[1], strict=True):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)
        state = network.state_dict()
        for name, value in wanted[2].items():
            self.assertLess((state[name] - value).abs().max().item(), 1e-5, name)

    def assert_trains(self, loop, backward_of, accumulation=1, make=Two, begin=None, **options):
        wanted = self.alone(loop, make(), accumulation, options.get("clipping", 1.0))
        engine = (begin or self.engine)(make(), config(self.folder, accumulation=accumulation, **options))
        losses, reports = [], []
        for ids in batches(STEPS * accumulation):
            losses.append(loop(engine.module, backward_of(engine), ids).item())
            if begin or len(losses) % accumulation == 0:
                reports.append(engine.step())
        norms = [report.gradient_norm for report in reports if report]
        self.assert_same(wanted, (losses, norms), engine.module)
        engine.close()
        return reports

    def engine(self, network, configuration=None, **options):
        return super().engine(network, configuration, **{"on_existing": "replace", **options})


def plain(engine):
    return lambda loss, **options: engine.scale(loss).backward(**options)


def given(engine):
    return engine.backward


class Training(Case):
    def test_ByTheEngine(self):
        for device in ("nvme", "cpu"):
            for loop in EACH:
                with self.subTest(loop=loop.__name__, device=device):
                    self.assert_trains(loop, given, device=device)

    def test_ByPyTorchsOwnCall(self):
        for device in ("nvme", "cpu"):
            for loop in (*EACH, one_after_the_other):
                with self.subTest(loop=loop.__name__, device=device):
                    self.assert_trains(loop, plain, device=device)

    def test_WithoutClipping(self):
        """Where a plan of one pass a step updates inside backward."""
        for device in ("nvme", "cpu"):
            for loop in (each_loss, three_times, one_after_the_other):
                with self.subTest(loop=loop.__name__, device=device):
                    self.assert_trains(loop, plain, device=device, clipping=0)

    def test_WithMicroBatches(self):
        for loop in EACH[:3]:
            with self.subTest(loop=loop.__name__):
                self.assert_trains(loop, given, accumulation=2)

    def test_ALoopsOwnMicroBatches(self):
        """loss.backward() accumulates until step(), whatever the configuration says of micro-batches."""
        def halves(network, backward, ids):
            return one_after_the_other(network, lambda loss: backward(loss / 2), ids)

        self.assert_trains(halves, plain)

    def test_DividedByAccumulationAsDeepSpeeds(self):
        def begin(network, configuration):
            engine, *_ = spillway.initialize(model=network, config=configuration, on_existing="replace")
            self.addCleanup(engine.close)
            return engine

        for backward_of in (plain, given):
            reports = self.assert_trains(each_loss, backward_of, accumulation=2, begin=begin)
            self.assertEqual([False, True] * STEPS, [report is not None for report in reports])

    def test_WithLittleHbm(self):
        with self.assertRaises(spillway.Error) as refused:
            self.engine(Two(), config(self.folder, accumulation=2, spillway={"hbm_bytes": 1}))
        least = int(str(refused.exception).split('hbm_bytes to "')[1].split("KiB")[0]) * 1024
        self.assert_trains(each_loss, given, spillway={"hbm_bytes": least + 96 * 1024})

    def test_SaysOnceWhatItCosts(self):
        engine = self.engine(Two(), config(self.folder))
        with self.assertLogs("spillway", "INFO") as logged:
            for ids in batches(2):
                each_loss(engine.module, engine.backward, ids)
                engine.step()
        said = [line for line in logged.output if "more passes may follow it" in line]
        self.assertEqual(1, len(said), said)
        self.assertIn("4 bytes a parameter", said[0])

    def test_WithoutThemNothingIsPlannedForThem(self):
        engine = self.engine(lines(None, None))
        engine.backward(engine(X).sum())
        self.assertNotIn("gradient accumulators (fp32)", [purpose for _, purpose, size in engine.ledger() if size])
        self.assertEqual(1, engine.step().step)


class TwoEngines(Case):
    def test_OneLossOverBoth(self):
        for drive in (lambda first, second, loss: loss.backward(),
                      lambda first, second, loss: first.backward(loss),
                      lambda first, second, loss: second.backward(loss)):
            networks = [lines(None, None), lines(None)]
            alone = [lines(None, None).to(DEVICE), lines(None).to(DEVICE)]
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3, weight_decay=0.01) for each in alone]
            engines = []
            for name, network in zip("ab", networks):
                (self.folder / name).mkdir(exist_ok=True)
                engines.append(self.engine(network, config(self.folder / name)))
            for _ in range(STEPS):
                loss, wanted = (parts[1](torch.tanh(parts[0](X))).pow(2).mean() for parts in (engines, alone))
                self.assertAlmostEqual(wanted.item(), loss.item(), delta=2e-6 * wanted.item())
                drive(*engines, loss)
                wanted.backward()
                for engine, network, optimizer in zip(engines, alone, optimizers):
                    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item()
                    self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5 * norm)
                    optimizer.step()
                    optimizer.zero_grad()
            for engine in engines:
                engine.close()

    def test_OfTwoLossScales(self):
        """Each has its gradients times its own, whoever drives."""
        for drive in (lambda first, second, loss: first.scale(loss).backward(),
                      lambda first, second, loss: second.scale(loss).backward(),
                      lambda first, second, loss: first.backward(loss)):
            engines = []
            for name, power in (("a", 4), ("b", 7)):
                (self.folder / name).mkdir(exist_ok=True)
                network = torch.nn.Sequential(*(Widened() for _ in range(2)))
                engines.append(self.engine(network, config(
                    self.folder / name, fp16={"enabled": True, "initial_scale_power": power})))
            drive(*engines, engines[1](engines[0](torch.ones(1, 16, device=DEVICE))).sum())
            norms = [engine.step().gradient_norm for engine in engines]
            for norm in norms:  # every weight has 16 inputs of 1, and a gradient of 1
                self.assertAlmostEqual((2 * 16 * 16) ** 0.5, norm, places=3)
            for engine in engines:
                engine.close()


class Rules(Case):
    def test_DoubleBackwardIsRefused(self):
        engine = self.engine(lines(None, None))
        x = X.clone().requires_grad_()
        self.assert_error("is asked for gradients of its gradients", torch.autograd.grad, engine(x).pow(2).sum(), x,
                          create_graph=True)
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)

    def test_GradientsOfActivationsAlone(self):
        engine, alone = self.engine(lines(None, None)), lines(None, None).to(DEVICE)
        x = X.clone().requires_grad_()
        found, wanted = (torch.autograd.grad(network(x).pow(2).sum(), x)[0] for network in (engine, alone))
        self.assertEqual(wanted.tolist(), found.tolist())
        self.assertIsNone(engine.step())  # it brought no weight anything
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)

    def test_AGraphGoesBackwardOnce(self):
        engine = self.engine(lines(None, None))
        loss = engine(X).sum()
        loss.backward()
        with self.assertRaisesRegex(RuntimeError, "backward through the graph a second time"):
            loss.backward()
        with self.assertLogs("spillway", "WARNING"):
            self.assertIsNone(engine.step())

    def test_AnExceptionDiscardsTheStep(self):
        engine = self.engine(lines(None, None))
        engine(X).sum().backward()
        handle = engine.module[0].register_forward_hook(lambda *seen: seen[2].register_hook(lambda _: 1 / 0) and None)
        loss = engine(X).sum()
        handle.remove()
        with self.assertRaises((ZeroDivisionError, RuntimeError)):
            loss.backward()
        with self.assertLogs("spillway", "WARNING") as logged:
            engine(X).sum().backward()
        self.assertRegex(logged.output[0], "an exception has ended it; the step's gradients are discarded")
        alone = lines(None, None).to(DEVICE)
        alone(X).sum().backward()
        wanted = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in alone.parameters())).item()
        self.assertAlmostEqual(wanted, engine.step().gradient_norm, delta=1e-5 * wanted)

    def test_AnUnscaledLossInFp16IsRefused(self):
        network = torch.nn.Sequential(*(Widened() for _ in range(2)))
        engine = self.engine(network, config(self.folder, fp16={"enabled": True, "initial_scale_power": 4}))
        x = torch.ones(1, 16, device=DEVICE)
        loss = engine(x).sum()
        self.assertEqual(16 * loss.item(), engine.scale(loss).item())
        self.assert_error(r"the engine scales losses \(fp16.enabled\).*engine.scale\(loss\).backward\(\)",
                          loss.backward)
        engine.scale(engine(x).sum()).backward()
        self.assertAlmostEqual((2 * 16 * 16) ** 0.5, engine.step().gradient_norm, places=3)

    def test_WithoutFp16ALossIsItself(self):
        engine = self.engine(lines(None))
        loss = engine(X).sum()
        self.assertIs(loss, engine.scale(loss))

    def test_MicroBatchesAreCountedByForwardPasses(self):
        engine = self.engine(Two(), config(self.folder, accumulation=2))
        first, second, third = batches(3)
        for ids in (first, second):
            one, other, _ = engine(ids)
            engine.backward(one, retain_graph=True)
            engine.backward(other)
            if ids is first:
                self.assertIsNone(engine.step())
        self.assertTrue(engine.step_is_due)
        self.assertEqual(1, engine.step().step)

    def test_AnEngineGoesOnWhereItsNextPlanDoesNotFit(self):
        """Before the first step and after it, with a store and without one."""
        for device in ("nvme", "cpu"):
            engine = self.engine(lines(None, None), config(self.folder, device))
            alone = self.engine(lines(None, None), config(self.folder, "cpu"))
            create, answers = engine._library.engine_create_on, []

            def fails_first(*given):
                if not answers.pop(0):
                    raise spillway.Error("does_not_fit", "too much")
                return create(*given)

            for _ in range(2):
                before = engine.master_weights()
                engine.set_learning_rate(5e-3)
                alone.set_learning_rate(5e-3)
                answers[:] = [False, True]
                with unittest.mock.patch.object(engine._library, "engine_create_on", fails_first):
                    self.assert_error("too much", engine(X).sum().backward)
                for name, value in engine.master_weights().items():
                    self.assertTrue(torch.equal(before[name], value), name)
                for each in (engine, alone):
                    each.backward(each(X).sum())
                self.assertEqual(*((report.step, report.learning_rate) for report in (engine.step(), alone.step())))
            for name, value in alone.master_weights().items():
                self.assertTrue(torch.equal(engine.master_weights()[name], value), name)
            engine(X).sum().backward()  # by a plan that fits
            self.assertEqual(3, engine.step().step)
            engine.close()

    def test_AMicroBatchTooManyIsRefused(self):
        engine = self.engine(lines(None, None))
        engine.backward(engine(X).sum())
        self.assert_error(r"the step has had its 1 micro-batches", engine.backward, engine(X).sum())
        engine.discard_step()
        engine.backward(engine(X).sum())
        self.assert_error(r"loss.backward\(\): more passes may follow it, but the step has earlier gradients",
                          engine(X).sum().backward)
        engine.discard_step()
        engine(X).sum().backward()
        self.assertEqual(1, engine.step().step)


if __name__ == "__main__":
    main()
