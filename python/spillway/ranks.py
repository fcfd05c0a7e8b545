"""Processes of torch.distributed as Spillway's ranks, each of which keeps a part of one model: docs/ranks_pytorch.md.

What ranks tell each other are messages of the library's (include/spillway/c_ranks.h). Here they go through a process
group of their own, over Gloo, whatever the script's is: so neither tags nor order mix with those of the script's calls.
Memory is the library's, sent from and received into where it lies.

Of GPUs the library moves data by itself, over NCCL, and only words go this way.

Gloo tells that a message is over only to a thread that waits for it. So each peer, channel and direction has a lane, a
thread in which messages are over in the order in which they were started.

    the communicator's thread   send, receive ─► group.send, group.recv ─► a lane's queue
    a lane                      work.wait(), without the GIL           ─► message_over
"""
import contextlib
import ctypes
import datetime
import json
import logging
import os
import pathlib
import queue
import re
import sys
import threading
import time
import weakref
from ctypes import byref, c_uint64, c_void_p

import torch
import torch.distributed

from . import log
from .library import CloseTransport, CommunicatorOptions, Error, StartMessage, Transport, finalizer, library

FOREVER = datetime.timedelta(days=3650)  # of a rank that has nothing to say, which is not for Gloo to judge
YEAR = 365 * 24 * 3600
PIECE_BYTES = 1 << 22  # of a tensor, which every rank has memory for beside its own
AT_ONCE = datetime.timedelta(milliseconds=1)
PLACE = re.compile(r"^\[[^\]]*\] *")  # in Gloo's own source, before what it says


def why_of(error):
    """What Gloo says, without where in its source."""
    text = PLACE.sub("", str(error) or type(error).__name__).splitlines()[0]
    return text.split(". This is typically")[0]


class _Lane(threading.Thread):
    def __init__(self, name, over):
        super().__init__(name=name, daemon=True)
        self._over, self._begun, self.waits_for = over, queue.SimpleQueue(), None
        self.start()

    def put(self, work, tensor, message):
        self._begun.put((work, tensor, message))

    def end(self):
        self._begun.put(None)

    def run(self):
        with log.called_back():
            self._run()

    def _run(self):
        while (begun := self._begun.get()) is not None:
            work, tensor, message = begun
            why, self.waits_for = None, work
            try:
                work.wait(FOREVER)
            except Exception as error:
                why = why_of(error).encode()
            del begun, work, tensor
            self.waits_for = None
            self._over(message, why)


class _Messages:
    """The table's functions, over a process group that is theirs alone."""

    def __init__(self, group, over):
        self._group, self._over, self._lanes = group, over, {}
        self.send, self.receive = StartMessage(self._send), StartMessage(self._receive)
        self.close = CloseTransport(self._close)

    def _send(self, _, peer, channel, data, size, message):
        return self._start("send", self._group.send, peer, channel, data, size, message)

    def _receive(self, _, peer, channel, data, size, message):
        return self._start("receive", self._group.recv, peer, channel, data, size, message)

    def _start(self, name, call, peer, channel, data, size, message):
        with log.called_back():
            self._put(name, call, peer, channel, data, size, message)
        return 0

    def _put(self, name, call, peer, channel, data, size, message):
        try:
            tensor = torch.frombuffer((ctypes.c_ubyte * size).from_address(data), dtype=torch.uint8)
            work = call([tensor], peer, channel)
            lane = self._lanes.get((name, peer, channel))
            if lane is None:
                lane = self._lanes[name, peer, channel] = _Lane(f"{name} {peer}.{channel}", self._over)
            lane.put(work, tensor, message)
        except BaseException as error:  # nothing may pass through C
            self._over(message, why_of(error).encode())

    def _close(self, _, parting):
        with log.called_back():
            self._end_lanes()

    def _end_lanes(self):
        """Gloo cannot take a message back. But a wait that runs out of time closes all connections of the group, at
        which every other wait ends."""
        lanes = list(self._lanes.values())
        for lane in lanes:
            lane.end()
        for _ in range(200):
            for lane in lanes:
                work = lane.waits_for
                if work is not None:
                    with contextlib.suppress(Exception):
                        work.wait(AT_ONCE)
            for lane in lanes:
                lane.join(0.01)
            if not any(lane.is_alive() for lane in lanes):
                return


def _difference(own, first):
    def said(tensor):
        return f"{tensor[0]}, {tuple(tensor[2:])} of {tensor[1]}," if tensor else "none of it"

    here = next((each for each in own if each not in first), None)
    there = next((each for each in first if each not in own), None)
    if here is None and there is None:
        return "the same tensors in another order than rank 0's"
    return f"{said(here)} where rank 0's has {said(there)}"


def own_group(group, patience):
    """Of the same processes, in the same order, over Gloo; None: of all. `patience`: seconds."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise Error("invalid_argument", "ranks: torch.distributed has no process group; call "
                                        'torch.distributed.init_process_group("gloo") first')
    distributed, options = torch.distributed, {}
    if group is not None and group.size() != distributed.get_world_size():
        ranks = getattr(distributed, "get_process_group_ranks", None)
        if ranks is None:
            raise Error("unsupported", f"ranks: PyTorch {torch.__version__} makes a group of some processes only with "
                                       "all others; install 2.1 or newer, or give no group")
        options = {"ranks": ranks(group), "use_local_synchronization": True}
    try:
        return distributed.new_group(timeout=datetime.timedelta(seconds=patience), backend="gloo", **options)
    except Exception as error:
        raise Error("io", f"ranks: torch.distributed makes no group over gloo ({why_of(error)}); look at what "
                          "ended or stopped other processes, and at the network (GLOO_SOCKET_IFNAME)") from None


@finalizer
def _end(communicator, messages, group, _process):
    library().communicator_destroy(communicator)
    del messages
    with contextlib.suppress(Exception):  # the script may have destroyed all groups
        torch.distributed.destroy_process_group(group)


class Agreement:
    """How ranks stay together where one of them fails.

    The rule: what may fail on one rank alone is done before the call that others would wait in, inside agree(); what
    fails in the middle of such calls is kept, and told by hear() at their end. So each rank's failure is raised on all
    of them, in the same place, and none waits for one that has left. each() is there for values alone.
    """

    def at_work(self):
        """Around work that the others wait for."""
        return contextlib.nullcontext()

    def agree(self, work):
        """What `work` returns on each rank, by rank. What it raises on one is raised on all."""
        result = failure = None
        try:
            with self.at_work():
                result = work()
        except Exception as error:
            failure = error
        return self.hear(failure, result)

    def hear(self, failure=None, result=None):
        """As agree(), of work that is done."""
        told = failure and [getattr(failure, "code", "unexpected"), str(failure) or type(failure).__name__]
        try:
            everyones = self.each([told, result])
        except Error:  # the ranks have parted
            raise failure or sys.exc_info()[1]
        if failure is not None:
            raise failure
        for rank, (wrong, _) in enumerate(everyones):
            if wrong is not None:
                raise Error(wrong[0], f"rank {rank}: {wrong[1]}")
        return [value for _, value in everyones]

    def alike(self, what, find):
        """What `find()` gives: the same on every rank, or an error on all of them. `what`: the words for it."""
        told = self.agree(find)
        for rank, other in enumerate(told):
            if other != told[0]:
                raise Error("invalid_argument", f"{what}: rank {rank} has {other}, and rank 0 has {told[0]}; give "
                                                "all ranks the same")
        return told[self.rank]


class Ranks(Agreement):
    """The processes that train one model together.

    `group`: of torch.distributed; the default are all processes.
    `patience`: seconds without progress, while others are waited for, after which each says who is missing.
    All of them make it in the same place, and close it after their engines.
    """

    def __init__(self, group=None, patience=60.0):
        if not 0 < patience <= YEAR:
            raise Error("invalid_argument", f"ranks: patience is {patience} s; give seconds, above 0 and a year at the "
                                            "most")
        own = own_group(group, patience)
        self.rank, self.count = own.rank(), own.size()
        self.all = self.count == torch.distributed.get_world_size()  # the processes that there are
        self.walks = 0  # calls that bring all ranks' weights
        self._told_every = min(1, patience / 4)  # seconds
        name = f"torch.distributed {torch.__version__.split('+')[0]}, gloo"
        messages = _Messages(own, library().message_over)
        table = Transport(None, self.rank, self.count, name.encode(), messages.send, messages.receive, messages.close)
        self.handle = c_void_p()
        library().communicator_create(byref(table), byref(CommunicatorOptions(patience, 0)), byref(self.handle))
        # After the finalizers of its engines, which are made later.
        self._finalizer = weakref.finalize(self, _end, self.handle, messages, own, os.getpid())
        log.rank = self.rank

    def close(self):
        """Waits for the other ranks to hear of it, for `patience` at most."""
        self._finalizer()

    @contextlib.contextmanager
    def at_work(self):
        """Around work that the others wait for, also for longer than `patience`: as long as it moves, that is as its
        thread's processor time does."""
        over, clock = threading.Event(), time.pthread_getcpuclockid(threading.get_ident())
        try:
            threading.Thread(target=self._tell_of_work, args=(clock, over), name="at work", daemon=True).start()
            yield
        finally:
            over.set()

    def _tell_of_work(self, clock, over):
        before = None
        while not over.wait(self._told_every):
            now = time.clock_gettime(clock)
            if now != before:
                library().communicator_note_work(self.handle)
            before = now

    @contextlib.contextmanager
    def ending(self):
        """Around calls that this rank ends with, and that the others may not have come to."""
        library().communicator_note_ending(self.handle, True)
        try:
            yield
        finally:
            library().communicator_note_ending(self.handle, False)

    def same(self, value=None, root=0):
        """Rank `root`'s value, of JSON, on every rank."""
        text = json.dumps(value).encode() if self.rank == root else b""
        size = c_uint64(len(text))
        library().communicator_broadcast(self.handle, byref(size), ctypes.sizeof(size), root)
        memory = ctypes.create_string_buffer(text, size.value)
        library().communicator_broadcast(self.handle, memory, size.value, root)
        return json.loads(memory.raw)

    def each(self, value):
        """Every rank's value, of JSON, by rank."""
        return [self.same(value, root) for root in range(self.count)]

    def same_files(self, directory, beside):
        """Rank 0's `directory`, without directories in it, as every rank may read it: itself; on hosts that do not see
        it a copy of the same name in `beside`. Raises on every rank what goes wrong on one of them."""
        first = pathlib.Path(self.same(str(directory)))
        if all(seen := self.agree(first.is_dir)):
            return first
        copy = first if seen[self.rank] else pathlib.Path(beside, first.name)

        def begin():
            if not seen[self.rank]:
                copy.mkdir()
            return sorted([file.name, file.stat().st_size] for file in first.iterdir()) if self.rank == 0 else None

        for name, size in self.agree(begin)[0]:
            self.hear(self._same_file(first / name, None if seen[self.rank] else copy / name, size))
        return copy

    def _same_file(self, source, target, size):
        """`target`: None, where `source` is seen. Returns what went wrong here, after which it goes on, for the others
        wait for the bytes."""
        memory, failed = bytearray(PIECE_BYTES), []
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

        def unless_failed(work):
            try:
                return None if failed else work()
            except Exception as error:
                failed.append(error)
                return None

        def read(file, piece):
            if file.readinto(piece) != len(piece):
                raise Error("io", f"{source}: is shorter than the {size} bytes that it had; write to nothing that is "
                                  "sent to other hosts")

        with contextlib.ExitStack() as files:
            sends, takes = self.rank == 0, self.rank != 0 and target is not None
            file = unless_failed(lambda: files.enter_context(open(source, "rb") if sends else open(target, "wb"))
                                 if sends or takes else None)
            for at in range(0, size, PIECE_BYTES):
                piece = memoryview(memory)[:min(PIECE_BYTES, size - at)]
                unless_failed(lambda: sends and read(file, piece))
                library().communicator_broadcast(self.handle, address, len(piece), 0)
                unless_failed(lambda: takes and file.write(piece))
            unless_failed(lambda: takes and file.flush())
        return failed[0] if failed else None

    def same_tensors(self, tensors):
        """Gives tensors, by name, rank 0's values, in place. What has them already is not written to: memory that maps
        a file's stays one with it."""
        own = [[name, str(tensor.dtype), *tensor.shape] for name, tensor in tensors.items()]
        first = self.same(own)
        for rank, differs in enumerate(self.agree(lambda: None if own == first else _difference(own, first))):
            if differs is not None:
                raise Error("invalid_argument", f"ranks: rank {rank}'s model has {differs}; make the same model on "
                                                "every rank")
        beside = torch.empty(PIECE_BYTES, dtype=torch.uint8, device="cpu")
        with torch.no_grad():
            for tensor in tensors.values():
                self._same_tensor(tensor.detach(), beside)

    def _same_tensor(self, tensor, beside):
        dense = tensor.cpu().contiguous()
        if dense.numel() == 0:
            return
        changed = False
        for piece in dense.view(-1).view(torch.uint8).split(PIECE_BYTES):
            memory = piece if self.rank == 0 else beside[:piece.numel()]
            library().communicator_broadcast(self.handle, memory.data_ptr(), piece.numel(), 0)
            if self.rank != 0 and not torch.equal(piece, memory):
                piece.copy_(memory)
                changed = True
        if changed and dense.data_ptr() != tensor.data_ptr():
            tensor.copy_(dense)

    def raise_on_all(self, failure):
        """Raises on every rank what has failed on rank 0, else on each its own failure."""
        code = getattr(failure, "code", "unexpected")
        try:
            told = self.same([code, str(failure)] if self.rank == 0 and failure is not None else None)
        except Error:  # the ranks have parted
            raise failure or sys.exc_info()[1]
        if told is not None and self.rank != 0:
            raise Error(told[0], told[1] if told[0] != "unexpected" else f"rank 0: {told[1]}")
        if failure is not None:
            raise failure

    def together(self, work):
        """`work`, of which rank 0 knows best how it went."""
        failure = None
        try:
            with self.at_work():
                work()
        except Exception as error:
            failure = error
        self.raise_on_all(failure)

    def first_writes(self, write, walk):
        """Rank 0 does `write`, in which it walks over all ranks' weights, once; what the others do of that is `walk`,
        and rank 0 as well where its work fails before."""
        def work():
            walks = self.walks
            try:
                write() if self.rank == 0 else walk()
            except Exception:
                if self.rank == 0 and self.walks == walks:
                    walk()
                raise

        self.together(work)


def ranks_of(asked):
    """Of an engine: (Ranks, whether it is the engine's own to close); None: this process alone."""
    if asked is None:
        return None, False
    if isinstance(asked, Ranks):
        return asked if asked.count > 1 else None, False
    if isinstance(asked, str):
        if asked != "auto":
            raise Error("invalid_argument", f"ranks: is '{asked}'; give \"auto\", a process group of "
                                            "torch.distributed, a spillway.ranks.Ranks, or None for this process alone")
        return (Ranks(), True) if processes() > 1 else (None, False)
    return (Ranks(asked), True) if asked.size() > 1 else (None, False)


def take_gpu(several):
    """An engine's GPU is PyTorch's current one. Where a script has set none, that of a rank is LOCAL_RANK's, as for any
    script that torchrun starts."""
    if not torch.cuda.is_available() or not (several or torch.cuda.is_initialized()):
        return
    local = int(os.environ.get("LOCAL_RANK") or 0)
    if several and torch.cuda.current_device() == 0 and 0 < local < torch.cuda.device_count():
        torch.cuda.set_device(local)
        log.say(logging.INFO, f"ranks: GPU {local} is the current one from here on, as LOCAL_RANK says; for another "
                              "one call torch.cuda.set_device() before")
    if torch.cuda.current_device() != 0:
        torch.cuda.synchronize()  # until then CUDA 11 keeps to itself which one it is


def processes():
    """Of torch.distributed's group of all; without one, and where nothing says that there should be one, 1."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    started = int(os.environ.get("WORLD_SIZE") or 1)
    if started > 1:
        raise Error("invalid_argument", f"ranks: WORLD_SIZE is {started}, and torch.distributed has no process "
                                        'group; call torch.distributed.init_process_group("gloo") first, or say '
                                        "ranks=None where each process trains a model of its own")
    return 1
