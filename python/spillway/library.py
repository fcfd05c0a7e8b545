"""libspillway.so as Python functions: include/spillway/c_api.h, call by call.

The library is the one that the environment variable SPILLWAY_LIBRARY names, else the one that was installed with the
package, else the one that the dynamic linker finds. A call that fails raises Error.
"""
import collections
import ctypes
import functools
import json
import os
import pathlib
import queue
import threading
import time
import weakref
from ctypes import POINTER, c_char, c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

from . import log, remedies

NAME = "libspillway.so.0"
VERSION = "0.1.0"  # of the library that this package was written for

CODES = ("ok", "invalid_argument", "not_found", "exists", "does_not_fit", "busy", "io", "corrupt", "non_finite",
         "unsupported", "device", "unexpected")
FORWARD, BACKWARD = 0, 1
ANY_PUSHES = 2**32 - 1  # of a parameter in a step: as many as come, until one without data
ON_EXISTING = ("refuse", "resume", "replace")
TIERS = ("hbm", "host", "nvme")
# spillway.device in the order of spillway_device_kind, and the device type that PyTorch has for it.
DEVICES = {"host": "cpu", "cuda": "cuda"}
MASTER, EXP_AVG, EXP_AVG_SQ, GRADIENT = 0, 1, 2, 3
# What optimizer.type of a configuration can be, and the states that each keeps, as PyTorch calls them.
OPTIMIZERS = {
    "AdamW": {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ},
    "Adam": {"exp_avg": EXP_AVG, "exp_avg_sq": EXP_AVG_SQ},
    "Adagrad": {"sum": EXP_AVG_SQ},
    "Lion": {"exp_avg": EXP_AVG},
    "SGD": {"momentum_buffer": EXP_AVG},
}
STALLS = ("read", "write", "copy", "gradient", "update", "commit", "save", "other", "network")
MARK = "\u241f"  # in no message: where the words of a remedy come. A control character would be masked


def device_for(type_of_torch):
    """The spillway.device of tensors on a PyTorch device of that type; one that Spillway has no device for is the
    host's."""
    return next((name for name, theirs in DEVICES.items() if theirs == type_of_torch), "host")


class Error(RuntimeError):
    """What Spillway refused or failed to do. `code` is one of CODES; `remedy` is one of remedies.WORDS, where what to
    do has a name, else None."""

    __module__ = "spillway"  # where users know it from

    def __init__(self, code, message, remedy=None):
        super().__init__(message)
        self.code, self.remedy = code, remedy
        self._around, self._values = None, ()

    @classmethod
    def with_remedy(cls, code, around, remedy, values):
        """`around`: the message before and after what to do."""
        error = cls(code, remedies.in_words(around, remedy, values), remedy)
        error._around, error._values = around, values
        return error

    def with_resume(self, way):
        """The same error where that is how one goes on."""
        if self._around is None:
            return self
        return Error(self.code, remedies.in_words(self._around, self.remedy, self._values, way), self.remedy)

    def instead(self, words):
        """The same error with other words of what to do."""
        return Error(self.code, (self._around[0] + words + self._around[1]) if self._around else str(self), self.remedy)


class Sized(ctypes.Structure):
    """A struct that says how long it is."""

    def __init__(self, *values, **named):
        super().__init__(ctypes.sizeof(type(self)), *values, **named)


class Options(Sized):
    _fields_ = [("struct_size", c_size_t), ("on_existing", c_int), ("poison_released", c_int), ("snapshot", c_char_p),
                ("trace", c_char_p), ("trace_spans", c_uint64)]


class Report(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_uint64) for name in ("step", "durable_step")] + \
               [(name, c_double) for name in ("gradient_norm", "learning_rate", "seconds", "stall_seconds",
                                              "link_percent", "loss_scale")] + \
               [("skipped", c_int), ("taken_back", c_int)] + \
               [(name, c_uint64) for name in ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes",
                                              "unplanned_visits")] + \
               [("link", c_char * 16), ("adam_seconds", c_double)] + \
               [(name, c_uint64) for name in ("visits", "visit_hits", "tile_bytes", "tile_hit_bytes",
                                              "speculative_blocks")] + \
               [("stalls", c_double * 16)]

    @classmethod
    def names(cls):
        return [name for name, _ in cls._fields_ if name != "struct_size"]

    def values(self):
        """By name, as Python has them."""
        found = {name: getattr(self, name) for name in self.names()}
        return {**found, "skipped": bool(self.skipped), "taken_back": bool(self.taken_back),
                "link": self.link.decode(), "stalls": dict(zip(STALLS, self.stalls))}


StepReport = collections.namedtuple("StepReport", Report.names())
StepReport.__doc__ = """What step() returns.

`gradient_norm`: before clipping, without `loss_scale`. `seconds`: since the step before. `link`: the slowest of nvme,
h2d, d2h, network and compute; `link_percent`: the share of the step that it takes by itself. `stall_seconds`: the
device's stream had nothing to run; on a CPU PyTorch computes beside it, in the caller's thread, so that its work counts
as waiting, and `compute` is the engine's alone. `stalls`: the same by cause. `visit_hits`: visits that found their
block in HBM; `tile_hit_bytes`: of an update, in memory. `durable_step`: the last one that survives any crash."""


class SaveOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("replace", c_int), ("max_file_bytes", c_uint64),
                ("leave_out_frozen", c_int)]


class CarriedPiece(ctypes.Structure):
    _fields_ = [("slot", c_uint32), ("tensor", c_uint32), ("first", c_uint64), ("count", c_uint64),
                ("weight", c_void_p), ("gradient", c_void_p)]


ELSEWHERE = c_void_p(-1).value  # the address of what is not in host memory row by row
CarryPiece = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(CarriedPiece))
WaitSlot = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint32)
LeafSums = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint32, POINTER(c_double), c_uint64)


class Carrier(Sized):
    _fields_ = [("struct_size", c_size_t), ("user", c_void_p), ("bring", CarryPiece), ("give", CarryPiece),
                ("wait", WaitSlot), ("leaf_sums", LeafSums)]


class OptimizerOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("on_existing", c_int), ("keep_gradients", c_int), ("snapshot", c_char_p),
                ("carrier", POINTER(Carrier)), ("mostly_elsewhere", c_int64)]


class OptimizerTensor(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("gradient", c_void_p)]


class Hyperparameters(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_double) for name in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "momentum",
                                              "dampening")] + \
               [("decoupled_decay", c_int), ("nesterov", c_int)]


class OptimizerStep(Sized):
    _fields_ = [("struct_size", c_size_t), ("tensors", POINTER(OptimizerTensor)), ("count", c_size_t),
                ("groups", POINTER(POINTER(Hyperparameters))), ("group_count", c_size_t),
                ("group_of", POINTER(c_uint32)), ("gradient_scale", c_double), ("blob", c_char_p),
                ("blob_bytes", c_size_t), ("finite", c_int64)]


class OptimizerReport(Sized):
    _fields_ = [("struct_size", c_size_t)] + \
               [(name, c_uint64) for name in ("step", "durable_step")] + \
               [(name, c_double) for name in ("seconds", "adam_seconds", "stall_seconds")] + \
               [(name, c_uint64) for name in ("nvme_read_bytes", "nvme_write_bytes", "tile_bytes", "tile_hit_bytes")]


class ExportOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("dtype", c_int), ("replace", c_int), ("max_file_bytes", c_uint64)]


CHANNELS = WORDS, DATA = 0, 1
StartMessage = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint32, c_int, c_void_p, c_uint64, c_void_p)
CloseTransport = ctypes.CFUNCTYPE(None, c_void_p, c_int)


class Transport(Sized):
    _fields_ = [("struct_size", c_size_t), ("user", c_void_p), ("rank", c_uint32), ("ranks", c_uint32),
                ("library", c_char_p), ("send", StartMessage), ("receive", StartMessage), ("close", CloseTransport)]


class CommunicatorOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("patience_seconds", c_double), ("scratch_bytes", c_uint64)]


LogSink = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)
Line = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
LedgerEntry = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p, c_uint64)
Commit = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_void_p, c_size_t)
Weights = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint32, c_uint32, c_uint64, POINTER(c_float), c_uint64)
StateSink = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint32, c_uint64, POINTER(c_float), c_uint64)
StateSource = ctypes.CFUNCTYPE(c_int, c_void_p, c_int, c_uint32, c_uint64, POINTER(c_float), c_uint64)
Progress = ctypes.CFUNCTYPE(None, c_void_p, c_uint64, c_uint64)


class ImportOptions(Sized):
    _fields_ = [("struct_size", c_size_t), ("tag", c_char_p), ("weights", POINTER(c_int)), ("unverified", c_int),
                ("frozen", Weights), ("frozen_user", c_void_p), ("max_file_bytes", c_uint64),
                ("progress", Progress), ("progress_user", c_void_p)]


_STATUS = {  # functions that can fail
    "config_parse_for": [c_uint32, c_char_p, c_char_p, c_char_p, c_char_p, c_void_p, POINTER(c_void_p)],
    "communicator_create": [POINTER(Transport), POINTER(CommunicatorOptions), POINTER(c_void_p)],
    "communicator_broadcast": [c_void_p, c_void_p, c_uint64, c_uint32],
    "roll_back_store": [POINTER(c_char_p), c_size_t, POINTER(c_uint64)],
    "store_commits": [POINTER(c_char_p), c_size_t, Commit, c_void_p],
    "model_add_block": [c_void_p, c_char_p],
    "model_add_visit": [c_void_p, c_uint32, c_int],
    "model_attach": [c_void_p, c_char_p, c_char_p],
    "model_add_parameter": [c_void_p, c_uint32, c_char_p, POINTER(c_uint64), c_size_t, c_int, c_uint32],
    "model_add_bytes": [c_void_p, c_uint32, c_char_p, c_uint64],
    "import_deepspeed": [c_char_p, c_void_p, c_char_p, POINTER(ImportOptions), Line, c_void_p],
    "engine_create_on": [c_void_p, c_void_p, c_void_p, POINTER(Options), POINTER(c_void_p)],
    "engine_import_weights": [c_void_p, Weights, c_void_p],
    "engine_export_weights": [c_void_p, c_int, Weights, c_void_p],
    "engine_adopt_stream": [c_void_p, c_void_p, POINTER(c_void_p)],
    "stream_synchronize": [c_void_p, c_void_p],
    "engine_acquire": [c_void_p, c_uint32, c_int, c_void_p, POINTER(c_void_p)],
    "engine_push_gradient_of": [c_void_p, c_uint32, c_uint32, c_uint32, c_void_p, c_uint64, c_int, c_void_p],
    "engine_set_betas": [c_void_p, c_double, c_double],
    "engine_set_learning_rate": [c_void_p, c_double],
    "engine_step": [c_void_p, c_char_p, c_size_t, POINTER(Report)],
    "engine_discard_step": [c_void_p],
    "engine_flush": [c_void_p],
    "engine_save": [c_void_p, c_char_p, POINTER(SaveOptions)],
    "engine_load_snapshot": [c_void_p, c_char_p],
    "engine_read_values": [c_void_p, c_int, c_uint32, c_uint32, Weights, c_void_p],
    "engine_write_values": [c_void_p, c_int, c_uint32, c_uint32, c_void_p, c_uint64, c_uint32],
    "export_snapshot": [c_char_p, c_char_p, POINTER(ExportOptions), POINTER(c_uint64)],
    "engine_export": [c_void_p, c_char_p, POINTER(ExportOptions)],
    "engine_describe": [c_void_p, Line, c_void_p],
    "engine_ledger": [c_void_p, LedgerEntry, c_void_p],
    "model_set_kept": [c_void_p, c_uint64, c_uint64, c_uint64],
    "model_set_workspace": [c_void_p, c_uint64],
    "scratch_create": [c_void_p, POINTER(c_void_p)],
    "scratch_write": [c_void_p, c_uint32, c_uint64, c_void_p, c_uint64, POINTER(c_uint64)],
    "scratch_read": [c_void_p, c_uint32, c_uint64, c_void_p, c_uint64, POINTER(c_uint64)],
    "scratch_wait": [c_void_p, c_uint64],
    "scratch_moved": [c_void_p, POINTER(c_uint64), POINTER(c_uint64)],
    "optimizer_create": [c_void_p, c_void_p, POINTER(OptimizerOptions), POINTER(c_void_p)],
    "optimizer_set_blob": [c_void_p, c_char_p, c_size_t],
    "optimizer_describe": [c_void_p, Line, c_void_p],
    "optimizer_ledger": [c_void_p, LedgerEntry, c_void_p],
    "optimizer_update_counts": [c_void_p, POINTER(c_uint64), c_size_t],
    "optimizer_import_weights": [c_void_p, POINTER(OptimizerTensor), c_size_t],
    "optimizer_load_weights": [c_void_p, POINTER(OptimizerTensor), c_size_t],
    "optimizer_gradient_norm": [c_void_p, POINTER(OptimizerTensor), c_size_t, POINTER(c_double), POINTER(c_uint32)],
    "optimizer_make_step": [c_void_p, POINTER(OptimizerStep), POINTER(OptimizerReport)],
    "optimizer_export_state": [c_void_p, c_int, POINTER(OptimizerTensor), c_size_t, StateSink, c_void_p],
    "optimizer_import_state": [c_void_p, c_uint64, POINTER(c_uint64), c_int, POINTER(OptimizerTensor), c_size_t,
                               StateSource, c_void_p],
    "optimizer_save": [c_void_p, c_char_p, POINTER(SaveOptions), POINTER(OptimizerTensor), c_size_t],
}
_VALUE = {  # result, arguments
    "error_message": (c_char_p, []),
    "error_remedy": (c_int, []),
    "error_remedy_value": (c_char_p, [c_uint32]),
    "error_message_in": (c_char_p, [c_char_p]),
    "set_log": (None, [LogSink, c_void_p]),
    "config_weights": (c_int, [c_void_p]),
    "config_micro_batch": (c_uint32, [c_void_p]),
    "config_gradient_accumulation": (c_uint32, [c_void_p]),
    "config_settings": (c_char_p, [c_void_p]),
    "config_destroy": (c_int, [c_void_p]),
    "communicator_destroy": (c_int, [c_void_p]),
    "communicator_note_ending": (c_int, [c_void_p, c_int]),
    "communicator_note_work": (c_int, [c_void_p]),
    "message_over": (c_int, [c_void_p, c_char_p]),
    "model_create": (c_void_p, []),
    "model_destroy": (c_int, [c_void_p]),
    "engine_destroy": (c_int, [c_void_p]),
    "engine_current_step": (c_uint64, [c_void_p]),
    "engine_loss_scale": (c_double, [c_void_p]),
    "engine_next_learning_rate": (c_double, [c_void_p]),
    "engine_device": (c_int, [c_void_p]),
    "engine_blob": (c_size_t, [c_void_p, c_char_p, c_size_t]),
    "engine_predicted_step_seconds": (c_double, [c_void_p]),
    "engine_workspace": (c_void_p, [c_void_p, POINTER(c_uint64)]),
    "scratch_files": (c_uint32, [c_void_p]),
    "scratch_destroy": (c_int, [c_void_p]),
    "optimizer_destroy": (c_int, [c_void_p]),
    "optimizer_current_step": (c_uint64, [c_void_p]),
    "optimizer_blob": (c_size_t, [c_void_p, c_char_p, c_size_t]),
    "optimizer_gradient_memory": (c_void_p, [c_void_p, c_uint32, POINTER(c_uint64)]),
    "optimizer_staging": (c_void_p, [c_void_p, POINTER(c_uint64)]),
    "stream_destroy": (c_int, [c_void_p]),
    "lease_weight": (c_void_p, [c_void_p, c_uint32]),
    "lease_release": (c_int, [c_void_p]),
}


class Library:
    """The functions, without their prefix `spillway_`."""

    def __init__(self, path):
        try:
            loaded = ctypes.CDLL(path)
        except OSError as error:
            raise Error("not_found", f"{path}: cannot be loaded ({error}); install Spillway (`pip install .`"
                                     " in its checkout), or name the file in SPILLWAY_LIBRARY") from None
        self._check_version(loaded, path)
        self._loaded = loaded
        for name, (result, arguments) in _VALUE.items():
            function = getattr(loaded, f"spillway_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.bind(_STATUS)
        self._sink = LogSink(log.sink)
        self.set_log(self._sink, None)
        weakref.finalize(self, self.set_log, LogSink(), None)  # after those of engines, which are made later

    def bind(self, functions):
        """Functions that can fail, with their arguments, as methods that raise."""
        for name, arguments in functions.items():
            function = getattr(self._loaded, f"spillway_{name}")
            function.restype, function.argtypes = c_int, arguments
            setattr(self, name, self._raising(function))

    @staticmethod
    def _check_version(loaded, path):
        """Before anything else is asked of it: another version may not have it."""
        version = getattr(loaded, "spillway_version", None)
        if version is None:
            raise Error("unsupported", f"{path}: is not Spillway's library; name its file in the environment variable "
                                       "SPILLWAY_LIBRARY")
        version.restype = c_char_p
        found = version().decode()
        if found != VERSION:
            raise Error("unsupported", f"{path}: is Spillway {found}, and this package is of {VERSION}; install both "
                                       "from one source")

    def _raising(self, function):
        def call(*arguments):
            status = function(*arguments)
            if status != 0:
                raise self._error(CODES[status])
        return call

    def _error(self, code):
        """Of this thread's last call."""
        remedy = self.error_remedy()
        if not 0 < remedy < len(remedies.NAMES):  # a newer library may have more, and has words for them
            return Error(code, self.error_message().decode(errors="replace"))
        before, _, after = self.error_message_in(MARK.encode()).decode(errors="replace").rpartition(MARK)
        values = []
        while (value := self.error_remedy_value(len(values))) is not None:
            values.append(value.decode(errors="replace"))
        return Error.with_remedy(code, (before, after), remedies.NAMES[remedy], values)


_library = None


def library():
    global _library  # one for the process, loaded when it is first needed
    if _library is None:
        ours = pathlib.Path(__file__).resolve().parent / "lib" / NAME
        _library = Library(os.environ.get("SPILLWAY_LIBRARY") or (str(ours) if ours.exists() else NAME))
    return _library


def library_with(functions):
    """The library, which has these functions, too."""
    loaded = library()
    if not hasattr(loaded, next(iter(functions))):
        loaded.bind(functions)
    return loaded


_ends, _one_by_one = queue.SimpleQueue(), threading.Lock()


def end_later(function, *arguments):
    """In a thread that may wait; what was given first ends first, an engine before its ranks."""
    def end_the_first():
        with _one_by_one:
            end, given = _ends.get()
            end(*given)

    _ends.put((function, arguments))
    threading.Thread(target=end_the_first).start()


def finalizer(end):
    """`end`, which waits for threads of the library's, as it may be called at any moment: in the process that is its
    last argument, for a fork has neither their threads nor their memory; and where the garbage collector came by in a
    message, on another thread, for the one that says it cannot wait for its own end."""
    @functools.wraps(end)
    def ended(*arguments):
        if os.getpid() != arguments[-1]:
            return
        if log.saying():
            end_later(end, *arguments)
        else:
            end(*arguments)
    return ended


@finalizer
def destroy_engine(library, handle, streams, _process):
    for stream in streams.values():
        library.stream_destroy(stream)
    while CODES[library.engine_destroy(handle)] == "busy":  # another thread's call is under way
        time.sleep(0.01)


@finalizer
def destroy_optimizer(library, handle, _process):
    while CODES[library.optimizer_destroy(handle)] == "busy":
        time.sleep(0.01)


class Named(dict):
    """A configuration with a name for messages: what was made of a file, whose lines are others."""

    def __init__(self, values, name):
        super().__init__(values)
        self.name = name


def _text(config, name):
    """Of a path or a dict, and the name that it has in errors."""
    if isinstance(config, dict):
        return json.dumps(config, indent=2).encode(), getattr(config, "name", name).encode()
    if not isinstance(config, (str, os.PathLike)):
        raise Error("invalid_argument", f"{name}: is a {type(config).__name__}; give the path of a ds_config.json, "
                                        "or a dict")
    path = os.fspath(config)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().encode(), path.encode()
    except OSError as error:
        raise Error("not_found", f"{path}: cannot be read ({error.strerror})") from None


def parse_config(config, aio=None, ranks=1):
    """A spillway_config of a path or a dict, with another one put over it, for a run of so many ranks; the caller
    destroys it."""
    parsed, over = c_void_p(), (None, None) if aio is None else _text(aio, "aio")
    library().config_parse_for(ranks, *_text(config, "config"), *over, None, ctypes.byref(parsed))
    return parsed


def settings_of(parsed):
    """What counts of a configuration, by keys, with defaults and "auto": {"optimizer.params.lr": 5e-05, …}."""
    return json.loads(library().config_settings(parsed))
