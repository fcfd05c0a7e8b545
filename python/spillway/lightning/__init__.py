"""Spillway below Lightning: `import spillway.lightning` adds strategy="spillway" to the Trainer.

    import lightning, spillway.lightning

    trainer = lightning.Trainer(strategy="spillway", precision="bf16-mixed", max_epochs=3)
    trainer = lightning.Trainer(strategy=spillway.lightning.SpillwayStrategy("ds_config.json"))
    trainer.fit(module, loader)

Both packages are served, `lightning` and `pytorch_lightning`, those of them that are there. The
loop is Lightning's own; docs/lightning.md says what is different.
"""
import importlib
import importlib.util

from ..library import Error
from .precision import PrecisionMixin
from .strategy import StrategyMixin

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _installed(package):
    root = package.split(".", maxsplit=1)[0]
    return importlib.util.find_spec(root) is not None


def _made(package):
    """Its strategy, registered."""
    precision = importlib.import_module(f"{package}.plugins").Precision
    strategies = importlib.import_module(f"{package}.strategies")
    names = {"__module__": __name__, "package": package, "__doc__": StrategyMixin.__doc__,
             "precision_kind": type("SpillwayPrecision", (PrecisionMixin, precision),
                                    {"__module__": __name__})}
    made = type("SpillwayStrategy", (StrategyMixin, strategies.ParallelStrategy), names)
    said = "Weights and optimizer states in host memory or on NVMe"
    strategies.StrategyRegistry.register("spillway", made, description=said, override=True)
    return made, strategies.Strategy


def _all():
    made = {package: _made(package) for package in PACKAGES if _installed(package)}
    if not made:
        raise Error("not_found", "spillway.lightning: neither lightning nor pytorch_lightning is "
                                 "installed; `pip install lightning` brings one")
    # A Trainer of one package takes the other's strategy, and makes it its own.
    for package, (_, base) in made.items():
        for other, (strategy, _) in made.items():
            if other != package:
                base.register(strategy)
    StrategyMixin.classes.update({package: strategy for package, (strategy, _) in made.items()})
    return StrategyMixin.classes


def strategy_of(package: str) -> type:
    """The strategy of "lightning.pytorch" or "pytorch_lightning", to derive from; a Trainer takes
    either as it is."""
    if package not in STRATEGIES:
        raise Error("invalid_argument", f"{package}: is none of {', '.join(STRATEGIES)}, which "
                                        "are installed")
    return STRATEGIES[package]


STRATEGIES = _all()
SpillwayStrategy = next(iter(STRATEGIES.values()))
