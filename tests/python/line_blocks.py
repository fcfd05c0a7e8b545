"""Linear layers as blocks, which do what a test has them do."""
from case import Case as Folder

import torch
from torch.nn import functional as F

from toy_model import DEVICE


class ScaledHead(torch.nn.Module):
    """Takes a weight as an argument."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(8))

    def forward(self, x, weight):
        return F.linear(x * self.scale, weight)


class Line(torch.nn.Module):
    """A linear layer that shows its result, or its argument, to `change`, which may replace it."""

    def __init__(self, change=lambda self, x: x):
        super().__init__()
        self.linear, self.change = torch.nn.Linear(8, 8), change
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, *more, **keywords):
        return self.change(self, self.linear(x))


def lines(*changes):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(Line(change) if change else Line() for change in changes))


X = torch.linspace(-1, 1, 16).view(2, 8).to(DEVICE)


class Case(Folder):
    def engine(self, network, configuration=None, **options):
        return super().engine(network, configuration, on_existing="replace", **options)

    def assert_refused(self, pattern, *changes, forward=True):
        engine = self.engine(lines(*changes))
        if forward:
            self.assert_error(pattern, engine, X)
        else:
            self.assert_error(pattern, lambda: engine.backward(engine(X).sum()))
        engine.close()
