"""The fp32 weights of a checkpoint that save_checkpoint() wrote, without an engine: one tensor after another."""
import ctypes
import json
import os
import tempfile

import torch

from ..library import Error, ExportOptions, library
from .checkpoints import LATEST, is_deepspeeds

SNAPSHOT, STATE = "spillway", "client_state.pt"
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def folder_of(checkpoint, tag=None):
    """Of a checkpoint's tag; the default is what its `latest` names."""
    if tag is None:
        path = os.path.join(checkpoint, LATEST)
        try:
            with open(path, encoding="utf-8") as file:
                tag = file.read().strip()
        except OSError as error:
            raise Error("not_found", f"{path}: cannot be read ({error.strerror}); name the checkpoint with "
                                     "tag=") from None
    folder = os.path.join(checkpoint, str(tag))
    if is_deepspeeds(folder):
        raise Error("unsupported", f"{folder}: is DeepSpeed's; the zero_to_fp32.py that lies in it converts it, and "
                                   "load_checkpoint() goes on from it")
    return folder


def tensors(folder):
    """(name, fp32 tensor) of each parameter. It takes 4 bytes a parameter of disk beside the checkpoint for as long."""
    with tempfile.TemporaryDirectory(prefix=".spillway-weights-", dir=folder) as room:
        exported, step = os.path.join(room, "weights"), ctypes.c_uint64()
        library().export_snapshot(os.fsencode(os.path.join(folder, SNAPSHOT)), os.fsencode(exported),
                                  ctypes.byref(ExportOptions(0, 0)), ctypes.byref(step))
        for name in sorted(os.listdir(exported)):
            if name.endswith(".safetensors"):
                yield from _in_file(os.path.join(exported, name))


def _in_file(path):
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            data = bytearray(file.read(end - begin))
            flat = torch.frombuffer(data, dtype=TYPES[entry["dtype"]]) if data else torch.empty(0)
            yield name, flat.view(entry["shape"]).float()


def beside(folder):
    """What save_checkpoint() keeps beside a snapshot: the client's state, buffers, tied names."""
    path = os.path.join(folder, STATE)
    return torch.load(path, map_location="cpu", weights_only=False)  # the client's may be anything
