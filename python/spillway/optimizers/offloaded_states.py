"""The library's side of an optimizer whose states are elsewhere: OffloadedStates."""
import contextlib
import ctypes
import os
import weakref
from ctypes import POINTER, byref, c_double, c_uint32, c_uint64, c_void_p, pointer

from ..library import (ELSEWHERE, ON_EXISTING, TIERS, Commit, Error, Hyperparameters, LedgerEntry, Line, Named,
                       OptimizerOptions, OptimizerReport, OptimizerStep, OptimizerTensor, SaveOptions, StateSink,
                       StateSource, destroy_optimizer, library, parse_config)
from ..memory import tensor_at
from ..pieces import pieces
from .layout import SECTIONS
from .tensor_carrier import CPU, TensorCarrier

WORDS = {"check_path_or_begin": 'check the path, or make the optimizer without on_existing="resume"',
         "reopen": 'make model and optimizer anew, with on_existing="resume"'}


@contextlib.contextmanager
def _in_words():
    """What to do about an error, where an engine is no answer."""
    try:
        yield
    except Error as error:
        raise error.instead(WORDS[error.remedy]) if error.remedy in WORDS else error from None


def configuration(dtype, library_type, device, paths, host_bytes):
    """A ds_config.json of what an optimizer was given; names in its errors are the file's."""
    section = {"device": "host", **({"nvme_paths": paths} if paths else {}),
               **({} if host_bytes is None else {"host_bytes": host_bytes})}
    values = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "optimizer": {"type": library_type},
              "zero_optimization": {"stage": 3, "offload_optimizer": {"device": device}}, "spillway": section}
    if SECTIONS[dtype]:
        values[SECTIONS[dtype]] = {"enabled": True}
    return Named(values, f"spillway.{library_type}")


def _destroy(carrier, library, handle, process):
    if os.getpid() == process:
        carrier.close()
    destroy_optimizer(library, handle, process)


class OffloadedStates:
    """States of a layout's tensors in the library. Weights stay the parameters', and are shown in every call.

    `paths`: of the store; empty: there is none. `keep_gradients`: there is memory for them, gradient_memory().
    """

    def __init__(self, layout, library_type, device, paths, host_bytes, keep_gradients, on_existing, snapshot=None):
        self._library, self.layout, self.paths, self._ended = library(), layout, paths, None
        self.carrier = TensorCarrier(layout)
        config = parse_config(configuration(layout.dtype, library_type, device, paths, host_bytes))
        described = layout.describe(self._library)
        self._handle, self._process = c_void_p(), os.getpid()
        try:
            options = OptimizerOptions(ON_EXISTING.index(on_existing), int(keep_gradients),
                                       None if snapshot is None else os.fsencode(snapshot),
                                       pointer(self.carrier.functions), int(self.carrier.mostly_elsewhere()))
            with _in_words():
                self._library.optimizer_create(config, described, byref(options), byref(self._handle))
        finally:
            self._library.model_destroy(described)
            self._library.config_destroy(config)
        size = c_uint64()
        self._staging = self._library.optimizer_staging(self._handle, byref(size)), size.value
        self._finalizer = weakref.finalize(self, _destroy, self.carrier, self._library, self._handle, self._process)

    def close(self, why="optimizer: it is closed"):
        self._ended = self._ended or why
        self._finalizer()

    def _store(self):
        return (ctypes.c_char_p * len(self.paths))(*map(os.fsencode, self.paths)), len(self.paths)

    def roll_back(self):
        """The store, once this is closed: to the step before its last one."""
        with _in_words():
            self._library.roll_back_store(*self._store(), None)

    def commits(self):
        """(step, blob) of the store's, the newest first: its last two at the most."""
        found = []
        with _in_words():
            self._library.store_commits(*self._store(), Commit(
                lambda _, step, blob, size: found.append((step, ctypes.string_at(blob, size) if size else b""))), None)
        return found

    def _open(self):
        if not self._finalizer.alive:
            raise Error("invalid_argument", self._ended)
        if self._process != os.getpid():
            raise Error("unsupported", "optimizer: its states are another process's, of which this one is a fork")
        return self._handle

    @contextlib.contextmanager
    def _tensors(self, gradients=(), writes=False):
        """The library's array. `gradients`: addresses, null for none. `writes`: the call changes weights."""
        self.layout.check_tensors()
        array = (OptimizerTensor * len(self.layout.parameters))()
        for tensor, address in enumerate(self.carrier.weights()):
            array[tensor].weight = address
        for tensor, address in enumerate(gradients):
            array[tensor].gradient = address
        before, ended = self.current_step, False
        with _in_words(), self.carrier.calls(  # Ctrl-C may come when a step was made
                *self._staging, writes=lambda: writes and (ended or self.current_step != before)):
            yield array, len(array)
            ended = True

    # -- the library's calls --------------------------------------------------------------------------------------

    @property
    def current_step(self):
        return self._library.optimizer_current_step(self._open())

    def blob(self):
        size = self._library.optimizer_blob(self._open(), None, 0)
        out = ctypes.create_string_buffer(size)
        self._library.optimizer_blob(self._open(), out, size)
        return out.raw

    def set_blob(self, blob):
        """What is kept with what is imported next."""
        self._library.optimizer_set_blob(self._open(), blob, len(blob))

    def update_counts(self):
        counts = (c_uint64 * len(self.layout.parameters))()
        self._library.optimizer_update_counts(self._open(), counts, len(counts))
        return list(counts)

    def describe(self):
        lines = []
        self._library.optimizer_describe(self._open(), Line(lambda _, text: lines.append(text.decode())), None)
        return lines

    def ledger(self):
        found = []
        self._library.optimizer_ledger(self._open(), LedgerEntry(
            lambda _, tier, purpose, size: found.append((TIERS[tier], purpose.decode(), size))), None)
        return found

    def import_weights(self):
        with self._tensors() as tensors:
            self._library.optimizer_import_weights(self._open(), *tensors)

    def load_weights(self):
        with self._tensors(writes=True) as tensors:
            self._library.optimizer_load_weights(self._open(), *tensors)

    def check_carried(self, gradients):
        """Raises where one that is elsewhere is not finite, and says whether all were looked at."""
        self._refuse(self.carrier.first_nonfinite())
        return all(address in (None, ELSEWHERE) for address in gradients)

    def _refuse(self, tensor):
        if tensor is not None:
            raise Error("non_finite", f"{self.layout.names[tensor]}: NaN or Inf in its gradient; nothing was changed; "
                                      "lower the learning rate or look at the data of this step")

    def gradient_norm(self, gradients):
        """Raises where a gradient is not finite."""
        norm, wrong = c_double(), c_uint32()
        with self._tensors(gradients) as tensors:
            self._library.optimizer_gradient_norm(self._open(), *tensors, byref(norm), byref(wrong))
        self._refuse(wrong.value if wrong.value < len(self.layout.names) else None)
        return norm.value

    def make_step(self, gradients, groups, group_of, gradient_scale, blob, finite):
        """`groups`: Hyperparameters; `group_of`: by tensor, which of them. `finite`: gradient_norm() has said so."""
        report = OptimizerReport()
        pointers = (POINTER(Hyperparameters) * len(groups))(*map(pointer, groups))
        with self._tensors(gradients, writes=True) as (tensors, count):
            step = OptimizerStep(tensors, count, pointers, len(groups), (c_uint32 * count)(*group_of), gradient_scale,
                                 blob, len(blob), int(finite))
            self._library.optimizer_make_step(self._open(), byref(step), byref(report))
        return report

    def gradient_memory(self):
        """By tensor: the library's memory for its gradient, as a tensor."""
        found, size = [], c_uint64()
        for tensor, shape in enumerate(self.layout.shapes):
            address = self._library.optimizer_gradient_memory(self._open(), tensor, byref(size))
            found.append(tensor_at(CPU, address, size.value, self.layout.dtype)[:shape.numel()].view(shape))
        return found

    def export_state(self, state, sink):
        """`sink`: called with tensor, first, address and count of fp32 values."""
        with self._tensors() as tensors, pieces(sink, lambda: self.layout.elements, StateSink) as callback:
            self._library.optimizer_export_state(self._open(), state, *tensors, callback, None)

    def import_state(self, step, counts, moments, source, blob=None):
        """`source`: called with state, tensor, first, address and count. `moments`: of how many states. `blob`: kept
        with it; None: what there is."""
        array, before = (c_uint64 * len(counts))(*counts), self.blob()
        try:
            self.set_blob(before if blob is None else blob)
            with self._tensors(writes=True) as tensors, \
                    pieces(source, lambda: self.layout.elements * moments, StateSource) as callback:
                self._library.optimizer_import_state(self._open(), step, array, 0, *tensors, callback, None)
        except BaseException:
            with contextlib.suppress(Error):  # of one that has failed
                self.set_blob(before)
            raise

    def save(self, directory, replace):
        with self._tensors() as tensors:
            self._library.optimizer_save(self._open(), os.fsencode(directory), byref(SaveOptions(int(replace))),
                                         *tensors)
