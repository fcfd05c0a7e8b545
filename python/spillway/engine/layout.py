"""What the engine is told of a model: blocks, parameters, how often each gets a gradient, the order of visits."""
import collections
from ctypes import c_uint64, c_void_p

import torch

from .. import checkpoint_names
from ..checkpoint_names import plain
from ..library import ANY_PUSHES, BACKWARD, FORWARD
from . import buffers
from .module import attachments
from .packed import find_packed


class Layout:
    """The engine's blocks of a model: a parameter belongs to the first block that has it."""

    def __init__(self, model, blocks, order, accumulation):
        self._model, self._blocks, self._order, self._accumulation = model, blocks, order, accumulation
        self.members = []  # by engine block: its parameters
        self.kept = self.planned_for = (0, 0, 0)  # bytes of block inputs: in host memory, on nvme, on their way
        self.open = False  # a step's gradients may be any number, and step() says when they are complete
        names = {id(parameter): plain(name) for name, parameter in model.named_parameters()}
        places, uses = {}, collections.Counter()
        packed, packed_buffers = find_packed(model, plain)
        self.packed = {}   # by (engine block, index): what is bytes there
        self.block_names = []
        for index, block in enumerate(blocks):
            own = []  # what no block before this one has
            for parameter in block.module.parameters():
                if id(parameter) not in places:
                    place = places[id(parameter)] = (len(self.members), len(own))
                    if id(parameter) in packed:
                        self.packed[place] = packed[id(parameter)]
                    own.append(parameter)
                block.parameters.append((parameter, *places[id(parameter)]))
                uses[id(parameter)] += order.count(index)
            for buffer in (buffer for module in block.module.modules() for buffer in
                           packed_buffers.get(id(module), ())):
                if id(buffer.tensor) not in places:
                    place = places[id(buffer.tensor)] = (len(self.members), len(own))
                    names[id(buffer.tensor)], self.packed[place] = buffer.name, buffer
                    own.append(buffer.tensor)
                block.parameters.append((buffer.tensor, *places[id(buffer.tensor)]))
            if own:
                self.members.append(own)
                self.block_names.append(plain(block.name) or "model")
            block.engine_blocks = list(dict.fromkeys(owner for _, owner, _ in block.parameters))
        self.names = [[names[id(p)] for p in members] for members in self.members]
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

    def keep(self):
        """An engine is made by this plan, to which go_back() returns."""
        self._made = self._order, self.open, dict(self.pushes), self._accumulation, self.kept

    def go_back(self):
        self._order, self.open, pushes, self._accumulation, self.kept = self._made
        self.pushes = dict(pushes)

    def pushes_of_micro_batch(self, place):
        return self.pushes[place] // self._accumulation

    @property
    def order(self):
        return self._order

    @property
    def accumulation(self):
        return self._accumulation

    def runs_last(self, block):
        """Whether a forward pass ends with that block, as planned."""
        last = self._order[-1]
        return not isinstance(last, tuple) and self._blocks[last] is block

    def accumulate(self, micro_batches):
        """From here on a step has so many."""
        self.pushes = {place: count // self._accumulation * micro_batches for place, count in self.pushes.items()}
        self._accumulation = micro_batches

    def elements_of(self, place):
        """Of the weight type, after describe()."""
        return self.packed[place].elements(self.element_bytes) if place in self.packed else \
            self.members[place[0]][place[1]].numel()

    @property
    def elements(self):
        return sum(self.elements_of((owner, index)) for owner, members in enumerate(self.members)
                   for index in range(len(members)))

    def tensors_in(self, owner):
        """Of the block: (index, name, parameter) of those that are numbers."""
        return [(index, name, parameter) for index, (name, parameter) in
                enumerate(zip(self.names[owner], self.members[owner])) if (owner, index) not in self.packed]

    def forget_packed(self):
        """Where their bytes lie, and that they are of these forms."""
        for packed in self.packed.values():
            packed.forget()

    def visits(self):
        """Of a step: forward and backward of each micro-batch. Backward ends after the first block that learns."""
        learns = [i for i, use in enumerate(self._order) if isinstance(use, tuple) or self._blocks[use].trainable]
        back = self._order[learns[0]:] if learns else []
        for _ in range(self._accumulation):
            for direction, order in ((FORWARD, self._order), (BACKWARD, reversed(back))):
                for use in order:
                    for owner in [use[1]] if isinstance(use, tuple) else self._blocks[use].engine_blocks:
                        yield owner, direction

    def tensors(self):
        """(name, shape, dtype) of all that is exported: a list for each block, and one of buffers."""
        parameters = [[(name, parameter.shape, torch.float32) for _, name, parameter in self.tensors_in(owner)]
                      for owner in range(len(self.members))]
        return [*parameters, [(name, b.shape, b.dtype) for name, b in buffers.persistent(self._model).items()]]

    def describe(self, library, element_bytes):
        """A spillway_model, which the caller destroys. Its workspace holds the largest gradient."""
        self.element_bytes = element_bytes
        model = c_void_p(library.model_create())
        for owner, members in enumerate(self.members):
            library.model_add_block(model, self.block_names[owner].encode())
            for index, parameter in enumerate(members):
                name, shape = self.names[owner][index].encode(), tuple(parameter.shape)
                if (owner, index) in self.packed:
                    library.model_add_bytes(model, owner, name, self.elements_of((owner, index)))
                    continue
                library.model_add_parameter(model, owner, name, (c_uint64 * len(shape))(*shape), len(shape),
                                            parameter.requires_grad,
                                            ANY_PUSHES if self.open else self.pushes.get((owner, index), 1))
        for owner, direction in self.visits():
            library.model_add_visit(model, owner, direction)
        largest = max((p.numel() for members in self.members for p in members if p.requires_grad), default=1)
        library.model_set_workspace(model, largest * element_bytes)
        library.model_set_kept(model, *self.kept)
        self.planned_for = self.kept
        for name, text in attachments(self._model).items():
            library.model_attach(model, name.encode(), text.encode())
        names = {name for members in self.names for name in members}
        if self.packed:  # which no files have as they are here: `spillway export` says so
            return model
        if text := checkpoint_names.attachment(self._model, self.tensors(), names):
            library.model_attach(model, checkpoint_names.NAMES.encode(), text.encode())
        return model
