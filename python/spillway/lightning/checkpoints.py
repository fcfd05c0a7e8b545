"""Lightning's checkpoints of a Spillway run: a directory with a snapshot, and what the Trainer
keeps beside it.

    PATH/spillway/       the snapshot: weights and states; or, of save_weights_only:
    PATH/weights/        the exact weights as safetensors
    PATH/checkpoint.pt   loops, callbacks, schedules, hyper-parameters; written last, so that it
                         says that all is there
"""
import contextlib
import os
import pickle
import shutil

import torch

from .. import whole_files
from ..deepspeed import checkpoints as deepspeed_import
from ..engine import buffers
from ..library import Error

SNAPSHOT, WEIGHTS, STATE = "spillway", "weights", "checkpoint.pt"
OWN = "spillway"  # in STATE, what is no Trainer's


def save(engine, checkpoint, path, own):
    """`checkpoint`: the Trainer's, without weights and states. `own`: kept beside it. The
    optimizer's are left out where `own` is None: the weights alone are saved. Of several ranks
    all call it, and rank 0 writes."""
    path = local(path)
    existed = os.path.exists(path)
    kept, other = (SNAPSHOT, WEIGHTS) if own is not None else (WEIGHTS, SNAPSHOT)

    def finish():
        if own is not None:
            buffers.keep(engine.module, path)
        shutil.rmtree(os.path.join(path, other), ignore_errors=True)
        state = {**checkpoint, OWN: own}
        whole_files.write(os.path.join(path, STATE), lambda file: torch.save(state, file))

    engine.on_first(lambda: _begin(path))
    try:
        if own is not None:
            engine.save(os.path.join(path, SNAPSHOT), replace=True)
        else:
            engine.export(os.path.join(path, WEIGHTS), replace=True)
        engine.on_first(finish)
    except BaseException:
        first = engine.ranks is None or engine.ranks.rank == 0
        if first and not existed and not os.path.exists(os.path.join(path, kept)):
            shutil.rmtree(path, ignore_errors=True)
        raise
    engine.on_first(lambda: whole_files.sync(os.path.dirname(os.path.abspath(path))))


def _begin(path):
    if os.path.exists(path) and not os.path.isdir(path):
        raise Error("exists", f"{path}: is a file, and a checkpoint here is a directory; name "
                              "another path")
    if os.path.exists(os.path.join(path, deepspeed_import.LATEST)):
        raise Error("exists", f"{path}: already has a checkpoint of DeepSpeed's, and a load "
                              "would find two; name another path")
    os.makedirs(path, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.remove(os.path.join(path, STATE))  # of an earlier one, which was whole until now


def local(path):
    path = os.fspath(path)
    if "://" in path and not path.startswith("file://"):
        raise Error("unsupported", f"{path}: checkpoints are directories of a local file system; "
                                   "name one there, and copy it when it is whole")
    return path.removeprefix("file://")


class Loaded:
    """What a run begins with. `snapshot`: a directory; `weights`: a context manager that gives a
    function from names to values, or None; `own`: what was kept beside the Trainer's state."""

    def __init__(self, path, state, snapshot=None, weights=None):
        self.path, self.snapshot, self.weights = path, snapshot, weights
        self.own = state.pop(OWN, None) or {}
        self.state = state

    def check(self, engine):
        step = self.own.get("step", engine.current_step)
        if engine.current_step != step:
            raise Error("corrupt", f"{self.path}: its snapshot is of step {engine.current_step}, "
                                   f"and {STATE} of step {step}; take another checkpoint")

    def load_buffers(self, module):
        buffers.load(module, self.path if self.snapshot else os.path.join(self.path, WEIGHTS))


class LoadedFile(Loaded):
    """A file that Lightning wrote without Spillway: the weights of its state_dict."""

    def __init__(self, path, state):
        values = state.get("state_dict")
        if not isinstance(values, dict):
            raise Error("invalid_argument", f"{path}: has no state_dict; take a checkpoint that "
                                            "Lightning has saved")
        super().__init__(path, state, weights=lambda: contextlib.nullcontext(self._value))
        self._values = values

    def _value(self, name):
        if name not in self._values:
            raise Error("invalid_argument", f"{self.path}: has no {name}; it is of another model")
        return self._values[name]

    def load_buffers(self, module):
        with torch.no_grad():
            for name, buffer in buffers.persistent(module).items():
                if name in self._values:
                    buffer.copy_(self._values[name])


def load(path, weights_in, files):
    """`weights_in`: opens exported weights. `files`: whether a single file's weights may be
    taken."""
    path = local(path)
    if os.path.isfile(path):
        if not files:
            raise Error("invalid_argument", f"{path}: is a file, of which weights alone can be "
                                            "taken; say SpillwayStrategy(load_full_weights=True) "
                                            "if that is what is meant")
        return LoadedFile(path, _read(path))
    state, snapshot, weights = (os.path.join(path, name) for name in (STATE, SNAPSHOT, WEIGHTS))
    if os.path.exists(os.path.join(path, deepspeed_import.LATEST)):
        raise Error("unsupported", f"{path}: is DeepSpeed's; make a snapshot of it with "
                                   "spillway.import_deepspeed(), and begin with "
                                   "SpillwayStrategy(snapshot=…) in place of ckpt_path")
    if not os.path.exists(state):
        raise Error("not_found", f"{state}: is not there; take a checkpoint that was saved to its "
                                 "end")
    read = _read(state)
    if read.get(OWN) is not None:
        if not os.path.isdir(snapshot):
            raise Error("not_found", f"{snapshot}: is not there; take a checkpoint that is whole")
        return Loaded(path, read, snapshot=snapshot)
    if not os.path.isdir(weights):
        raise Error("not_found", f"{weights}: is not there; take a checkpoint that is whole")
    return Loaded(path, read, weights=lambda: weights_in(weights))


def _read(path):
    try:
        # What a module or a callback has put there may be anything.
        found = torch.load(path, map_location="cpu", weights_only=False)
    except (EOFError, RuntimeError, ValueError, AssertionError, pickle.UnpicklingError) as error:
        raise Error("corrupt", f"{path}: is empty, cut short or damaged; take another "
                               "checkpoint") from error
    if not isinstance(found, dict):
        raise Error("corrupt", f"{path}: is no checkpoint of Lightning's; take another one")
    return found
