"""A model's persistent buffers, beside its exported weights: engine, store and snapshots know parameters alone."""
import json
import os

import torch

from .. import whole_files
from ..checkpoint_names import plain
from ..library import Error
from .packed import MARK

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"  # as from_pretrained() looks for them
PART, BUFFERS = "model-weights.safetensors", "model-buffers.safetensors"
KEPT = "spillway_buffers.pt"


def persistent(model):
    """By name, those that a state_dict() has, but for those that travel with their block's weights."""
    return {plain(f"{prefix}.{name}") if prefix else name: buffer for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set and not hasattr(buffer, MARK)}


def staying_bytes(model):
    """Of those that no plan counts: they stay in PyTorch's memory on the device."""
    found = {id(buffer): buffer for buffer in model.buffers() if not hasattr(buffer, MARK)}
    return sum(buffer.numel() * buffer.element_size() for buffer in found.values())


def safetensors_of(what="export: the model has persistent buffers, which are written"):
    try:
        import safetensors.torch
    except ImportError:
        raise Error("unsupported", f"{what} by the package safetensors; `pip install safetensors` brings it") from None
    return safetensors.torch


def check(model):
    """Whether save() can be done."""
    if persistent(model):
        safetensors_of()


def save(model, directory):
    """Adds the model's buffers, if it has some, to an export that is there."""
    values = {name: buffer.detach().cpu().clone().contiguous() for name, buffer in persistent(model).items()}
    if not values:
        return
    safetensors = safetensors_of()
    path = {name: os.path.join(os.fspath(directory), name) for name in (WEIGHTS, INDEX, PART, BUFFERS)}
    one_file = os.path.exists(path[WEIGHTS])
    if one_file:
        with safetensors.safe_open(path[WEIGHTS], "pt") as file:
            index = {"metadata": {"total_size": 0}, "weight_map": {name: PART for name in file.keys()}}
        index["metadata"]["total_size"] = os.path.getsize(path[WEIGHTS])
    else:
        with open(path[INDEX], encoding="utf-8") as file:
            index = json.load(file)
    whole_files.write(path[BUFFERS], lambda file: file.write(safetensors.save(values, metadata={"format": "pt"})))
    index["weight_map"].update({name: BUFFERS for name in values})
    index["metadata"]["total_size"] += sum(value.numel() * value.element_size() for value in values.values())
    whole_files.write(path[INDEX], lambda file: file.write(json.dumps(index, indent=2, sort_keys=True).encode()))
    if one_file:
        os.replace(path[WEIGHTS], path[PART])  # from here on the index is what counts
        whole_files.sync(directory)


def keep(model, directory):
    """In a checkpoint of a trainer's, under the names in memory, which an export may turn into others."""
    values = {name: buffer.detach().cpu() for name, buffer in persistent(model).items()}
    if values:
        whole_files.write(os.path.join(os.fspath(directory), KEPT), lambda file: torch.save(values, file))


def load(model, directory):
    """Gives the model the buffers of a checkpoint or an export, if that has some."""
    kept, exported = (os.path.join(os.fspath(directory), name) for name in (KEPT, BUFFERS))
    if os.path.exists(kept):
        values = torch.load(kept, map_location="cpu")
    elif os.path.exists(exported):
        values = safetensors_of().load_file(exported)
    else:
        return
    with torch.no_grad():
        for name, buffer in persistent(model).items():
            if name in values:
                buffer.copy_(values[name])
