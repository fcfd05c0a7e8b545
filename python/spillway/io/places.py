"""Where the bytes are that a queue moves: memory for direct I/O, and of torch tensors and buffers of Python's."""
import ctypes
import os
import sys
import weakref

from ..library import Error
from . import memory
from .queue_calls import MemoryInfo, calls

PAGE = 4096  # of which the memory of empty() is a multiple: no drive asks for more of a transfer
# Of what empty() gave: where its bytes end, and where its pages do. Single operations of a dict need no lock, which the
# garbage collector could find taken.
_ends = {}


def _free(library, first, end, process):
    _ends.pop(end, None)
    if os.getpid() == process:  # a fork has not got it
        library.io_memory_free(first)


def empty(shape, dtype=None):
    """A tensor or an array of zeros whose memory direct I/O can use: pages of its own, locked in RAM where the system
    allows it (`ulimit -l`).

    shape: a number, or several. dtype: torch's, as torch.float32, for a torch tensor, and NumPy's, as "float32" or
    numpy.float32, for an array; the default is torch's default type.

    Transfers of all of it, or of its last part, may have any length: they move whole pages, of which it has the rest
    as well. A forked process does not have the memory. Raises does_not_fit where the system has not so much."""
    dtype = __import__("torch").get_default_dtype() if dtype is None else dtype
    torch = sys.modules.get("torch")
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    like = torch.empty(0, dtype=dtype) if torch and isinstance(dtype, torch.dtype) else \
        __import__("numpy").empty(0, dtype=dtype)
    count = 1
    for dim in shape:
        if dim < 0:
            raise Error("invalid_argument", f"shape: is {shape}; give numbers from 0")
        count *= dim
    memory.check("empty", like)
    size = count * (like.itemsize if memory.is_numpy(like) else like.element_size())
    whole = max(1, -(-size // PAGE)) * PAGE
    library, first, facts = calls(), ctypes.c_void_p(), MemoryInfo()
    library.io_memory_allocate(whole, PAGE, ctypes.byref(first), ctypes.byref(facts))
    held = (ctypes.c_ubyte * whole).from_address(first.value)
    end = first.value + size
    if size:
        _ends[end] = first.value + whole
    weakref.finalize(held, _free, library, first, end, os.getpid())
    if memory.is_numpy(like):
        return sys.modules["numpy"].frombuffer(held, dtype=like.dtype, count=count).reshape(shape)
    return torch.frombuffer(held, dtype=dtype, count=count).view(shape) if count else torch.empty(shape, dtype=dtype)


class _View(ctypes.Structure):
    """Py_buffer, as Python.h has had it since 3.0."""

    _fields_ = [("buf", ctypes.c_void_p), ("obj", ctypes.py_object), ("len", ctypes.c_ssize_t),
                ("itemsize", ctypes.c_ssize_t), ("readonly", ctypes.c_int), ("ndim", ctypes.c_int),
                ("format", ctypes.c_char_p), ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p),
                ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p)]


_WRITABLE, _SIMPLE = 1, 0
_get, _release = ctypes.pythonapi.PyObject_GetBuffer, ctypes.pythonapi.PyBuffer_Release
_get.argtypes, _release.argtypes = [ctypes.py_object, ctypes.POINTER(_View), ctypes.c_int], [ctypes.POINTER(_View)]
_release.restype = None


def is_elsewhere(tensor):
    """Not where a drive can read and write it."""
    return tensor.device.type != "cpu"


def stream_of(tensor):
    """PyTorch's current one of its GPU."""
    return sys.modules["torch"].cuda.current_stream(tensor.device) if tensor.is_cuda else None


class Place:
    """The bytes of a tensor or buffer, which stay where they are until release(). `into`: they are written to.

    address, nbytes: of them; whole_bytes: and of what empty() has after them, up to its last page. beside: they are
    a GPU's, and travel through host memory, at this address."""

    def __init__(self, call, value, into):
        self.value, self._view, self._host, self.beside = value, None, None, False
        self._came = None  # an event of the stream that has what was read
        if memory.is_torch(value):
            self._of_tensor(call, value, into)
        else:
            self._of_buffer(call, value, into)
        self.whole_bytes = max(self.nbytes, _ends.get(self.address + self.nbytes, 0) - self.address)
        if self.beside:
            self.whole_bytes = self._host.numel()

    def _of_tensor(self, call, tensor, into):
        memory.check(call, tensor)
        self._held = tensor = tensor.detach()  # has the storage, whatever becomes of the caller's
        if into and tensor.numel():
            tensor.view(-1)[:0].zero_()  # autograd is told that it changes
        self.nbytes = memory.bytes_of(tensor)
        self.beside = is_elsewhere(tensor)
        if self.beside:
            self._host = self._staged(tensor, into)
        self.address = (self._host if self.beside else tensor).data_ptr()

    def _staged(self, tensor, into):
        """Whole pages of pinned memory of PyTorch's, which keeps them for the next one; with the tensor's bytes, unless
        these are to be read."""
        torch = sys.modules["torch"]
        whole = -(-self.nbytes // PAGE) * PAGE
        host = torch.zeros(whole + PAGE, dtype=torch.uint8, pin_memory=tensor.is_cuda)
        host = host[-host.data_ptr() % PAGE:][:whole]
        if not into:
            self._bytes_of(host, tensor).copy_(tensor, non_blocking=True)
            if stream := stream_of(tensor):
                stream.synchronize()
        return host

    def _bytes_of(self, host, tensor):
        return host[:self.nbytes].view(tensor.dtype).view(tensor.shape)

    def _of_buffer(self, call, value, into):
        if memory.is_numpy(value):
            memory.check_out(call, value) if into else memory.check(call, value)
        self._view = view = _View()
        try:
            _get(value, ctypes.byref(view), _WRITABLE if into else _SIMPLE)
        except TypeError:
            self._view = None
            raise Error("invalid_argument", f"{call}: is given a {type(value).__name__}; give a torch tensor, a NumPy "
                                            "array or another buffer of bytes") from None
        except (BufferError, ValueError) as error:
            self._view = None
            raise Error("invalid_argument", f"{call}: the {type(value).__name__} has no such memory ({error}); give "
                                            "one that is contiguous, and to read into one that may be written to"
                        ) from None
        self.address, self.nbytes = view.buf or 0, view.len

    def arrive(self):
        """What was read is on its way to a GPU: the work that follows in the current stream finds it there."""
        stream = stream_of(self._held)
        if self._host is not None:
            self._held.copy_(self._bytes_of(self._host, self._held), non_blocking=True)
            self._came = stream and stream.record_event()
            self._host = None
        elif self._came is not None:
            stream.wait_event(self._came)

    def release(self):
        """Nothing moves any more."""
        view, self._view = self._view, None
        if view is not None:
            _release(ctypes.byref(view))

    def __del__(self):
        self.release()
