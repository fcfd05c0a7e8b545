"""Tensors and files without a model, an optimizer or a loop: docs/tensors.md, docs/io_python.md.

    store = spillway.io.TensorStore("/nvme/store", nvme_bytes=200 << 30, host_bytes=8 << 30)
    store.put("layer 0 keys", keys)
    keys = store.get("layer 0 keys")
"""
from .. import absent
from .files import File
from .places import empty
from .queues import Queue, QueueStats, Transfer
from .saved_tensors import spilled_activations
from .tensor_store import TensorInfo, TensorStore, TensorStoreStats

__all__ = ["File", "Queue", "QueueStats", "TensorInfo", "TensorStore", "TensorStoreStats", "Transfer", "empty",
           "spilled_activations"]
__getattr__ = absent.of(__name__, globals())
