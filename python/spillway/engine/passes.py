"""Backward passes, whoever begins them: Passes, an engine's; and what they mean for a step.

    engine.backward(loss)    begins a pass of every engine that the loss goes through, and ends it
    loss.backward()          begins one with the first node of the engine's, a block's visit or a loan (arrive()), and
                             autograd calls back when the last node has run

Which gradient of a step is the last of its parameter? With it the sum is rounded, and an update may begin. As long as
engine.backward() alone is called, `gradient_accumulation_steps` says so. A pass that others may follow
(loss.backward(), retain_graph=True, another forward's graph that is still there) makes the engine take any number: it
is planned once more, with a sum in fp32 of every block's gradients, and step() says that no more come.
"""
import logging
import weakref

import torch

from .. import log
from ..library import Error
from .uses import engines_of, open_up, plan_for

_execution = torch.autograd.Variable._execution_engine


class _Scaled(torch.autograd.Function):
    """A loss times the loss scale, of which the engines behind it learn in backward."""

    @staticmethod
    def forward(ctx, loss, factor, engines):
        ctx.factor, ctx.engines = factor, [weakref.ref(engine) for engine in engines]
        return loss * factor

    @staticmethod
    def backward(ctx, gradient):
        for engine in filter(None, (reference() for reference in ctx.engines)):
            engine.passes.arrive(ctx.factor)
        return gradient * ctx.factor, None, None


def _call_back(function):
    """At the end of the backward pass that runs in this thread; False where none does."""
    try:
        _execution.queue_callback(function)
        return True
    except RuntimeError:  # "can only be installed during backward pass"
        return False


class Passes:
    def __init__(self, engine):
        self._engine = weakref.proxy(engine)
        self.running = False
        self.micro_batch = 0   # that this pass is of, of this rank's in the step
        self.factor = 1        # of gradients, in this pass
        self.decides = False   # the step has had a plain loss.backward(), and so step() makes it
        self._plain = False    # nobody but autograd says when it ends
        self._scale = 1        # what the loss has been multiplied with
        self._brought = False  # gradients of the engine's, in this pass
        self._held = set()     # Leases from before

    # -- engine.backward(loss) ------------------------------------------------------------------------------------

    def backward(self, loss, scale_wrt_gas, retain_graph):
        engine = self._engine
        self.refresh()
        scale = engine.current_loss_scale
        passes = [each.passes for each in engines_of(loss) if each.passes is not self] + [self]
        for each in passes:
            each._begin(loss, retain_graph, scale)
        try:
            parts = (engine._accumulation if scale_wrt_gas else 1) * engine._processes  # ranks add theirs up
            (loss * (scale / parts)).backward(retain_graph=retain_graph)
            for each in passes:
                each._end()
        except BaseException:
            for each in passes:
                each._give_up()
            raise
        finally:
            for each in passes:
                each._leave()

    def _begin(self, loss, more, scale):
        """`more`: others follow that nothing tells of. `scale`: of the loss, the engine's that drives it."""
        engine = self._engine
        if engine.step_is_due and engine.uses.order and not engine._layout.open:
            raise Error("invalid_argument", f"backward: the step has had its {engine._accumulation} micro-batches "
                                            "(gradient_accumulation_steps); call step() before the next one")
        if engine._micro_batches >= engine._layout.accumulation and engine.uses.order and not engine._layout.open:
            raise Error("invalid_argument", "backward: a step's micro-batches go through the blocks together, by plan "
                                            "(train_batch(), spillway.micro_batches_together), and the step has had a "
                                            "backward pass before; call train_batch(), or make an engine without")
        self._prepare()
        engine.together.measure()
        if torch.is_tensor(loss):
            plan_for(engine, loss, more)
        engine.together.plan()
        self._held, self.running = set(engine._held), True
        self.factor = engine.current_loss_scale / scale

    def _prepare(self):
        engine = self._engine
        engine.optimizer.before_backward()
        engine._gradients.hide()
        engine.lender.return_loans()
        # What goes backward once more, without a forward pass, is of the same.
        once_more = engine._micro_batches > 0 and not engine.uses.order
        self.micro_batch = engine._micro_batches - once_more

    def _end(self):
        engine = self._engine
        self._refuse_gradients_outside()
        if self._brought or not self._plain:
            engine._micro_batches = self.micro_batch + 1
        self.decides = self.decides or (self._plain and self._brought and engine.plain_decides)
        engine.uses.settled = True
        engine._gradients.show()

    def _leave(self):
        self.running = self._plain = self._brought = False
        self.factor = self._scale = 1
        self._engine.lender.return_all()
        self._engine.uses.forget()

    # -- loss.backward() ------------------------------------------------------------------------------------------

    def scale(self, loss):
        factor = self._engine.current_loss_scale
        return loss if factor == 1 else _Scaled.apply(loss, factor, engines_of(loss))

    def arrive(self, scale=1):
        """A node of the engine's runs. `scale`: what the loss was multiplied with after it."""
        if not self.running:
            if not _call_back(self._end_plain):
                return
            self._begin_plain(scale)
        elif not self._plain:
            return
        self._scale *= scale
        engine = self._engine
        self.factor = engine.plain_factor * engine.current_loss_scale / self._scale / engine._processes

    def _begin_plain(self, scale):
        engine = self._engine
        if engine.current_loss_scale != 1 and scale == 1:
            raise Error("invalid_argument", "backward: the engine scales losses (fp16.enabled), and this one is not; "
                                            "call engine.scale(loss).backward(), or engine.backward(loss)")
        self._prepare()
        engine.uses.take_loans()
        engine.together.measure()
        open_up(engine, "loss.backward()")
        engine.together.plan()
        self._held, self.running, self._plain = set(engine._held), True, True

    def _end_plain(self):
        if not self._plain:
            return
        try:
            self._end()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._leave()

    def brought(self):
        self._brought = True

    def refresh(self):
        """An exception ends a plain pass without a word."""
        if not self._plain or _call_back(lambda: None):
            return
        self._give_up()
        self._leave()
        log.say(logging.WARNING, "backward: an exception has ended it; the step's gradients are discarded, so that the "
                                 "next forward pass is the step's first")

    # -- both -----------------------------------------------------------------------------------------------------

    def _refuse_gradients_outside(self):
        lost, layout = None, self._engine._layout
        for members, names in zip(layout.members, layout.names):
            for parameter, name in zip(members, names):
                if parameter.grad is not None:
                    parameter.grad, lost = None, lost or name
        if lost is not None:
            raise Error("invalid_argument", f"{lost}: is used outside of its block, where it has no values, "
                        "or beside its block's results; name the module that uses it in blocks=")

    def _give_up(self):
        self._engine._give_up(self._held)

    def takes(self, place):
        """A gradient of a parameter that is used outside of its block."""
        return self.running and (self._plain or place in self._engine.uses.outside)

    def begin_step(self):
        self.decides = False
