"""The optimizer of a LightningModule below a Spillway engine: what it asks for, and how it is
served.

The object that configure_optimizers() returned stays, so that schedulers, callbacks and
isinstance() see what they know. Its class becomes one whose step() is the engine's. What it says of
rates and decays, the engine's configuration says before training begins; of that, rates alone may
change later.
"""
import functools
import inspect
import math

import torch

from ..checkpoint_names import plain
from ..engine.optimizer import EngineOptimizer
from ..library import Error

SETTINGS = ("betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "lr_decay")


def _same(step):
    """Marks a step() as one that schedulers know: they look whether it is still theirs."""
    step._with_counter = step._wrapped_by_lr_sched = True  # before PyTorch 2.4, and since
    return step


class Served:
    """In front of an optimizer's own class."""

    @_same
    def step(self, closure=None):
        """Forward and backward run in the closure, as Lightning calls it. Without a loss nothing is
        updated."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.spillway.step()
        # Which schedulers look at: before PyTorch 2.4, and since.
        self._step_count, self._opt_called = getattr(self, "_step_count", 0) + 1, True
        return loss

    def zero_grad(self, *_, **__):
        self.spillway.engine.zero_grad()

    def add_param_group(self, param_group):
        if getattr(self, "spillway", None) is None:  # of a constructor
            super().add_param_group(param_group)
            return
        raise Error("unsupported", "add_param_group: what is trained is decided when fit() "
                                   "begins; give the optimizer all groups in configure_optimizers")

    def state_dict(self):
        raise Error("unsupported", "optimizer: its states are Spillway's; "
                                   "trainer.save_checkpoint(PATH) keeps them")

    def load_state_dict(self, state_dict):
        raise Error("unsupported", "optimizer: its states are Spillway's; they come of "
                                   "fit(ckpt_path=PATH)")


@functools.lru_cache(None)
def _served(kind):
    return type(kind.__name__, (Served, kind), {"__module__": kind.__module__})


def serve(optimizer, strategy, parameters):
    """From here on its steps are the strategy's. `parameters`: those of the model, by name, which
    may be others than those that the optimizer was made with."""
    for group, names in zip(optimizer.param_groups, optimizer.spillway_names):
        group["params"] = [parameters[name] for name in names]
    optimizer.state.clear()
    optimizer.__dict__.pop("step", None)  # a scheduler's, around the one of its class
    optimizer.spillway = strategy
    optimizer.__class__ = _served(type(optimizer))


class Configured(Served, EngineOptimizer):
    """In the place of an optimizer that the configuration names. Its rate is as the configuration's
    schedule says."""


def configured(kind, strategy, engine):
    """`kind`: the optimizer's name, by which callbacks log its rate."""
    made = type(kind, (Configured,), {})(engine.module)
    made.spillway = strategy
    made.attach(engine)
    return made


# -- what it asks for ------------------------------------------------------------------------------

def section(optimizer, module):
    """(optimizer, parameter_groups) as a configuration has them. The optimizer remembers its
    parameters' names."""
    if isinstance(optimizer, Served):  # of an earlier fit()
        optimizer.spillway, optimizer.__class__ = None, type(optimizer).__mro__[2]
    kind, params = _kind_of(optimizer)
    groups = optimizer.param_groups
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    _check(optimizer, module, names)
    optimizer.spillway_names = [[names[id(parameter)] for parameter in group["params"]]
                                for group in groups]
    optimizer.spillway_rates = rates = _initial_rates(groups)
    optimizer.spillway_settings = settings(optimizer)
    values = [{"lr": rate, "weight_decay": group.get("weight_decay", 0)}
              for rate, group in zip(rates, groups)]
    own = [{"parameters": list(map(plain, of_group)), **of}
           for of_group, of in list(zip(optimizer.spillway_names, values))[1:] if of_group]
    return {"type": kind, "params": {**params, **values[0]}}, own


def _initial_rates(groups):
    """Which a schedule moves from."""
    return [float(group.get("initial_lr", group["lr"])) for group in groups]


def _computes(optimizer, kind):
    """It is of that kind, and has not another step()."""
    return isinstance(optimizer, kind) and \
        inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def _kind_of(optimizer):
    """By its name here; without rate and decay."""
    group = optimizer.param_groups[0]
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        if _computes(optimizer, kind):
            params = {"betas": list(map(float, group["betas"])), "eps": group["eps"]}
            coupled = kind is torch.optim.Adam and not group.get("decoupled_weight_decay", False)
            return ("Adam", {**params, "adam_w_mode": False}) if coupled else ("AdamW", params)
    if _computes(optimizer, torch.optim.SGD):
        return "SGD", {name: group[name] for name in ("momentum", "dampening", "nesterov")}
    if _computes(optimizer, torch.optim.Adagrad):
        if group.get("lr_decay") or group.get("initial_accumulator_value"):
            raise Error("unsupported", "configure_optimizers: Adagrad's lr_decay and "
                                       "initial_accumulator_value are not here; leave them out")
        return "Adagrad", {"eps": group["eps"]}
    raise Error("unsupported", f"configure_optimizers: {type(optimizer).__name__} would be "
                               "computed by PyTorch, whose states cannot be elsewhere; return "
                               "torch.optim's AdamW, Adam, SGD or Adagrad, or name one in the "
                               "configuration's section optimizer, which has Lion, too")


def _check(optimizer, module, names):
    groups, first = optimizer.param_groups, optimizer.param_groups[0]
    wrong = [name for name in ("amsgrad", "maximize", "differentiable")
             if any(group.get(name) for group in groups)]
    if wrong:
        raise Error("unsupported", f"configure_optimizers: {', '.join(wrong)} of "
                                   f"{type(optimizer).__name__}: cannot be computed; leave it out")
    for name in set(SETTINGS) - {"weight_decay"}:
        if any(group.get(name) != first.get(name) for group in groups):
            raise Error("unsupported", f"configure_optimizers: groups have several {name}; only "
                                       "rates and decays may be of a group")
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    if trained - names.keys():
        raise Error("invalid_argument", "configure_optimizers: the optimizer has parameters that "
                                        "the module has not; put what is trained into the "
                                        "LightningModule")
    left = [name for name, parameter in module.named_parameters() if parameter.requires_grad
            and id(parameter) not in trained]
    if left:
        raise Error("invalid_argument", "configure_optimizers: "
                                        f"{', '.join(left[:4])}{' …' if left[4:] else ''} want "
                                        "gradients and no optimizer has them; give them to it, or "
                                        "say requires_grad_(False) to them")
    rates = _initial_rates(groups)
    if rates[0] == 0 and any(rates):
        raise Error("unsupported", "configure_optimizers: the first group's rate is 0, by which a "
                                   "schedule moves the others'; put a group with a rate first")


def settings(optimizer):
    """What must stay as it was when the engine was made."""
    return [{name: group[name] for name in SETTINGS if name in group}
            for group in optimizer.param_groups]


def rate_of(optimizer):
    """The rate that comes. An error where something else has changed, or groups move by different
    shares."""
    for before, now in zip(optimizer.spillway_settings, settings(optimizer)):
        for name in before.keys() | now.keys():
            if before.get(name) != now.get(name):
                raise Error("unsupported", f"param_groups: {name} was {before.get(name)} and is "
                                           f"{now.get(name)}; it counts as fit() began; "
                                           "schedulers that move it take cycle_momentum=False")
    rates, first = [group["lr"] for group in optimizer.param_groups], optimizer.spillway_rates
    for rate, initial in zip(rates[1:], first[1:]):
        if not math.isclose(rate * first[0], initial * rates[0], rel_tol=1e-6, abs_tol=1e-30):
            share = initial * rates[0] / first[0]
            raise Error("unsupported", f"param_groups: a group's rate is {rate:g} where {share:g} "
                                       "is its share of the first group's; schedules move all "
                                       "groups alike")
    return float(rates[0])
