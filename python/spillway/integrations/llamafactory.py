"""LLaMA-Factory's `train` with an engine below it: its YAML file as it is, another command.

    python -m spillway.integrations.llamafactory train recipe.yaml [key=value...]

What the file says of `deepspeed:` is Spillway's configuration, and DeepSpeed is not asked. The trainers
are LLaMA-Factory's, of the stages pt, sft, dpo, kto and rm. `overwrite_output_dir` replaces a store.
"""
import contextlib
import importlib
import importlib.util
import os
import sys

from ..library import Error
from . import recipes

USAGE = "usage: python -m spillway.integrations.llamafactory train FILE.yaml [key=value...]"
# By stage: the class that its workflow makes.
TRAINERS = {"dpo": "CustomDPOTrainer", "kto": "CustomKTOTrainer", "pt": "CustomTrainer",
            "rm": "PairwiseTrainer", "sft": "CustomSeq2SeqTrainer"}
# Arguments by the object that has them; FinetuningArguments' first are create_custom_optimizer()'s.
OPTIMIZERS = ("use_galore", "use_apollo", "use_badam", "use_adam_mini", "use_muon")
VARIABLES = {"USE_RAY": "several processes", "USE_MCA": "Megatron's trainer",
             "USE_V1": "LLaMA-Factory's second program", "USE_KT": "KTransformers' kernels"}


def _enabled(variable):
    """As LLaMA-Factory reads it."""
    return os.environ.get(variable, "0").lower() in ("true", "y", "1")


def without_deepspeed(settings):
    """(what train() takes, the configuration that is named). `settings`: a dict, of a file and what
    the command line has beside it, or a list of the command line's words."""
    if isinstance(settings, dict):
        rest = dict(settings)
        return rest, rest.pop("deepspeed", None)
    rest, named, words = [], None, iter(settings)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != "--deepspeed":
            rest.append(word)
        elif not (named := value if equals else next(words, None)):
            raise Error("invalid_argument", "--deepspeed: names no file; give the path of a ds_config.json")
    return rest, named


def check(model, training, finetuning):
    """Refuses what would not be trained by the engine. The Mixin checks TrainingArguments."""
    recipes.refuse("LLaMA-Factory", [
        (finetuning.stage not in TRAINERS,
         f"stage: {finetuning.stage} has a loop of its own; pt, sft, dpo, kto and rm are trained"),
        *((getattr(finetuning, name, False),
           f"{name}: is an optimizer of PyTorch's; leave it out, and say optimizer.type in the configuration")
          for name in OPTIMIZERS),
        (getattr(finetuning, "loraplus_lr_ratio", None) is not None,
         "loraplus_lr_ratio: leave it out; parameter_groups in the configuration have rates of their own"),
        (getattr(finetuning, "use_hyper_parallel", False), "use_hyper_parallel: several processes; leave it out"),
        (getattr(model, "use_unsloth", False), "use_unsloth: its models do not run block by block; leave it out"),
        (getattr(model, "use_kt", False), "use_kt: has places for weights of its own; leave it out"),
        (getattr(training, "fp8", False), "fp8: is computed by accelerate; say bf16 or fp16"),
    ])


@contextlib.contextmanager
def _with_engine(tuner, chosen):
    """Puts the stage's trainer in the place of LLaMA-Factory's, once its arguments are known, and its own back."""
    parsed, replaced = tuner.get_train_args, []

    def arguments(args=None):
        model, data, training, finetuning, generating = found = parsed(args)
        check(model, training, finetuning)
        # Weights go to the engine from host memory. Quantized ones are made where it makes them.
        model.device_map = None
        # The engine runs each block once more in backward; the model's own would do it a third time.
        model.disable_gradient_checkpointing = True
        name, stage = TRAINERS[finetuning.stage], f"llamafactory.train.{finetuning.stage}"
        replace = "replace" if getattr(training, "overwrite_output_dir", False) else None
        module = importlib.import_module(f"{stage}.trainer")
        made = recipes.trainer_of(getattr(module, name), chosen, replace, "overwrite_output_dir: true")
        for user in (module, importlib.import_module(f"{stage}.workflow")):  # one of dpo imports it late
            if hasattr(user, name):
                replaced.append((user, name, getattr(user, name)))
                setattr(user, name, made)
        return found

    tuner.get_train_args = arguments
    try:
        yield
    finally:
        tuner.get_train_args = parsed
        for user, name, own in replaced:
            setattr(user, name, own)


def train(settings=None):
    """`settings`: a dict of what a YAML file has; None: what sys.argv names, as LLaMA-Factory reads it.
    Errors: spillway.Error."""
    wrong = [f"{name}: {what}" for name, what in VARIABLES.items() if _enabled(name)]
    if wrong:
        raise Error("unsupported", f"{'; '.join(wrong)}: not with Spillway, whose model is trained by one process; "
                                   "unset it")
    if importlib.util.find_spec("llamafactory") is None:
        raise Error("not_found", "llamafactory: is not installed in this Python; `pip install llamafactory` brings it")
    import torch
    if torch.cuda.device_count() > 1:
        raise Error("unsupported", f"{torch.cuda.device_count()} GPUs: a model is trained on one; set "
                                   "CUDA_VISIBLE_DEVICES to it")
    from llamafactory.hparams import read_args
    from llamafactory.train import tuner
    settings, named = without_deepspeed(read_args(settings))
    with _with_engine(tuner, recipes.configuration(named)):
        tuner.run_exp(settings)


def main():
    """The command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    if words[0] != "train":
        sys.exit(f"spillway: {words[0]}: needs no engine; `llamafactory-cli {' '.join(words)}` does it\n{USAGE}")
    if len(words) == 1:
        sys.exit(f"spillway: train: names no file\n{USAGE}")
    del sys.argv[1]
    try:
        train()
    except Error as error:
        sys.exit(f"spillway: {error}")


if __name__ == "__main__":
    main()
