"""The tensors that a model's files have, where they are others than those in memory: transformers 5 fuses and renames
some when it reads a model, Mixtral's experts say, and so turns them back when it saves one."""
import sys

import torch


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


def groups_of(model, parts):
    """Groups of tensors as small as they can be turned back; None where files have the names in memory.

    `parts`: lists of (name, shape, dtype), each of a block, which hardly a group goes beyond. Nothing here has values.
    """
    revert = _reverting(unwrapped(model))
    if revert is None:
        return None
    empty = {name: torch.empty(shape, dtype=dtype, device="meta") for part in parts for name, shape, dtype in part}
    whole = revert(empty)
    if len(whole) == len(empty) and all(whole.get(name) is value for name, value in empty.items()):
        return None

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
