"""Where block inputs wait for backward: what autograd keeps between blocks, in host memory or on the drives.

Of every block autograd keeps the arguments. Here they leave the device's memory after the block's forward, and are on
their way back while the blocks after it run backward. What several blocks are given, an encoder's output, a mask, is
one entry, by its memory and version.

    forward    block 1 ─ block 2 ─ block 3 ─ …      copies and writes of the last two run beside what computes
    backward   … ─ block 3 ─ block 2 ─ block 1      copies and reads of the two that come next

Of a GPU they leave by pinned memory on a stream of their own. The drive is the library's: files without a name in the
run's nvme_paths, its own queues, direct I/O; what moves at a time is what AHEAD says, and memory on the way no more.

How much it is the first forward passes show. Before backward the plan is made once more, if it has to be, with a part
of host_bytes and nvme_bytes for them; what host memory has no room for goes to the drives from then on.
"""
import collections
import logging
import mmap
import os
import weakref
from ctypes import byref, c_uint64, c_void_p

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from .. import log
from ..memory import plain
from .uses import open_again, say_plan

AHEAD = 2       # entries on their way at a time, in each direction
LEAST = 16384   # bytes; less stays where it is
ALIGNED = 4096  # of the library's scratch files


def place_of(settings):
    """"none", "cpu" or "nvme"."""
    kept = settings.get("activation_checkpointing.cpu_checkpointing")
    return settings.get("spillway.block_inputs") or ("cpu" if kept else "none")


def kept_inputs(engine):
    """An engine's KeptInputs; None, where block inputs stay where they are: on a CPU host memory is that place."""
    place = place_of(engine.settings)
    if place == "none" or place == "cpu" and not engine.on_cuda:
        return None
    return KeptInputs(engine, place)


class _Files:
    """The library's scratch files, and which parts of them are free."""

    def __init__(self, library, config):
        self._library, self._handle = library, c_void_p()
        library.scratch_create(config, byref(self._handle))
        self._count = library.scratch_files(self._handle)
        self._free, self._ends, self._next = collections.defaultdict(list), [0] * self._count, 0
        self.under_way = {}  # memory by ticket, which must live as long
        weakref.finalize(self, _destroy, library, self._handle, self.under_way, os.getpid())

    def take(self, size):
        if self._free[size]:
            return self._free[size].pop()
        file, self._next = self._next, (self._next + 1) % self._count
        self._ends[file] += size
        return file, self._ends[file] - size, size

    def give(self, place):
        self._free[place[2]].append(place)

    def start(self, call, place, memory):
        ticket, (file, offset, size) = c_uint64(), place
        call(self._handle, file, offset, memory.data_ptr(), size, byref(ticket))
        self.under_way[ticket.value] = memory
        return ticket.value

    def write(self, place, memory):
        return self.start(self._library.scratch_write, place, memory)

    def read(self, place, memory):
        return self.start(self._library.scratch_read, place, memory)

    def wait(self, ticket):
        try:
            self._library.scratch_wait(self._handle, ticket)
        finally:
            self.under_way.pop(ticket, None)

    def moved(self):
        """(bytes read, bytes written)."""
        read, written = c_uint64(), c_uint64()
        self._library.scratch_moved(self._handle, byref(read), byref(written))
        return read.value, written.value


def _destroy(library, handle, under_way, process):
    if process == os.getpid():  # a fork has none of its threads
        library.scratch_destroy(handle)
    under_way.clear()


class _Entry:
    """One tensor's bytes, wherever they are. On its way out `memory` is set, and `ticket` while it is being written."""

    def __init__(self, kept, tensor, before):
        self._kept, self.storage = kept, StorageWeakRef(_storage(tensor))
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.bytes = tensor.numel() * tensor.element_size()
        self.size = -(-self.bytes // ALIGNED) * ALIGNED
        self.stays = False    # in host memory
        self.before = None if before is None else weakref.ref(before)  # which backward asks for next
        self.uses = 1
        self.memory = None    # in host memory
        self.copied = None    # an event of the copy out of a GPU
        self.place = None     # on the drive
        self.ticket = None    # of a write
        self.coming = None    # (memory, ticket of its read)
        self.arriving = None  # (tensor on the GPU, event)
        self.here = None      # the tensor, while others will ask for it too

    def over(self, memory):
        """The tensor, over that memory."""
        return memory[:self.bytes].view(self.dtype).as_strided(self.shape, self.stride)

    def __del__(self):
        # Anywhere, so also inside of a call to the library: the files are told by whoever comes next.
        self._kept.left.append((self.size, self.stays, self.place, self.ticket, self.coming))


class KeptInputs:
    """An engine's. pack() and unpack() are what Lender.hooks() asks."""

    def __init__(self, engine, place):
        self._device, self._place = engine.device, place
        self._files = _Files(engine._library, engine._config) if place == "nvme" else None
        self._in_host, self._room = 0, None if place == "cpu" else 0  # bytes; None: the plan does not say yet
        self._on_nvme = self._largest = 0
        self._stream = torch.cuda.Stream(engine.device) if engine.on_cuda else None
        self._known = weakref.WeakValueDictionary()
        self._leaving = collections.deque()  # entries whose memory is still theirs
        self._last = None
        self.left = collections.deque()      # of entries that are gone
        self.kept_bytes = 0                  # that were taken, ever
        log.say(logging.INFO, f"block inputs: wait for backward {'on nvme' if self._files else 'in host memory'}; "
                              f"{AHEAD} are on their way at a time; backward() makes room for them in the plan")

    @property
    def moved(self):
        """(bytes read, bytes written), of the drives."""
        return self._files.moved() if self._files else (0, 0)

    # -- the plan -------------------------------------------------------------------------------------------------

    def measure(self, engine):
        """What is here now, as of a forward pass that backward follows; in the middle of a step nothing changes. On
        its way is host memory of two entries each way, and of one that is used."""
        self._tidy()
        if any(engine._pushed.values()):
            return
        all_of_it = self._in_host + self._on_nvme
        found = (all_of_it, 0, 0) if self._place == "cpu" else (0, all_of_it, self._moving())
        engine._layout.kept = tuple(map(max, engine._layout.kept, found))

    def plan(self, engine):
        layout = engine._layout
        if layout.kept == layout.planned_for:
            self._obey(engine)
            return
        open_again(engine)
        if self._obey(engine) and not layout.kept[2]:
            layout.kept = (*layout.kept[:2], self._moving())
            open_again(engine)
            self._obey(engine)
        log.say(logging.INFO, f"block inputs: {sum(layout.kept[:2])} bytes wait for backward; the plan, which had no "
                              "room for so many, was made once more")
        say_plan(engine)

    def _moving(self):
        return (2 * AHEAD + 1) * self._largest

    def _obey(self, engine):
        """Whether some that were to be in host memory go to the drives."""
        if self._place == "nvme":
            return False
        kept = {tier: size for tier, purpose, size in engine.ledger() if purpose == "block inputs"}
        self._room = kept.get("host", 0)
        if kept.get("nvme") and self._files is None:
            self._files = _Files(engine._library, engine._config)
        return bool(kept.get("nvme"))

    # -- out ------------------------------------------------------------------------------------------------------

    def pack(self, tensor):
        if not _is_plain(tensor, self._device):
            return None
        self._tidy()
        key = (_storage(tensor)._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype,
               tensor._version)
        entry = self._known.get(key)
        if entry is not None and not entry.storage.expired():
            entry.uses += 1
            return self, entry
        last = self._last() if self._last is not None else None
        entry = self._known[key] = _Entry(self, tensor, last)
        self._last = weakref.ref(entry)
        self.kept_bytes += entry.bytes
        self._largest = max(self._largest, entry.size)
        entry.stays = self._files is None or \
            (self._place == "cpu" and (self._room is None or self._in_host + entry.size <= self._room))
        if entry.stays:
            self._in_host += entry.size
        else:
            self._on_nvme += entry.size
        self._send(entry, tensor)
        return self, entry

    def _memory(self, size):
        """Host memory as the files want it, at least."""
        size = -(-size // ALIGNED) * ALIGNED
        if self._stream is None:  # pages of its own, which go back to the system with it; malloc's heap would keep them
            return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        made = torch.empty(size + ALIGNED, dtype=torch.uint8, pin_memory=True)
        skip = -made.data_ptr() % ALIGNED
        return made[skip:skip + size]

    def _send(self, entry, tensor):
        entry.memory = self._memory(entry.bytes)
        if self._stream is None:
            entry.over(entry.memory).copy_(tensor)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                entry.over(entry.memory).copy_(tensor, non_blocking=True)
                entry.copied = self._stream.record_event()
            tensor.record_stream(self._stream)  # whose memory is another's after the copy
        if entry.stays:
            return
        self._leaving.append(entry)
        if self._stream is None:
            self._write(entry)
        elif len(self._leaving) > 1:
            self._write(self._leaving[-2])  # whose copy has had a block's time
        while len(self._leaving) > AHEAD:
            self._let_go(self._leaving.popleft())

    def _write(self, entry):
        if entry.ticket is None and entry.memory is not None:
            if entry.copied is not None:
                entry.copied.synchronize()
            entry.place = self._files.take(len(entry.memory))
            entry.ticket = self._files.write(entry.place, entry.memory)

    def _let_go(self, entry):
        self._write(entry)
        ticket, entry.ticket = entry.ticket, None
        self._files.wait(ticket)
        entry.memory = None

    def _tidy(self):
        while self.left:
            size, stayed, place, ticket, coming = self.left.popleft()
            if stayed:
                self._in_host -= size
            else:
                self._on_nvme -= size
            for each in (ticket, coming and coming[1]):
                if each is not None:
                    self._files.wait(each)
            if place is not None:
                self._files.give(place)

    # -- and back -------------------------------------------------------------------------------------------------

    def unpack(self, entry):
        self._tidy()
        value = entry.here if entry.here is not None else self._arrived(entry)
        if entry.uses > 1:
            entry.here = value
        following = entry
        for ahead in range(AHEAD):
            following = following.before and following.before()
            if following is None:
                break
            self._fetch(following, to_device=ahead == 0)
        return value

    def _fetch(self, entry, to_device):
        """Its bytes begin to come, and where they are in host memory soon, or must be, go on to the GPU."""
        if entry.here is not None or entry.arriving is not None:
            return
        if entry.memory is None and entry.coming is None:
            memory = self._memory(entry.bytes)
            entry.coming = memory, self._files.read(entry.place, memory)
        if self._stream is not None and to_device:
            entry.arriving = self._to_device(entry)

    def _in_host_memory(self, entry):
        if entry.memory is not None:  # it stays there, or has not left yet
            return entry.memory
        memory, ticket = entry.coming
        entry.coming = None
        self._files.wait(ticket)
        return memory

    def _to_device(self, entry):
        memory = self._in_host_memory(entry)
        if entry.copied is not None:
            self._stream.wait_event(entry.copied)
        with torch.cuda.stream(self._stream):
            value = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype, device=self._device)
            value.copy_(entry.over(memory), non_blocking=True)
            return value, self._stream.record_event()

    def _arrived(self, entry):
        self._fetch(entry, to_device=True)
        if self._stream is None:
            return entry.over(self._in_host_memory(entry))
        (value, event), entry.arriving = entry.arriving, None
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(event)
        value.record_stream(stream)
        return value


def _is_plain(tensor, device):
    """That its bytes are what it is, and worth moving: an expanded mask, say, is less than it looks like."""
    return tensor.device.type == device.type and tensor.layout == torch.strided and type(tensor) is torch.Tensor and \
        not tensor.is_conj() and not tensor.is_neg() and tensor.numel() * tensor.element_size() >= LEAST and \
        _is_dense(tensor)


def _is_dense(tensor):
    """Every element has a place of its own, without gaps."""
    expected = 1
    for size, stride in sorted(((n, s) for n, s in zip(tensor.shape, tensor.stride()) if n > 1), key=lambda e: e[1]):
        if stride != expected:
            return False
        expected *= size
    return True


def _storage(tensor):
    return plain(_of, (), (tensor,), {})


def _of(tensor):
    return tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage().untyped()
