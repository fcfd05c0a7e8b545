"""The tensors that a model's files have, where they are others than those in memory: transformers 5 fuses and renames
some when it reads a model, Mixtral's experts say, and so turns them back when it saves one."""
import collections
import json
import logging
import sys

import torch
from torch.overrides import TorchFunctionMode

from . import log

NAMES = "spillway_names.json"  # kFileNames of include/spillway/export.h


def plain(name):
    """Without what torch.compile puts in front of a wrapped module's names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def unwrapped(model):
    return getattr(model, "_orig_mod", model)


class Group:
    """Tensors that become others, together. `targets`: {name: shape}."""

    def __init__(self, names, targets, revert):
        self.names, self.targets, self._revert = names, targets, revert

    def converted(self, values):
        """{name in the files: tensor} of {name in memory: tensor}."""
        return self._revert(values)


class _Renamed(Group):
    def __init__(self, name, target, shape):
        super().__init__([name], {target: shape}, lambda values: {target: values[name]})


def _reverting(model):
    """Transformers' own function; None where it has none, or the model is none of its models."""
    loading = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "revert_weight_conversion") or not isinstance(
            model, sys.modules["transformers"].PreTrainedModel):
        return None
    return lambda tensors: loading.revert_weight_conversion(model, tensors)


def _turned(model, parts):
    """(function, tensors in memory, tensors in files), by name and without values; None where they are the same."""
    revert = _reverting(unwrapped(model))
    if revert is None:
        return None
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for part in parts for name, shape, dtype in part}
    whole = revert(empty)
    if len(whole) == len(empty) and all(whole.get(name) is value for name, value in empty.items()):
        return None
    return revert, empty, whole


def attachment(model, parts, parameters):
    """The text by which stores and snapshots know the names in files; None where they are those in memory.

    `parts`: as in groups_of(). `parameters`: the names of those that are no buffers."""
    try:
        turned = _turned(model, parts)
    except Exception as error:  # of any kind: an engine needs no names of files, and export() will say it again
        log.say(logging.WARNING, f"{type(unwrapped(model)).__name__}: transformers does not say which tensors its "
                                 f"files have ({error}); `spillway export` will write those in memory")
        return None
    if turned is None:
        return None
    revert, empty, whole = turned
    whole = _in_views(revert, empty) or whole
    source_of = {_memory(value): name for name, value in empty.items()}
    tensors, covered = [], collections.Counter()
    for target, value in whole.items():
        source = source_of.get(_memory(value))
        if source in parameters and value.is_contiguous():
            tensors.append([target, source, value.storage_offset(), *value.shape])
            covered[source] += value.numel()
    unsaid = sorted(name for name in parameters if covered[name] != empty[name].numel())
    return json.dumps({"tensors": [entry for entry in tensors if entry[1] not in unsaid], "unsaid": unsaid})


def _in_views(revert, empty):
    """What becomes of the tensors, where copies for contiguous memory are left out: a piece of a piece then shows where
    it lies. None where they cannot be left out."""
    class WithoutCopies(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            if function in (torch.Tensor.contiguous, torch.Tensor.clone, torch.clone):
                return arguments[0]
            return function(*arguments, **(keywords or {}))

    try:
        with WithoutCopies():
            return revert(empty)
    except RuntimeError:  # of an operation that needs it
        return None


def _memory(tensor):
    """Equal for a tensor and its views."""
    return (tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage())._cdata


def inner_of(model):
    """(name, one of its tensors) of a model of transformers' inside another module, if its files have other names."""
    model = unwrapped(model)
    if _reverting(model) or hasattr(model, "peft_config"):
        return None
    inside = []
    for name, module in model.named_modules():
        if not _reverting(module) or any(name.startswith(f"{outer}.") for outer in inside):
            continue
        inside.append(name)
        parts = [[(plain(own), value.shape, torch.float32) for own, value in module.named_parameters()]]
        if turned := _turned(module, parts):
            return plain(name), next(own for own in turned[1] if own not in turned[2])
    return None


def groups_of(model, parts):
    """Groups of tensors as small as they can be turned back; None where files have the names in memory.

    `parts`: lists of (name, shape, dtype), each of a block, which hardly a group goes beyond. Nothing here has values.
    """
    turned = _turned(model, parts)
    if turned is None:
        return None
    revert, empty, whole = turned

    def targets_of(names):
        """Of a group: what it becomes, if that is a part of what all become together; else None."""
        try:
            found = revert({name: empty[name] for name in names})
        except Exception:  # of any kind: half of a group is nothing that it is made for
            return None
        fits = all(name in whole and value.shape == whole[name].shape for name, value in found.items())
        return {name: tuple(value.shape) for name, value in found.items()} if fits and found else None

    name_of = {id(value): name for name, value in empty.items()}
    groups, left = [], []
    renamed = {name_of[id(value)]: name for name, value in whole.items() if id(value) in name_of}
    for part in parts:
        names = [name for name, _, _ in part]
        groups += [_Renamed(name, renamed[name], tuple(empty[name].shape)) for name in names if name in renamed]
        others = [name for name in names if name not in renamed]
        alone = {name: targets_of([name]) for name in others}
        groups += [Group([name], targets, revert) for name, targets in alone.items() if targets]
        others = [name for name in others if not alone[name]]
        together = targets_of(others) if others else None
        if together:
            groups.append(Group(others, together, revert))
        else:
            left += others
    if left:
        groups.append(Group(left, targets_of(left) or {}, revert))
    made = [name for group in groups for name in group.targets]
    if sorted(made) != sorted(whole):  # two make one tensor, or none makes it
        targets = {name: tuple(value.shape) for name, value in whole.items()}
        groups = [Group(list(empty), targets, revert)]
    return groups
