"""The engine's memory as tensors, a tensor's as an address, and what PyTorch has freed of its own."""
import ctypes
import functools

import torch

# A function's own answer, for tensors of whatever class. It ends with the call, where Ctrl-C could leave a `with` of
# the same effect.
plain = torch._C._disabled_torch_function_impl


class _CudaMemory:
    """Bytes of the GPU as PyTorch takes them in."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
                                         "strides": None}


def tensor_at(device, address, size, dtype=torch.uint8, lease=None):
    """`size` bytes of the engine's memory there. It stays the engine's, which must outlive what is done with it.
    `lease`: lives for as long as a tensor shares the memory."""
    if size == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        memory = _CudaMemory(address, size)
        memory.lease = lease  # PyTorch keeps the object with the storage
        return torch.as_tensor(memory, device=device).view(dtype)
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.lease = lease
    return torch.frombuffer(memory, dtype=dtype)


def address_of(tensor):
    """Where the storage begins that it is a view of."""
    return plain(_address, (), (tensor,), {})  # a weight on loan would show a copy's


def _address(tensor):
    return (tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()).data_ptr()


@functools.lru_cache(None)
def _malloc_trim():
    return getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none


def return_freed():
    """What was freed of the program's heap goes back to the system. glibc keeps it: freed pieces raise the size from
    which it asks the system for each, up to 32 MiB, and before 2.38 it hardly uses an aligned one, as PyTorch's are,
    again. Then each block leaves as much as a matrix that it unpacked."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)
