"""deepspeed.get_accelerator(): the device that PyTorch has here, by DeepSpeed's names."""
import contextlib
import functools

import torch

from .. import absent


class _Accelerator:
    def __init__(self):
        self._cuda = torch.cuda.is_available()
        self._name = "cuda" if self._cuda else "cpu"

    def __getattr__(self, name):  # what torch.cuda has: synchronize(), memory_allocated(), Stream, …
        if name.startswith("__") or not hasattr(torch.cuda, name):
            raise AttributeError(absent.words(f"accelerator.{name}"))
        return getattr(torch.cuda, name)

    def device_name(self, device_index=None):
        return self._name if device_index is None or not self._cuda else f"{self._name}:{device_index}"

    def device(self, device_index=None):
        return torch.cuda.device(device_index) if self._cuda else contextlib.nullcontext()

    def current_device(self):
        return torch.cuda.current_device() if self._cuda else 0

    def current_device_name(self):
        return self.device_name(self.current_device())

    def set_device(self, device_index):
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self):
        return torch.cuda.device_count() if self._cuda else 1

    def is_available(self):
        return True

    def communication_backend_name(self):
        return "nccl" if self._cuda else "gloo"

    def is_bf16_supported(self):
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self):
        return True

    def supported_dtypes(self):
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor):
        return tensor.device.type == self._name

    def pin_memory(self, tensor, align_bytes=1):
        return tensor.pin_memory() if self._cuda else tensor

    def is_pinned(self, tensor):
        return self._cuda and tensor.is_pinned()

    def get_compile_backend(self):
        return "inductor"

    def is_synchronized_device(self):
        return not self._cuda

    def synchronize(self, device_index=None):
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def empty_cache(self):
        torch.cuda.empty_cache()

    def manual_seed(self, seed):
        torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def random(self):
        return torch.cuda.random if self._cuda else torch.random

    def _memory(self, name):
        return int(getattr(torch.cuda, name)()) if self._cuda else 0

    def memory_allocated(self, device_index=None):
        return self._memory("memory_allocated")

    def max_memory_allocated(self, device_index=None):
        return self._memory("max_memory_allocated")

    def memory_reserved(self, device_index=None):
        return self._memory("memory_reserved")

    def max_memory_reserved(self, device_index=None):
        return self._memory("max_memory_reserved")

    def reset_peak_memory_stats(self, device_index=None):
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index=None):
        return torch.cuda.get_device_properties(self.current_device()).total_memory if self._cuda else 0


@functools.lru_cache(None)
def get_accelerator():
    """PyTorch's CUDA device where there is one, else the CPU."""
    return _Accelerator()
