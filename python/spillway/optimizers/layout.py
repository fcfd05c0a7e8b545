"""Which tensors an optimizer whose states are elsewhere has: blocks of them, and their names."""
from ctypes import c_uint64, c_void_p

import torch

from ..engine.blocks import find_blocks
from ..engine.layout import Layout
from ..library import Error

BLOCK_ELEMENTS = 4 << 20  # without a model: as many as a tile holds, or one tensor that is larger
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SECTIONS = {torch.float32: None, torch.bfloat16: "bf16", torch.float16: "fp16"}  # sections of a configuration


class OptimizerLayout:
    """Of parameter groups. By tensor, in the library's order: `parameters`, `names`, `shapes`, `groups`.

    `model`: its blocks are those of spillway.Engine, and names are its own, so that norms have the Engine's bits.
    """

    def __init__(self, groups, model=None):
        group_of, given = {}, []
        for index, group in enumerate(groups):
            names = group.get("param_names") or [f"param_groups.{index}.{i}" for i in range(len(group["params"]))]
            for name, parameter in zip(names, group["params"]):
                if id(parameter) in group_of:
                    raise Error("invalid_argument", f"{name}: is given twice; give every parameter once")
                group_of[id(parameter)] = index
                given.append((name, parameter))
        blocks = _plain_blocks(given) if model is None else _model_blocks(given, model)
        self.blocks = [(name, [entry for entry in members if entry[1].numel()]) for name, members in blocks]
        self.blocks = [(name, members) for name, members in self.blocks if members]
        tensors = [entry for _, members in self.blocks for entry in members]
        if not tensors:
            raise Error("invalid_argument", "params: there is no parameter that has elements")
        self.names = [name for name, _ in tensors]
        self.parameters = [parameter for _, parameter in tensors]
        self.shapes = [parameter.shape for parameter in self.parameters]
        self.groups = [group_of[id(parameter)] for parameter in self.parameters]
        self.elements = sum(parameter.numel() for parameter in self.parameters)
        self.dtype = self.parameters[0].dtype
        self.index = {id(parameter): tensor for tensor, parameter in enumerate(self.parameters)}
        self._check()

    def _check(self):
        places = {}
        for name, parameter in zip(self.names, self.parameters):
            if parameter.layout != torch.strided:
                raise Error("unsupported", f"{name}: is a tensor of {parameter.layout}; make it a dense one")
            if parameter.device.type == "meta":
                raise Error("invalid_argument", f"{name}: is on device meta, without values; load the model first")
            if parameter.dtype not in DTYPES:
                raise Error("unsupported", f"{name}: is of {parameter.dtype}; Spillway updates "
                                           f"{', '.join(map(str, DTYPES))}")
            if parameter.dtype != self.dtype:
                raise Error("unsupported", f"{name}: is of {parameter.dtype}, and {self.names[0]} of {self.dtype}; "
                                           "make one optimizer for each type of weights, each with an nvme_path of "
                                           "its own, or give all of the model one type: model.to(torch.bfloat16)")
            place = (parameter.device, parameter.data_ptr())
            if place in places:
                raise Error("invalid_argument", f"{name}: has the memory of {places[place]}; give shared weights "
                                                "once")
            places[place] = name

    def check_tensors(self):
        """That they are what was planned."""
        for name, parameter, shape in zip(self.names, self.parameters, self.shapes):
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
                shape = tuple(parameter.shape)
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
