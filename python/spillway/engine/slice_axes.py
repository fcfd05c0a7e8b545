"""Along which axis a batch lies in a block's arguments and results: found by runs of the block on one slice, on another
and on both, and proven by their values.

What one would like to know of an argument, whether it scales with the batch, its shape does not say: a table of as many
positions as the batch has rows looks like a batch. So the block is asked: it runs on two slices and on both together,
and what it gives for the two must be what it gives for both. If it does not, an argument is taken to be no batch's, or
to have several rows for each of the batch; if nothing fits, rows depend on each other, and slices are refused.
"""
import contextlib
import itertools

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..library import Error
from .left import Attributes
from .runs import random_states, set_random_states
from .visits import _run

MOST = 32  # assignments of axes that are tried


class Axes:
    """`inputs`: (axis, rows of it for each of the batch) or None, `outputs`: axis or None; `sizes`: of slices; `left`:
    axes of what is left in attributes and grows with the batch."""

    def __init__(self, inputs, outputs, sizes, left=()):
        self.inputs, self.outputs, self.sizes, self.left = inputs, outputs, sizes, left


def sizes_of(rows, slices):
    slices = max(1, min(rows, slices))
    return [rows // slices + (i < rows % slices) for i in range(slices)]


def piece(value, axis, sizes, number):
    """A slice's part of an argument: a view."""
    axis, factor = axis
    return value.narrow(axis, sum(sizes[:number]) * factor, sizes[number] * factor)


def whole(flat):
    return Axes([None] * len(flat), None, [1])


class AxesOf:
    """Of an engine's blocks, by what their arguments look like."""

    def __init__(self, slices):
        self.slices, self._known = slices, {}

    def find(self, engine, block, flat, spec):
        """While the block's weights are there."""
        primary = _primary(flat)
        if self.slices == 1 or primary is None or flat[primary].shape[0] < 2:
            return whole(flat)
        form = (id(block), _form(flat, flat[primary].shape[0], spec), block.module.training)
        known, step = self._known.get(form), engine.steps_begun + 1
        again = known is not None and step & (step - 1) == 0 and step > known[2]
        if known is None or again:
            _refuse_batch_norm(block)
            found = self._search(engine, block, flat, spec, primary, known and known[0])
            known = self._known[form] = (*found, step)
        inputs, (outputs, left), _ = known
        axis, factor = inputs[primary]
        return Axes(inputs, outputs, sizes_of(flat[primary].shape[axis] // factor, self.slices), left)

    def _search(self, engine, block, flat, spec, primary, known):
        """(inputs, (outputs, left)) that give the same result. `known`: the inputs that did in an earlier step."""
        why = ""
        for axis in range(min(2, flat[primary].dim())):
            rows = flat[primary].shape[axis]
            if rows < 2:
                continue
            sizes = sizes_of(rows, self.slices)[:2]
            choices = [[(axis, 1)] if i == primary else _choices(value, rows) for i, value in enumerate(flat)]
            for inputs in itertools.islice(itertools.product(*choices), MOST) if known is None else [known]:
                outputs, reason = _compare(engine, block, flat, spec, inputs, sizes)
                if outputs is not None:
                    return inputs, outputs
                why = why or reason
            if known is not None:
                break
        raise Error("unsupported", f"{block.name}: gives another result for two slices of a batch than for both "
                                   f"together ({why}), so that its rows depend on each other, as in a BatchNorm, a "
                                   "loss, or experts of limited capacity; set spillway.block_slices to 1")


def _primary(flat):
    """The argument that the others are compared with: the first that wants a gradient, else the first of two axes."""
    tensors = [i for i, value in enumerate(flat) if torch.is_tensor(value) and value.dim() > 0]
    for rule in (lambda value: value.requires_grad, lambda value: value.dim() > 1, lambda value: True):
        for i in tensors:
            if rule(flat[i]):
                return i
    return None


def _form(flat, rows, spec):
    def of(value):
        if torch.is_tensor(value):
            return (value.dtype, *((1 if n == 1 else "rows" if n == rows else "more" if n % rows == 0 else "other")
                                   for n in value.shape))
        return value if isinstance(value, (bool, str, type(None))) else type(value)
    return tuple(map(of, flat)), repr(spec)


def _choices(value, rows):
    if not torch.is_tensor(value):
        return [None]
    several = [(axis, n // rows) for axis, n in enumerate(value.shape) if n > rows and n % rows == 0]
    return [(axis, 1) for axis, n in enumerate(value.shape) if n == rows] + [None] + several


def _refuse_batch_norm(block):
    for name, module in block.module.named_modules():
        if module.training and isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            raise Error("unsupported", f"{block.name}: {name or 'it'} is a {type(module).__name__}, whose statistics "
                                       "are of the whole batch; call its eval(), or set spillway.block_slices to 1")


def _compare(engine, block, flat, spec, inputs, sizes):
    """(axes of results, None), or (None, why not). With random numbers, by what the block does without dropout."""
    before = random_states(engine)
    try:
        found = _compared(engine, block, flat, spec, inputs, sizes)
        if not _same_states(before, random_states(engine)):
            with _without_dropout(block):
                found = _compared(engine, block, flat, spec, inputs, sizes)
        return found
    finally:
        set_random_states(engine, before)


def _compared(engine, block, flat, spec, inputs, sizes):
    both = [sum(sizes), max(1, sum(sizes))]
    runs, left = [], []
    for pieces, number in ((sizes, 0), (sizes, 1), (both, 0)):
        values = [value if axis is None else piece(value, axis, pieces, number) for value, axis in zip(flat, inputs)]
        arguments, keywords = tree_unflatten(values, spec)
        try:
            with torch.no_grad(), Attributes(block, engine.others) as attributes:
                leaves, form = tree_flatten(_run(engine, block, arguments, keywords))
            runs.append((engine.without_weights(leaves), form))
            left.append(attributes.left)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if isinstance(error, Error):
                raise
            return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    (one, form), (other, form_of_other), (together, form_of_both) = runs
    if not form == form_of_other == form_of_both:
        return None, "of another form"
    outputs = []
    for a, b, result in zip(one, other, together):
        axis, why = _axis_of_result(engine, a, b, result, sizes)
        if why is not None:
            return None, why
        outputs.append(axis)
    beside = {}
    for place in left[2]:
        if all(place in each for each in left):
            axis, _ = _axis_of_result(engine, *(each[place] for each in left), sizes)
            if axis is not None:
                beside[place] = axis
    return (outputs, beside), None


def _axis_of_result(engine, one, other, both, sizes):
    if not torch.is_tensor(both):
        same = not torch.is_tensor(one) and not torch.is_tensor(other) and one == other == both
        return None, None if same else f"a {type(both).__name__} that depends on the slice"
    if one.dim() != both.dim() or other.dim() != both.dim():
        return None, "of another number of axes"
    grown = [axis for axis in range(both.dim()) if one.shape[axis] != both.shape[axis]]
    if not grown:
        same = one.shape == other.shape and not (_differ(engine, one, both) or _differ(engine, other, both))
        return None, None if same else "a result that all rows have in common differs"
    if len(grown) > 1 or both.shape[grown[0]] % sum(sizes) or \
            one.shape[grown[0]] * sum(sizes) != both.shape[grown[0]] * sizes[0] or \
            one.shape[grown[0]] + other.shape[grown[0]] != both.shape[grown[0]]:
        return None, "a result does not grow with the batch along one axis"
    return (grown[0], None) if not _differ(engine, torch.cat([one, other], grown[0]), both) else (None, "values differ")


def _differ(engine, one, other):
    """By more than the order of additions explains, which matrix products of other sizes change: in any vector along
    the last axis, a token's."""
    if not other.is_floating_point():
        return not torch.equal(one, other)
    tolerance = max(torch.finfo(dtype).eps for dtype in (other.dtype, engine.dtype)) ** (2 / 3)
    one, other = torch.atleast_1d(one).double(), torch.atleast_1d(other).double()
    same = (one == other) | (one.isnan() & other.isnan())
    lengths = torch.where(other.isfinite(), other, torch.zeros_like(other)).norm(dim=-1)
    differences = torch.where(same, torch.zeros_like(one), one - other).norm(dim=-1)
    return not bool((differences <= tolerance * (lengths + lengths.square().mean().sqrt())).all())


def _same_states(one, other):
    for a, b in zip(one, other):
        if torch.is_tensor(a):
            if not torch.equal(a, b):
                return False
        elif a is not None and repr(a) != repr(b):  # of numpy an array is in it, whose middle repr() leaves out
            return False
    return True


@contextlib.contextmanager
def _without_dropout(block):
    """Modules that keep statistics stay as they are: in eval() they would not show that they mix rows."""
    changed = [module for module in block.module.modules() if module.training and not any(
        name.startswith("running_") for name in module._buffers)]
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True
