"""Writes to a model that is not trained: what EMA loops and TRL's SyncRefModelCallback do to a reference model.

    target.data.mul_(1 - alpha).add_(source.data, alpha=alpha)

A parameter of an engine that trains nothing gives a copy of its values where it is asked for `.data`, or is the first
argument of an operation in place (Written), one parameter at a time. What is written to that copy, or to a view of it,
goes to the library after each such operation, and to wherever the weight lives: the next forward pass reads it.
"""
import torch

from ..memory import address_of, plain

DATA, NEW_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__
WRITES = {"__setitem__", "__set__"} | {f"__i{name}__" for name in (
    "add sub mul matmul truediv floordiv div mod pow and or xor lshift rshift").split()}


def in_place(function):
    called = getattr(function, "__name__", "")
    return called in WRITES or called.endswith("_") and not called.endswith("__")


def writable(parameter):
    """Whether its engine trains nothing."""
    lender = parameter._spillway_lender()
    engine = lender and lender.engine()
    return engine is not None and engine._handle is not None and not engine._layout.pushes


class Written(torch.Tensor):
    """A copy of a weight's values, or a view of one."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}

        def bare(value):
            return plain(_bare, (), (value,), {}) if isinstance(value, Written) else value

        first = arguments[0] if arguments else None
        given = [bare(value) for value in arguments]
        result = function(*given, **{name: bare(value) for name, value in keywords.items()})
        for value in (first if in_place(function) else None, keywords.get("out")):
            if isinstance(value, Written):
                store(value._spillway_copy)
        if isinstance(first, Written) and in_place(function):
            return first
        if isinstance(first, Written) and isinstance(result, torch.Tensor) and \
                address_of(result) == address_of(given[0]):
            return _over(result, first._spillway_copy)
        return result


def asked(function, parameter, arguments, keywords):
    """`.data`, or an operation in place, of a parameter whose values are away."""
    if function == DATA:
        return function(_copy_of(parameter))
    (torch.Tensor.copy_ if function == NEW_DATA else function)(_copy_of(parameter), *arguments, **keywords)
    return parameter


def _bare(value):
    return value.as_subclass(torch.Tensor)


def _over(tensor, copy):
    """`copy`: (parameter, all of its values), which the tensor is or shares memory with."""
    made = tensor.as_subclass(Written)
    made._spillway_copy = copy
    return made


def _copy_of(parameter):
    engine, (owner, _) = parameter._spillway_lender().engine(), parameter._spillway_place
    block = next(block for block in engine._blocks if owner in block.engine_blocks)
    with engine.weights_of(block):
        values = plain(_bare, (), (parameter.data,), {}).clone()
    return _over(values, (parameter, values))


def store(copy):
    """Hands it to the library."""
    from .values import write  # which knows the parameters that are away, and they know what is here
    write(*copy)
