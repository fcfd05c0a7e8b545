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
    values anyway. `fwd_module`: has no effect, as weights are lent to whoever reads them.
    """

    def __init__(self, params, modifier_rank=None, fwd_module=None, enabled=True):
        one = isinstance(params, torch.Tensor)
        self._params = {id(each): each for each in ([params] if one else list(params))} if enabled else {}
        self._writes = modifier_rank is not None
        self._gathered = []

    def __enter__(self):
        try:
            for (engine, owner), members in self._by_block().items():
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

    def __exit__(self, kind, *_):
        # A block that ran meanwhile has sent its parameters away, which it refuses for those that were written to.
        now = {id(parameter): (parameter, parameter.data) for parameter in self._gathered
               if not isinstance(parameter, AwayParameter)}
        self._let_go()
        for parameter, written in now.values() if kind is None else ():
            before = self._weight(parameter)
            same = (written == before) | (written.isnan() & before.isnan())
            if same.all():
                continue
            if not self._writes:
                raise Error("invalid_argument", f"{parameter._spillway_names[0]}: was written to in GatheredParameters "
                                                "without modifier_rank, which is lost; give modifier_rank=0")
            values.write(parameter, torch.where(same.cpu(), values.read(parameter), written.cpu().float()))

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
