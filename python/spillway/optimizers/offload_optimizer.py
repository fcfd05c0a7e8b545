"""A torch.optim.Optimizer whose states are elsewhere: what spillway.AdamW and its kin have in common."""
import collections
import logging
import math
import os

import torch

from .. import log
from ..library import ON_EXISTING, Error, OptimizerReport
from ..pieces import floats
from . import kept_groups
from .layout import OptimizerLayout
from .offloaded_states import OffloadedStates
from .states import Reader, loading, remove_leftovers
from .streaming import GradientStream, StreamedGradient, refuse_sparse

PLACES = ("cpu", "nvme")
REFUSED = {
    "amsgrad": "it keeps a third state; leave it False",
    "maximize": "leave it False, and negate the loss",
    "differentiable": "a step here is no part of a graph; leave it False",
}

OptimizerStepReport = collections.namedtuple(
    "OptimizerStepReport", [name for name, _ in OptimizerReport._fields_[1:]] + ["gradient_norm"])
OptimizerStepReport.__doc__ = """Of a step() of spillway.AdamW and its kin: `optimizer.report`.

`gradient_norm`: before clipping, without `loss_scale`; None without `max_grad_norm`. `stall_seconds`: of `seconds`,
waiting for reads and writes of states. `tile_hit_bytes`: of `tile_bytes`, in memory. `durable_step`: the last one that
survives any crash."""


def refuse(values, where=""):
    for name, instead in REFUSED.items():
        if values.get(name):
            raise Error("unsupported", f"{where}{name}: is not there in an optimizer whose states are elsewhere; "
                                       f"{instead}")


class Pickled:
    """What a pickled optimizer is when it is read."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise Error("unsupported", f"{self.__dict__.get('_name')}: was pickled without its states; make it anew, and "
                                   "load_state_dict() or load(DIR)")


class OffloadOptimizer(torch.optim.Optimizer):
    """Weights and gradients stay where PyTorch has them. States, and what makes 16-bit weights exact, are in host
    memory or on NVMe, planned and reserved when the optimizer is made.

    `states`: "cpu" (host memory) or "nvme".
    `nvme_path`: a directory on the drive, or a list of them; needed for states="nvme". With it every step is durable,
      weights included.
    `host_bytes`: the most host memory that it takes, as "8GiB" or a number; the default is what the plan asks for.
    `on_existing`: what to do with the states that nvme_path holds already: "refuse", "resume" (the weights become those
      of the last step, and param_groups its) or "replace".
    `model`: the torch.nn.Module; then tensors have its names, and max_grad_norm the bits of spillway.Engine.
    `max_grad_norm`: step() clips the norm of all gradients to it; None or 0: nothing is clipped.
    `loss_scale`: what the caller multiplies losses with; step() takes it out. May be set between steps.
    `stream_gradients`: a gradient goes to host memory as soon as backward() has it, and PyTorch's is freed.

    `param_groups`, schedulers, closures, zero_grad(), clip_grad_norm_() and GradScaler are as in torch.optim.
    `state_dict()` is what torch.optim's optimizer of that name loads, and load_state_dict() takes its. A resumed
    optimizer has the param_groups of its last step, so that a schedule goes on with
    `last_epoch=optimizer.current_step - 1`.
    `blob`: up to 8,000 bytes that a step keeps as well. `report`: of the last step, an OptimizerStepReport.
    Errors: spillway.Error; where a gradient is not finite ("non_finite") nothing was changed.
    """

    library_type = None            # optimizer.type of a configuration
    moments = {}                   # names in a state_dict, and which of the library's states they are
    counts_steps = False           # whether a state_dict has "step"
    states_from_the_start = False  # of parameters that have had no step, too

    def __init__(self, params, defaults, *, states="cpu", nvme_path=None, host_bytes=None, on_existing="refuse",
                 model=None, max_grad_norm=None, loss_scale=1.0, stream_gradients=False):
        self._states = self._stream = None
        self._said = set()
        if states not in PLACES:
            raise Error("invalid_argument", f"states: '{states}' is none of {', '.join(PLACES)}")
        if on_existing not in ON_EXISTING:
            raise Error("invalid_argument", f"on_existing: '{on_existing}' is none of {', '.join(ON_EXISTING)}")
        paths = [nvme_path] if isinstance(nvme_path, (str, os.PathLike)) else list(nvme_path or [])
        if states == "nvme" and not paths:
            raise Error("invalid_argument", 'states: is "nvme" without a path; give nvme_path= a directory on the '
                                            "drive")
        if on_existing == "resume" and not paths:
            raise Error("invalid_argument", 'on_existing: is "resume", and without nvme_path= nothing is kept; give '
                                            "the directory, or leave it away and use load(DIR)")
        self._where = (states, [os.fspath(path) for path in paths], host_bytes, stream_gradients)
        self._model = model
        self.max_grad_norm, self.loss_scale, self.report = max_grad_norm, loss_scale, None
        super().__init__(params, defaults)
        for index, group in enumerate(self.param_groups):
            refuse(group, f"param_groups[{index}]: ")
        self._make(on_existing)
        for line in self.describe():
            log.say(logging.INFO, line)
        if on_existing == "resume":
            log.say(logging.INFO, f"{type(self).__name__}: goes on after step {self.current_step}, with its weights "
                                  f"and param_groups: a rate of {float(self.param_groups[0]['lr']):g}")

    # -- making and ending ----------------------------------------------------------------------------------------

    def _make(self, on_existing, snapshot=None):
        """The library's side. It has begun when it has weights: of a store, a snapshot, or the first step."""
        layout = OptimizerLayout(self.param_groups, self._model)
        states, paths, host_bytes, streams = self._where
        made = OffloadedStates(layout, self.library_type, states, paths, host_bytes, streams, on_existing, snapshot)
        self._take(made, begun=on_existing == "resume" or snapshot is not None)

    def _take(self, made, begun):
        self._states, self._layout, self._begun = made, made.layout, False
        for path in made.paths:
            remove_leftovers(path)
        if begun:
            made.load_weights()
        groups, self.blob = kept_groups.unpack(made.blob())
        kept_groups.restore(groups, self.param_groups)
        self._begun = begun
        if self._where[-1]:
            self._stream = GradientStream(made)
            self._stream.attach()
        self._show_states(Reader(made))

    def _begin(self):
        """A new run's weights are what the parameters hold now."""
        if self._begun:
            return
        self._states.import_weights()
        self._begun = True
        initial = [self.initial_value(self.param_groups[group]) for group in self._layout.groups]
        if any(initial):
            self._states.import_state(0, [0] * len(initial), len(self.moments),
                                      lambda _, tensor, first, out, count: floats(out, count).fill_(initial[tensor]))

    def _end(self):
        if self._stream is not None:
            self._stream.detach()
            self._stream = None
        self._states.close()

    def close(self):
        """Gives memory and files back; the weights stay."""
        self._end()

    def __reduce_ex__(self, _):
        """A schedule's state_dict() may have the optimizer in it: OneCycleLR's had before PyTorch 2.0."""
        name = type(self).__name__
        log.say(logging.WARNING, f"{name}: is pickled without its states; state_dict() or save(DIR) has them")
        return Pickled, (name,)

    def __deepcopy__(self, _):
        raise Error("unsupported", f"{type(self).__name__}: its states are Spillway's, and cannot be copied with it; "
                                   "state_dict() or save(DIR) has them")

    def add_param_group(self, param_group):
        """Before the first step; parameters that join later would have no states planned."""
        if self._states is None:
            return super().add_param_group(param_group)
        if self._begun or any(isinstance(p.grad, StreamedGradient) for p in self._layout.parameters):
            raise Error("unsupported", "add_param_group: states are planned before the first step; give all groups "
                                       "when the optimizer is made")
        super().add_param_group(param_group)
        try:
            refuse(self.param_groups[-1], f"param_groups[{len(self.param_groups) - 1}]: ")
            OptimizerLayout(self.param_groups, self._model)
            self._end()
            self._make("replace")  # what it has made itself, and is empty
        except BaseException:
            self.param_groups.pop()
            self._end()
            self._make("replace")
            raise

    # -- a step ---------------------------------------------------------------------------------------------------

    @staticmethod
    def hyperparameters(group, count):
        """Hyperparameters of the library. `count`: the updates that a parameter has had."""
        raise NotImplementedError

    @staticmethod
    def initial_value(_):
        return 0.0

    @staticmethod
    def shows_states(_):
        return True

    @torch.no_grad()
    def step(self, closure=None):
        """Updates every parameter that has a gradient. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not isinstance(self.blob, bytes):
            raise Error("invalid_argument", f"blob: is a {type(self.blob).__name__}, not bytes; "
                                            "json.dumps(…).encode() makes some")
        for name, value in (("max_grad_norm", self.max_grad_norm or 1), ("loss_scale", self.loss_scale)):
            if not 0 < value < math.inf:
                raise Error("invalid_argument", f"{name}: is {value}; give a number above 0")
        self._layout.check_tensors()
        try:
            return self._made(loss)
        finally:
            self._states.carrier.release()

    def _made(self, loss):
        held, addresses = self._gradients()
        if not any(addresses):
            return loss
        self._begin()
        groups, group_of = self._hyperparameters()
        norm, scale = None, 1 / self.loss_scale
        finite = self._states.check_carried(addresses)
        if self.max_grad_norm:
            norm = self._states.gradient_norm(addresses) / self.loss_scale
            scale = min(1.0, self.max_grad_norm / (norm + 1e-6)) / self.loss_scale
        blob, kept = kept_groups.pack(self.param_groups, self.blob)
        if not kept:
            self._say_once("param_groups: are too many for a commit; a resumed run has those that it is made with")
        try:
            report = self._states.make_step(addresses, groups, group_of, scale, blob, finite=finite or norm is not None)
        except Error:
            raise
        except BaseException:  # Ctrl-C, when the step was made
            self._show_states()
            raise
        self._show_states()
        del held
        self.report = OptimizerStepReport(*(getattr(report, name) for name in OptimizerStepReport._fields[:-1]), norm)
        if self._stream is not None:
            self._stream.attach()
        return loss

    def _gradients(self):
        """What must be held on to in the step, and addresses by tensor, None where there is no gradient."""
        held, addresses = [], []
        for tensor, parameter in enumerate(self._layout.parameters):
            gradient = parameter.grad
            if gradient is None:
                addresses.append(None)
                continue
            if isinstance(gradient, StreamedGradient):
                gradient = gradient._spillway_memory
            else:
                refuse_sparse(self._layout.names[tensor], gradient)
            held.append(gradient)
            addresses.append(self._states.carrier.gradient(tensor, gradient))
        return held, addresses

    def _hyperparameters(self):
        """By group, and by the updates that a parameter has had where these count; and which is whose."""
        found, group_of = {}, []
        counts = self._states.update_counts()
        for index, group in enumerate(self.param_groups):
            refuse(group, f"param_groups[{index}]: ")
        for index, count in zip(self._layout.groups, counts):
            group = self.param_groups[index]
            key = (index, count if group.get("lr_decay") else 0)
            if key not in found:
                found[key] = (len(found), self.hyperparameters(group, count))
            group_of.append(found[key][0])
        return [values for _, values in found.values()], group_of

    # -- states in and out ----------------------------------------------------------------------------------------

    @property
    def current_step(self):
        """How many steps there were, also before a resume."""
        return self._states.current_step

    def _show_states(self, reader=None, groups=None):
        """In `state`, what a step has made: tensors whose values are read when somebody looks."""
        if reader is None and self._reader.touched:
            self._reader.retire()
            reader = Reader(self._states)
        if reader is not None:
            self._reader = reader
            self.state.clear()
        for tensor, count in enumerate(self._states.update_counts()):
            parameter = self._layout.parameters[tensor]
            group = (groups or self.param_groups)[self._layout.groups[tensor]]
            if parameter in self.state or not self.shows_states(group) or not (count or self.states_from_the_start):
                continue
            initial = self.initial_value(group)
            shown = {"step": self._reader.step(tensor)} if self.counts_steps else {}
            shown.update((name, self._reader.moment(tensor, state, initial)) for name, state in self.moments.items())
            self.state[parameter] = shown

    def state_dict(self):
        """As torch.optim's: moments are fp32 on the CPU, read when they are looked at; with nvme_path they are mapped
        from files there. torch.save() writes them as plain tensors."""
        if self.state and self._layout.dtype != torch.float32:
            self._say_once(f"state_dict: has the fp32 moments, which torch.optim rounds to {self._layout.dtype} when "
                           "it loads them, and not what weights are more exactly; save(DIR) has all")
        return super().state_dict()

    def _say_once(self, message):
        if message not in self._said:
            self._said.add(message)
            log.say(logging.INFO, message)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """One of this optimizer or of torch.optim's of the same name; nothing is changed where it does not fit."""
        for hook in getattr(self, "_optimizer_load_state_dict_pre_hooks", {}).values():
            changed = hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        given = loading(self, state_dict)
        for index, group in enumerate(given.groups):
            refuse(group, f"state_dict: param_groups[{index}]: ")
        if not given.is_own(self._reader, len(self.state)):
            self._import(given)
        self.param_groups = given.groups
        for hook in getattr(self, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self)

    def _import(self, given):
        given.read()
        self._layout.check_tensors()
        self._begin()
        before = self.current_step
        self._states.import_state(given.step, given.counts, len(self.moments), given.source)
        self._reader.retire()
        self._show_states(Reader(self._states), given.groups)
        if before:
            log.say(logging.WARNING, f"load_state_dict: step {given.step} of what is loaded takes the place of step "
                                     f"{before}" + (" of the store" if self._where[1] else ""))

    def save(self, directory, replace=False):
        """The exact form, a snapshot: weights, states, and of the last step `param_groups` and `blob`."""
        self._begin()
        self._states.save(directory, replace)

    @torch.no_grad()
    def load(self, directory):
        """Goes on with what save() wrote: also the weights become its. On an error everything is as before."""
        states, paths, host_bytes, streams = self._where
        if self._stream is not None:
            self._stream.detach()
        if not paths:
            made = OffloadedStates(self._layout, self.library_type, states, paths, host_bytes, streams, "replace",
                                   directory)
            self._states.close()
            return self._take(made, begun=True)
        self._end()
        try:
            self._make("replace", directory)
        except BaseException:
            self._make("resume" if self._begun else "replace")
            raise

    # -- the rest -------------------------------------------------------------------------------------------------

    def describe(self):
        """The facts of the plan, a line each."""
        return self._states.describe()

    def ledger(self):
        """(tier, purpose, bytes) of every reservation."""
        return self._states.ledger()
