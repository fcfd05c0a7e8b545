#!/usr/bin/env python3
"""One program that keeps named tensors on a drive, as a process that is told what to do: see bench/tensor_peers.py.

Reads a line `write ROUND`, `read ROUND` or `rows ROUND` and answers with a line of JSON: bytes, seconds, CPU seconds of
the process with all its threads. What was read is looked at afterwards, outside of what is measured.
"""
import argparse
import ctypes
import glob
import json
import os
import pathlib
import random
import resource
import sys
import time
import warnings

import numpy
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
MIB, PAGE = 1 << 20, 4096
MARK = 8  # bytes at a tensor's begin and end, which say whose they are


def sizes_of(case, total):
    """Bytes of each tensor: 64 MiB, or less where `total` is small; or odd numbers of them, 8 to 128 MiB."""
    if case == "equal":
        return [total // 16] * 16
    chance, sizes = random.Random(7), []
    while sum(sizes) < total:
        sizes.append(chance.randrange(total // 128, total // 8) | 1)
    return sizes


def rows_of(a, round_):
    return numpy.random.default_rng(1000 + round_).permutation(a.table_rows)[:a.rows]


def padded(size):
    return -(-size // PAGE) * PAGE


def sync_file(path):
    descriptor = os.open(path, os.O_RDWR)
    os.fdatasync(descriptor)
    os.close(descriptor)


def drop_cached(path):
    """What is read next comes from the drive."""
    descriptor = os.open(path, os.O_RDWR)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


class InOneFile:
    """Tensors at offsets of one file, in one piece of memory: what a queue of reads and writes is used for."""

    def __init__(self, a):
        self.a, self.path = a, os.path.join(a.folder, "file")
        self.sizes = sizes_of(a.case, a.bytes)
        self.offsets = [sum(padded(size) for size in self.sizes[:i]) for i in range(len(self.sizes))]
        self.file_bytes = a.table_rows * PAGE if a.case == "rows" else self.offsets[-1] + padded(self.sizes[-1])
        self.begin()
        if a.case == "rows":
            memory = self.memory(self.file_bytes)
            memory.reshape(-1, PAGE)[:, :MARK] = numpy.arange(a.table_rows).view(numpy.uint8).reshape(-1, MARK)
            self.move("write", [(0, 0, self.file_bytes)])
            self.sync()
        else:
            self.whole = self.memory(self.file_bytes)

    def views(self):
        whole = torch.from_numpy(self.whole)
        return [whole[at:at + size] for at, size in zip(self.offsets, self.sizes)]

    def write(self):
        self.move("write", [(at, at, padded(size)) for at, size in zip(self.offsets, self.sizes)])
        self.sync()

    def read(self):
        self.move("read", [(at, at, padded(size)) for at, size in zip(self.offsets, self.sizes)])

    def before_read(self):
        for view in self.views():
            view[:MARK] = view[-MARK:] = 0

    def before_rows(self, rows):
        self.to = self.memory(self.file_bytes)[:len(rows) * PAGE].reshape(-1, PAGE)
        self.to[:, :MARK] = 255

    def read_rows(self, rows):
        self.move_rows(rows)
        return self.to


class Queue(InOneFile):
    """Spillway's queue: spillway/c_io.h."""

    REQUEST = numpy.dtype([("op", "i4"), ("priority", "i4"), ("file", "u4"), ("unused", "u4"), ("offset", "u8"),
                           ("buffer", "u8"), ("bytes", "u8"), ("tag", "u8"), ("least_bytes", "u8")])
    COMPLETION = numpy.dtype([("tag", "u8"), ("error", "i4"), ("error_file", "u4"), ("error_offset", "u8"),
                              ("error_bytes", "u8")])
    READ, WRITE, SYNC, NORMAL = 0, 1, 2, 1

    def begin(self):
        from ctypes import POINTER, byref, c_char_p, c_double, c_int32, c_size_t, c_uint32, c_uint64, c_void_p
        from spillway.library import Sized, library

        class FileOptions(Sized):
            _fields_ = [("struct_size", c_size_t)] + \
                       [(name, c_int32) for name in ("writable", "create", "follow_links", "buffered")]

        class QueueOptions(Sized):
            _fields_ = [("struct_size", c_size_t), ("engine", c_int32), ("depth", c_uint32)] + \
                       [("block_bytes", c_uint64)] + \
                       [(name, c_uint32) for name in ("max_requests", "max_files", "max_regions", "file_count")] + \
                       [("stall_report_seconds", c_double), ("files", POINTER(c_void_p)), ("stripes", c_void_p)]

        self.calls = library()
        self.calls.bind({
            "io_file_open": [c_char_p, POINTER(FileOptions), POINTER(c_void_p)],
            "io_file_preallocate": [c_void_p, c_uint64],
            "io_memory_allocate": [c_uint64, c_uint64, POINTER(c_void_p), c_void_p],
            "io_queue_create": [POINTER(QueueOptions), POINTER(c_void_p)],
            "io_queue_add_region": [c_void_p, c_void_p, c_uint64, POINTER(c_int32)],
            "io_queue_submit": [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)],
            "io_queue_wait": [c_void_p, c_void_p, c_size_t, c_double, POINTER(c_size_t)]})
        file, self.queue, self.base = c_void_p(), c_void_p(), c_void_p()
        create = not os.path.exists(self.path)
        self.calls.io_file_open(self.path.encode(), byref(FileOptions(writable=1, create=create)), byref(file))
        self.calls.io_file_preallocate(file, self.file_bytes)
        options = QueueOptions(depth=self.a.depth, block_bytes=self.a.block, file_count=1, files=(c_void_p * 1)(file))
        self.calls.io_queue_create(byref(options), byref(self.queue))
        self.done = numpy.zeros(4096, self.COMPLETION)

    def memory(self, size):
        if not self.base.value:
            self.calls.io_memory_allocate(size, 0, ctypes.byref(self.base), None)
            self.calls.io_queue_add_region(self.queue, self.base, size, None)
        return numpy.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(self.base.value))

    def run(self, requests):
        """All of them; at most 4096 in the queue at a time."""
        count, taken, finished = ctypes.c_size_t(), ctypes.c_size_t(), 0
        for begin in range(0, len(requests), len(self.done)):
            part = requests[begin:begin + len(self.done)]
            self.calls.io_queue_submit(self.queue, part.ctypes.data, len(part), ctypes.byref(taken))
            while finished < begin + len(part):
                self.calls.io_queue_wait(self.queue, self.done.ctypes.data, len(self.done), -1.0, ctypes.byref(count))
                if self.done["error"][:count.value].any():
                    sys.exit(f"{self.path}: a request failed: {self.done[:count.value]}")
                finished += count.value

    def move(self, op, pieces):
        requests = numpy.zeros(len(pieces), self.REQUEST)
        requests["op"], requests["priority"] = self.WRITE if op == "write" else self.READ, self.NORMAL
        requests["offset"], requests["buffer"], requests["bytes"] = numpy.array(pieces, numpy.uint64).T
        requests["buffer"] += numpy.uint64(self.base.value)
        self.run(requests)

    def sync(self):
        requests = numpy.zeros(1, self.REQUEST)
        requests["op"] = self.SYNC
        self.run(requests)

    def move_rows(self, rows):
        self.move("read", numpy.stack([rows * PAGE, numpy.arange(len(rows)) * PAGE, numpy.full(len(rows), PAGE)], 1))


class DeepSpeed(InOneFile):
    """DeepSpeed's aio handle: the tensors are slices of memory that it has locked, so that it copies none."""

    def begin(self):
        from deepspeed.ops.op_builder import AsyncIOBuilder
        module = AsyncIOBuilder().load(verbose=False)
        self.handles = [module.aio_handle(self.a.block, self.a.depth, False, True, 1) for _ in range(self.a.handles)]
        self.locked = None

    def memory(self, size):
        if self.locked is None:
            self.locked = self.handles[0].new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            self.locked.zero_()
        return self.locked.numpy()

    def move(self, op, pieces):
        handle = self.handles[0]
        start = handle.async_pwrite if op == "write" else handle.async_pread
        for offset, at, size in pieces:
            if start(self.locked[at:at + size], self.path, offset) != 0:
                sys.exit(f"{self.path}: {op} of {size} bytes at {offset} was refused")
        handle.wait()

    def sync(self):
        sync_file(self.path)

    def move_rows(self, rows):
        # Each request opens the file, so only so many may be under way; a handle takes them one by one.
        batch = 256
        offsets = (rows * PAGE).tolist()
        for begin in range(0, len(offsets), batch):
            part = offsets[begin:begin + batch]
            for i, offset in enumerate(part, begin):
                self.handles[i % len(self.handles)].async_pread(self.locked[i * PAGE:(i + 1) * PAGE], self.path, offset)
            for handle in self.handles[:len(part)]:
                handle.wait()


class Named:
    """Tensors by name or by themselves, in ordinary memory."""

    def __init__(self, a):
        self.a = a
        if a.case != "rows":
            self.tensors = [torch.ones(size, dtype=torch.uint8) for size in sizes_of(a.case, a.bytes)]
        self.begin()

    def views(self):
        return self.tensors


class Store(Named):
    """spillway.io.TensorStore."""

    def begin(self):
        from spillway.io import TensorStore
        a = self.a
        held = a.table_rows * PAGE if a.case == "rows" else 2 * sum(map(padded, sizes_of(a.case, a.bytes)))
        self.store = TensorStore(os.path.join(a.folder, "store"), nvme_bytes=held + (64 << 20),
                                 host_bytes=a.host_bytes)
        if a.case == "rows":
            table = torch.zeros(a.table_rows, PAGE, dtype=torch.uint8)
            table[:, :MARK] = torch.arange(a.table_rows)[:, None].view(torch.uint8)
            self.store.put("table", table, block_bytes=PAGE)
            self.store.commit()
            self.out = torch.zeros(a.rows, PAGE, dtype=torch.uint8)
            return
        self.names = [f"tensor {i}" for i in range(len(self.tensors))]

    def write(self):
        self.store.put(dict(zip(self.names, self.tensors)))
        self.store.commit()

    def before_read(self):
        for view in self.views():
            view[:MARK] = view[-MARK:] = 0
        self.read_before = self.store.stats().read_bytes

    def read(self):
        self.store.get(self.names, out=self.tensors)

    def before_rows(self, _):
        self.out[:, :MARK] = 255

    def read_rows(self, rows):
        return self.store.rows("table", rows, out=self.out).numpy()


class TensorNvme(Named):
    """TensorNVMe's DiskOffloader: through the page cache, from which what is read was dropped before."""

    def begin(self):
        warnings.filterwarnings("ignore")
        from tensornvme import DiskOffloader
        folder = os.path.join(self.a.folder, self.a.program)
        self.disk = DiskOffloader(folder, self.a.depth, self.a.program.rsplit("-", 1)[1])
        self.path, = glob.glob(os.path.join(folder, "offload-*"))
        if self.a.case == "rows":
            self.rows = []
            for i in range(self.a.table_rows):
                row = torch.zeros(PAGE, dtype=torch.uint8)
                row[:MARK] = torch.tensor([i]).view(torch.uint8)
                self.rows.append(row)
            self.all(self.disk.async_write, self.rows)

    def all(self, start, tensors):
        # As many as it has entries: its libaio loses those that come on top.
        for begin in range(0, len(tensors), self.a.depth):
            for tensor in tensors[begin:begin + self.a.depth]:
                start(tensor)
            self.disk.synchronize()

    def write(self):
        self.all(self.disk.async_write, self.tensors)
        sync_file(self.path)

    def before_read(self):
        drop_cached(self.path)

    def read(self):
        self.all(self.disk.async_read, self.tensors)

    def before_rows(self, _):
        drop_cached(self.path)

    def read_rows(self, rows):
        self.all(self.disk.async_read, [self.rows[row] for row in rows])

    def after_rows(self, rows):
        """What it has read is no longer in its file."""
        read = [self.rows[row] for row in rows]
        found = torch.stack(read).numpy()
        self.all(self.disk.async_write, read)
        return found


PROGRAMS = {"queue": Queue, "store": Store, "tensornvme-uring": TensorNvme, "tensornvme-aio": TensorNvme,
            "deepspeed": DeepSpeed}


def measured(work, *arguments):
    def cpu():
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    cpu_before, before = cpu(), time.perf_counter()
    result = work(*arguments)
    return result, {"seconds": round(time.perf_counter() - before, 6), "cpu_seconds": round(cpu() - cpu_before, 6)}


def marks(round_, count):
    return [torch.tensor([round_ * 4096 + i]).view(torch.uint8) for i in range(1, count + 1)]


def serve(program, a, do, round_):
    if do == "rows":
        rows = rows_of(a, round_)
        program.before_rows(rows)
        found, figures = measured(program.read_rows, rows)
        if hasattr(program, "after_rows"):
            found = program.after_rows(rows)
        right = (found[:, :MARK].copy().view(numpy.int64)[:, 0] == rows).all()
        return {"bytes": len(rows) * PAGE, **figures, "right": bool(right)}
    count = len(sizes_of(a.case, a.bytes))
    if do == "write":
        for view, mark in zip(program.views(), marks(round_, count)):
            view[:MARK] = view[-MARK:] = mark
        _, figures = measured(program.write)
        right = True
    else:
        program.before_read()
        _, figures = measured(program.read)
        right = all(torch.equal(view[:MARK], mark) and torch.equal(view[-MARK:], mark)
                    for view, mark in zip(program.views(), marks(round_, count)))
        if isinstance(program, Store):
            figures["from_drive"] = program.store.stats().read_bytes - program.read_before
    return {"bytes": sum(sizes_of(a.case, a.bytes)), **figures, "right": right}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", choices=list(PROGRAMS), required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--case", choices=["equal", "odd", "rows"], required=True)
    for name in ("bytes", "block", "depth", "host-bytes", "table-rows", "rows", "handles"):
        parser.add_argument("--" + name, type=int, required=True)
    a = parser.parse_args()
    sys.path.insert(0, str(ROOT / "python"))
    # What a library prints must not stand between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    program = PROGRAMS[a.program](a)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        do, round_ = line.split()
        print(json.dumps(serve(program, a, do, int(round_))), file=answers, flush=True)
    answers.flush()
    os._exit(0)  # DeepSpeed's threads abort a process that ends by itself


if __name__ == "__main__":
    main()
