"""Where the bytes of torch tensors and NumPy arrays lie, and what these are called.

Neither library is imported here: who has a tensor has imported it.
"""
import ctypes
import sys

from ..library import Error


def is_torch(value):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy(value):
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def type_of(value):
    """`float32`: the word for a tensor's or array's type that both libraries know, where both have it."""
    return str(value.dtype).removeprefix("torch.")


def shape_of(value):
    return tuple(int(dim) for dim in value.shape)


def bytes_of(value):
    return value.nbytes if is_numpy(value) else value.numel() * value.element_size()


def check(name, value):
    """`name`: in messages. Strided CPU or CUDA memory without gaps is what can be moved."""
    if is_numpy(value):
        if value.dtype.hasobject:
            raise Error("invalid_argument", f"{name}: is an array of Python objects; give one of numbers")
        if not value.flags.c_contiguous:
            raise Error("invalid_argument", f"{name}: is a view that is not contiguous; give "
                                            "numpy.ascontiguousarray() of it")
        return
    if not is_torch(value):
        raise Error("invalid_argument", f"{name}: is a {type(value).__name__}; give a torch tensor or a NumPy array")
    if value.device.type not in ("cpu", "cuda"):
        raise Error("unsupported", f"{name}: is on the device {value.device}; bring it to the CPU first")
    if value.is_quantized or value.layout != sys.modules["torch"].strided:
        raise Error("unsupported", f"{name}: is no tensor of plain memory; give what it is made of")
    if not value.is_contiguous():
        raise Error("invalid_argument", f"{name}: is a view that is not contiguous; give its contiguous()")
    if value.is_conj() or value.is_neg():
        raise Error("invalid_argument", f"{name}: is a view with a sign that is not in memory; give its "
                                        "resolve_conj().resolve_neg()")


def check_out(name, value):
    """Of what is read into."""
    check(name, value)
    if is_numpy(value) and not value.flags.writeable:
        raise Error("invalid_argument", f"{name}: `out` is an array that must not be written to; give another one")


def address_of(value):
    return value.ctypes.data if is_numpy(value) else value.data_ptr()


def new_tensor(library, type_name, shape, device=None):
    """An empty one, `library` "torch" or "numpy", which has no other device than the CPU."""
    module = __import__(library)
    dtype = getattr(module, type_name, None)
    if library == "torch":
        if not isinstance(dtype, module.dtype):
            raise Error("unsupported", f"{type_name}: PyTorch {module.__version__} has no such type; read it with "
                                       "out=, or into NumPy")
        return module.empty(shape, dtype=dtype, device=device)
    try:
        return module.empty(shape, dtype=type_name)
    except TypeError:
        raise Error("unsupported", f"{type_name}: NumPy has no such type; read it into PyTorch") from None


class _OfGpu:
    """Bytes at an address of a GPU, which torch.as_tensor() takes."""

    def __init__(self, address, nbytes):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}


def view_of(address, nbytes, like, gpu=None):
    """The memory at `address` as a tensor or array of type and shape of `like`. `gpu`: of which it is the memory."""
    if is_numpy(like):
        flat = _host_bytes(address, nbytes, sys.modules["numpy"], "uint8")
        flat.flags.writeable = False
        return flat.view(like.dtype).reshape(like.shape)
    torch = sys.modules["torch"]
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu)
    if nbytes == 0:
        return like.new_empty(like.shape, device=device)
    flat = _host_bytes(address, nbytes, torch, torch.uint8) if gpu is None else \
        torch.as_tensor(_OfGpu(address, nbytes), device=device)
    return flat.view(like.dtype).reshape(like.shape)


def _host_bytes(address, nbytes, library, dtype):
    return library.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=dtype)
