"""A trained model as a directory that from_pretrained() takes: Engine.export()."""
import contextlib
import errno
import fcntl
import os
import secrets
import shutil

from . import buffers, whole_files
from .library import Error

MARKER = ".spillway-partial"  # in a directory that Spillway may remove (src/formats/new_directory.h)


def adapters(engine, dtype):
    """The trained tensors of a model of peft's, all of which are in memory for it."""
    names = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return {name: value.to(dtype) for name, value in engine.master_weights(names).items()}


def export(engine, directory, dtype, replace):
    """Where there is a model already that is not to be replaced, or another one is being written, the export goes to a
    directory beside it before the error is raised: the end of a script is no place to lose the training."""
    write = _adapters if hasattr(engine.module, "peft_config") else _model
    try:
        write(engine, directory, dtype, replace)
    except Error as error:
        if error.code not in ("exists", "busy"):
            raise
        beside, number = os.fspath(directory).rstrip("/"), 2
        while os.path.exists(f"{beside}-{number}"):
            number += 1
        write(engine, f"{beside}-{number}", dtype, False)
        raise Error(error.code, f"{error}; this time it was exported to {beside}-{number}") from None


def _model(engine, directory, dtype, replace):
    buffers.check(engine.module)
    if buffers.persistent(engine.module):
        try:
            os.lstat(directory)
        except FileNotFoundError:
            _new_with_buffers(engine, os.path.realpath(os.fsdecode(directory)), dtype)
            return
        except OSError:
            pass  # what is wrong with the name is said below
    engine.export_weights(directory, dtype, replace)
    buffers.save(engine.module, directory)


def _new_with_buffers(engine, place, dtype):
    """A directory that is complete or not there. What a killed process leaves goes with the next one beside it."""
    partial = os.path.join(os.path.dirname(place), f".spillway-{secrets.token_hex(4)}.partial")
    try:
        engine.export_weights(partial, dtype, False)
    except Error as error:
        raise Error(error.code, str(error).replace(partial, place), error.remedy) from None
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with open(os.path.join(partial, MARKER), "xb"):  # from here on it goes unless it is locked
            pass
        buffers.save(engine.module, partial)
        try:
            os.rename(partial, place)
        except OSError as error:
            there = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
            raise Error("exists" if there else "io", f"{place}: cannot be given its name ({error.strerror}); name "
                                                     "another directory") from None
        os.remove(os.path.join(place, MARKER))
        whole_files.sync(os.path.dirname(place))
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _adapters(engine, directory, dtype, replace):
    if not replace and os.path.isdir(directory) and any(n.startswith("adapter_") for n in os.listdir(directory)):
        raise Error("exists", f"{os.fspath(directory)}: holds an adapter; name another directory, or say replace=True")
    engine.module.save_pretrained(os.fspath(directory), state_dict=adapters(engine, dtype))
