"""What an optimizer's state_dict() has of states that are elsewhere, and what load_state_dict() makes of one."""
import contextlib
import ctypes
import itertools
import os
import pathlib
import shutil
import tempfile

import torch
from torch.utils._pytree import tree_flatten, tree_map

from ..library import Error
from ..pieces import floats

PREFIX = "state_dict-"     # of folders under nvme_path, while files in them are filled
SYNC_BYTES = 32 << 20      # written to a file before it is synchronized: dirty pages count as memory
CPU = torch.device("cpu")


class StateTensor(torch.Tensor):
    """A tensor of a state_dict: its values are fetched when somebody looks. To be moved to another device, or copied
    into another dict, is not to be looked at: Accelerate does that with everything in prepare(). They are a copy, and
    so what would change them in place is an error."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, reader, fetch, shape, dtype=torch.float32, device=CPU):
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made._reader, made._fetch = reader, fetch
        return made

    def plain(self):
        return self._fetch().to(self.device, self.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default):
            one = arguments[0]
            return StateTensor(one._reader, one._fetch, one.shape, keywords.get("dtype") or one.dtype,
                               torch.device(keywords.get("device") or one.device))
        if _changes(function, arguments, keywords):
            raise Error("unsupported", f"{function.__name__.partition('.')[0]}: would change a copy of an optimizer's "
                                       "state in place, and no step would know; change a clone() of it in "
                                       "state_dict(), and give that to load_state_dict()")
        return function(*tree_map(plain_of, arguments), **tree_map(plain_of, keywords))

    def __reduce_ex__(self, protocol):  # a file of torch.save() knows nothing of this class
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo):
        return self.plain().clone()

    def __repr__(self, **_):
        return repr(self.plain())

    def numpy(self, **options):
        return self.plain().numpy(**options)

    def __array__(self, *arguments):
        return self.plain().__array__(*arguments)

    def tolist(self):
        return self.plain().tolist()

    def data_ptr(self):
        return self.plain().data_ptr()

    def storage(self):
        return self.plain().storage()

    def untyped_storage(self):
        return self.plain().untyped_storage()


def _changes(function, arguments, keywords):
    """Whether it writes to a StateTensor, in place or by out=; to another tensor it may."""
    schema = function._schema
    if not schema.is_mutable:
        return False
    given = {**{each.name: value for each, value in zip(schema.arguments, arguments)}, **keywords}
    written = [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
    return any(isinstance(value, StateTensor) for value in tree_flatten(written)[0])


def plain_of(value):
    return value.plain() if isinstance(value, StateTensor) else value


class Reader:
    """The states behind the StateTensors that an optimizer shows. Until one is looked at they are those of the last
    step, as in torch.optim; then they stay what they were."""

    def __init__(self, states):
        self._states, self._layout = states, states.layout
        self._counts, self._moments, self._retired = None, {}, False

    @property
    def touched(self):
        return self._counts is not None

    def retire(self):
        """There is another step now, and another Reader for it."""
        self._retired = self.touched

    def step(self, tensor):
        return StateTensor(self, lambda: torch.tensor(float(self._count(tensor)), device=CPU), ())

    def moment(self, tensor, state, initial):
        return StateTensor(self, lambda: self._moment(tensor, state, initial), self._layout.shapes[tensor])

    def _count(self, tensor):
        if self._counts is None:
            self._counts = self._states.update_counts()
        return self._counts[tensor]

    def _moment(self, tensor, state, initial):
        if not self._count(tensor):
            return torch.full(self._layout.shapes[tensor], initial, dtype=torch.float32, device=CPU)
        if state not in self._moments:
            if self._retired:
                raise Error("invalid_argument", "state_dict: was read in part before the last step, and the rest of it "
                                                "is gone; call state_dict() again")
            self._moments[state] = self._export(state)
        return self._moments[state][tensor]

    def _export(self, state):
        if self._states.paths:
            return _in_files(self._states, state)
        found = [torch.empty(shape, dtype=torch.float32, device=CPU) for shape in self._layout.shapes]

        def sink(tensor, first, address, count):
            found[tensor].view(-1)[first:first + count] = floats(address, count)

        self._states.export_state(state, sink)
        return found


def _in_files(states, state):
    """Tensors that are mapped from files, which end with them: no names are left, whatever happens."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=PREFIX, dir=states.paths[0]))
    try:
        with contextlib.closing(_Files(folder)) as files:
            states.export_state(state, files.write)
        return [torch.from_file(str(folder / str(tensor)), shared=True, size=shape.numel(), dtype=torch.float32)
                .view(shape) for tensor, shape in enumerate(states.layout.shapes)]
    finally:
        shutil.rmtree(folder)


class _Files:
    """One a tensor, by number; they need not come in order."""

    def __init__(self, folder):
        self._folder, self._tensor, self._file, self._dirty = folder, None, None, 0

    def write(self, tensor, first, address, count):
        if tensor != self._tensor:
            self.close()
            self._file = os.open(self._folder / str(tensor), os.O_WRONLY | os.O_CREAT, 0o600)
            self._tensor = tensor
        values = memoryview(ctypes.cast(address, ctypes.POINTER(ctypes.c_float * count)).contents).cast("B")
        place = first * 4
        while values:
            done = os.pwrite(self._file, values, place)
            values, place, self._dirty = values[done:], place + done, self._dirty + done
        if self._dirty >= SYNC_BYTES:
            os.fdatasync(self._file)
            self._dirty = 0

    def close(self):
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def remove_leftovers(path):
    """What a process that was killed has not filled; the store, and so its folder, is ours."""
    for folder in pathlib.Path(path).glob(PREFIX + "*"):
        shutil.rmtree(folder, ignore_errors=True)


class Loading:
    """A state_dict as an optimizer takes it. `groups`: the param_groups to be. `entries`: by tensor, its values by the
    library's states, and by "step". `steps`: of all tensors, also those of other ranks."""

    def __init__(self, layout, groups, entries, initial, steps):
        self._layout, self.groups, self._entries, self._initial = layout, groups, entries, initial
        self.counts, self._flat, self._steps = None, {}, steps

    def is_own(self, reader, tensors):
        """Nothing but what the optimizer itself shows, of so many tensors."""
        values = [value for entry in self._entries.values() for value in entry.values()]
        return len(self._entries) == tensors and all(isinstance(value, StateTensor) and value._reader is reader
                                                     for value in values)

    def read(self):
        """Before the library asks: what another optimizer's library has is read here."""
        self._entries = {tensor: {key: plain_of(value) for key, value in entry.items()}
                         for tensor, entry in self._entries.items()}
        self.counts = [int(self._entries[tensor].get("step", 1)) if tensor in self._entries else 0
                       for tensor in range(len(self._initial))]
        self.step = max((int(plain_of(step)) for step in self._steps), default=0)

    def source(self, state, tensor, first, address, count):
        value = self._entries.get(tensor, {}).get(state)
        if value is None:
            floats(address, count).fill_(self._initial[tensor])
            return
        if (state, tensor) not in self._flat:
            self._flat = {(state, tensor): self._layout.part(tensor, value.detach()).reshape(-1)}
        floats(address, count).copy_(self._flat[state, tensor][first:first + count])


def _groups(optimizer, given):
    ours = optimizer.param_groups
    if len(given) != len(ours):
        raise Error("invalid_argument", f"state_dict: has {len(given)} parameter groups, and the optimizer "
                                        f"{len(ours)}; give one of the same groups")
    for index, (mine, other) in enumerate(zip(ours, given)):
        if len(mine["params"]) != len(other["params"]):
            raise Error("invalid_argument", f"state_dict: param_groups[{index}] has {len(other['params'])} parameters, "
                                            f"and the optimizer's {len(mine['params'])}; give one of the same model")
    kept = ("params", "param_names")
    return [{**optimizer.defaults, **{key: value for key, value in other.items() if key not in kept},
             **{key: mine[key] for key in kept if key in mine}} for mine, other in zip(ours, given)]


def loading(optimizer, state_dict):
    """Checks all of it, and changes nothing. Of several ranks each takes its part of every value."""
    layout, given = optimizer._layout, state_dict["param_groups"]
    groups = _groups(optimizer, given)
    places = dict(zip(itertools.chain.from_iterable(group["params"] for group in given),
                      itertools.chain.from_iterable(group["params"] for group in groups)))
    entries = {}
    for place, entry in state_dict["state"].items():
        tensor = layout.index.get(id(places.get(place)))
        if tensor is None:
            continue
        found = _entry(optimizer, layout.names[tensor], layout.whole_shapes[tensor], entry)
        if found:
            entries[tensor] = found
    steps = [entry.get("step", 1) if optimizer.counts_steps else 1 for entry in state_dict["state"].values()
             if any(entry.get(moment) is not None for moment in optimizer.moments)]
    return Loading(layout, groups, entries, [optimizer.initial_value(groups[group]) for group in layout.groups], steps)


def _entry(optimizer, name, shape, entry):
    found = {}
    for moment, state in optimizer.moments.items():
        value = entry.get(moment)
        if value is None and (moment in entry or not entry):  # of SGD without momentum
            continue
        if value is None:
            raise Error("invalid_argument", f"state_dict: has no {moment} of {name} but {', '.join(entry)}; give one "
                                            f"of {type(optimizer).__name__}")
        if value.shape != shape:
            raise Error("invalid_argument", f"state_dict: {moment} of {name} is {tuple(value.shape)}, and the "
                                            f"parameter {tuple(shape)}; give one of the same model")
        found[state] = value
    if found and optimizer.counts_steps and "step" in entry:
        found["step"] = entry["step"]
    return found
