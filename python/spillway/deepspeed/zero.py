"""deepspeed.zero: a model made in its Init, weights gathered to be read or written."""
import collections
import contextlib
import logging

import torch

from .. import log
from ..engine import values
from ..engine.away import AwayParameter, come_back, go_away
from ..library import Error


class Init:
    """A context in which a model is made as without it, whole and in memory, which is said once."""

    _said = False

    def __init__(self, *_, enabled=True, **__):
        self._enabled = enabled

    def __enter__(self):
        if self._enabled and not Init._said:
            Init._said = True
            log.say(logging.WARNING, "zero.Init: has no effect, and the model is made whole in host memory; make one "
                                     "that does not fit there on device meta, by accelerate's init_empty_weights(), "
                                     "and give initialize() its weights=")
        return self

    def __exit__(self, *_):
        return False


class GatheredParameters:
    """A context in which parameters have their values, to be read; with `modifier_rank` also to be written.

    They are copies beside the engine's memory, in the type of training: a context over all of a model takes room for
    all of it, as DeepSpeed's does on the GPU. What was written reaches the fp32 master when the context ends; an
    element that still has its value keeps its master's exact bits. Parameters that are not an engine's have their
    values anyway. Of several ranks, which all gather, what rank `modifier_rank` has written counts, on all of them.
    `fwd_module`: has no effect, as weights are lent to whoever reads them.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        one = isinstance(params, torch.Tensor)
        self._params = {id(each): each for each in ([params] if one else list(params))} if enabled else {}
        self._writes, self._writer = modifier_rank is not None, modifier_rank
        self._gathered = []

    def __enter__(self):
        try:
            for (engine, owner), members in self._by_block().items():
                if self._writes and engine.ranks is not None and self._writer not in range(engine.ranks.count):
                    raise Error("invalid_argument", f"GatheredParameters: modifier_rank is {self._writer}, and ranks "
                                                    f"are 0 to {engine.ranks.count - 1}; name one of them")
                block = next(each for each in engine._blocks if owner in each.engine_blocks)
                with engine.weights_of(block):
                    copies = [(parameter, parameter.detach().clone()) for parameter in members]
                for parameter, copy in copies:
                    come_back(parameter)
                    parameter.data = copy
                    self._gathered.append(parameter)
        except BaseException:
            self._let_go()
            raise
        return self

    def _by_block(self):
        found = collections.defaultdict(list)
        for parameter in self._params.values():
            if isinstance(parameter, AwayParameter):
                found[values.engine_of(parameter), parameter._spillway_place[0]].append(parameter)
        return found

    def __exit__(self, kind, error, _):
        # A block that ran meanwhile has sent its parameters away, which it refuses for those that were written to.
        now = {id(parameter): (parameter, parameter.data) for parameter in self._gathered
               if not isinstance(parameter, AwayParameter)}
        self._let_go()
        if kind is None or issubclass(kind, Exception):
            self._hear(error)
        if kind is not None:
            return
        changed = {}
        for parameter, written in now.values():
            before = self._weight(parameter)
            same = (written == before) | (written.isnan() & before.isnan())
            if not same.all():
                changed[parameter] = written, same
        self._refuse_lost(now, [parameter._spillway_names[0] for parameter in changed])
        self._write(now, changed)

    def _hear(self, error):
        """What the context has raised on one of several ranks: the others raise it, too."""
        ranks = next((values.engine_of(parameter).ranks for parameter in self._gathered), None)
        if ranks is not None:
            ranks.hear(error)

    def _refuse_lost(self, now, changed):
        """Of several ranks all raise what one of them has lost."""
        if self._writes:
            return
        ranks = self._ranks(now)
        for name in changed if ranks is None else sum(ranks.each(changed), []):
            raise Error("invalid_argument", f"{name}: was written to in GatheredParameters without modifier_rank, "
                                            "which is lost; give modifier_rank=0")

    def _write(self, now, changed):
        """Of several ranks what the one that writes has changed, which all write."""
        if not self._writes:
            return
        ranks, members = self._ranks(now), [parameter for parameter, _ in now.values()]
        numbers = [number for number, parameter in enumerate(members) if parameter in changed]
        for number in numbers if ranks is None else ranks.same(numbers, self._writer):
            parameter = members[number]
            value = values.read(parameter)
            if ranks is None or ranks.rank == self._writer:
                written, same = changed[parameter]
                value = torch.where(same.cpu(), value, written.cpu().float())
            values.write(parameter, value, root=self._writer)

    @staticmethod
    def _ranks(now):
        return next((values.engine_of(parameter).ranks for parameter, _ in now.values()), None)

    @staticmethod
    def _weight(parameter):
        engine = values.engine_of(parameter)
        block = next(each for each in engine._blocks if parameter._spillway_place[0] in each.engine_blocks)
        with engine.weights_of(block):
            return parameter.detach().clone()

    def _let_go(self):
        for parameter in self._gathered:
            if not isinstance(parameter, AwayParameter):
                values.engine_of(parameter)._versions[id(parameter)] = parameter._version
                go_away(parameter)


def register_external_parameter(module, parameter):
    """Has no effect: a weight is lent to whoever reads it."""
    if not isinstance(module, torch.nn.Module):
        raise RuntimeError(f"register_external_parameter: {type(module).__name__} is no torch.nn.Module")
    if not isinstance(parameter, torch.nn.Parameter):
        raise RuntimeError(f"register_external_parameter: {type(parameter).__name__} is no torch.nn.Parameter")


unregister_external_parameter = register_external_parameter


def unwrap_model_for_generation(model):
    """A context with the model as it is: each weight is fetched once per forward pass, by generate() too."""
    return contextlib.nullcontext(model)
