"""include/spillway/c_tensors.h, call by call."""
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint64, c_void_p

from ..library import DEVICES as NAMED_DEVICES
from ..library import TIERS as ALL_TIERS
from ..library import Sized, library_with


class Options(Sized):
    _fields_ = [("struct_size", c_size_t), ("paths", POINTER(c_char_p)), ("path_count", c_size_t),
                ("nvme_bytes", c_uint64), ("host_bytes", c_uint64), ("on_existing", c_int), ("io_engine", c_int),
                ("io_block_bytes", c_uint64), ("io_depth", c_uint64), ("hbm_bytes", c_uint64), ("device", c_int),
                ("reserved", c_int)]


class ToPut(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("type", c_char_p), ("dims", POINTER(c_uint64)), ("dim_count", c_size_t),
                ("data", c_void_p), ("bytes", c_uint64), ("block_bytes", c_uint64), ("on_device", c_int),
                ("stream", c_void_p)]


class ToGet(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("out", c_void_p), ("bytes", c_uint64), ("on_device", c_int),
                ("stream", c_void_p)]


class Info(Sized):
    _fields_ = [("struct_size", c_size_t), ("name", c_char_p), ("type", c_char_p), ("dims", POINTER(c_uint64)),
                ("dim_count", c_size_t), ("bytes", c_uint64)] + \
               [(name, c_int) for name in ("in_host", "on_nvme", "committed", "pinned", "in_hbm",
                                          "pinned_in_hbm")]


class Stats(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_uint64) for name in ("host_bytes", "host_capacity", "nvme_bytes", "nvme_capacity", "hits",
                                              "misses", "evictions", "commits", "read_bytes", "write_bytes")] + \
               [("busy_seconds", c_double)] + \
               [(name, c_uint64) for name in ("hbm_bytes", "hbm_capacity", "hbm_hits", "hbm_evictions")]


EachInfo = ctypes.CFUNCTYPE(None, c_void_p, POINTER(Info))
NO_NEXT_USE = 2**64 - 1
TIERS = {tier: number for number, tier in enumerate(ALL_TIERS) if tier != "nvme"}
DEVICES = ("auto", *NAMED_DEVICES)
_FUNCTIONS = {
    "tensor_store_open": [POINTER(Options), POINTER(c_void_p)],
    "tensor_store_close": [c_void_p],
    "tensor_store_put": [c_void_p, POINTER(ToPut), c_size_t],
    "tensor_store_get": [c_void_p, POINTER(ToGet), c_size_t],
    "tensor_store_read_rows": [c_void_p, c_char_p, c_uint64, POINTER(c_uint64), c_size_t, c_void_p],
    "tensor_store_prefetch": [c_void_p, POINTER(c_char_p), c_size_t, c_int, POINTER(c_size_t)],
    "tensor_store_pin": [c_void_p, c_char_p, c_int, POINTER(c_void_p)],
    "tensor_store_unpin": [c_void_p, c_char_p, c_int],
    "tensor_store_set_next_use": [c_void_p, c_char_p, c_uint64],
    "tensor_store_remove": [c_void_p, POINTER(c_char_p), c_size_t],
    "tensor_store_commit": [c_void_p, POINTER(c_uint64)],
    "tensor_store_describe": [c_void_p, c_char_p, EachInfo, c_void_p],
    "tensor_store_stats_now": [c_void_p, POINTER(Stats)],
    "tensor_store_device": [c_void_p, POINTER(c_int)],
}


def calls():
    """The library, which has these functions, too."""
    return library_with(_FUNCTIONS)
