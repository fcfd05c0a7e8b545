"""Checkpoints that DeepSpeed has saved become snapshots: import_deepspeed().

Taken are weights, exp_avg, exp_avg_sq and Adam's step, of any number of ranks: docs/checkpoints.md, "From DeepSpeed".
"""
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import tempfile

from ..engine.blocks import find_blocks
from ..engine.engine import DTYPES
from ..engine.layout import Layout
from ..library import Error, ImportOptions, Line, library
from ..pieces import copying, pieces, values_of

LATEST = "latest"  # says which tag is the last
# Of its files, also of those that come with experts' and pipelines' own; a program's may end as they do.
NAME = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
# A directory beside a checkpoint, which has the snapshot of it for a while, begins so and ends with the host's name.
BESIDE = ".spillway-import-"


def import_deepspeed(checkpoint, model, snapshot, *, tag=None, dtype=None, verify=True, blocks=None, weights=None):
    """Makes a snapshot of a checkpoint, for the model that was trained, and returns what is known of it: a dict of
    "step", which is the snapshot's, "optimizer_steps", "global_steps", "skipped_steps", "schedule_steps", "loss_scale",
    "client_state" (names) and more, as far as the checkpoint says it.

        facts = spillway.import_deepspeed("checkpoints", model, "snapshot", dtype=torch.bfloat16)
        engine = spillway.Engine(model, "ds_config.json", snapshot="snapshot")

    `checkpoint`: what save_checkpoint() was given. `tag`: a directory in it; the default is what its `latest` names.
    `model`: its names and shapes are read; device "meta" will do. `blocks`: as for Engine.
    `weights`: a function from a parameter's name to its values, for frozen ones that the checkpoint does not have, as
      DeepSpeed saves it with exclude_frozen_parameters; the default are the model's own. "frozen_given" is how many.
    `snapshot`: a directory that does not exist.
    `dtype`: of the weights in the run that goes on; the default is that of DeepSpeed's run. In fp16 only those go on
      that were trained so: their loss scale comes along, and steps that were skipped count, as in an engine's.
    `verify`: first compares what is read with the CRC-32s in the files.
    """
    layout = layout_of(model, blocks)
    return _imported(layout, checkpoint, snapshot, values_of(layout, weights), tag, dtype, verify)


def layout_of(model, blocks):
    found = find_blocks(model, blocks)
    return Layout(model, found, list(range(len(found))), 1)


def _imported(layout, checkpoint, snapshot, frozen, tag=None, dtype=None, verify=True):
    """`frozen`: a function from engine block and index to values."""
    if dtype is not None and dtype not in DTYPES:
        raise Error("invalid_argument", f"dtype: {dtype} is none of {', '.join(map(str, DTYPES))}")
    for packed in layout.packed.values():
        raise Error("unsupported", f"{packed.name}: is kept as bytes, as of a quantized weight, which no checkpoint of "
                                   "DeepSpeed's has; make an engine of the model, whose adapters it trained")
    said = {}  # by the `user` of the call, None
    weights = None if dtype is None else ctypes.pointer(ctypes.c_int(DTYPES.index(dtype)))
    all_frozen = sum(parameter.numel() for members in layout.members for parameter in members
                     if not parameter.requires_grad)
    model = layout.describe(library(), 4)
    try:
        with pieces(copying(frozen),
                    lambda: all_frozen if "frozen_given" in json.loads(said[None]) else 0) as given:
            options = ImportOptions(None if tag is None else os.fsencode(tag), weights, not verify, given)
            # A callback in Python would get the Ctrl-C that came during the import, and ctypes would drop it there.
            library().import_deepspeed(os.fsencode(checkpoint), model, os.fsencode(snapshot), ctypes.byref(options),
                                       Line(said.__setitem__), None)
        return {**json.loads(said[None]), "snapshot": os.fspath(snapshot)}
    except BaseException:
        if said:  # the snapshot was made, and nobody will know
            shutil.rmtree(snapshot, ignore_errors=True)
        raise
    finally:
        library().model_destroy(model)


def is_deepspeeds(directory):
    """Whether a tag's directory is one that DeepSpeed wrote; what is wrong with it is the import's to say."""
    try:
        return any(NAME.fullmatch(name) for name in os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise Error("io", f"{directory}: cannot be read ({error.strerror}); let this process read it") from None


@contextlib.contextmanager
def snapshot_of(checkpoint, tag, layout, dtype, frozen):
    """A snapshot, which is there until a run has begun with it, and the facts. It lies beside the checkpoint, where
    there was room for one."""
    checkpoint = os.fspath(checkpoint)
    with _directory_in(checkpoint) as beside:
        snapshot = os.path.join(beside, "snapshot")
        try:
            yield snapshot, _imported(layout, checkpoint, snapshot, frozen, tag, dtype)
        except Error as error:  # in which nobody knows that directory
            text = re.sub(re.escape(beside) + r"/\.snapshot\.partial[^:]*",
                          lambda _: f"the snapshot beside {checkpoint}, 12 bytes a parameter", str(error))
            raise Error(error.code, text.replace(snapshot, checkpoint), error.remedy) from None


@contextlib.contextmanager
def snapshot_of_all(ranks, checkpoint, tag, layout, dtype, frozen):
    """The same for several ranks, which must all see it. The first one makes it, of however many ranks' parts, and has
    all take part where it asks for frozen values. It is there until none of them reads in it any more."""
    def asked(*place):
        ranks.same(place)
        return frozen(*place)

    made = failure = None
    with contextlib.ExitStack() as first:
        if ranks.rank == 0:
            try:
                with ranks.at_work():
                    made = first.enter_context(snapshot_of(checkpoint, tag, layout, dtype, asked))
            except Exception as error:
                failure = error
            ranks.same()  # nothing more is asked for
        else:
            while (place := ranks.same()) is not None:
                frozen(*place)
        ranks.raise_on_all(failure)
        try:
            yield ranks.same(made)
        finally:
            with contextlib.suppress(Error):  # that ranks have parted is told by what they do next
                ranks.same()


@contextlib.contextmanager
def _directory_in(checkpoint):
    """A new one, which is gone afterwards. What a killed process has left there goes with the next import."""
    def refused(error):
        return Error("io", f"{checkpoint}: no snapshot of it can be made there ({error.strerror}); let this process "
                           "write there, or copy the checkpoint")

    host = "@" + os.uname().nodename
    try:
        place = os.open(checkpoint, os.O_RDONLY)
    except OSError as error:
        raise refused(error) from None
    try:
        # Everybody who has a directory there holds a lock, so that a lock of one's own says that nobody does.
        with contextlib.suppress(OSError):  # another import is at work, or the file system has no locks
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for name in os.listdir(place):
                if name.startswith(BESIDE) and name.endswith(host):  # others' locks may be unknown here
                    _remove_left(os.path.join(checkpoint, name))
        with contextlib.suppress(OSError):
            fcntl.flock(place, fcntl.LOCK_SH)
        try:
            made = tempfile.TemporaryDirectory(prefix=BESIDE, suffix=host, dir=checkpoint)
        except OSError as error:
            raise refused(error) from None
        with made as beside:
            yield beside
    finally:
        os.close(place)


def _remove_left(directory):
    """What an import left; a directory that holds anything else is not an import's."""
    with contextlib.suppress(OSError):
        if all(name in ("snapshot", ".snapshot.partial") for name in os.listdir(directory)):
            shutil.rmtree(directory, ignore_errors=True)
