"""engine.train_batch(): micro-batches that go through block after block together give the step that they are alone."""
from case import Case as Folder
from case import main

import torch
from torch.nn import functional as F

import toy_model
from toy_model import DEVICE, VOCABULARY, Experts, config


def without_dropout(tied=False):
    """Tied weights have two gradients of each micro-batch, which are added in another order."""
    network = toy_model.model()
    if not tied:
        network.head.weight = torch.nn.Parameter(network.head.weight.detach().clone())
    for layer in network.layers:
        layer.drop.p = 0
    return network


def micro_batches(steps, count, seed=5):
    """Of different shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(0, VOCABULARY, (2 + i, 8 + 2 * i), generator=generator).to(DEVICE) for i in range(count)]
            for _ in range(steps)]


class Case(Folder):
    def engine(self, network, **more):
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return super().engine(network, config(folder, **more))

    def assert_same_weights(self, one, other):
        for name, values in one.master_weights().items():
            self.assertTrue(torch.equal(values, other.master_weights([name])[name]), name)


class TrainBatch(Case):
    def test_AStepIsTheSameBitForBit(self):
        """Losses, the norm and weights, as of backward() for each."""
        one_by_one, together = (self.engine(without_dropout(), accumulation=3) for _ in range(2))
        for batches in micro_batches(3, 3):
            losses = []
            for ids in batches:
                loss = one_by_one(ids)
                one_by_one.backward(loss)
                losses.append(loss.detach())
                report = one_by_one.step()
            self.assertEqual(torch.stack(losses).mean(), together.train_batch(batches))
            self.assertEqual(report.gradient_norm, together.report.gradient_norm)
            self.assertEqual(report.step, together.report.step)
        self.assert_same_weights(one_by_one, together)

    def test_InBf16TheSumIsRoundedOnce(self):
        one_by_one, together = (self.engine(without_dropout(), accumulation=4, bf16={"enabled": True})
                                for _ in range(2))
        for batches in micro_batches(2, 4):
            for ids in batches:
                one_by_one.backward(one_by_one(ids))
                one_by_one.step()
            together.train_batch(batches)
        self.assert_same_weights(one_by_one, together)

    def test_WeightsCrossEachLinkOncePerPass(self):
        runs = []
        for count in (1, 5):
            engine = self.engine(without_dropout(), accumulation=count)
            reports = []
            for batches in micro_batches(4, count):
                engine.train_batch(batches)
                reports.append(engine.report)
            engine.close()
            runs.append(reports)
        self.assert_links_move_the_same(*runs)

    def test_ALoopsOwnLossIsCalled(self):
        engine = self.engine(without_dropout(), accumulation=2)
        engine.train_batch(iter(micro_batches(1, 5)[0]), lambda ids: 2 * engine(ids), blob=b"here")
        self.assertEqual(b"here", engine.blob)
        self.assertEqual(1, engine.report.step)

    def test_WithSlicesToo(self):
        whole, sliced = (self.engine(without_dropout(tied=True), accumulation=2, spillway={"block_slices": n})
                         for n in (1, 2))
        for batches in micro_batches(2, 2):
            one, other = whole.train_batch(batches), sliced.train_batch(batches)
            self.assertAlmostEqual(one.item(), other.item(), delta=1e-5 * one.item())

    def test_MicroBatchesMayLeaveBlocksOut(self):
        """Experts, of which each batch has others: the step is the same, and none is visited twice."""
        one_by_one, together = (self.engine(Experts(), accumulation=2) for _ in range(2))
        routes = [((0, 2), True), ((1, 2), False)]
        for ids, other in micro_batches(3, 2):
            for batch, route in zip((ids, other), routes):
                one_by_one.backward(one_by_one(batch, *route))
                one_by_one.step()
            together.train_batch([(batch, *route) for batch, route in zip((ids, other), routes)])
        self.assert_same_weights(one_by_one, together)

    def test_AnExceptionInAMicroBatchLeavesTheEngineAsItWas(self):
        engine, twin = (self.engine(without_dropout(), accumulation=3) for _ in range(2))
        (batches,) = micro_batches(1, 3)

        def fails(ids):
            loss = engine(ids)
            if ids is batches[1]:
                raise ValueError("no")
            return loss

        with self.assertRaisesRegex(ValueError, "no"):
            engine.train_batch(batches, fails)
        with self.assertRaises(IndexError):
            engine.train_batch([batches[0], batches[1] + VOCABULARY])
        self.assertEqual(engine.train_batch(batches), twin.train_batch(batches))
        self.assert_same_weights(engine, twin)

    def test_AutocastIsEachOnesOwn(self):
        (batches,) = micro_batches(1, 3)
        for least, rounding in ((0, 0), (3, 1e-7)):  # where they differ, they visit a block in two groups

            def loss(engine, ids):
                with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=ids.shape[0] >= least):
                    return engine(ids)

            one_by_one, together = (self.engine(without_dropout(), accumulation=3) for _ in range(2))
            for ids in batches:
                one_by_one.backward(loss(one_by_one, ids))
            norm = one_by_one.step().gradient_norm
            together.train_batch(batches, lambda ids: loss(together, ids))
            self.assertAlmostEqual(norm, together.report.gradient_norm, delta=rounding * norm)

    def test_WhatOneSwitchesForItselfIsRefused(self):
        engine = self.engine(toy_model.model(), accumulation=2)

        def without_dropout_once(ids):
            engine.module.train(ids.shape[0] > 2)
            return engine(ids)

        error = self.assert_error("is switched in a forward pass", engine.train_batch, micro_batches(1, 2)[0],
                                  without_dropout_once)
        self.assertIn("micro_batches_together", str(error))

    def test_ByConfigurationItIsThePlanFromTheStart(self):
        engine = self.engine(without_dropout(), accumulation=2, spillway={"micro_batches_together": True})
        (batches,) = micro_batches(1, 2)
        with self.assertNoLogs("spillway"):
            engine.train_batch(batches)
        engine.backward(engine(batches[0]))
        self.assert_error("go through the blocks together, by plan", lambda: engine.backward(engine(batches[1])))

    def test_WhatItIsNotGivenIsSaid(self):
        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = torch.nn.Linear(8, 8)

            def forward(self, x):
                return [self.linear(x), x]

        x = torch.ones(2, 8, device=DEVICE)
        engine = self.engine(Twice(), accumulation=2)
        self.assert_error("train_batch: is given no micro-batch", engine.train_batch, [])
        self.assert_error("the model returns a list without a loss", engine.train_batch, [x])
        engine = self.engine(torch.nn.Sequential(torch.nn.Linear(8, 8)), accumulation=2)
        engine.backward(F.mse_loss(engine(x), x))
        self.assert_error("train_batch: the step has had 1 micro-batches", engine.train_batch, [x])


if __name__ == "__main__":
    main()
