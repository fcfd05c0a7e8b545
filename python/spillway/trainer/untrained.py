"""Models that a trainer asks and does not train, a reference or a judge of rewards: engines of their own, all frozen.

They share the budgets of the trained model's configuration: each has its share of what is left, is planned within it,
and the trained model has what they do not reserve. Their stores are in folders below the configuration's.
"""
import copy
import logging
import os

from .. import log
from ..engine.engine import Engine
from ..library import Error, library, parse_config, settings_of

BUDGETS = {"hbm": "hbm_bytes", "host": "host_bytes", "nvme": "nvme_bytes"}  # by tier
OF_TRAINING = ("parameter_groups", "no_decay", "speculative_blocks", "commit_every")
TRAINED_BYTES = 4  # of a trained parameter for one of a frozen one: weight, gradient and states


def evaluated(arguments, options):
    """Whether that is what accelerator.prepare_model() is asked for."""
    return options.get("evaluation_mode", arguments[1] if len(arguments) > 1 else False)


class Untrained:
    """A trainer's. `ranks`: its own, which its models are divided among as well."""

    def __init__(self, share):
        if share is not None and not 0 < share < 1:
            raise Error("invalid_argument", f"untrained_share: is {share}; give the share of hbm_bytes and host_bytes "
                                            "that models have which are not trained, 0.25 say")
        self._share, self.engines, self.ranks = share, [], None

    def left_of(self, configuration):
        """What the trained model has: the configuration with smaller budgets, where it names some."""
        if not self.engines:
            return configuration
        budgets, left = self._budgets(configuration), copy.deepcopy(configuration)
        taken = {tier: sum(size for engine in self.engines for of, _, size in engine.ledger() if of == tier)
                 for tier in BUDGETS}
        for tier, budget in budgets.items():
            left["spillway"][BUDGETS[tier]] = max(1, budget - taken[tier])
        return left

    def _budgets(self, configuration):
        """Bytes by tier, of those that it names."""
        with log.silent():
            parsed = parse_config(configuration, None, 1 if self.ranks is None else self.ranks.count)
        try:
            settings = settings_of(parsed)
        finally:
            library().config_destroy(parsed)
        return {tier: settings[f"spillway.{key}"] for tier, key in BUDGETS.items()
                if settings.get(f"spillway.{key}") is not None}

    def take(self, model, trained, configuration, aio=None):
        """Makes the model's engine. `trained`: the model that shares the budgets. `configuration`: that one's."""
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        name = f"untrained-{len(self.engines) + 1}"
        share = self._share or _weight(model) / (_weight(model) + _weight(trained))
        budgets = {tier: int(budget * share) for tier, budget in self._budgets(self.left_of(configuration)).items()
                   if tier != "nvme"}  # whose store is as large as it is
        own = _own(configuration, name)
        own["spillway"].update({BUDGETS[tier]: budget for tier, budget in budgets.items()})
        kind = type(model).__name__
        try:
            engine = Engine(model, own, on_existing="replace", aio=aio, ranks=self.ranks)
        except Error as error:
            if error.code != "does_not_fit" or not budgets:
                raise
            raise error.instead(f"raise hbm_bytes or host_bytes, of which {kind}, which is not trained, has "
                                f"{share:.0%}, or say untrained_share=") from None
        self.engines.append(engine)
        reserved = {tier: sum(size for of, _, size in engine.ledger() if of == tier) for tier in BUDGETS}
        log.say(logging.INFO, f"{kind}: is not trained, and an engine of its own beside the trained model's: "
                f"{reserved['hbm'] >> 20} MiB of HBM and {reserved['host'] >> 20} MiB of host memory" +
                (f", within {share:.0%} of the budgets; the trained model has the rest" if budgets else ""))
        return model


def _weight(model):
    return sum(p.numel() * (TRAINED_BYTES if p.requires_grad else 1) for p in model.parameters())


def _own(configuration, name):
    """A frozen model's configuration, of the trained one's: the same place, in a folder of its own."""
    made = copy.deepcopy(configuration)
    for key in ("optimizer", "scheduler"):
        made.pop(key, None)
    below = made["spillway"]
    for key in (*OF_TRAINING, *BUDGETS.values()):
        below.pop(key, None)
    if isinstance(below.get("nvme_paths"), list):
        below["nvme_paths"] = [os.path.join(path, name) for path in below["nvme_paths"]]
    places = made.get("zero_optimization")
    if isinstance(places, dict):
        places.pop("offload_optimizer", None)
        place = places.get("offload_param")
        if isinstance(place, dict) and place.get("nvme_path"):
            place["nvme_path"] = os.path.join(place["nvme_path"], name)
    return made
