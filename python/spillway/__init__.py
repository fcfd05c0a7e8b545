"""Spillway in a PyTorch loop, and below Hugging Face's Trainer: docs/pytorch.md, docs/trainer.md.

    engine = spillway.Engine(model, "ds_config.json")
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
"""
import importlib
import importlib.util
import os
import sys

if sys.version_info < (3, 10):
    raise ImportError(f"spillway: this is Python {sys.version.split()[0]}; use Python 3.10 or newer")

from . import absent  # noqa: E402
from .library import Error  # noqa: E402

# DeepSpeed's modules, under its names: spillway.utils, spillway.zero, spillway.ops.adam, …
__path__.append(os.path.join(__path__[0], "deepspeed", "names"))
absent.find_from_here_on()

LEAST_TORCH = (1, 13)
# Where each name is, which is imported when it is asked for: the program `spillway` needs no PyTorch, and a loop of
# PyTorch's no transformers.
_PLACES = {
    "Adagrad": "optimizers",
    "Adam": "optimizers",
    "AdamW": "optimizers",
    "DeepSpeedEngine": "deepspeed",
    "Engine": "engine.engine",
    "GlobalBatchSampler": "sampler",
    "Lion": "optimizers",
    "OptimizerStepReport": "optimizers.offload_optimizer",
    "SGD": "optimizers",
    "StepReport": "library",
    "Trainer": "trainer",
    "add_config_arguments": "deepspeed",
    "get_accelerator": "deepspeed.accelerator",
    "import_deepspeed": "deepspeed.checkpoints",
    "init_distributed": "deepspeed",
    "initialize": "deepspeed",
}
_ROOMS = ("accelerator", "checkpointing", "comm", "ops", "runtime", "utils", "zero")  # below deepspeed/names

__all__ = ["Adagrad", "Adam", "AdamW", "Engine", "Error", "GlobalBatchSampler", "Lion", "OptimizerStepReport", "SGD",
           "StepReport", "add_config_arguments", "get_accelerator", "import_deepspeed", "init_distributed",
           "initialize", "zero"]


def _check_torch(name):
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"spillway.{name}: PyTorch is not installed; `pip install torch` brings it")
    version = importlib.import_module("torch").__version__
    if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) < LEAST_TORCH:
        raise ImportError(f"spillway.{name}: this is PyTorch {version}; install 1.13 or newer")


def __getattr__(name):
    if name in _PLACES:
        _check_torch(name)
        return getattr(importlib.import_module("." + _PLACES[name], __name__), name)
    if name in _ROOMS:
        _check_torch(name)
        return importlib.import_module("." + name, __name__)
    if name in absent.NEAREST:
        raise (ImportError if absent.by_import() else AttributeError)("spillway." + absent.words(name))
    if not name.startswith("_") and importlib.util.find_spec("." + name, __name__) is not None:
        return importlib.import_module("." + name, __name__)  # a module of the package
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
