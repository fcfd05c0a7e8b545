"""A weight outside of its block: what reads its values finds what PyTorch alone would, for every type of weights and
whatever reads; what would write or keep them is an error in its name; what is known without values stays known; and
nothing of it disturbs the training. Losses of such weights: lent_test.py."""
import copy
import io
import pickle
import unittest

from case import main

import torch

import spillway
from spillway.engine import away
from line_blocks import DEVICE, X, Case, Line, ScaledHead, lines
from toy_model import batches, config, model, train

F = torch.nn.functional
INSIDE = r'0\.linear\.weight: is read outside of its block, in a way that a loan cannot serve; read it inside ' \
         r'`with engine\.weights_of\("0"\):`, or name in blocks= a module that has both'
WRITTEN = r"0\.linear\.weight: was written to outside of its block, and the write is lost; weights come from"


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.saved_tensors[0].t(), None


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def reads(weight, x):
    vector = weight.new_zeros(8)
    return {
        "data": lambda: weight.data, "detach": lambda: weight.detach(), "clone": lambda: weight.clone(),
        "item": lambda: weight[0, 0].item(), "tolist": lambda: weight.tolist(), "iter": lambda: list(weight),
        "bool": lambda: bool((weight == 0).any()), "numpy": lambda: weight.numpy(), "array": lambda: weight.__array__(),
        "storage": lambda: weight.storage(), "data_ptr": lambda: weight.data_ptr(), "cpu": lambda: weight.cpu(),
        "float": lambda: weight.float(), "to": lambda: weight.to("cpu"), "transposed": lambda: weight.T,
        "parameter": lambda: torch.nn.Parameter(weight), "list": lambda: torch.tensor([weight, weight]),
        "torch.save": lambda: torch.save(weight, io.BytesIO()), "pickle": lambda: pickle.dumps(weight),
        "save in a dict": lambda: torch.save({"weight": [weight]}, io.BytesIO()),
        "copy": lambda: copy.copy(weight), "deepcopy": lambda: copy.deepcopy(weight),
        "linear": lambda: F.linear(x, weight), "matmul": lambda: x @ weight, "operator": lambda: 1 + weight,
        "embedding": lambda: F.embedding(torch.zeros(1, dtype=torch.long, device=DEVICE), weight),
        "layer_norm": lambda: F.layer_norm(x, (8,), vector, weight[0]), "cat": lambda: torch.cat([x, weight]),
        "einsum": lambda: torch.einsum("bi,oi->bo", x, weight), "where": lambda: torch.where(x[:1] > 0, weight, weight),
        "keyword": lambda: torch.add(x[:1], other=weight), "index": lambda: x[weight], "norm": lambda: weight.norm(),
        "foreach": lambda: torch._foreach_add([weight, weight], 1.0), "copy_": lambda: x.clone().copy_(weight[:2]),
        "foreach_norm": lambda: torch._foreach_norm([weight]), "setitem": lambda: x.clone().__setitem__(0, weight),
        "native": lambda: torch.ops.aten.mm(x, weight), "overload": lambda: torch.ops.aten.mm.default(x, weight),
        "Function": lambda: Product.apply(x, weight), "Function's view": lambda: Same.apply(weight),
        "allclose": lambda: torch.allclose(weight, weight), "dlpack": lambda: torch.from_dlpack(weight),
    }


def writes(weight, x):
    return {
        "fill_": lambda: weight.fill_(0.5), "zero_": lambda: weight.zero_(),
        "setitem": lambda: weight.__setitem__(0, 1), "clamp_": lambda: weight.clamp_(min=0),
        "data": lambda: setattr(weight, "data", torch.zeros(8, 8)), "augmented": lambda: weight.__imul__(2),
        "init": lambda: torch.nn.init.ones_(weight), "copy_": lambda: weight.copy_(x[:1].expand(8, 8)),
    }


REFUSED = ("storage", "data_ptr", "torch.save", "pickle", "save in a dict", "copy", "deepcopy", "dlpack", "parameter")


def values(found):
    if torch.is_tensor(found):
        return found.detach().float().tolist()
    return [values(each) for each in found] if isinstance(found, (list, tuple)) else found


class Reads(Case):
    def assert_refused_everywhere(self, kinds, pattern, configuration=None):
        engine = self.engine(lines(None, None), configuration)
        weight = engine.module[0].linear.weight
        x = X.to(engine.dtype)
        for grad in (False, True):
            for kind, read in kinds(weight, x).items():
                with self.subTest(kind=kind, grad=grad, dtype=engine.dtype), torch.set_grad_enabled(grad):
                    self.assert_error(pattern, read)
        engine.close()

    def test_FindWhatPyTorchAloneWould(self):
        for more in ({}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}):
            engine = self.engine(lines(None, None), config(self.folder, **more))
            x, weights = X.to(engine.dtype), [engine.module[0].linear.weight]
            weights.append(lines(None, None).to(DEVICE, engine.dtype)[0].linear.weight)
            with engine.weights_of("0"):  # rounded as Spillway rounds
                weights[1].data.copy_(weights[0])
            for grad in (False, True):
                for kind in reads(weights[1], x).keys() - set(REFUSED):
                    ours, alone = (reads(weight, x)[kind] for weight in weights)
                    with self.subTest(kind=kind, grad=grad, dtype=engine.dtype), torch.set_grad_enabled(grad):
                        try:
                            wanted = values(alone())
                        except (RuntimeError, TypeError, ValueError, IndexError):  # nor can PyTorch
                            continue
                        self.assertEqual(str(wanted), str(values(ours())))
            engine.close()

    def test_ThatKeepValuesAreErrors(self):
        def refused(weight, x):
            return {kind: read for kind, read in reads(weight, x).items() if kind in REFUSED and kind != "parameter"}

        self.assert_refused_everywhere(refused, INSIDE)
        engine = self.engine(lines(None))
        with self.assertRaisesRegex(RuntimeError, "Parameter from an instance of type AwayParameter"):  # PyTorch's
            torch.nn.Parameter(engine.module[0].linear.weight)

    def test_WritesAreErrors(self):
        self.assert_refused_everywhere(lambda weight, x: {kind: torch.no_grad()(write) for kind, write in
                                                          writes(weight, x).items()}, WRITTEN)

    def test_WhatAsksNoClassIsRefusedByItsMemoryOrFindsNaN(self):
        @torch.jit.script
        def scripted(x, weight):
            # type: (torch.Tensor, torch.Tensor) -> torch.Tensor
            return x @ weight

        def as_data():
            x = torch.empty(8, 8, device=DEVICE)
            x.data = weight
            return x

        engine = self.engine(lines(None, None))
        weight = engine.module[0].linear.weight
        with torch.no_grad():
            for read in (as_data, lambda: torch.Tensor(weight), lambda: torch.empty(0, device=DEVICE).set_(weight),
                         lambda: scripted(X, weight), lambda: torch.tensor(weight), lambda: X.new_tensor(weight),
                         lambda: torch.as_tensor(weight, dtype=torch.float64),
                         lambda: weight.as_subclass(torch.Tensor)):
                try:
                    self.assertTrue(read().isnan().all())
                    self.assertIsNone(away.REFUSE_BYTES, "PyTorch refuses the bytes by itself")
                except (spillway.Error, RuntimeError) as error:
                    self.assertRegex(str(error), r"0\.linear\.weight: is read outside of its block")

    def test_LeaveTheTrainingAsItIs(self):
        losses = []
        for disturbed in (False, True):
            engine = self.engine(model())
            found = train(engine, 1)[0]
            if disturbed:
                for name, parameter in engine.module.named_parameters():
                    for read in (parameter.sum, parameter.tolist, lambda: parameter.data):
                        read()
                    for write in (parameter.zero_, lambda: parameter.detach().add_(1)):  # noqa: B023
                        self.assert_error(name.replace(".", r"\."), torch.no_grad()(write))
            losses.append(found + train(engine, 2, first=1)[0])
            engine.close()
        self.assertEqual(*losses)

    def test_AreThereForAsLongAsTheBlockIs(self):
        engine, alone = self.engine(lines(None, None)), lines(None, None).to(DEVICE)
        weight = engine.module[0].linear.weight
        with torch.no_grad():
            with engine.weights_of("0"):
                with engine.weights_of("0"):
                    self.assertTrue(torch.equal(alone[0].linear.weight, weight))
                self.assertTrue(torch.equal(alone[0].linear.weight, weight))
                self.assertIs(torch.nn.Parameter, type(weight))
                self.assertIsInstance(engine.module[1].linear.bias, away.AwayParameter)
            self.assertIsInstance(weight, away.AwayParameter)
            with self.assertRaises(KeyError), engine.weights_of("0"):
                raise KeyError
            self.assertIsInstance(weight, away.AwayParameter)

    def test_AfterTheEnginesEnd(self):
        engine = self.engine(lines(None))
        engine.close()
        self.assert_error(r"0\.linear\.weight: has no values any more, since its engine has ended",
                          engine.module[0].linear.weight.sum)

    def test_OfABlockThatIsTheModel(self):
        network = Line()
        engine = self.engine(network, blocks=[network])
        self.assert_error(r'linear\.weight: is read .* engine\.weights_of\(""\)',
                          network.linear.weight.data_ptr)
        with engine.weights_of(""):
            self.assertTrue(network.linear.weight.isfinite().all())

    def test_OfAParameterThatIsAnArgumentOfAnotherBlock(self):
        class Network(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.line, self.head = Line(), ScaledHead()

            def forward(self, x):
                return self.head(self.line(x), self.line.linear.weight)

        for grad in (True, False):
            engine, alone = self.engine(Network()), Network().to(DEVICE)
            alone.load_state_dict(engine.state_dict())
            with torch.set_grad_enabled(grad):
                self.assertEqual(alone(X).tolist(), engine(X).tolist())
            engine.close()

    def test_TiedWeightsAreThereWithEveryBlockOfTheirs(self):
        engine = self.engine(model())
        self.assertIs(engine.module.embedding.weight, engine.module.head.weight)
        wanted = model().embedding.weight
        for block in ("embedding", "head"):
            with engine.weights_of(block):
                self.assertTrue(torch.equal(wanted, engine.module.head.weight.cpu()))
        self.assert_error(r'embedding\.weight: is read .*weights_of\("embedding"\)',
                          engine.module.head.weight.data_ptr)

    @unittest.skipUnless(hasattr(torch, "compile"), "PyTorch before 2.0")
    def test_InACompiledFunction(self):
        engine = self.engine(lines(None, None))
        compiled = torch.compile(lambda x, weight: F.linear(x, weight), backend="eager")
        with torch.no_grad(), self.assertRaisesRegex(Exception, "is read outside of its block"):
            compiled(X, engine.module[0].linear.weight)
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)

    @unittest.skipUnless(hasattr(torch.nn.Module, "compile"), "PyTorch before 2.2")
    def test_CompiledModulesFindTheirWeights(self):
        def step(compiled, whole=None):
            network = compiled(lines(None, None))
            engine = self.engine(network)
            run = whole(network) if whole else engine
            engine.backward(loss := run(X).pow(2).mean())
            found = loss.item(), engine.step().gradient_norm
            engine.close()
            return found

        def block(network):
            network[0].compile(backend="eager")
            return network

        def inside(network):
            network[0].linear.compile(backend="eager")
            return network

        def wrapped(network):
            return torch.nn.Sequential(torch.compile(network[0], backend="eager"), network[1])

        wanted = step(lambda network: network)
        for compiled in (block, inside, wrapped):
            self.assertEqual(wanted, step(compiled), compiled.__name__)
        self.assertEqual(wanted, step(lambda network: network, lambda network: torch.compile(network, backend="eager")))

    @unittest.skipUnless(hasattr(torch.nn.Module, "compile"), "PyTorch before 2.2")
    def test_WhatCompilesAgainFindsNoGradientOfTheEngines(self):
        def losses(compiled):
            network = lines(None, None)
            if compiled:
                network[0].compile(backend="eager")
            engine = self.engine(network, config(self.folder, accumulation=2))
            found = []
            for rows in range(2, 6):  # each of another shape, the second of a step after a backward()
                x = torch.linspace(-1, 1, rows * 8).view(rows, 8).to(DEVICE)
                engine.backward(loss := engine(x).pow(2).mean())
                engine.step()
                found.append(loss.item())
            with torch.no_grad():
                found.append(engine(torch.ones(7, 8, device=DEVICE)).sum().item())
            engine.close()
            return found

        self.assertEqual(losses(False), losses(True))


class Overlapping(Case):
    def test_TheLeaseThatEndsLastTakesTheValuesAway(self):
        network = model()
        engine = self.engine(network)
        for order in ((0, 1), (1, 0)):
            leases = [engine.weights_of(block) for block in ("head", "embedding")]  # of one weight
            for lease in leases:
                lease.__enter__()
            for index in order:
                self.assertTrue(torch.isfinite(network.head.weight.sum()))
                leases[index].end()
            self.assertIsInstance(network.head.weight, away.AwayParameter)
        engine.close()
        self.assert_error("its engine has ended", network.head.weight.sum)

    def test_AnExceptionCountsAlsoWhereItKeepsALease(self):
        class Mine(Exception):
            pass

        network = model()
        with self.assertRaises(Mine):
            with spillway.Engine(network, config(self.folder)) as engine:
                engine.weights_of("head").__enter__()
                raise Mine
        with self.assertRaisesRegex(spillway.Error, "it is closed"):
            engine.describe()


class Known(Case):
    def test_WithoutValues(self):
        for more in ({}, {"bf16": {"enabled": True}}):
            engine = self.engine(lines(None, None), config(self.folder, **more))
            weight, alone = engine.module[0].linear.weight, torch.nn.Parameter(torch.zeros(8, 8, dtype=engine.dtype))
            for name in ("shape", "dtype", "layout", "ndim", "requires_grad", "grad", "grad_fn", "is_leaf",
                         "is_sparse", "is_quantized", "is_meta"):
                self.assertEqual(getattr(alone, name), getattr(weight, name), name)
            for name in ("size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous", "ndimension",
                         "is_floating_point", "is_complex", "__len__", "storage_offset"):
                self.assertEqual(getattr(alone, name)(), getattr(weight, name)(), name)
            self.assertEqual((DEVICE, id(weight), 8), (weight.device.type, hash(weight), weight.size(1)))
            self.assertEqual(alone.to(DEVICE).type(), weight.type())
            self.assertIsInstance(weight, torch.nn.Parameter)
            self.assertTrue(torch.is_tensor(weight) and torch.is_floating_point(weight))
            self.assertEqual([0.0] * 8, torch.zeros_like(weight)[0].tolist())
            self.assertEqual(engine.dtype, X.double().to(weight).dtype)
            for text in (repr(weight), f"{weight}", str([weight])):
                self.assertIn("0.linear.weight, while its block is away: (8, 8)", text)
            engine.close()

    def test_WhatLoopsDoWithParameters(self):
        engine = self.engine(lines(None, None))
        parameters = list(engine.module.parameters())
        self.assertEqual(4, len({id(p) for p in parameters}))
        self.assertEqual(144, sum(p.numel() for p in engine.module.parameters()))
        self.assertIn(parameters[0], parameters)
        optimizer = torch.optim.AdamW(engine.module.parameters())
        optimizer.zero_grad()
        optimizer.step()  # of no gradients
        for p in parameters:
            p.grad = None
            p.requires_grad_(True)
            p.register_hook(print)
            p.note = "kept"
        engine.module.train().eval().train()
        self.assertEqual(0.0, float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)))
        for unused in (False, True):
            self.assert_error(r"0\.linear\.weight: its gradient was requested, but gradients of weights go only to ",
                              torch.autograd.grad, engine(X).sum(), parameters, allow_unused=unused)
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)
        self.assertEqual("kept", parameters[0].note)
        self.assertIs(parameters[0], engine.module[0].linear.weight)

    def test_AStateOfTheWholeModelAndNotOfPartsOfABlock(self):
        engine, alone = self.engine(lines(None, None)), lines(None, None)
        for found, wanted in ((engine.state_dict(), alone.state_dict()),
                              (engine.module[1].state_dict(keep_vars=True), alone[1].state_dict())):
            self.assertEqual(list(wanted), list(found))
            for name, value in wanted.items():
                self.assertTrue(torch.equal(value, found[name].cpu()), name)
            torch.save(found, io.BytesIO())
        part = engine.module[0].linear.state_dict()
        self.assertTrue(torch.equal(alone[0].linear.weight, part["weight"].cpu()))
        self.assertIs(torch.Tensor, type(part["weight"]))
        with engine.weights_of("0"):
            self.assertTrue(torch.equal(alone[0].linear.weight, engine.module[0].linear.state_dict()["weight"].cpu()))

    def test_AParameterOfAClassOfItsOwn(self):
        class Marked(torch.nn.Parameter):
            mark = "marked"

        network = lines(None, None)
        network[0].linear.weight = Marked(network[0].linear.weight.data)
        engine = self.engine(network)
        for _ in range(2):
            weight = engine.module[0].linear.weight
            if DEVICE == "cpu":  # else another takes its place
                self.assertIsInstance(weight, Marked)
            self.assert_error(INSIDE, weight.data_ptr)
            engine.backward(engine(X).sum())
            engine.step()


class Adapters(Case):
    """A frozen model with trained additions, beside which a reference pass runs."""

    class Adapted(Line):
        def __init__(self):
            super().__init__()
            self.linear.requires_grad_(False)
            self.a = torch.nn.Parameter(torch.randn(8, 2) / 3)
            self.b = torch.nn.Parameter(torch.zeros(2, 8))
            self.on = True

        def forward(self, x):
            return self.linear(x) + (x @ self.a @ self.b if self.on else 0)

    def network(self):
        torch.manual_seed(3)
        return torch.nn.Sequential(*(self.Adapted() for _ in range(3)))

    def loss(self, engine, x, reference):
        with torch.no_grad():
            for block in engine.module:
                block.on = False
            wanted = reference(x)
            for block in engine.module:
                block.on = True
        return F.softplus(wanted - engine(x)).mean()

    def test_AReferenceMayReadAWeightOutside(self):
        engine = self.engine(self.network())

        def outside(x):  # the last layer by hand, as a loss does that cuts logits into chunks
            head = engine.module[2].linear
            return F.linear(engine.module[:2](x), head.weight, head.bias)

        def inside(x):
            with engine.weights_of("2"):
                return outside(x)

        losses = [self.loss(engine, X, reference) for reference in (outside, inside, engine)]
        self.assertEqual(losses[:1] * 3, losses)
        engine.backward(losses[0])
        self.assertGreater(engine.step().gradient_norm, 0)


class Loops(Case):
    def test_AnEvaluationMayReadTheHeadOutside(self):
        """As a trainer's compute_loss does, of the hidden states."""
        engine = self.engine(model())
        network, ids = engine.module, batches(1)[0]
        with torch.no_grad():
            hidden = network.norm(network.embedding(ids))
            wanted = network.head(hidden).tolist()
            self.assertEqual(wanted, F.linear(hidden, network.head.weight).tolist())
            with engine.weights_of("head"):
                self.assertEqual(wanted, F.linear(hidden, network.head.weight).tolist())


if __name__ == "__main__":
    main()
