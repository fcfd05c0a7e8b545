"""deepspeed.checkpointing: activation checkpointing, which every block of an engine has already.

checkpoint() recomputes what it is given once more in backward, by PyTorch's torch.utils.checkpoint, as DeepSpeed's
does. Around an engine's block it changes nothing, since that keeps its inputs alone. configure()'s places of inputs
are the plan's to say.
"""
import contextlib

import torch
import torch.utils.checkpoint

_configured = False


def checkpoint(function, *args, **kwargs):
    """function(*args), as one tensor or a tuple."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, **kwargs)


def configure(mpu_, deepspeed_config=None, **_):
    global _configured  # which is_configured() says, as DeepSpeed's does
    _configured = True


def is_configured():
    return _configured


def reset():
    """Nothing is kept between passes."""


class _Tracker:
    """Random states by name; with one GPU that of PyTorch is the one there is."""

    def add(self, name, seed):
        pass

    def fork(self, name=None):
        return contextlib.nullcontext()


_tracker = _Tracker()


def get_cuda_rng_tracker():
    return _tracker


def model_parallel_cuda_manual_seed(seed):
    torch.manual_seed(seed)
