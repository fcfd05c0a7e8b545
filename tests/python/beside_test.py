"""What a block leaves beside its result, and what its second run needs, trains as in plain PyTorch."""
from case import Case as Folder, main

import torch

from line_blocks import Line, X, lines
from toy_model import DEVICE, config

STEPS = 3


class Case(Folder):
    def assert_trains(self, make, loss_of, close=1e-5, **options):
        """`loss_of`: of a model and how often it has been called; tensors that are compared, too, are given back."""
        engine = self.engine(make(), config(self.folder, **options), on_existing="replace")
        alone = make().to(DEVICE)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.01)
        for step in range(STEPS):
            torch.manual_seed(step)
            loss = loss_of(engine.module, step)
            engine.backward(loss)
            torch.manual_seed(step)
            wanted = loss_of(alone, step)
            wanted.backward()
            self.assertAlmostEqual(wanted.item(), loss.item(), delta=2e-6 * abs(wanted.item()))
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
            self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5 * norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        state, values = engine.module.state_dict(), alone.cpu().state_dict()
        for name, value in values.items():
            self.assertLess((state[name].cpu().float() - value.float()).abs().max().item(), close, name)
        engine.close()
        return engine.module


class Router(Line):
    """Leaves what its gate says in an attribute."""

    def __init__(self):
        super().__init__()
        self.gate, self.losses = torch.nn.Linear(8, 3, bias=False), []

    def forward(self, x):
        logits = self.gate(x)
        self.logits, self.kept = torch.softmax(logits, -1), {"parts": [logits * 2, logits.sum()]}
        return self.linear(x) + logits.sum(-1, keepdim=True)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.blocks = torch.nn.ModuleList([Line(), Router(), Router()])
        self.losses = []

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Left(Case):
    def test_InAttributes(self):
        def loss_of(network, _):
            result = network(X).pow(2).mean()
            routers = network.blocks[1:]
            return result + sum(0.1 * each.logits.pow(2).sum() + each.kept["parts"][0].abs().mean() for each in routers)

        for device in ("nvme", "cpu"):
            self.assert_trains(Model, loss_of, device=device)

    def test_OneOfThemAlone(self):
        def loss_of(network, step):
            network(X)
            return network.blocks[1 + step % 2].logits.pow(2).sum()

        self.assert_trains(Model, loss_of)

    def test_InAListOfTheModels(self):
        def make():
            network = Model()
            for block in network.blocks:
                block.change = lambda self, x: (network.losses.append(x.pow(2).mean()), x)[1]
            return network

        def loss_of(network, _):
            network.losses.clear()
            loss = network(X).sum() + sum(network.losses)
            self.assertEqual(1, len(network.losses))
            return loss

        self.assert_trains(make, loss_of)

    def test_ByHooksOfInnerModules(self):
        def loss_of(network, _):
            taken, handles = [], []
            for block in network.blocks[1:]:
                handles.append(block.gate.register_forward_hook(lambda module, given, result: taken.append(result)))
            result = network(X).pow(2).mean()
            for handle in handles:
                handle.remove()
            self.assertEqual(2, len(taken))
            return result + 0.1 * sum(each.pow(2).sum() for each in taken)

        self.assert_trains(Model, loss_of)

    def test_ByAHookThatTakesTheResultItself(self):
        def loss_of(network, _):
            taken = []
            handle = network[1].linear.register_forward_hook(lambda module, given, result: taken.append(result))
            result = network(X).sum()
            handle.remove()
            return result * taken[0].pow(2).mean()

        self.assert_trains(lambda: lines(None, None), loss_of)

    def test_ByAForwardThatIsReplaced(self):
        """As older versions of transformers record what inner modules return."""
        def loss_of(network, _):
            taken, plain = [], network.blocks[2].gate.forward
            network.blocks[2].gate.forward = lambda x: (taken.append(plain(x)), taken[-1])[1]
            result = network(X).pow(2).mean()
            del network.blocks[2].gate.forward
            return result + taken[0].pow(2).sum()

        self.assert_trains(Model, loss_of)

    def test_OneStepsIsNotKeptByTheNext(self):
        import weakref

        engine = self.engine(Model(), config(self.folder))
        marks = []
        for _ in range(3):
            engine.backward(engine(X).sum() + engine.module.blocks[1].logits.sum())
            marks.append(weakref.ref(engine.module.blocks[1].logits.grad_fn.mark))
            engine.step()
        self.assertEqual([None, None], [mark() for mark in marks[:2]])


class Second(Case):
    """Runs under the conditions of the first."""

    def test_TrainedBatchNorm(self):
        def make():
            torch.manual_seed(5)
            return torch.nn.Sequential(*(torch.nn.Sequential(
                torch.nn.Linear(8, 8, bias=False), torch.nn.BatchNorm1d(8), torch.nn.Tanh()) for _ in range(2)))

        rows = torch.linspace(-1, 1, 48).view(6, 8).to(DEVICE)

        def loss_of(network, step):
            with torch.no_grad():
                network.eval()(rows)
            return network.train()(rows * (1 + step)).pow(2).mean()

        network = self.assert_trains(make, loss_of, close=3e-5)  # of small gradients, which Adam makes steps of
        self.assertEqual(STEPS, network[0][1].num_batches_tracked.item())

    def test_BuffersOfAnyKind(self):
        def averages(self, x):
            self.count.mul_(0.9).add_(x.detach().mean())
            return x + self.count

        def replaces(self, x):
            self.count = self.count * 0.9 + 0.1
            return x * self.count

        def loss_of(network, _):  # the second pass changes what the first one was computed with
            return network(X).pow(2).mean() + network(2 * X).mean()

        for change in (averages, replaces):
            network = self.assert_trains(lambda: lines(change, None, change), loss_of)  # noqa: B023
            self.assertNotEqual(0, network[0].count.item())

    def test_ModesThatChangeInBetween(self):
        def make():
            torch.manual_seed(6)
            return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5))
                                         for _ in range(2)))

        def loss_of(network, _):
            loss = network.train()(X).pow(2).mean()
            network.eval()
            return loss

        self.assert_trains(make, loss_of)

    def test_CountersCountOnce(self):
        def counts(self, x):
            self.runs = getattr(self, "runs", 0) + 1
            return x * self.runs

        network = self.assert_trains(lambda: lines(None, counts), lambda network, _: network(X).pow(2).mean())
        self.assertEqual(STEPS, network[1].runs)

    def test_AParameterThatIsFrozenForAPass(self):
        def loss_of(network, step):
            network[0].requires_grad_(False)
            loss = network(X).pow(2).mean()
            network[0].requires_grad_(True)
            return loss if step == 1 else loss + network(2 * X).sum()

        self.assert_trains(lambda: lines(None, None), loss_of)

    def test_Autocast(self):
        def loss_of(network, step):
            with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=step != 1):
                result = network(X)
                self.assertEqual(torch.float32 if step == 1 else torch.bfloat16, result.dtype)
            return result.float().pow(2).mean()

        engine = self.engine(lines(None, None), config(self.folder))
        alone = lines(None, None).to(DEVICE)
        optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, weight_decay=0.01)
        with torch.autocast(DEVICE, dtype=torch.bfloat16):  # a loop that is inside of one as a whole
            for step in range(STEPS):
                loss, wanted = loss_of(engine.module, step), loss_of(alone, step)
                self.assertAlmostEqual(wanted.item(), loss.item(), delta=1e-3 * wanted.item())
                if step == 0:
                    self.assertEqual(wanted.item(), loss.item())
                engine.backward(loss)
                wanted.backward()
                norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
                self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=2e-3 * norm)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                torch.clear_autocast_cache()  # which PyTorch alone needs here, as its weights have changed
            values = alone.state_dict()
            for name, value in engine.module.state_dict().items():
                self.assertLess((value - values[name].cpu()).abs().max().item(), 1e-4, name)


class Calls(Case):
    def test_ThatMoveNothing(self):
        network = lines(None)
        network.register_buffer("seen", torch.zeros(3))
        engine = self.engine(network, config(self.folder))
        for call in (lambda: network.to(engine.device), lambda: network.to(torch.float32), network.float,
                     lambda: network.to(engine.device, torch.float32), lambda: network[0].to(X)):
            self.assertIn(call(), (network, network[0]))
        self.assert_error("weights are Spillway's, torch.float32 on .*, and cannot be moved or converted",
                          network.bfloat16)
        self.assertEqual(torch.float32, network.seen.dtype)
        engine.backward(engine(X).sum())
        self.assertEqual(1, engine.step().step)

    def test_ThatMoveBuffersAlone(self):
        network = lines(None)
        engine = self.engine(network, config(self.folder, bf16={"enabled": True}))
        self.assertEqual(torch.float32, network[0].count.dtype)
        network.bfloat16()
        self.assertEqual(torch.bfloat16, network[0].count.dtype)
        engine.backward(engine(X.bfloat16()).sum())
        self.assertEqual(1, engine.step().step)


if __name__ == "__main__":
    main()
