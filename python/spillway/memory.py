"""The engine's memory as tensors, and a tensor's as an address."""
import ctypes

import torch


class _CudaMemory:
    """Bytes of the GPU as PyTorch takes them in."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3,
                                         "strides": None}


def tensor_at(device, address, size, dtype=torch.uint8):
    """`size` bytes of the engine's memory there. It stays the engine's, which must outlive what is done with it."""
    if size == 0:
        return torch.empty(0, dtype=dtype, device=device)
    if device.type == "cuda":
        return torch.as_tensor(_CudaMemory(address, size), device=device).view(dtype)
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=dtype)


def address_of(tensor):
    """Where the storage begins that it is a view of."""
    return (tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()).data_ptr()
