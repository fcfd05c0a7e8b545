"""What a loop written for DeepSpeed changes of its engine in mid-run, and takes out: a part of DeepSpeedEngine."""
import logging

import torch

from .. import log
from ..engine import buffers, values
from ..engine.module import refuse_forgotten
from ..engine.optimizer import EngineOptimizer
from ..engine.uses import open_again
from ..library import OPTIMIZERS, Error
from .parked import Parked
from .zero import GatheredParameters


class StatesOptimizer(EngineOptimizer):
    """An EngineOptimizer whose states are read and written by name, in CPU memory, as PyTorch's are."""

    def _trained(self):
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _names(self):
        return tuple(OPTIMIZERS[self.engine.settings["optimizer.type"]])

    def _counts(self):
        """Whether a step's update depends on how many came before it."""
        return "exp_avg_sq" in self._names()

    def state_dict(self):
        """It takes 4 bytes a parameter and state. "step" is the engine's count, which no load_state_dict() sets."""
        trained, numbers = self._trained(), {}
        for number, parameter in enumerate(trained):
            numbers[id(parameter)] = number
        counted = {"step": torch.tensor(float(self.engine.current_step))} if self._counts() else {}
        state = {number: {**counted, **{name: values.read(parameter, values.STATES[name]) for name in self._names()}}
                 for number, parameter in enumerate(trained)}
        groups = [{**group, "params": [numbers[id(parameter)] for parameter in group["params"]]}
                  for group in self.param_groups]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict):
        state, groups = state_dict["state"], state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise Error("invalid_argument", f"load_state_dict: its groups have "
                                            f"{[len(group['params']) for group in groups]} parameters, and those here "
                                            f"{[len(group['params']) for group in self.param_groups]}; give that of "
                                            "the same model and groups")
        entries = [state.get(number, {}) for group in groups for number in group["params"]]
        for number, entry in enumerate(entries):
            missing = [name for name in self._names() if name not in entry]
            if missing:
                raise Error("invalid_argument", f"load_state_dict: parameter {number} has no {' and no '.join(missing)}"
                                                "; give that of the same optimizer, after a step")
        made, here = {int(entry["step"]) for entry in entries if "step" in entry}, self.engine.current_step
        if self._counts() and made - {here}:
            log.say(logging.WARNING, f"load_state_dict: its states are of {max(made)} updates, and the engine's next "
                                     f"one is number {here + 1}, as which it corrects their bias; load_checkpoint() "
                                     "brings the count, too")
        for parameter, entry in zip(self._trained(), entries):
            for name in self._names():
                values.write(parameter, entry[name], values.STATES[name])
        for group, saved in zip(self.param_groups, groups):
            group.update((name, value) for name, value in saved.items() if name != "params")


class Adjusted:
    _boundary = None     # that set_gradient_accumulation_boundary() said
    _micro_batch = None  # rows that set_train_micro_batch_size() said
    _parked = None       # while states are offloaded

    # -- rates and batches --------------------------------------------------------------------------------------------

    def set_lr(self, rate):
        """Of all groups, from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def set_train_batch_size(self, train_batch_size):
        """By the number of micro-batches of a step, between two steps. The engine is planned once more."""
        rows = self.train_micro_batch_size_per_gpu() * self._processes
        if train_batch_size <= 0 or train_batch_size % rows:
            raise ValueError(f"Train batch size must be divisible by micro-batch data parallelism: {train_batch_size} "
                             f"by {rows}")
        if self._micro_batches:
            raise Error("invalid_argument", f"set_train_batch_size: the step has had {self._micro_batches} of its "
                                            f"{self._accumulation} micro-batches; call it after step()")
        micro_batches = train_batch_size // rows
        if micro_batches == self._accumulation:
            return
        self._layout.accumulate(micro_batches)
        open_again(self)
        self._accumulation = micro_batches
        self._begin_step()

    def set_train_micro_batch_size(self, micro_batch_size):
        """What is counted as a micro-batch's rows; it has as many as the model is given."""
        self._micro_batch = micro_batch_size

    def train_micro_batch_size_per_gpu(self):
        return super().train_micro_batch_size_per_gpu() if self._micro_batch is None else self._micro_batch

    def set_gradient_accumulation_boundary(self, is_boundary):
        """False: step() ends none; True: it ends one with the micro-batches that there are, at most those that the
        configuration, or set_train_batch_size(), says."""
        self._boundary = bool(is_boundary)

    # -- memory -------------------------------------------------------------------------------------------------------

    def offload_states(self, include=None, device="cpu", pin_memory=True, non_blocking=False):
        """Gives back all of the engine's memory, on GPU and host, between steps. Where there is no store the run is
        meanwhile a snapshot in the directory of temporary files, of several ranks rank 0's."""
        self._open()
        self._parked = Parked(self)

    def reload_states(self, non_blocking=False):
        """Where that fails, since memory is short, say, they stay offloaded, for another call."""
        parked, self._parked = self._parked, None
        if parked is None:
            return
        try:
            parked.come_back(self)
        except BaseException:
            if self._handle is None:
                self._parked = parked
            raise

    def empty_partition_cache(self):
        """Nothing is to be done: what is fetched lies in places that were planned before step 1."""

    def _open(self):
        if self._parked is not None:
            raise Error("invalid_argument", "engine: its states are offloaded; call reload_states()")
        return super()._open()

    # -- weights by name ----------------------------------------------------------------------------------------------

    def module_state_dict(self, destination=None, prefix="", keep_vars=False, exclude_frozen_parameters=False):
        """module.state_dict(), in CPU memory and the type of training."""
        state = self.module.state_dict(prefix=prefix, keep_vars=keep_vars)
        for name, parameter in self.module.named_parameters() if exclude_frozen_parameters else ():
            if not parameter.requires_grad:
                state.pop(prefix + name, None)
        if destination is None:
            return state
        destination.update(state)
        return destination

    def load_module_state_dict(self, state_dict, strict=True, custom_load_fn=None):
        """Other weights, which reach the fp32 master; states stay. Of several ranks rank 0's are taken.
        `custom_load_fn`: is called with src= and dst=, the module with all its weights."""
        refuse_forgotten(self)
        if custom_load_fn is not None:
            with GatheredParameters(self.module.parameters(), modifier_rank=0):
                custom_load_fn(src=state_dict, dst=self.module)
            return
        named = dict(self.module.named_parameters(remove_duplicate=False)) if _KEEPS_DUPLICATES else \
            {f"{prefix}.{name}" if prefix else name: parameter
             for prefix, module in self.module.named_modules(remove_duplicate=False)
             for name, parameter in module._parameters.items() if parameter is not None}
        self._load_values(state_dict.items(), named, strict)

    def _load_values(self, items, named, strict):
        """`items`: (name, tensor). Nothing is written where strict finds something missing."""
        kept = buffers.persistent(self.module)
        held = dict(items)
        given, first = {}, {}
        for name, parameter in named.items():
            first.setdefault(id(parameter), name)
            if name in held:
                given.setdefault(id(parameter), (parameter, held[name]))
        missing = [name for name, parameter in named.items() if id(parameter) not in given] + \
            [name for name in kept if name not in held]
        unexpected = [name for name in held if name not in named and name not in kept]
        other = [name for name, tensor in held.items() if (found := named.get(name, kept.get(name))) is not None and
                 found.shape != tensor.shape]

        def check():
            if other or (strict and (missing or unexpected)):
                words = [f"{what} {', '.join(names[:4])}{' …' if len(names) > 4 else ''}" for what, names in (
                    ("missing are", missing if strict else []), ("unknown are", unexpected if strict else []),
                    ("of another shape are", other)) if names]
                raise Error("invalid_argument", f"load: {'; '.join(words)}; give the weights of this model" +
                            ("" if other else ", or say strict=False (load_module_strict=False of load_checkpoint())"))
            return [first[parameter] for parameter in given]

        check() if self.ranks is None else self.ranks.alike("load: the weights", check)
        for parameter, tensor in given.values():
            values.write(parameter, tensor)
        for name, buffer in kept.items():
            if name in held:
                with torch.no_grad():
                    buffer.copy_(held[name])


_KEEPS_DUPLICATES = "remove_duplicate" in torch.nn.Module.named_parameters.__code__.co_varnames
