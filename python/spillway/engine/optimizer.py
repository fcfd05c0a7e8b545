"""What schedules and loops see of an engine in the place of PyTorch's optimizer: the learning rate, and the step."""
import weakref

import torch

from ..library import Error

SETTINGS = ("betas", "eps", "momentum", "weight_decay")  # PyTorch's, that the configuration sets; betas may move


class EngineOptimizer(torch.optim.Optimizer):
    """Its `lr` shows the next step's rate, by the configuration. What a caller sets there, or one of PyTorch's
    schedulers, is the rate of the steps that come, in place of the configuration's schedule."""

    def __init__(self, model, rate=0.0):
        super().__init__([{"params": [p for p in model.parameters() if p.requires_grad]}], {"lr": rate})
        self.engine = self._given = None  # the rate that was set
        self.known = {}                   # of SETTINGS, those that a group shows and the engine has
        self._shown = rate

    def attach(self, engine):
        group, self._given = self.param_groups[0], None
        self.engine = weakref.proxy(engine)  # which has this
        group["params"] = [p for p in engine.module.parameters() if p.requires_grad]
        self._shown = engine.next_learning_rate()
        if "initial_lr" not in group:
            group["lr"] = self._shown
        engine.optimizer = self

    def group(self):
        """The rate, and what schedulers keep beside it, as a checkpoint of DeepSpeed's or PyTorch's has them."""
        return {name: value for name, value in self.param_groups[0].items() if name != "params"}

    def step(self, closure=None):
        self._refuse_closure(closure)
        return self.engine.step()

    @staticmethod
    def _refuse_closure(closure):
        if closure is not None:
            raise Error("unsupported", "step: a closure is not called; run the model and engine.backward(loss) first, "
                                       "and call step() without one")

    def add_param_group(self, param_group):
        if self.param_groups:  # PyTorch's own constructor adds the first
            raise Error("unsupported", "add_param_group: what is trained is decided when the engine is made; "
                                       "spillway.parameter_groups of the configuration gives parameters rates and "
                                       "decays of their own")
        super().add_param_group(param_group)

    def zero_grad(self, *_, **__):
        if self.engine is not None:
            self.engine.zero_grad()

    def set_lr(self, rate):
        self.engine.set_learning_rate(rate)

    @property
    def cur_scale(self):
        """What backward() multiplies the next loss with; 1 without fp16."""
        return self.engine.current_loss_scale

    loss_scale = cur_scale

    def align(self):
        """Other groups follow the first one, in a class that has some."""

    def show(self, rate):
        if self._given is None:
            self.param_groups[0]["lr"] = self._shown = rate

    def given(self, rate):
        self.param_groups[0]["lr"] = self._given = rate

    def tell(self):
        """What was set here, to an engine that was made once more by the configuration."""
        library, handle = self.engine._library, self.engine._open()
        if self._given is not None:
            library.engine_set_learning_rate(handle, self._given)
        if "betas" in self.known and "optimizer.params.betas" in self.engine.settings:
            library.engine_set_betas(handle, *self.known["betas"])

    def before_backward(self):
        for name in SETTINGS:
            shown = self.param_groups[0].get(name, self.known.get(name))
            if name == "betas" and shown != self.known.get(name) and "optimizer.params.betas" in self.engine.settings:
                self.engine._library.engine_set_betas(self.engine._open(), *shown)
                self.known[name] = shown
            elif shown != self.known.get(name):
                raise Error("unsupported", f"param_groups[0]['{name}']: has no effect; say optimizer.params.{name} in "
                                           "the configuration, and delete it here")
        rate = self.param_groups[0]["lr"]
        # Where a scheduler is at work, which leaves "initial_lr", it decides, even while it says the same.
        if rate != self._expected() or (self._given is None and "initial_lr" in self.param_groups[0]):
            self.engine.set_learning_rate(rate)

    def _expected(self):
        return self._shown if self._given is None else self._given

    def before_step(self):
        rate, expected = self.param_groups[0]["lr"], self._expected()
        if rate != expected:
            raise Error("unsupported", f"learning rate: was {expected} in the step's backward pass, which may have "
                                       f"updated by it, and is {rate} now; set it between steps")

    def after_step(self, _report):
        self.show(self.engine.next_learning_rate())
        # Where PyTorch's schedulers look whether they are in turn: before 2.4, and since.
        self._step_count, self._opt_called = getattr(self, "_step_count", 0) + 1, True

    def state_dict(self):
        raise Error("unsupported", "optimizer: its states are Spillway's; engine.save(DIR) keeps them, or "
                                   "save_checkpoint() of an engine that initialize() made")

    def load_state_dict(self, state_dict):
        raise Error("unsupported", "optimizer: its states are Spillway's; they come of Engine(snapshot=DIR), or of "
                                   "load_checkpoint()")


class EngineSchedule:
    """The configuration's own scheduler, in the place of one of PyTorch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, *_):
        pass

    def get_last_lr(self):
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass
