"""deepspeed.utils.zero_to_fp32: a checkpoint's weights as one state_dict in fp32, without an engine."""
import os

import torch

from .. import log, whole_files
from ..library import Error
from .saved_weights import beside, folder_of, tensors


def get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag=None, exclude_frozen_parameters=False,
                                             lazy_mode=False):
    """Parameters, with tied names, and persistent buffers. It takes CPU memory for all of them, also in lazy_mode."""
    folder = folder_of(checkpoint_dir, tag)
    kept = beside(folder)
    frozen = set(kept.get("frozen", ())) if exclude_frozen_parameters else ()
    state = {name: value for name, value in tensors(folder) if name not in frozen}
    state.update((alias, state[name]) for alias, name in kept.get("tied", {}).items() if name in state)
    state.update(kept["buffers"])
    return state


def convert_zero_checkpoint_to_fp32_state_dict(checkpoint_dir, output_dir, max_shard_size="5GB",
                                               safe_serialization=False, tag=None, exclude_frozen_parameters=False):
    """pytorch_model.bin, by torch.save(). For safetensors `spillway export` and engine.export() write what
    from_pretrained() takes, tile by tile."""
    if safe_serialization:
        raise Error("unsupported", "convert_zero_checkpoint_to_fp32_state_dict: safe_serialization is not here; "
                                   "`spillway export` makes safetensors of the snapshot in a checkpoint")
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag, exclude_frozen_parameters)
    path = os.fspath(output_dir)
    if os.path.isdir(path) or not os.path.splitext(path)[1]:  # before DeepSpeed 0.15 it was the file
        os.makedirs(path, exist_ok=True)
        path = os.path.join(path, "pytorch_model.bin")
    whole_files.write(path, lambda file: torch.save(state, file))


def load_state_dict_from_zero_checkpoint(model, checkpoint_dir, tag=None):
    """Into a model that no engine has taken, which is returned on the CPU."""
    with log.silent():
        state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    model = model.cpu()
    model.load_state_dict(state, strict=False)
    return model
