"""One open file for direct I/O."""
import ctypes
import os
import threading
import weakref

from ..library import Error
from .queue_calls import FileInfo, FileOptions, calls


def _close(library, handle, process):
    if os.getpid() == process:
        try:
            library.io_file_close(handle)
        except Error:  # a queue has it, with which it ends
            pass


def encoded(path):
    """A path as the library reads it, which ends at a zero byte."""
    read = os.fsencode(path)
    if b"\0" in read:
        raise Error("invalid_argument", f"path: {os.fspath(path)!r} has a zero character; name one without it")
    return read


class File:
    """One open file, for a Queue.

    path: of the file. writable: it may be written to. create: it is made, mode 0600, and writable; one that is there
    is an error (`exists`). follow_links: a symbolic link as the last part of the path, which is refused otherwise.
    direct: past the page cache (O_DIRECT), where the file system grants it; `.direct` says whether it has.

    alignment, memory_alignment: what offset and length of a transfer, and its address, must be multiples of; 1 where
    the file is not direct. Any number of threads may use it at a time. It ends with close(), or with a `with` block.
    Errors: spillway.Error, with the path."""

    def __init__(self, path: str | os.PathLike, *, writable: bool = False, create: bool = False,
                 follow_links: bool = False, direct: bool = True):
        self._library, handle, self.path = calls(), ctypes.c_void_p(), os.fspath(path)
        options = FileOptions(writable=writable or create, create=create, follow_links=follow_links,
                              buffered=not direct)
        self._library.io_file_open(encoded(path), ctypes.byref(options), ctypes.byref(handle))
        self._handle, self._queues, self._lock = handle, weakref.WeakSet(), threading.Lock()
        self._end = weakref.finalize(self, _close, self._library, handle, os.getpid())
        facts = self._facts()
        self.direct, self.alignment, self.memory_alignment = bool(facts.direct), facts.alignment, facts.memory_alignment
        self.writable = bool(options.writable)

    def _open(self):
        if not self._end.alive:
            raise Error("invalid_argument", f"{self.path}: it is closed; open it again")
        return self._handle

    def _facts(self):
        facts = FileInfo()
        self._library.io_file_describe(self._open(), ctypes.byref(facts))
        return facts

    @property
    def size(self) -> int:
        """Bytes that it has now."""
        return self._facts().size_bytes

    def preallocate(self, nbytes: int) -> None:
        """Takes the disk space of the first `nbytes`, so that no write there finds the disk full. Raises io."""
        self._library.io_file_preallocate(self._open(), nbytes)

    def lock(self, patience: float = 0.0) -> None:
        """For this process alone, until close(). Raises busy where it is not had within `patience` seconds."""
        self._library.io_file_lock(self._open(), patience)

    def rename(self, path: str | os.PathLike) -> None:
        """Durably; while no queue has it (`busy`)."""
        self._library.io_file_rename(self._open(), encoded(path))
        self.path = os.fspath(path)

    def sync(self) -> None:
        """Makes what was written durable (fdatasync). A failure is final: the file refuses to sync again."""
        self._library.io_file_sync(self._open())

    def close(self) -> None:
        """Any number of times. Raises busy, and closes nothing, while a transfer of it is under way."""
        if not self._end.alive:
            return
        for queue in list(self._queues):
            queue._let_go(self)
        self._library.io_file_close(self._open())
        self._end.detach()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
