"""Weights that pass between PyTorch and the library piece by piece: callbacks, and the values that they are given."""
import contextlib
import ctypes
import sys

import torch

from .library import Error, Weights


@contextlib.contextmanager
def pieces(function, elements, kind=Weights):
    """A callback with function(block, index, first, address, count), or what else `kind` is called with, the count
    last; what is raised there is raised here.

    `elements`: asked at the end, how many values the callback had to have; None: not known, of a rank's part. Ctrl-C
    may raise KeyboardInterrupt before a callback's first line, where ctypes drops it: the piece is missing then, and
    nothing else says so but Python's hook for what is dropped.
    """
    raised, seen, dropped = [], 0, []

    def guarded(_, *arguments):
        nonlocal seen
        try:
            function(*arguments)
            seen += arguments[-1]
            return 0
        except BaseException as error:  # nothing may pass through C
            raised.append(error)
            return 1

    try:
        with _dropped(dropped):
            yield kind(guarded)
    except Error:
        if raised:
            raise raised[0]
        raise
    expected = elements()
    if dropped if expected is None else seen != expected:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _dropped(interrupts):
    """Notes what Ctrl-C has raised where it is dropped."""
    def note(raised):
        if issubclass(raised.exc_type, KeyboardInterrupt):
            interrupts.append(raised.exc_type)
        hook(raised)

    hook, sys.unraisablehook = sys.unraisablehook, note
    try:
        yield
    finally:
        sys.unraisablehook = hook


def copying(values):
    """A function for pieces(), which fills them with values(block, index)."""
    def copy(block, index, first, address, count):
        if latest[0] != (block, index):
            latest[:] = [(block, index), values(block, index).detach().reshape(-1)]
        out, piece = floats(address, count), latest[1][first:first + count]
        if piece.dtype == torch.int16:  # bits of a weight type's elements (engine/packed.py), in the upper half
            out.view(torch.int32).copy_(piece.to(torch.int32) << 16)
        elif piece.dtype == torch.int32:
            out.view(torch.int32).copy_(piece)
        else:
            out.copy_(piece)

    latest = [None, None]
    return copy


def values_of(layout, weights):
    """For copying(): what weights(name) gives; None: the model's own."""
    def values(block, index):
        packed = layout.packed.get((block, index))
        if packed is not None:  # from what it has; later from what collected() gave
            return packed.bits(layout.element_bytes) if packed.has_values else weights(packed.name).view(torch.int32)
        parameter, name = layout.members[block][index], layout.names[block][index]
        found = parameter.data if weights is None else weights(name)
        if found.is_meta:
            raise Error("invalid_argument", f"{name}: is on device meta, without values; give weights=, a function "
                                            "from names to values")
        if found.shape != parameter.shape or not found.is_floating_point():
            raise Error("invalid_argument", f"{name}: weights= gave {tuple(found.shape)} of {found.dtype} where "
                                            f"the model has {tuple(parameter.shape)} of floating point")
        return found
    return values


def collected(engine, names, bytes_too=False):
    """The exact fp32 weights by name, in CPU memory; `names`: of these alone. `bytes_too`: those that are bytes as
    well, as import_weights takes them."""
    found, layout = {}, engine._layout

    def copy(block, index, first, values, count):
        name = layout.names[block][index]
        if (names is not None and name not in names) or ((block, index) in layout.packed and not bytes_too):
            return
        if name not in found:
            shape = layout.elements_of((block, index)) if (block, index) in layout.packed else \
                layout.members[block][index].shape
            found[name] = torch.empty(shape, dtype=torch.float32, device="cpu")
        found[name].view(-1)[first:first + count] = floats(values, count)

    engine.stream_out(engine._library.engine_export_weights, copy, 1)
    return found


def floats(address, count):
    return torch.frombuffer(ctypes.cast(address, ctypes.POINTER(ctypes.c_float * count)).contents, dtype=torch.float32)
