"""Heads whose logits are computed in slices of the tokens ("logit_slices"), together with the loss of each slice.

    h ─ head ─ Logits ─ float() ─ [:, :-1] ─ view(-1, V) ─ F.cross_entropy(…, labels)
               nothing is computed here                    of each slice: logits, float(), losses of its tokens

A loss keeps one number of a token's logits. So a model's head returns Logits (logits.py), which have noted what it was
given and what became of them, and the loss visits the head, for one slice after the other, forward and backward. That
is a visit in parts (slices.py) of a block that is head and loss in one: its results are the losses of the tokens.
"""
import contextlib
import logging

import torch
from torch.nn.modules.dropout import _DropoutNd

from .. import log
from ..library import Error
from .blocks import Block
from .logits import KEY, Call, logits_of
from .module import refuse_forgotten
from .runs import as_autocast, autocast_of
from .slice_axes import Axes, piece, sizes_of
from .visits import _check_call, anchor_of, visit

PACKAGES = ("bitsandbytes.", "torchao.", "hqq.")  # whose linear layers compute each token for itself, as PyTorch's


def heads_of(model):
    """Modules that the model calls its output embeddings, as Hugging Face's do."""
    found = {}
    for module in model.modules():
        with contextlib.suppress(NotImplementedError):
            head = getattr(module, "get_output_embeddings", lambda: None)()
            if isinstance(head, torch.nn.Module):
                found[id(head)] = head
    return list(found.values())


def blocks_of(heads, blocks, layout):
    """(index, size of the vocabulary) of the blocks that heads are. Without any heads it is the block with which a
    forward pass ends."""
    wanted = [(index, block) for index, block in enumerate(blocks) if any(block.module is head for head in heads)]
    if not heads:
        wanted = [(layout.order[-1], blocks[layout.order[-1]])]
    linear = [(index, _linear(block.module)) for index, block in wanted]
    if layout.pushes and not wanted:
        inside = next((block.name for block in blocks for each in block.module.modules()
                       if any(each is head for head in heads)), "the model")
        raise Error("unsupported", f"{inside}: the model's head is a part of this block, and {KEY} is for one that is "
                                   "a block of its own; leave it out of blocks=, or set the key to 1")
    for (_, block), (_, found) in zip(wanted, linear):
        if layout.pushes and found is None:
            raise Error("unsupported", f"{block.name}: is a {type(block.module).__name__}, and {KEY} cuts what a "
                                       "torch.nn.Linear returns, whose tokens do not depend on each other; set it to 1")
    return [(index, found.out_features) for index, found in linear if found is not None]


def _linear(module):
    """The torch.nn.Linear that it is, or that peft has wrapped."""
    while type(module).__module__.startswith("peft."):
        module = next((inner for name in ("base_layer", "original_module") if
                       (inner := getattr(module, name, None)) is not None), None)
    theirs = type(module).__module__.startswith(PACKAGES)
    plain = getattr(getattr(module, "forward", None), "__func__", None) is torch.nn.Linear.forward
    return module if plain or (theirs and isinstance(module, torch.nn.Linear)) else None


class Head:
    """A block whose forward returns Logits, after run_in_visits(). `engine`: a weak reference to it."""

    def __init__(self, engine, block, index, columns, slices):
        self.engine, self.block, self.index = engine, block, index
        self._columns, self._slices, self._said = columns, slices, False
        self._with_loss = Block(block.name, block.module)
        for shared in ("engine_blocks", "parameters", "trainable", "own", "writes"):
            setattr(self._with_loss, shared, getattr(block, shared))
        self._with_loss.run, self._with_loss.axes = self._run, self._axes
        whole = block.module.forward

        def forward(*arguments, **keywords):
            if keywords or len(arguments) != 1 or not self._defers(arguments[0]):
                return whole(*arguments, **keywords)
            refuse_forgotten(engine)
            _check_call(block, arguments, keywords)
            return logits_of(Call(self, self._dtype(arguments[0])), arguments[0], columns)

        block.module.forward = forward

    def _defers(self, given):
        if not torch.is_tensor(given) or not given.is_floating_point() or given.dim() < 2 or not given.numel():
            return False
        # An adapter's would draw other numbers for the loss than for who reads the logits beside it.
        if any(isinstance(module, _DropoutNd) and module.training and module.p for module in
               self.block.module.modules()):
            self.say("has dropout inside, so that its logits are computed whole", given)
            return False
        return True

    def _dtype(self, given):
        """Of its result, which is looked at when that is there."""
        for device, enabled, dtype, _ in autocast_of(self.engine):
            if device == given.device.type and enabled and given.dtype != torch.float64:
                return dtype
        return given.dtype

    def say(self, what, given):
        if not self._said:
            self._said = True
            size = given.numel() // given.shape[-1] * self._columns * self.engine._element_bytes
            log.say(logging.WARNING, f"{self.block.name}: {what}, {-(-size >> 20)} MiB; {KEY} is for losses that "
                                     "torch.nn.functional.cross_entropy() computes of (tokens, vocabulary) and of "
                                     "labels that are numbers")

    def anchor(self):
        return anchor_of(self.engine, self.block)

    def visit(self, given):
        """True logits."""
        return visit(self.engine, self.block, self.index, (given,), {})

    def losses(self, given, target, recipe):
        """Of each token. `given`: (tokens, width)."""
        return visit(self.engine, self._with_loss, self.index, (given, target, recipe), {})

    def _axes(self, flat):
        return Axes([(0, 1), (0, 1), None], [0], sizes_of(len(flat[0]), self._slices))

    def _run(self, given, target, recipe):
        """Of a slice, or of all in an evaluation."""
        sizes = [len(given)] if torch.is_grad_enabled() else sizes_of(len(given), self._slices)
        found = []
        for number in range(len(sizes)):
            part, labels = (piece(whole, (0, 1), sizes, number) for whole in (given, target))
            with as_autocast(self.engine, recipe.autocast):
                logits = self.block.run(part)
            found.append(recipe(logits, labels))
            del logits
        return found[0] if len(found) == 1 else torch.cat(found)
