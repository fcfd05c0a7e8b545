"""A block's weights in its parameters, for as long as a `with` lasts: Leases."""
import threading
from ctypes import byref, c_void_p
from itertools import repeat

import torch

from . import log
from .away import AwayParameter, written_outside
from .library import Error
from .memory import tensor_at


class Leases:
    """What Engine.weights_of() gives.

    Ctrl-C raises KeyboardInterrupt behind any call, so also where the library has just made a lease or ended one: its
    place is there before it is made, and it leaves that as it is ended. Before the first line of __exit__ nothing can
    catch it. Then the weights are given back with the last reference to this, or by Engine.backward().
    """

    _leases = _before = ()  # (parameter, its class, its data)

    def __init__(self, engine, block, direction):
        self._engine, self._block, self._direction = engine, block, direction

    def __enter__(self):
        try:
            self._take()
        except BaseException:
            self.end()
            raise

    def __exit__(self, *_):
        self.end()

    def __del__(self):
        if not (self._leases or self._before):
            return
        if log.saying():  # the garbage collector came by in a message, inside of a call that giving back waits for
            threading.Thread(target=self.end).start()
        else:
            self.end()

    def _take(self):
        engine, library = self._engine, self._engine._library
        handle, stream, block = engine._open(), engine._stream(), engine._block(self._block)
        self._leases, self._before = [c_void_p() for _ in block.engine_blocks], []
        engine._held.add(self)
        for owner, lease in zip(block.engine_blocks, self._leases):
            library.engine_acquire(handle, owner, self._direction, stream, byref(lease))
        if not engine.on_cuda:
            library.stream_synchronize(handle, stream)
        for parameter, owner, index in block.parameters:
            kind = type(parameter)
            data = parameter._spillway_nothing if issubclass(kind, AwayParameter) else parameter.data
            self._before.append((parameter, kind, data))
            parameter.__class__ = parameter._spillway_kind
            if parameter._version != engine._versions[id(parameter)]:
                engine._versions[id(parameter)] = parameter._version
                raise written_outside(engine._layout.names[owner][index])
            address = library.lease_weight(self._leases[block.engine_blocks.index(owner)], index)
            parameter.data = self._view(parameter, owner, index, address)

    def _view(self, parameter, owner, index, address):
        engine, key = self._engine, (owner, index, address)
        if key not in engine._views:
            with torch.inference_mode(False):
                memory = tensor_at(engine.device, address, parameter.numel() * engine._element_bytes, engine.dtype)
                engine._views[key] = memory.view(parameter.shape)
            engine._addresses.add(address)
        return engine._views[key]

    def end(self):
        try:
            self._give_back()
        finally:
            self._give_back()  # what Ctrl-C in the first has left

    def _give_back(self):
        for parameter, kind, data in self._before:
            parameter.__class__ = parameter._spillway_kind
            parameter.data = data
            parameter.__class__ = kind
        self._before = ()
        if self._engine._finalizer.alive:  # else the leases have ended with it
            # The iterators take a lease out and end it without a line of Python in between. One that never was is null.
            for _ in map(self._engine._library.lease_release, map(list.pop, repeat(self._leases, len(self._leases)))):
                pass
        self._engine._held.discard(self)
