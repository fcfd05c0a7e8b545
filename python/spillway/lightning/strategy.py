"""Lightning's strategy on a Spillway engine: StrategyMixin, which __init__.py puts in front of
ParallelStrategy. Several processes are ranks of the engine: processes.py.

    Trainer.fit ─> setup             configure_optimizers, then the engine, which takes the weights
                   training_step     LightningModule's own; its forward runs block by block
                   optimizer.step    the closure, in it backward_of(loss); then step() below
                   save_checkpoint   a snapshot, and the Trainer's state beside it
"""
import contextlib
import gc
import importlib
import logging
import os
from collections.abc import Callable


from .. import log
from ..engine.optimizer import EngineSchedule
from ..library import Error
from ..sampler import words_without_promise
from ..trainer.config import found
from . import checkpoints
from . import config as lightning_config
from .engine import LightningEngine, weights_in
from .optimizer import configured, rate_of, section, serve
from .precision import check as check_precision
from .processes import ProcessesMixin


class StrategyMixin(ProcessesMixin):
    """Trains a LightningModule that does not fit the GPU, or the host.

    `config`: path or dict, a ds_config.json; None: the file that the environment variable
      SPILLWAY_CONFIG or PL_DEEPSPEED_CONFIG_PATH names, else weights and states in host memory.
      What it leaves open or calls "auto" is what the Trainer says. With an optimizer in it,
      configure_optimizers() is not called.
    `on_existing`: what to do with a store that is there: "refuse" or "replace". fit(ckpt_path=...)
      replaces it, unless "refuse" is said here.
    `snapshot`: one to begin with. `load_full_weights`: ckpt_path may be a file, of which the
      weights are taken.
    `blocks`, `example`, `weights`, `trace`, `aio`: as for Engine; names are those of the
      LightningModule's state_dict.
    `.engine` is there once a run has begun, `.report` is what its last step() returned. Errors:
    spillway.Error.
    """

    strategy_name = "spillway"
    package = None  # "lightning.pytorch" or "pytorch_lightning"
    classes = {}    # by package

    def __init__(self, config: str | os.PathLike | dict | None = None, *,
                 on_existing: str | None = None, blocks: list | None = None,
                 example: tuple | dict | None = None, weights: Callable | None = None,
                 snapshot: str | os.PathLike | None = None, trace: str | None = None,
                 aio: str | dict | None = None, load_full_weights: bool = False, accelerator=None,
                 checkpoint_io=None, precision_plugin=None):
        if on_existing not in (None, "refuse", "replace"):
            raise Error("invalid_argument", f"on_existing: '{on_existing}' is none of refuse, "
                                            "replace; fit(ckpt_path=...) goes on with a run")
        self.engine = self.report = None
        self.config = found(config, lightning_config.VARIABLES)
        self._on_existing, self._snapshot, self._weights = on_existing, snapshot, weights
        self._options = {"blocks": blocks, "example": example, "trace": trace, "aio": aio}
        self.load_full_weights = load_full_weights
        self._loaded = None  # a checkpoint that the run begins with
        self._is_set_up, self._served, self._room, self._spoke_of_rows = False, None, None, False
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io,
                         precision_plugin=precision_plugin)

    # -- what a Trainer sets -----------------------------------------------------------------------

    def _of(self, name):
        """A module of the package that the Trainer is of."""
        return importlib.import_module(f"{self.package}.{name}")

    @property
    def accelerator(self):
        return self._accelerator

    @accelerator.setter
    def accelerator(self, accelerator):
        """A Trainer sets it first. The strategy becomes one of its package, and is the same
        otherwise."""
        packages = [package for package in self.classes for kind in type(accelerator).__mro__
                    if kind.__module__.startswith(package + ".")]
        if packages and self.package not in packages:
            if type(self) is not self.classes[self.package]:
                raise Error("invalid_argument", f"{type(self).__name__}: is of {self.package}, "
                                                f"and the Trainer of {packages[0]}; derive it "
                                                "from "
                                                f'spillway.lightning.strategy_of("{packages[0]}")')
            self.__class__ = self.classes[packages[0]]
            self.precision_plugin = self._precision_plugin
        self._accelerator = accelerator

    @property
    def precision_plugin(self):
        return self._precision_plugin or self._of("plugins").Precision()

    @precision_plugin.setter
    def precision_plugin(self, plugin):
        own = self.classes[self.package].precision_kind
        self._precision_plugin = plugin and own(check_precision(plugin), self)

    @property
    def checkpoint_io(self):
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, plugin):
        raise Error("unsupported", f"{type(plugin).__name__}: would not be asked; the engine "
                                   "writes checkpoints, as directories")

    # -- the module --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init=None):
        """In host memory, whatever the device: the engine takes the weights from there."""
        if empty_init:
            raise Error("unsupported", "init_module(empty_init=True): make the module on device "
                                       "meta in configure_model, by accelerate's "
                                       "init_empty_weights(), which leaves buffers alone, and "
                                       "give SpillwayStrategy weights=, or fit(ckpt_path=…)")
        with self.precision_plugin.tensor_init_context():
            yield

    def model_to_device(self):
        """What has no parameters, metrics say; the engine moves the rest."""
        for part in self.lightning_module.modules():
            if next(part.parameters(), None) is None:
                part.to(self.root_device)
            elif isinstance(part, self._of("core.module").LightningModule):
                part._device = self.root_device

    def _trains(self, trainer):
        return trainer.state.fn == self._of("trainer.states").TrainerFn.FITTING

    def setup(self, trainer):
        self.accelerator.setup(trainer)
        module, training = self.lightning_module, self._trains(trainer)
        overridden = self._of("utilities.model_helpers").is_overridden
        lightning_config.refuse(trainer, module, lambda hook: overridden(hook, module),
                                self.processes)
        self._room = trainer.default_root_dir
        if training or module.__dict__.get("_spillway_engine") is not self.engine:
            self._served = None  # an evaluation leaves it: a checkpoint is saved with its rates
        self.model_to_device()
        asked = self._ask(trainer) if training else self._asked_before()
        planned = lightning_config.filled(self.config, trainer, module,
                                          self.precision_plugin.precision, self.root_device, asked,
                                          self.processes)
        self._make_engine(planned, training)
        if training:
            self.engine.fitted = True
            self._serve()
        self._is_set_up = True

    def _ask(self, trainer):
        """configure_optimizers(), and what the configuration says of it; None: it has an optimizer
        itself."""
        self.setup_optimizers(trainer)
        if not self.optimizers:
            return None
        optimizer = self.optimizers[0]
        groups = self._loaded.own.get("groups") if self._loaded else None
        if groups is not None:  # as PyTorch's optimizers take them
            if len(groups) != len(optimizer.param_groups):
                raise Error("invalid_argument", f"{self._loaded.path}: has {len(groups)} groups "
                                                "of parameters, and configure_optimizers gives "
                                                f"{len(optimizer.param_groups)}")
            for here, saved in zip(optimizer.param_groups, groups):
                here.update(saved)
        return section(optimizer, self.lightning_module)

    def _asked_before(self):
        """What a checkpoint was trained with: its snapshot belongs to that optimizer, also where
        nothing is trained."""
        optimizer = self._loaded.own.get("optimizer") if self._loaded else None
        return (optimizer, []) if optimizer and not self.config.get("optimizer") else None

    def setup_optimizers(self, trainer):
        self.optimizers, self.lr_scheduler_configs = [], []
        if self.config.get("optimizer"):
            log.say(logging.INFO, "configure_optimizers: is not called; the configuration has an "
                                  "optimizer")
            return
        init = self._of("core.optimizer")
        optimizers, schedules = init._init_optimizers_and_lr_schedulers(self.lightning_module)
        if len(optimizers) != 1 or len(schedules) > 1:
            raise Error("unsupported", f"configure_optimizers: gives {len(optimizers)} optimizers "
                                       f"and {len(schedules)} schedulers; a model is trained by "
                                       "one optimizer, with one scheduler or none")
        if isinstance(optimizers[0], init._MockOptimizer):
            raise Error("invalid_argument", "configure_optimizers: gives no optimizer; return "
                                            "one, or name it in the configuration's section "
                                            "optimizer")
        if self.config.get("scheduler"):
            raise Error("invalid_argument", "scheduler: is the configuration's, beside an "
                                            "optimizer of configure_optimizers; name both there, "
                                            "or neither")
        lightning_config.refuse_schedulers(schedule.scheduler for schedule in schedules)
        self.optimizers, self.lr_scheduler_configs = optimizers, schedules

    # -- the engine --------------------------------------------------------------------------------

    def _make_engine(self, planned, training):
        module, loaded = self.lightning_module, self._loaded
        kept = module.__dict__.get("_spillway_engine")
        weights = loaded.weights() if loaded and loaded.weights else \
            contextlib.nullcontext(self._weights)
        snapshot = loaded.snapshot if loaded else self._snapshot
        with weights as given:
            if kept is None:
                self.engine = self._made(planned, training, snapshot, given)
            elif kept._handle is None:
                raise Error("invalid_argument", "module: its engine has been closed, or has "
                                                "ended; make module and Trainer anew")
            else:
                self.engine = kept
                self._go_on(planned, training, loaded and (snapshot, given))
        if loaded:
            loaded.check(self.engine)
            loaded.load_buffers(module)
        for part in module.modules():
            if isinstance(part, self._of("core.module").LightningModule):
                part._dtype = self.engine.dtype

    def _made(self, planned, training, snapshot, weights):
        # Module and engine refer to each other: a run that failed may have left both, and the store.
        gc.collect()
        seed = os.environ.get("PL_GLOBAL_SEED")  # of seed_everything()
        try:
            made = LightningEngine(self.lightning_module, planned, snapshot=snapshot,
                                   weights=weights, on_existing=self._existing(training),
                                   seed=None if seed is None else int(seed), **self._options)
        except Error as error:  # says what an engine can do, and a Trainer cannot
            if training or error.remedy != "resume_or_replace":
                raise error.with_resume("fit(ckpt_path=PATH), of a checkpoint") from None
            raise error.instead("name another nvme_path to evaluate with, or say "
                                'on_existing="replace"') from None
        made.planned = planned
        return made

    def _go_on(self, planned, training, begin):
        """With an engine of an earlier run, of this Trainer or another. As an optimizer of
        PyTorch's is made anew for each fit(), and has no states then, so are the engine's."""
        kept, words = self.engine, lightning_config.words
        if begin or (training and (kept.fitted or words(planned) != words(kept.planned))):
            kept.begin_again(planned, self._options["aio"], self._room, self._existing(training),
                             *(begin or ()))
            kept.planned = planned

    def _existing(self, training):
        return self._on_existing or ("replace" if self._loaded and training else "refuse")

    def _serve(self):
        if self.optimizers:
            serve(self.optimizers[0], self, dict(self.lightning_module.named_parameters()))
            self.optimizers, self._served = self.optimizers, self.optimizers[0]
            return
        self.optimizers = [configured(self.engine.settings["optimizer.type"], self, self.engine)]
        if self.config.get("scheduler"):
            schedule = EngineSchedule(self.optimizers[0])
            kind = self._of("utilities.types").LRSchedulerConfig
            self.lr_scheduler_configs = [kind(schedule, interval="step")]

    def process_dataloader(self, dataloader):
        groups = self.engine.settings["spillway.sum_groups"] if self.engine else 1
        if groups > 1 and self.lightning_module.trainer.training and not self._spoke_of_rows and \
                (words := words_without_promise(dataloader)) is not None:
            self._spoke_of_rows = True
            log.say(logging.WARNING, words)
        return super().process_dataloader(dataloader)

    # -- a step ------------------------------------------------------------------------------------

    def training_step(self, *arguments, **keywords):
        self.engine.seeds.begin()  # of what it draws before the model's forward, too
        return super().training_step(*arguments, **keywords)

    def _carry_rate(self):
        if self._served is not None:
            self.engine.optimizer.param_groups[0]["lr"] = rate_of(self._served)

    def backward_of(self, loss, retain_graph=False):
        self._carry_rate()
        # Lightning has divided it by accumulate_grad_batches, or who optimizes by hand has.
        self.engine.backward(loss, scale_wrt_gas=False, retain_graph=retain_graph)

    def step(self):
        self._carry_rate()
        report = self.engine.step(early=True)
        self.report = self.report if report is None else report

    def on_exception(self, exception):
        if self.engine is not None:
            with contextlib.suppress(Error):  # so that save_checkpoint() has the last whole step
                self.engine.discard_step()

    # -- checkpoints -------------------------------------------------------------------------------

    @property
    def lightning_restore_optimizer(self):
        return False  # the snapshot has its states

    def lightning_module_state_dict(self):
        return {}  # the snapshot has the weights

    def optimizer_state(self, optimizer):
        return {}

    def save_checkpoint(self, checkpoint, filepath, storage_options=None):
        if storage_options is not None:
            raise Error("unsupported", "storage_options: have no effect; checkpoints are "
                                       "directories of a local file system, so leave them out")
        own = None
        if "optimizer_states" in checkpoint:  # else save_weights_only
            own = {"step": self.engine.current_step, "groups": self._groups(),
                   "optimizer": self.engine.planned.get("optimizer")}
        state = {name: value for name, value in checkpoint.items()
                 if name not in ("state_dict", "optimizer_states")}
        checkpoints.save(self.engine, state, filepath, own)

    def _groups(self):
        """Rates and settings of the module's optimizer; None: the configuration has it."""
        return self._served and [{name: value for name, value in group.items() if name != "params"}
                                 for group in self._served.param_groups]

    def load_checkpoint(self, checkpoint_path, weights_only=None):
        self._loaded = checkpoints.load(checkpoint_path, weights_in, self.load_full_weights)
        if not self._loaded.snapshot and self._trains(self.lightning_module.trainer):
            if "lr_schedulers" not in self._loaded.state:
                raise Error("invalid_argument", f"{self._loaded.path}: has weights alone "
                                                "(save_weights_only), for evaluations; take a "
                                                "whole checkpoint to go on from")
            log.say(logging.WARNING, f"{self._loaded.path}: has weights alone, so the optimizer "
                                     "begins anew")
        return self._loaded.state

    def load_model_state_dict(self, checkpoint, strict=True):
        """Before setup(), which makes the engine, there is nothing to do. A tuner loads one in
        mid-run."""
        if self._is_set_up:
            self._make_engine(self.engine.planned, False)
            if self._served is not None:
                for here, saved in zip(self._served.param_groups, self._loaded.own["groups"]):
                    here.update(saved)

    def load_optimizer_state_dict(self, checkpoint):
        pass

    def teardown(self):
        """The engine stays, and so does the model: its weights are read from there."""
        self._is_set_up, self._loaded = False, None
        if self.engine is not None and self.engine._handle is not None:
            try:
                self.engine.flush()
            except Error as error:  # the model may still be saved
                log.say(logging.WARNING, str(error))
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        super().teardown()
