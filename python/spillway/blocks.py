"""Which parts of a torch.nn.Module are Spillway's blocks, and how a block runs.

A block is a module that runs as a whole: its weights are there while its forward runs, and while its backward does. In
between they are nowhere, so its forward is run once more in backward (activation checkpointing): what autograd keeps of
a block are its inputs.
"""
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from .library import BACKWARD, FORWARD, Error

CACHES = ("past_key_values", "past_key_value", "layer_past")  # as arguments of Hugging Face's layers


def default_blocks(model):
    """The modules of every outermost ModuleList or Sequential, and whatever else holds parameters of its own."""
    found = []

    def walk(name, module):
        if next(module.parameters(), None) is None:
            return
        if module._parameters and any(p is not None for p in module._parameters.values()):
            found.append((name, module))
            return
        for child_name, child in module.named_children():
            below = f"{name}.{child_name}" if name else child_name
            if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)):
                if next(child.parameters(), None) is not None:
                    found.append((below, child))
            else:
                walk(below, child)

    walk("", model)
    # A module that stands in two places is one block.
    return list({id(module): (name, module) for name, module in reversed(found)}.values())[::-1]


class Block:
    """One module of the model: the engine's blocks that its weights are in, and how it is run."""

    def __init__(self, name, module):
        self.name, self.module = name, module
        self.own = None          # the engine's block of the parameters that are this module's first
        self.engine_blocks = []  # all that it needs: its own, and those whose parameters it shares
        self.parameters = []     # (parameter, engine block, index in it)
        self.trainable = []      # those of them that the engine wants gradients for
        self.uses = 0            # in one forward pass
        self.looked_at = False   # its graph, for gradients that would be lost


def find_blocks(model, blocks):
    """Blocks for the modules given (names or modules), or for the default ones. Every parameter is in one at least."""
    names = {id(module): name for name, module in model.named_modules()}
    if blocks is None:
        chosen = default_blocks(model)
    else:
        chosen = []
        for block in blocks:
            module = model.get_submodule(block) if isinstance(block, str) else block
            if id(module) not in names:
                raise Error("invalid_argument", f"blocks: {type(module).__name__} is no module of the model")
            if type(module).forward is torch.nn.Module.forward:
                raise Error("invalid_argument", f"blocks: {names[id(module)]} is a {type(module).__name__}, which does "
                            "not run as a whole; give its members")
            chosen.append((names[id(module)], module))
        inside = {id(m) for _, module in chosen for m in module.modules()}
        chosen += [(n, m) for n, m in default_blocks(model) if id(m) not in inside]
        order = {id(module): place for place, module in enumerate(model.modules())}
        chosen.sort(key=lambda entry: order[id(entry[1])])
    for name, module in chosen:
        within = {id(m) for m in module.modules() if m is not module}
        for other, candidate in chosen:
            if id(candidate) in within:
                raise Error("invalid_argument", f"{name or 'the model'}: block {other} is inside it; a module that "
                            "holds parameters and blocks cannot be run in parts: move its parameters to a module of "
                            "their own, or make it one block with blocks=")
    return [Block(name, module) for name, module in chosen]


def forward_order(model, blocks, example):
    """The blocks in the order in which a forward pass on `example` runs them; all of them once, without one."""
    if example is None:
        return list(range(len(blocks)))
    order, handles = [], []
    for index, block in enumerate(blocks):
        handles.append(block.module.register_forward_pre_hook(lambda *_, index=index: order.append(index)))
    parameter = next(model.parameters())
    arguments, keywords = ((), example) if isinstance(example, dict) else (tuple(example), {})
    flat, spec = tree_flatten((arguments, keywords))
    arguments, keywords = tree_unflatten([v.to(parameter.device) if torch.is_tensor(v) else v for v in flat], spec)
    try:
        with torch.no_grad():
            model(*arguments, **keywords)
    finally:
        for handle in handles:
            handle.remove()
    return order


class _Visit(torch.autograd.Function):
    """A block's forward without a graph; its backward runs it again with one."""

    @staticmethod
    def forward(ctx, engine, block, spec, record, anchor, *flat):
        ctx.engine, ctx.block, ctx.spec = engine, block, spec
        ctx.tensors = [i for i, value in enumerate(flat) if torch.is_tensor(value)]
        ctx.others = [None if torch.is_tensor(value) else value for value in flat]
        ctx.wants = [torch.is_tensor(value) and value.requires_grad for value in flat]
        ctx.random = torch.get_rng_state()
        ctx.cuda_random = torch.cuda.get_rng_state(engine.torch_device) if engine.on_cuda else None
        ctx.save_for_backward(*(flat[i] for i in ctx.tensors))
        ctx.set_materialize_grads(False)
        arguments, keywords = tree_unflatten(list(flat), spec)
        with engine.weights_of(block, FORWARD):
            leaves, record.spec = tree_flatten(block.run(*arguments, **keywords))
        for leaf in leaves:
            if not (leaf is None or torch.is_tensor(leaf) or isinstance(leaf, (bool, int, float, str))):
                raise Error("unsupported", f"{block.name}: returns a {type(leaf).__name__}, in which gradients would be "
                                           "lost; return tensors, or tuples, lists and dicts of them")
        return tuple(leaves)

    @staticmethod
    def backward(ctx, *gradients):
        engine, block = ctx.engine, ctx.block
        flat = list(ctx.others)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors):
            flat[i] = tensor.detach().requires_grad_(ctx.wants[i])
        arguments, keywords = tree_unflatten(flat, ctx.spec)
        inputs = [flat[i] for i in range(len(flat)) if ctx.wants[i]]
        wanted = inputs + [parameter for parameter, _, _ in block.trainable if parameter.requires_grad]
        with engine.weights_of(block, BACKWARD), torch.random.fork_rng([engine.torch_device] if engine.on_cuda else []):
            torch.set_rng_state(ctx.random)
            if engine.on_cuda:
                torch.cuda.set_rng_state(ctx.cuda_random, engine.torch_device)
            with torch.enable_grad():
                leaves, _ = tree_flatten(block.run(*arguments, **keywords))
            ends = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients)
                    if gradient is not None and torch.is_tensor(leaf) and leaf.requires_grad]
            if not block.looked_at:
                _refuse_lost_gradients(block, ends, wanted)
            found = [None] * len(wanted)
            if ends and wanted:
                found = torch.autograd.grad([e for e, _ in ends], wanted, [g for _, g in ends], allow_unused=True)
            by_parameter = {id(parameter): gradient for parameter, gradient in zip(wanted, found)}
            engine.push(block.trainable, [by_parameter.get(id(parameter)) for parameter, _, _ in block.trainable])
        given = iter(found[:len(inputs)])
        return (None,) * 5 + tuple(next(given) if wants else None for wants in ctx.wants)


def _autocast():
    try:
        return any(torch.is_autocast_enabled(device) for device in ("cuda", "cpu"))
    except TypeError:  # before PyTorch 2.4
        return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


def _refuse_lost_gradients(block, ends, wanted):
    """What a block computes with must be its arguments and its weights: gradients of anything else go nowhere."""
    known, seen = {id(tensor) for tensor in wanted}, set()
    waiting = [leaf.grad_fn for leaf, _ in ends]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)  # of a leaf of the graph
        if isinstance(node, _Visit._backward_cls) or (variable is not None and id(variable) not in known):
            raise Error("unsupported", f"{block.name}: computes with a tensor that wants a gradient and is neither an "
                        "argument nor a parameter of it; pass it as an argument, or make both modules one block")
        waiting += [following for following, _ in node.next_functions]
    block.looked_at = True


class _Record:
    spec = None  # of the result, which has the shape that the block gave it


def run_in_visits(engine, block):
    """Puts the visit in the place of the module's forward."""
    block.run = block.module.forward

    def forward(*arguments, **keywords):
        if _autocast():
            raise Error("unsupported", f"{block.name}: runs under torch.autocast, which keeps copies of weights; the "
                        "configuration's bf16 or fp16 says the type of weights, so leave autocast away")
        if not torch.is_grad_enabled():
            with engine.weights_of(block, FORWARD):
                return block.run(*arguments, **keywords)
        if any(keywords.get(name) is not None for name in CACHES):
            raise Error("unsupported", f"{block.name}: is given a cache of keys and values, which would grow twice, as "
                                       "blocks are run once more in backward; call the model with use_cache=False")
        flat, spec = tree_flatten((arguments, keywords))
        record = _Record()
        # Autograd calls a function that no input asks a gradient of for nothing: the anchor asks for the weights'.
        anchor = engine.anchor if block.trainable else None
        return tree_unflatten(list(_Visit.apply(engine, block, spec, record, anchor, *flat)), record.spec)

    block.module.forward = forward
