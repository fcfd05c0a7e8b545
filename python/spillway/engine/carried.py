"""What comes along with a run that DeepSpeed began, and what does not: counts of steps, the schedule, settings."""
import inspect
import logging
import math
import warnings

from .. import log
from ..library import Error
from . import buffers
from .engine import DTYPES
from .optimizer import EngineSchedule

NAMES = dict(zip(DTYPES, ("fp32", "bf16", "fp16")))


# -- the schedule -----------------------------------------------------------------------------------------------------

def continue_schedule(scheduler, optimizer, facts):
    """One of PyTorch's is stepped as often as DeepSpeed's was; an error leaves it as it is. Returns what to say."""
    made = facts.get("schedule_steps")
    if scheduler is None:
        return "" if made is None else f"a schedule that had made {made} steps ends here: no lr_scheduler was given"
    if isinstance(scheduler, EngineSchedule):
        here = facts["optimizer_steps"]
        return "" if made in (None, here) else f"the schedule had made {made} steps, and goes on from {here}"
    if not continues(scheduler, facts):
        return "lr_scheduler begins anew"
    before, rates = None, [group["lr"] for group in optimizer.param_groups]
    try:
        before = dict(scheduler.state_dict())  # deeper, it would be the optimizer's too, by a bound method
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about steps without the optimizer's
            for _ in range(made):
                scheduler.step()
    except Exception as error:  # of any kind: it is anybody's
        if before is not None:
            scheduler.load_state_dict(before)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        raise Error("unsupported", f"lr_scheduler: {type(scheduler).__name__} cannot be stepped {made} times, as often "
                                   f"as DeepSpeed's was ({error}); give one for as many steps") from None
    return ""


def continues(scheduler, facts):
    """It can be stepped as often as DeepSpeed's was: there was one, and it asks for no metrics, as ReduceLROnPlateau
    does."""
    return scheduler is not None and facts.get("schedule_steps") is not None and not _asks_for_more(scheduler.step)


def _asks_for_more(step):
    return any(parameter.default is parameter.empty and parameter.kind not in
               (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
               for parameter in inspect.signature(step).parameters.values())


def say_where_schedule_is(engine, folder, saved):
    """Of the configuration's own, which counts the engine's steps, where a checkpoint's counts came without its
    states. `saved`: the step that the checkpoint is of."""
    if isinstance(engine.lr_scheduler, EngineSchedule) and saved != engine.current_step:
        log.say(logging.WARNING, f"{folder}: is of step {saved}, and the configuration's scheduler goes on from the "
                                 f"optimizer's step {engine.current_step}, with the learning rate "
                                 f"{engine.optimizer.param_groups[0]['lr']:g}, as no states were loaded; leave it out "
                                 "and give lr_scheduler=, which goes on from the checkpoint's, or load all of it")


# -- the rate ---------------------------------------------------------------------------------------------------------

def rate_of(facts):
    """That of all groups in a checkpoint of DeepSpeed's; None where they have several."""
    rates = _distinct([group["lr"] for group in facts["settings"] if "lr" in group])
    return rates[0] if len(rates) == 1 else None


def rate_that_counts(engine, folder, saved):
    """Words for a checkpoint's rate beside another one in the configuration."""
    shares = any(group.get("lr") is not None for group in engine.settings.get("spillway.parameter_groups", []))
    return (f"{folder}: " if folder else "") + \
        f"its learning rate {saved:g} counts, not the configuration's {engine.settings['optimizer.params.lr']:g}" + \
        (", and rates of spillway.parameter_groups keep their shares of it" if shares else "") + \
        "; optimizer.param_groups[0]['lr'] sets another"


# -- settings ---------------------------------------------------------------------------------------------------------

def other_settings(engine, facts):
    """Those of the run that goes on, where DeepSpeed trained with others; those of groups are compared as sets."""
    params = {name: engine.settings[f"optimizer.params.{name}"] for name in ("lr", "betas", "eps", "weight_decay")}
    groups = engine.settings.get("spillway.parameter_groups", [])
    rate = engine.optimizer.param_groups[0]["lr"]
    scale = rate / params["lr"] if params["lr"] else 1  # by which a schedule moves the groups' rates, too
    here = {"lr": [rate, *(scale * g["lr"] for g in groups if g.get("lr") is not None)],
            "beta1": [params["betas"][0]], "beta2": [params["betas"][1]], "eps": [params["eps"]],
            "weight_decay": [params["weight_decay"], *([0] if engine.settings["spillway.no_decay"] else []),
                             *(g["weight_decay"] for g in groups if g.get("weight_decay") is not None)]}
    found = []
    for name, values in here.items():
        there, values = (_distinct(each) for each in ([g[name] for g in facts["settings"] if name in g], values))
        if there and not (len(there) == len(values) and all(map(_alike, there, values))):
            found.append(f"{name} {_text(values)}, not {_text(there)}")
    if facts.get("trained_in", NAMES[engine.dtype]) != NAMES[engine.dtype]:
        found.append(f"{NAMES[engine.dtype]}, not {facts['trained_in']}")
    return found


def _alike(one, other):
    return math.isclose(one, other, rel_tol=1e-6)  # schedules are computed in another order of operations


def _distinct(values):
    kept = []
    for value in sorted(values):
        if not kept or not _alike(kept[-1], value):
            kept.append(value)
    return kept


def _text(values):
    return " and ".join(f"{value:g}" for value in values)


# -- the line ---------------------------------------------------------------------------------------------------------

def say_what_came(folder, facts, model, others, *notes):
    """`others`: of other_settings(). `notes`: what else is to be said, if it is something."""
    scales = facts["dtype"] == "fp16"
    steps = f"Adam's {facts['optimizer_steps']} steps"
    if (facts["global_steps"], facts["skipped_steps"]) != (facts["optimizer_steps"], 0):
        steps += f" (DeepSpeed's engine counted {facts['global_steps']}, {facts['skipped_steps']} of them skipped)"
    steps += f", after {facts['samples']} samples" if facts["samples"] else ""
    left = [f"client state ({', '.join(facts['client_state'])})"] if facts["client_state"] else []
    left += [f"loss scale {facts['loss_scale']:g}"] if "loss_scale" in facts and not scales else []
    left += [f"buffers ({', '.join(kept)})"] if (kept := buffers.persistent(model)) else []
    more = [f"not carried: {', '.join(left)}"] if left else []
    more += [f"trained otherwise from here: {'; '.join(others)}"] if others else []
    if "frozen_given" in facts:
        more.append(f"it has no frozen parameters, so the model's own {facts['frozen_given']} stay")
    more += [note for note in notes if note]
    taken = "weights, exp_avg, exp_avg_sq" + (f", loss scale {facts['loss_scale']:g}" if scales else "")
    log.say(logging.WARNING if more else logging.INFO,
            "; ".join([f"{folder}: is DeepSpeed's; taken are {taken} and {steps}", *more]))
