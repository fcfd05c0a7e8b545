"""DeepSpeed's calls on a Spillway engine, for loops that were written for them: initialize().

    engine, optimizer, loader, scheduler = spillway.initialize(model=model, config="ds_config.json", training_data=data)
    for batch in loader:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint("checkpoints", client_state={"epoch": 1})

A checkpoint is DIR/TAG with a snapshot and, beside it, what no snapshot has: the client's state, the scheduler's and
the model's buffers. DIR/latest names the last one. A checkpoint of DeepSpeed's is taken as well.
"""
import contextlib
import json
import logging
import os
import pickle

import torch

from .. import log, whole_files
from ..checkpoint_names import plain
from ..engine import buffers, carried
from ..engine.engine import Engine
from ..engine.optimizer import EngineSchedule
from ..library import Error
from ..sampler import GlobalBatchSampler, words_without_promise
from . import checkpoints as deepspeed_import
from . import client, leaves, saved_weights
from .adjusted import Adjusted, StatesOptimizer
from .answers import Answers
from .checkpoints import LATEST
from .configured import Configured, CsvMonitor
from .comm import init_distributed
from .saved_weights import SNAPSHOT, STATE


class DeepSpeedEngine(Adjusted, Answers, Engine):
    """An Engine with DeepSpeed's names beside its own."""

    lr_scheduler = training_dataloader = None
    _report, _stepped = None, 0  # of the last step; micro-batches after which step() was called
    _accumulates = False         # inside of no_sync()
    _monitor = _losses = None    # csv_monitor; losses of the step's micro-batches, divided
    _all_used = False            # a step that leaves out a parameter is an error

    def __init__(self, model, config, **options):
        super().__init__(model, config, **options)
        StatesOptimizer(model).attach(self)
        self.global_samples = self.global_steps * self.train_batch_size()

    plain_decides = False

    @property
    def plain_factor(self):
        """loss.backward() is divided, too."""
        return 1 / self._accumulation

    def backward(self, loss, retain_graph=False, scale_wrt_gas=True):
        """Returns the loss as DeepSpeed's does: divided, and not scaled."""
        if self._accumulates and self.step_is_due:
            raise Error("invalid_argument", f"no_sync: the step has had its {self._accumulation} micro-batches; set "
                                            "gradient_accumulation_steps to the micro-batches of a step")
        super().backward(loss, scale_wrt_gas, retain_graph)
        divided = loss / self._accumulation if scale_wrt_gas else loss
        if self._monitor is not None:
            self._losses = (self._losses or 0) + float(divided)
        return divided

    @contextlib.contextmanager
    def no_sync(self):
        """Micro-batches in it are of the step that a later one ends: step() is refused, as with DeepSpeed. There is
        nothing else to keep back, and backward() counts to gradient_accumulation_steps in it, too."""
        if self._accumulates:
            raise Error("invalid_argument", "no_sync: is inside of another one; leave that before")
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def step(self, lr_kwargs=None, **options):
        """Engine.step(), and then the scheduler's. `lr_kwargs`: of the scheduler's step()."""
        if self._accumulates:
            raise Error("invalid_argument", "step: is inside of no_sync(); call it after that")
        if self._boundary:
            options["early"] = True
        made = self._micro_batches
        if self._all_used and made >= (1 if options.get("early") else self._accumulation):
            self._refuse_unused()
        report = None if self._boundary is False else self._step_unless_nan(**options)
        self._stepped = self._micro_batches
        self._count(report, made)
        if report is not None:
            self._report = report
            if self.lr_scheduler is not None and not report.skipped:
                self.lr_scheduler.step(**(lr_kwargs or {}))
            self._write_events()
        return report

    def _step_unless_nan(self, **options):
        """bf16 skips a step whose gradients are not finite, as DeepSpeed does with its check_grad_overflow; fp16's are
        the loss scaler's, and fp32's an error."""
        try:
            return super().step(**options)
        except Error as error:
            if error.code != "non_finite" or self.dtype != torch.bfloat16 or "nothing was changed" not in str(error):
                raise
            log.say(logging.WARNING, f"step: is skipped, as with DeepSpeed in bf16: {error}")
            self._report = None
            self.skipped_steps += 1
            self.uncounted_steps += 1
            return None

    def _refuse_unused(self):
        for block, index in self._layout.pushes:
            if not self._gradients.brought(block, index):
                name = self._layout.names[block][index]
                self.discard_step()
                raise Error("invalid_argument", f"{name}: has got no gradient in this step, and "
                                                "ignore_unused_parameters is false; say true, or let the model use it")

    def _write_events(self):
        if self._monitor is not None:
            scale = {"loss_scale": self.current_loss_scale} if self.fp16_enabled() else {}
            self._monitor.write(self.global_samples, train_loss=self._losses, lr=self.get_lr()[0], **scale)
            self._losses = None

    def _begin_step(self):
        super()._begin_step()
        self._stepped = 0

    def zero_grad(self, *_, **__):
        """Of DeepSpeed's it leaves alone what ZeRO has gathered, so that loops call it between micro-batches; as this
        is not what PyTorch's does, it is refused there."""
        if self._micro_batches > 0:
            raise Error("invalid_argument", f"zero_grad: the step has had {self._micro_batches} of its "
                                            f"{self._accumulation} micro-batches; leave it out, as step() begins anew "
                                            "by itself, or call discard_step() to forget them")
        super().zero_grad()

    def is_gradient_accumulation_boundary(self):
        """Of the micro-batch that comes, or that backward() had last: step() after it makes a step."""
        if self._boundary is not None:
            return self._boundary
        return self.step_is_due or self._stepped + 1 == self._accumulation

    @property
    def global_steps(self):
        return self.current_step + self.uncounted_steps

    def get_global_grad_norm(self):
        return self._report and self._report.gradient_norm

    def was_step_applied(self):
        return self._report is not None and self._micro_batches == 0 and not self._report.skipped

    def destroy(self):
        self.close()

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def save_16bit_model(self, save_dir, save_filename="pytorch_model.bin", exclude_frozen_parameters=False):
        """The weights that forward uses, and persistent buffers, in one file by torch.save(), with tied parameters
        once: always, whatever stage3_gather_16bit_weights_on_model_save says. It takes CPU memory for all of them, in
        the type of training; export() goes tile by tile, and writes what from_pretrained() takes."""
        state, first = self.module.state_dict(), {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if full not in state:
                    continue
                if exclude_frozen_parameters and not parameter.requires_grad:
                    del state[full]
                else:
                    state[full] = state[first.setdefault(id(parameter), full)]
        state = {plain(name): value for name, value in state.items()}

        def write():
            os.makedirs(save_dir, exist_ok=True)
            whole_files.write(os.path.join(save_dir, save_filename), lambda file: torch.save(state, file))

        self.on_first(write)
        return True

    def save_fp16_model(self, save_dir, save_filename="pytorch_model.bin"):
        return self.save_16bit_model(save_dir, save_filename)

    def save_checkpoint(self, save_dir, tag=None, client_state=None, save_latest=True, exclude_frozen_parameters=False):
        """All of it; exclude_frozen_parameters leaves the frozen weights out, and load_checkpoint() keeps those that
        its model has."""
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        if self.ranks is not None:
            self.ranks.alike("save_checkpoint: the tag", lambda: tag)
        folder = os.path.join(save_dir, tag)

        def check():
            if deepspeed_import.is_deepspeeds(folder):
                raise Error("exists", f"{folder}: already has a checkpoint of DeepSpeed's, and a load "
                                      "would find two; save under another tag, or into another directory")

        self.agree(check)
        self.on_first(lambda: os.makedirs(folder, exist_ok=True))
        self.save(os.path.join(folder, SNAPSHOT), replace=True, leave_out_frozen=exclude_frozen_parameters)
        state = {"step": self.current_step, "uncounted": self.uncounted_steps, "client_state": client_state or {},
                 "global_samples": self.global_samples, "skipped_steps": self.skipped_steps,
                 "lr_scheduler": self.lr_scheduler and self.lr_scheduler.state_dict(), "group": self.optimizer.group(),
                 "configured_lr": self.settings["optimizer.params.lr"],
                 "tied": self._tied_names(),
                 "frozen": [name for name, each in self.module.named_parameters() if not each.requires_grad],
                 "buffers": {name: buffer.cpu() for name, buffer in buffers.persistent(self.module).items()}}

        def write():
            with contextlib.suppress(FileNotFoundError):
                os.remove(os.path.join(folder, STATE))  # of the tag's earlier snapshot, which was whole until now
            whole_files.write(os.path.join(folder, STATE), lambda file: torch.save(state, file))
            whole_files.sync(save_dir)  # before something names what is in it
            if save_latest:
                whole_files.write(os.path.join(save_dir, LATEST), lambda file: file.write(tag.encode()))

        self.on_first(write)
        return True

    def load_checkpoint(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True,
                        load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None):
        """(path, client_state), or (None, None) where there is no checkpoint. The run begins once more, with the
        checkpoint and its learning rate, in mid-run, too; one that is refused changes nothing. What DeepSpeed has saved
        is loaded before the first step."""
        found = self._find(load_dir, tag) if self.ranks is None else \
            self.ranks.alike("load_checkpoint: the checkpoint", lambda: self._find(load_dir, tag))
        if found is None:
            log.say(logging.WARNING, f"{os.path.join(load_dir, LATEST)}: is not there, so nothing is loaded")
            return None, None
        tag, theirs = found
        folder = os.path.join(load_dir, tag)
        snapshot, beside = (os.path.join(folder, name) for name in (SNAPSHOT, STATE))
        partly = not (load_module_strict and load_optimizer_states) or load_module_only or custom_load_fn is not None
        if theirs and partly:
            raise Error("unsupported", f"{folder}: is DeepSpeed's, which is only loaded whole; load it so "
                                       "once, save it, and take the weights of the copy")
        if theirs:
            if self.current_step > 0:  # a schedule of PyTorch's is stepped from its beginning
                raise Error("invalid_argument", f"{folder}: is DeepSpeed's, and cannot be loaded after step "
                                                f"{self.current_step}; make model and engine anew, with "
                                                "on_existing=\"replace\", and load it before a step")
            self._load_deepspeeds(load_dir, tag, load_lr_scheduler_states)
            return folder, {}
        state = {}

        def read():
            try:
                state.update(torch.load(beside, map_location="cpu", weights_only=False))  # the client's is anything
            except (EOFError, RuntimeError, ValueError, AssertionError, pickle.UnpicklingError) as error:
                raise Error("corrupt", f"{beside}: is empty, cut short or damaged; take another checkpoint") from error
            if not partly:
                self._check_beside(folder, snapshot, state)

        self.agree(read)
        if partly:
            return self._load_partly(folder, state, load_module_strict, load_module_only, load_lr_scheduler_states,
                                     custom_load_fn)
        if self.current_step > 0:
            log.say(logging.INFO, f"{folder}: takes the place of step {self.current_step}, in the store, too")
        self.load_snapshot(snapshot)
        self.uncounted_steps = state.get("uncounted", 0)
        self.global_samples = state.get("global_samples", self.global_steps * self.train_batch_size())
        self.skipped_steps = state.get("skipped_steps", 0)
        for name, buffer in buffers.persistent(self.module).items():
            buffer.copy_(state["buffers"][name])
        if load_lr_scheduler_states and state["lr_scheduler"] and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        self._go_on_with_rate(folder, state)
        return folder, state["client_state"]

    @staticmethod
    def _find(load_dir, tag):
        """[tag, whether DeepSpeed has saved it]; None: there is no checkpoint."""
        if tag is None:
            latest = os.path.join(load_dir, LATEST)
            try:
                with open(latest, encoding="utf-8") as file:
                    tag = file.read().strip()
            except FileNotFoundError:
                return None
            except (OSError, UnicodeDecodeError) as error:
                raise Error("io", f"{latest}: cannot be read ({getattr(error, 'strerror', 'no text')}); name the "
                                  "checkpoint with tag=") from None
            if not tag:
                raise Error("corrupt", f"{latest}: is empty; name the checkpoint with tag=")
        folder = os.path.join(load_dir, str(tag))
        snapshot, beside = (os.path.join(folder, name) for name in (SNAPSHOT, STATE))
        missing = next((part for part in (snapshot, beside) if not os.path.exists(part)), None)
        theirs = deepspeed_import.is_deepspeeds(folder)
        if theirs and (os.path.exists(snapshot) or os.path.exists(beside)):
            raise Error("invalid_argument", f"{folder}: has a checkpoint of DeepSpeed's and one of Spillway's "
                                            f"({SNAPSHOT}, {STATE}); move the one away that is not to be loaded")
        if missing is not None and not theirs:
            raise Error("not_found", f"{missing}: is not there; take a checkpoint that save_checkpoint() has saved to "
                                     "its end")
        return [str(tag), theirs]

    def _load_partly(self, folder, state, strict, module_only, with_schedule, custom_load_fn):
        """The weights alone, into fp32 masters: states stay, and so does the store's step. DeepSpeed's counts come
        along, unless it is the module only."""
        weights = self._weights_in(folder, custom_load_fn is not None)
        weights.update((alias, weights[name]) for alias, name in state.get("tied", {}).items() if name in weights)
        weights.update(state["buffers"])
        self.discard_step()
        self.load_module_state_dict(weights, strict, custom_load_fn)
        if module_only:
            return folder, state["client_state"]
        self.uncounted_steps = state["step"] + state.get("uncounted", 0) - self.current_step
        self.global_samples = state.get("global_samples", self.global_samples)
        self.skipped_steps = state.get("skipped_steps", 0)
        if with_schedule and state["lr_scheduler"] and self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if with_schedule:
            carried.say_where_schedule_is(self, folder, state["step"])
        return folder, state["client_state"]

    def _weights_in(self, folder, everywhere):
        """A checkpoint's weights by name. Of several ranks the first one gives them, and the others have them without
        values, unless `everywhere`."""
        found = {}

        def read():
            found.update(saved_weights.tensors(folder))

        if self.ranks is None:
            read()
        elif everywhere:
            self.ranks.alike("load_checkpoint: the weights", read)
        else:
            self.on_first(read)
            for name, shape in self.ranks.same({name: [*tensor.shape] for name, tensor in found.items()}).items():
                found.setdefault(name, torch.empty(shape, device="meta"))
        return found

    def _tied_names(self):
        """Names of parameters that have another one, by which a checkpoint knows them."""
        known = {id(parameter): plain(name) for name, parameter in self.module.named_parameters()}
        found = {}
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, parameter in module._parameters.items():
                full = plain(f"{prefix}.{name}" if prefix else name)
                if parameter is not None and known[id(parameter)] != full:
                    found[full] = known[id(parameter)]
        return found

    def _check_beside(self, folder, snapshot, state):
        """That what lies beside a snapshot fits it and the model, before the run's own step is given up."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # what is wrong with it, the engine says
            with open(os.path.join(snapshot, "spillway.json"), encoding="utf-8") as file:
                step = json.load(file)["step"]
            if step != state["step"]:
                raise Error("corrupt", f"{folder}: its snapshot is of step {step}, and {STATE} of step "
                                       f"{state['step']}; take another checkpoint")
        for name, buffer in buffers.persistent(self.module).items():
            saved = state["buffers"].get(name)
            if saved is None or saved.shape != buffer.shape:
                raise Error("invalid_argument", f"{folder}: has {'no buffer' if saved is None else 'another shape of'} "
                                                f"{name}; load it with the model that it was saved with")

    def _go_on_with_rate(self, folder, state):
        """As with DeepSpeed the checkpoint's counts, which a scheduler of the caller's changes from there. The
        configuration's own scheduler computes the rate from the step, and may have other numbers than it had."""
        group, here = self.optimizer.param_groups[0], self.optimizer.param_groups[0]["lr"]
        saved, configured = state.get("group"), self.settings["optimizer.params.lr"]
        if saved is None:  # of an earlier version, which has the scheduler's alone
            saved = {"lr": here if self.lr_scheduler is None else self.lr_scheduler.get_last_lr()[0]}
        if isinstance(self.lr_scheduler, EngineSchedule):
            if saved["lr"] != here:
                log.say(logging.WARNING, f"{folder}: was saved with the learning rate {saved['lr']:g} for the next "
                                         f"step; the configuration's scheduler counts, which says {here:g}")
            return
        group.update(saved)
        self.optimizer.align()
        if configured != state.get("configured_lr", configured) or \
                (self.lr_scheduler is None and saved["lr"] != configured):
            log.say(logging.WARNING, carried.rate_that_counts(self, folder, saved["lr"]))

    def _load_deepspeeds(self, load_dir, tag, with_schedule):
        """A checkpoint that DeepSpeed has saved. Of a schedule it has the steps, which one of PyTorch's makes again."""
        schedule, folder = self.lr_scheduler, os.path.join(load_dir, tag)
        given = load_dir, tag, self._layout, self.dtype, self._values
        with (deepspeed_import.snapshot_of(*given) if self.ranks is None else
              deepspeed_import.snapshot_of_all(self.ranks, *given)) as (snapshot, facts):
            notes = [carried.continue_schedule(schedule, self.optimizer, facts)] if with_schedule or \
                isinstance(schedule, EngineSchedule) else []
            rate = self.optimizer.param_groups[0]["lr"]
            self.load_snapshot(snapshot)
        if not isinstance(schedule, EngineSchedule):
            saved = None if with_schedule and carried.continues(schedule, facts) else carried.rate_of(facts)
            if saved is not None and saved != rate:
                notes.append(carried.rate_that_counts(self, "", saved))
            self.optimizer.param_groups[0]["lr"] = rate if saved is None else saved
        self.uncounted_steps = max(0, facts["global_steps"] - facts["step"])
        self.global_samples = facts["samples"] or self.global_steps * self.train_batch_size()
        self.skipped_steps = facts["skipped_steps"]
        carried.say_what_came(folder, facts, self.module, carried.other_settings(self, facts), *notes)

    def _values(self, owner, index):
        """Of a parameter, before the first step: those that forward uses."""
        with self.weights_of(next(block for block in self._blocks if owner in block.engine_blocks)):
            return self._layout.members[owner][index].detach().clone()


def initialize(args=None, model=None, optimizer=None, model_parameters=None, training_data=None, lr_scheduler=None,
               distributed_port=None, mpu=None, dist_init_required=None, collate_fn=None, config=None, mesh_param=None,
               config_params=None, **options):
    """deepspeed.initialize(): (engine, optimizer, dataloader, lr_scheduler). With WORLD_SIZE processes, as torchrun
    starts them, each is a rank; unless `dist_init_required` is False their process group is made here.

    `optimizer`: one of torch.optim's AdamW, Adam, Adagrad, SGD or of DeepSpeed's, or a function that makes one; its
      hyper-parameters and groups are taken, and the engine's own has the states.
    `model_parameters`: all that are trained, or groups of them with `lr` and `weight_decay` of their own.
    `lr_scheduler`: one that was made for that optimizer, or a function that makes one. `options`: of Engine,
      on_existing= say.
    """
    given = (config, config_params, *(getattr(args, f"{name}_config", None) for name in ("deepspeed", "deepscale")))
    config = next((each for each in given if each is not None), None)
    if config is None:
        raise Error("invalid_argument", "initialize: no configuration; give config=, a ds_config.json or a dict")
    if model is None:
        raise Error("invalid_argument", "initialize: no model; give model=")
    groups = None if model_parameters is None else list(model_parameters)
    configured = Configured(config)
    _refuse(model, groups, lr_scheduler, dist_init_required, mpu or mesh_param, configured)
    optimizer, made = client.optimizer_of(optimizer, model, groups), None
    if optimizer is not None or any(isinstance(each, dict) for each in groups or ()):
        made = client.configure(configured.change(), optimizer, groups, model, configured.one_rate)
    if "blocks" not in options and (blocks := leaves.blocks_of(model)) is not None:
        options["blocks"] = blocks
    if dist_init_required is not False:
        init_distributed()
    engine = DeepSpeedEngine(model, configured.for_engine(), **options)
    engine._all_used = configured.all_used
    engine._monitor = CsvMonitor(configured.monitor) if configured.monitor and not engine.global_rank else None
    if made:
        client.GroupedOptimizer(engine, made)
    engine.lr_scheduler = client.scheduler_of(engine, configured, optimizer, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = _loader(engine, training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _loader(engine, data, collate_fn):
    """Each rank's part of the data; of an iterable's, what the script gives each."""
    last, ordered = engine.settings.get("dataloader_drop_last", False), not isinstance(
        data, torch.utils.data.IterableDataset)
    rows, groups, options = engine.train_micro_batch_size_per_gpu(), engine.settings["spillway.sum_groups"], {}
    if ordered and groups > 1:
        options["batch_sampler"] = GlobalBatchSampler(data, engine.train_batch_size(), rows, drop_last=last,
                                                      seed=engine.seeds.seed, num_replicas=engine.world_size,
                                                      rank=engine.global_rank)
    else:
        options = {"batch_size": rows, "drop_last": last, "shuffle": ordered and engine.ranks is None}
        if ordered and engine.ranks is not None:
            options["sampler"] = torch.utils.data.DistributedSampler(data, engine.world_size, engine.global_rank)
    loader = torch.utils.data.DataLoader(data, collate_fn=collate_fn, **options)
    if groups > 1 and (words := words_without_promise(loader)) is not None:
        log.say(logging.WARNING, words)
    return loader


def add_config_arguments(parser):
    """--deepspeed and --deepspeed_config, and what they were called before, for args= of initialize()."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    for name in ("deepspeed", "deepscale"):
        group.add_argument(f"--{name}", action="store_true", help="no effect; for the script's own use")
        group.add_argument(f"--{name}_config", help="path of a ds_config.json")
    return parser


def _refuse(model, groups, lr_scheduler, dist_init_required, parallel, configured):
    """What was asked for and is not done, all of it in one error."""
    grouped = any(isinstance(each, dict) for each in groups or [])
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    schedules = configured.has_schedule or configured.schedule is not None
    found = [words for wrong, words in (
        (groups is not None and not grouped and {id(each) for each in groups if each.requires_grad} != trained,
         "model_parameters: are not those that want gradients; say requires_grad_(False) to the others"),
        (lr_scheduler is not None and schedules, client.TWO_SCHEDULES),
        (parallel is not None, "mpu, mesh_param: ranks divide rows alone, and no model; leave them out"),
    ) if wrong]
    if found:
        raise Error("unsupported", "initialize: not with Spillway:\n  " + "\n  ".join(found))
