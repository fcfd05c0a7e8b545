"""Quantized layers as packages have them, in a few lines each: what packed_test.py and others look at.

The mechanism must not know the packages, so that these stand for them where they cannot be installed: torchao's
subclasses, bitsandbytes' parameters, HQQ's dict, GPTQ's buffers.
"""
import torch


def quantized(weight):
    """int8 rows and a scale each."""
    scale = weight.abs().amax(1) / 127
    return (weight / scale[:, None]).round().clamp(-127, 127).to(torch.int8), scale


class Wrapper(torch.Tensor):
    """A tensor made of others, without values of its own: torchao's way."""

    NAMES = ()

    @staticmethod
    def __new__(cls, shape, dtype, *inner):
        device = inner[0].device
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=False)

    def __init__(self, shape, dtype, *inner):
        for name, tensor in zip(self.NAMES, inner):
            setattr(self, name, tensor)

    def __tensor_flatten__(self):
        return list(self.NAMES), {"dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(size, context["dtype"], *(inner[name] for name in cls.NAMES))

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        if function is torch.nn.functional.linear:
            given, weight, bias = (*arguments, None)[:3]
            return function(given, weight.values(), (keywords or {}).get("bias", bias))
        return super().__torch_function__(function, types, arguments, keywords)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        if function is torch.ops.aten.detach.default:
            one = arguments[0]
            return cls(one.shape, one.dtype, *(getattr(one, name) for name in cls.NAMES))
        raise NotImplementedError(f"{function} of {cls.__name__}")

    def __repr__(self, **_):
        return type(self).__name__


class Halved(Wrapper):
    """Values kept in fp16."""
    NAMES = ("half",)

    def values(self):
        return self.half.to(self.dtype)


class Scaled(Wrapper):
    """int8 values, turned around in memory, and a scale that is of a class itself."""
    NAMES = ("turned", "scale")

    def values(self):
        return self.turned.t().to(self.dtype).t() * self.scale.values()[:, None]


def scaled(weight):
    values, scale = quantized(weight)
    turned = values.t().contiguous().t()  # a view that is dense in another order
    return torch.nn.Parameter(Scaled(weight.shape, weight.dtype, turned,
                                     Halved(scale.shape, weight.dtype, scale.half())), False)


class ScaledLinear(torch.nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)
        self.weight = scaled(self.weight.detach())
        self.bias.requires_grad_(False)


TABLE = torch.linspace(-1, 1, 16)  # the package's own, for all weights, as bitsandbytes has some


class QuantState:
    def __init__(self, absmax, code, state2=None, offset=None):
        self.absmax, self.code, self.state2, self.offset, self.quant_type = absmax, code, state2, offset, "toy4"


class Nibbles(torch.nn.Parameter):
    """Two values in a byte, whose scales are quantized, too; what it is called with is the tensor of bytes alone."""

    def __new__(cls, data, quant_state=None):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.quant_state, made.blocksize = quant_state, 64
        return made


class NibbleLinear(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.width = width
        weight = torch.randn(width, width) / width ** 0.5
        rows = weight.view(-1, 64)
        absmax = rows.abs().amax(1)
        nearest = ((rows / absmax[:, None])[..., None] - TABLE).abs().argmin(-1).view(-1)
        offset = absmax.mean()
        peak = (absmax - offset).abs().max()
        state = QuantState(((absmax - offset) / peak * 127 + 128).round().to(torch.uint8), TABLE,
                           QuantState(peak[None], torch.arange(-128, 128) / 127.0), offset)
        self.weight = Nibbles((nearest[::2] * 16 + nearest[1::2]).to(torch.uint8)[:, None], state)
        self.quant_state = state  # bitsandbytes' layers have it as well

    def values(self):
        state = self.weight.quant_state
        absmax = state.state2.code[state.absmax.long()] * state.state2.absmax + state.offset
        nibbles = torch.stack((self.weight.view(-1) // 16, self.weight.view(-1) % 16), 1).view(-1).long()
        return (state.code[nibbles].view(-1, 64) * absmax[:, None]).view(self.width, self.width)

    def forward(self, given):
        return _Hidden.apply(given, self)


class _Hidden(torch.autograd.Function):
    """The weight goes from forward to backward in an attribute, unseen by hooks on saved tensors."""

    @staticmethod
    def forward(ctx, given, layer):
        ctx.layer, ctx.tensors = layer, (None, layer.weight.view(-1, 1))  # as bitsandbytes does
        return given @ layer.values().t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.layer.values(), None


class EightBits(torch.nn.Parameter):
    def __new__(cls, data, CB, SCB):
        made = torch.Tensor._make_subclass(cls, data, False)
        made.CB, made.SCB = CB, SCB
        return made


class State:
    CB = SCB = None


class EightBitLinear(torch.nn.Module):
    """The layer takes the tensors out of its parameter the first time that it runs."""

    def __init__(self, width):
        super().__init__()
        values, scale = quantized(torch.randn(width, width) / width ** 0.5)
        self.weight, self.state = EightBits(values, values, scale), State()

    def forward(self, given):
        if self.weight.CB is not None:
            self.state.CB, self.state.SCB = self.weight.CB, self.weight.SCB
            self.weight.CB = self.weight.SCB = None
        result = given @ (self.state.CB.float() * self.state.SCB[:, None]).t()
        self.weight.data = self.state.CB
        return result


class MetaLinear(torch.nn.Module):
    """HQQ: bytes in a parameter, and a dict beside it."""

    def __init__(self, width):
        super().__init__()
        values, scale = quantized(torch.randn(width, width) / width ** 0.5)
        self.W_q = torch.nn.Parameter((values.int() + 128).to(torch.uint8), False)
        self.meta = {"scale": scale, "zero": torch.full((width,), 128.0), "shape": torch.Size((width, width)),
                     "nbits": 8}

    def forward(self, given):
        return given @ ((self.W_q - self.meta["zero"][:, None]) * self.meta["scale"][:, None]).t()


class BufferLinear(torch.nn.Module):
    """GPTQ: four values in an int32, in buffers."""

    def __init__(self, width):
        super().__init__()
        values, scale = quantized(torch.randn(width, width) / width ** 0.5)
        self.register_buffer("qweight", values.contiguous().view(torch.int32))
        self.register_buffer("scales", scale)
        self.register_buffer("g_idx", torch.arange(width, dtype=torch.int32))

    def forward(self, given):
        return given @ (self.qweight.view(torch.int8).float() * self.scales[:, None])[:, self.g_idx.long()].t()


FORMS = {"wrapper": ScaledLinear, "nibbles": NibbleLinear, "eight bits": EightBitLinear, "meta": MetaLinear,
         "buffers": BufferLinear}


class Adapted(torch.nn.Module):
    """A frozen layer and what is trained beside it, as LoRA does."""

    def __init__(self, layer, width):
        super().__init__()
        self.base = layer
        self.down, self.up = torch.nn.Linear(width, 4, bias=False), torch.nn.Linear(4, width, bias=False)

    def forward(self, given):
        return torch.tanh(self.base(given) + self.up(self.down(given)))


class Network(torch.nn.Module):
    def __init__(self, form, width=320, layers=3, seed=3):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = torch.nn.ModuleList(Adapted(FORMS[form](width), width) for _ in range(layers))
        self.head = torch.nn.Linear(width, 5)

    def forward(self, given):
        for layer in self.layers:
            given = layer(given)
        return self.head(given)


def inner_bytes(layer):
    """Of all tensors of a layer of these."""
    weight = getattr(layer, "weight", None)
    if isinstance(layer, ScaledLinear):
        found = [weight.turned, weight.scale.half, layer.bias]
    elif isinstance(layer, NibbleLinear):
        state = weight.quant_state
        found = [weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code]
    elif isinstance(layer, EightBitLinear):
        found = [weight, layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB]
    elif isinstance(layer, MetaLinear):
        found = [layer.W_q, layer.meta["scale"], layer.meta["zero"]]
    else:
        found = list(layer.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in found)


def bytes_of_passes(engine, loss_of):
    """(bytes read from NVMe, copied to HBM, of weights that are not packed) in a forward pass, and the same of a
    backward pass, by the engine's counters: what a step with one pass more has more, without what the update reads. Of
    the weights that are not packed, in units of 1,024 elements, memory may keep some. `loss_of`: runs the engine."""
    layout = engine._layout
    others = [sum(-(-layout.elements_of((owner, i)) // 1024) * 1024 * engine._element_bytes
                  for i in range(len(members)) if (owner, i) not in layout.packed)
              for owner, members in enumerate(layout.members)]
    back = others[min(owner for owner, _ in layout.pushes):]  # where backward ends

    def step(forwards, backwards):
        for _ in range(forwards):
            with torch.no_grad():
                loss_of()
        loss = loss_of()
        for left in reversed(range(backwards)):
            engine.backward(loss, retain_graph=left > 0)
        report = engine.step()
        return report.nvme_read_bytes - (report.tile_bytes - report.tile_hit_bytes), report.h2d_bytes

    for _ in range(2):
        step(0, 2)
    usual, forward, backward = step(0, 2), step(1, 2), step(0, 3)
    return tuple((*(more - plain for more, plain in zip(found, usual)), sum(beside))
                 for found, beside in ((forward, others), (backward, back)))
