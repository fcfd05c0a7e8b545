"""Lightning's precision plugin on a Spillway engine: weights of one type, and backward through the
engine."""
import contextlib
import weakref

import torch

from ..library import Error

SECTIONS = {"32-true": None, "bf16-true": "bf16", "bf16-mixed": "bf16",
            "16-true": "fp16", "16-mixed": "fp16"}
TYPES = {None: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Lightning's own, which say a type and nothing else that would be left out.
KNOWN = ("Precision", "HalfPrecision", "MixedPrecision", "DeepSpeedPrecision", "SpillwayPrecision")


def check(plugin):
    """Its word for a type, "bf16-mixed" say; an error where it is another kind of plugin."""
    word = getattr(plugin, "precision", None)
    if type(plugin).__name__ not in KNOWN or word not in SECTIONS:
        raise Error("unsupported", f"precision: {type(plugin).__name__} ({word}) is not here; "
                                   "weights are of one type, say precision= one of "
                                   f"{', '.join(SECTIONS)}")
    return word


class _Default(contextlib.ContextDecorator):
    """Floating-point tensors are made in that type."""

    def __init__(self, dtype):
        self._dtype = dtype

    def __enter__(self):
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(self._dtype)

    def __exit__(self, *_):
        torch.set_default_dtype(self._before)


class PrecisionMixin:
    """In front of Lightning's Precision. There is no autocast: "mixed" differs from "true" in what
    a module is made in, which is fp32."""

    def __init__(self, precision, strategy):
        self.precision = precision
        self._strategy = weakref.proxy(strategy)

    def convert_module(self, module):
        return module  # the engine has its weights

    def convert_input(self, data):
        """Numbers come in the weights' type, as with DeepSpeed."""
        engine = self._strategy.engine
        return data if engine is None else _converted(data, engine.dtype)

    def tensor_init_context(self):
        if not self.precision.endswith("true"):
            return contextlib.nullcontext()
        return _Default(TYPES[SECTIONS[self.precision]])

    def module_init_context(self):
        return self.tensor_init_context()

    def backward(self, tensor, model, optimizer, *arguments, retain_graph=False, **keywords):
        if arguments or any(keywords.values()):
            asked = ", ".join([*map(str, arguments), *keywords])
            raise Error("unsupported", f"backward: takes a loss and retain_graph ({asked}); the "
                                       "engine begins with the loss, and keeps no graph of gradients")
        self._strategy.backward_of(tensor, bool(retain_graph))

    def clip_gradients(self, optimizer, clip_val=0.0, gradient_clip_algorithm="norm"):
        """The engine clips, in step()."""
        algorithm = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm) or "norm"
        here = self._strategy.engine.settings["gradient_clipping"]
        if clip_val and (algorithm != "norm" or clip_val != here):
            raise Error("unsupported", f"clip_gradients: by {algorithm} to {clip_val:g}; step() "
                                       f"clips the norm, to {here:g}: say gradient_clip_val of "
                                       "the Trainer, or gradient_clipping in the configuration "
                                       "where optimization is manual")


def _converted(data, dtype):
    if torch.is_tensor(data):
        return data.to(dtype) if data.is_floating_point() else data
    from lightning_utilities.core.apply_func import apply_to_collection
    return apply_to_collection(data, torch.Tensor, lambda tensor: _converted(tensor, dtype))
