"""include/spillway/c_io.h, call by call: files, memory and queues."""
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_size_t, c_uint32, c_uint64, c_void_p

from ..library import Line, Sized, library_with

READ, WRITE, SYNC = range(3)


class FileOptions(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_int32) for name in ("writable", "create", "follow_links", "buffered")]


class FileInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("size_bytes", c_uint64), ("alignment", c_uint32),
                ("memory_alignment", c_uint32)] + \
               [(name, c_int32) for name in ("direct", "sync_error", "at_its_path", "unused")]


class MemoryInfo(Sized):
    _fields_ = [("struct_size", c_size_t), ("alignment", c_uint64), ("locked", c_int32), ("lock_error", c_int32)]


class QueueOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("engine", c_int32), ("depth", c_uint32), ("block_bytes", c_uint64)] + \
               [(name, c_uint32) for name in ("max_requests", "max_files", "max_regions", "file_count")] + \
               [("stall_report_seconds", c_double), ("files", POINTER(c_void_p)), ("stripes", c_void_p)]


class Request(ctypes.Structure):
    _fields_ = [("op", c_int32), ("priority", c_int32), ("file", c_uint32), ("unused", c_uint32),
                ("offset", c_uint64), ("buffer", c_void_p), ("bytes", c_uint64), ("tag", c_uint64),
                ("least_bytes", c_uint64)]


class Completion(ctypes.Structure):
    _fields_ = [("tag", c_uint64), ("error", c_int32), ("error_file", c_uint32), ("error_offset", c_uint64),
                ("error_bytes", c_uint64)]


class Stats(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_uint64) for name in ("read_bytes", "write_bytes", "syncs")] + \
               [("busy_seconds", c_double), ("pending", c_uint64)]


_FUNCTIONS = {
    "io_file_open": [c_char_p, POINTER(FileOptions), POINTER(c_void_p)],
    "io_file_close": [c_void_p],
    "io_file_describe": [c_void_p, POINTER(FileInfo)],
    "io_file_preallocate": [c_void_p, c_uint64],
    "io_file_lock": [c_void_p, c_double],
    "io_file_rename": [c_void_p, c_char_p],
    "io_file_sync": [c_void_p],
    "io_memory_allocate": [c_uint64, c_uint64, POINTER(c_void_p), POINTER(MemoryInfo)],
    "io_memory_free": [c_void_p],
    "io_queue_create": [POINTER(QueueOptions), POINTER(c_void_p)],
    "io_queue_close": [c_void_p],
    "io_queue_destroy": [c_void_p],
    "io_queue_add_file": [c_void_p, c_void_p, POINTER(c_uint32)],
    "io_queue_remove_file": [c_void_p, c_uint32],
    "io_queue_add_region": [c_void_p, c_void_p, c_uint64, POINTER(c_int32)],
    "io_queue_remove_region": [c_void_p, c_void_p],
    "io_queue_submit": [c_void_p, POINTER(Request), c_size_t, POINTER(c_size_t)],
    "io_queue_wait": [c_void_p, POINTER(Completion), c_size_t, c_double, POINTER(c_size_t)],
    "io_queue_check": [c_void_p, c_int32, POINTER(Completion)],
    "io_queue_stats": [c_void_p, POINTER(Stats)],
    "io_queue_describe": [c_void_p, Line, c_void_p],
}


def calls():
    """The library, which has these functions, too."""
    return library_with(_FUNCTIONS)
