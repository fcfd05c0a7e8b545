"""What the engine is told of a model: blocks, parameters, how often each gets a gradient, the order of visits."""
import collections
from ctypes import c_uint64, c_void_p

import torch

from .. import checkpoint_names
from ..checkpoint_names import plain
from ..library import ANY_PUSHES, BACKWARD, FORWARD, Error
from . import buffers
from .module import attachments


class Layout:
    """The engine's blocks of a model: a parameter belongs to the first block that has it."""

    def __init__(self, model, blocks, order, accumulation):
        self._model, self._blocks, self._order, self._accumulation = model, blocks, order, accumulation
        self.members = []  # by engine block: its parameters
        self.open = False  # a step's gradients may be any number, and step() says when they are complete
        names = {id(parameter): plain(name) for name, parameter in model.named_parameters()}
        places, uses = {}, collections.Counter()
        self._block_names = []
        for index, block in enumerate(blocks):
            own = []  # what no block before this one has
            for parameter in block.module.parameters():
                if id(parameter) not in places:
                    self._check(names[id(parameter)], parameter)
                    places[id(parameter)] = (len(self.members), len(own))
                    own.append(parameter)
                block.parameters.append((parameter, *places[id(parameter)]))
                uses[id(parameter)] += order.count(index)
            if own:
                self.members.append(own)
                self._block_names.append(plain(block.name) or "model")
            block.engine_blocks = list(dict.fromkeys(owner for _, owner, _ in block.parameters))
        self.names = [[names[id(p)] for p in members] for members in self.members]
        self.elements = sum(parameter.numel() for members in self.members for parameter in members)
        self.pushes = {places[id(p)]: max(1, uses[id(p)]) * accumulation
                       for members in self.members for p in members if p.requires_grad}
        for block in blocks:
            block.trainable = [entry for entry in block.parameters if entry[1:] in self.pushes]

    def plan_again(self, order, pushes, any_number=False):
        """`order`: with ("lent", engine block) where weights are used outside of blocks. `pushes`: of one micro-batch,
        those of other places stay."""
        self._order, self.open = order, self.open or any_number
        for place, count in pushes.items():
            self.pushes[place] = max(self.pushes[place], count * self._accumulation)

    def pushes_of_micro_batch(self, place):
        return self.pushes[place] // self._accumulation

    @property
    def order(self):
        return self._order

    def accumulate(self, micro_batches):
        """From here on a step has so many."""
        self.pushes = {place: count // self._accumulation * micro_batches for place, count in self.pushes.items()}
        self._accumulation = micro_batches

    @staticmethod
    def _check(name, parameter):
        if not parameter.is_floating_point():
            raise Error("unsupported", f"{name}: is of {parameter.dtype}; Spillway trains floating-point weights")

    def visits(self):
        """Of a step: forward and backward of each micro-batch. Backward ends behind the first block that learns."""
        learns = [i for i, use in enumerate(self._order) if isinstance(use, tuple) or self._blocks[use].trainable]
        back = self._order[learns[0]:] if learns else []
        for _ in range(self._accumulation):
            for direction, order in ((FORWARD, self._order), (BACKWARD, reversed(back))):
                for use in order:
                    for owner in [use[1]] if isinstance(use, tuple) else self._blocks[use].engine_blocks:
                        yield owner, direction

    def tensors(self):
        """(name, shape, dtype) of all that is exported: a list for each block, and one of buffers."""
        parameters = [[(name, parameter.shape, torch.float32) for name, parameter in zip(names, members)]
                      for names, members in zip(self.names, self.members)]
        return [*parameters, [(name, b.shape, b.dtype) for name, b in buffers.persistent(self._model).items()]]

    def describe(self, library, element_bytes):
        """A spillway_model, which the caller destroys. Its workspace holds the largest gradient."""
        model = c_void_p(library.model_create())
        for owner, members in enumerate(self.members):
            library.model_add_block(model, self._block_names[owner].encode())
            for index, parameter in enumerate(members):
                shape = tuple(parameter.shape)
                library.model_add_parameter(model, owner, self.names[owner][index].encode(),
                                            (c_uint64 * len(shape))(*shape), len(shape), parameter.requires_grad,
                                            ANY_PUSHES if self.open else self.pushes.get((owner, index), 1))
        for owner, direction in self.visits():
            library.model_add_visit(model, owner, direction)
        largest = max((p.numel() for members in self.members for p in members if p.requires_grad), default=1)
        library.model_set_workspace(model, largest * element_bytes)
        for name, text in attachments(self._model).items():
            library.model_attach(model, name.encode(), text.encode())
        names = {name for members in self.names for name in members}
        if text := checkpoint_names.attachment(self._model, self.tensors(), names):
            library.model_attach(model, checkpoint_names.NAMES.encode(), text.encode())
        return model
