"""Spillway in a PyTorch loop: python/README.md.

    engine = spillway.Engine(model, "ds_config.json")
    for batch in data:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
"""
from .engine import Engine, StepReport
from .library import Error

__all__ = ["Engine", "Error", "StepReport"]
