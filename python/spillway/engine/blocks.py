"""Which parts of a torch.nn.Module are Spillway's blocks, and in which order they run."""
import collections.abc

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..checkpoint_names import unwrapped
from ..library import Error

CONTAINERS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
PARAMETER_CONTAINERS = (torch.nn.ParameterList, torch.nn.ParameterDict)  # belong to the module that uses them


class Block:
    """One module of the model: the engine's blocks that its weights are in, and how it is run."""

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.engine_blocks = []  # all that it needs: its own, and those whose parameters it shares
        self.parameters = []     # (parameter, engine block, index in it)
        self.trainable = []      # those of them that the engine wants gradients for
        self.own = ()            # those of them that its module has; the others are read while it runs
        self.axes = None         # from a call's flat arguments to slice_axes.Axes, where these need no finding out
        self.writes = {}         # by the modes of its modules, train() and eval(): buffers that its forward writes


class Loose(torch.nn.Module):
    """Parameters that a module holds itself which has blocks inside, CLIP's temperature say, or a mask's embedding.
    They are a block that never runs: whatever reads them has them lent (lent.py)."""

    def __init__(self, owner):
        super().__init__()
        self.owner = (owner,)  # a tuple, as it is none of this one's modules
        held = [owner] + [child for child in owner.children() if isinstance(child, PARAMETER_CONTAINERS)]
        for place, parameter in enumerate(p for module in held for p in module._parameters.values() if p is not None):
            self.register_parameter(str(place), parameter)


def _place_of(module):
    """The module of the model whose parameters it has."""
    return module.owner[0] if isinstance(module, Loose) else module


def _runs(module):
    return type(unwrapped(module)).forward is not torch.nn.Module.forward


def _holds_parameters(module):
    return any(p is not None for p in module._parameters.values()) or \
        any(isinstance(child, PARAMETER_CONTAINERS) for child in module.children())


def _has_members(module):
    """There is a container inside, whose members run."""
    return any(isinstance(inner, CONTAINERS) and any(_runs(child) and next(child.parameters(), None) is not None
                                                     for child in inner.children()) for inner in module.modules())


def _computes_before(module):
    """Its weight, in a hook, as torch.nn.utils.weight_norm does: what has it as a member is run as a whole."""
    return any(type(hook).__module__.startswith("torch.nn.utils") for hook in module._forward_pre_hooks.values())


def default_blocks(model, whole=()):
    """The members of every outermost ModuleList or Sequential, and whatever else holds parameters of its own. `whole`:
    modules that are not divided."""
    found = []

    def walk(name, module):
        if next(module.parameters(), None) is None:
            return
        if any(module is each for each in whole):
            found.append((name, module))
            return
        if _holds_parameters(module):
            if not _has_members(module):
                found.append((name, module))
                return
            found.append((name, Loose(module)))
        elif not isinstance(module, CONTAINERS) and any(map(_computes_before, module.children())) and \
                not _has_members(module):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            if isinstance(module, CONTAINERS) and _runs(child) and next(child.parameters(), None) is not None:
                found.append((below, child))
            else:
                walk(below, child)

    walk("", model)
    # A module that stands in two places is one block.
    return list({id(module): (name, module) for name, module in reversed(found)}.values())[::-1]


def find_blocks(model, blocks, whole=()):
    """Blocks for the modules given (names or modules), or for the default ones, in which those of `whole` are not
    divided. Every parameter is in one at least."""
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is None:
        chosen = default_blocks(model, whole)
    else:
        chosen = []
        for block in blocks:
            module = model.get_submodule(block) if isinstance(block, str) else block
            if id(module) not in names:
                raise Error("invalid_argument", f"blocks: {type(module).__name__} is no module of the model")
            if not _runs(module):
                raise Error("invalid_argument", f"blocks: {names[id(module)]} is a {type(module).__name__}, which does "
                            "not run as a whole; give its members")
            chosen.append((names[id(module)], module))
        inside = {id(m) for _, module in chosen for m in module.modules()}
        if id(model) not in inside:
            chosen += [(n, m) for n, m in default_blocks(model, whole) if id(_place_of(m)) not in inside]
        order = {id(module): place for place, module in enumerate(model.modules())}
        chosen = sorted({id(m): (n, m) for n, m in chosen}.values(), key=lambda entry: order[id(_place_of(entry[1]))])
    for name, module in chosen:
        _check(name or "the model", module, chosen)
    return [Block(name, module) for name, module in chosen]


def _check(name, module, chosen):
    within = {id(m) for m in module.modules() if m is not module}
    for other, candidate in chosen:
        if id(candidate) in within:
            raise Error("invalid_argument", f"{name}: block {other} is inside it; a module that holds parameters and "
                        "blocks cannot be run in parts: move its parameters to a module of their own, or make it one "
                        "block with blocks=")
    if _computes_before(module):
        hook = next(iter(module._forward_pre_hooks.values()))
        raise Error("unsupported", f"{name}: {type(hook).__name__} computes its weight before the block runs, when "
                    "the weights are not there; use torch.nn.utils.parametrizations, or make its owner the block")


def forward_order(model, blocks, example):
    """The blocks in the order in which a forward pass on `example` runs them; all of them once, without one."""
    if example is None:
        return list(range(len(blocks)))
    if isinstance(example, collections.abc.Mapping):
        arguments, keywords = (), dict(example)
    elif isinstance(example, (tuple, list)):
        arguments, keywords = tuple(example), {}
    else:
        raise Error("invalid_argument", f"example: is a {type(example).__name__}; give the arguments of a forward "
                    "pass, a tuple or a dict")
    order, handles = [index for index, block in enumerate(blocks) if isinstance(block.module, Loose)], []
    for index, block in enumerate(blocks):
        handles.append(block.module.register_forward_pre_hook(lambda *_, index=index: order.append(index)))
    device = next(model.parameters()).device
    flat, spec = tree_flatten((arguments, keywords))
    arguments, keywords = tree_unflatten([v.to(device) if torch.is_tensor(v) else v for v in flat], spec)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model(*arguments, **keywords)
            for buffer, before in buffers:
                buffer.copy_(before)
    finally:
        for handle in handles:
            handle.remove()
    return order
