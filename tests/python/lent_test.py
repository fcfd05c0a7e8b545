"""Weights that are read outside of their block: lent for that use, forward and backward, with PyTorch's own losses."""
import io
import unittest

from case import Case as Folder, main

import torch

import spillway
from away_test import Product
from line_blocks import DEVICE, X, Line, ScaledHead
from toy_model import VOCABULARY, batches, config

F = torch.nn.functional
WIDTH, STEPS = 24, 4


class Chunked(torch.autograd.Function):
    """Logits of a few rows at a time, made again in backward, which reads the weight again."""

    @staticmethod
    def forward(ctx, hidden, weight, labels):
        ctx.save_for_backward(hidden, weight, labels)
        losses = [F.cross_entropy(part @ weight.t(), of, reduction="sum")
                  for part, of in zip(hidden.split(8), labels.split(8))]
        return torch.stack(losses).sum() / len(labels)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, labels = ctx.saved_tensors
        of_hidden, of_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for first in range(0, len(hidden), 8):
            rows = slice(first, first + 8)
            found = torch.softmax(hidden[rows] @ weight.t(), -1)
            found[torch.arange(len(found)), labels[rows]] -= 1
            found *= gradient / len(labels)
            of_hidden[rows] = found @ weight
            of_weight += found.t() @ hidden[rows]
        return of_hidden, of_weight, None


class Network(torch.nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, prompt=None):
        x = self.embedding(ids)
        if prompt is not None:
            x = torch.cat([prompt.expand(len(x), -1, -1), x[:, prompt.shape[0]:]], 1)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x)


def labels(ids):
    return ids.flip(1).reshape(-1)


def native(network, ids):
    return F.cross_entropy(F.linear(network(ids), network.head.weight).view(-1, VOCABULARY), labels(ids))


def embedding(network, ids):
    return F.cross_entropy(F.linear(network(ids), network.embedding.weight).view(-1, VOCABULARY), labels(ids))


def view(network, ids):
    weight = network.head.weight.t()
    return F.cross_entropy((network(ids) @ weight).view(-1, VOCABULARY), labels(ids)) + weight[:4].pow(2).mean()


def chunked(network, ids):
    return Chunked.apply(network(ids).view(-1, WIDTH), network.head.weight, labels(ids))


def chunked_view(network, ids):
    return Chunked.apply(network(ids).view(-1, WIDTH), network.head.weight * 1, labels(ids)) + \
        Product.apply(network(ids), network.head.weight.detach().t()[:, :3]).mean()


def prompted(network, ids):  # the embedding's rows as a prompt, read before and after everything else
    hidden = network(ids, network.embedding.weight[3:6])
    return F.cross_entropy(network.head(hidden).view(-1, VOCABULARY), labels(ids))


def decayed(network, ids):  # a penalty on weights that blocks use, too
    penalty = sum(layer.weight.pow(2).sum() for layer in network.layers)
    return F.cross_entropy(network.head(network(ids)).view(-1, VOCABULARY), labels(ids)) + 0.01 * penalty


def twice(network, ids):
    return native(network, ids) + chunked(network, ids.flip(0))


class Case(Folder):
    def trained(self, network, loss_of, step, accumulation):
        found = []
        for number, ids in enumerate(batches(STEPS * accumulation)):
            loss = loss_of(network, ids)
            step(loss, (number + 1) % accumulation == 0)
            found.append(loss.item())
        return found

    def alone(self, network, loss_of, accumulation=1):
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)

        def step(loss, last):
            (loss / accumulation).backward()
            if last:
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        return self.trained(network, loss_of, step, accumulation)

    def ours(self, network, loss_of, accumulation=1, **options):
        engine = self.engine(network, config(self.folder, accumulation=accumulation, **options), on_existing="replace")
        reports = []

        def step(loss, _):
            engine.backward(loss)
            reports.append(engine.step())

        losses = self.trained(network, loss_of, step, accumulation)
        engine.close()
        return losses, [report for report in reports if report]

    def assert_as_alone(self, make, loss_of, accumulation=1, **options):
        wanted = self.alone(make().to(DEVICE), loss_of, accumulation)
        losses, reports = self.ours(make(), loss_of, accumulation, **options)
        self.assertEqual(wanted[0], losses[0])
        for one, other in zip(wanted, losses, strict=True):
            self.assertAlmostEqual(one, other, delta=1e-5 * abs(one))
        self.assertEqual(STEPS, len(reports))
        return reports


class Losses(Case):
    def test_AreThoseOfPyTorchAlone(self):
        for loss_of in (native, embedding, view, chunked, chunked_view, prompted, decayed, twice):
            for tied in (False, True):
                with self.subTest(loss=loss_of.__name__, tied=tied):
                    self.assert_as_alone(lambda: Network(tied), loss_of)  # noqa: B023

    def test_WithMicroBatches(self):
        for loss_of in (native, embedding, chunked, prompted, decayed):
            with self.subTest(loss=loss_of.__name__):
                self.assert_as_alone(lambda: Network(True), loss_of, accumulation=3)

    def test_WhereverWeightsLive(self):
        for device in ("cpu", "none"):
            for loss_of in (embedding, prompted):
                with self.subTest(device=device, loss=loss_of.__name__):
                    self.assert_as_alone(Network, loss_of, device=device)

    def test_WithFrozenWeights(self):
        def frozen():
            network = Network()
            network.head.requires_grad_(False)
            network.embedding.requires_grad_(False)
            return network

        for loss_of in (native, embedding, chunked, prompted):
            with self.subTest(loss=loss_of.__name__):
                self.assert_as_alone(frozen, loss_of)

    def test_VisitsAreThoseOfThePlan(self):
        """After the first step, which shows them: the head comes ahead of time, in both directions."""
        for tied, loss_of in ((False, native), (False, chunked), (True, embedding), (False, prompted)):
            with self.subTest(loss=loss_of.__name__):
                reports = self.assert_as_alone(lambda: Network(tied), loss_of)  # noqa: B023
                self.assertEqual([0] * (STEPS - 1), [report.unplanned_visits for report in reports[1:]])


class Reading(Line):
    """A block that reads another one's weight while it runs, forward and backward."""

    def __init__(self, other):
        super().__init__()
        self.others = [other]  # a list hides it from the module's own

    def forward(self, x):
        return self.linear(x) + F.linear(x, self.others[0].linear.weight)


class Blocks(Case):
    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(4)
            self.first = Line()
            self.lines = torch.nn.ModuleList([Reading(self.first), Line(), Reading(self.first)])

        def forward(self, x):
            x = self.first(x)
            for line in self.lines:
                x = torch.tanh(line(x))
            return x

    def test_ReadAnotherBlocksWeights(self):
        self.assert_as_alone(self.Stack, lambda network, _: network(X).pow(2).mean())

    def test_AreGivenAnotherBlocksWeights(self):
        def make():
            torch.manual_seed(4)
            return torch.nn.ModuleDict({"line": Line(), "head": ScaledHead(), "last": Line()})

        def loss_of(network, _):
            weight = network["line"].linear.weight
            return network["last"](network["head"](network["line"](X), weight[:, :]) + X @ weight).pow(2).mean()

        self.assert_as_alone(make, loss_of)


class Loans(Case):
    def test_EndWithTheLastTensorOverTheirMemory(self):
        engine = self.engine(Network())
        weight = engine.module.head.weight
        engine.backward(native(engine.module, batches(1)[0]))
        engine.step()
        with torch.no_grad():
            kept = weight.detach()[:2]
            values = kept.clone()
            for ids in batches(2):
                engine(ids)
            self.assertEqual(values.tolist(), kept.tolist())
        engine.backward(native(engine.module, batches(1)[0]))
        self.assert_error(r"head\.weight: a tensor over its memory.*is still there at step\(\)", engine.step)
        del kept
        self.assertEqual(2, engine.step().step)

    def test_OfAnEvaluation(self):
        engine, alone = self.engine(Network()), Network().to(DEVICE)
        with torch.no_grad():
            for ids in batches(2):
                self.assertEqual(chunked(alone, ids), chunked(engine.module, ids))

    def test_AreNotWrittenTo(self):
        engine = self.engine(Network())
        weight = engine.module.head.weight
        with torch.no_grad():
            for write in (lambda: weight.detach().zero_(), lambda: weight.t().mul_(2), lambda: weight.data.fill_(1),
                          lambda: torch.add(X, 1, out=weight.data[:2, :8]), lambda: weight[0].__setitem__(0, 1)):
                self.assert_error(r"was written to outside of its block, and the write is lost", write)

    def test_CopiesAreTensorsOfTheirOwn(self):
        engine, alone = self.engine(Network()), Network()
        weight = engine.module.head.weight.detach()
        file = io.BytesIO()
        torch.save({"weight": weight, "state": engine.module.head.state_dict()}, file)
        copies = [weight.cpu().numpy(), weight.clone(), torch.load(io.BytesIO(file.getvalue()))["weight"]]
        del weight
        for copy in copies:
            self.assertEqual(alone.head.weight.tolist(), copy.tolist())
        engine.backward(native(engine.module, batches(1)[0]))
        self.assertEqual(1, engine.step().step)

    def test_AnExceptionEndsThem(self):
        engine = self.engine(Network())
        loss = native(engine.module, batches(1)[0])
        loss.register_hook(lambda _: 1 / 0)
        with self.assertRaises((ZeroDivisionError, RuntimeError)):
            engine.backward(loss)
        engine.backward(native(engine.module, batches(1)[0]))
        self.assertEqual(1, engine.step().step)


class Plans(Case):
    def test_AreMadeOnceMoreByTheFirstStep(self):
        engine = self.engine(Network())
        accumulators = sum(size for _, purpose, size in engine.ledger() if "accumulator" in purpose)
        with self.assertLogs("spillway", "INFO") as logged:
            engine.backward(embedding(engine.module, batches(1)[0]))
        self.assertRegex("\n".join(logged.output), r"embedding\.weight: gets 2 gradients of a micro-batch, more than "
                                                   r"was planned; .* outside of blocks embedding\.weight")
        after = sum(size for _, purpose, size in engine.ledger() if "accumulator" in purpose)
        self.assertEqual((0, 4 * VOCABULARY * WIDTH), (accumulators, after // 4096 * 4096 and 4 * VOCABULARY * WIDTH))
        self.assertEqual(1, engine.step().step)

    def test_AreNotMadeOnceMoreInAStep(self):
        engine = self.engine(Network(), config(self.folder, accumulation=2))
        ids = batches(1)[0]
        engine.backward(native(engine.module, ids))
        self.assert_error(r"embedding\.weight: is used more often in a step than the plan's .*discard_step",
                          engine.backward, embedding(engine.module, ids))
        engine.discard_step()
        for _ in range(2):
            engine.backward(embedding(engine.module, ids))
        self.assertEqual(1, engine.step().step)


if __name__ == "__main__":
    unittest.TestCase.maxDiff = None
    main()
