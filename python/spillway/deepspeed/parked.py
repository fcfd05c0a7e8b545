"""offload_states() and reload_states(): the engine's memory is given back in between, all of it, and the run stays in
its store, or without one in a snapshot."""
import os
import tempfile

from .. import log
from ..library import Error


class Parked:
    def __init__(self, engine):
        """Gives memory back."""
        engine._refuse_held()
        engine.lender.refuse_held("offload_states")
        if engine._micro_batches:
            raise Error("invalid_argument", "offload_states: a step is under way; call it after step(), or "
                                            "discard_step() before")
        self._uncounted = engine.uncounted_steps
        self._folder = self._snapshot = None
        if engine.settings.get("spillway.nvme_paths"):
            engine.flush()
        else:
            self._folder = tempfile.TemporaryDirectory(prefix="spillway-offloaded-")
            self._snapshot = os.path.join(self._folder.name, "snapshot")
            if engine.ranks is None:
                engine.save(self._snapshot)
            else:  # the first one's, where each of them can read it
                first = engine.ranks.same(self._snapshot)
                engine.save(first)
                self._snapshot = os.fspath(engine.ranks.same_files(first, self._folder.name))
        engine._handle = None
        engine._finalizer()

    def come_back(self, engine):
        with log.silent():
            engine._create("refuse" if self._snapshot else "resume", self._snapshot)
        engine.uncounted_steps = self._uncounted
        engine.optimizer.tell()
        if self._folder is not None:
            self._folder.cleanup()
