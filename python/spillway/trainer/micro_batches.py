"""gradient_accumulation_steps of a Trainer with "micro_batches_together": Together, what a trainer does with the
micro-batches of a step.

The loop collects them (get_batch_samples) and calls training_step() for each. The first call runs training_step() of
all of them, each in a thread of its own that waits where it comes to a block (engine/together.py); what they give to
accelerator.backward() goes backward at once, after the last. The other calls return what is there.

    loop       training_step(1)                          training_step(2)   …   optimizer.step()
    here       training_step(1), (2), … · backward       loss of 2
"""
import logging
import threading

from .. import log
from ..library import Error

KEY = "micro_batches_together"
WRAPPED = [f"trl.trainer.{name}_trainer" for name in ("sft", "dpo", "kto", "reward")]  # add what is off by default


def why_not(trainer, settings):
    """Words on why the micro-batches of a step cannot be run before the loop comes to them; None where they can."""
    theirs = [kind for kind in type(trainer).__mro__ if kind.__module__.startswith("transformers.")]
    if not any("get_batch_samples" in vars(kind) for kind in theirs):
        return "transformers before 4.46 gives a step's micro-batches one by one"
    for kind in type(trainer).__mro__:
        if kind in theirs or kind.__module__.startswith("spillway."):
            continue
        for name in ("training_step", "get_batch_samples", "_prepare_inputs"):
            if name in vars(kind) and not (name == "training_step" and kind.__module__ in WRAPPED):
                return f"{kind.__name__}.{name} is its own, and may need a step's micro-batches one by one"
    if settings.get("sum_groups", 1) != 1:
        return "spillway.sum_groups adds up each micro-batch's gradients by themselves"
    if getattr(trainer.args, "activation_offloading", False):
        return "activation_offloading moves what one micro-batch keeps; spillway.block_inputs does that for all"
    return None


class Together:
    """A trainer's."""

    def __init__(self):
        self._batches, self._losses = [], []
        self._here = threading.local()  # .losses: of the micro-batch whose thread this is
        self._said = False

    def said(self, why):
        if not self._said:
            self._said = True
            log.say(logging.WARNING, f"{KEY}: {why}; each micro-batch goes through the blocks alone, and its weights "
                                     "come anew")

    def collected(self, batches):
        """Those of the step that comes."""
        self._batches, self._losses = list(batches), []
        return batches

    def backward(self, loss):
        """Whether it is a micro-batch's, and waits for the others'."""
        losses = getattr(self._here, "losses", None)
        if losses is not None:
            losses.append(loss)
        return losses is not None

    def step(self, engine, inputs, training_step, backward):
        """What training_step(inputs) returns."""
        number = next((i for i, batch in enumerate(self._batches) if batch is inputs), None)
        if number is None:
            raise Error("unsupported", f"training_step: is given a micro-batch that get_batch_samples() did not give; "
                                       f"set spillway.{KEY} to false")
        if not self._losses:
            self._losses = self._run(engine, training_step, backward)
        loss, self._losses[number], self._batches[number] = self._losses[number], None, None
        return loss

    def _run(self, engine, training_step, backward):
        def compute(inputs):
            self._here.losses = []
            return training_step(inputs), self._here.losses

        found = engine.together.losses(compute, self._batches)
        losses = [loss for _, own in found for loss in own]
        returned = [loss for loss, _ in found]
        del found
        if losses:
            total = sum(losses[1:], losses[0])
            losses.clear()
            backward(total)
        return returned
