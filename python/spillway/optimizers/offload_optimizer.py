"""A torch.optim.Optimizer whose states are elsewhere: what spillway.AdamW and its kin have in common."""
import collections
import logging
import math
import os

import torch

from .. import log
from ..library import ON_EXISTING, OPTIMIZERS, Error, OptimizerReport
from ..pieces import floats
from . import kept_groups
from .layout import OptimizerLayout
from .offloaded_states import OffloadedStates
from .shared import change, common_step, renew, shared_by
from .states import Reader, StateTensor, loading, remove_leftovers
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
    `ranks`: the processes that train the model together, each of which keeps a part of the states: a process group of
      torch.distributed; "auto": all processes, where the script has initialized a group; None: this process alone. All
      of them make the same calls, in the same order: docs/optimizer_ranks.md.
    `average_gradients`: step() makes gradients their mean over ranks; False: they are alike on all before, as
      DistributedDataParallel makes them.

    `param_groups`, schedulers, closures, zero_grad(), clip_grad_norm_() and GradScaler are as in torch.optim.
    `state_dict()` is what torch.optim's optimizer of that name loads, and load_state_dict() takes its. A resumed
    optimizer has the param_groups of its last step, so that a schedule goes on with
    `last_epoch=optimizer.current_step - 1`.
    `blob`: up to 8,000 bytes that a step keeps as well. `report`: of the last step, an OptimizerStepReport.
    Errors: spillway.Error; where a gradient is not finite ("non_finite") nothing was changed.
    """

    library_type = None            # optimizer.type of a configuration
    counts_steps = False           # whether a state_dict has "step"
    states_from_the_start = False  # of parameters that have had no step, too

    def __init__(self, params, defaults, *, states="cpu", nvme_path=None, host_bytes=None, on_existing="refuse",
                 model=None, max_grad_norm=None, loss_scale=1.0, stream_gradients=False, ranks="auto",
                 average_gradients=True):
        self._states = self._stream = self._shared = None
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
                                            "the directory, or leave it out and use load(DIR)")
        self._shared, self._average, self._consolidated = shared_by(ranks), average_gradients, False
        if stream_gradients and self._shared.count > 1:
            raise Error("unsupported", "stream_gradients: leaves no gradient that could be averaged over "
                                       f"{self._shared.count} ranks; leave it out, or say ranks=None")
        self._shared.agree(lambda: self._shared.check_stores(paths))
        self._where = (states, [os.fspath(self._shared.place(path)) for path in paths], host_bytes, stream_gradients)
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
        layouts = []
        self._shared.agree(lambda: layouts.append(self._laid_out()))
        layout, begun = layouts[0], on_existing == "resume" or snapshot is not None
        made = self._made_together(layout, on_existing, snapshot)
        if begun:
            again = None if snapshot else lambda: self._offloaded(layout, "resume", None)
            made = common_step(self._shared, made, again)
        else:
            self._shared.begin(layout)
        self._take(made, begun, renewed=on_existing != "resume")

    def _laid_out(self):
        return OptimizerLayout(self.param_groups, self._model, self._shared.rank, self._shared.count)

    def _offloaded(self, layout, on_existing, snapshot):
        states, paths, host_bytes, streams = self._where
        for path in paths if self._shared.count > 1 else ():
            os.makedirs(path, exist_ok=True)
        return OffloadedStates(layout, self.library_type, states, paths, host_bytes, streams, on_existing, snapshot)

    def _made_together(self, layout, on_existing, snapshot):
        """On every rank, or on none."""
        made = []
        try:
            self._shared.agree(lambda: made.append(self._offloaded(layout, on_existing, snapshot)))
        except BaseException:
            for states in made:
                states.close()
            raise
        return made[0]

    def _take(self, made, begun, renewed):
        self._states, self._layout, self._begun = made, made.layout, False
        self._token = renew(self._shared, made) if renewed else kept_groups.token_of(made.blob())
        for path in made.paths:
            remove_leftovers(path)
        if begun:
            self._shared.agree(made.load_weights)
            self._shared.give(made.layout)
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
        initial = [self.initial_value(self.param_groups[group]) for group in self._layout.groups]
        if any(initial):  # in one commit with the weights
            self._states.import_state(0, [0] * len(initial), len(self.moments),
                                      lambda _, tensor, first, out, count: floats(out, count).fill_(initial[tensor]))
        else:
            self._states.import_weights()
        self._begun = True

    def _end(self, why="optimizer: it is closed"):
        if self._stream is not None:
            self._stream.detach()
            self._stream = None
        self._states.close(why)

    def close(self):
        """Gives memory and files back; the weights stay."""
        self._end()
        self._shared.close()

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
        def check():
            refuse(self.param_groups[-1], f"param_groups[{len(self.param_groups) - 1}]: ")
            self._laid_out()

        try:
            self._shared.agree(check)
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
        self._shared.agree(self._check_step)
        brought = self._shared.bring(self._layout, self._average)
        try:
            return self._made(loss) if brought else loss
        finally:
            self._states.carrier.release()

    def _check_step(self):
        if not isinstance(self.blob, bytes):
            raise Error("invalid_argument", f"blob: is a {type(self.blob).__name__}, not bytes; "
                                            "json.dumps(…).encode() makes some")
        for name, value in (("max_grad_norm", self.max_grad_norm or 1), ("loss_scale", self.loss_scale)):
            if not 0 < value < math.inf:
                raise Error("invalid_argument", f"{name}: is {value}; give a number above 0")
        self._layout.check_tensors()

    def _made(self, loss):
        step = []
        norms = self._shared.agree(lambda: self._begun_step(step))
        (held, addresses, finite, groups, group_of), norm, scale = step.pop(), None, 1 / self.loss_scale
        if self.max_grad_norm:
            norm = math.hypot(*norms) / self.loss_scale
            scale = min(1.0, self.max_grad_norm / (norm + 1e-6)) / self.loss_scale
        blob, kept = kept_groups.pack(self.param_groups, self.blob)
        blob = kept_groups.with_token(self._token, blob)
        if not kept:
            self._say_once("param_groups: are too many for a commit; a resumed run has those that it is made with")
        known, made = finite or norm is not None or self._shared.count > 1, []
        try:
            change(self._shared, self._states, self._end, lambda: made.append(
                self._states.make_step(addresses, groups, group_of, scale, blob, finite=known)))
            self._shared.give(self._layout)
        except Error:
            raise
        except BaseException:  # Ctrl-C, when the step was made
            self._show_states()
            raise
        self._show_states()
        del held
        self.report = OptimizerStepReport(*(getattr(made[0], name) for name in OptimizerStepReport._fields[:-1]), norm)
        if self._stream is not None:
            self._stream.attach()
        return loss

    def _begun_step(self, step):
        """All of a step that changes nothing yet. Returns the norm of this rank's gradients."""
        held, addresses = self._gradients()
        self._begin()
        finite = self._states.check_carried(addresses)
        norm = self._states.gradient_norm(addresses) if self.max_grad_norm or self._shared.count > 1 else 0
        step.append((held, addresses, finite, *self._hyperparameters()))
        return norm

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
            gradient = self._layout.part(tensor, gradient)
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

    @property
    def moments(self):
        """Names in a state_dict, and which of the library's states they are."""
        return OPTIMIZERS[self.library_type]

    def _show_states(self, reader=None, groups=None):
        """In `state`, what a step has made: tensors whose values are read when somebody looks."""
        if reader is None and (self._reader.touched or self._consolidated):
            self._reader.retire()
            reader = Reader(self._states)
        if reader is not None:
            self._reader, self._consolidated = reader, False
            self.state.clear()
        for tensor, count in enumerate(self._states.update_counts()):
            parameter = self._layout.parameters[tensor]
            group = (groups or self.param_groups)[self._layout.groups[tensor]]
            if parameter in self.state or not self.shows_states(group) or not (count or self.states_from_the_start):
                continue
            if self._shared.count > 1:  # so that state_dict() knows of them
                self.state[parameter] = {name: StateTensor(self._reader, self._refuse_unconsolidated, parameter.shape)
                                         for name in self.moments}
                continue
            initial = self.initial_value(group)
            shown = {"step": self._reader.step(tensor)} if self.counts_steps else {}
            shown.update((name, self._reader.moment(tensor, state, initial)) for name, state in self.moments.items())
            self.state[parameter] = shown

    def state_dict(self):
        """As torch.optim's: moments are fp32 on the CPU, read when they are looked at; with nvme_path they are mapped
        from files there. torch.save() writes them as plain tensors. On several ranks consolidate_state_dict() comes
        before it, on all of them."""
        if self._shared.count > 1 and not self._consolidated and (self.current_step or self.states_from_the_start):
            self._refuse_unconsolidated()
        if self.state and self._layout.dtype != torch.float32:
            self._say_once(f"state_dict: has the fp32 moments, which torch.optim rounds to {self._layout.dtype} when "
                           "it loads them, but not the exact master weights; save(DIR) has all")
        return super().state_dict()

    def consolidate_state_dict(self, to=0):
        """As ZeroRedundancyOptimizer's: brings all states to the rank `to`, or to all where it is None, for
        state_dict() there until the next step. All ranks call it, on one process too."""
        if self._shared.count == 1:
            return
        folder = self._where[1][0] if self._where[1] else None
        keep, found = to in (None, self._shared.rank), collections.defaultdict(dict)
        reader, counts, parts = Reader(self._states), {}, {}

        def read():
            if to is not None and to not in range(self._shared.count):
                raise Error("invalid_argument", f"consolidate_state_dict: to is {to}, and ranks are 0 to "
                                                f"{self._shared.count - 1}; name one of them, or None for all")
            for name, state in self.moments.items():
                parts[name] = [reader.moment(tensor, state, self.initial_value(self.param_groups[group])).plain()
                               for tensor, group in enumerate(self._layout.groups)]
            return dict(zip(self._layout.names, self._states.update_counts()))

        for of_rank in self._shared.agree(read):
            counts.update(of_rank)
        for name in self.moments:
            whole = self._shared.whole(self._layout, parts.pop(name), keep, folder)
            for (own, parameter, _), values in zip(self._layout.everything, whole):
                if keep and (counts[own] or self.states_from_the_start):
                    found[parameter].update({"step": torch.tensor(float(counts[own]))} if self.counts_steps else {})
                    found[parameter][name] = values
        if keep:
            self.state.clear()
            self.state.update(found)
            self._consolidated = True

    def _refuse_unconsolidated(self):
        raise Error("invalid_argument", f"state_dict: has a part of the states on each of {self._shared.count} ranks; "
                                        "call consolidate_state_dict() on all of them first")

    def _say_once(self, message):
        if message not in self._said:
            self._said.add(message)
            log.say(logging.INFO, message)

    @torch.no_grad()
    def load_state_dict(self, state_dict):
        """One of this optimizer or of torch.optim's of the same name; nothing is changed where it does not fit."""
        loads = []

        def begin():
            changed = state_dict
            for hook in getattr(self, "_optimizer_load_state_dict_pre_hooks", {}).values():
                returned = hook(self, changed)
                changed = changed if returned is None else returned
            given = loading(self, changed)
            for index, group in enumerate(given.groups):
                refuse(group, f"state_dict: param_groups[{index}]: ")
            own = given.is_own(self._reader, len(self.state))
            loads.append(given)
            return own

        own = self._shared.agree(begin)
        given = loads.pop()
        if not all(own):
            self._shared.agree(lambda: self._ready(given))
            token = self._shared.token()
            change(self._shared, self._states, self._end, lambda: self._import(given, token))
        self.param_groups = given.groups
        for hook in getattr(self, "_optimizer_load_state_dict_post_hooks", {}).values():
            hook(self)

    def _ready(self, given):
        given.read()
        self._layout.check_tensors()
        self._begin()

    def _import(self, given, token):
        before = self.current_step
        kept = kept_groups.pack(given.groups, kept_groups.unpack(self._states.blob())[1])[0]
        self._states.import_state(given.step, given.counts, len(self.moments), given.source,
                                  kept_groups.with_token(token, kept))
        self._token = token
        self._reader.retire()
        self._show_states(Reader(self._states), given.groups)
        if before:
            log.say(logging.WARNING, f"load_state_dict: step {given.step} of what is loaded takes the place of step "
                                     f"{before}" + (" of the store" if self._where[1] else ""))

    def save(self, directory, replace=False):
        """The exact form, a snapshot: weights, states, and of the last step `param_groups` and `blob`."""
        def write():
            self._begin()
            place = self._shared.place(os.fspath(directory))
            os.makedirs(os.path.dirname(os.path.abspath(place)), exist_ok=True)
            self._states.save(place, replace)

        self._shared.agree(write)

    @torch.no_grad()
    def load(self, directory):
        """Goes on with what save() wrote: also the weights become its. On an error everything is as before; on several
        ranks with nvme_path it may have ended."""
        directory = self._shared.place(os.fspath(directory))
        if self._stream is not None:
            self._stream.detach()
        if not self._where[1]:
            made = common_step(self._shared, self._made_together(self._layout, "replace", directory))
            self._states.close()
            return self._take(made, begun=True, renewed=True)
        self._shared.agree(lambda: self._shared.check_snapshot(directory))
        self._end()
        try:
            self._make("replace", directory)
        except BaseException:
            if self._shared.count == 1:  # of several, some may have replaced theirs
                self._make("resume" if self._begun else "replace")
            raise

    # -- the rest -------------------------------------------------------------------------------------------------

    def describe(self):
        """The facts of the plan, a line each."""
        return self._states.describe()

    def ledger(self):
        """(tier, purpose, bytes) of every reservation."""
        return self._states.ledger()
