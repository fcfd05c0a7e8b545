"""Random numbers that do not depend on how many ranks there are: Seeds, of an engine with spillway.sum_groups.

Dropout draws from torch's generators, whose state says what came before: other micro-batches on one rank than on two.
So these are seeded anew where the forward pass of a micro-batch begins, by the engine's seed, the step, and the
micro-batch's number in it, over all ranks. A second forward pass of the same micro-batch goes on with them, and so
draws other numbers than the first. `random` and numpy's generators stay as they are.
"""
import hashlib
import weakref

import torch


_own = None, None  # what was set here last, and the seed of the engine that did


class Seeds:
    """`seed`: rank 0's; None: what torch.manual_seed() has set last, other than here."""

    def __init__(self, engine, seed):
        self._engine, self._begun = weakref.ref(engine), None
        if seed is None:
            seed = torch.initial_seed()
            seed = _own[1] if seed == _own[0] else seed
        self.seed = int(seed)
        if engine.settings["spillway.sum_groups"] == 1:  # nothing is seeded anew
            return
        if engine.ranks is not None:
            self.seed = engine.ranks.same(self.seed)
        engine.module.register_forward_pre_hook(lambda *_: self.begin())

    def forget(self):
        """The next forward pass is a micro-batch's first."""
        self._begun = None

    def begin(self):
        """Of a forward pass, or of a block's visit where the model's own forward is not called."""
        global _own
        engine = self._engine()
        if engine is None or engine._handle is None:  # what it did with the model says so
            return
        if not torch.is_grad_enabled() or engine.passes.running or engine.settings["spillway.sum_groups"] == 1:
            return
        number = engine._first_micro_batch + engine._micro_batches
        if self._begun != number:
            self._begun = number
            _own = seed_of(self.seed, engine.current_step, number), self.seed
            torch.manual_seed(_own[0])


def seed_of(*numbers):
    """64 bits that each of them changes."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "little")
