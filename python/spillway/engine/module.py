"""What an engine makes of the module that it is given: checks, empty parameters, hooks and refusals."""
import contextlib
import functools
import inspect

import torch

from ..library import Error
from .away import Lent, read_outside
from .model_files import named_weights
from .packed import MARK, copy_of


def checked(model, weights, begins):
    """Engine's `weights` as a function from names to values, or None. `begins`: a new run, which takes them."""
    if not isinstance(model, torch.nn.Module):
        raise Error("invalid_argument", f"model: is a {type(model).__name__}; give a torch.nn.Module, as "
                                        "from_pretrained() makes one")
    if any("_spillway" in module.__dict__ for module in model.modules()):
        raise Error("invalid_argument", "model: an engine has taken its weights before; make the model anew")
    weights = named_weights(model, weights)
    has_values = weights is None and begins
    for kind, tensors in (("buffer", model.named_buffers()), ("parameter", model.named_parameters())):
        for name, tensor in tensors:
            if tensor.device.type == "meta" and (kind == "buffer" or has_values):
                raise Error("invalid_argument", f"{name}: is a {kind} on device meta and has no values; " + (
                    "give weights=" if kind == "parameter" else
                    "give it some first (accelerate's init_empty_weights() leaves buffers alone)"))
            if kind == "parameter" and tensor.dtype == torch.float64:
                raise Error("unsupported", f"{name}: is float64, in which PyTorch would train it, and Spillway trains "
                                           "in fp32, bf16 or fp16; call model.float() before")

    for name, module in model.named_modules():
        if getattr(module, "sparse", False) is True and any(p.requires_grad for p in module.parameters(recurse=False)):
            raise Error("unsupported", f"{name}: has sparse gradients, and Spillway's are dense; make it with "
                                       "sparse=False")
    return weights


def refuse_forgotten(engine):
    """`engine`: a weak reference to it."""
    try:
        engine.module
    except ReferenceError:
        raise Error("invalid_argument", "engine: nothing refers to it anymore, so that it has given the model's "
                                        "weights back; keep it for as long as its model is used") from None


def empty(model, layout, dtype, device):
    """Takes the values out of parameters, and moves buffers to the device. A parameter of another device is replaced,
    in the layout's lists as well."""
    moved = {}
    for (owner, index), packed in layout.packed.items():
        before, says = packed.tensor, read_outside(packed.name, layout.block_names[owner])
        layout.members[owner][index] = moved[id(before)] = packed.take_over(device, says)
    for owner, block in enumerate(layout.members):
        for place, parameter in enumerate(block):
            if (owner, place) in layout.packed:
                continue
            # For what reads them nevertheless: NaN, in memory that is there, and in one element. Each has its own, so
            # that none of them shows what was written to another.
            nothing = torch.full((), float("nan"), dtype=dtype, device=device)
            if parameter.device.type == device.type:
                parameter.data, parameter.grad = nothing.expand(parameter.shape), None
            else:  # a tensor cannot change its device: another takes its place, in every module that has it
                block[place] = moved[id(parameter)] = torch.nn.Parameter(nothing.expand(parameter.shape),
                                                                         parameter.requires_grad)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = moved.get(id(parameter), parameter)
        for name, buffer in module._buffers.items():
            module._buffers[name] = moved.get(id(buffer), buffer if buffer is None else buffer.to(device))


def bind(engine, model, blocks):
    """`engine`: a weak reference to it. state_dict() shows the weights; what would copy or move them is refused."""
    for block in blocks:
        block.module.state_dict = _with_weights(engine, block, block.module.state_dict)
        block.module._register_state_dict_hook(_values)
    for module in set(model.modules()) - {block.module for block in blocks}:
        module._register_state_dict_hook(_copies)

    def zero_grad(*_, **__):
        refuse_forgotten(engine)
        engine.zero_grad()

    model.zero_grad = zero_grad
    like = torch.empty(1, dtype=engine.dtype, device=engine.device)  # as all weights are
    for module in {model, *(block.module for block in blocks)}:
        module._spillway = True
        module._apply = _where_it_is(module, like)
        module.__deepcopy__, module.__reduce_ex__ = _refuse_to_copy, refuse_to_pickle
    for module in model.modules() if engine._layout.pushes else ():  # what is not trained may be written to
        module.load_state_dict = _without_weights(module, module.load_state_dict)


def train_without_caches(model, blocks):
    """Of keys and values, which models make by themselves (config.use_cache) and blocks refuse in training: where a
    gradient is wanted, the configuration says no for as long as the forward pass lasts."""
    inside = {id(each) for block in blocks for each in block.module.modules()}
    changed = {}  # by the module that did it; after an exception until its next pass ends

    def begin(module, _):
        if torch.is_grad_enabled() and module.config.use_cache is True:
            module.config.use_cache, changed[id(module)] = False, module.config

    def end(module, *_):
        config = changed.pop(id(module), None)
        if config is not None:
            config.use_cache = True

    for module in model.modules():
        if id(module) not in inside and hasattr(getattr(module, "config", None), "use_cache"):
            module.register_forward_pre_hook(begin)
            module.register_forward_hook(end)


def generate_together(model):
    """Of several ranks, transformers' generate(): each of its passes needs all of them, and goes on for as long as one
    has text to write."""
    for module in model.modules():
        plain = getattr(module, "generate", None)
        if callable(plain) and "synced_gpus" in inspect.signature(plain).parameters:
            module.generate = _synced(plain)


def _synced(plain):
    @functools.wraps(plain)
    def generate(*arguments, **keywords):
        return plain(*arguments, **{**keywords, "synced_gpus": True})
    return generate


def leave_caches_away(model):
    """Of keys and values, for generating text, which blocks refuse. Parts of a model may have configurations of their
    own: T5's decoder, a vision model's text."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", False):
            module.config.use_cache = False
            model.__dict__.setdefault("_spillway_caches", []).append(module.config)


@contextlib.contextmanager
def caches_as_before(model):
    """For what is written of a model: who loads it generates text with the cache that it had."""
    configurations = model.__dict__.get("_spillway_caches", ())
    try:
        for configuration in configurations:
            configuration.use_cache = True
        yield
    finally:
        for configuration in configurations:
            configuration.use_cache = False


def attachments(model):
    """Text by name of the files that Hugging Face's models have beside their weights."""
    with caches_as_before(model):
        found = {name: getattr(model, name, None) for name in ("config", "generation_config")}
        return {f"{name}.json": described.to_json_string() for name, described in found.items()
                if hasattr(described, "to_json_string")}


def leave_checkpointing_to_blocks(model):
    """Hugging Face's gradient checkpointing has no more to do, as every block is run once more in backward: it would be
    run a third time."""
    word = "activation" if hasattr(model, "is_activation_checkpointing") else "gradient"  # older versions'
    if not hasattr(model, f"{word}_checkpointing_enable"):
        return

    def enable(*_, **__):  # what it does beside, and some versions call it once more
        leave_caches_away(model)

    if getattr(model, f"is_{word}_checkpointing", False):
        getattr(model, f"{word}_checkpointing_disable")()
        enable()
    setattr(model, f"{word}_checkpointing_enable", enable)


def _with_weights(engine, block, plain):
    def state_dict(*arguments, **keywords):
        refuse_forgotten(engine)
        with engine.weights_of(block):
            return plain(*arguments, **keywords)
    return state_dict


def _values(module, state, prefix, _):
    """They outlive the weights, whose memory is given to the next block."""
    stay = {f"{prefix}{name}" for name, buffer in module.named_buffers() if not hasattr(buffer, MARK)}
    for name in [name for name in state if name.startswith(prefix) and name not in stay]:
        if isinstance(state[name], torch.Tensor):
            state[name] = copy_of(state[name])


def _copies(_, state, prefix, __):
    """Of weights on loan, of a part of a block."""
    for name in [name for name in state if name.startswith(prefix) and isinstance(state[name], Lent)]:
        state[name] = state[name].clone().cpu()


def _without_weights(module, plain):
    def load_state_dict(state_dict, *arguments, **keywords):
        name = next((name for name, _ in module.named_parameters() if name in state_dict), None)
        if name is not None:
            raise Error("unsupported", f"load_state_dict: would write {name}, whose values are Spillway's; call it "
                                       "before the engine is made, or give weights= or a snapshot; load_snapshot(DIR) "
                                       "goes back to one that save(DIR) made")
        return plain(state_dict, *arguments, **keywords)
    return load_state_dict


def refuse_to_pickle(*_, **__):
    raise Error("unsupported", "model: its weights are Spillway's and cannot be saved with it; torch.save() takes its "
                               "state_dict(), engine.export(DIR) writes what from_pretrained() takes, and "
                               "engine.save(DIR) a snapshot")


def _refuse_to_copy(*_, **__):
    raise Error("unsupported", "model: its weights are Spillway's and cannot be copied with it; state_dict() has them")


def _where_it_is(module, like):
    """to(), cuda(), float() and their kin, in the place of _apply(): to where and what the weights are already."""
    def apply(change, *_, **__):
        changed = change(like)
        if (changed.dtype, changed.device) != (like.dtype, like.device):
            raise Error("unsupported", f"model: its weights are Spillway's, {like.dtype} on {like.device}, and cannot "
                                       "be moved or converted; the configuration says their type and tiers")
        for each in module.modules():
            for name, buffer in each._buffers.items():
                each._buffers[name] = buffer if buffer is None else change(buffer)
        return module
    return apply
