"""Named tensors in HBM, in host memory and on NVMe."""
import collections
import contextlib
import ctypes
import operator
import os
import sys
import threading
import weakref

from ..library import ON_EXISTING, Error, finalizer
from . import memory
from .calls import DEVICES, NO_NEXT_USE, TIERS, EachInfo, Options, Stats, ToGet, ToPut, calls
from .files import encoded

ENGINES = ("auto", "io_uring", "libaio", "threads")

TensorInfo = collections.namedtuple("TensorInfo", "name dtype shape nbytes in_host on_nvme committed pinned in_hbm "
                                                  "pinned_in_hbm")
TensorInfo.__doc__ = """What a store has under a name. `dtype`: its word, "float32"; `nbytes`: without padding.

`in_hbm`, `in_host` and `on_nvme`: where its bytes are; `committed`: as it is now, it survives a crash."""
TensorStoreStats = collections.namedtuple("TensorStoreStats", [name for name, _ in Stats._fields_[1:]])
TensorStoreStats.__doc__ = """Bytes taken of each tier, and what they can take; get() of tensors that were in HBM
(`hbm_hits`), in host memory (`hits`), in neither; who left these; bytes moved to and from the drives."""


@finalizer
def _close(library, handle, _process):
    library.tensor_store_close(handle)


def _names(names):
    if isinstance(names, (str, bytes)) or not all(isinstance(name, str) for name in names):
        raise Error("invalid_argument", f"names: {names!r} is no list of texts; give the names of tensors")
    return (ctypes.c_char_p * len(names))(*map(_name, names)), len(names)


def _name(name):
    if not isinstance(name, str):
        raise Error("invalid_argument", f"name: is a {type(name).__name__}; a tensor's name is a text")
    if "\0" in name:
        raise Error("invalid_argument", f"name: {name!r} has a zero character; give a name without one")
    return name.encode()


def _size(what, nbytes):
    if not 0 <= operator.index(nbytes) < 2**64:
        raise Error("invalid_argument", f"{what}: is {nbytes}; give a number of bytes")
    return operator.index(nbytes)


def _row(name, row):
    """As a number of Python's."""
    number = row.tolist() if hasattr(row, "tolist") else row
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise Error("invalid_argument", f"{name}: {row!r} is no row's number; give whole numbers")
    return operator.index(number)


def _tier(tier):
    if tier not in TIERS:
        raise Error("invalid_argument", f"tier: {tier!r}; give {' or '.join(TIERS)}")
    return TIERS[tier]


def _current_gpu():
    torch = sys.modules.get("torch")
    return torch.cuda.current_device() if torch is not None and torch.cuda.is_initialized() else 0


class TensorStore:
    """Named tensors in HBM and host memory under hard budgets, and beyond them in files of one or several drives.

    paths: a directory for each drive, over which tensors are striped; none: host memory alone.
    nvme_bytes: disk space of all of them together, taken when the store is made.
    host_bytes: memory, at least 1 MiB; names, shapes and checksums (8 bytes for 64 KiB) come on top.
    on_existing: "refuse", "resume" (the tensors of its last commit; a new store where there is none) or "replace".
    hbm_bytes: memory of a GPU, at least 1 MiB; 0: none, and no GPU is looked for.
    device: whose: "cuda", the GPU that PyTorch has now; "host", where RAM stands for it; "auto", a GPU where there is
      one, else "host".
    into: what get() makes where no `out` is given, "torch" or "numpy".
    io_engine: "auto", "io_uring", "libaio" or "threads".

    Any number of threads may use it at a time. It ends with close(), or with a `with` block, which do not commit: what
    was put since the last commit() is dropped, and the log says so. Errors: spillway.Error, with the tensor's name; a
    call that raises has changed nothing of the tensor that it names."""

    def __init__(self, paths=(), *, nvme_bytes=0, host_bytes, on_existing="refuse", into="torch", io_engine="auto",
                 hbm_bytes=0, device="auto"):
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        if on_existing not in ON_EXISTING:
            raise Error("invalid_argument", f"on_existing: {on_existing!r}; give one of {', '.join(ON_EXISTING)}")
        if into not in ("torch", "numpy"):
            raise Error("invalid_argument", f"into: {into!r}; give torch or numpy")
        if io_engine not in ENGINES:
            raise Error("invalid_argument", f"io_engine: {io_engine!r}; give one of {', '.join(ENGINES)}")
        if device not in DEVICES:
            raise Error("invalid_argument", f"device: {device!r}; give one of {', '.join(DEVICES)}")
        named = [encoded(path) for path in paths]
        sizes = {what: _size(what, nbytes) for what, nbytes in (("nvme_bytes", nvme_bytes), ("host_bytes", host_bytes),
                                                                ("hbm_bytes", hbm_bytes))}
        options = Options(paths=(ctypes.c_char_p * len(named))(*named), path_count=len(named),
                          on_existing=ON_EXISTING.index(on_existing), io_engine=ENGINES.index(io_engine),
                          device=DEVICES.index(device), **sizes)
        self._into, self._library, handle = into, calls(), ctypes.c_void_p()
        self._library.tensor_store_open(ctypes.byref(options), ctypes.byref(handle))
        self._handle = handle
        self._end = weakref.finalize(self, _close, self._library, handle, os.getpid())
        made = ctypes.c_int()
        self._library.tensor_store_device(handle, ctypes.byref(made))
        self.device = None if made.value == 0 else DEVICES[made.value]
        self._gpu = _current_gpu() if self.device == "cuda" else None
        self._views, self._closed, self._lock = 0, False, threading.Lock()

    def tier_of(self, device):
        """"hbm" where tensors on that torch.device go to HBM and come from there, else "host"."""
        return "hbm" if self._gpu is not None and device.type == "cuda" and device.index == self._gpu else "host"

    def _place(self, value):
        """Whether its memory is that of the store's GPU, and the stream in whose order that is used."""
        if not memory.is_torch(value) or self.tier_of(value.device) == "host":
            return 0, None
        return 1, sys.modules["torch"].cuda.current_stream(value.device).cuda_stream

    def put(self, tensors, tensor=None, *, block_bytes=0, to=None):
        """Copies a tensor in, `put("name", tensor)`, or several, `put({"name": tensor, …})`.

        Torch tensors on a CPU or a GPU, or NumPy arrays, contiguous. A tensor that is there already takes the new
        values, where shape and type are the same. `block_bytes`: of what rows() reads at a time, a row's size for a
        table of which single rows are read; 0 is 64 KiB. `to`: "hbm" or "host"; None: tensors on the store's GPU go to
        HBM, as far as it has room, others to host memory. Raises does_not_fit where a budget is full."""
        _tier(to or "host")
        named = tensors if tensor is None else {tensors: tensor}
        if to == "hbm" and self.device is None:
            raise Error("unsupported", "tensor store: has no HBM; give hbm_bytes when it is opened")
        kept, items, block_bytes = [], (ToPut * len(named))(), _size("block_bytes", block_bytes)
        for item, (name, value) in zip(items, named.items()):
            memory.check(name, value)
            if memory.is_torch(value):
                value = value.detach()
                value = value if to != "host" and self.tier_of(value.device) == "hbm" else value.cpu()
            dims = (ctypes.c_uint64 * len(value.shape))(*memory.shape_of(value))
            kept += [value, dims]
            item.name, item.type = _name(name), memory.type_of(value).encode()
            item.dims, item.dim_count = dims, len(value.shape)
            item.data, item.bytes, item.block_bytes = memory.address_of(value), memory.bytes_of(value), block_bytes
            item.on_device, item.stream = self._place(value)
            if to == "hbm" and self.device == "host":
                item.on_device = 1
        self._library.tensor_store_put(self._handle, items, len(items))
        if to == "hbm":
            self.prefetch([name for item, name in zip(items, named) if not item.on_device], to="hbm")

    def get(self, names, out=None, *, device=None):
        """Copies a tensor out, `get("name")`, or several, `get(["one", "other"])`, as a list.

        `out`: a tensor or array, or as many of them, that has shape and type; also on a GPU. Those that come from NVMe
        come at the same time, and stay in host memory where that has room, or in HBM where they go to the store's GPU.
        `device`: where new tensors are. Raises not_found, and corrupt where the drive gave back other bytes than were
        put."""
        if isinstance(names, str):
            return self._get([names], None if out is None else [out], device)[0]
        return self._get(list(names), out, device)

    def _get(self, names, outs, device):
        infos = [self.info(name) for name in names]
        if device is not None and (outs is not None or self._into != "torch"):
            raise Error("invalid_argument", f"device: {device}; leave it out with `out` and with into=\"numpy\"")
        if outs is None:
            outs = [memory.new_tensor(self._into, info.dtype, info.shape, device) for info in infos]
        elif len(outs) != len(names):
            raise Error("invalid_argument", f"out: {len(outs)} tensors for {len(names)} names; give one for each")
        items, arrived = (ToGet * len(names))(), []
        for item, info, out in zip(items, infos, outs):
            memory.check_out(info.name, out)
            if (memory.type_of(out), memory.shape_of(out)) != (info.dtype, info.shape):
                raise Error("invalid_argument",
                            f"{info.name}: is {info.dtype} {list(info.shape)}, and `out` is {memory.type_of(out)} "
                            f"{list(memory.shape_of(out))}; give one like it")
            arrived.append(self._beside(out))
            item.name, item.out, item.bytes = info.name.encode(), memory.address_of(arrived[-1]), info.nbytes
            item.on_device, item.stream = self._place(arrived[-1])
        self._library.tensor_store_get(self._handle, items, len(items))
        self._bring(arrived, outs)
        return outs

    def _beside(self, out, rows=False):
        """Memory for what is read into `out`: itself, where the library can write there."""
        if not memory.is_torch(out) or out.device.type == "cpu":
            return out
        return out if self.tier_of(out.device) == "hbm" and not rows else out.new_empty(out.shape, device="cpu")

    @staticmethod
    def _bring(arrived, outs):
        for came, out in zip(arrived, outs):
            if came is not out:
                out.detach().copy_(came)

    def rows(self, name, rows, out=None):
        """Rows `rows[i]` along the first dimension, as a tensor of len(rows) of them.

        Reads those blocks alone (see `block_bytes` of put()), many at a time, and keeps nothing in host memory. `rows`:
        a tensor, an array or a list of whole numbers, negative ones from the end."""
        info = self.info(name)
        if not info.shape:
            raise Error("invalid_argument", f"{name}: is a single number, without rows; call get()")
        wanted = [_row(name, row) for row in (rows.tolist() if hasattr(rows, "tolist") else rows)]
        for row in wanted:
            if not -info.shape[0] <= row < info.shape[0]:
                raise Error("invalid_argument", f"{name}: has {info.shape[0]} rows, and no row {row}; count from 0")
        shape = (len(wanted), *info.shape[1:])
        if out is None:
            out = memory.new_tensor(self._into, info.dtype, shape)
        memory.check_out(name, out)
        if (memory.type_of(out), memory.shape_of(out)) != (info.dtype, shape):
            raise Error("invalid_argument", f"{name}: these rows are {info.dtype} {list(shape)}, and `out` is "
                                            f"{memory.type_of(out)} {list(memory.shape_of(out))}; give one like it")
        if memory.bytes_of(out) == 0:
            return out
        numbers = (ctypes.c_uint64 * len(wanted))(*(row % info.shape[0] for row in wanted))
        arrived = self._beside(out, rows=True)
        self._library.tensor_store_read_rows(self._handle, info.name.encode(), info.nbytes // info.shape[0], numbers,
                                             len(wanted), memory.address_of(arrived))
        self._bring([arrived], [out])
        return out

    def prefetch(self, names, to="host"):
        """Begins to bring tensors into host memory or HBM (`to`), in this order, and returns how many are there or on
        their way.

        One for which nothing may leave now is left where it is: what was fetched ahead and not used yet stays."""
        there = ctypes.c_size_t()
        self._library.tensor_store_prefetch(self._handle, *_names(names), _tier(to), ctypes.byref(there))
        return there.value

    def pin(self, name, to="host"):
        """Brings it into host memory or HBM (`to`) and keeps it there, until unpin() was called as often."""
        self._library.tensor_store_pin(self._handle, _name(name), _tier(to), None)

    def unpin(self, name, to="host"):
        """It may leave again, once that was called as often as pin()."""
        self._library.tensor_store_unpin(self._handle, _name(name), _tier(to))

    @contextlib.contextmanager
    def pinned(self, name):
        """`with store.pinned(name) as tensor`: the tensor where it is pinned in HBM, without a copy.

        Inside, work of the current stream may read it. Nothing may write to it, put() and delete() refuse it, and
        close() raises busy. With device="host" it is a tensor on the CPU, or an array."""
        if self._gpu is not None and self._into == "numpy":
            raise Error("unsupported", f"{name}: is on a GPU, where NumPy has no arrays; open with into=\"torch\"")
        address = ctypes.c_void_p()
        with self._lock:
            if self._closed:
                raise Error("invalid_argument", "tensor store: it is closed; open it again")
            self._views += 1
        try:
            self._library.tensor_store_pin(self._handle, _name(name), TIERS["hbm"], ctypes.byref(address))
            try:
                info = self.info(name)  # of what is pinned: nobody can replace that
                like = memory.new_tensor(self._into, info.dtype, info.shape, "meta")
                try:
                    yield memory.view_of(address.value, info.nbytes, like, self._gpu)
                finally:
                    if self._gpu is not None:
                        sys.modules["torch"].cuda.current_stream(self._gpu).synchronize()
            finally:
                self.unpin(name, to="hbm")
        finally:
            with self._lock:
                self._views -= 1

    def set_next_use(self, name, when):
        """Of two that may leave a tier, the one with the larger number leaves first; those without one before
        both, the least recently used first. A whole number from 0 to 2**64 - 2; None: unknown, as after every get()."""
        if when is not None and not 0 <= operator.index(when) < NO_NEXT_USE:
            raise Error("invalid_argument", f"{name}: {when} is no next use; give a number from 0 to 2**64 - 2, or "
                                            "None")
        self._library.tensor_store_set_next_use(self._handle, _name(name),
                                                NO_NEXT_USE if when is None else operator.index(when))

    def delete(self, names):
        """One, or several: none of them where one is not there (not_found)."""
        self._library.tensor_store_remove(self._handle, *_names([names] if isinstance(names, str) else list(names)))

    def commit(self):
        """Makes everything that is in the store now durable, together, and returns how many commits there were.

        A store that is opened after a crash has what the last commit() that returned had, or the next."""
        commits = ctypes.c_uint64()
        self._library.tensor_store_commit(self._handle, ctypes.byref(commits))
        return commits.value

    def _infos(self, name):
        found = []

        def each(_, info):
            about = info.contents
            found.append(TensorInfo(about.name.decode(), about.type.decode(), tuple(about.dims[:about.dim_count]),
                                    about.bytes, *map(bool, (about.in_host, about.on_nvme, about.committed,
                                                             about.pinned, about.in_hbm, about.pinned_in_hbm))))

        self._library.tensor_store_describe(self._handle, name, EachInfo(each), None)
        return found

    def info(self, name):
        """TensorInfo of one. Raises not_found."""
        return self._infos(_name(name))[0]

    def list(self):
        """TensorInfo of all, by name."""
        return self._infos(None)

    def __contains__(self, name):
        try:
            return bool(self._infos(_name(name)))
        except Error as error:
            if error.code != "not_found":
                raise
            return False

    def __len__(self):
        return len(self.list())

    def stats(self):
        """TensorStoreStats."""
        stats = Stats()
        self._library.tensor_store_stats_now(self._handle, ctypes.byref(stats))
        return TensorStoreStats(*(getattr(stats, name) for name in TensorStoreStats._fields))

    def close(self):
        """Waits for what is under way; any number of times. Raises busy inside of pinned()."""
        with self._lock:
            if self._views > 0:
                raise Error("busy", f"tensor store: {self._views} of its tensors are in use; leave `with "
                                    "store.pinned()`")
            self._closed = True
        self._end()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
