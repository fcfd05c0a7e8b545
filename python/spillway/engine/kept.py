"""The last block's run, kept from forward to backward: Kept.

Between its forward and its backward a model's last block, a language model's head, has nothing after it but the loss.
Its weights are still where they were, and so are the tensors that autograd saved: its backward goes on from them, and
runs nothing twice. That is a block's activations beside the loss's own, as plain PyTorch has them. Whatever else the
engine is asked for in between, another block, a step, ends it: then backward runs the block once more, as any other.
"""
import torch

from .lent import Held


class _End(torch.autograd.Function):
    """A result as the graph has it, which stays when the result itself leaves without one."""

    @staticmethod
    def forward(_, result):
        return result.detach()

    @staticmethod
    def backward(_, gradient):
        return gradient


def ends_of(leaves):
    return [_End.apply(leaf) if torch.is_tensor(leaf) and leaf.requires_grad else leaf for leaf in leaves]


class Kept(Held):
    """`ends`: results with their graph. `inside`: arguments, as the run has them. `saved`: what the graph looks at."""

    def __init__(self, engine, leases, ends, inside, saved):
        super().__init__(engine, leases.hand_over())
        self.ends, self.inside, self._saved = ends, inside, saved
        self._versions = self._now()

    def _now(self):
        return [(id(tensor), tensor._version) for tensor in [*self._saved.tensors, *self.ends]
                if torch.is_tensor(tensor)]

    def intact(self):
        """Its memory is the block's still, and nobody has written to any of it since, to a result say."""
        return bool(self.handles) and self._now() == self._versions

    def drop(self):
        """The memory is another's from here on: who still finds the graph is refused."""
        self.ends, self.inside = (), ()
        self._saved.drop()
        self.end()
