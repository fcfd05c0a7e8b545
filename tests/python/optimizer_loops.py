"""A plain PyTorch loop, as users have it, for an optimizer of PyTorch's and for one of Spillway's."""
import torch

from case import Case as Folder

import spillway

WIDTH = 24


class Network(torch.nn.Module):
    """Two experts, one of which may have nothing to do, between layers that always have."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(1)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.last = torch.nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, x, experts=(0, 1)):
        x = torch.tanh(self._linear(self.first, x))
        for expert in experts:
            x = x + torch.tanh(self._linear(self.experts[expert], x))
        return self._linear(self.last, x).float().square().mean()

    @staticmethod
    def _linear(layer, x):
        if layer.weight.dtype != torch.float16:
            return layer(x)
        return torch.nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float())  # which a CPU can


def groups_of(network):
    """Weights decay and biases do not, as most training scripts have it."""
    return [{"params": [p for p in network.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in network.parameters() if p.dim() == 1], "weight_decay": 0.0, "lr": 2e-2}]


def batches(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(6, WIDTH, generator=generator).to(dtype) for _ in range(count)]


def loop(network, optimizer, steps, *, first=0, schedule=None, accumulation=1, clip=None, scaler=None, closure=False,
         accelerator=None, bad=()):
    """Losses of the micro-batches. Expert 1 idles in steps 2 and 3; in steps of `bad` a gradient is infinite."""
    data = batches((first + steps) * accumulation, next(network.parameters()).dtype)
    losses = []

    def backward(loss):
        if accelerator is not None:
            accelerator.backward(loss)
        else:
            (scaler.scale(loss) if scaler else loss).backward()

    def gradients(step):
        optimizer.zero_grad(set_to_none=True)  # the default since PyTorch 2.0
        total = 0
        for micro in range(accumulation):
            loss = network(data[step * accumulation + micro], (0,) if step in (2, 3) else (0, 1)) / accumulation
            backward(loss)
            losses.append(loss.item())
            total += loss.item()
        if step in bad:
            next(network.parameters()).grad[0, 0] = float("inf")
        if clip is not None:
            if scaler:
                scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
        return total

    for step in range(first, first + steps):
        if closure:
            assert optimizer.step(lambda: gradients(step)) == sum(losses[-accumulation:])  # noqa: B023
        else:
            gradients(step)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        if schedule is not None:
            schedule.step()
    return losses


class Case(Folder):
    def made(self, optimizer):
        self.addCleanup(optimizer.close)
        return optimizer

    def optimizer(self, network, kind="AdamW", parameters=None, **options):
        return self.made(getattr(spillway, kind)(parameters or network.parameters(), **options))

    def on_nvme(self, name="store"):
        return {"states": "nvme", "nvme_path": str(self.folder / name)}

    def assert_near(self, expected, found, tolerance=2e-6):
        """Weights, or values of states. PyTorch rounds otherwise by an ulp of each operation: of values about 1."""
        for wanted, value in zip(expected, found, strict=True):
            self.assertLess((wanted - value).abs().max().item(), tolerance)

    def assert_same(self, expected, found):
        for wanted, value in zip(expected, found, strict=True):
            self.assertTrue(torch.equal(wanted, value))
