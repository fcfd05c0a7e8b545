"""A batch that goes through a block slice by slice ("block_slices"): the same step, by parts, or refused by name."""
from case import Case as Folder
from case import main

import torch
from torch.nn import functional as F

import toy_model
from toy_model import DEVICE, VOCABULARY, config, train


class SlicedLayer(toy_model.Layer):
    """What slices are, in plain PyTorch."""

    def forward(self, x, *, scale=None):
        parts = [super(SlicedLayer, self).forward(part, scale=scale)["hidden"] for part in x.chunk(2)]
        return {"hidden": torch.cat(parts), "width": x.shape[-1]}


class Bias(torch.nn.Module):
    """T5's: a bias of all rows, made by the first layer and handed on, rotary tables, a mask, and a batch that lies on
    the second axis of what it returns beside."""

    def __init__(self, width, first):
        super().__init__()
        self.first, self.table = first, torch.nn.Embedding(16, 16)
        self.query, self.out = torch.nn.Linear(width, width), torch.nn.Linear(width, width)

    def forward(self, x, mask, turn, bias=None):
        if self.first:
            bias = self.table(torch.arange(x.shape[1], device=x.device) % 16)[:, :x.shape[1]]
        q = self.query(x) * turn
        weights = torch.softmax(q @ x.transpose(1, 2) + bias + mask, -1)
        return x + self.out(weights @ x), bias, q.transpose(0, 1)


class Attends(torch.nn.Module):
    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(4)
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(Bias(width, i == 0) for i in range(3))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x, bias, extra = self.embedding(ids), None, 0
        mask = torch.zeros(ids.shape[0], 1, ids.shape[1], device=ids.device)
        mask[:, :, -1] = -1e4 * (ids[:, :1] % 2)
        turn = torch.linspace(0, 1, ids.shape[1] * x.shape[-1], device=ids.device).view(ids.shape[1], x.shape[-1])
        for layer in self.layers:
            x, bias, q = layer(x, mask, turn, bias)
            extra = extra + q.square().mean() + bias.square().mean()
        return F.cross_entropy(self.head(x).view(-1, VOCABULARY), ids.flip(1).reshape(-1)) + 0.01 * extra


class Mixes(torch.nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.linear, self.mix = torch.nn.Linear(8, 8), mix

    def forward(self, x):
        return self.mix(self, self.linear(x))


class Case(Folder):
    def engine(self, network, slices=1, **more):
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return super().engine(network, config(folder, spillway={"block_slices": slices}, **more))


class Slices(Case):
    def test_AStepIsTheOneOfSlicesInPlainPyTorch(self):
        """Of dropout, too."""
        with_slices = train(self.engine(toy_model.model(), 2), 4)
        torch.manual_seed(1)
        network = toy_model.model()
        for layer in network.layers:
            layer.__class__ = SlicedLayer
        in_plain = train(self.engine(network, 1), 4)
        self.assertEqual(with_slices[0], in_plain[0])
        for one, other in zip(with_slices[1], in_plain[1]):
            self.assertAlmostEqual(one.gradient_norm, other.gradient_norm, delta=1e-5 * other.gradient_norm)

    def test_WhatIsNoBatchPassesWhole(self):
        """Also where as many tokens as rows make it look like one."""
        for slices, rows, tokens in ((2, 4, 6), (3, 4, 4), (9, 5, 5)):
            ids = torch.randint(0, VOCABULARY, (rows, tokens), device=DEVICE)
            found = []
            for n in (1, slices):
                engine = self.engine(Attends(), n, device="cpu")
                for _ in range(2):
                    loss = engine(ids)
                    engine.backward(loss)
                    found.append((loss.item(), engine.step().gradient_norm))
                engine.close()
            for whole, parts in zip(found[:2], found[2:]):
                for one, other in zip(whole, parts):
                    self.assertAlmostEqual(one, other, delta=2e-5 * abs(one))

    def test_WhatALinkMovesDoesNotDependOnSlices(self):
        runs = []
        for slices in (1, 4):
            engine = self.engine(toy_model.model(), slices)
            reports = train(engine, 4)[1]
            engine.close()
            runs.append(reports)
        self.assert_links_move_the_same(*runs)

    def test_OnlyOneSliceIsInMemoryInside(self):
        seen = []

        class Inner(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)

            def forward(self, x):
                seen.append(x.shape[0])
                return self.linear(x)

        engine = self.engine(torch.nn.Sequential(Inner(), Inner()), 3)
        x = torch.randn(8, 8, device=DEVICE)
        engine.backward(engine(x).square().sum())
        engine.step()
        seen.clear()
        for step in (2, 3):
            engine.backward(engine(x).square().sum())
            engine.step()
        self.assertEqual([3, 3, 2], seen[-3:])
        self.assertLessEqual(max(seen[-12:]), 3)

    def test_WhatIsLeftInAnAttributeIsOfTheWholeBatch(self):
        class Routes(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.gate, self.out = torch.nn.Linear(8, 3), torch.nn.Linear(8, 8)

            def forward(self, x):
                self.scores = torch.softmax(self.gate(x), -1)
                return x + self.out(x) * self.scores[..., :1]

        def loss_of(engine, x):
            result = engine(x).square().mean()
            blocks = list(engine.module)
            self.assertTrue(all(block.scores.shape == (*x.shape[:2], 3) for block in blocks))
            return result + sum((block.scores.mean((0, 1)) * block.scores[:3].mean((0, 1))).sum() for block in blocks)

        found, x = [], torch.randn(5, 4, 8, device=DEVICE)
        for slices in (1, 2):
            torch.manual_seed(3)
            engine = self.engine(torch.nn.Sequential(Routes(), Routes()), slices)
            steps = []
            for _ in range(3):
                loss = loss_of(engine, x)
                engine.backward(loss)
                steps += [loss.item(), engine.step().gradient_norm]
            found.append(steps)
        for one, other in zip(*found):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_WhatIsLeftAndHasNoRowsIsRefused(self):
        class Leaves(torch.nn.Linear):
            def forward(self, x):
                result = super().forward(x)
                self.loss = result.square().mean()
                return result

        class Hooked(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.Linear(8, 8)
                self.inner.register_forward_hook(lambda _module, _given, output: taken.append(output))

            def forward(self, x):
                return self.inner(x).tanh()

        taken, x = [], torch.randn(4, 8, device=DEVICE)
        for block in (Leaves(8, 8), Hooked()):
            engine = self.engine(torch.nn.Sequential(block), 2)
            self.assert_error("0: leaves a value beside its result", engine, x)

    def test_RowsThatDependOnEachOtherAreRefused(self):
        x = torch.randn(4, 8, device=DEVICE)
        for mix, pattern in ((lambda self, x: x - x.mean(0, keepdim=True), "0: gives another result for two slices"),
                             (lambda self, x: x * (torch.arange(len(x), device=x.device) < 3)[:, None].float(),
                              "0: gives another result for two slices"),
                             (lambda self, x: x.mean(), "0: gives another result for two slices"),
                             (lambda self, x: (x, x.shape[0]), "0: gives another result for two slices"),
                             (torch.nn.BatchNorm1d(8), "0: mix is a BatchNorm1d")):
            network = torch.nn.Sequential(Mixes(mix))
            if isinstance(mix, torch.nn.Module):
                network[0].forward = lambda x, block=network[0]: block.mix(block.linear(x))
            self.assert_error(pattern, self.engine(network, 2), x)

    def test_RowsThatDependOnEachOtherLaterAreRefusedThen(self):
        def overflows(self, x):  # an expert's capacity, say
            return x if self.steps < 4 else x.cumsum(0)

        network = torch.nn.Sequential(Mixes(overflows))
        engine, x = self.engine(network, 2), torch.randn(4, 8, device=DEVICE)
        for step in range(1, 4):
            network[0].steps = step
            engine.backward(engine(x).sum())
            engine.step()
        network[0].steps = 4
        self.assert_error("0: gives another result for two slices", engine, x)

    def test_ABatchOnTheSecondAxisIsFound(self):
        class Recurrent(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.cell = torch.nn.LSTM(8, 8)

            def forward(self, x):
                return self.cell(x)[0]

        torch.manual_seed(2)
        network = torch.nn.Sequential(Recurrent(), Recurrent())
        x, expected = torch.randn(6, 4, 8, device=DEVICE), []
        with torch.no_grad():
            expected = network.to(DEVICE)(x)
        engine = self.engine(network, 2)
        found = engine(x.requires_grad_())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        engine.backward(found.sum())
        engine.step()


if __name__ == "__main__":
    main()
