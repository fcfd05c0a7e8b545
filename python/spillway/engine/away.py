"""What a parameter is while its block is away: itself, with its name and shape and without values. Its class is another
one for so long, which answers what can be known of it, has its values lent where they are read (lent.py), and raises a
named error where they are written.

PyTorch asks that class in every function that it calls from Python. What asks nothing, a TorchScript function,
torch.tensor(parameter) or a C++ extension, comes upon memory of one element that stands for all of them: newer PyTorch
raises an error with its name there, too, as it does for its own FakeTensor, and older reads NaN.
"""
import contextlib
import functools

import torch

from ..library import Error
from ..memory import plain
from . import written

# By the address of memory and a text, which whoever asks for its bytes raises; None: PyTorch has no such thing yet.
REFUSE_BYTES = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
# Whether torch.compile traces what runs.
compiling = getattr(getattr(torch, "compiler", None), "is_compiling", lambda: False)


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
AS_ANOTHER = _named(torch.Tensor, "to type_as view_as expand_as reshape_as")  # of a tensor that has values


# What looks at a tensor's bytes for longer than it runs, or makes another tensor that is to live as long as it likes.
COPIED = _named(torch.Tensor, "__reduce_ex__ __deepcopy__ numpy __array__ __dlpack__ __dlpack_device__ storage "
                "untyped_storage _typed_storage data_ptr share_memory_")
READ_AS_COPY = _named(torch.Tensor, "numpy __array__")


class _OfItsOwn(type(torch.nn.Parameter)):
    """A parameter's class takes what is marked as a parameter for an instance of it, torchao's tensors say."""

    def __instancecheck__(cls, instance):
        return type.__instancecheck__(cls, instance)


class AwayParameter(torch.nn.Parameter, metaclass=_OfItsOwn):
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
        if compiling():
            raise Error("invalid_argument", read_outside(*first._spillway_names if away else ("a weight", "BLOCK")))
        return _read(function, arguments, keywords)

    def __repr__(self):
        return f"Parameter {self._spillway_names[0]}, while its block is away: {tuple(self.shape)}, {self.dtype}, " \
               f"{self.device}"

    def __format__(self, form):
        return format(repr(self), form)

    def __reduce_ex__(self, protocol):  # of copy.copy, pickle and torch.save: another one, of this class
        raise Error("invalid_argument", read_outside(*self._spillway_names))

    def __deepcopy__(self, memo):
        self.__reduce_ex__(None)


class Deferred(torch.Tensor):
    """A tensor without values, which read() gives (logits.py)."""


class Lent(torch.Tensor):
    """A weight on loan (lent.py), or a view of one."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function in KNOWN or function in AS_IN_BLOCK:
            return plain(function, types, arguments, keywords or {})
        return _read(function, arguments, keywords or {})


def _read(function, arguments, keywords):
    """A function of weights that are away: what it reads is lent to it."""
    first = arguments[0] if arguments else None
    if isinstance(first, AwayParameter) and (function == written.DATA or _changes(function, first)) and \
            written.writable(first):
        return written.asked(function, first, arguments[1:], keywords)
    _refuse(function, first, find((arguments, keywords), (AwayParameter, Lent)), "out" in keywords and
            find(keywords["out"], (AwayParameter, Lent)) is not None)
    lenders = []

    def lend(value):
        if isinstance(value, AwayParameter):
            lender = value._spillway_lender()
            lent = lender and lender.lend(value)
            if lent is None:
                raise Error("invalid_argument", f"{value._spillway_names[0]}: has no values any more, since its engine "
                                                "has ended; keep the engine for as long as its model is used")
            value = lent
        if isinstance(value, Deferred):
            value = value.read(function)
        if isinstance(value, Lent):
            lender = value._spillway_lender()
            if lender is not None and lender not in lenders:
                lenders.append(lender)
        return value

    arguments, keywords = _each(arguments, lend), _each(keywords, lend)

    def run():
        if function in COPIED:
            return function(arguments[0].detach().clone(), *arguments[1:], **keywords)
        with lenders[0].hooks(*lenders[1:]) if lenders else contextlib.nullcontext():
            result = function(*arguments, **keywords)
        for lender in lenders:
            result = lender.marked(result)
        return result

    return plain(run, (), (), {})


def _each(values, change):
    if isinstance(values, torch.Tensor):
        return change(values)
    if type(values) in (tuple, list):
        return type(values)(_each(value, change) for value in values)
    if type(values) is dict:
        return {name: _each(value, change) for name, value in values.items()}
    return values


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
    return Error("unsupported", f"{name}: was written to outside of its block, and the write is "
                                "lost; weights come from "
                                "weights= or a snapshot, and change by training")


def _changes(function, first):
    return written.in_place(function) and find(first, (AwayParameter, Lent)) is not None


def _refuse(function, first, weight, is_result):
    """What a loan is not for. `weight`: the first of them in the arguments."""
    name, block = getattr(weight, "_spillway_names", ("a weight", ""))
    if function is torch.autograd.grad:
        raise Error("unsupported", f"{name}: its gradient was requested, but gradients of weights "
                                   "go only to engine.backward(loss)")
    if _changes(function, first) or is_result:
        raise written_outside(name)
    if function in COPIED and function not in READ_AS_COPY and isinstance(first, AwayParameter):
        raise Error("invalid_argument", read_outside(name, block))


def read_outside(name, block):
    return f"{name}: is read outside of its block, in a way that a loan cannot serve; read it inside `with engine." \
           f'weights_of("{block}"):`, or name in blocks= a module that has both its block and what reads it'


@functools.lru_cache(None)
def _away(kind):
    """The class that a parameter of that class has while it is away."""
    return AwayParameter if kind is torch.nn.Parameter else type(f"Away{kind.__name__}", (AwayParameter, kind), {})


def send_away(parameter, name, block, place, lender, packed=None):
    """For the first time. `block`: the name of one that has it. `lender`: a weak reference to who lends its values.
    `packed`: None, or what empties it (packed.py)."""
    parameter._spillway_packed = packed
    parameter._spillway_names, parameter._spillway_place, parameter._spillway_lender = (name, block), place, lender
    if not isinstance(parameter, AwayParameter):
        parameter._spillway_kind = type(parameter)
        parameter._spillway_nothing = None if packed else parameter.data
        if REFUSE_BYTES is not None and not packed:
            REFUSE_BYTES(parameter.data.untyped_storage()._cdata, read_outside(name, block))
        parameter.__class__ = _away(type(parameter))


def come_back(parameter):
    parameter.__class__ = parameter._spillway_kind


def go_away(parameter):
    come_back(parameter)
    if parameter._spillway_packed:
        parameter._spillway_packed.empty()
    else:
        parameter.data = parameter._spillway_nothing
    parameter.__class__ = _away(parameter._spillway_kind)
