"""Hugging Face's Trainer with a Spillway engine below it: Trainer, and Mixin for trainers that derive from theirs.

    trainer = spillway.Trainer(model=model, args=TrainingArguments(...), train_dataset=data, spillway="ds_config.json")
    trainer.train()

The loop is transformers' own. What it does with a model, an optimizer and gradients goes to the engine: backward, the
norm, the step, checkpoints and exports. Of several processes each is a rank, with the rows that accelerate gives it.
Transformers is imported when Trainer is first asked for.
"""
import contextlib
import logging
import os
import shutil
import tempfile
import weakref

import torch

from .. import log
from ..checkpoint_names import plain
from ..deepspeed import checkpoints as deepspeed_import
from ..engine import buffers, carried
from ..engine.engine import Engine
from ..engine.export import adapters
from ..engine.model_files import named_weights
from ..engine.module import caches_as_before, leave_caches_away
from ..engine.optimizer import EngineOptimizer, EngineSchedule
from ..library import Error
from ..pieces import values_of
from ..ranks import Ranks
from ..sampler import words_without_promise
from . import checkpoints as trainer_checkpoints
from .checkpoints import SCHEDULE, SNAPSHOT, STATE
from .config import check, filled, read, refuse
from .micro_batches import KEY, Together, why_not
from .untrained import Untrained, evaluated

OWN = ("create_optimizer", "get_optimizer_cls_and_kwargs")  # of other trainers
LEFT_OUT = shutil.ignore_patterns("*.safetensors", "pytorch_model*.bin")  # weights are the engine's


class TrainerOptimizer(EngineOptimizer):
    """With the norm, as the loop asks for it."""

    _is_accelerate_prepared = True  # accelerate leaves it as it is
    step_was_skipped = False        # accelerate asks

    def __init__(self, model, rate):
        super().__init__(model, rate)
        self.expected_norm()

    def step(self, closure=None):
        self._refuse_closure(closure)
        if self.engine.step(early=True) is None:
            raise Error("invalid_argument", "step: no loss has been through backward")

    def after_step(self, report):
        super().after_step(report)
        self.show(report.learning_rate)  # the trainer logs it as this step's
        self.step_was_skipped = report.skipped
        self.gradient_norm.fill_(report.gradient_norm)

    def expected_norm(self):
        """A number that the next step fills in: the loop asks for the norm before it steps, and reads it afterwards."""
        self.gradient_norm = torch.full((), float("nan"), dtype=torch.float64)
        return self.gradient_norm


class Mixin:
    """Put it before a trainer of transformers' or TRL's: `class MyTrainer(spillway.trainer.Mixin, SFTTrainer)`.

    `spillway`: path or dict, a ds_config.json. What it leaves open or calls "auto" is what TrainingArguments say.
    `on_existing`: what to do with a store that is there: "refuse" or "replace". train(resume_from_checkpoint=...)
      replaces it, unless "refuse" is said here.
    `blocks`, `example`, `weights`, `trace`, `aio`: as for Engine.
    `untrained_share`: the share of hbm_bytes and host_bytes that a model has which is not trained, a reference or a
      reward model; the default goes by sizes. Its engine is one of `.untrained.engines`.
    `.engine` is made by the first train(), evaluate() or predict(); None before. `.ranks`: the processes that torchrun
      or accelerate has started, which train one model; None where it is this one alone. All of them make the same
      calls, save_model() as well, and rank 0 writes. Errors: spillway.Error.
    """

    own_optimizers_are_refused = True  # where a class before transformers' has OWN, which are not called

    def __init__(self, *arguments, spillway=None, on_existing=None, blocks=None, example=None, weights=None, trace=None,
                 aio=None, untrained_share=None, **keywords):
        if spillway is None:
            raise Error("invalid_argument", 'spillway: is missing; give the path of a ds_config.json, or a dict')
        if on_existing not in (None, "refuse", "replace"):
            raise Error("invalid_argument", f"on_existing: '{on_existing}' is none of refuse, replace; "
                                            "train(resume_from_checkpoint=...) goes on with a run")
        self.engine, self.untrained, self.together = None, Untrained(untrained_share), Together()
        self.ranks, self._saved = None, False
        self._configuration, self._on_existing = read(spillway), on_existing
        self._engine_options = {"blocks": blocks, "example": example, "weights": weights, "trace": trace,
                                "aio": aio}
        self._snapshot, self._first_step, self._first_epoch, self._begun = None, 0, 0, False
        self._deepspeeds, self._facts = None, None  # a checkpoint of DeepSpeed's, and what is known of it
        self._planned = None  # the engine's configuration
        self._spoke_of_rows = False
        own = [f"{kind.__name__}.{name}" for kind in type(self).__mro__ for name in OWN if name in vars(kind)
               and kind is not Mixin and not kind.__module__.startswith(("transformers.", "spillway."))]
        if own and self.own_optimizers_are_refused:
            raise Error("unsupported", f"{', '.join(own)}: would not be asked; the optimizer is the configuration's, "
                                       'with spillway.parameter_groups for rates and decays of their own')
        for given in (*arguments, *keywords.values()):  # before a trainer loads a model for what is refused
            if isinstance(given, _arguments_class()):
                refuse(given)
        super().__init__(*arguments, **keywords)
        for name in ("optimizer", "lr_scheduler", "optimizer_cls_and_kwargs", "model_init"):
            if getattr(self, name, None) is not None:
                raise Error("unsupported", f"{name}: cannot be given; a model= is trained, by the optimizer of the "
                                           "configuration and the schedule of TrainingArguments")
        check(self._filled(None), aio, self.args.world_size)

    # -- the engine -----------------------------------------------------------------------------------------------

    def _filled(self, total_steps, left=True):
        """The configuration. `left`: with what models that are not trained have left of budgets."""
        decayed = set(self.get_decay_parameter_names(self.model))
        spared = [plain(n) for n, p in self.model.named_parameters() if p.requires_grad and n not in decayed]
        whole = filled(self._configuration, self.args, self.model, spared, total_steps)
        own = whole["spillway"]
        if isinstance(own, dict) and own.get(KEY) and (why := why_not(self, own)) is not None:
            own[KEY] = False
            self.together.said(why)
        return self.untrained.left_of(whole) if left else whole

    @property
    def _schedules(self):
        """The configuration has a scheduler, which the engine computes."""
        return bool(self._configuration.get("scheduler"))

    def _make_engine(self, total_steps):
        """`total_steps`: None outside of train()."""
        if total_steps is None and self._schedules and \
                "auto" in (self._configuration["scheduler"].get("params") or {}).values():
            raise Error("invalid_argument", 'scheduler.params: "auto" is filled in by train(); call it before '
                                            "evaluate() and predict(), or write numbers")
        planned = self._filled(total_steps)
        if self.engine is None:
            leave_caches_away(self.model)
            existing = self._on_existing or ("replace" if self._snapshot or self._deepspeeds else "refuse")
            try:
                with self._snapshot_to_begin_with() as snapshot:
                    self.engine = Engine(self.model, planned, on_existing=existing, snapshot=snapshot,
                                         ranks=self.ranks, **self._engine_options)
            except Error as error:  # says what an engine can do, and a trainer cannot
                raise trainer_checkpoints.instead_of_resume(error, self.args.output_dir, planned,
                                                            self._snapshot or self._deepspeeds) from None
            self._planned = planned
        if planned != self._planned:
            raise Error("invalid_argument", "train(): the configuration or TrainingArguments have changed since the "
                                            "engine was made; make model and trainer anew")

    @contextlib.contextmanager
    def _snapshot_to_begin_with(self):
        if self._deepspeeds is None:
            yield self._snapshot
            return
        layout = deepspeed_import.layout_of(self.model, self._engine_options["blocks"])
        frozen = values_of(layout, named_weights(self.model, self._engine_options["weights"]))
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else torch.float32
        given = self._deepspeeds, None, layout, dtype, frozen
        with (deepspeed_import.snapshot_of(*given) if self.ranks is None else
              deepspeed_import.snapshot_of_all(self.ranks, *given)) as (snapshot, facts):
            # Some versions of transformers make a step of an epoch's last micro-batches, and DeepSpeed does not.
            if not 0 <= self._first_step - facts["global_steps"] <= self._first_epoch:
                raise Error("corrupt", f"{self._deepspeeds}: DeepSpeed made {facts['global_steps']} steps, and its "
                                       f"{STATE} is of step {self._first_step}; take another checkpoint")
            yield snapshot
        self._facts = facts

    def create_optimizer(self, model=None):
        if self.optimizer is None:
            self.optimizer = TrainerOptimizer(self.model, self.args.learning_rate)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        self._refuse_to_mix()
        self._make_engine(num_training_steps)
        if self._facts is not None:
            self.engine.uncounted_steps = self._first_step - self.engine.current_step
        if (step := self.engine.current_step + self.engine.uncounted_steps) != self._first_step:
            raise Error("corrupt", f"{self._snapshot}: is of step {step}, and the checkpoint's "
                                   f"{STATE} of step {self._first_step}; take another checkpoint")
        self.optimizer.attach(self.engine)
        self._begun = True
        if self._schedules:
            self.lr_scheduler, self._created_lr_scheduler = EngineSchedule(self.optimizer), True
            return self.lr_scheduler
        return super().create_scheduler(num_training_steps, self.optimizer)

    def _refuse_to_mix(self):
        """DeepSpeed's checkpoints of later steps: one would be saved into, or be taken for this run's last."""
        folder = self.args.output_dir
        saves = str(getattr(self.args.save_strategy, "value", self.args.save_strategy)) != "no"
        for step, path in reversed(trainer_checkpoints.numbered(folder) if saves else []):
            if step > self._first_step and os.path.exists(os.path.join(path, deepspeed_import.LATEST)):
                raise Error("exists", f"{path}: is DeepSpeed's, of a later step than this run's; "
                                      "move it away, or give another output_dir")

    def create_accelerator_and_postprocess(self):
        refuse(self.args)
        if self.args.world_size > 1:
            self.ranks = self.untrained.ranks = Ranks(patience=float(self.args.ddp_timeout))
        super().create_accelerator_and_postprocess()
        trainer = weakref.proxy(self)  # which the accelerator does not keep alive
        self.accelerator.backward = lambda loss, **_: trainer._backward(loss)
        self.accelerator.clip_grad_norm_ = lambda *_, **__: trainer.optimizer.expected_norm()
        prepare = self.accelerator.prepare_model

        def prepare_model(model, *more, **options):
            if model is trainer.model or "_spillway" in model.__dict__ or next(model.parameters(), None) is None:
                return model
            if not evaluated(more, options):
                return prepare(model, *more, **options)
            return trainer.untrained.take(model, trainer.model, trainer._filled(None, left=False),
                                          trainer._engine_options["aio"])

        self.accelerator.prepare_model = prepare_model

    def _build_accelerator_args(self, **keywords):
        return {**super()._build_accelerator_args(**keywords), "mixed_precision": "no"}

    # -- a step ---------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint=None, *arguments, **keywords):
        """As transformers' does. It makes the engine, and takes a model's weights once. `resume_from_checkpoint`: a
        checkpoint's directory, also one of DeepSpeed's, or True for the newest that was saved to its end."""
        if self._begun:
            raise Error("invalid_argument", f"train(): has begun a run before, now at step {self.state.global_step}; "
                        "make model and trainer anew, and go on with resume_from_checkpoint=")
        self._snapshot, self._first_step, self._deepspeeds, self._facts = None, 0, None, None
        if resume_from_checkpoint is True:
            resume_from_checkpoint = self._of_first(
                lambda: trainer_checkpoints.last(self.args.output_dir, self._configuration))
        try:
            result = super().train(resume_from_checkpoint, *arguments, **keywords)
            self._keep_last_step()
            return result
        except BaseException:
            if self.engine is not None:
                with contextlib.suppress(Error):  # so that save_model() has the last whole step
                    self.engine.discard_step()
            raise

    def _keep_last_step(self):
        """It is durable after train(), however long the trainer lives on; the model may still be saved where not."""
        try:
            if self.engine is not None:
                self.engine.flush()
        except Error as error:
            log.say(logging.WARNING, str(error))

    def get_train_dataloader(self):
        loader, own = super().get_train_dataloader(), self._configuration.get("spillway")
        words = words_without_promise(loader) if isinstance(own, dict) and own.get("sum_groups", 1) != 1 else None
        if words is not None and not self._spoke_of_rows:
            self._spoke_of_rows = True
            log.say(logging.WARNING, words)
        return loader

    def get_batch_samples(self, *arguments, **keywords):
        found = super().get_batch_samples(*arguments, **keywords)
        if self._together_by_plan:
            self.together.collected(found[0])
        return found

    def training_step(self, model, inputs, *arguments, **keywords):
        one = super().training_step
        if not self._together_by_plan:
            return one(model, inputs, *arguments, **keywords)
        return self.together.step(self.engine, inputs, lambda each: one(model, each, *arguments, **keywords),
                                  self._backward)

    @property
    def _together_by_plan(self):
        return self._planned is not None and self._planned["spillway"].get(KEY, False)

    def _backward(self, loss):
        if self.together.backward(loss):
            return
        if self.engine.step_is_due:
            raise Error("unsupported", "gradient_accumulation_steps: the micro-batches that are left at an epoch's end "
                                       "come to the next epoch's first step, which has too many then; take a data set "
                                       "with a length, or a divisor of an epoch's micro-batches")
        # Transformers has weighted the micro-batches' losses, or accelerate does.
        self.engine.backward(loss / self.accelerator.gradient_accumulation_steps, scale_wrt_gas=False)

    def autocast_smart_context_manager(self, *_, **__):
        return contextlib.nullcontext()  # weights are of the type that the configuration says

    def _prepare_input(self, data):
        """Numbers come in the weights' type, as with DeepSpeed."""
        data = super()._prepare_input(data)
        narrow = self.engine is not None and self.engine.dtype != torch.float32
        return data.to(self.engine.dtype) if narrow and torch.is_tensor(data) and data.is_floating_point() else data

    def _move_model_to_device(self, *_):
        pass  # the engine takes its weights, wherever they are

    def evaluation_loop(self, *arguments, **keywords):
        if self.engine is None:
            self._make_engine(None)
        return super().evaluation_loop(*arguments, **keywords)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _of_first(self, work):
        """What `work` returns, of rank 0 alone, whose failure is everybody's. No rank goes on before it is done."""
        if self.ranks is None:
            return work()
        made = []
        self.ranks.together(lambda: made.append(work()) if self.ranks.rank == 0 else None)
        return self.ranks.same(*made)

    def _save_checkpoint(self, *arguments, **keywords):
        """A save that fails, on a full drive say, leaves nothing that could be taken for a checkpoint; its snapshot
        stays, where it came to that."""
        if self.ranks is not None and self.ranks.rank != 0:
            super()._save_checkpoint(*arguments, **keywords)
            return
        folder = os.path.join(self.args.output_dir, f"checkpoint-{self.state.global_step}")
        existed = os.path.exists(folder)
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, STATE))  # an earlier run's, which would make one of the two
        try:
            super()._save_checkpoint(*arguments, **keywords)
        except BaseException:
            begun = any(os.path.exists(os.path.join(folder, part)) for part in (SNAPSHOT, STATE))
            if not (existed or begun):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def _save_optimizer_and_scheduler(self, output_dir):
        def beside():
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULE))
            buffers.keep(self.model, output_dir)

        self.engine.save(os.path.join(output_dir, SNAPSHOT), replace=True)
        self._of_first(beside)

    def _save_rng_state(self, output_dir):
        super()._save_rng_state(output_dir)
        if self.ranks is not None:  # each has written its own before rank 0 writes what makes a checkpoint whole
            torch.distributed.barrier()

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.engine is not None:
            raise Error("invalid_argument", "train(): an engine has taken the model's weights before; make model and "
                                            "trainer anew to go on from a checkpoint")
        self._snapshot, state = (os.path.join(resume_from_checkpoint, name) for name in (SNAPSHOT, STATE))
        theirs = os.path.exists(os.path.join(resume_from_checkpoint, deepspeed_import.LATEST))
        if theirs and os.path.exists(self._snapshot):
            raise Error("invalid_argument", f"{resume_from_checkpoint}: has a checkpoint of DeepSpeed's "
                                            f"({deepspeed_import.LATEST}) and one of Spillway's ({SNAPSHOT}); move the "
                                            "one away that is not to be loaded")
        self._deepspeeds = resume_from_checkpoint if theirs else None
        for part in (state,) if theirs else (self._snapshot, state):
            if not os.path.exists(part):
                whole, _ = trainer_checkpoints.newest(os.path.dirname(os.path.abspath(resume_from_checkpoint)))
                raise Error("not_found", f"{part}: is not there; take a checkpoint that this trainer has saved to its "
                                         "end, or transformers' with DeepSpeed, and without save_only_model" +
                                         (f": {whole}" if whole else ""))
        values = trainer_checkpoints.state_of(resume_from_checkpoint)
        if values is None:
            raise Error("corrupt", f"{state}: cannot be read, or was not written to its end; take another checkpoint")
        self._first_step, self._first_epoch = values["global_step"], values.get("epoch") or 0
        buffers.load(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None:
            return
        schedule, facts, note = os.path.join(checkpoint, SCHEDULE), self._facts, ""
        if facts is not None and (self._schedules or not os.path.exists(schedule)):  # it was in DeepSpeed's files
            if not self._schedules:  # transformers has one always
                facts.setdefault("schedule_steps", facts["global_steps"] - facts["skipped_steps"])
            note = carried.continue_schedule(self.lr_scheduler, self.optimizer, facts)
        elif not self._schedules:
            safely = torch.__version__ >= "2"  # that of 1.13 cannot read numbers
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=safely))
            self.optimizer.param_groups[0]["lr"] = self.lr_scheduler.get_last_lr()[0]
        if facts is not None:
            ahead = self._first_step != facts["global_steps"]
            counted = f"its trainer counted {self._first_step} steps" if ahead else ""
            carried.say_what_came(self._deepspeeds, facts, self.model,
                                  carried.other_settings(self.engine, facts), note, counted)

    def _load_best_model(self):
        """The best checkpoint's snapshot takes the place of the last step, in the store as well. All else of train() is
        done, so that one that is not there, of a run that DeepSpeed began say, or is damaged leaves the last step."""
        best, last = self.state.best_model_checkpoint, f"checkpoint-{self.state.global_step}"
        if os.path.abspath(best) == os.path.abspath(os.path.join(self.args.output_dir, last)):
            return
        try:
            self.engine.load_snapshot(os.path.join(best, SNAPSHOT))
        except Error as error:
            log.say(logging.WARNING, f"{error}; the weights stay those of the last step, and from_pretrained() takes "
                                     f"the best ones from {best}")
            return
        buffers.load(self.model, best)
        log.say(logging.INFO, f"{best}: is the best one; its weights and states take the place of the last step's")

    def save_model(self, output_dir=None, *arguments, **keywords):
        """As transformers' does. Of several ranks all call it: each brings its part of the weights."""
        before, self._saved = self._saved, False
        super().save_model(output_dir, *arguments, **keywords)  # which may come here once more, to push to the hub
        if not self._saved and self.engine is not None:  # transformers 4 saves on rank 0 alone
            self._save(output_dir)
        self._saved = before

    def _save(self, output_dir=None, state_dict=None):
        self._saved, save = True, super()._save
        if self.engine is None:
            save(output_dir, state_dict)
            return
        if hasattr(self.model, "peft_config"):  # adapters alone are saved
            values = adapters(self.engine, self.engine.dtype)
            self._of_first(lambda: save(output_dir, state_dict=values))
            return
        output_dir = output_dir or self.args.output_dir
        with contextlib.ExitStack() as behind:
            def rest():  # all but the weights, which go tile by tile
                os.makedirs(output_dir, exist_ok=True)
                folder = os.path.join(behind.enter_context(tempfile.TemporaryDirectory(dir=output_dir)), "rest")
                with caches_as_before(self.model):
                    save(folder, state_dict={})
                return folder

            folder = self._of_first(rest)
            self.engine.export(output_dir, dtype=self.engine.dtype, replace=True)
            self._of_first(lambda: shutil.copytree(folder, output_dir, dirs_exist_ok=True, ignore=LEFT_OUT))


def _arguments_class():
    import transformers

    return transformers.TrainingArguments


def __getattr__(name):
    if name != "Trainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import transformers

    class Trainer(Mixin, transformers.Trainer):
        __doc__ = Mixin.__doc__

    Trainer.__qualname__ = "Trainer"
    globals()["Trainer"] = Trainer
    return Trainer
