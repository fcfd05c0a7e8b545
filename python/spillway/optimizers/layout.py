"""Which tensors an optimizer whose states are elsewhere has: blocks of them, and their names."""
from ctypes import c_uint64, c_void_p

import torch

from ..engine.blocks import find_blocks
from ..engine.layout import Layout
from ..library import Error

BLOCK_ELEMENTS = 4 << 20  # without a model: as many as a tile holds, or one tensor that is larger
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SECTIONS = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}  # sections of a configuration


def shares(shapes, count):
    """Of each tensor: where the parts of so many ranks begin and end, in rows, which lie along its first axis. Together
    the parts of a rank are about as many elements as any other's, and follow each other."""
    total, before, found = sum(shape.numel() for shape in shapes), 0, []
    for shape in shapes:
        rows = shape[0] if shape else 1
        row = shape.numel() // rows
        found.append([min(rows, max(0, (total * rank // count - before + row // 2) // row)) for rank in range(count)] +
                     [rows])
        before += shape.numel()
    return found


def part_of(tensor, rows):
    """`rows`: the first, and the one after the last."""
    return tensor if rows == (0, tensor.shape[0] if tensor.dim() else 1) else tensor[rows[0]:rows[1]]


class OptimizerLayout:
    """Of parameter groups. By tensor of the library's, in its order: `parameters`, `names`, `shapes`, `groups`.

    `model`: its blocks are those of spillway.Engine, and names are its own, so that norms have the Engine's bits.
    `rank`, `count`: of several ranks each has `rows` of a parameter, and `shapes` are of these. `everything` has all
      parameters, on every rank: (name, parameter, where parts begin and end).
    """

    def __init__(self, groups, model=None, rank=0, count=1):
        group_of, given = {}, []
        for index, group in enumerate(groups):
            names = group.get("param_names") or [f"param_groups.{index}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"]):
                if id(parameter) in group_of:
                    raise Error("invalid_argument", f"{name}: is given twice; give every parameter once")
                group_of[id(parameter)] = index
                given.append((name, parameter))
        blocks = _plain_blocks(given) if model is None else _model_blocks(given, model)
        blocks = [(name, [entry for entry in members if entry[1].numel()]) for name, members in blocks]
        tensors = [entry for _, members in blocks for entry in members]
        if not tensors:
            raise Error("invalid_argument", "params: there is no parameter that has elements")
        bounds = shares([parameter.shape for _, parameter in tensors], count)
        self.everything = [(*entry, of_ranks) for entry, of_ranks in zip(tensors, bounds)]
        self.dtype = tensors[0][1].dtype
        self._check(count)
        own = {id(parameter): tuple(of_ranks[rank:rank + 2]) for _, parameter, of_ranks in self.everything
               if of_ranks[rank] < of_ranks[rank + 1]}
        self.blocks = [(name, [entry for entry in members if id(entry[1]) in own]) for name, members in blocks]
        self.blocks = [(name, members) for name, members in self.blocks if members]
        tensors = [entry for _, members in self.blocks for entry in members]
        self.names = [name for name, _ in tensors]
        self.parameters = [parameter for _, parameter in tensors]
        self.rows = [own[id(parameter)] for parameter in self.parameters]
        self.whole_shapes = [parameter.shape for parameter in self.parameters]
        self.shapes = [part_of(parameter.detach(), rows).shape for parameter, rows in zip(self.parameters, self.rows)]
        self.groups = [group_of[id(parameter)] for parameter in self.parameters]
        self.elements = sum(shape.numel() for shape in self.shapes)
        self.index = {id(parameter): tensor for tensor, parameter in enumerate(self.parameters)}

    def part(self, tensor, whole):
        """Of a tensor that has a parameter's shape, what is this rank's."""
        return part_of(whole, self.rows[tensor])

    def _check(self, count):
        places = {}
        for name, parameter, _ in self.everything:
            if parameter.layout != torch.strided:
                raise Error("unsupported", f"{name}: is a tensor of {parameter.layout}; make it a dense one")
            if parameter.device.type == "meta":
                raise Error("invalid_argument", f"{name}: is on device meta, without values; load the model first")
            if parameter.dtype not in DTYPES:
                raise Error("unsupported", f"{name}: is of {parameter.dtype}; Spillway updates "
                                           f"{', '.join(map(str, DTYPES))}")
            if parameter.dtype != self.dtype:
                first = self.everything[0][0]
                raise Error("unsupported", f"{name}: is of {parameter.dtype}, and {first} of {self.dtype}; "
                                           "make one optimizer for each type of weights, each with an nvme_path of "
                                           "its own, or give all of the model one type: model.to(torch.bfloat16)")
            place = (parameter.device, parameter.data_ptr())
            if place in places:
                raise Error("invalid_argument", f"{name}: has the memory of {places[place]}; give shared weights "
                                                "once")
            places[place] = name
        for rank in range(count):
            if not any(bounds[rank] < bounds[rank + 1] for _, _, bounds in self.everything):
                raise Error("unsupported", f"params: are too small for {count} ranks: rank {rank} would have none of "
                                           "them; start fewer, or say ranks=None")

    def check_tensors(self):
        """That they are what was planned."""
        for name, parameter, shape in zip(self.names, self.parameters, self.whole_shapes):
            if parameter.shape != shape or parameter.dtype != self.dtype:
                raise Error("invalid_argument", f"{name}: is {tuple(parameter.shape)} of {parameter.dtype}, and was "
                                                f"{tuple(shape)} of {self.dtype} when its states were planned; make "
                                                "the optimizer anew")

    def describe(self, library):
        """A spillway_model, which the caller destroys."""
        described = c_void_p(library.model_create())
        for owner, (name, members) in enumerate(self.blocks):
            library.model_add_block(described, name.encode())
            for own, parameter in members:
                shape = tuple(self.shapes[self.index[id(parameter)]])
                library.model_add_parameter(described, owner, own.encode(), (c_uint64 * len(shape))(*shape),
                                            len(shape), 1, 1)
        return described


def _plain_blocks(given):
    blocks, room = [], 0
    for entry in given:
        if room < entry[1].numel() or not blocks:
            blocks.append((f"block.{len(blocks)}", []))
            room = BLOCK_ELEMENTS
        blocks[-1][1].append(entry)
        room -= entry[1].numel()
    return blocks


def _model_blocks(given, model):
    """Those of the Engine, without what the optimizer has not got: its leaves of the norm are zeros there."""
    found = find_blocks(model, None)
    layout = Layout(model, found, list(range(len(found))), 1)
    wanted = {id(parameter): name for name, parameter in given}
    blocks = [(f"block.{owner}", [(name, parameter) for name, parameter in zip(names, members)
                                  if wanted.pop(id(parameter), None) is not None])
              for owner, (names, members) in enumerate(zip(layout.names, layout.members))]
    if wanted:
        raise Error("invalid_argument", f"{next(iter(wanted.values()))}: is no parameter of model=; give the model "
                                        "that has all of them, or none")
    return blocks
