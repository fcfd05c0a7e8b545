"""Logits that are computed where they are read: Logits, which a head returns in place of its result (heads.py).

They are a tensor without values. What becomes of each token's logits by themselves, a cast, a scale, a cap, view(), the
shift by one, gives others of their kind; what is done to tokens is done to the head's argument right away. A loss of
tokens is computed from that, slice by slice. Whoever reads them otherwise is given them, whole, by a visit of the head
as it would have been. What can be neither, a hook on them say, or a write, is an error. To native code, which asks
nobody, they are a tensor without memory, and an error as well.
"""
import contextlib

import torch
from torch.nn import functional as F

from ..library import Error
from ..memory import plain
from . import written
from .away import AS_ANOTHER, AS_IN_BLOCK, KNOWN, Deferred, _each, _named, find
from .runs import Conditions, as_autocast, autocast_of, switches

KEY = "spillway.logit_slices"
LOSSES = {F.cross_entropy, F.nll_loss}
# Of a token's logits by themselves.
ALONG_VOCABULARY = {torch.log_softmax, torch.Tensor.log_softmax, F.log_softmax}
EACH = "mul multiply div divide true_divide add sub subtract neg negative tanh clamp clip clamp_min clamp_max"
BY_TOKEN = ALONG_VOCABULARY | _named(torch, EACH) | _named(
    torch.Tensor, f"{EACH} float double half bfloat16 to type __mul__ __rmul__ __truediv__ __div__ __add__ __radd__ "
                  "__sub__ __rsub__ __neg__")
# Of shape and type alone.
MADE_LIKE = _named(torch.Tensor, "new_empty new_zeros new_ones new_full new_tensor") | \
    _named(torch, "empty_like zeros_like ones_like full_like rand_like randn_like")
ASKS = "argmax argmin argsort isnan isinf isfinite eq ne gt ge lt le"
WITHOUT_GRADIENT = {torch.Tensor.data.__get__} | _named(torch, ASKS) | _named(
    torch.Tensor, f"{ASKS} __eq__ __ne__ __gt__ __ge__ __lt__ __le__ detach tolist __repr__ __format__")
HOOKS = {torch.autograd.grad} | _named(torch.Tensor, "register_hook register_post_accumulate_grad_hook retain_grad")
_PLACE = object()  # of the logits in a function's arguments


class Call:
    """One of the head's."""

    def __init__(self, head, dtype):
        self.head, self.dtype, self._step = head, dtype, head.engine.steps_begun
        self.autocast, self._switches = autocast_of(head.engine), switches(head.block)
        self._conditions = Conditions(head.engine, head.block)

    @contextlib.contextmanager
    def as_it_was(self):
        """The head, but for autocast: its weights, train(), adapters."""
        engine = self.head.engine
        if engine.steps_begun != self._step:
            self.refuse("are read after the step of their forward pass, and the weights have changed",
                        "read them before, clone() them there")
        if switches(self.head.block) == self._switches:
            yield
            return
        if engine.together.waits():
            self.refuse("are read where an adapter or train() is not switched as in their forward pass, while other "
                        "micro-batches are inside", "read them there")
        with self._conditions.again():
            yield

    def checked(self, values):
        if values.dtype != self.dtype:
            self.refuse(f"are {values.dtype}, while those of a torch.nn.Linear would be {self.dtype}", "make it one")
        return values

    def refuse(self, what, remedy):
        raise Error("unsupported", f"logits of {self.head.block.name}: {what}; {remedy}, or set {KEY} to 1")


class _Unasked(torch.autograd.Function):
    """Before Logits in a graph, for whoever has them as an argument without asking: a torch.autograd.Function."""

    @staticmethod
    def forward(ctx, call, shape, dtype, device, *_):
        ctx.call = call
        return _without_values(shape, dtype, device)

    @staticmethod
    def backward(ctx, *_):
        ctx.call.refuse("are an argument of a torch.autograd.Function, whose gradient of them would be lost",
                        "give it a clone()")


def _without_values(shape, dtype, device):
    return torch.Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=device)


def logits_of(call, given, columns, dtype=None, changes=(), wants=True):
    """`given`: what the head is to be given, (…, width), for logits of (…, columns). `changes`: what becomes of them
    then. `wants`: gradients go through what they were made of."""
    shape, dtype, wants = (*given.shape[:-1], columns), dtype or call.dtype, wants and torch.is_grad_enabled()
    if wants:
        made = _Unasked.apply(call, shape, dtype, given.device, call.head.anchor(), given)
    else:
        made = _without_values(shape, dtype, given.device)
    made._call, made._given, made._changes, made._wants, made._values = call, given, changes, wants, {}
    return made


class Logits(Deferred):
    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        first, logits = arguments[0] if arguments else None, find((arguments, keywords), Logits)
        own = isinstance(first, Logits)
        if function in HOOKS or own and written.in_place(function) or find(keywords.get("out"), Logits) is not None:
            logits._call.refuse(f"are written to, or watched, by {getattr(function, '__name__', function)}",
                                "do that to a clone()")
        if own and function in AS_IN_BLOCK:
            return function(torch.empty(first.shape, dtype=first.dtype, device="meta"), *arguments[1:], **keywords)
        if function in MADE_LIKE if own else function in AS_ANOTHER:
            alike = torch.empty((), dtype=logits.dtype, device=logits.device).expand(logits.shape)
            return function(*(alike if each is logits else each for each in arguments), **keywords)
        if own and function in KNOWN:
            return plain(function, types, arguments, keywords)
        if logits._known() is None:
            found = _later(function, logits, arguments, keywords)
            if found is not None:
                return found
        arguments, keywords = (_each(values, lambda one: one.read(function) if isinstance(one, Logits) else one)
                               for values in (arguments, keywords))
        return function(*arguments, **keywords)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        find((arguments, keywords or {}), Logits)._call.refuse(
            f"are read by native code ({function}), which cannot ask for them", "give it a clone()")

    def _known(self):
        """Values, where they have been read before, as the grad mode asks for them."""
        return self._values.get(self._wants and torch.is_grad_enabled())

    def read(self, function=None):
        """Their values: a tensor as any other."""
        wants = self._wants and torch.is_grad_enabled() and function not in WITHOUT_GRADIENT
        if wants not in self._values and True in self._values:
            self._values[wants] = self._values[True].detach()
        if wants not in self._values:
            call = self._call
            if wants:
                reader = f"{function.__name__}()" if hasattr(function, "__name__") else "another block"
                call.head.say(f"{reader} reads its logits in training, which are computed whole", self._given)
            with torch.set_grad_enabled(wants), call.as_it_was():
                with as_autocast(call.head.engine, call.autocast):
                    values = call.checked(call.head.visit(self._given))
                for change in self._changes:
                    values = change(values)
            self._values[wants] = values
        return self._values[wants]


def read_all(values):
    """A list, with true logits."""
    return [value.read() if isinstance(value, Logits) else value for value in values]


# -- functions that need no values of theirs ----------------------------------------------------------------------


def _later(function, logits, arguments, keywords):
    """What such a function gives; None: it needs them."""
    if function in LOSSES:
        return _loss(function, *arguments, **keywords)
    if function in BY_TOKEN:
        return _by_token(function, logits, arguments, keywords)
    if arguments and arguments[0] is logits and not keywords and function in OF_TOKENS:
        return OF_TOKENS[function](*arguments)
    return None


def _of_tokens(logits, given):
    return logits_of(logits._call, given, logits.shape[-1], logits.dtype, logits._changes, logits._wants)


def _viewed(logits, *shape):
    shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    if not shape or not all(type(size) is int for size in shape):
        return None
    shape = torch.empty(logits.shape, device="meta").reshape(*shape).shape
    if shape[-1:] != logits.shape[-1:]:
        return None
    return _of_tokens(logits, logits._given.reshape(*shape[:-1], logits._given.shape[-1]))


def _flattened(logits, first=0, last=-1):
    last %= logits.dim()
    return _of_tokens(logits, logits._given.flatten(first, last)) if last < logits.dim() - 1 else None


def _indexed(logits, index):
    """Of tokens, or of them and of a slice of the vocabulary."""
    index, taken = index if isinstance(index, tuple) else (index,), 0
    for each in index:
        if each is Ellipsis:
            continue
        if type(each) not in (int, slice, torch.Tensor) or torch.is_tensor(each) and each.is_floating_point():
            return None
        taken += each.dim() if torch.is_tensor(each) and each.dtype in (torch.bool, torch.uint8) else 1
    place = next((place for place, each in enumerate(index) if each is Ellipsis), len(index))
    *tokens, columns = (*index[:place], *[slice(None)] * (logits.dim() - taken), *index[place + 1:])
    if type(columns) is not slice or Ellipsis in [each for each in tokens if not torch.is_tensor(each)]:
        return None
    logits = _of_tokens(logits, logits._given[tuple(tokens)] if tokens else logits._given)
    if columns == slice(None):
        return logits
    return _by_token(torch.Tensor.__getitem__, logits, (logits, (Ellipsis, columns)), {})


OF_TOKENS = {torch.Tensor.view: _viewed, torch.Tensor.reshape: _viewed, torch.reshape: _viewed,
             torch.Tensor.flatten: _flattened, torch.flatten: _flattened, torch.Tensor.__getitem__: _indexed,
             torch.Tensor.contiguous: lambda logits: logits}


class _Change:
    """A function of a token's logits. `arguments`: with a place for them."""

    def __init__(self, function, arguments, keywords):
        self._function, self._arguments, self._keywords = function, arguments, keywords

    def __call__(self, logits):
        return self._function(*(logits if each is _PLACE else each for each in self._arguments), **self._keywords)


def _by_token(function, logits, arguments, keywords):
    kept = []
    for each in arguments:
        if isinstance(each, torch.Tensor) and each is not logits:
            # A number, or one for each of the vocabulary.
            if each.requires_grad or each.numel() not in (1, logits.shape[-1]) or \
                    each.numel() != each.shape[-1:].numel():
                return None
            each = each.detach().reshape(each.shape[-1:]).clone()
        kept.append(_PLACE if each is logits else each)
    if sum(each is _PLACE for each in kept) != 1 or any(each is True for each in [*kept, keywords.get("copy")]) or \
            find(keywords, torch.Tensor) is not None:
        return None
    if function in ALONG_VOCABULARY:
        along = keywords.get("dim", kept[1] if len(kept) == 2 else None)
        if along is None or along % logits.dim() != logits.dim() - 1:
            return None
        kept, keywords = [_PLACE], {**keywords, "dim": -1}
    change = _Change(function, kept, keywords)
    with torch.no_grad():
        shown = change(torch.empty((0, logits.shape[-1]), dtype=logits.dtype, device=logits.device))
    if not torch.is_tensor(shown) or shown.dim() != 2 or shown.device != logits.device or \
            not shown.is_floating_point():
        return None
    return logits_of(logits._call, logits._given, shown.shape[-1], shown.dtype, (*logits._changes, change),
                     logits._wants)


class _Recipe:
    """How a token's loss comes of its logits. `autocast`: for the head alone."""

    def __init__(self, call, changes, function, keywords):
        self.autocast = call.autocast
        self._call, self._changes, self._function, self._keywords = call, changes, function, keywords

    def __call__(self, logits, target):
        self._call.checked(logits)
        for change in self._changes:
            logits = change(logits)
        return self._function(logits, target, reduction="none", **self._keywords)


def _loss(function, logits, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean",
          **more):
    """Of F.cross_entropy() and F.nll_loss(), for (tokens, vocabulary) and labels that are numbers."""
    if not isinstance(logits, Logits) or not torch.is_tensor(target) or isinstance(target, Logits) or \
            logits.dim() != 2 or target.dim() != 1 or target.is_floating_point() or \
            not 0 < len(target) == len(logits) or any(each is not None for each in (weight, size_average, reduce)) or \
            reduction not in ("none", "mean", "sum"):
        return None
    call = logits._call
    recipe = _Recipe(call, logits._changes, function, {"ignore_index": ignore_index, **more})
    with torch.set_grad_enabled(logits._wants and torch.is_grad_enabled()), call.as_it_was():
        losses = call.head.losses(logits._given, target, recipe)
    if reduction == "none":
        return losses
    # As PyTorch adds them, in fp32 at least, and rounded once.
    whole = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    return (whole / (target != ignore_index).sum() if reduction == "mean" else whole).to(losses.dtype)
