"""What a block may be and do. A second run that would not be the first one again, and gradients that would be lost, are
refused; what PyTorch does with what is left is what Spillway does."""
import copy
import os
import random
import unittest
import warnings
import weakref

from case import main

import torch

import spillway
from line_blocks import DEVICE, X, Case, Line, lines
from toy_model import batches, config, model, train


class Results(Case):
    def test_AWeightInAResultOutlivesTheBlock(self):
        class Position(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.linspace(0, 1, 16).view(2, 8))

            def forward(self, x, whole=False):
                return self.weight if whole else self.weight[:, :].expand(x.shape[0] // 2, -1, -1)[0]

        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(3)
                self.position, self.lines = Position(), torch.nn.ModuleList(Line() for _ in range(8))

            def forward(self, x, whole=False):
                position = self.position(x, whole)
                for line in self.lines:
                    x = line(x) + position
                return x.pow(2).mean()

        for whole in (False, True):
            with self.subTest(whole=whole):
                engine, alone = self.engine(Network()), Network().to(DEVICE)
                with torch.no_grad():
                    self.assertEqual(alone(X, whole), engine(X, whole))
                loss = engine(X, whole)
                self.assertEqual(alone(X, whole), loss)
                engine.backward(loss)
                alone(X, whole).backward()
                wanted = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in alone.parameters())).item()
                self.assertAlmostEqual(wanted, engine.step().gradient_norm, delta=1e-5 * wanted)
                engine.close()

    def test_WhatHidesATensorIsRefused(self):
        class Hides:
            def __init__(self, value):
                self.value = value

        self.assert_refused("1: returns a Hides, in which gradients would be lost", None, lambda _, x: Hides(x))

    def test_AnotherResultInBackwardIsRefused(self):
        runs = []

        def changes(self, x):
            runs.append(self)
            return x if len(runs) == 1 else (x, x)

        self.assert_refused("1: gave another result in backward than in forward", None, changes, None, forward=False)

    @unittest.skipIf(DEVICE == "cuda", "results are compared on a CPU alone")
    def test_OtherValuesInBackwardAreRefused(self):
        generator, runs = torch.Generator().manual_seed(3), []

        def counts(self, x):
            runs.append(self)
            return x / len(runs)

        def own_generator(self, x):
            return x * (torch.rand(x.shape, generator=generator) < 0.5)

        def averages(self, x):  # which no version tells of
            self.count.data.mul_(0.9).add_(x.detach().mean() + 1)
            return x + self.count

        for change in (counts, own_generator, averages):
            with self.subTest(change=change.__name__):
                self.assert_refused("1: gave another result in backward", None, change, None, forward=False)

    def test_RandomNumbersAreDrawnAgain(self):
        numpy = __import__("numpy")

        def draws(self, x):
            return x * (1 + random.random()) * (1 + numpy.random.rand()) * torch.rand(()).item()

        def seed():
            torch.manual_seed(5), random.seed(5), numpy.random.seed(5)

        engine, alone = self.engine(lines(draws, draws)), lines(draws, draws).to(DEVICE)
        seed()
        engine.backward(engine(X).sum())
        following = random.random(), numpy.random.rand(), torch.rand(()).item()
        seed()
        alone(X).sum().backward()
        self.assertEqual((random.random(), numpy.random.rand(), torch.rand(()).item()), following)
        norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in alone.parameters())).item()
        self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5 * norm)


    def test_WhatLeavesABlockBesideItsResultIsRefusedInALoss(self):
        class Namespace:
            pass

        """Where it is not found: in nobody's attribute, and no module's output."""
        taken = []

        def elsewhere(self, x):
            taken.append(x.pow(2).mean())
            return x

        def view(self, x):
            self.aux = x.pow(2)[0]
            return x

        for change in (elsewhere, view):
            with self.subTest(change=change.__name__):
                taken.clear()
                engine = self.engine(lines(None, change))
                result = engine(X).sum()
                aux = taken[0] if taken else engine.module[1].aux.sum()
                self.assertTrue(aux.requires_grad)
                # 1.13 makes it the latter
                with self.assertRaisesRegex((spillway.Error, RuntimeError), "1: computed a value that is used in a "
                                                                            "loss and is none of its results"):
                    engine.backward(result + aux)
                engine.backward(engine(X).sum() + aux.item())  # as a number it is harmless
                self.assertEqual(1, engine.step().step)
                engine.close()

    def test_WhatLeavesABlockBesideItsResultKeepsNothingElse(self):
        def leaves(self, x):
            inner = torch.tanh(x)
            self.inner, self.aux = weakref.ref(inner), inner.pow(2).mean()
            return x * inner

        engine = self.engine(lines(leaves))
        engine(X)
        self.assertIsNone(engine.module[0].inner())
        self.assertTrue(engine.module[0].aux.requires_grad)

    def test_ABlockMayAskForGradientsInItsForward(self):
        def branches(self, x):
            return x * (2 if torch.is_grad_enabled() else 3)

        def hooks(self, x):
            x = torch.tanh(x)
            x.register_hook(lambda gradient: 3 * gradient)
            return x

        class Force(Line):
            def forward(self, x):
                return torch.autograd.grad(self.linear(x).pow(3).sum(), x, create_graph=True)[0]

        def network(change):
            torch.manual_seed(3)
            return torch.nn.Sequential(Line(), Force() if change is None else Line(change), Line())

        for change in (branches, hooks, None):
            with self.subTest(change=change):
                engine, alone = self.engine(network(change)), network(change).to(DEVICE)
                loss, wanted = engine(X).pow(2).mean(), alone(X).pow(2).mean()
                self.assertEqual(wanted, loss)
                engine.backward(loss)
                wanted.backward()
                norm = torch.sqrt(sum(p.grad.double().pow(2).sum() for p in alone.parameters())).item()
                self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5 * norm)
                engine.close()

    def test_AResultThatWantsNoGradientStaysOne(self):
        class Masked(Line):
            def forward(self, x, mask):
                return self.linear(x), mask, x, mask * 2

        engine = self.engine(torch.nn.Sequential(Masked()))
        mask = torch.ones(2, 8, device=DEVICE)
        self.assertEqual([True, False, True, False],
                         [value.requires_grad for value in engine.module[0](X.clone().requires_grad_(), mask)])


class Loops(Case):
    def test_ALossOfAnEarlierStepIsRefused(self):
        engine = self.engine(lines(None, None))
        kept = engine(X).sum()
        engine.backward(engine(X).sum())
        engine.step()
        self.assert_error("gradients of an earlier step, whose weights are gone", engine.backward, kept)
        self.assertEqual(1, engine.current_step)

    def test_TwoLossesOfOneStep(self):
        engine = self.engine(lines(None, None))
        engine.backward(engine(X).pow(2).mean())
        self.assert_error(r"the step has had its 1 micro-batches .*; call step\(\)", engine.backward, engine(X).sum())
        self.assertEqual(1, engine.step().step)

    def test_AnUnfinishedStepIsNotForgottenWhileWeightsAreInUse(self):
        runs = []

        def fails(self, x):
            runs.append(self)
            if len(runs) == 2:  # in backward
                raise KeyError("gone")
            return x

        engine = self.engine(lines(fails, None))
        loss = engine(X).sum()
        with engine.weights_of("1"):
            with self.assertRaisesRegex(KeyError, "gone"):
                engine.backward(loss)
        self.assert_error("a step was left unfinished in backward", engine, X)
        engine.discard_step()
        self.assertIsNone(engine.step())

    def test_ZeroGradForgetsWhatBackwardDid(self):
        def norm(zero_grad):
            engine = self.engine(lines(None, None), config(self.folder, accumulation=2))
            if zero_grad:
                engine.backward(engine(X).sum() * 1e3)
                with self.assertLogs("spillway", "WARNING") as logged:
                    zero_grad(engine)
                self.assertIn("zero_grad: the 1 of 2 micro-batches that the step has had are", logged.output[0])
            for factor in (1, 2):
                engine.backward(engine(X).sum() * factor)
            report = engine.step()
            engine.optimizer.zero_grad(set_to_none=True)  # as loops do after step()
            engine.close()
            return report.gradient_norm

        wanted = norm(None)
        for call in (lambda e: e.optimizer.zero_grad(), lambda e: e.zero_grad(), lambda e: e.module.zero_grad()):
            self.assertEqual(wanted, norm(call))

    def test_WhatAnOptimizerCannotDoIsRefused(self):
        engine = self.engine(lines(None, None))
        optimizer, group = engine.optimizer, engine.optimizer.param_groups[0]
        self.assert_error("step: a closure is not called; run the model", optimizer.step, lambda: engine(X).sum())
        self.assert_error("add_param_group: what is trained is decided", optimizer.add_param_group,
                          {"params": [torch.nn.Parameter(X)]})
        self.assertEqual([group], optimizer.param_groups)
        group["weight_decay"] = 0.1
        self.assert_error(r"param_groups\[0\]\['weight_decay'\]: has no effect; say optimizer.params.weight_decay",
                          engine.backward, engine(X).sum())
        del group["weight_decay"]
        engine.backward(engine(X).sum())
        self.assertEqual(1, optimizer.step().step)

    def test_WhatIsTrainedIsDecidedAtTheStart(self):
        network = lines(None, None)
        network[0].requires_grad_(False)
        engine = self.engine(network)
        network[0].requires_grad_(True)
        self.assert_error("0: has parameters that want a gradient and did not when the engine was made.*; "
                          "export\\(\\), and make model and engine of that", engine, X)
        with torch.no_grad():
            self.assertTrue(torch.equal(lines(None, None).to(DEVICE)(X), engine(X)))

    def test_AWrongBlobChangesNothing(self):
        engine = self.engine(lines(None))
        engine.backward(engine(X).sum())
        self.assert_error(r"blob: is a int, not bytes; json.dumps\(…\).encode\(\) makes", engine.step, blob=7)
        self.assert_error("16", engine.step, blob=b"x" * 20000)
        self.assertEqual(1, engine.step(blob=b"7").step)
        self.assertEqual(b"7", engine.blob)

    def test_InferenceModeInBetween(self):
        engine = self.engine(lines(None, None))
        with torch.inference_mode():
            engine(X)
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)

    def test_AVisitWithinAVisitOfTheSameWeights(self):
        engine, alone = self.engine(model()), model().to(DEVICE)
        with torch.no_grad(), engine.weights_of("embedding"):
            self.assertEqual(alone.eval()(batches(1)[0]), engine.module.eval()(batches(1)[0]))
            self.assertTrue(torch.equal(alone.embedding.weight, engine.module.embedding.weight))


class Models(Case):
    def test_WhatIsWrittenFromOutsideIsRefused(self):
        class Scaled(Line):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(1))

            def forward(self, x):
                return self.linear(x) * self.scale

        engine = self.engine(torch.nn.Sequential(Line(), Scaled()))
        with torch.no_grad():
            self.assert_error(r"1\.scale: was written to outside of its block, and the write is lost",
                              engine.module[1].scale.fill_, 0.5)
            engine(X)
            try:  # what PyTorch does not ask about, unless it is new
                engine.module[1].scale.as_subclass(torch.Tensor).fill_(0.5)
            except RuntimeError as error:
                self.assertRegex(str(error), r"1\.scale: is read outside of its block")
                return
            self.assertTrue(engine.module[0].linear.weight.as_subclass(torch.Tensor).isnan().all())
        self.assert_error(r"1\.scale: was written to outside of its block, and the write is lost", engine, X)

    def test_OtherParametersAreRefused(self):
        network = lines(None, None)
        network[0].requires_grad_(False)
        engine = self.engine(network)
        network[0].linear.weight = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                self.assert_error("0: has other parameters than when the engine was made", engine, X)

    def test_NoCopies(self):
        engine = self.engine(lines(None))
        self.assert_error("cannot be copied with it; state_dict", copy.deepcopy, engine.module)

    def test_ContainersOfContainers(self):
        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(3)
                self.pairs = torch.nn.ModuleList(torch.nn.ModuleList([Line(), Line()]) for _ in range(2))
                self.last = Listed()

            def forward(self, x):
                for one, other in self.pairs:
                    x = other(one(x))
                return self.last(x).pow(2).mean()

        class Listed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.all = torch.nn.ParameterList([torch.nn.Parameter(torch.full((8,), 0.5)) for _ in range(2)])

            def forward(self, x):
                return x * self.all[0] + self.all[1]

        engine, alone = self.engine(Network()), Network().to(DEVICE)
        loss = engine(X)
        self.assertEqual(alone(X), loss)
        engine.backward(loss)
        self.assertEqual(0, engine.step().unplanned_visits)
        self.assert_error(r"Line: is no block; blocks are pairs\.0\.0, pairs\.0\.1, pairs\.1\.0, pairs\.1\.1, last",
                          engine.weights_of(Line()).__enter__)

    def test_ParametersBesideBlocks(self):
        """Of a model and of a part of it: they are lent. One is unused, and one a hook computes."""
        class Part(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.lines = torch.nn.ModuleList(Line() for _ in range(2))
                self.shift = torch.nn.Parameter(torch.ones(8))
                self.unused = torch.nn.Parameter(torch.ones(3))

            def forward(self, x):
                for line in self.lines:
                    x = line(x) * self.shift
                return x

        class Normed(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = torch.nn.utils.weight_norm(torch.nn.Linear(8, 8))

            def forward(self, x):
                return self.inner(x)

        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(3)
                self.part, self.normed = Part(), Normed()
                self.scales = torch.nn.ParameterList([torch.nn.Parameter(torch.tensor(0.5)) for _ in range(2)])

            def forward(self, x):
                return (self.normed(self.part(x)) * self.scales[0].exp() + self.scales[1]).pow(2).mean()

        for example in (None, (X,)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # newer PyTorch says what else would compute a weight
                engine, alone = self.engine(Network(), example=example), Network().to(DEVICE)
            with torch.no_grad():
                self.assertEqual(alone(X), engine(X))
            optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.01)
            for _ in range(3):
                loss, wanted = engine(X), alone(X)
                self.assertAlmostEqual(wanted.item(), loss.item(), delta=1e-6 * wanted.item())
                engine.backward(loss)
                wanted.backward()
                norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
                optimizer.step()
                optimizer.zero_grad()
                self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5 * norm)
            with engine.weights_of("part"):
                self.assertTrue(torch.allclose(alone.part.shift, engine.module.part.shift, atol=1e-6))
            for name, value in alone.state_dict().items():
                self.assertTrue(torch.allclose(value, engine.state_dict()[name].to(DEVICE), atol=1e-6), name)
            engine.close()

    def test_WhatCannotBeDivided(self):
        normed = torch.nn.Sequential(torch.nn.utils.weight_norm(torch.nn.Linear(8, 8)))
        self.assert_error("0: WeightNorm computes its weight before the block runs", self.engine, normed)
        for example, kind in ((X, "Tensor"), ("text", "str")):
            self.assert_error(f"example: is a {kind}; give the arguments", self.engine, lines(None), example=example)

    @unittest.skipIf(DEVICE == "cuda", "CUDA does not work in a fork")
    def test_AForkLeavesTheEngineAlone(self):
        engine = self.engine(lines(None, None))
        engine.backward(engine(X).sum())
        engine.step()
        child = os.fork()
        if child == 0:
            engine.close()
            os._exit(7)
        self.assertEqual(7, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        engine.backward(engine(X).sum())
        self.assertEqual(2, engine.step().step)

    def test_AForgottenEngineGivesItsStoreBack(self):
        engine = spillway.Engine(model(), config(self.folder))
        train(engine, 2)
        del engine
        again = spillway.Engine(model(), config(self.folder), on_existing="resume")
        self.addCleanup(again.close)
        self.assertEqual(2, again.current_step)

    def test_AForgottenEngineIsMissed(self):
        network = lines(None, None)
        spillway.Engine(network, config(self.folder))
        for call in (lambda: network(X), network.state_dict, network.zero_grad):
            self.assert_error("engine: nothing refers to it anymore", call)

    def test_SparseGradientsAreRefused(self):
        network = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True))
        self.assert_error("0: has sparse gradients, and Spillway's are dense", self.engine, network)
        network.requires_grad_(False)
        self.assertEqual((2, 4), self.engine(network)(torch.tensor([0, 1]).to(DEVICE)).shape)


if __name__ == "__main__":
    main()
