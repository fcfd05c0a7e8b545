"""What a block's second run needs to be the first one again: Conditions, and the block's buffers.

Random numbers, autocast, train() and eval(), adapters that are switched off for one pass, what modules count: whatever
changed between forward and backward is put back for the second run, and what that changes is undone.
"""
import contextlib
import random
import sys

import torch

_NormBase = torch.nn.modules.batchnorm._NormBase
PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype, torch.device)
MOST = 16  # values of a list in an attribute: names of adapters, say


class Conditions:
    def __init__(self, engine, block):
        self._engine, self._block = engine, block
        self._random, self._autocast = random_states(engine), autocast_of(engine)
        self._attributes = _attributes(block)
        self._learns = [parameter.requires_grad for parameter, _, _ in block.trainable]

    def trainable(self):
        """Entries of the block's parameters that wanted a gradient; one that joined it since does."""
        learns = self._learns + [True] * (len(self._block.trainable) - len(self._learns))
        return [entry for entry, wants in zip(self._block.trainable, learns) if wants]

    @contextlib.contextmanager
    def again(self):
        here, now = random_states(self._engine), _attributes(self._block)
        flags = [(parameter, parameter.requires_grad, wants)
                 for (parameter, _, _), wants in zip(self._block.trainable, self._learns)]
        try:
            set_random_states(self._engine, self._random)
            _set_attributes(self._attributes, now)
            for parameter, is_now, was in flags:
                if is_now != was:
                    parameter.requires_grad_(was)
            with self.autocast():
                yield
        finally:
            set_random_states(self._engine, here)
            _set_attributes(now, _attributes(self._block))
            for parameter, is_now, was in flags:
                if is_now != was:
                    parameter.requires_grad_(is_now)

    @contextlib.contextmanager
    def autocast(self):
        """As it was. It keeps casts of weights, which are forgotten after it: the weights go, and will be others."""
        with as_autocast(self._engine, self._autocast):
            try:
                yield
            finally:
                if any(enabled for _, enabled, _, _ in self._autocast):
                    torch.clear_autocast_cache()


@contextlib.contextmanager
def as_autocast(engine, states):
    """As autocast_of() was."""
    with contextlib.ExitStack() as stack:
        for device, enabled, dtype, cache in states if autocast_of(engine) != states else ():
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield


def autocast_of(engine):
    """(device, enabled, dtype, whether casts are kept)."""
    cache = torch.is_autocast_cache_enabled()
    if hasattr(torch, "get_autocast_dtype"):
        return [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), cache)
                for device in ["cpu"] + ["cuda"] * engine.on_cuda]
    found = [("cpu", torch.is_autocast_cpu_enabled(), torch.get_autocast_cpu_dtype(), cache)]  # before PyTorch 2.4
    if engine.on_cuda:
        found.append(("cuda", torch.is_autocast_enabled(), torch.get_autocast_gpu_dtype(), cache))
    return found


def _attributes(block):
    """By module: plain ones by name, lists as tuples."""
    found = []
    for module in block.module.modules():
        values = {}
        for name, value in module.__dict__.items():
            if type(value) in PLAIN:
                values[name] = value
            elif type(value) is list and len(value) <= MOST and all(type(one) in PLAIN for one in value):
                values[name] = tuple(value)
        found.append((module, values))
    return found


def switches(block):
    """What others may switch while a block waits for its turn: adapters, train(), which parameters are trained."""
    return [values for _, values in _attributes(block)], [entry[0].requires_grad for entry in block.trainable]


def _set_attributes(wanted, now):
    here = {id(module): values for module, values in now}
    for module, values in wanted:
        known = here.get(id(module), values)
        for name in known.keys() - values.keys():  # that came since
            del module.__dict__[name]
        for name, value in values.items():
            if name not in known or (known[name] is not value and known[name] != value):
                module.__dict__[name] = list(value) if type(value) is tuple else value


def random_states(engine):
    numpy = sys.modules.get("numpy")
    return (torch.get_rng_state(), torch.cuda.get_rng_state(engine.device) if engine.on_cuda else None,
            random.getstate(), numpy.random.get_state() if numpy else None)


def set_random_states(engine, states):
    torch.set_rng_state(states[0])
    if engine.on_cuda:
        torch.cuda.set_rng_state(states[1], engine.device)
    random.setstate(states[2])
    if states[3] is not None:
        sys.modules["numpy"].random.set_state(states[3])


class Buffers:
    """A block's: those that it writes in forward, running means say, are written once. The second run works on what
    they held before the first, and leaves none of it."""

    def __init__(self, block):
        self._block, self._modes = block, tuple(module.training for module in block.module.modules())
        self._slots = _slots(block)
        self._versions = _versions(self._slots)
        writes = block.writes.get(self._modes)  # None: it has not run in these modes, and shows it now
        self._before = {place: value.detach().clone() for place, value in self._slots.items()
                        if value is not None and (writes is None or place in writes)}

    def ran(self):
        """After the first run; False: it wrote one that it never wrote before, and whose values are gone."""
        slots = _slots(self._block)
        versions = _versions(slots)
        written = {place for place, version in versions.items() if version != self._versions.get(place)}
        # Of running means no version tells, before PyTorch 2.0. A batch norm's counter does, and goes with them.
        of = {module for module, _ in written} | {id(module) for module in self._block.module.modules() if
                                                  isinstance(module, _NormBase) and module.training}
        written |= {place for place in slots if place[0] in of}
        writes = self._block.writes.setdefault(self._modes, set())
        known = all(place in self._before or self._slots.get(place) is None for place in written)
        writes |= written
        self._before = {place: self._before.get(place) for place in written}
        self._slots, self._versions = slots, versions
        return known

    def as_left(self):
        """Nobody else has written those that the block reads and does not write."""
        slots = _slots(self._block)
        versions = _versions(slots)
        others = set().union(*self._block.writes.values())
        return all(versions.get(place) == version for place, version in self._versions.items()
                   if place not in others)

    @contextlib.contextmanager
    def again(self):
        here = _slots(self._block)
        versions = _versions(here)
        self.changed = False
        try:
            for (module, name), value in self._before.items():
                _of(self._block)[module]._buffers[name] = value if value is None else value.clone()
            yield
        finally:
            modules = _of(self._block)
            for (module, name), value in here.items():
                modules[module]._buffers[name] = value
            self.changed = _versions(_slots(self._block)) != versions


def _of(block):
    return {id(module): module for module in block.module.modules()}


def _slots(block):
    """Those that travel as frozen bytes come and go, and nothing writes them."""
    return {(id(module), name): value for module in block.module.modules() for name, value in module._buffers.items()
            if not hasattr(value, "_spillway_place")}


def _versions(slots):
    """What tells of a tensor that was written to, or replaced, as long as the first one is kept."""
    return {place: (id(value), value._version) if value is not None else None for place, value in slots.items()}
