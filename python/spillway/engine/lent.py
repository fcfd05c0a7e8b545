"""Weights that are read outside of their block: Lender, and Lent, what such a weight is for whoever reads it.

A parameter whose block is away (away.AwayParameter) is asked in every function that PyTorch calls from Python. One that
reads its values is given the block's weights on loan: it runs on a tensor over the engine's memory, of class Lent, and
so does what is made of that and shares its memory (weight.t(), weight[:4], weight.detach()).

    h @ weight.t()        __torch_function__ of the parameter: acquire the block, run t() on its memory
                          __torch_function__ of the view: run the product, keeping (block, index, geometry) of it
    … other blocks …      the loan has ended: nothing refers to its memory any more
    backward              what autograd kept is unpacked: acquire the block again, for as long as the node runs

A loan lasts until the next block runs, so that a loss in chunks fetches the weight once, and for as long as a tensor
shares its memory: these have one storage, whose end is the loan's. What autograd saves would be such a tensor, from
forward to backward; so a function of a weight on loan saves where it is (saved_tensors_hooks), and its backward borrows
again. A torch.autograd.Function that keeps the parameter itself reads it in backward as anybody does.

Gradients come as in PyTorch: a loan is a function of the parameter (_Loan), so that autograd adds all that a backward()
finds outside of blocks, and hands it to the parameter once all of it is there. There it goes to the engine.
"""
import gc
import os
import threading
import weakref
from ctypes import byref, c_void_p
from itertools import repeat

import torch

from .. import log
from ..library import BACKWARD, FORWARD, Error
from ..memory import address_of, tensor_at
from .away import Lent, read_outside


class _Loan(torch.autograd.Function):
    """A parameter's values, from the engine's memory."""

    @staticmethod
    def forward(ctx, parameter, memory, lender):
        ctx.lender = lender
        return memory

    @staticmethod
    def backward(ctx, gradient):
        lender = ctx.lender()
        if lender is not None:
            if torch.is_grad_enabled():
                raise Error("unsupported", "a weight on loan: create_graph=True asks for gradients of gradients, and "
                                           "those of weights have no graph; leave it out")
            lender.arrive()
        return gradient, None, None


class Held:
    """Leases of the engine's, which end with the last reference to this. `handles`: theirs."""

    def __init__(self, engine, handles):
        self._library, self._finalizer, self._process = engine._library, engine._finalizer, engine._process
        self.handles = handles  # as in Leases: Ctrl-C comes after any call

    def end(self):
        if self._finalizer.alive and self._process == os.getpid():
            for _ in map(self._library.lease_release, map(list.pop, repeat(self.handles, len(self.handles)))):
                pass

    def __del__(self):
        if not getattr(self, "handles", None) or not self._finalizer.alive:  # nor are modules, when Python ends
            return
        if log.saying():  # as of Leases
            threading.Thread(target=self.end).start()
            return
        try:
            self.end()
        finally:
            self.end()  # what Ctrl-C in the first has left


class _Lease(Held):
    """One, which ends with the last tensor over its memory."""

    def __init__(self, engine, owner, direction):
        super().__init__(engine, [c_void_p()])
        handle, stream = engine._open(), engine._stream()
        self._library.engine_acquire(handle, owner, direction, stream, byref(self.handles[0]))
        if not engine.on_cuda:
            self._library.stream_synchronize(handle, stream)


class _Copy:
    """In the place of a lease, as long as the first loss may show that the engine must be planned once more: of its
    memory nothing is left then, and what a Function has kept of a loan must be."""

    def __init__(self, memory):
        self.memory, self.handles = memory, True


class Lender:
    """An engine's: what is on loan, and to whom the gradients of it go."""

    def __init__(self, engine):
        self._engine = weakref.ref(engine)
        self._leases = weakref.WeakValueDictionary()  # by engine block
        self._current = {}                            # those of them that last until the next block runs
        self._copies = {}                             # by (engine block, index), as long
        self._places = {}                             # by address: (lease, engine block, index)
        self.visiting = None                          # the block that runs
        self._kept = lambda: None                     # kept.Kept of the block that ran last
        self._nodes = []                              # which autograd would make anew, without the hooks on them

    def watch(self, parameter, owner, index):
        """What autograd finds for the parameter outside of blocks goes to the engine."""
        with torch.enable_grad():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        lender, parameter = weakref.ref(self), weakref.ref(parameter)

        def arrived(*_):
            engine, found = lender() and lender().engine(), parameter()
            if engine is None or found is None or found.grad is None:
                return
            lender().arrive()
            if not engine.passes.takes((owner, index)):
                return  # it is refused after the pass
            gradient, found.grad = found.grad, None
            engine.push([(found, owner, index)], [gradient])

        node.register_hook(arrived)
        self._nodes.append(node)

    def engine(self):
        return self._engine()

    def arrive(self):
        """In backward, outside of blocks."""
        engine = self._engine()
        if engine is not None and engine._handle is not None and self.visiting is None:
            engine.passes.arrive()

    def lend(self, parameter):
        """A tensor with the values of a parameter that is away; None after the engine's end."""
        engine, (owner, index) = self._engine(), parameter._spillway_place
        if engine is None or engine._handle is None:
            return None
        if parameter._spillway_packed:
            raise Error("unsupported", read_outside(*parameter._spillway_names))
        wants = torch.is_grad_enabled() and parameter.requires_grad
        if self.visiting is not None:
            self._join(engine, self.visiting, parameter)
        else:
            self.arrive()  # of a Function that has kept the parameter
            engine.uses.lent(owner, index, wants)
        memory = self._memory(engine, owner, index)
        memory = _Loan.apply(parameter, memory, weakref.ref(self)) if wants else memory
        return self._marked(memory, owner, index)

    @staticmethod
    def _join(engine, block, parameter):
        """The block that runs now has it from here on as if it were its own, as it has those that it shares."""
        if any(other is parameter for other, _, _ in block.parameters):
            return
        entry = (parameter, *parameter._spillway_place)
        block.parameters.append(entry)
        if entry[1] not in block.engine_blocks:
            block.engine_blocks.append(entry[1])
        if entry[1:] in engine._layout.pushes:
            block.trainable.append(entry)

    def _memory(self, engine, owner, index):
        lease = self._leases.get(owner)
        if lease is None or not lease.handles:
            lease = self._acquire(engine, owner)
        self._current[owner] = lease
        parameter = engine._layout.members[owner][index]
        address, size = engine._library.lease_weight(lease.handles[0], index), parameter.numel() * engine._element_bytes
        with torch.inference_mode(False):
            if not engine.uses.settled and engine._layout.pushes and not engine.passes.running:
                if (owner, index) not in self._copies:
                    self._copies[owner, index] = _Copy(tensor_at(engine.device, address, size).clone())
                lease = self._copies[owner, index]
                address = lease.memory.data_ptr()
            self._places[address] = (weakref.ref(lease), owner, index)
            engine._addresses.add(address)
            return tensor_at(engine.device, address, size, engine.dtype, lease).view(parameter.shape)

    def _acquire(self, engine, owner):
        direction = BACKWARD if engine.passes.running else FORWARD
        try:
            made = _Lease(engine, owner, direction)
        except Error:
            if not self._current:
                raise
            self.return_all()  # for want of a place
            made = _Lease(engine, owner, direction)
        self._leases[owner] = made
        return made

    def keep(self, kept):
        """What the visit's backward goes on from, which comes next; the visit has the only reference to it."""
        self._kept = weakref.ref(kept)

    def return_loans(self):
        """Those end that no tensor looks at."""
        self._current.clear()
        self._copies.clear()

    def return_all(self):
        """And what the last block's run has kept: its backward runs it once more."""
        self.return_loans()
        kept, self._kept = self._kept(), lambda: None
        if kept is not None:
            kept.drop()

    def lends(self):
        return bool(self._current)

    def refuse_held(self, call):
        self.return_all()
        if self._leases:
            gc.collect()
        for owner in list(self._leases):
            raise Error("invalid_argument", f"{self._engine()._layout.names[owner][0]}: a tensor over its memory, or "
                                            f"over that of another weight of its block, is still there at {call}(); "
                                            "let go of it before, or keep a clone()")

    def end_all(self):
        """Whatever looks at them."""
        self.return_all()
        for lease in list(self._leases.values()):
            lease.end()
        self._leases.clear()

    # -- functions of what is on loan -----------------------------------------------------------------------------

    def _place(self, tensor):
        """Of the weight on loan whose memory it shares. A loan that has ended says nothing: its memory is another's."""
        if tensor.layout != torch.strided or tensor.is_meta:
            return None
        lease, *place = self._places.get(_storage(tensor), (None,))
        return place if lease is not None and lease() is not None and lease().handles else None

    def pack(self, tensor):
        place, engine = self._place(tensor), self._engine()
        if place is None or engine is None or tensor.dtype != engine.dtype:
            return None
        return self, place, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, place, size, stride, offset):
        self.arrive()
        return self._memory(self._engine(), *place).as_strided(size, stride, offset)

    def hooks(self, *others):
        """For what is on loan from this and other lenders."""
        def pack(tensor):
            return next((kept for kept in (each.pack(tensor) for each in (self, *others)) if kept), tensor)

        def unpack(kept):
            return kept if torch.is_tensor(kept) else kept[0].unpack(*kept[1:])

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _marked(self, tensor, owner, index):
        made = tensor.as_subclass(Lent)
        made._spillway_lender = weakref.ref(self)
        made._spillway_names = self._engine()._layout.members[owner][index]._spillway_names
        return made

    def marked(self, result):
        """A function's result, in which what shares a weight's memory is Lent."""
        if type(result) in (tuple, list):
            return type(result)(map(self.marked, result))
        if isinstance(result, torch.Tensor) and not isinstance(result, Lent):
            place = self._place(result)
            return result if place is None else self._marked(result, *place)
        return result


def _storage(tensor):
    try:
        return address_of(tensor)
    except (RuntimeError, NotImplementedError):  # a tensor of a class that has none
        return None
