"""Logits in slices of the tokens ("logit_slices"): the same losses, true logits for who reads them, or an error."""
from case import Case as Folder
from case import main

import gc
import os
import sys
import unittest
import unittest.mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import spillway
from kept_inputs_test import status
from toy_model import DEVICE, config

V, WIDTH = 331, 16  # the vocabulary, by which logits are known
CAPPED = (lambda logits: 5 * torch.tanh(logits / 5)), (lambda logits: (logits + torch.ones(1, V).to(logits)) * 0.7)


class Speaks(torch.nn.Module):
    """A language model, whose losses are as transformers' before 4.46."""

    def __init__(self, change=None, tied=False, bias=False, head=None):
        super().__init__()
        torch.manual_seed(2)
        self.embedding = torch.nn.Embedding(V, WIDTH)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = head or torch.nn.Linear(WIDTH, V, bias)
        self.change = change
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids, labels=None, **options):
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = self.head(x)
        if self.change:
            logits = self.change(logits)
        if labels is None:
            return None, logits
        shifted = logits[..., :-1, :].contiguous().float()
        return F.cross_entropy(shifted.view(-1, V), labels[..., 1:].reshape(-1), **options), logits


def batches(count, rows=4, tokens=13):
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        ids = torch.randint(0, V, (rows, tokens), generator=generator).to(DEVICE)
        yield ids, ids.masked_fill(ids % 5 == 0, -100)


class Watch(TorchDispatchMode):
    """Tensors of which the last axis is the vocabulary, and whose others are tokens."""

    def __init__(self):
        super().__init__()
        self.largest = self.peak = 0
        self._alive = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if torch.is_tensor(made) and made.dim() > 1 and made.shape[-1] == V and made.shape[0] != WIDTH and \
                    made.device.type != "meta":
                storage = made.untyped_storage() if hasattr(made, "untyped_storage") else made.storage()
                self._alive.setdefault(storage.data_ptr(), []).append((StorageWeakRef(storage), storage.nbytes()))
                self.largest = max(self.largest, made.numel() // V)
        self.peak = max(self.peak, self.alive())
        return result

    def alive(self):
        for place, found in list(self._alive.items()):
            self._alive[place] = [each for each in found if not each[0].expired()]
        return sum(found[-1][1] for found in self._alive.values() if found)


class Case(Folder):
    def engine(self, network, slices=1, spillway=None, device="cpu", **more):
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        return super().engine(network, config(folder, device, spillway={**(spillway or {}), "logit_slices": slices},
                                              **more))

    def trained(self, engine, steps=4, loss_of=None, **options):
        """Losses, and gradients of the first step."""
        losses, gradients, push = [], {}, spillway.Engine.push

        def pushed(engine, entries, found, **more):
            for (_, owner, index), gradient in zip(entries, found):
                if gradient is not None and engine.current_step == 0:
                    before = gradients.get(engine._layout.names[owner][index], 0)
                    gradients[engine._layout.names[owner][index]] = before + gradient.detach().float().cpu()
            push(engine, entries, found, **more)

        with unittest.mock.patch.object(spillway.Engine, "push", pushed):
            for ids, labels in batches(steps):
                loss = loss_of(engine, ids, labels) if loss_of else engine(ids, labels, **options)[0]
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        return losses, gradients

    def assert_alike(self, wanted, found, rounding=1e-6):
        for one, other in zip(wanted[0], found[0]):
            self.assertAlmostEqual(one, other, delta=rounding * abs(one))
        self.assertEqual(len(wanted[0]), len(found[0]))
        self.assertEqual(wanted[1].keys(), found[1].keys())
        for name, gradient in wanted[1].items():
            difference = (gradient - found[1][name]).norm()
            self.assertLessEqual(difference, max(rounding, 2e-6) * gradient.norm() + 1e-9, name)


class Losses(Case):
    def test_TheyAreThoseOfAllLogitsAtOnce(self):
        """With fewer tokens than slices, too; gradients are, and so are the steps after them."""
        for network, options in (({}, {}), ({"tied": True}, {}), ({"bias": True}, {"reduction": "sum"}),
                                 ({"change": CAPPED[0], "tied": True}, {"label_smoothing": 0.1}),
                                 ({"change": CAPPED[1]}, {})):
            wanted, *others = (self.trained(self.engine(Speaks(**network), n), **options) for n in (1, 3, 7, 1000))
            for found in others:
                self.assert_alike(wanted, found)

    def test_OtherWaysToWriteThemAreTheSame(self):
        def by_hand(engine, ids, labels):
            return F.cross_entropy(engine(ids)[1].flatten(0, 1), labels.flatten())

        def of_log_probabilities(engine, ids, labels):
            return F.nll_loss(F.log_softmax(engine(ids)[1].view(ids.numel(), -1), dim=-1), labels.view(-1))

        def module(engine, ids, labels):
            counted = labels != -100
            return torch.nn.CrossEntropyLoss()(engine(ids)[1][counted], labels[counted])

        def ignoring(engine, ids, labels):
            return F.cross_entropy(engine(ids)[1].view(-1, V), labels.view(-1) % 500, ignore_index=400)  # of -100

        def weighted(engine, ids, labels):
            losses = F.cross_entropy(engine(ids)[1].reshape([-1, V]).double(), labels.view(-1), reduction="none")
            return (losses.float() * (labels.view(-1) != -100)).sum() / (labels != -100).sum()

        wanted = self.trained(self.engine(Speaks()), loss_of=by_hand)
        for loss_of in (by_hand, of_log_probabilities, module, ignoring, weighted):
            with self.assertNoLogs("spillway", "WARNING"):
                self.assert_alike(wanted, self.trained(self.engine(Speaks(), 3), loss_of=loss_of))

    def test_InBf16LogitsAreCastAsTheModelSays(self):
        def loss_in(dtype):
            return lambda engine, ids, labels: F.cross_entropy(engine(ids)[1].view(-1, V).to(dtype), labels.view(-1))

        for dtype in (torch.float32, torch.bfloat16):
            wanted, found = (self.trained(self.engine(Speaks(tied=True), n, bf16={"enabled": True}),
                                          loss_of=loss_in(dtype)) for n in (1, 4))
            self.assert_alike(wanted, found, 0.02)

    def test_AutocastIsThatOfTheForwardPass(self):
        def inside(engine, ids, labels):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                return engine(ids, labels)[0]

        def behind(engine, ids, labels):
            with torch.autocast(DEVICE, dtype=torch.bfloat16):
                logits = engine(ids)[1]
            self.assertEqual(torch.bfloat16, logits.dtype)
            return F.cross_entropy(logits.float().view(-1, V), labels.view(-1))

        for loss_of in (inside, behind):
            wanted, found = (self.trained(self.engine(Speaks(), n), loss_of=loss_of) for n in (1, 4))
            self.assert_alike(wanted, found, 0.004)

    def test_BesideSlicesOfABatchAndMicroBatchesTogether(self):
        def steps(slices, blocks, together):
            engine = self.engine(Speaks(tied=True), slices, {"block_slices": blocks}, accumulation=2)
            found = []
            for _ in range(3):
                if together:
                    found.append(engine.train_batch(list(batches(2)), lambda batch: engine(*batch)[0]).item())
                    report = engine.report
                else:
                    losses = []
                    for batch in batches(2):
                        losses.append(engine(*batch)[0])
                        engine.backward(losses[-1])
                        report = engine.step()
                    found.append(sum(loss.item() for loss in losses) / 2)
                found.append(report.gradient_norm)
            return found

        wanted = steps(1, 1, False)
        for slices, blocks, together in ((3, 1, True), (3, 2, True), (3, 2, False)):
            for one, other in zip(wanted, steps(slices, blocks, together)):
                self.assertAlmostEqual(one, other, delta=5e-6 * one)

    def test_AMicroBatchMayReadItsLogits(self):
        def loss_of(batch):
            loss, logits = engine(*batch)
            return loss + logits.square().mean() if batch[0].shape[0] == 2 else loss

        found = []
        for slices in (1, 3):
            engine = self.engine(Speaks(), slices, accumulation=3)
            steps = [*batches(2), *batches(1, rows=2)]
            found.append([[engine.train_batch(steps, loss_of).item(), engine.report.gradient_norm] for _ in range(3)])
        for one, other in zip(*found):
            self.assertAlmostEqual(one[0], other[0], delta=1e-6 * one[0])
            self.assertAlmostEqual(one[1], other[1], delta=1e-5 * one[1])

    @unittest.skipIf(not hasattr(torch, "compile"), "PyTorch before 2.0 compiles nothing")
    def test_OfACompiledModelTheyAreTheSame(self):
        compiled = self.engine(torch.compile(Speaks(), backend="eager"), 3)
        self.assertEqual(self.trained(self.engine(Speaks(), 3), 2)[0], self.trained(compiled, 2)[0])

    def test_FrozenHeadsAndFrozenRests(self):
        for frozen in (["head"], ["embedding"], ["layers"], ["embedding", "layers"]):
            found = []
            for slices in (1, 3):
                network = Speaks(bias=True)
                for name in frozen:
                    getattr(network, name).requires_grad_(False)
                found.append(self.trained(self.engine(network, slices)))
            self.assert_alike(*found)


class Memory(Case):
    def test_OnlyOneSlicesLogitsAreThere(self):
        """The largest tensor of them, all of them at the worst moment, and those that wait for backward."""
        tokens, found = 4 * 240, {}
        ids, labels = next(batches(1, rows=4, tokens=241))
        for slices in (1, 6):
            engine = self.engine(Speaks(), slices)
            engine._gradients.show = lambda: None  # which PyTorch 1.13 cannot make below such a mode
            for _ in range(2):  # the first one may make the plan once more
                watch = Watch()
                with watch:
                    loss = engine(ids, labels)[0]
                    waiting = watch.alive()
                    engine.backward(loss)
                engine.step()
            found[slices] = watch.largest, watch.peak, waiting
        self.assertEqual((4 * 241, tokens // 6), (found[1][0], found[6][0]))
        self.assertGreater(found[1][1], 2 * tokens * V * 4)
        self.assertLess(found[6][1], found[1][1] / 6 * 1.1)
        self.assertGreater(found[1][2], tokens * V * 4)
        self.assertEqual(0, found[6][2])

    def test_AnEvaluationsAreNotThereEither(self):
        ids, labels = next(batches(1, rows=4, tokens=241))
        engine, alone = (self.engine(Speaks(), n) for n in (6, 1))
        with torch.no_grad(), Watch() as watch:
            loss = engine(ids, labels)[0]
        self.assertEqual((160, False), (watch.largest, loss.requires_grad))
        with torch.no_grad():
            self.assertAlmostEqual(alone(ids, labels)[0].item(), loss.item(), delta=1e-6 * loss.item())

    def test_WhatALinkMovesDoesNotDependOnSlices(self):
        runs = []
        for slices in (1, 5):
            engine = self.engine(Speaks(tied=True), slices, device="nvme")
            reports = []
            for ids, labels in batches(12):
                engine.backward(engine(ids, labels)[0])
                reports.append(engine.step())
            engine.close()
            runs.append(reports)
        self.assert_links_move_the_same(*runs)


class Readers(Case):
    def setUp(self):
        super().setUp()
        (self.ids, self.labels), = batches(1)

    def test_WhoReadsLogitsHasTheTrueOnes(self):
        cut, whole = (self.engine(Speaks(CAPPED[0], bias=True), n)(self.ids)[1] for n in (3, 1))
        self.assertIsInstance(cut, torch.Tensor)
        self.assertEqual((whole.shape, whole.dtype, whole.device, True, False),
                         (cut.shape, cut.dtype, cut.device, cut.requires_grad, cut.is_leaf))
        for read in (lambda x: x.detach(), lambda x: x.argmax(-1), lambda x: x[:, -1].softmax(0), lambda x: x[1, 2, 3],
                     lambda x: x[:, [0, -1]], lambda x: x[0][..., 5:9].exp(), lambda x: x[None, ..., :-1].mean(),
                     lambda x: x.transpose(1, 2)[0], lambda x: x.unbind(0)[1], lambda x: x @ x.new_ones(V, 2),
                     lambda x: torch.where(x > 0, x, torch.zeros_like(x)), lambda x: x.std(-1), lambda x: list(x)[2],
                     lambda x: x.view(V, -1).clone(), lambda x: (x * x).sum(), lambda x: 1 - x, lambda x: x.tolist(),
                     lambda x: torch.stack([x, x + x.new_full((1, V), 2)]), lambda x: x[x[..., 0] > 0] / 3,
                     lambda x: x.log_softmax(-1).gather(-1, self.ids[..., None]), lambda x: x.softmax(1).sum(2)):
            one, other = read(whole), read(cut)
            self.assertIs(type(one), type(other))
            torch.testing.assert_close(torch.as_tensor(other), torch.as_tensor(one), rtol=1e-5, atol=1e-6)
        self.assertEqual(repr(whole.detach()), repr(cut.detach()))

    def test_TheirGradientsAreTheSame(self):
        """Of what is computed from logits beside a loss, or in its place."""
        def beside(engine, ids, labels):
            loss, logits = engine(ids, labels)
            return loss + 0.01 * logits.logsumexp(-1).square().mean()

        def smoothed(engine, ids, labels):  # as transformers' LabelSmoother
            probabilities = -F.log_softmax(engine(ids)[1], dim=-1)
            found = probabilities.gather(-1, labels.clamp(0)[..., None]) + 0.1 * probabilities.mean(-1, keepdim=True)
            return found.masked_fill(labels[..., None] == -100, 0).mean()

        def before(engine, ids, labels):
            logits = engine(ids)[1]
            return logits.square().mean() + F.cross_entropy(logits.view(-1, V), labels.view(-1))

        def transposed(engine, ids, labels):
            return F.cross_entropy(engine(ids)[1].transpose(1, 2), labels)

        def weighted(engine, ids, labels):
            return F.cross_entropy(engine(ids)[1].view(-1, V), labels.view(-1), weight=torch.ones(V).to(ids.device))

        for loss_of in (beside, smoothed, before, transposed, weighted):
            with self.subTest(loss_of.__name__):
                wanted = self.trained(self.engine(Speaks(tied=True)), loss_of=loss_of)
                with self.assertLogs("spillway", "WARNING") as logs:
                    self.assert_alike(wanted, self.trained(self.engine(Speaks(tied=True), 3), loss_of=loss_of))
                said = [line for line in logs.output if "logit_slices" in line]
                self.assertEqual(1, len(said), logs.output)
                self.assertRegex(said[0], r"head: \w+\(\) reads its logits in training, .* computed whole, 1 MiB")

    def test_AMetricReadsThemWithoutAGradient(self):
        def loss_of(engine, ids, labels):
            loss, logits = engine(ids, labels)
            right.append((logits.argmax(-1) == ids).float().mean().item())
            with torch.no_grad():
                right.append(logits.float().softmax(-1).max().item())
            return loss

        found = []
        for slices in (1, 3):
            right = []
            with self.assertNoLogs("spillway", "WARNING"):
                found.append((self.trained(self.engine(Speaks(), slices), loss_of=loss_of), right))
        self.assert_alike(found[0][0], found[1][0])
        for one, other in zip(found[0][1], found[1][1]):
            self.assertAlmostEqual(one, other, delta=1e-6)

    def test_WithoutAGradientThereIsNone(self):
        engine = self.engine(Speaks(), 3)
        logits = engine(self.ids)[1]
        with torch.no_grad():
            row = logits[:, -1]
            self.assertFalse(logits.float().requires_grad or row.requires_grad or engine(self.ids)[1].requires_grad)
        self.assertFalse(row.exp().requires_grad or logits.detach().requires_grad)
        self.assertTrue(logits[:, -1].exp().requires_grad)

    def test_AnotherBlockMayBeGivenThem(self):
        class Reads(Speaks):
            def __init__(self):
                super().__init__()
                self.judge = torch.nn.Linear(V, 1)

            def get_output_embeddings(self):
                return self.head

        found = []
        for slices in (1, 3):
            engine = self.engine(Reads(), slices)
            found.append(self.trained(engine, loss_of=lambda engine, ids, labels:
                                      engine.module.judge(engine(ids)[1]).square().mean()))
        self.assert_alike(*found)

    def test_WhatCannotBeIsRefused(self):
        class Squares(torch.autograd.Function):
            @staticmethod
            def forward(ctx, logits):
                return logits.square().sum()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * torch.ones(4, 13, V)

        engine = self.engine(Speaks(), 3)
        logits = engine(self.ids)[1]
        for pattern, use in (("are written to, or watched, by div_", lambda: logits.div_(2)),
                             (".*by __setitem__", lambda: logits.__setitem__((0, 0), 0)),
                             (".*by add", lambda: torch.add(self.ids, 1, out=logits)),
                             (".*by register_hook", lambda: logits.register_hook(print)),
                             (".*by retain_grad", lambda: logits.retain_grad()),
                             (".*by grad", lambda: torch.autograd.grad(logits.sum(), logits)),
                             ("are read by native code", lambda: natively(torch.mul, logits, 2)),
                             ("are an argument of a torch.autograd.Function",
                              lambda: engine.backward(Squares.apply(logits)))):
            error = self.assert_error(f"^logits of head: {pattern}.*clone.*spillway.logit_slices", use)
            self.assertEqual("unsupported", error.code)
        self.assertGreater(engine(self.ids, self.labels)[0].item(), 0)

    def test_BehindTheStepTheyAreOthersAndRefused(self):
        engine = self.engine(Speaks(), 3)
        loss, logits = engine(self.ids, self.labels)
        engine.backward(loss)
        before = logits.clone()
        with torch.no_grad():
            late = engine(self.ids)[1]
        engine.step()
        self.assertEqual(before.shape, logits.exp().shape)  # whose values were read
        self.assert_error("^logits of head: are read after the step of their forward pass", late.exp)
        self.assert_error("are read after the step", F.cross_entropy, late.view(-1, V), self.labels.view(-1))

    def test_AHeadThatIsNoPlainLinearIsRefused(self):
        class Own(torch.nn.Linear):
            def forward(self, x):
                return super().forward(x.flip(0))

        class Deep(torch.nn.Sequential):
            pass

        for head, kind in ((Own(WIDTH, V), "Own"), (torch.nn.Bilinear(WIDTH, WIDTH, V), "Bilinear")):
            network = Speaks(head=head)
            self.assert_error(f"^head: is a {kind}, and spillway.logit_slices", self.engine, network, 2)
            self.assertFalse(torch.isnan(network.embedding.weight).any())  # it is as it was
        network = Speaks()
        network.get_output_embeddings = lambda: network.head
        folder = self.folder / "inside"
        folder.mkdir()
        whole = torch.nn.Sequential(Deep(network))
        self.assert_error("^0: the model's head is a part of this block", spillway.Engine, whole,
                          config(folder, "cpu", spillway={"logit_slices": 2}), blocks=["0"])

    def test_DropoutInsideDrawsForAllLogitsAtOnce(self):
        class Drops(torch.nn.Linear):
            def __init__(self):
                super().__init__(WIDTH, V)
                self.drop = torch.nn.Dropout(0.5)
                self.register_forward_pre_hook(lambda _, given: (self.drop(given[0]),))

        engine = self.engine(Speaks(head=Drops()), 2)
        with self.assertLogs("spillway", "WARNING") as logs:
            logits = engine(self.ids)[1]
        self.assertIn("head: has dropout inside, so that its logits are computed whole", logs.output[0])
        self.assertIs(torch.Tensor, type(logits))


def natively(function, *arguments):
    with torch._C.DisableTorchFunction():
        return function(*arguments)


def step(slices, vocabulary, tokens, folder):
    """Prints the most memory that the process has had, and how much more than it had with all weights and states."""
    os.makedirs(folder)
    network = torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary, bias=False))
    engine = spillway.Engine(network, config(folder, "cpu", spillway={"logit_slices": slices}))
    ids = torch.randint(0, vocabulary, (2, tokens))
    for row in (ids[:1, :64], ids[1:]):
        gc.collect()
        before = status("VmRSS")
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the most begins anew
        engine.backward(torch.nn.functional.cross_entropy(engine(row).view(-1, vocabulary), row.flatten()))
        engine.step()
    most = status("VmHWM")
    print(f"{slices} slices, {vocabulary} words, {tokens} tokens: {most / 1e6:.0f} MB at most, "
          f"{(most - before) / 1e6:.0f} more than before", flush=True)
    engine.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--step"]:
        step(*map(int, sys.argv[2:5]), sys.argv[5])
    else:
        main()
