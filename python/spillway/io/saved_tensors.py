"""Activations of a plain PyTorch model in a store, between forward and backward."""
import contextlib
import itertools
import threading
import weakref

from .. import log
from ..library import Error, end_later
from . import memory


class _Saved:
    """One tensor that autograd saved; it leaves the store with the graph that holds it."""

    def __init__(self, store, name, device):
        self.name, self.device = name, device
        weakref.finalize(self, _forget, store, name)


def _forget(store, name):
    if log.saying():  # the garbage collector came by in a message, perhaps of a call that has the store for itself
        end_later(_forget, store, name)
        return
    with contextlib.suppress(Error):  # the store was closed first
        store.delete(name)


@contextlib.contextmanager
def spilled_activations(store, *, least_bytes=1 << 20, prefix="activation"):
    """What autograd saves inside for backward goes to `store` (a TensorStore), and comes back when backward asks.

        with spillway.io.spilled_activations(store):
            loss = model(batch)
        loss.backward()

    Tensors of `least_bytes` or more that put() takes are moved. Parameters stay where they are, frozen ones as well,
    and so do tensors that are smaller, or whose memory is not contiguous and plain. Backward reads in the opposite
    order: what is saved first is used last, and the store fetches ahead. Names begin with `prefix`. Raises
    invalid_argument for a store whose get() makes arrays."""
    from torch import nn
    from torch.autograd import graph
    if store._into != "torch":
        raise Error("invalid_argument", f"spilled_activations: its store makes arrays (into=\"{store._into}\"), and "
                                        "backward needs tensors; open one with into=\"torch\"")
    numbers, kept, lock = itertools.count(), [], threading.Lock()
    run = next(_runs)

    def moves(tensor):
        # A parameter, a view of one, or what else the caller takes gradients of: it is there anyhow.
        stays = any(isinstance(one, nn.Parameter) for one in (tensor, tensor._base))
        if stays or (tensor.is_leaf and tensor.requires_grad) or memory.bytes_of(tensor) < least_bytes:
            return False
        try:
            memory.check(prefix, tensor)
        except Error:
            return False
        return True

    def pack(tensor):
        if not moves(tensor):
            return tensor
        number = next(numbers)
        name = f"{prefix} {run}.{number}"
        store.put(name, tensor)
        store.set_next_use(name, 2**40 - number)
        saved = _Saved(store, name, tensor.device)
        with lock:
            kept.append(weakref.ref(saved))
        return saved

    def unpack(saved):
        if not isinstance(saved, _Saved):
            return saved
        tensor = store.get(saved.name, device=saved.device)
        with lock:
            while kept and (kept[-1]() is None or kept[-1]() is saved):
                kept.pop()
            ahead = [one.name for one in (each() for each in kept[:-5:-1]) if one is not None]
        with contextlib.suppress(Error):  # another thread's backward let one go
            store.prefetch(ahead, to=store.tier_of(saved.device))
        return tensor

    with graph.saved_tensors_hooks(pack, unpack):
        yield store


_runs = itertools.count()
