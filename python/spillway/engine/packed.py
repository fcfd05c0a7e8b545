"""Frozen weights in a form of their own, quantized ones above all: all their tensors are bytes of one parameter of the
library's, and lie over a lease's memory while their block runs.

What a weight consists of is found by walking it, and nothing here knows a package by name:

    a subclass with __tensor_flatten__   its inner tensors (torchao), and theirs
    a parameter of another element type  itself: uint8, int8, int32, float8 (bitsandbytes, HQQ)
    its attributes                       tensors in objects and dicts: quant_state, state2, offset, CB, SCB
    the module's                         tensors in plain attributes: HQQ's `meta`, bitsandbytes' `state`
    buffers of integers                  qweight, qzeros, g_idx of GPTQ and AWQ, and the scales beside them

Each of these is a plain tensor, a part; subclasses and objects only refer to it. So a part keeps its identity, and what
changes is its memory: `part.data` is a view of the lease's bytes, or of one element that stands for all of them. Parts
found in attributes are replaced by tensors of our own first, since tables may be a package's for all weights. What a
visit puts in the place of an attribute (bitsandbytes repacks for a CPU) is put back as it ends.

    bytes    | 16: which form this is | part | part | … |    each part at a multiple of 64
"""
import hashlib
import types

import torch

from ..library import Error
from ..memory import address_of, tensor_at
from .away import REFUSE_BYTES, written_outside

NUMBERS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ALIGNMENT, HEADER = 64, 16
LEAST_BUFFER = 1 << 16  # bytes: below it a buffer of integers is a table or a counter, which stays where it is
MARK = "_spillway_packed"  # of a buffer that travels


def _is_wrapper(tensor):
    return hasattr(type(tensor), "__tensor_flatten__")


def _inner(wrapper):
    """Names of those of its tensors that are there."""
    return [name for name in wrapper.__tensor_flatten__()[0] if isinstance(getattr(wrapper, name), torch.Tensor)]


class _Walk:
    """What is found from a weight, or from a module's attributes: parts, and the objects that have them."""

    def __init__(self, name):
        self.name, self.found, self._seen = name, [], set()  # (path, tensor, put another in its place)
        self.holders = []                                    # objects and dicts

    def tensor(self, path, tensor, put):
        if _is_wrapper(tensor):
            for name in _inner(tensor):
                if getattr(tensor, name) is not getattr(tensor, name):
                    raise Error("unsupported", f"{self.name}: a {type(tensor).__name__} makes its tensor {name} anew "
                                               "whenever it is asked, so that its memory cannot come and go; train "
                                               "without Spillway, or in another form")
                self.tensor(f"{path}.{name}", getattr(tensor, name), _setter(tensor, name))
        else:
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.requires_grad:
                raise Error("unsupported", f"{self.name}: its tensor {path} is {tensor.layout}, of {tensor.dtype}" +
                            (", and wants a gradient" if tensor.requires_grad else "") + "; frozen weights are made "
                            "of dense tensors that want none")
            self.found.append((path, tensor, put))
            self._attributes(path, tensor)

    def _refuse_tuple(self, _):
        raise Error("unsupported", f"{self.name}: has a tensor in a tuple, where no other can take its place; make it "
                                   "a list, or train without Spillway")

    def _attributes(self, path, holder):
        before = len(self.found)
        for name, value in list(vars(holder).items()):
            if not name.startswith("_"):
                self.value(f"{path}.{name}", value, _setter(holder, name))
        if len(self.found) > before:
            self.holders.append(holder)

    def value(self, path, value, put):
        if isinstance(value, torch.Tensor):
            if not isinstance(value, torch.nn.Parameter):
                self.tensor(path, value, put)
            return
        if id(value) in self._seen or isinstance(value, (torch.nn.Module, type, types.ModuleType)) or callable(value):
            return
        self._seen.add(id(value))
        if isinstance(value, (dict, list)):
            before = len(self.found)
            for key, each in list(value.items() if isinstance(value, dict) else enumerate(value)):
                self.value(f"{path}[{key!r}]", each, _item_setter(value, key))
            if len(self.found) > before:
                self.holders.append(value)
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                self.value(f"{path}[{number}]", each, self._refuse_tuple)
        elif hasattr(value, "__dict__"):
            self._attributes(path, value)


def _setter(holder, name):
    return lambda new: setattr(holder, name, new)


def _item_setter(holder, key):
    return lambda new: holder.__setitem__(key, new)


class _Part:
    def __init__(self, path, tensor):
        self.path, self.tensor, self.places = path, tensor, []  # functions that put another in its place
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self.size = tensor.numel() * tensor.element_size()
        self.stride = tuple(tensor.stride()) if _is_dense(tensor) else None
        self.first = 0

    @property
    def form(self):
        return f"{self.path} {self.dtype} {self.shape} {self.stride} {self.first}\n"

    def values(self):
        """As bytes, in the order in which they lie in memory."""
        flat = self.tensor.detach()
        if self.stride is not None:
            flat = flat.as_strided((flat.numel(),), (1,), flat.storage_offset())
        flat = flat.contiguous().cpu().view(-1)
        return flat.view(torch.uint8) if flat.dtype != torch.bool else flat.to(torch.uint8)

    def view(self, memory):
        flat = memory[self.first:self.first + self.size].view(self.dtype)
        return flat.view(self.shape) if self.stride is None else flat.as_strided(self.shape, self.stride,
                                                                                 flat.storage_offset())

    def nothing(self, device):
        """One element for all of them: NaN, where there is one, else 0."""
        if self.dtype in NUMBERS:
            one = torch.full((), float("nan"), dtype=self.dtype, device=device)
        else:
            one = torch.zeros(torch.empty(0, dtype=self.dtype).element_size(), dtype=torch.uint8, device=device)
            one = one.view(self.dtype).view(())
        return one.expand(self.shape)


def _is_dense(tensor):
    """Its elements take one piece of memory without holes, in whatever order."""
    expected = 1
    for stride, extent in sorted((s, e) for s, e in zip(tensor.stride(), tensor.shape) if e != 1):
        if stride != expected:
            return False
        expected *= extent
    return True


class Packed:
    """A frozen weight, or the buffers of a module: what its bytes are, and where they lie now."""

    def __init__(self, name, tensor, module, with_attributes):
        self.name, self.tensor, self.has_values, self.checked = name, tensor, True, False
        self._views = {}
        walk = _Walk(name)
        walk.tensor("weight", tensor, None)
        if with_attributes:
            for key, value in vars(module).items():
                if not key.startswith("_"):
                    walk.value(key, value, _setter(module, key))
        self._add(walk)

    def _add(self, walk):
        self.holders = walk.holders
        self.parts, parts, self._bytes = [], {}, HEADER
        for path, tensor, put in walk.found:
            if tensor.numel() and id(tensor) not in parts:
                parts[id(tensor)] = _Part(path, tensor)
                self.parts.append(parts[id(tensor)])
            if tensor.numel() and put is not None:
                parts[id(tensor)].places.append(put)
        firsts = {}  # two tensors over the same memory are one piece of it
        for part in self.parts:
            key = (address_of(part.tensor), part.tensor.storage_offset(), part.dtype, part.shape, part.stride)
            if part.tensor.is_meta or key not in firsts:
                firsts[key] = self._bytes = -(-self._bytes // ALIGNMENT) * ALIGNMENT
                self._bytes += part.size
            part.first = firsts[key]
        form = "".join(part.form for part in self.parts).encode()
        self._form = hashlib.blake2b(form, digest_size=HEADER).digest()

    requires_grad, grad = False, None  # as of a parameter

    def elements(self, element_bytes):
        """Of a type of so many bytes, which they take."""
        return -(-self._bytes // element_bytes)

    @property
    def nbytes(self):
        """Of its tensors."""
        return sum({part.first: part.size for part in self.parts}.values())

    def bits(self, element_bytes):
        """All of it, as integers of that size."""
        if any(part.tensor.is_meta for part in self.parts):
            raise Error("invalid_argument", f"{self.name}: is on device meta, without values, and quantized weights "
                                            "are taken from the model; load it with them")
        memory = torch.zeros(self.elements(element_bytes) * element_bytes, dtype=torch.uint8)
        memory[:HEADER] = torch.tensor(list(self._form), dtype=torch.uint8)
        for part in self.parts:
            memory[part.first:part.first + part.size] = part.values()
        return memory.view({2: torch.int16, 4: torch.int32}[element_bytes])

    def take_over(self, device, says):
        """Empties it: nothing refers to its memory any more. Returns what stands in its place, itself on the same
        device. `says`: of whoever asks for its bytes while it is away."""
        outer = self.tensor
        for part in self.parts:
            if part.tensor is not outer:
                part.tensor = part.nothing(device)
                for put in part.places:
                    put(part.tensor)
        if outer.device.type != device.type:  # else parameters and buffers stay themselves
            outer = self._moved(device)
        self._nothing = [part.nothing(device) for part in self.parts]
        for nothing in self._nothing:
            if REFUSE_BYTES is not None:
                REFUSE_BYTES(nothing.untyped_storage()._cdata, says)
        self.tensor, self.has_values, self._device = outer, False, device
        self._kept = [(holder, dict(holder if isinstance(holder, dict) else enumerate(holder) if
                                    isinstance(holder, list) else vars(holder))) for holder in self.holders]
        self.empty()
        self._check_parts()
        self._versions = [part.tensor._version for part in self.parts]
        return outer

    def _moved(self, device):
        """The weight on another device, in its inner tensors and attributes."""
        if _is_wrapper(self.tensor):
            return torch.nn.Parameter(_rebuilt(self.tensor, lambda inner: inner), False)
        part = next(part for part in self.parts if part.tensor is self.tensor)
        part.tensor = part.nothing(device)
        if isinstance(self.tensor, torch.nn.Parameter):
            part.tensor = torch.Tensor._make_subclass(type(self.tensor), part.tensor, False)
            part.tensor.__dict__.update(vars(self.tensor))
        self.holders = [part.tensor if holder is self.tensor else holder for holder in self.holders]
        return part.tensor

    def _check_parts(self):
        """What its class shows must be what we have."""
        if _is_wrapper(self.tensor):
            walk = _Walk(self.name)
            walk.tensor("weight", self.tensor, None)
            shown = {id(tensor) for _, tensor, _ in walk.found if tensor.numel()}
            if not shown <= {id(part.tensor) for part in self.parts}:
                raise Error("unsupported", f"{self.name}: a {type(self.tensor).__name__} keeps copies of the tensors "
                                           "that it is given, so that their memory cannot come and go; train it "
                                           "without Spillway, or in another form")

    def fill(self, element_bytes, address):
        """Over the memory of a lease."""
        key = address
        if key not in self._views:
            with torch.inference_mode(False):
                memory = tensor_at(self._device, address, self.elements(element_bytes) * element_bytes)
                self._views[key] = (memory[:HEADER], [part.view(memory) for part in self.parts])
        header, views = self._views[key]
        if not self.checked:
            if bytes(header.tolist()) != self._form:
                raise Error("invalid_argument", f"{self.name}: was of another form where its bytes come from; make "
                                                "the model as it was quantized then, by the same version")
            self.checked = True
        if [part.tensor._version for part in self.parts] != self._versions:
            self._versions = [part.tensor._version for part in self.parts]
            raise written_outside(self.name)
        for part, view in zip(self.parts, views):
            part.tensor.data = view

    def empty(self):
        for holder, kept in self._kept if hasattr(self, "_kept") else ():
            _restore(holder, kept)
        for part, nothing in zip(self.parts, self._nothing):
            part.tensor.data = nothing

    def forget(self):
        """Its bytes come from somewhere else from here on, and at other addresses."""
        self.checked = False
        self._views.clear()


def _restore(holder, kept):
    if isinstance(holder, (dict, list)):
        for key, value in kept.items():
            holder[key] = value
        return
    now = vars(holder)
    for name in [name for name in now if name not in kept and not name.startswith("_")]:
        delattr(holder, name)
    for name, value in kept.items():
        if not name.startswith("_") and now.get(name) is not value:
            setattr(holder, name, value)


def _rebuilt(wrapper, each):
    """Of what `each` makes of its tensors."""
    names, context = wrapper.__tensor_flatten__()
    inner = {name: getattr(wrapper, name, None) for name in names}
    inner = {name: value if not isinstance(value, torch.Tensor) else _rebuilt(value, each) if _is_wrapper(value) else
             each(value) for name, value in inner.items()}
    return type(wrapper).__tensor_unflatten__(inner, context, wrapper.shape, wrapper.stride())


def copy_of(tensor):
    """In CPU memory of its own."""
    def copy(plain):
        return plain.detach().clone().cpu()

    return _rebuilt(tensor, copy) if _is_wrapper(tensor) else copy(tensor)


# -- which they are ---------------------------------------------------------------------------------------------------

def is_packed(parameter):
    if _is_wrapper(parameter) or parameter.dtype not in NUMBERS:
        return True
    if parameter.requires_grad:
        return False
    walk = _Walk("")
    walk._attributes("", parameter)
    return bool(walk.found)


def _large_integers(buffer):
    return buffer is not None and buffer.dtype not in (*NUMBERS, torch.bool) and not buffer.is_complex() and \
        buffer.dim() > 1 and buffer.numel() * buffer.element_size() >= LEAST_BUFFER


def find_packed(model, plain):
    """(by id of a parameter, by id of a module: those of its buffers). `plain`: of a tensor's name in memory, that in
    files. A frozen parameter beside a packed one is packed as well, and keeps its type."""
    parameters, buffers, seen = {}, {}, set()
    for prefix, module in model.named_modules():
        own = {name: p for name, p in module._parameters.items() if p is not None}
        forms = [name for name, p in own.items() if is_packed(p)]
        for name in forms:
            if own[name].requires_grad:
                raise Error("unsupported", f"{prefix}.{name}: is a {type(own[name]).__name__} of {own[name].dtype} "
                                           "that wants a gradient; Spillway trains plain tensors of floating point, "
                                           "and takes others frozen (requires_grad_(False))")
        travels = [name for name, buffer in module._buffers.items() if _large_integers(buffer)]
        first = True
        for name, parameter in own.items():
            if (forms or travels) and not parameter.requires_grad and id(parameter) not in parameters:
                parameters[id(parameter)] = Packed(plain(f"{prefix}.{name}"), parameter, module,
                                                   first and not _is_wrapper(parameter))
                first = False
        if travels:
            buffers[id(module)] = made = []
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.dim() > 0 and buffer.numel() > 1 and id(buffer) not in seen:
                    seen.add(id(buffer))
                    setattr(buffer, MARK, True)
                    made.append(Packed(plain(f"{prefix}.{name}"), buffer, module, False))
    return parameters, buffers
