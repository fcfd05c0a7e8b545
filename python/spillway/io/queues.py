"""Reads and writes of tensors that are under way while the caller does something else."""
import collections
import ctypes
import errno
import itertools
import operator
import os
import threading
import time
import weakref

from .. import log
from ..library import Error, Line, end_later
from .files import File
from .places import Place
from .queue_calls import READ, SYNC, WRITE, Completion, QueueOptions, Request, Stats, calls
from .tensor_store import ENGINES

TAKEN_AT_ONCE = 64
HEARS_CTRL_C = 0.25  # seconds, after which a thread that waits looks at signals
WORDS = {READ: "read", WRITE: "write", SYNC: "sync"}

QueueStats = collections.namedtuple("QueueStats", [name for name, _ in Stats._fields_[1:]])
QueueStats.__doc__ = """Of a Queue so far. `busy_seconds`: with at least one transfer in flight; `pending`: transfers
that are under way."""


def _destroy(library, handle, kept, process):
    """`kept`: memory, which nothing moves to or from any more when this has returned."""
    if os.getpid() == process:
        if log.saying():  # the garbage collector came by: a thread that says something cannot wait for its own end
            end_later(_destroy, library, handle, kept, process)
            return
        library.io_queue_destroy(handle)
    kept.clear()


class Transfer:
    """A read, write or sync that a Queue has begun. Until it is over the queue keeps tensor and file.

    nbytes: of its tensor. error: a spillway.Error, once it has failed; wait() raises it."""

    def __init__(self, queue, op, file, offset, place):
        self._queue, self._op, self._file, self._offset, self._place = queue, op, file, offset, place
        self._over, self.error, self._being_seen = False, None, threading.Lock()
        self.nbytes = place.nbytes if place else 0

    def done(self) -> bool:
        """Whether it is over, without waiting; wait() says how it went."""
        return self._over or self._queue._take(lambda: self._over, 0)

    def wait(self, timeout: float | None = None):
        """Until it is over, at most `timeout` seconds (TimeoutError). Returns the tensor or array that it is of. Raises
        what went wrong, with file, offset and length. What was read for a GPU is there for the current stream."""
        if not self._over and not self._queue._wait(lambda: self._over, timeout):
            raise TimeoutError(f"{self._file.path}: {self._words()} is not over after {timeout} s")
        self._queue._seen(self)
        if self.error is not None:
            raise self.error
        return self._place and self._place.value

    def _words(self):
        return "sync" if self._op == SYNC else f"{WORDS[self._op]} of {self.nbytes} bytes at offset {self._offset}"

    def _stop(self, code):
        """Nothing moves any more; it is not over before its queue has noted that. `code`: an errno, 0 where all went
        well."""
        if code == errno.ENODATA:
            self.error = Error("io", f"{self._file.path}: ends inside the {self._words()}; write the rest of it first, "
                                     "or read what there is, File.size bytes")
        elif code:
            remedy = "the queue was closed before" if code == errno.ECANCELED else "check the drive"
            self.error = Error("io", f"{self._file.path}: {self._words()} failed ({os.strerror(code)}); {remedy}")
        if self._place is not None:
            self._place.release()


class Queue:
    """Reads and writes of many files at a time, between files and tensors without a copy.

        with spillway.io.File("/nvme/rows", create=True) as file, spillway.io.Queue() as queue:
            rows = spillway.io.empty((1024, 1024), torch.float32)
            queue.write(file, 0, rows).wait()

    engine: "auto", "io_uring", "libaio" or "threads". depth: pieces in flight of a file. block_bytes: the largest
    piece. max_requests: transfers under way, beyond which read() and write() wait for one. max_files, max_regions: at a
    time. stall_report_seconds: after which a transfer that makes no progress is logged.

    Any number of threads may use it at a time. A `with` block waits for all that is under way. A forked process is
    refused, and makes its own. Errors: spillway.Error."""

    def __init__(self, *, engine: str = "auto", depth: int = 32, block_bytes: int = 1 << 20, max_requests: int = 4096,
                 max_files: int = 16, max_regions: int = 16, stall_report_seconds: float = 30.0):
        if engine not in ENGINES:
            raise Error("invalid_argument", f"engine: {engine!r}; give one of {', '.join(ENGINES)}")
        options = QueueOptions(engine=ENGINES.index(engine), depth=depth, block_bytes=block_bytes,
                               max_requests=max_requests, max_files=max_files, max_regions=max_regions,
                               stall_report_seconds=stall_report_seconds)
        self._library, handle = calls(), ctypes.c_void_p()
        self._library.io_queue_create(ctypes.byref(options), ctypes.byref(handle))
        self._handle, self._process, self._tags = handle, os.getpid(), itertools.count(1)
        self._under_way, self._kept = {}, {}                # by tag: transfers, and the memory of each
        self._not_seen = {}                                 # over: those that failed, or have a copy to make to a GPU
        self._entering, self._files = threading.Lock(), {}  # by file: its index, which holds while one enters
        self._turn, self._taking, self._taken_before = threading.Condition(), False, 0  # one thread takes for all
        self._completions, self._count = (Completion * TAKEN_AT_ONCE)(), ctypes.c_size_t()
        self._end = weakref.finalize(self, _destroy, self._library, handle, self._kept, self._process)

    # -- transfers ------------------------------------------------------------------------------------------------

    def read(self, file: File, offset: int, into, *, urgent: bool = False) -> Transfer:
        """Begins to read bytes from `offset` on into all of `into`, and returns a Transfer.

        into: a contiguous torch tensor on a CPU or a GPU, a NumPy array, or another buffer that may be written to,
        whose address and length are multiples of what the file asks for (File.alignment): empty() makes such. Where the
        file ends before, the transfer fails. urgent: before those that are not."""
        return self._begin(READ, file, offset, into, urgent)

    def write(self, file: File, offset: int, values, *, urgent: bool = False) -> Transfer:
        """Begins to write all bytes of `values` from `offset` on, and returns a Transfer. `values` must not change
        before it is over. What they are is as for read(); of a tensor of empty() the rest of its last page is written
        as well, as far as the file's alignment asks for it."""
        return self._begin(WRITE, file, offset, values, urgent)

    def sync(self, file: File) -> Transfer:
        """Begins to make durable what transfers that are over have written (fdatasync). Returns a Transfer."""
        return self._begin(SYNC, file, 0, None, False)

    def wait_all(self) -> None:
        """Until all is over that is under way now. Raises what went wrong first, of what nobody has waited for."""
        left = list(self._under_way.values())

        def over():
            while left and left[-1]._over:
                left.pop()
            return not left

        self._wait(over, None)
        for transfer in list(self._not_seen.values()):
            self._seen(transfer)
            if transfer.error is not None:
                raise transfer.error

    def _begin(self, op, file, offset, value, urgent):
        offset = operator.index(offset)
        if not isinstance(file, File):
            raise Error("invalid_argument", f"{WORDS[op]}: the file is a {type(file).__name__}; give a "
                                            "spillway.io.File")
        if not 0 <= offset < 1 << 63:
            raise Error("invalid_argument", f"{file.path}: the offset is {offset}; count from the file's first byte")
        if op == WRITE and not file.writable:
            raise Error("invalid_argument", f"{file.path}: is open to be read; open it with writable=True")
        self._open()
        place = None if op == SYNC else Place(WORDS[op], value, op == READ)
        transfer = Transfer(self, op, file, offset, place)
        request = Request(op=op, priority=int(not urgent), offset=offset, tag=next(self._tags))
        if op != SYNC:
            if place.nbytes == 0:
                place.release()
                transfer._over = True
                return transfer
            request.buffer, request.bytes = place.address, _moved(file, offset, place)
            request.least_bytes = place.nbytes if op == READ else 0
        self._submit(transfer, request)
        return transfer

    def _submit(self, transfer, request):
        taken = ctypes.c_size_t()
        self._under_way[request.tag], self._kept[request.tag] = transfer, transfer._place
        try:
            while not taken.value:
                before = self._taken_before
                try:
                    with self._entering:
                        request.file = self._index_of(transfer._file)
                        self._library.io_queue_submit(self._open(), ctypes.byref(request), 1, ctypes.byref(taken))
                except Error as error:
                    if error.code != "busy":
                        raise
                    self._take(lambda: self._taken_before != before, HEARS_CTRL_C)
        finally:
            if not taken.value:
                del self._under_way[request.tag], self._kept[request.tag]

    # -- completions ----------------------------------------------------------------------------------------------

    def _wait(self, over, timeout):
        """In short turns, between which Ctrl-C is heard. Returns whether it is over."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._take(over, HEARS_CTRL_C if end is None else max(0, min(HEARS_CTRL_C, end - time.monotonic()))):
            if end is not None and time.monotonic() >= end:
                return False
        return True

    def _take(self, over, timeout):
        """Unless `over()`: takes the completions that come first within `timeout` seconds, or waits so long for the
        thread that does. Returns `over()`."""
        self._check_process()
        mine = False
        try:
            with self._turn:
                if not over():
                    if self._taking:
                        self._turn.wait(timeout)
                    else:
                        self._taking = mine = True
            if mine:
                self._hand_out()  # what Ctrl-C has kept from it
                self._library.io_queue_wait(self._open(), self._completions, TAKEN_AT_ONCE, timeout,
                                            ctypes.byref(self._count))
                self._hand_out()
        finally:
            if mine:
                with self._turn:
                    self._taking = False
                    self._turn.notify_all()
        return over()

    def _hand_out(self):
        """May be interrupted anywhere, and goes on when it is called again."""
        for completion in self._completions[:self._count.value]:
            transfer = self._under_way.get(completion.tag)
            if transfer is None:
                continue
            if not transfer._over:
                transfer._stop(completion.error)
                if transfer.error is not None or (transfer._op == READ and transfer._place.beside):
                    self._not_seen[id(transfer)] = transfer  # before anybody takes it for over
                transfer._over = True
            self._under_way.pop(completion.tag, None)
            self._kept.pop(completion.tag, None)
        self._taken_before += self._count.value
        self._count.value = 0

    def _seen(self, transfer):
        """By its caller, in whose stream what was read goes on to a GPU."""
        with transfer._being_seen:  # nobody goes on before the copy is under way
            if transfer.error is None and transfer._op == READ and transfer._place.beside and transfer.nbytes:
                transfer._place.arrive()
            self._not_seen.pop(id(transfer), None)

    # -- files and regions ----------------------------------------------------------------------------------------

    def _index_of(self, file):
        index = self._files.get(file)
        if index is None:
            found = ctypes.c_uint32()
            self._library.io_queue_add_file(self._open(), file._open(), ctypes.byref(found))
            index = self._files[file] = found.value
            file._queues.add(self)
        return index

    def _let_go(self, file):
        """Raises busy while a transfer of it is under way."""
        with self._entering:
            if self._end.alive and file in self._files:
                self._library.io_queue_remove_file(self._open(), self._files[file])
                del self._files[file]

    def register(self, value) -> bool:
        """A tensor or array whose memory many transfers are of: the kernel need not pin it for each. Transfers of
        other memory work, too. Returns whether the kernel grants it (`ulimit -l`). It stays until unregister()."""
        place = Place("register", value, False)
        if place.beside or not place.nbytes:
            raise Error("invalid_argument", "register: has no host memory of its own; give a tensor that has")
        granted = ctypes.c_int32()
        with self._entering:
            self._library.io_queue_add_region(self._open(), place.address, place.whole_bytes, ctypes.byref(granted))
            self._kept["region", place.address] = place
        return bool(granted.value)

    def unregister(self, value) -> None:
        """Raises busy while a transfer of it is under way."""
        address = Place("unregister", value, False).address
        with self._entering:
            self._library.io_queue_remove_region(self._open(), address)
            del self._kept["region", address]

    # -- the rest -------------------------------------------------------------------------------------------------

    def stats(self) -> QueueStats:
        """Of all that the queue has moved."""
        stats = Stats()
        self._library.io_queue_stats(self._open(), ctypes.byref(stats))
        return QueueStats(*(getattr(stats, name) for name in QueueStats._fields))

    def describe(self) -> str:
        """Which engine there is, and what was granted, in a line."""
        lines = []
        self._library.io_queue_describe(self._open(), Line(lambda _, text: lines.append(text.decode())), None)
        return lines[0]

    def _check_process(self):
        if os.getpid() != self._process:
            raise Error("unsupported", "queue: is another process's, of which this one is a fork; make one here")

    def _open(self):
        self._check_process()
        if not self._end.alive:
            raise Error("invalid_argument", "queue: it is closed; make a new one")
        return self._handle

    def close(self) -> None:
        """Any number of times. Raises busy, and closes nothing, while a transfer is under way: wait_all() before it, or
        a `with` block. Then raises what nobody has waited for, as wait_all() does."""
        if not self._end.alive:
            return
        self._take(lambda: not self._under_way, 0)
        with self._entering:
            if self._under_way:
                raise Error("busy", f"queue: {len(self._under_way)} transfers are under way; call wait_all() first")
            self._end()
        self.wait_all()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self.wait_all()
        finally:
            self._cancel()

    def _cancel(self):
        """What has not started fails, and what has is waited for."""
        if self._end.alive:
            self._library.io_queue_close(self._open())
            self._wait(lambda: not self._under_way, None)
            self._end()


def _moved(file, offset, place):
    """How many bytes a transfer moves: all of the place, and of empty() as much after it as the file asks for."""
    of_file, of_memory = file.alignment, file.memory_alignment
    size = -(-place.nbytes // of_file) * of_file
    for what, number, of in (("the offset", offset, of_file), ("the address", place.address, of_memory)):
        if number % of:
            raise Error("invalid_argument", f"{file.path}: {what} is {number}, no multiple of {of}, as its direct I/O "
                                            "needs; take memory of spillway.io.empty() and offsets that are, or open "
                                            "the file with direct=False")
    if size > place.whole_bytes:
        raise Error("invalid_argument", f"{file.path}: {place.nbytes} bytes are no multiple of {of_file}, as its "
                                        "direct I/O needs; take memory of spillway.io.empty(), which has whole pages, "
                                        "or open the file with direct=False")
    return size
