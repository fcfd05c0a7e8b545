"""Several micro-batches through block after block: Engine.train_batch(), and Together, which stands between a block's
forward and its visit.

Each micro-batch runs the model in a thread of its own, of which one runs at a time. Where it comes to a block, it waits
until all have come to it; then the block is visited once, by whoever called train_batch(), and each goes on with its
result. So any model and any loss is computed as it is written, and weights cross each link once per pass.

    micro-batch 1  ids ─ ask ┄┄┄┄┄┄┄┄┄┄ go on ─ ask ┄┄┄┄
    micro-batch 2          ids ─ ask ┄┄┄┄┄┄ go on ─ ask
    the caller                     visit(1, 2)          visit(1, 2)
"""
import contextlib
import contextvars
import logging
import threading
import weakref

import torch

from .. import log
from ..library import Error
from .away import Lent
from .kept_inputs import kept_inputs
from .runs import as_autocast, autocast_of, switches
from .slice_axes import AxesOf
from .slices import visit_in_parts
from .uses import open_again, say_plan
from .visits import _Mark

_here = threading.local()  # .micro_batch: whose thread this is


class _End(BaseException):
    """Of a micro-batch, when another has failed."""


class _MicroBatch:
    def __init__(self, compute, batch, device):
        self._compute, self._batch, self._device = compute, batch, device
        self._turn, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self.asks = self.loss = self.error = self._answer = None
        self._thread = threading.Thread(target=contextvars.copy_context().run, args=(self._run,), daemon=True)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._thread.start()

    def go_on(self, answer=None):
        """Until it comes to a block, or to its end."""
        self._answer, self.asks = answer, None
        self._turn.release()
        self._waits.acquire()
        if self.error is not None:
            raise self.error

    def end(self):
        self._answer = _End
        self._turn.release()
        self._thread.join()
        self._batch = self.asks = self._answer = self.loss = None

    def ask(self, *asks):
        """(index, block, autocast, switches, flat arguments, spec)."""
        self.asks = asks
        self._waits.release()
        self._turn.acquire()
        answer, self._answer = self._answer, None
        if answer is _End:
            raise _End
        return answer

    def _run(self):
        self._turn.acquire()
        _here.micro_batch = self
        try:
            if self._answer is not _End:
                with torch.enable_grad(), torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
                    self.loss = self._compute(self._batch)
        except _End:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._waits.release()


class Together:
    """An engine's."""

    def __init__(self, engine):
        self._engine = weakref.ref(engine)
        self._axes = AxesOf(engine.settings.get("spillway.block_slices", 1))
        self.kept = kept_inputs(engine)  # None: they stay where they are

    def takes(self):
        """Whether a visit is this one's matter."""
        return self._axes.slices > 1 or self.waits()

    @staticmethod
    def waits():
        """Whether a visit lets other micro-batches go on, and comes back when they have."""
        return getattr(_here, "micro_batch", None) is not None

    def visit(self, block, index, flat, spec):
        asking = getattr(_here, "micro_batch", None)
        if asking is not None:  # what is its thread's alone does not come along, and what all share may change
            return asking.ask(index, block, autocast_of(self._engine()), switches(block), flat, spec)
        return self._visit(index, block, [(flat, spec)])[0]

    def _visit(self, index, block, calls):
        engine = self._engine()
        mark = _Mark()
        engine.uses.visited(index, mark)

        def plan(call, flat):
            return block.axes(flat) if block.axes else self._axes.find(engine, block, flat, call.spec)

        with self.hooks([value for flat, _ in calls for value in flat]):
            return visit_in_parts(weakref.proxy(engine), block, calls, plan, mark)

    def measure(self):
        """Before a backward pass: what block inputs take, for the plan."""
        if self.kept is not None:
            self.kept.measure(self._engine())

    def plan(self):
        """After measure(), unless the plan was made once more for another reason."""
        if self.kept is not None:
            self.kept.plan(self._engine())

    def hooks(self, flat):
        """For what autograd keeps of a visit's arguments."""
        others = [self.kept] if self.kept is not None else []
        if others or any(isinstance(value, Lent) for value in flat):
            return self._engine().lender.hooks(*others)
        return contextlib.nullcontext()

    def losses(self, compute, batches):
        engine = self._engine()
        running = [_MicroBatch(compute, batch, engine.device) for batch in batches]
        try:
            for micro_batch in running:
                micro_batch.go_on()
            while any(micro_batch.asks for micro_batch in running):
                # Some may come to a block that others leave out: the first in the model's order waits least.
                index, block, autocast, *_ = min((m.asks for m in running if m.asks), key=lambda asks: asks[0])
                asking = [m for m in running if m.asks and m.asks[1] is block and m.asks[2] == autocast]
                now = switches(block)
                if any(m.asks[3] != now for m in asking):
                    raise Error("unsupported", f"{block.name}: something of it, an adapter or train() say, is switched "
                                               "in a forward pass, while others of the step are inside as well; call "
                                               "backward() for each micro-batch, which spillway.micro_batches_together "
                                               "does not")
                with as_autocast(engine, autocast):
                    answers = self._visit(index, block, [m.asks[4:] for m in asking])
                for micro_batch in asking:
                    micro_batch.go_on(answers.pop(0))
            return [micro_batch.loss for micro_batch in running]
        finally:
            for micro_batch in running:
                micro_batch.end()


class TrainsBatches:
    """What an engine does with the micro-batches of a step at once."""

    @property
    def together(self):
        made = self.__dict__.get("_together")
        if made is None:
            made = self._together = Together(self)
        return made

    def train_batch(self, batches, compute_loss=None, blob=b""):
        """A step of several micro-batches, which go through block after block together: weights come in twice, however
        many they are, and what is in memory inside a block is one's. Returns the mean of their losses; `report` is
        then the step's StepReport. Each micro-batch is computed as if alone, random numbers aside, which all draw in
        turns.

        `batches`: a list of micro-batches, or an iterator, of which gradient_accumulation_steps are taken.
        `compute_loss`: from a micro-batch to its loss, a function that runs the model or this engine; the default runs
        the model on a dict's or a tuple's members, or on the micro-batch itself, and takes the result's `.loss`, its
        ["loss"], or itself if it is a tensor. It is called in threads, one at a time."""
        if self._micro_batches:
            raise Error("invalid_argument", f"train_batch: the step has had {self._micro_batches} micro-batches by "
                                            "backward() before; call step(early=True) or discard_step() first")
        taken = [batch for _, batch in zip(range(self._accumulation), batches)] if hasattr(batches, "__next__") else \
            list(batches)
        if self.settings["spillway.sum_groups"] > 1:
            raise Error("unsupported", "train_batch: adds a step's micro-batches up as one, and spillway.sum_groups "
                                       "has each added by itself; call backward() and step() for each, or leave it out")
        if not taken:
            raise Error("invalid_argument", "train_batch: is given no micro-batch; give at least one")
        self._plan_for_one()
        losses = self.together.losses(compute_loss or self._loss_of, taken)
        try:
            mean = sum(losses[1:], losses[0]) / len(losses)
            self.backward(mean, scale_wrt_gas=False)
        finally:
            losses = None
        self.report = self.step(blob, early=True)
        return mean.detach()

    def _loss_of(self, batch):
        if hasattr(batch, "keys"):
            result = self(**batch)
        else:
            result = self(*batch) if isinstance(batch, (tuple, list)) else self(batch)
        if torch.is_tensor(result):
            return result
        loss = result.get("loss") if isinstance(result, dict) else getattr(result, "loss", None)
        if loss is None:
            raise Error("invalid_argument", f"train_batch: the model returns a {type(result).__name__} without a loss; "
                                            "give compute_loss=, from a micro-batch to its loss")
        return loss

    def _plan_for_one(self):
        """That each weight gets one gradient in a step, and no sum of several is kept."""
        layout = self._layout
        if layout.accumulation == 1:
            return
        layout.accumulate(1)
        open_again(self)
        log.say(logging.INFO, f"train_batch: a step's {self._accumulation} micro-batches go through the blocks "
                              "together; the plan was made once more, for one gradient of each weight in a step")
        say_plan(self)
