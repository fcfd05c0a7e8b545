"""What a parameter is while its block is away: itself, with its name and shape and without values. Its class is another
one for so long, which answers what can be known of it and raises a named error where values are read or written.

PyTorch asks that class in every function that it calls from Python. What asks nothing, a TorchScript function,
torch.tensor(parameter) or a C++ extension, comes upon memory of one element that stands for all of them: newer PyTorch
raises an error with its name there, too, as it does for its own FakeTensor, and older reads NaN.
"""
import functools

import torch

from .library import Error

# By the address of memory and a text, which whoever asks for its bytes raises; None: PyTorch has no such thing yet.
REFUSE_BYTES = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
# A function's own answer. It ends with the call, where Ctrl-C could leave a `with` of the same effect.
plain = torch._C._disabled_torch_function_impl


def _named(owner, names):
    return {getattr(owner, name) for name in names.split() if hasattr(owner, name)}


KNOWN = {getattr(torch.Tensor, name).__get__ for name in (
    "shape dtype device layout ndim itemsize nbytes names name requires_grad is_leaf grad _grad grad_fn retains_grad "
    "output_nr _version _base _backward_hooks _post_accumulate_grad_hooks is_cpu is_cuda is_xla is_xpu is_mps is_meta "
    "is_ipu is_hpu is_ort is_maia is_mtia is_vulkan is_mkldnn is_quantized is_nested is_sparse is_sparse_csr "
    "grad_dtype").split() if hasattr(torch.Tensor, name)}
KNOWN |= {getattr(torch.Tensor, name).__set__ for name in ("grad", "_grad", "requires_grad", "_backward_hooks",
                                                           "_post_accumulate_grad_hooks", "grad_dtype")
          if hasattr(torch.Tensor, name)}
KNOWN |= {torch.Tensor.grad.__delete__}
KNOWN |= _named(torch.Tensor, "size dim ndimension numel nelement element_size get_device is_floating_point is_complex "
                "is_signed is_inference is_conj is_neg is_same_size storage_offset has_names requires_grad_ "
                "retain_grad register_hook register_post_accumulate_grad_hook new_empty new_zeros new_ones "
                "__len__ __hash__ __dir__")
KNOWN |= _named(torch, "numel is_floating_point is_complex is_signed is_inference is_conj is_neg is_same_size "
                "result_type empty_like zeros_like ones_like full_like rand_like randn_like")
AS_IN_BLOCK = _named(torch.Tensor, "stride is_contiguous dim_order")
WRITES = {"__setitem__", "__set__"} | {f"__i{name}__" for name in (
    "add sub mul matmul truediv floordiv div mod pow and or xor lshift rshift").split()}
AS_ANOTHER = _named(torch.Tensor, "to type_as view_as expand_as reshape_as")  # of a tensor that has values


class AwayParameter(torch.nn.Parameter):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        first = arguments[0] if arguments else None
        away = isinstance(first, AwayParameter)
        if function in KNOWN or (function in AS_ANOTHER and not away) or \
                (function is torch.Tensor.type and len(arguments) == 1 and not keywords):
            return plain(function, types, arguments, keywords)
        if function in AS_IN_BLOCK and away:
            return function(torch.empty(first.shape, dtype=first.dtype, device="meta"), *arguments[1:], **keywords)
        _refuse(function, first if away else find((arguments, keywords), AwayParameter), away)

    def __repr__(self):
        return f"Parameter {self._spillway_names[0]}, while its block is away: {tuple(self.shape)}, {self.dtype}, " \
               f"{self.device}"

    def __format__(self, form):
        return format(repr(self), form)


def find(values, kind):
    """The first tensor of that class in arguments."""
    if isinstance(values, kind):
        return values
    if isinstance(values, dict):
        values = values.values()
    if isinstance(values, (tuple, list)) or type(values) is type({}.values()):
        return next((found for value in values if (found := find(value, kind)) is not None), None)
    return None


def written_outside(name):
    return Error("unsupported", f"{name}: was written to outside of its block, which is lost; weights come from "
                                "weights= or a snapshot, and change by training")


def _refuse(function, parameter, is_first):
    name, block = getattr(parameter, "_spillway_names", ("a parameter", ""))
    if function is torch.autograd.grad:
        raise Error("unsupported", f"{name}: is asked for its gradient by something else than engine.backward(loss), "
                                   "to which alone gradients of weights go")
    called = getattr(function, "__name__", "")
    if is_first and (called in WRITES or called.endswith("_") and not called.endswith("__")):
        raise written_outside(name)
    raise Error("invalid_argument", _read_outside(name, block))


def _read_outside(name, block):
    return f"{name}: is read outside of its block, while its values are away; read it inside `with engine." \
           f'weights_of("{block}"):`, or name in blocks= a module that has both its block and what reads it'


@functools.lru_cache(None)
def _away(kind):
    """The class that a parameter of that class has while it is away."""
    return AwayParameter if kind is torch.nn.Parameter else type(f"Away{kind.__name__}", (AwayParameter, kind), {})


def send_away(parameter, name, block):
    """For the first time. `block`: the name of one that has it."""
    parameter._spillway_names = (name, block)
    if not isinstance(parameter, AwayParameter):
        parameter._spillway_kind, parameter._spillway_nothing = type(parameter), parameter.data
        if REFUSE_BYTES is not None:
            REFUSE_BYTES(parameter.data.untyped_storage()._cdata, _read_outside(name, block))
        parameter.__class__ = _away(type(parameter))


def come_back(parameter):
    parameter.__class__ = parameter._spillway_kind


def go_away(parameter):
    come_back(parameter)
    parameter.data = parameter._spillway_nothing
    parameter.__class__ = _away(parameter._spillway_kind)
