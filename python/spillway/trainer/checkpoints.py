"""Which of the directories that a trainer has saved can be gone on from: those that were saved to their end."""
import json
import logging
import os
import re
import shlex

from .. import log
from ..deepspeed import checkpoints as deepspeed_import
from ..library import Error

SNAPSHOT = "spillway"  # in a checkpoint's directory; the others as transformers calls them
SCHEDULE, STATE = "scheduler.pt", "trainer_state.json"


def numbered(folder):
    """(step, path) of the checkpoints in an output_dir, the newest first."""
    found = [(re.fullmatch(r"checkpoint-(\d+)", name), os.path.join(folder, name))
             for name in (os.listdir(folder) if os.path.isdir(folder) else ())]
    return sorted(((int(number[1]), path) for number, path in found if number and os.path.isdir(path)), reverse=True)


def state_of(checkpoint):
    """What transformers writes last; None where it did not come to that."""
    try:
        with open(os.path.join(checkpoint, STATE), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def newest(folder):
    """(path, those newer than it that are not whole); the path is None where none is whole."""
    cut = []
    for _, path in numbered(folder):
        parts = (SNAPSHOT, deepspeed_import.LATEST)
        if state_of(path) is not None and any(os.path.exists(os.path.join(path, part)) for part in parts):
            return path, cut
        cut.append(path)
    return None, cut


def last(folder, configuration):
    """What resume_from_checkpoint=True stands for."""
    path, cut = newest(folder)
    names = ", ".join(cut)
    if path is None:
        raise Error("not_found", f"{folder}: has no checkpoint that a run can go on from" +
                    (f"; {names} was not saved to its end, or with save_only_model" if cut else "") +
                    "; begin without resume_from_checkpoint" + _from_store(configuration, ". "))
    if cut:
        log.say(logging.WARNING, f"{names}: was not saved to its end, or with save_only_model; goes on from {path}")
    return path


def instead_of_resume(error, folder, configuration, resuming):
    """What an engine says of a store that is there, in words of what a trainer can do."""
    if resuming:
        there = error.remedy == "resume_or_replace"
        return error.instead('on_existing="replace" lets the checkpoint replace this store') if there else error
    path, _ = newest(folder)
    way = f"train(resume_from_checkpoint=True), from {path}" if path else "a checkpoint, of which there is none in " \
        f"{folder} (save_strategy says when they are made{_from_store(configuration, '; ')})"
    return error.with_resume(way)


def _from_store(configuration, mark):
    """Another way to go on, after a mark; nothing where the configuration has no store, or one without commits."""
    own, zero = (value if isinstance(value, dict) else {}
                 for value in map(configuration.get, ("spillway", "zero_optimization")))
    places = [place for place in map(zero.get, ("offload_optimizer", "offload_param")) if isinstance(place, dict)]
    paths = own.get("nvme_paths") or [place["nvme_path"] for place in places
                                      if place.get("device") == "nvme" and place.get("nvme_path")][:1]
    if not paths or own.get("commit_every") == 0:
        return ""
    first, *others = map(shlex.quote, paths)
    command = " ".join(["spillway export", first, "DIR", *(["--with", *others] if others else [])])
    return f"{mark}`{command}` makes a model of the store's last step, for a run that begins with it"
