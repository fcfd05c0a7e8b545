"""Gradients that never exist whole: each goes into the library's memory when backward has it, and PyTorch's is freed.

Between backward() and step() a parameter's `.grad` is a tensor without values, so that everything that asks whether
there is a gradient, or drops it, works as ever: zero_grad() of optimizer, model or module, `p.grad = None`. What reads
or writes values is refused, by the words of what to do. One thing is not: transformers 5 logs a norm in each step,
which it takes as clip_grad_norm_() with a limit of infinity.
"""
import functools
import math

import torch

from ..engine.away import AS_IN_BLOCK, KNOWN, find, plain
from ..library import Error

_KEPT = {torch.Tensor.detach_, torch.Tensor.requires_grad_}  # what zero_grad(set_to_none=False) does before it zeroes
_NORMS = {torch.linalg.vector_norm}
_DIVIDES = {torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__}  # a limit by it
_ZEROES = {torch.Tensor.zero_, getattr(torch, "_foreach_zero_", torch.Tensor.zero_)}


def _refusal(name):
    return Error("unsupported", f"{name}: its values went to the optimizer in backward(), because of "
                                "stream_gradients=True; in place of clip_grad_norm_() give the optimizer "
                                "max_grad_norm=, and in place of a GradScaler loss_scale=")


class StreamedNorm(torch.Tensor):
    """Of streamed gradients: a number like any, but that nothing is clipped by it."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in _DIVIDES and arguments[1] != math.inf:
            raise _refusal("the norm of gradients")
        return super().__torch_function__(function, types, arguments, keywords)


class StreamedGradient(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in _KEPT:
            return arguments[0]
        if function in _ZEROES:
            for one in arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]:
                one._spillway_memory.zero_() if isinstance(one, StreamedGradient) else one.zero_()
            return arguments[0]
        if function in KNOWN or function in AS_IN_BLOCK:
            return plain(function, types, arguments, keywords or {})
        if function in _NORMS:
            return function(arguments[0]._spillway_memory, *arguments[1:], **keywords or {}).as_subclass(StreamedNorm)
        if function is torch.Tensor.mul_ and isinstance(arguments[1], StreamedNorm) and arguments[1] == 1:
            return arguments[0]
        raise _refusal(find((arguments, keywords or {}), StreamedGradient)._spillway_name + ".grad")

    def __repr__(self, **_):
        return f"a gradient that the optimizer has, of {self._spillway_name}"

    def __format__(self, form):
        return format(repr(self), form)


class GradientStream:
    """Hooks on the parameters of OffloadedStates, which hold on to these, and so to the memory that they write."""

    def __init__(self, states):
        self._states, self._layout, self._memory = states, states.layout, states.gradient_memory()
        self._held = [False] * len(self._memory)  # there is a micro-batch's gradient to add to
        self._handles = {}                  # by tensor

    def attach(self):
        """Also to what is trained from now on."""
        for tensor, parameter in enumerate(self._layout.parameters):
            if parameter.requires_grad and tensor not in self._handles:
                self._handles[tensor] = self._hooks(tensor, parameter)

    @torch.enable_grad()
    def _hooks(self, tensor, parameter, of_nodes=not hasattr(torch.Tensor, "register_post_accumulate_grad_hook")):
        before = parameter.register_hook(functools.partial(self._before, tensor))
        after = functools.partial(self._after, tensor)
        if not of_nodes:
            return before, parameter.register_post_accumulate_grad_hook(after)
        accumulates = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # forgotten when nobody has it
        return before, accumulates.register_hook(after), accumulates

    def detach(self):
        for before, after, *_ in self._handles.values():
            before.remove()
            after.remove()
        self._handles.clear()
        for parameter in self._layout.parameters:
            if isinstance(parameter.grad, StreamedGradient):
                parameter.grad = None

    def _before(self, tensor, _):
        """A gradient comes: PyTorch finds none to add it to."""
        parameter = self._layout.parameters[tensor]
        self._held[tensor] = isinstance(parameter.grad, StreamedGradient)
        if self._held[tensor]:
            parameter.grad = None

    @torch.no_grad()
    def _after(self, tensor, *_):
        parameter, memory = self._layout.parameters[tensor], self._memory[tensor]
        gradient = parameter.grad
        refuse_sparse(self._layout.names[tensor], gradient)
        if self._held[tensor]:  # as PyTorch adds: rounded to the gradient's type each time
            memory.add_(gradient.to(memory.device, memory.dtype))
        else:
            memory.copy_(gradient)
        nothing = torch.full((), float("nan"), dtype=gradient.dtype, device=gradient.device)
        streamed = nothing.expand(gradient.shape).as_subclass(StreamedGradient)
        streamed._spillway_name, streamed._spillway_memory = self._layout.names[tensor], memory
        parameter.grad = streamed


def refuse_sparse(name, gradient):
    if gradient.layout != torch.strided:
        raise Error("unsupported", f"{name}: its gradient is sparse; give its module sparse=False")
