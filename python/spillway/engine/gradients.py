"""What parameters have in .grad after backward(): tensors that say where the values are.

The engine takes a block's gradients as they are made. With None in .grad a loop's own clip_grad_norm_() would find
nothing to clip, and answer 0. What looks at shapes and types, or asks whether there is a gradient, goes on; what reads
or writes values is refused. What asks no class, a C++ extension, finds NaN.
"""
import torch

from ..library import Error
from .away import AS_IN_BLOCK, KNOWN, find, plain


# What zero_grad(set_to_none=False) does, of a module, an optimizer, or PyTorch before 2.0 by itself: nothing here.
_ZEROING = {torch.Tensor.zero_, torch.Tensor.detach_, torch.Tensor.requires_grad_,
            getattr(torch, "_foreach_zero_", torch.Tensor.zero_)}


class _Elsewhere(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in _ZEROING:
            return arguments[0]
        if function in KNOWN or function in AS_IN_BLOCK:
            return plain(function, types, arguments, keywords or {})
        name = find((arguments, keywords or {}), _Elsewhere)._spillway_name
        raise Error("unsupported", f"{name}.grad: its values are the engine's since backward(), and not "
                                   "here; gradient_clipping in the configuration says to which norm step() clips them, "
                                   "and the report that it returns has the norm before that, gradient_norm")

    def __repr__(self, **_):
        return f"a gradient that the engine has, of {self._spillway_name}"

    def __format__(self, form):
        return format(repr(self), form)


class Gradients:
    """Those that a step's backward() has brought, of parameters by engine block and index in it."""

    def __init__(self, members, names):
        self._members, self._names = members, names
        self._made = {}        # by (block, index)
        self._brought = set()  # in this step
        self._shown = []       # (parameter, gradient)

    def begin_step(self):
        self._brought.clear()

    def bring(self, block, index):
        self._brought.add((block, index))

    def brought(self, block, index):
        """In this step."""
        return (block, index) in self._brought

    def show(self):
        for block, index in self._brought:
            parameter = self._members[block][index]
            gradient = self._made.get((block, index))
            if gradient is None:
                nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
                gradient = nothing.expand(parameter.shape).as_subclass(_Elsewhere)
                gradient._spillway_name = self._names[block][index]
                self._made[block, index] = gradient
            self._shown.append((parameter, gradient))
            parameter.grad = gradient

    def hide(self):
        for parameter, gradient in self._shown:
            if parameter.grad is gradient:
                parameter.grad = None
        self._shown = []
