"""What initialize() is given of an optimizer of PyTorch's or DeepSpeed's: its hyper-parameters as the configuration's
sections, and its groups as what schedulers move. The steps, and the states, are the engine's.
"""
import logging
import math

import torch

from .. import log
from ..engine.optimizer import EngineSchedule
from ..library import Error
from . import schedules
from .adjusted import StatesOptimizer
from .optimizers import DeepSpeedCPUAdagrad, DeepSpeedCPUAdam, DeepSpeedCPULion, FusedAdam, FusedLion

_ADAM = ("betas", "eps")
# By exact class, as one of another may compute anything: the configuration's type, and the keys that are its params.
KINDS = {torch.optim.AdamW: ("AdamW", _ADAM), torch.optim.Adam: ("Adam", _ADAM), DeepSpeedCPUAdam: ("Adam", _ADAM),
         FusedAdam: ("Adam", _ADAM), torch.optim.Adagrad: ("Adagrad", ("eps",)),
         DeepSpeedCPUAdagrad: ("Adagrad", ("eps",)), torch.optim.SGD: ("SGD", ("momentum", "dampening", "nesterov")),
         DeepSpeedCPULion: ("Lion", ("betas",)), FusedLion: ("Lion", ("betas",))}
# What would train something else, unless it is this.
NEUTRAL = {"amsgrad": False, "maximize": False, "differentiable": False, "lr_decay": 0, "initial_accumulator_value": 0}

TWO_SCHEDULES = "lr_scheduler: the configuration has one, too; leave one out"


def optimizer_of(given, model, groups=None):
    """An optimizer, from one or from a function that makes one, as DeepSpeed's initialize() takes it: for what
    model_parameters= has, groups or parameters, or without it for all that are trained."""
    if given is None or isinstance(given, torch.optim.Optimizer) or not callable(given):
        return given
    return given([each for each in model.parameters() if each.requires_grad] if groups is None else groups)


def base_rate(group):
    return float(group.get("initial_lr", group["lr"]))  # a scheduler has moved the other


def section_of(optimizer):
    """The configuration's section optimizer."""
    if type(optimizer) not in KINDS:
        names = ", ".join(sorted({kind.__name__ for kind in KINDS}))
        raise Error("unsupported", f"optimizer: a {type(optimizer).__name__} may compute anything, and none of it "
                                   f"would reach states on NVMe; give one of {names}, or leave it out and say type "
                                   "and params in the configuration's section optimizer")
    kind, keys = KINDS[type(optimizer)]
    first = optimizer.param_groups[0]
    for group in optimizer.param_groups:
        for name, neutral in NEUTRAL.items():
            if group.get(name, neutral) != neutral:
                raise Error("unsupported", f"optimizer: {name}={group[name]} is not computed here; leave it out")
        for name in (*keys, "bias_correction"):
            if group.get(name) != first.get(name):
                raise Error("unsupported", f"optimizer: groups differ in {name}; they may in lr and weight_decay alone")
    params = {"lr": base_rate(first), "weight_decay": float(first["weight_decay"])}
    params.update((name, list(map(float, first[name])) if name == "betas" else first[name]) for name in keys)
    if "bias_correction" in first:
        params["bias_correction"] = bool(first["bias_correction"])
    if kind == "Adam":
        params["adam_w_mode"] = getattr(optimizer, "adam_w_mode", first.get("decoupled_weight_decay", False))
    if kind == "SGD" and not params["momentum"]:
        params["dampening"] = 0  # has no effect, as in PyTorch
    return {"type": kind, "params": params}


def groups_of(groups, model):
    """spillway.parameter_groups of groups after the first, whose values are the optimizer's. `groups`: as in
    param_groups, or as model_parameters= has them, without some of their values."""
    names = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
    named, seen = [], set()
    for group in groups:
        members = group["params"] if isinstance(group["params"], (list, tuple)) else [group["params"]]
        members = [parameter for parameter in members if parameter.requires_grad]
        if any(id(parameter) not in names for parameter in members):
            raise Error("unsupported", "model_parameters: some are not the model's; give those that model.parameters() "
                                       "has")
        other = [name for name in group if name not in ("params", "lr", "weight_decay", "name", "initial_lr")]
        named.append(([names[id(parameter)] for parameter in members], group, other))
        seen |= set(map(id, members))
    if seen != set(names):
        missing = next(name for key, name in names.items() if key not in seen)
        raise Error("unsupported", f"model_parameters: are not those that want gradients: {missing} is missing; say "
                                   "requires_grad_(False) to the others")
    return named


def configure(config, optimizer, groups, model, one_rate=False):
    """Puts an optimizer, or groups for the configuration's own, into a configuration, which is changed. Returns the
    groups of the EngineOptimizer to be, or None where one is enough. `one_rate`: the scheduler gives all of them."""
    if optimizer is not None:
        if "optimizer" in config:
            log.say(logging.INFO, f"initialize: the optimizer that was given, {type(optimizer).__name__}, counts, not "
                                  "the configuration's")
        config["optimizer"] = section_of(optimizer)
        groups = optimizer.param_groups
    if not groups:
        return None
    params = config.setdefault("optimizer", {"type": "AdamW"}).setdefault("params", {})
    usual = 1e-2 if params.get("torch_adam") and params.get("adam_w_mode", True) else 0  # torch.optim.AdamW's
    rate, decay = params.get("lr"), params.get("weight_decay", usual)
    plain = not any(set(group) - {"params", "name"} for group in groups)
    if optimizer is None and plain:
        made = [(names, {}, group) for names, group, _ in groups_of(groups, model) if names]
        return made if len(made) > 1 else None
    if not isinstance(rate, (int, float)) or not isinstance(decay, (int, float)):
        raise Error("unsupported", "model_parameters: groups need optimizer.params.lr and weight_decay as numbers in "
                                   "the configuration")
    made = []
    for members, group, other in groups_of(groups, model):
        if optimizer is None and other:
            raise Error("unsupported", f"model_parameters: a group's {other[0]} is not its own here; groups may differ "
                                       "in lr and weight_decay")
        if members:
            own = {"lr": base_rate({"lr": rate, **group}), "weight_decay": float(group.get("weight_decay", decay))}
            made.append((members, own, group))
    if one_rate and any(own["lr"] != made[0][1]["lr"] for _, own, _ in made):
        log.say(logging.WARNING, "model_parameters: groups have rates of their own, and the configuration's scheduler "
                                 "gives all of them one, as with DeepSpeed; leave `lr` out of the groups")
        for _, own, _ in made:
            own["lr"] = made[0][1]["lr"]
    params.update(made[0][1])  # which the others are compared with
    if params["lr"] == 0 and any(own["lr"] for _, own, _ in made):
        raise Error("unsupported", "optimizer: its first group's lr is 0 and another's is not; put that one first")
    sections = [{"parameters": members, **own} for members, own, _ in made if own != made[0][1]]
    section = config.setdefault("spillway", {})
    if sections and section.get("parameter_groups"):
        raise Error("unsupported", "model_parameters: the configuration has spillway.parameter_groups, too; leave one "
                                   "out")
    if sections:
        section["parameter_groups"] = sections
    return made if optimizer is not None or len(groups) > 1 else None


class GroupedOptimizer(StatesOptimizer):
    """An EngineOptimizer with several groups, of the caller's: their rates move together, as the engine moves them."""

    def __init__(self, engine, groups):
        model = engine.module
        super().__init__(model)
        by_name = dict(model.named_parameters())
        first, rate = self.param_groups[0], engine.settings["optimizer.params.lr"]
        self._shares, shown = [], []
        for members, own, group in groups:
            kept = {name: value for name, value in group.items() if name != "params"}
            base = own.get("lr", rate)
            shown.append({**first, **own, **kept, "lr": kept.get("lr", base), "params": [by_name[n] for n in members]})
            self._shares.append(base / rate if rate else 1.0)
        self.attach(engine)
        group = {**self.param_groups[0], **shown[0]}
        if "initial_lr" not in group:
            group["lr"] = self._shown
        self.param_groups[:] = [group, *shown[1:]]
        self.known = {name: group[name] for name in ("betas", "eps", "momentum", "weight_decay") if name in group}
        self._decays = [each.get("weight_decay") for each in self.param_groups]
        if "initial_lr" not in group:
            self.align()

    def attach(self, engine):
        groups = self.param_groups[1:]
        super().attach(engine)
        self.param_groups[1:] = groups
        if groups:  # a snapshot was loaded: parameters are those that they were
            self.param_groups[0]["params"] = [parameter for parameter in self.param_groups[0]["params"]
                                              if not any(parameter is each for group in groups
                                                         for each in group["params"])]

    def align(self):
        for group, share in zip(self.param_groups[1:], self._shares[1:]):
            group["lr"] = self.param_groups[0]["lr"] * share

    def show(self, rate):
        super().show(rate)
        if self._given is None:
            self.align()

    def given(self, rate):
        super().given(rate)
        self.align()

    def before_backward(self):
        first = self.param_groups[0]["lr"]
        for number, (group, share) in enumerate(zip(self.param_groups, self._shares)):
            wanted = first * share
            if not math.isclose(group["lr"], wanted, rel_tol=1e-9, abs_tol=1e-30):
                raise Error("unsupported", f"param_groups[{number}]['lr']: is {group['lr']:g}, and groups' rates move "
                                           f"together here, so that it would be {wanted:g}; let one function schedule "
                                           "all of them")
            if group.get("weight_decay") != self._decays[number]:
                raise Error("unsupported", f"param_groups[{number}]['weight_decay']: has no effect once the engine is "
                                           "made; say it before initialize()")
        rate = self.param_groups[0]["lr"]
        super().before_backward()
        if self._given == rate:
            self.align()


def scheduler_of(engine, configured, optimizer, given):
    """The engine's: the configuration's, or the `given` one, or function that makes one."""
    if configured.schedule is not None:
        return schedules.made(configured.schedule, engine.optimizer)
    if configured.has_schedule or "scheduler.type" in engine.settings:
        if given is not None:  # of a file with comments, which the library alone reads
            engine.close()
            raise Error("unsupported", f"initialize: not with Spillway:\n  {TWO_SCHEDULES}")
        return EngineSchedule(engine.optimizer)
    if given is None or not callable(given):
        return given and schedule(given, optimizer, engine.optimizer)
    return given(engine.optimizer)


def schedule(scheduler, client, optimizer):
    """A scheduler that was made for the client's optimizer moves the engine's from here on."""
    moved = [scheduler, *getattr(scheduler, "_schedulers", ())]
    if client is None or any(getattr(each, "optimizer", client) is not client for each in moved) or \
            not hasattr(scheduler, "optimizer"):
        raise Error("unsupported", "lr_scheduler: belongs to another optimizer than initialize() is given; give that "
                                   "as optimizer=, or a function, lr_scheduler=lambda optimizer: …")
    for each in moved:
        each.optimizer = optimizer
    marked(optimizer)
    return scheduler


def marked(optimizer):
    """As PyTorch's schedulers mark the step() of an optimizer that they were made for, and warn where it is not."""
    plain = optimizer.step

    def step(closure=None):
        return plain(closure)

    step._with_counter = step._wrapped_by_lr_sched = True
    optimizer.step = step
