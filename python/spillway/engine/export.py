"""A trained model as a directory that from_pretrained() takes: Engine.export()."""
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import shutil

import torch

from .. import log, whole_files
from ..checkpoint_names import groups_of, inner_of, plain
from ..library import Error
from ..pieces import floats
from . import buffers
from .module import attachments
from .safetensors_files import SafetensorsFiles

MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5}|-weights|-buffers)?\.safetensors(\.index\.json)?")
MARKER = ".spillway-partial"  # in a directory that Spillway may remove (src/formats/new_directory.h)


def adapters(engine, dtype):
    """The trained tensors of a model of peft's, all of which are in memory for it."""
    names = {plain(name) for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return {name: value.to(dtype) for name, value in engine.master_weights(names).items()}


def tell(model):
    """What export() would say when all work is done."""
    try:
        buffers.check(model)
    except Error as error:
        log.say(logging.WARNING, str(error))
    if inner := inner_of(model):
        name, tensor = inner
        log.say(logging.WARNING, f"{name}: its files have other tensors than {tensor}; exports have those in memory, "
                                 "as load_state_dict() of the module around it takes them. For from_pretrained(), load "
                                 f"them there, and then call {name}.save_pretrained()")


def export(engine, directory, dtype, replace):
    """Where there is a model already that is not to be replaced, or another one is being written, the export goes to a
    directory beside it before the error is raised: the end of a script is no place to lose the training."""
    write, walk = (_adapters, _walk_adapters) if hasattr(engine.module, "peft_config") else (_model, _walk_model)
    if write is _model and engine._layout.packed:
        name = next(iter(engine._layout.packed.values())).name
        raise Error("unsupported", f"{name}: is kept as bytes, as of a quantized weight, whose files are its "
                                   "package's; export() writes a peft model's adapters, master_weights(names) what "
                                   "was trained, and state_dict() all of it, for save_pretrained(state_dict=)")
    if write is _model and (groups := groups_of(engine.module, engine._layout.tensors())):
        def write(engine, directory, dtype, replace):
            _turned_back(engine, groups, os.path.realpath(os.fsdecode(directory)), dtype, replace)
        walk = _walk_each

    def here(place, may_replace):
        try:
            write(engine, place, dtype, may_replace)
        except OSError as error:
            raise _failed(place, error) from error

    def written(place, may_replace):
        if engine.ranks is None:
            here(place, may_replace)
        else:
            engine.ranks.first_writes(lambda: here(place, may_replace), lambda: walk(engine, place, dtype))

    try:
        written(directory, replace)
    except Error as error:
        if error.code not in ("exists", "busy"):
            raise
        beside, number = os.fspath(directory).rstrip("/"), 2
        while os.path.exists(f"{beside}-{number}"):
            number += 1
        written(f"{beside}-{number}", False)
        raise Error(error.code, f"{error}; this time it was exported to {beside}-{number}") from None


def _failed(place, error):
    """Of a file or a call that names none, in words as the library has them (src/formats/plain_file.cc)."""
    room = "free some space, or name another directory"
    remedy = {errno.ENOSPC: room, errno.EDQUOT: room, errno.EFBIG: "raise ulimit -f, or name another directory",
              errno.EACCES: "check who may write there", errno.EPERM: "check who may write there",
              errno.EROFS: "name a directory on a file system that can be written"}
    return Error("io", f"{os.fspath(place)}: the model cannot be written ({error.strerror or error}); " + remedy.get(
        error.errno, "check the drive, or name another directory"))


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


def _walk_model(engine, directory, dtype):
    """As another rank than the one that writes."""
    buffers.check(engine.module)
    engine.export_weights(directory, dtype, False)


def _walk_each(engine, _, dtype):
    _each_weight(engine, lambda *_: None, _is_exact(engine, dtype))


def _walk_adapters(engine, *_):
    engine.master_weights(())


def _is_exact(engine, dtype):
    return dtype == torch.float32 or dtype != engine.dtype


def _new_with_buffers(engine, place, dtype):
    """A directory that is complete or not there. What a killed process leaves goes with the next one beside it."""
    partial = _beside(place)
    try:
        engine.export_weights(partial, dtype, False)
    except Error as error:
        raise Error(error.code, str(error).replace(partial, place), error.remedy) from None
    with _locked(partial):
        buffers.save(engine.module, partial)
        _name(partial, place)


def _beside(place):
    return os.path.join(os.path.dirname(place), f".spillway-{secrets.token_hex(4)}.partial")


@contextlib.contextmanager
def _locked(partial):
    """A directory that is there and has no name yet. It is gone after an exception."""
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        with open(os.path.join(partial, MARKER), "xb"):  # from here on it goes unless it is locked
            pass
        yield
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _name(partial, place):
    try:
        os.rename(partial, place)
    except OSError as error:
        there = error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)
        raise Error("exists" if there else "io", f"{place}: cannot be given its name ({error.strerror}); name "
                                                 "another directory") from None
    os.remove(os.path.join(place, MARKER))
    whole_files.sync(os.path.dirname(place))


# -- names that are turned back ---------------------------------------------------------------------------------------

def _turned_back(engine, groups, place, dtype, replace):
    """As files have the tensors from which transformers made the model."""
    there = os.path.isdir(place)
    if there:
        _check_place(place, replace)
    partial = os.path.join(place, os.path.basename(_beside(place))) if there else _beside(place)
    try:
        os.makedirs(partial)
    except OSError as error:
        raise Error("io", f"{place}: cannot be made ({error.strerror}); name a directory that this user may write "
                          "to") from None
    with _place_alone(place) if there else contextlib.nullcontext(), _locked(partial):
        names = _write_groups(engine, groups, partial, dtype)
        if not there:
            _name(partial, place)
            return
        old = {name for name in os.listdir(place) if MODEL_FILE.fullmatch(name)}
        for name in sorted(names, key=lambda name: name.endswith(".json")):  # what names the others comes after them
            os.replace(os.path.join(partial, name), os.path.join(place, name))
        for name in old - {*names}:
            os.remove(os.path.join(place, name))
        whole_files.sync(place)
        shutil.rmtree(partial, ignore_errors=True)


def _check_place(place, replace):
    if os.path.exists(os.path.join(place, "spillway.json")):
        raise Error("exists", f"{place}: is a snapshot, whose exact weights would be replaced; name another directory")
    if not replace and any(os.path.exists(os.path.join(place, name)) for name in (buffers.WEIGHTS, buffers.INDEX)):
        raise Error("exists", f"{place}: a model is there; name another directory, or say replace=True")


@contextlib.contextmanager
def _place_alone(place):
    lock = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Error("busy", f"{place}: a model is being written there; wait for its end, or name another "
                                "directory") from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(lock)


def _write_groups(engine, groups, folder, dtype):
    """Tensors come once, in the order of blocks, and are kept until their group is complete. Returns names of files."""
    own = {plain(name): buffer.detach().cpu() for name, buffer in buffers.persistent(engine.module).items()}

    def type_of(group):  # buffers keep theirs
        return own[group.names[0]].dtype if group.names[0] in own else dtype

    files = SafetensorsFiles(folder, {name: (type_of(group), shape) for group in groups
                                      for name, shape in group.targets.items()})
    group_of = {name: group for group in groups for name in group.names}
    waiting = {}  # group's id: tensors that are whole

    def whole(name, values):
        group = group_of[name]
        tensors = waiting.setdefault(id(group), {})
        tensors[name] = values
        if len(tensors) == len(group.names):
            made = group.converted(waiting.pop(id(group)))
            for target, values in made.items():
                files.put(target, _fitting(target, values, type_of(group)))

    try:
        for name, buffer in own.items():
            whole(name, buffer)
        _each_weight(engine, whole, _is_exact(engine, dtype))
        files.close()
    except BaseException:
        files.close(sync=False)
        raise
    beside = attachments(engine.module)
    for name, text in beside.items():
        values = json.loads(text)
        for key in values.keys() & {"dtype", "torch_dtype"}:
            values[key] = str(dtype).removeprefix("torch.")
        text = json.dumps(values, indent=2).encode()
        whole_files.write(os.path.join(folder, name), lambda file, text=text: file.write(text))
    return [*files.names, *beside]


def _each_weight(engine, whole, exact):
    """Calls whole(name, values) for each parameter, once all of its values are there, in fp32: the exact ones, or those
    that forward uses."""
    layout, begun = engine._layout, {}

    def copy(block, index, first, values, count):
        key = block, index
        if key not in begun:
            begun[key] = [torch.empty(layout.members[block][index].shape, dtype=torch.float32, device="cpu"), 0]
        begun[key][0].view(-1)[first:first + count] = floats(values, count)
        begun[key][1] += count
        if begun[key][1] == begun[key][0].numel():
            whole(layout.names[block][index], begun.pop(key)[0])

    engine.stream_out(engine._library.engine_export_weights, copy, int(exact))


def _fitting(name, values, dtype):
    if dtype == torch.float16 and values.is_floating_point() and (values.abs() >= 65520).any():
        raise Error("invalid_argument", f"{name}: holds {values.abs().max().item():g}, and fp16 ends at 65,504; write "
                                        "bf16 or fp32")
    return values


def _adapters(engine, directory, dtype, replace):
    if not replace and os.path.isdir(directory) and any(n.startswith("adapter_") for n in os.listdir(directory)):
        raise Error("exists", f"{os.fspath(directory)}: holds an adapter; name another directory, or say replace=True")
    engine.module.save_pretrained(os.fspath(directory), state_dict=adapters(engine, dtype))
