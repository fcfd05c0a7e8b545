"""What DeepSpeed has and Spillway has not: an error that names the nearest thing, for `spillway.X`, `import spillway.X`
and `from spillway.X import Y`.

spillway.utils, spillway.ops, … are the modules in deepspeed/names, a second folder of the package's path. What is not
there either ends here: modules by a finder that comes after Python's own, which answers for DeepSpeed's names below
`spillway.` alone; names by the __getattr__ that of() makes.
"""
import difflib
import importlib
import opcode
import sys

from .library import OPTIMIZERS

ROOMS = ("accelerator", "autotuning", "checkpoint", "checkpointing", "comm", "compile", "inference", "io", "launcher",
         "linear", "model_implementations", "module_inject", "moe", "monitor", "nebula", "ops", "pipe", "profiling",
         "runtime", "sequence", "utils", "zero")
ONE_GPU = "each process trains all layers, on one GPU: leave it out"
OTHER_OPTIMIZERS = " and ".join(", ".join(OPTIMIZERS).rsplit(", ", 1)) + \
                   " are computed: say one in the configuration's section optimizer, or give initialize() one of " \
                   "ops.adam, ops.adagrad, ops.lion or torch.optim"
INFERENCE = "engine.generate() writes text with the weights of training, block by block; engine.export(DIR) writes " \
            "what an inference program takes"
NEAREST = {
    "DeepSpeedConfig": "`spillway config FILE` says what a configuration holds, and engine.settings in Python",
    "DeepSpeedInferenceConfig": INFERENCE,
    "DeepSpeedTransformerConfig": "take PyTorch's or transformers' layers",
    "DeepSpeedTransformerLayer": "take PyTorch's or transformers' layers",
    "DeepSpeedHybridEngine": INFERENCE,
    "InferenceEngine": INFERENCE,
    "OnDevice": "accelerate's init_empty_weights() makes a model on device meta, for weights= of initialize()",
    "PipelineEngine": ONE_GPU,
    "PipelineModule": ONE_GPU,
    "autotuning": "`spillway plan` tries settings without a run, and `spillway sweep` measures drives",
    "compile": "engine.module.compile(), or torch.compile of blocks, does it",
    "default_inference_config": INFERENCE,
    "inference": INFERENCE,
    "init_inference": INFERENCE,
    "io.FastFileWriter": "io.Queue writes tensors by direct I/O",
    "launcher": ONE_GPU + ", and start the script with python, or with torchrun",
    "linear": "peft's LoRA and quantized layers train",
    "module_inject": "take the model as it is",
    "moe": "a model's own experts train, one block each if they are modules of a ModuleList",
    "monitor": "csv_monitor of the configuration writes files; step() returns a report for other programs",
    "ops.aio": "io.Queue reads and writes tensors by direct I/O; `spillway sweep` measures what it reaches",
    "ops.lamb": OTHER_OPTIMIZERS,
    "ops.muon": OTHER_OPTIMIZERS,
    "ops.sparse_attention": "torch.nn.functional.scaled_dot_product_attention, or transformers' own, computes it",
    "ops.transformer": "take PyTorch's or transformers' layers",
    "pipe": ONE_GPU,
    "profiling": "the step's report has seconds by cause, and Engine(trace=FILE) writes a timeline",
    "runtime.fp16.onebit": OTHER_OPTIMIZERS,
    "runtime.pipe": ONE_GPU,
    "sequence": ONE_GPU,
    "tp_model_init": ONE_GPU,
    "utils.groups": ONE_GPU,
}


def words(name):
    """`name`: after "spillway."."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in NEAREST:
            return f"{name}: is DeepSpeed's, and not here; {NEAREST['.'.join(parts[:length])]}"
    return f"{name}: is not here; docs/deepspeed_calls.md lists what of DeepSpeed is"


def _near(name, names):
    found = difflib.get_close_matches(name.rpartition(".")[2], names, 1)
    return f"; nearest is {found[0]}" if found else ""


def by_import():
    """It is an import statement that asks for a name, two calls up: which hides an AttributeError."""
    frame = sys._getframe(2)
    return frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == opcode.opmap["IMPORT_FROM"]


def of(module, names=(), rooms=()):
    """A module's __getattr__. `rooms`: its modules, which are imported when they are asked for."""
    room = module.partition(".")[2]

    def __getattr__(name):
        if name in rooms:
            return importlib.import_module(f"{module}.{name}")
        text = words(f"{room}.{name}") + ("" if name.startswith("__") else _near(name, (*names, *rooms)))
        raise (ImportError if by_import() else AttributeError)(text)

    return __getattr__


class Finder:
    """After Python's own, which have not found it."""

    @staticmethod
    def find_spec(name, *_):
        package, _, rest = name.partition(".")
        if package == "spillway" and rest.split(".")[0] in ROOMS:
            raise ModuleNotFoundError(f"spillway.{words(rest)}", name=name)


def find_from_here_on():
    if not any(finder is Finder for finder in sys.meta_path):
        sys.meta_path.append(Finder)
