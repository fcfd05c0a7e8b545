"""What parameters have in .grad behind backward(): tensors that say where the values are.

The engine takes a block's gradients as they are made. With None in .grad a loop's own clip_grad_norm_() would find
nothing to clip, and answer 0. What looks at shapes and types, or asks whether there is a gradient, goes on; what reads
or writes values is refused. What asks no class, a C++ extension, finds NaN.
"""
import torch

from .away import AS_IN_BLOCK, KNOWN, plain
from .library import Error


class _Elsewhere(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in KNOWN or function in AS_IN_BLOCK:
            return plain(function, types, arguments, keywords or {})
        raise Error("unsupported", f"{_name(arguments)}.grad: its values are the engine's since backward(), and not "
                                   "here; gradient_clipping in the configuration says to which norm step() clips them, "
                                   "and the report that it returns has the norm before that, gradient_norm")

    def __repr__(self, **_):
        return f"a gradient that the engine has, of {self._spillway_name}"


def _name(values):
    """Of the first of them in what may be lists of lists."""
    if isinstance(values, _Elsewhere):
        return values._spillway_name
    found = (map(_name, values) if isinstance(values, (tuple, list)) else ())
    return next((name for name in found if name), "")


class Gradients:
    """Those of a model's parameters, by engine block."""

    def __init__(self, members, names):
        self._all = []
        for block, block_names in zip(members, names):
            for parameter, name in zip(block, block_names):
                if parameter.requires_grad:
                    nothing = torch.full((), float("nan"), dtype=parameter.dtype, device=parameter.device)
                    gradient = nothing.expand(parameter.shape).as_subclass(_Elsewhere)
                    gradient._spillway_name = name
                    self._all.append((parameter, gradient))

    def show(self):
        for parameter, gradient in self._all:
            parameter.grad = gradient

    def hide(self):
        for parameter, gradient in self._all:
            if parameter.grad is gradient:
                parameter.grad = None
