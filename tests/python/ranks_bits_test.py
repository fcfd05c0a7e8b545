"""The same bits on 1, 2 and 4 processes, with dropout and shuffled rows; and the sampler that cuts these."""
import logging
import pathlib
import re

from ranks_case import ROOT, RanksCase
from report import main

import torch

import spillway
import toy_model
from spillway.engine.seeds import seed_of

PAGE = ROOT / "docs/ranks_same_bits.md"
SEED = 3


def rows_of(steps, **options):
    """By step, of all ranks: lists of micro-batches."""
    count = options.get("num_replicas", 1)
    samplers = [spillway.GlobalBatchSampler(range(21), 8, 2, **{"num_replicas": 1, **options, "rank": rank})
                for rank in range(count)]
    for sampler in samplers:
        steps(sampler)
    mine = 4 // count
    found = [list(sampler) for sampler in samplers]
    return [[rows for of_rank in found for rows in of_rank[first:first + mine]]
            for first in range(0, len(found[0]), mine)]


class Sampler(RanksCase):
    def test_StepsHaveTheSameRowsOnAnyNumberOfRanks(self):
        for options in ({}, {"shuffle": False}, {"drop_last": True}, {"seed": 9}):
            for prepare in (lambda sampler: None, lambda sampler: sampler.set_epoch(2),
                            lambda sampler: sampler.set_step(4)):
                alone = rows_of(prepare, **options)
                for count in (2, 4):
                    self.assertEqual(alone, rows_of(prepare, num_replicas=count, **options))

    def test_AnEpochsOrderIsThatOfTorchsSampler(self):
        for epoch in (0, 3):
            theirs = torch.utils.data.DistributedSampler(range(21), 1, 0, seed=SEED)
            theirs.set_epoch(epoch)
            steps = rows_of(lambda sampler, epoch=epoch: sampler.set_epoch(epoch), seed=SEED)
            rows = [row for step in steps for micro_batch in step for row in micro_batch]
            self.assertEqual(rows[:21], list(theirs))
            self.assertEqual(rows[21:], list(theirs)[:3])  # which fill the last step

    def test_GoesOnBehindAStep(self):
        sampler = spillway.GlobalBatchSampler(range(21), 8, 2)
        epochs = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            epochs.append(list(sampler))
            self.assertEqual(len(epochs[-1]), len(sampler))
        self.assertNotEqual(epochs[0], epochs[1])
        sampler.set_step(4)  # of three in an epoch
        self.assertEqual(sampler.epoch, 1)
        sampler.set_epoch(1)
        self.assertEqual([list(sampler), list(sampler)], [epochs[1][4:], epochs[1]])
        sampler.set_step(4)
        sampler.set_epoch(2)
        self.assertEqual(list(sampler), epochs[2])

    def test_WhatDoesNotFillAStep(self):
        self.assertEqual(spillway.GlobalBatchSampler(range(21), 8, 2, drop_last=True).steps_per_epoch, 2)
        few = spillway.GlobalBatchSampler(range(3), 8, 2, shuffle=False)
        self.assertEqual(list(few), [[0, 1], [2, 0], [1, 2], [0, 1]])
        none = spillway.GlobalBatchSampler(range(3), 8, 2, drop_last=True)
        self.assertEqual((list(none), len(none)), ([], 0))
        self.assert_error("3 rows are no step of 8", none.set_step, 1)
        self.assertEqual(list(spillway.GlobalBatchSampler([], 8, 2)), [])
        for sizes in ((8, 3), (8, 0), (0, 2)):
            self.assert_error("a step of . rows is not cut into", spillway.GlobalBatchSampler, range(3), *sizes)
        self.assert_error("rank 2 of 2", spillway.GlobalBatchSampler, range(3), 8, 2, rank=2, num_replicas=2)
        self.assert_error("takes num_replicas and rank together", spillway.GlobalBatchSampler, range(3), 8, 2, rank=2)


class SameBits(RanksCase):
    def trained(self, name, *runs):
        """What the page's program has written, after runs of (ranks, seed, steps)."""
        folder = self.folder / name
        folder.mkdir()
        program, = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        (folder / "train.py").write_text(program)
        for ranks, seed, steps in runs:
            if ranks > 1:
                self.torchrun(ranks, folder / "train.py", str(seed), str(steps), folder=folder)
            else:
                self.run_alone(folder / "train.py", str(seed), str(steps))
        return pathlib.Path(folder, "trained/model.safetensors").read_bytes()

    def test_ThePagesProgramExportsTheSameBytesOnAnyNumberOfRanks(self):
        alone = self.trained("alone", (1, 1, 9))
        self.assertEqual(alone, self.trained("several", (2, 1, 4), (4, 1, 9)))
        self.assertNotEqual(alone, self.trained("other", (1, 2, 9)))


class Drawn(torch.nn.Module):
    """Outside of blocks and in them."""

    def __init__(self):
        super().__init__()
        self.network, self.numbers = toy_model.model(), []

    def forward(self, ids):
        self.numbers.append(torch.rand(()).item())
        return self.network(ids)


class Numbers(RanksCase):
    def drawn(self, groups, seed=None, accumulation=2):
        model = Drawn()
        torch.manual_seed(7)
        engine = self.engine(model, toy_model.config(self.folder, "cpu", accumulation, spillway={"sum_groups": groups}),
                             seed=seed)
        for ids in toy_model.batches(4):
            loss = engine(ids) + engine(ids)  # which draws others
            with torch.no_grad():
                engine(ids)
            engine.backward(loss)
            engine.step()
        return model.numbers

    def expected(self, seed, step, number):
        torch.manual_seed(seed_of(seed, step, number))
        return torch.rand(()).item()

    def test_AreByStepAndMicroBatch(self):
        numbers = self.drawn(2)
        self.assertEqual(numbers[::3], [self.expected(7, *place) for place in ((0, 0), (0, 1), (1, 0), (1, 1))])
        self.assertEqual(len(set(numbers)), 12)
        self.assertEqual(numbers, self.drawn(2, seed=7))
        self.assertFalse(set(numbers) & set(self.drawn(2, seed=8)))

    def test_AreTheScriptsWithoutSumGroups(self):
        numbers = self.drawn(1)
        torch.manual_seed(7)
        self.assertEqual(numbers[0], torch.rand(()).item())

    def test_ADiscardedStepBeginsAnew(self):
        model = Drawn()
        engine = self.engine(model, toy_model.config(self.folder, "cpu", 2, spillway={"sum_groups": 2}), seed=7)
        for _ in range(2):
            engine.backward(engine(toy_model.batches(1)[0]))
            engine.discard_step()
        self.assertEqual(*model.numbers)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(toy_model.batches(2)[0])


class Loaders(RanksCase):
    def loader(self, data, **more):
        place = {"device": "cpu"}
        engine, _, loader, _ = spillway.initialize(model=toy_model.model(), training_data=data, config={
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"device": "host", **more}}, seed=5)
        self.addCleanup(engine.close)
        return loader

    def test_OfInitializeCutRowsWhereSumGroupsIsAskedFor(self):
        data = list(torch.arange(10))
        with self.assertNoLogs("spillway", logging.WARNING):
            found = self.loader(data, sum_groups=2)
        self.assertEqual([rows.tolist() for rows in found], list(spillway.GlobalBatchSampler(data, 4, 2, seed=5)))
        self.assertNotIsInstance(self.loader(data).batch_sampler, spillway.GlobalBatchSampler)

    def test_OthersAreToldOfOnce(self):
        with self.assertLogs("spillway", logging.WARNING) as said:
            self.loader(Stream(), sum_groups=2)
        line, = said.output
        self.assertIn("sum_groups: the DataLoader does not cut rows by spillway.GlobalBatchSampler", line)


class OnceMore(RanksCase):
    def step(self, name, backward):
        folder = self.folder / name
        folder.mkdir()
        network = toy_model.model()
        network.head.weight = torch.nn.Parameter(network.head.weight.detach().clone())  # one gradient of each
        for layer in network.layers:
            layer.drop.p = 0
        engine = self.engine(network, toy_model.config(folder, "cpu", 4, spillway={"sum_groups": 4}))
        for ids in toy_model.batches(4):
            backward(engine, engine(ids))
        engine.step()
        return engine.master_weights()

    def test_ASecondBackwardOfAMicroBatchIsOfItsPart(self):
        def twice(engine, loss):
            engine.backward(loss, retain_graph=True)
            engine.backward(loss)

        def doubled(engine, loss):
            engine.backward(2 * loss, retain_graph=True)

        self.assert_same_weights(self.step("twice", twice), self.step("doubled", doubled))  # g + g is 2 g, exactly

    def test_TrainBatchIsRefused(self):
        engine = self.engine(toy_model.model(), toy_model.config(self.folder, "cpu", 4, spillway={"sum_groups": 4}))
        self.assert_error("train_batch: adds a step's micro-batches up as one, and spillway.sum_groups",
                          engine.train_batch, toy_model.batches(4))
        self.assertEqual(engine.current_step, 0)


if __name__ == "__main__":
    main()
