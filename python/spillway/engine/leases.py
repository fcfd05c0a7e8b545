"""A block's weights in its parameters, for as long as a `with` lasts: Leases."""
import os
import threading
from ctypes import byref, c_void_p
from itertools import repeat

import torch

from .. import log
from ..memory import return_freed, tensor_at
from .away import come_back, go_away, written_outside


class Leases:
    """What Engine.weights_of() gives.

    Ctrl-C raises KeyboardInterrupt after any call, so also where the library has just made a lease or ended one: its
    place is there before it is made, and it leaves that as it is ended. Before the first line of __exit__ nothing can
    catch it. Then the weights are given back with the last reference to this, or by Engine.backward().
    """

    _leases = _lent = ()  # the latter: (parameter, what .grad showed)

    def __init__(self, engine, block, direction):
        self._engine, self._block, self._direction = engine, block, direction

    def __enter__(self):
        try:
            self._take()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_):
        self.end()

    def __del__(self):
        if not (self._leases or self._lent):
            return
        if log.saying():  # the garbage collector came by in a message, inside of a call that giving back waits for
            threading.Thread(target=self.end).start()
        else:
            self.end()

    def _take(self):
        engine, library = self._engine, self._engine._library
        handle, stream, block = engine._open(), engine._stream(), engine._block(self._block)
        # What the block before has unpacked of its quantized weights is as large as they would be without.
        if not engine.on_cuda and any(place[1:] in engine._layout.packed for place in block.parameters):
            return_freed()
        self._leases, self._lent = [c_void_p() for _ in block.engine_blocks], []
        engine._held.add(self)
        for owner, lease in zip(block.engine_blocks, self._leases):
            library.engine_acquire(handle, owner, self._direction, stream, byref(lease))
        if not engine.on_cuda:
            library.stream_synchronize(handle, stream)
        for parameter, owner, index in block.parameters:
            self._lent.append((parameter, parameter.grad))
            come_back(parameter)
            packed = engine._layout.packed.get((owner, index))
            if packed is not None:
                packed.fill(engine._element_bytes, self._address(block, owner, index))
                continue
            parameter.grad = None  # what compiles the block looks at all that the parameter has
            if parameter._version != engine._versions[id(parameter)]:
                engine._versions[id(parameter)] = parameter._version
                raise written_outside(engine._layout.names[owner][index])
            parameter.data = self._view(parameter, owner, index, self._address(block, owner, index))

    def of_block(self, block):
        """Nothing joined the block since they were taken."""
        return len(self._leases) == len(block.engine_blocks)

    def hand_over(self):
        """The leases alone, which are another's to end from here on."""
        handles, self._leases = self._leases, []
        return handles

    def _address(self, block, owner, index):
        address = self._engine._library.lease_weight(self._leases[block.engine_blocks.index(owner)], index)
        self._engine._addresses.add(address)
        return address

    def _view(self, parameter, owner, index, address):
        engine, key = self._engine, (owner, index, address)
        if key not in engine._views:
            with torch.inference_mode(False):
                memory = tensor_at(engine.device, address, parameter.numel() * engine._element_bytes, engine.dtype)
                engine._views[key] = memory.view(parameter.shape)
        return engine._views[key]

    def end(self):
        try:
            self._give_back()
        finally:
            self._give_back()  # what Ctrl-C in the first has left

    def _give_back(self):
        engine = self._engine
        others = {id(parameter) for leases in engine._held if leases is not self for parameter, _ in leases._lent}
        for parameter, gradient in self._lent:
            if id(parameter) in others:  # whoever ends last
                continue
            go_away(parameter)
            if gradient is not None:
                parameter.grad = gradient
        self._lent = ()
        if engine._finalizer.alive and engine._process == os.getpid():  # else they have ended with it, or are another's
            # The iterators take a lease out and end it without a line of Python in between. One that never was is null.
            for _ in map(self._engine._library.lease_release, map(list.pop, repeat(self._leases, len(self._leases)))):
                pass
        self._engine._held.discard(self)
