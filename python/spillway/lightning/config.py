"""The ds_config.json below Lightning, filled in from a Trainer; and what a Trainer asks for and
does not get."""
import copy
import json
import os

from ..library import Error, device_for
from ..trainer.config import Filling
from .precision import SECTIONS

VARIABLES = ("SPILLWAY_CONFIG", "PL_DEEPSPEED_CONFIG_PATH")  # name a file for strategy="spillway"
AVERAGING = ("StochasticWeightAveraging", "WeightAveraging")  # callbacks that keep a second model


def accumulation_of(trainer):
    """The most micro-batches that a step has."""
    schedules = [callback.scheduling for callback in trainer.callbacks
                 if _is(callback, ("GradientAccumulationScheduler",))]
    return max([trainer.accumulate_grad_batches,
                *(count for schedule in schedules for count in schedule.values())])


def _is(callback, names):
    """Of a class of Lightning's, by whichever package."""
    return any(kind.__name__ in names for kind in type(callback).__mro__)


def filled(configuration, trainer, module, precision, device, asked, processes=1):
    """The configuration that an engine takes. `processes`: that train the model together.

    `asked`: (optimizer, parameter_groups) of configure_optimizers(); None where the configuration
      has an optimizer, or nothing is trained yet.
    """
    filling = Filling(copy.deepcopy(configuration))
    configuration, fill = filling.configuration, filling.fill
    fill("train_micro_batch_size_per_gpu", 1)  # rows are not counted
    # By hand, the module alone knows how many losses a step has.
    fill("gradient_accumulation_steps", accumulation_of(trainer),
         "accumulate_grad_batches" if module.automatic_optimization else None)
    counts = [configuration[name] for name in ("train_micro_batch_size_per_gpu",
                                               "gradient_accumulation_steps")]
    if all(isinstance(count, int) for count in counts):  # else it is the library's to say
        said = "the product of the two" + (f" and {processes} processes" if processes > 1 else "")
        fill("train_batch_size", counts[0] * counts[1] * processes, said, missing=False)
    clip = trainer.gradient_clip_val
    fill("gradient_clipping", clip or 0, None if clip is None else "gradient_clip_val")

    kind, said = SECTIONS[precision], f"precision={precision}"
    bf16 = "bfloat16" if "bfloat16" in configuration else "bf16"
    for name, section in (("bf16", bf16), ("fp16", "fp16")):
        fill(f"{section}.enabled", kind == name, said if kind else None)  # the default says nothing
    fill("spillway.device", device_for(device.type), f"the Trainer's {device.type}")

    if asked is not None:
        optimizer, groups = asked
        configuration["optimizer"] = optimizer
        own = configuration["spillway"]
        if isinstance(own, dict) and groups:
            if {"no_decay", "parameter_groups"} & {*own}:
                raise Error("invalid_argument", "spillway.parameter_groups, no_decay: are beside "
                                                "groups of configure_optimizers; leave one of the "
                                                "two out")
            own["parameter_groups"] = groups
    if filling.contradictions:
        raise Error("invalid_argument", "spillway: the configuration contradicts the Trainer; make "
                    'them equal, or write "auto" in the configuration:\n  ' +
                    "\n  ".join(filling.contradictions))
    return configuration


def words(planned):
    """To compare two."""
    return json.dumps(planned, sort_keys=True, default=str)


def refuse(trainer, module, overridden, expected=1):
    """What is asked for and not done, all of it in one error. `overridden`: whether the module has
    that hook. `expected`: processes of the Trainer."""
    algorithm = trainer.gradient_clip_algorithm
    averaging = [type(callback).__name__ for callback in trainer.callbacks
                 if _is(callback, AVERAGING)]
    processes = int(os.environ.get("WORLD_SIZE") or expected)
    synced = getattr(trainer.strategy, "_layer_sync", None) is not None and expected > 1
    problems = [text for wrong, text in (
        (processes != expected,
         f"WORLD_SIZE {processes}: the Trainer's devices= and num_nodes= say {expected}; start as "
         "many processes, or none by torchrun"),
        (synced, "sync_batchnorm: each process would compute its own means; leave it out"),
        (getattr(algorithm, "value", algorithm) == "value",
         'gradient_clip_algorithm "value": an engine clips the norm of all gradients; leave it '
         "out"),
        (overridden("backward"), f"{type(module).__name__}.backward: would not be asked; the "
                                 "engine goes through the graph, so leave it out"),
        (getattr(module, "_compiler_ctx", None),
         "torch.compile: a compiled module does not run block by block"),
        (averaging, f"{', '.join(averaging)}: keeps a second model in memory; leave it out"),
    ) if wrong]
    if problems:
        raise Error("unsupported", "Trainer: not with Spillway:\n  " + "\n  ".join(problems))


def refuse_schedulers(schedulers):
    for scheduler in schedulers:
        if getattr(scheduler, "cycle_momentum", False):
            raise Error("unsupported", f"{type(scheduler).__name__}: would change the optimizer's "
                                       "momentum, but its value at fit()'s start counts; give it "
                                       "cycle_momentum=False")
