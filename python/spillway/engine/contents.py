"""Weights and states of an engine, in and out: Contents. Where several ranks train a model, all of them make these
calls, in the same place; each brings what it keeps, and rank 0 writes what is written."""
import os
from ctypes import byref

import torch

from ..library import Error, ExportOptions, SaveOptions
from ..pieces import collected, copying, pieces, values_of
from .export import export
from .packed import MARK

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # spillway_dtype


def path_of(path):
    return None if path is None else os.fsencode(path)


class Contents:
    """What an engine does with all that it has."""

    def _as_on_first(self, begins, weights):
        """Several ranks train rank 0's model, whatever the others made, as with DistributedDataParallel: its buffers,
        and, where the run begins with the model's own, its weights."""
        packed = self._layout.packed.values()
        whole = {id(each.tensor) for each in packed}  # these are several tensors
        named = [(name, buffer) for name, buffer in self.module.named_buffers() if not hasattr(buffer, MARK)]
        if begins and weights is None:
            named += self.module.named_parameters()
        tensors = {name: tensor for name, tensor in named if id(tensor) not in whole}
        if begins:
            tensors.update((f"{each.name}: {part.path}", part.tensor) for each in packed for part in each.parts)
        self.ranks.same_tensors(tensors)

    def _import(self, weights):
        """Of several ranks each asks for what it keeps."""
        with pieces(copying(values_of(self._layout, weights)),
                    lambda: self._layout.elements if self.ranks is None else None) as callback:
            self._library.engine_import_weights(self._open(), callback, None)

    def stream_out(self, call, function, *arguments):
        """A call that calls back with pieces of all weights."""
        self._walk()
        with pieces(function, lambda: self._layout.elements) as callback:
            call(self._open(), *arguments, callback, None)

    def _walk(self):
        if self.ranks is not None:
            self.ranks.walks += 1

    def on_first(self, work):
        """`work` of rank 0 alone, whose failure is everybody's. No rank goes on before it is done."""
        if self.ranks is None:
            work()
        else:
            self.ranks.together(work if self.ranks.rank == 0 else lambda: None)

    def agree(self, work):
        """Does `work`, and where several ranks do, raises on all of them what one has raised."""
        work() if self.ranks is None else self.ranks.agree(work)

    def master_weights(self, names=None):
        """The exact fp32 weights by name, in CPU memory: 4 bytes a parameter. `names`: of these parameters alone."""
        return collected(self, names)

    def load_snapshot(self, directory):
        """Goes on from a snapshot of this model, whose step takes the place of this one, in the store as well. One that
        does not fit or is damaged is refused, and the run goes on as it was."""
        self._refuse_held()
        self.discard_step()
        self._library.engine_load_snapshot(self._open(), path_of(directory))
        self._layout.forget_packed()
        self._has_states = True
        self.uncounted_steps = self._record()[0]
        self.optimizer.attach(self)

    def save(self, directory, replace=False, leave_out_frozen=False):
        """A snapshot: weights, states, step and blob, from which any run of the model can begin. `leave_out_frozen`: of
        what is trained alone, for load_snapshot() of an engine with the same frozen weights."""
        def here():
            self._library.engine_save(self._open(), path_of(directory),
                                      byref(SaveOptions(replace, 0, leave_out_frozen)))

        here() if self.ranks is None else self.ranks.together(here)

    def export(self, directory, dtype=torch.float32, replace=False):
        """The weights, and persistent buffers, as safetensors with the model's config.json and generation_config.json:
        what from_pretrained() takes, under the names that transformers saves, without torch.compile's. Of a model of
        peft's the adapters, as its own save_pretrained(). `dtype`: torch.float32, torch.bfloat16 or torch.float16."""
        if dtype not in DTYPES:
            raise Error("invalid_argument", f"dtype: is {dtype!r}, which is none of "
                                            f"{', '.join(map(str, DTYPES))}; give one of these")
        export(self, directory, dtype, replace)

    def export_weights(self, directory, dtype, replace):
        """The weights alone, under the names that they have in memory."""
        self._walk()
        options = ExportOptions(DTYPES.index(dtype), replace)
        self._library.engine_export(self._open(), path_of(directory), byref(options))
