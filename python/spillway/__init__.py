"""Spillway in a PyTorch loop, and below Hugging Face's Trainer: python/README.md.

    engine = spillway.Engine(model, "ds_config.json")
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
"""
import importlib

from . import zero
from .deepspeed import add_config_arguments, init_distributed, initialize
from .deepspeed_import import import_deepspeed
from .engine import Engine, StepReport
from .library import Error
from .offload_optimizer import OptimizerStepReport
from .optimizers import SGD, Adagrad, Adam, AdamW, Lion

__all__ = ["Adagrad", "Adam", "AdamW", "Engine", "Error", "Lion", "OptimizerStepReport", "SGD", "StepReport",
           "add_config_arguments", "import_deepspeed", "init_distributed", "initialize", "zero"]


def __getattr__(name):  # of what needs transformers, when it is asked for
    if name not in ("Trainer", "trainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trainer = importlib.import_module(".trainer", __name__)
    return trainer if name == "trainer" else trainer.Trainer
