"""Weights and gradients that lie on a GPU, or not row by row: what copies them piece by piece for the library.

On a GPU pieces come down in one stream and go up in another, so that both run while the library updates, and their
place in host memory is pinned. Elsewhere the same code copies at once.
"""
import collections
import contextlib
import ctypes
import signal
import threading

import torch

from ..library import ELSEWHERE, Carrier, CarryPiece, LeafSums, WaitSlot
from ..memory import tensor_at

CPU = torch.device("cpu")
LEAF, ACCUMULATORS = 1024, 16
NORM_PIECE = 4096 * LEAF  # elements: what a norm takes of a GPU's memory is eight bytes for each


def in_place(tensor):
    """Whether the library reads it where it is."""
    return tensor.device == CPU and tensor.is_contiguous()


def rows(tensor, first, count):
    """Parts of the tensor that together have its elements [first, first + count), row-major; none is a copy."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:first + count]
        return
    row = tensor[0].numel()
    while count:
        index, within = divmod(first, row)
        if within or count < row:
            taken = min(row - within, count)
            yield from rows(tensor[index], within, taken)
        else:
            taken = count // row * row
            yield tensor[index:index + count // row]
        first, count = first + taken, count - taken


def leaf_sums(gradient, sums):
    """Sums of squares of 1,024 elements each, in the order and so with the bits of the library's (kernels/norm.h).

    `sums`: fp64, on the CPU. The square of an fp32 number is exact in fp64, so that how PyTorch adds two numbers
    matters and nothing else.
    """
    elements, found = gradient.numel(), []
    for first in range(0, elements, NORM_PIECE):
        count = min(NORM_PIECE, elements - first)
        squares = torch.zeros(-(-count // LEAF) * LEAF, dtype=torch.float64, device=gradient.device)
        at = 0
        for part in rows(gradient, first, count):
            squares[at:at + part.numel()].view(part.shape).copy_(part)
            at += part.numel()
        squares = squares.square_().view(-1, LEAF // ACCUMULATORS, ACCUMULATORS)
        folded = squares[:, 0].clone()
        for i in range(1, squares.shape[1]):
            folded += squares[:, i]
        while folded.shape[1] > 1:
            half = folded.shape[1] // 2
            folded = folded[:, :half] + folded[:, half:]
        found.append(folded.view(-1))
    sums.copy_(torch.cat(found))


def _largest(gradient):
    """Of its magnitudes; NaN where one is."""
    gradient = gradient.float() if gradient.device == CPU else gradient  # where PyTorch has no norm of every type
    return torch.linalg.vector_norm(gradient, float("inf")).float()


@contextlib.contextmanager
def interrupts_afterwards():
    """Ctrl-C is heard when the call is over: in the middle of a piece it would end a step that is half made."""
    heard, before = [], {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(signal.getsignal(number)):
                before[number] = signal.signal(number, lambda *arguments: heard.append(arguments))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in heard:
            before[number](number, frame)


class TensorCarrier:
    """For tensors of a layout. It belongs to one optimizer of the library, and is called by it alone."""

    def __init__(self, layout):
        self._layout, self._parameters, self._gradients, self._raised = layout, layout.parameters, {}, []
        self._streams, self._events = {}, collections.defaultdict(dict)  # by device and direction; by slot and those
        self._pinned = None
        self.functions = Carrier(None, CarryPiece(self._guarded(self._bring)), CarryPiece(self._guarded(self._give)),
                                 WaitSlot(self._guarded(self._wait)), LeafSums(self._guarded(self._leaf_sums)))

    def _guarded(self, function):
        def called(_, *arguments):
            try:
                function(*arguments)
                return 0
            except BaseException as error:  # nothing may pass through C
                self._raised.append(error)
                return 1
        return called

    def mostly_elsewhere(self):
        """As far as is known before the first step: a model may go to the GPU after its optimizer was made."""
        return torch.cuda.is_available() or self._carries()

    def weights(self):
        """By tensor: its address."""
        found = map(self._weight, range(len(self._parameters)))
        return [weight.data_ptr() if in_place(weight) else ELSEWHERE for weight in found]

    def _weight(self, tensor):
        return self._layout.part(tensor, self._parameters[tensor].detach())

    def gradient(self, tensor, gradient):
        """Its address. A tensor that is elsewhere is held until release()."""
        gradient = gradient.detach()
        if in_place(gradient) and gradient.dtype == self._parameters[tensor].dtype:
            return gradient.data_ptr()
        self._gradients[tensor] = gradient
        return ELSEWHERE

    def release(self):
        self._gradients.clear()

    def _carries(self):
        return bool(self._gradients) or not all(in_place(parameter) for parameter in self._parameters)

    def first_nonfinite(self):
        """Of the gradients that are elsewhere, looked at where they are: a tensor, or None."""
        tensors = sorted(self._gradients)
        largest = [_largest(self._gradients[tensor]) for tensor in tensors]
        by_device = collections.defaultdict(list)
        for tensor, value in zip(tensors, largest):
            by_device[value.device].append((tensor, value))
        wrong = [tensor for found in by_device.values() for (tensor, _), finite in
                 zip(found, torch.isfinite(torch.stack([value for _, value in found])).tolist()) if not finite]
        return min(wrong, default=None)

    @contextlib.contextmanager
    def calls(self, address, size, writes):
        """Around a call of the library that may carry. `address`, `size`: of its staging memory. `writes`: it changes
        weights, as is asked after it; PyTorch is told of those in place, too."""
        devices = {tensor.device for tensor in (*self._parameters, *self._gradients.values()) if tensor.is_cuda}
        for device in devices:
            self._pin(address, size)
            for direction in ("down", "up"):
                if (device, direction) not in self._streams:
                    self._streams[device, direction] = torch.cuda.Stream(device)
                self._streams[device, direction].wait_stream(torch.cuda.current_stream(device))
        self._raised.clear()
        try:
            with interrupts_afterwards() if self._carries() else contextlib.nullcontext():
                yield
        except Exception:
            if self._raised:
                raise self._raised[0] from None
            raise
        finally:
            if writes():
                for parameter in self._parameters:
                    weight = parameter.detach()  # which has its counter of versions
                    if in_place(weight):
                        weight.view(-1)[:0].zero_()

    # -- what the library calls -----------------------------------------------------------------------------------

    def _bring(self, piece):
        piece = piece.contents
        if piece.weight:
            self._copy(piece, piece.weight, self._weight(piece.tensor), "down")
        if piece.gradient:
            self._copy(piece, piece.gradient, self._gradients[piece.tensor], "down")

    def _give(self, piece):
        piece = piece.contents
        self._copy(piece, piece.weight, self._weight(piece.tensor), "up")

    def _copy(self, piece, address, tensor, direction):
        dtype = self._parameters[piece.tensor].dtype
        host = tensor_at(CPU, address, piece.count * self._parameters[piece.tensor].element_size(), dtype)
        stream = self._streams[tensor.device, direction] if tensor.is_cuda else None
        with torch.no_grad(), contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
            at = 0
            for part in rows(tensor, piece.first, piece.count):
                staged = host[at:at + part.numel()].view(part.shape)
                to, source = (staged, part) if direction == "down" else (part, staged)
                to.copy_(source, non_blocking=stream is not None)
                at += part.numel()
        if stream is not None:
            events = self._events[piece.slot]
            if (tensor.device, direction) not in events:
                events[tensor.device, direction] = torch.cuda.Event()
            events[tensor.device, direction].record(stream)

    def _wait(self, slot):
        for event in self._events[slot].values():
            event.synchronize()

    def _leaf_sums(self, tensor, sums, count):
        with torch.no_grad():
            leaf_sums(self._gradients[tensor], tensor_at(CPU, ctypes.addressof(sums.contents), count * 8,
                                                         torch.float64))

    # -- pinned memory --------------------------------------------------------------------------------------------

    def _pin(self, address, size):
        if self._pinned is None:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, size, 1))  # for all GPUs
            self._pinned = address

    def close(self):
        """Before the library gives the memory back."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(pinned)
