"""The ds_config.json of a Trainer, filled in from TrainingArguments as DeepSpeed's integration does it."""
import copy
import json
import os
import re

from .. import log
from ..library import DEVICES, Error, Named, device_for, library, parse_config

STRING = r'("(?:\\.|[^"\\])*")'
COMMENT = re.compile(STRING + r"|//[^\n]*|/\*.*?\*/", re.DOTALL)
TRAILING_COMMA = re.compile(STRING + r"|,(?=\s*[}\]])")
ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf")  # TrainingArguments.optim: other programs of one computation


def check(configuration, aio=None, processes=1):
    """Raises what the library finds wrong with it. The rest is said when an engine reads it."""
    with log.silent():
        library().config_destroy(parse_config(configuration, aio, processes))


def _without_duplicates(pairs):
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a key is there twice")  # check() says which
    return values


def read(configuration):
    """A dict of what may be a path."""
    if isinstance(configuration, dict):
        return copy.deepcopy(configuration)
    try:
        with open(configuration, encoding="utf-8-sig") as file:
            text = file.read()
        for pattern in (COMMENT, TRAILING_COMMA):
            text = pattern.sub(lambda found: found.group(1) or " ", text)
        read = json.loads(text, object_pairs_hook=_without_duplicates)
    except (OSError, ValueError) as error:
        check(configuration)  # says it with a place, if this is no configuration
        raise Error("invalid_argument", f"{os.fspath(configuration)}: {error}") from None
    if not isinstance(read, dict):
        check(configuration)
    return Named(read, f"{os.fspath(configuration)} (filled in)")


def found(configuration, variables):
    """The same, where it may be None: the file that the first environment variable names which is set, or weights
    and states in host memory."""
    if configuration is None:
        configuration = next((os.environ[name] for name in variables if os.environ.get(name)), None)
    if configuration is None:
        place = {"device": "cpu"}
        configuration = {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}}
    return read(configuration)


class Filling:
    def __init__(self, configuration):
        self.configuration, self.contradictions = configuration, []

    def fill(self, key, value, argument=None, missing=True):
        """Where the file says "auto", or nothing and `missing`. Where it says something else than the argument, that is
        a contradiction."""
        *sections, name = key.split(".")
        section = self.configuration
        for part in sections:
            if section.get(part) is None:
                if not missing:
                    return
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                return  # zero_optimization may be true; others the library refuses
        found = section.get(name)
        if found == "auto" or (found is None and missing):
            section[name] = value
        elif found is not None and argument is not None and found != value:
            self.contradictions.append(f"{key} is {json.dumps(found)}, {argument} {json.dumps(value)}")


def _hidden_size(model):
    """As DeepSpeed's integration looks for it."""
    config = getattr(model, "config", None)
    for described in (config, getattr(config, "text_config", None)):
        if getattr(described, "hidden_size", None) is not None:
            return described.hidden_size
        if getattr(described, "hidden_sizes", None):
            return max(described.hidden_sizes)
    return None


def filled(configuration, args, model, without_decay, total_steps):
    """The configuration that an engine takes.

    `without_decay`: names of the parameters that TrainingArguments.weight_decay excepts, unless the file has groups of
      its own.
    `total_steps`: of the run; None while it is not known, and the result is good for check() alone.
    """
    filling = Filling(copy.deepcopy(configuration))
    configuration, fill = filling.configuration, filling.fill
    micro_batch, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    fill("train_micro_batch_size_per_gpu", micro_batch, "per_device_train_batch_size")
    fill("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
    fill("train_batch_size", micro_batch * accumulation * args.world_size, "the product of these arguments" + (
        f" and of {args.world_size} processes" if args.world_size > 1 else ""), missing=False)
    fill("gradient_clipping", args.max_grad_norm or 0, "max_grad_norm")

    fill("optimizer.type", "AdamW")
    optimizer = configuration["optimizer"]
    adam = isinstance(optimizer, dict) and str(optimizer["type"]).lower() in ("adamw", "adam")
    fill("optimizer.params.lr", args.learning_rate, "learning_rate")
    fill("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
    fill("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2" if adam else None, adam)
    fill("optimizer.params.eps", args.adam_epsilon, "adam_epsilon" if adam else None, adam)
    fill("bfloat16.enabled" if "bfloat16" in configuration else "bf16.enabled", bool(args.bf16), "bf16")
    fill("fp16.enabled", bool(args.fp16), "fp16")

    if configuration.get("scheduler"):
        fill("scheduler.params.warmup_min_lr", 0, missing=False)
        fill("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate", missing=False)
        known = total_steps is not None
        fill("scheduler.params.total_num_steps", total_steps if known else 1,
             "the steps of this run" if known else None, missing=False)
        fill("scheduler.params.warmup_num_steps", max(1, args.get_warmup_steps(total_steps)) if known else 1,
             "warmup_steps" if known else None, missing=False)

    width = _hidden_size(model)
    if width is not None:  # without it the plan chooses
        fill("zero_optimization.reduce_bucket_size", width * width, missing=False)
        fill("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * width * width), missing=False)
        fill("zero_optimization.stage3_param_persistence_threshold", 10 * width, missing=False)

    fill("spillway.device", device_for(args.device.type), f"the trainer's {args.device.type}")
    own = configuration["spillway"]
    if args.weight_decay and without_decay and isinstance(own, dict) and not {"no_decay", "parameter_groups"} & {*own}:
        own["parameter_groups"] = [{"parameters": without_decay, "weight_decay": 0}]
    if filling.contradictions:
        raise Error("invalid_argument", "spillway: the configuration contradicts TrainingArguments; make them equal, "
                    'or write "auto" in the configuration:\n  ' + "\n  ".join(filling.contradictions))
    return configuration


def refuse(args):
    """What arguments ask for and this trainer does not do, all of it in one error."""
    optimizer = str(getattr(args.optim, "value", args.optim))
    strategy = str(getattr(args.hub_strategy, "value", args.hub_strategy))
    several = args.world_size > 1
    found = [words for wrong, words in (
        (args.n_gpu > 1, f"{args.n_gpu} GPUs: a process trains on one; set CUDA_VISIBLE_DEVICES to one GPU"),
        (several and args.save_on_each_node, "save_on_each_node: one rank writes what all have; leave it out, and "
                                             "give an output_dir that all hosts see"),
        (several and getattr(getattr(args, "accelerator_config", None), "even_batches", None) is False,
         "even_batches false: ranks would have different numbers of batches, and each needs all others for its own"),
        (args.device.type not in DEVICES.values(), f"device {args.device.type}: training is on "
                                                   f"{' or '.join(DEVICES.values())}"),
        (args.deepspeed or getattr(args, "deepspeed_plugin", None),
         "deepspeed: give the file to the trainer, as spillway=, leave this argument out, and start the script with "
         "torchrun, or with accelerate launch without DeepSpeed"),
        (args.fsdp, "fsdp: the tiers of the configuration take its place"),
        (getattr(args, "use_liger_kernel", False), "use_liger_kernel: reads the head's weight outside of the head, "
                                                   "where it has no values"),
        (args.torch_compile, "torch_compile: a compiled model does not run block by block"),
        (args.auto_find_batch_size, "auto_find_batch_size: a step that runs out of memory cannot be begun again with "
                                    "other batches; lower per_device_train_batch_size"),
        (args.load_best_model_at_end and args.save_only_model,
         "load_best_model_at_end with save_only_model: the best checkpoint's snapshot is what is loaded; leave "
         "save_only_model out"),
        (args.bf16_full_eval or args.fp16_full_eval, "bf16_full_eval, fp16_full_eval: weights have one type, in "
                                                     "evaluation too; bf16 and fp16 say which"),
        (optimizer not in ADAMW, f"optim {optimizer}: is computed by PyTorch; leave it out, and say optimizer.type in "
                                 "the configuration"),
        (getattr(args, "optim_args", None), f"optim_args {args.optim_args}: belong to PyTorch's optimizer; say "
                                            "optimizer.params in the configuration"),
        (getattr(args, "use_cache", False), "use_cache: a cache would grow twice, as blocks are run once more in "
                                            "backward"),
        (args.push_to_hub and "checkpoint" in strategy,
         f'hub_strategy {strategy}: would upload the optimizer\'s states; take "every_save" or "end"'),
    ) if wrong]
    if found:
        raise Error("unsupported", "TrainingArguments: not with Spillway:\n  " + "\n  ".join(found))
