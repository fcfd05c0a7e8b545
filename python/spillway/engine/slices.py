"""A block's visit in parts: the slices of a batch, and several micro-batches, under one lease of its weights.

Each part is a visit of its own (visits.py), for which autograd's context and the engine are played by what is here: its
weights are there, and its gradients are summed. So all of a visit's rules hold for a part, and what is in memory inside
of the block is one part's. To autograd, all parts are one node:

    forward   acquire the block · for each part: its forward · join results · release
    backward  acquire the block · for each part: its forward again, its gradients · join, push the sums · release

Sums are in fp32, in the order of the parts, and rounded once when they are pushed: as the engine adds micro-batches.
Random numbers are drawn part by part.
"""
import contextlib

import torch
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_unflatten

from ..library import BACKWARD, FORWARD, Error
from .slice_axes import piece
from .visits import _Record, _Visit, anchor_of


class _Context:
    """Autograd's, of a part."""

    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors

    def set_materialize_grads(self, _):
        pass

    def mark_non_differentiable(self, *tensors):
        self.constant = {id(tensor) for tensor in tensors}


class _Around:
    """The engine as a part sees it."""

    def __init__(self, engine):
        self._engine, self._sums, self._own = engine, {}, set()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def weights_of(self, *_):
        return contextlib.nullcontext()

    def push(self, entries, gradients):
        for (_, *place), gradient in zip(entries, gradients):
            place = tuple(place)
            before = self._sums.get(place)
            if gradient is None:
                continue
            if before is None:
                self._sums[place] = gradient
            elif place in self._own:
                before.add_(gradient)
            else:  # what autograd gave may be a view of something else
                self._own.add(place)
                self._sums[place] = before.float() + gradient

    def push_sums(self, block):
        self._engine.push(block.trainable, [self._sums.get(entry[1:]) for entry in block.trainable])


class _Call:
    """One call of the block in a visit: a micro-batch's."""

    def __init__(self, spec, count, mark, anchor):
        self.spec, self.count, self.mark, self.anchor = spec, count, mark, anchor
        self.axes = self.parts = self.record = None

    def forward(self, engine, block, flat, axes, alone):
        """Results, whole, and which of them are constant. `alone`: no other call of the block is in the visit, in whose
        place what this one leaves would be left."""
        self.axes, self.parts, whole, constant, outputs = axes, [], [], [], axes.outputs
        for number, size in enumerate(axes.sizes):
            part, record = _Context(), _Record()
            record.mark = self.mark
            values = [self._piece(value, axis, number) for value, axis in zip(flat, axes.inputs)]
            leaves = _Visit.forward(part, engine, block, self.spec, record, self.anchor, *values)
            if len(leaves) > record.results and not (alone and len(axes.sizes) == 1):
                outputs = axes.outputs + _axes_left(block, part.left, axes.left if alone else {})
            del part.saved_tensors  # the visit has them
            self.parts.append(part)
            if number == 0:
                self.record = record
                constant = [id(leaf) in part.constant for leaf in leaves]
                self.outputs = (outputs or []) + [None] * (len(leaves) - len(outputs or []))
                whole = [self._room(leaf, axis) for leaf, axis in zip(leaves, self.outputs)]
            elif record.spec != self.record.spec or len(leaves) != len(whole):
                _refuse_other_form(block)
            self._join(block, whole, leaves, number)
        if len(self.parts) > 1:
            for place, tensor in zip(part.left.attributes, whole[self.record.results:]):
                part.left.put(place, tensor)
        return whole, constant

    def _piece(self, value, axis, number):
        if axis is None:
            return value
        return piece(value, axis, self.axes.sizes, number).detach().requires_grad_(value.requires_grad)

    def _room(self, leaf, axis):
        if axis is None:
            return leaf
        shape = list(leaf.shape)
        shape[axis] = shape[axis] // self.axes.sizes[0] * sum(self.axes.sizes)
        return leaf.new_empty(shape)

    def _join(self, block, whole, leaves, number):
        for result, leaf, axis in zip(whole, leaves, self.outputs if self.axes.outputs else ()):
            if axis is None:
                if torch.is_tensor(leaf) != torch.is_tensor(result) or not torch.is_tensor(leaf) and leaf != result:
                    _refuse_other_form(block)
                continue
            place = _place(result, axis, self.axes.sizes, number)
            if place.shape != leaf.shape or place.dtype != leaf.dtype:
                _refuse_other_form(block)
            place.copy_(leaf)

    def backward(self, engine, flat, gradients):
        """Of the arguments. A result that is no batch's is the first part's."""
        wants = [torch.is_tensor(value) and wanted for value, wanted in zip(flat, self.wants())]
        sums = [None] * len(flat)
        for number, part in enumerate(self.parts):
            given = [gradient if gradient is None or (axis is None and number == 0) else
                     None if axis is None else _place(gradient, axis, self.axes.sizes, number)
                     for gradient, axis in zip(gradients, self.outputs)]
            if all(gradient is None for gradient in given):
                continue
            values = [value if axis is None else piece(value, axis, self.axes.sizes, number)
                      for value, axis in zip(flat, self.axes.inputs)]
            part.saved_tensors = tuple(value for value in values if torch.is_tensor(value))
            with torch.no_grad():
                found = _Visit.backward(part, *given)
            del part.saved_tensors
            for i, gradient in enumerate(found[len(found) - len(flat):]):
                if gradient is not None and wants[i]:
                    sums[i] = self._add(sums[i], gradient, flat[i], i, number)
        return [found if found is None else found.to(value.dtype) for found, value in zip(sums, flat)]

    def wants(self):
        return self.parts[0].wants

    def _add(self, before, gradient, value, i, number):
        axis = self.axes.inputs[i]
        if axis is None:
            return gradient if before is None else before.float() + gradient
        if before is None:
            before = torch.zeros_like(value) if len(self.parts) > 1 else torch.empty_like(value)
        piece(before, axis, self.axes.sizes, number).copy_(gradient)
        return before


def _place(whole, axis, sizes, number):
    """Of a part's result in the whole, which may have several rows for each of the batch."""
    return piece(whole, (axis, whole.shape[axis] // sum(sizes)), sizes, number)


def _axes_left(block, left, axes):
    """Of what a slice leaves in attributes. What a hook takes it would take once a slice."""
    if left.outputs or any(place not in axes or place[2] for place in left.attributes):
        raise Error("unsupported", f"{block.name}: leaves a value beside its result, by a hook say, or in an attribute "
                                   "that does not grow with the batch, which has no place where a batch goes through "
                                   "in parts; set spillway.block_slices to 1, and call backward() for each micro-batch")
    return [axes[place] for place in left.attributes]


def _refuse_other_form(block):
    raise Error("unsupported", f"{block.name}: returns for one slice of a batch something of another form, or another "
                               "value, than for another; set spillway.block_slices to 1")


class Sliced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, engine, block, calls, plan, mark, anchor, *flat):
        """`plan`: from (call, its arguments) to Axes, asked while the weights are there. `mark`: there is one as long
        as the graph."""
        ctx.engine, ctx.block, ctx.lender, ctx.calls, ctx.mark = engine, block, engine.lender, calls, mark
        ctx.others = [None if torch.is_tensor(value) else value for value in flat]
        ctx.tensors = [i for i, value in enumerate(flat) if torch.is_tensor(value)]
        ctx.save_for_backward(*(flat[i] for i in ctx.tensors))
        ctx.set_materialize_grads(False)
        results, constants, first = [], [], 0
        with engine.weights_of(block, FORWARD):
            around = _Around(engine)
            for call in calls:
                arguments = flat[first:first + call.count]
                first += call.count
                leaves, constant = call.forward(around, block, arguments, plan(call, arguments), len(calls) == 1)
                call.results = len(leaves)
                results += leaves
                constants += [leaf for leaf, is_constant in zip(leaves, constant) if is_constant]
        ctx.mark_non_differentiable(*constants)
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        engine, flat, found, first = ctx.engine, list(ctx.others), [], 0
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors):
            flat[i] = tensor
        with engine.weights_of(ctx.block, BACKWARD):
            around, given = _Around(engine), iter(gradients)
            for call in ctx.calls:
                for part in call.parts:
                    part.engine = around
                arguments = flat[first:first + call.count]
                first += call.count
                found += call.backward(around, arguments, [next(given) for _ in range(call.results)])
            around.push_sums(ctx.block)
        return (None,) * 6 + tuple(found)


NODES = (_Visit._backward_cls, Sliced._backward_cls)  # of visits, in autograd's graph


def visit_in_parts(engine, block, calls, plan, mark):
    """Results of calls, (flat arguments, spec) each."""
    anchor = anchor_of(engine, block)
    made = [_Call(spec, len(flat), mark, anchor) for flat, spec in calls]
    leaves = iter(Sliced.apply(engine, block, made, plan, mark, anchor,
                               *(value for flat, _ in calls for value in flat)))
    return [tree_unflatten([next(leaves) for _ in range(call.results)][:call.record.results], call.record.spec)
            for call in made]
