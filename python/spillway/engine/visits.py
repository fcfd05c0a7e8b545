"""How a block runs: its forward, of which no graph is left, and once more in backward.

A block's weights are there while its forward runs, and while its backward does. In between they are nowhere: what
autograd keeps of a block are its arguments (activation checkpointing). The second run must be the first one again
(runs.py). What would make it another, and gradients that would be lost, is refused. The pass's last block, whose
backward comes next, needs no second run (kept.py).

The first run has a graph too, as in plain PyTorch: blocks ask whether there is one, and some take gradients in their
forward. It ends at the block's arguments, what it saved is dropped after the run, and results leave without it. What
leaves a block otherwise, in an attribute or by an inner module's hook, is a result as well where it is found (left.py),
and else refuses to be used in a loss.
"""
import contextlib
import functools
import importlib

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..library import BACKWARD, FORWARD, Error
from .kept import Kept, ends_of
from .left import Left
from .logits import read_all
from .module import refuse_forgotten
from .runs import PLAIN, Buffers, Conditions

SUMMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class _Record:
    spec = None  # of the result, which has the shape that the block gave it
    results = 0  # tensors behind them are what the block left beside


class _Mark:
    """There is as long as a visit's graph."""


class _Border(torch.autograd.Function):
    """Arguments as the first run sees them."""

    @staticmethod
    def forward(ctx, block, *tensors):
        ctx.block = block
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx, *_):
        _refuse_side_result(ctx.block)


class _Saved:
    """What autograd saves in the first run, and only for as long as that lasts, unless it `stays`."""

    def __init__(self, block):
        self.block, self.tensors, self.stays = block, [], False

    def pack(self, tensor):
        if self.tensors is None:  # Ctrl-C came just when these hooks should have been taken off
            return tensor
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def drop(self):
        self.tensors, self.stays = None, False

    def unpack(self, place):
        if torch.is_tensor(place):
            return place
        if self.tensors is None:
            _refuse_side_result(self.block)
        return self.tensors[place]


@contextlib.contextmanager
def _graph_of_first_run(block):
    saved = _Saved(block)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.pack, saved.unpack):
            yield saved
    finally:
        if not saved.stays:
            saved.tensors = None


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, engine, block, spec, record, anchor, *flat):
        ctx.engine, ctx.block, ctx.spec, ctx.record, ctx.lender = engine, block, spec, record, engine.lender
        ctx.step, ctx.mark, ctx.learns = engine.steps_begun, record.mark, anchor is not None
        ctx.others = [None if torch.is_tensor(value) else value for value in flat]
        ctx.tensors = [i for i, value in enumerate(flat) if torch.is_tensor(value)]
        ctx.wants = [torch.is_tensor(value) and value.requires_grad for value in flat]
        ctx.save_for_backward(*(flat[i] for i in ctx.tensors))
        ctx.set_materialize_grads(False)
        watched = [flat[i] for i in ctx.tensors]
        before = _versions(watched)
        ctx.conditions, ctx.buffers, ctx.left = Conditions(engine, block), Buffers(block), Left(block, engine.others)
        ctx.kept = None
        with engine.weights_of(block, FORWARD) as leases:
            with ctx.conditions.autocast(), _graph_of_first_run(block) as saved, ctx.left.first():
                # Without the graph behind them, in which a weight of the block may be on loan as well.
                given = iter(_Border.apply(block, *(value.detach().requires_grad_() for value, wants in
                                                    zip(flat, ctx.wants) if wants)))
                inside = [next(given) if wants else value for value, wants in zip(flat, ctx.wants)]
                arguments, keywords = tree_unflatten(inside, spec)
                leaves, record.spec = tree_flatten(_run(engine, block, arguments, keywords))
                saved.stays = _may_stay(engine, block, leases, leaves)
                ends = ends_of(leaves) if saved.stays else ()
            constant = [torch.is_tensor(leaf) and not leaf.requires_grad for leaf in leaves]
            leaves = engine.without_weights(_without_graph(leaves, inside))
            left = ctx.left.find([*flat, *inside, *leaves])
            if saved.stays and not left:
                ctx.kept = Kept(engine, leases, ends, inside, saved)
            elif saved.stays:
                saved.drop()
        behind, changed_spec = tree_flatten((arguments, keywords))  # with what was put into dicts and lists
        if not ctx.buffers.ran() or _versions(watched) != before or changed_spec != spec or \
                any(one is not other for one, other in zip(behind, inside)):
            _refuse_changes(block)
        for leaf in leaves:
            if not (torch.is_tensor(leaf) or isinstance(leaf, PLAIN)):
                _refuse(block, f"returns a {type(leaf).__name__}, in which gradients would be lost; return tensors, or "
                               "tuples, lists and dicts of them")
        ctx.mark_non_differentiable(*(leaf for leaf, is_constant in zip(leaves, constant) if is_constant))
        record.results = len(leaves)
        leaves = [*leaves, *left]
        ctx.shapes, ctx.sums = _shapes(leaves), _sums(leaves)
        if ctx.kept is not None:
            engine.lender.keep(ctx.kept)
        return tuple(leaves)

    @staticmethod
    def backward(ctx, *gradients):
        engine, block = ctx.engine, ctx.block
        refuse_forgotten(engine)
        _check_backward(ctx)
        # Of autograd.grad(loss, activation) say, which asks for no gradient of weights.
        learns = ctx.learns and torch._C._will_engine_execute_node(engine.anchor_node)
        if learns:
            engine.passes.arrive()
        arguments = ctx.saved_tensors  # for which torch.utils.checkpoint runs the block anew, and ends what was kept
        kept, ctx.kept = ctx.kept, None
        if kept is not None and kept.intact():
            engine.lender.return_loans()
        else:
            engine.lender.return_all()
            kept = None
        flat = list(ctx.others)
        for i, tensor in zip(ctx.tensors, arguments):
            flat[i] = tensor.detach().requires_grad_(ctx.wants[i])
        flat = flat if kept is None else kept.inside
        inputs = [flat[i] for i in range(len(flat)) if ctx.wants[i]]
        entries = ctx.conditions.trainable() if learns else []
        wanted = inputs + [parameter for parameter, _, _ in entries]
        with engine.weights_of(block, BACKWARD), ctx.buffers.again():
            if kept is not None:
                kept.end()  # in favour of the lease that backward has now, of the same memory
            leaves = _second_run(ctx, flat) if kept is None else kept.ends
            ends = [(leaf, gradient) for leaf, gradient in zip(leaves, gradients)
                    if gradient is not None and torch.is_tensor(leaf) and leaf.requires_grad]
            _refuse_lost_gradients(block, ends, inputs + [parameter for parameter, _, _ in block.parameters])
            found = [None] * len(wanted)
            if ends and wanted:
                found = torch.autograd.grad([e for e, _ in ends], wanted, [g for _, g in ends], allow_unused=True)
            if kept is not None:
                kept.drop()
            if learns:
                by_parameter = {id(entry[0]): gradient for entry, gradient in zip(entries, found[len(inputs):])}
                engine.push(block.trainable, [by_parameter.get(id(entry[0])) for entry in block.trainable])
        if ctx.buffers.changed:
            _refuse_changes(block)
        given = iter(found[:len(inputs)])
        return (None,) * 5 + tuple(next(given) if wants else None for wants in ctx.wants)


def _check_backward(ctx):
    engine, block = ctx.engine, ctx.block
    if torch.is_grad_enabled():
        _refuse(block, "is asked for gradients of its gradients (create_graph=True), and those of weights go to the "
                       "engine, without a graph; leave it out, or make what needs it a model without an engine")
    if ctx.step != engine.steps_begun:
        _refuse(block, "is asked for gradients of an earlier step, whose weights are gone")
    if not ctx.buffers.as_left():
        _refuse(block, "has a buffer that was changed between forward and backward, where the block is run once more; "
                       "change it after engine.backward(loss)")


def _second_run(ctx, flat):
    """Its results once more, with their graph, and what it leaves beside."""
    engine, block = ctx.engine, ctx.block
    arguments, keywords = tree_unflatten(flat, ctx.spec)
    with ctx.conditions.again(), torch.enable_grad(), ctx.left.again():
        leaves, spec = tree_flatten(_run(engine, block, arguments, keywords))
    leaves = [*leaves, *ctx.left.tensors]
    if spec != ctx.record.spec or _shapes(leaves) != ctx.shapes or _differ(engine, leaves, ctx.sums):
        _refuse(block, "gave another result in backward than in forward; it must depend on its arguments alone, and "
                       "draw random numbers by torch, random or numpy.random, from no generator of its own")
    return leaves


def _may_stay(engine, block, leases, leaves):
    """Whether what the block's run made can stay for its backward: that comes next, and all that it looks at are the
    block's own weights, as the engine has them."""
    layout = engine._layout
    return layout.runs_last(block) and any(torch.is_tensor(leaf) and leaf.requires_grad for leaf in leaves) and \
        leases is not None and leases.of_block(block) and not engine.lender.lends() and \
        not any(place[1:] in layout.packed for place in block.parameters)


def _without_graph(leaves, inside):
    """Results, the same objects where they can be, as a hook or an attribute may have them, too."""
    known, found = {id(value) for value in inside}, []
    for leaf in leaves:
        if torch.is_tensor(leaf) and leaf.requires_grad:
            if id(leaf) in known or leaf._is_view() or leaf.is_leaf or isinstance(leaf.grad_fn, NODE):
                leaf = leaf.detach()
            else:
                leaf = leaf.detach_()
            known.add(id(leaf))
        found.append(leaf)
    return found


def _run(engine, block, arguments, keywords):
    """What it reads of other blocks' weights is lent to it, and belongs to it from then on."""
    engine.lender.visiting = block
    try:
        return block.run(*arguments, **keywords)
    finally:
        engine.lender.visiting = None


NODE = _Visit._backward_cls  # of a visit, in autograd's graph
BORDER = _Border._backward_cls


def _refuse(block, what):
    raise Error("unsupported", f"{block.name}: {what}")


def _refuse_changes(block):
    _refuse(block, "changes an argument or a buffer of its own while it runs, which would happen twice, as blocks are "
                   "run once more in backward; leave it outside of blocks, or give a result instead")


def _refuse_side_result(block):
    _refuse(block, "computed a value that is used in a loss and is none of its results, but was left in an attribute, "
                   "say, or taken by a hook, so that its gradients would be lost; return it, or make the block and "
                   "what uses the value one block (blocks=)")


def _shapes(leaves):
    return [(leaf.shape, leaf.dtype) if torch.is_tensor(leaf) else None for leaf in leaves]


def _versions(tensors):
    """What tells of a tensor that was written to, or replaced, as long as the first ones are kept."""
    return [(id(tensor), tensor._version) for tensor in tensors]


def _sums(leaves):
    """Of results in a CPU's memory: one in a GPU's would have to be waited for."""
    with torch.no_grad():
        return [leaf.sum(dtype=torch.promote_types(leaf.dtype, torch.float32)).item() if torch.is_tensor(leaf) and
                leaf.device.type == "cpu" and leaf.dtype in SUMMED and leaf.layout == torch.strided else None
                for leaf in leaves]


def _differ(engine, leaves, before):
    """Whether results are others than before, by more than another order of additions would explain."""
    for leaf, one, other in zip(leaves, before, _sums(leaves)):
        if one is not None and one != other:
            rounding = max(torch.finfo(dtype).eps for dtype in (leaf.dtype, engine.dtype))
            if abs(one - other) > rounding ** 0.5 * leaf.detach().double().norm().item():  # never of NaN
                return True
    return False


def _refuse_lost_gradients(block, ends, wanted):
    """What a block computes with must be its arguments and its weights: gradients of anything else go nowhere."""
    known, seen = {id(tensor) for tensor in wanted}, set()
    waiting = [leaf.grad_fn for leaf, _ in ends]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, BORDER):  # what lies behind are the arguments
            continue
        variable = getattr(node, "variable", None)  # of a leaf of the graph
        if isinstance(node, NODE) or (variable is not None and id(variable) not in known):
            _refuse(block, "computes with a tensor that wants a gradient and is neither an argument nor a parameter of "
                           "it; pass it as an argument, or make both modules one block")
        waiting += [following for following, _ in node.next_functions]


def _check_call(block, arguments, keywords):
    if [id(p) for p in block.module.parameters()] != [id(p) for p, _, _ in block.own]:
        _refuse(block, "has other parameters than when the engine was made, as load_state_dict(assign=True) gives it; "
                       "weights come from weights= or a snapshot, and change by training")
    if not torch.is_grad_enabled():
        return
    learns = {id(parameter) for parameter, _, _ in block.trainable}
    # The other way round it gets no gradient of this pass, of which peft's disable_adapter() makes use.
    if any(parameter.requires_grad and id(parameter) not in learns for parameter, _, _ in block.parameters):
        _refuse(block, "has parameters that want a gradient and did not when the engine was made, which decided what "
                       "is trained; export(), and make model and engine of that, whose optimizer begins anew")
    given = list(arguments) + list(keywords.values())
    # Hugging Face's caches: classes of their own, before them tuples under these names.
    if any(hasattr(value, "get_seq_length") or type(value).__name__.endswith("Cache") for value in given) or \
            any(keywords.get(name) is not None for name in ("past_key_values", "past_key_value", "layer_past")):
        _refuse(block, "is given a cache of keys and values, which would grow twice, as blocks are run once more in "
                       "backward; call the model with use_cache=False")


@functools.lru_cache(None)
def leave_untraced():
    """torch.compile traces what a block does, and not how its weights come and go: it looks into parameters."""
    if hasattr(torch, "compile"):
        for rules in ("trace_rules", "skipfiles"):  # since PyTorch 2.2, and before
            with contextlib.suppress(ImportError, AttributeError):
                importlib.import_module(f"torch._dynamo.{rules}").add(__package__)


def anchor_of(engine, block):
    """Autograd calls a function that no input asks a gradient of for nothing: the anchor asks for the weights'."""
    return engine.anchor if any(parameter.requires_grad for parameter, _, _ in block.trainable) else None


def run_in_visits(engine, block, index):
    """Puts the visit in the place of the module's forward. `index`: of the block."""
    leave_untraced()
    block.run = block.module.forward

    def forward(*arguments, **keywords):
        return visit(engine, block, index, arguments, keywords)

    block.module.forward = forward


def visit(engine, block, index, arguments, keywords):
    """What the block makes of them."""
    refuse_forgotten(engine)
    _check_call(block, arguments, keywords)
    engine.passes.refresh()
    engine.lender.return_all()
    if not torch.is_grad_enabled():
        with engine.weights_of(block, FORWARD):
            leaves, spec = tree_flatten(_run(engine, block, arguments, keywords))
            return tree_unflatten(engine.without_weights(leaves), spec)
    engine.seeds.begin()
    flat, spec = tree_flatten((arguments, keywords))
    flat = read_all(flat)
    if block.axes is not None or engine.together.takes():
        return engine.together.visit(block, index, flat, spec)
    record = _Record()
    record.mark = _Mark()
    anchor = anchor_of(engine, block)
    engine.uses.visited(index, record.mark)
    with engine.together.hooks(flat):
        results = _Visit.apply(engine, block, spec, record, anchor, *flat)
    del record.mark
    return tree_unflatten(list(results[:record.results]), record.spec)
