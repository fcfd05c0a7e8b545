"""Hugging Face's Trainer on Spillway: what it gives without, from losses to checkpoints, and clear refusals."""
import importlib.util
import json
import os
import subprocess
import sys
import unittest
import unittest.mock

os.environ["HF_HUB_OFFLINE"] = "1"
from case import ROOT, Case as Folder, main, need  # noqa: E402

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from toy_model import DEVICE  # noqa: E402

VOCABULARY = 96
transformers.utils.logging.disable_progress_bar()


def model(seed=1, kind="gpt2", **more):
    torch.manual_seed(seed)
    if kind == "t5":  # whose decoder has a configuration of its own
        return transformers.T5ForConditionalGeneration(transformers.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0))
    if kind == "gpt2":  # with dropout, tied embeddings and biases
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
            use_cache=False, **more))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, use_cache=False, **more))


def examples(count, seed=5):
    """Rows of which some tokens do not count, a different number in each."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, VOCABULARY, (count, 16), generator=generator)
    counted = [row.masked_fill(torch.arange(16) < index % 7, -100) for index, row in enumerate(rows)]
    return [{"input_ids": row, "labels": labels} for row, labels in zip(rows, counted)]


class Recording:
    """Keeps the loss of every micro-batch, as it is without the logs' rounding and averaging."""

    def training_step(self, *arguments, **keywords):
        loss = super().training_step(*arguments, **keywords)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss

    def logged(self, name):
        return [entry[name] for entry in self.state.log_history if name in entry]


class Plain(Recording, transformers.Trainer):
    pass


class Stopping(transformers.TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == self.step


class Case(Folder):
    def setUp(self):
        super().setUp()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)  # where transformers 4 keeps one TrainingArguments' bf16

    def arguments(self, name="out", **more):
        values = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 2,
                  "learning_rate": 1e-3, "weight_decay": 0.1, "warmup_steps": 2, "max_grad_norm": 0.5,
                  "logging_steps": 1, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
                  "use_cpu": DEVICE == "cpu", **more}
        return transformers.TrainingArguments(output_dir=str(self.folder / name), **values)

    def configuration(self, name="store", **more):
        place = {"device": "nvme", "nvme_path": str(self.folder / name)}
        return {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}, **more,
                "spillway": {"tile_elements": 4096, **more.get("spillway", {})}}

    def trainer(self, network=None, configuration=None, kind=None, options=None, rows=14, **arguments):
        """On Spillway; of 14 rows an epoch has 7 micro-batches, of which the last is a step of its own."""
        made = (kind or type("Spilled", (Recording, spillway.Trainer), {}))(
            model=network or model(), args=self.arguments(**arguments), train_dataset=examples(rows),
            eval_dataset=examples(5, seed=6), spillway=configuration or self.configuration(), **(options or {}))
        self.addCleanup(lambda: made.engine and made.engine.close())
        made.remove_callback(transformers.PrinterCallback)
        return made

    def plain(self, network=None, kind=Plain, **arguments):
        made = kind(model=network or model(), args=self.arguments("plain", **arguments), train_dataset=examples(14),
                    eval_dataset=examples(5, seed=6))
        made.remove_callback(transformers.PrinterCallback)
        return made


class Training(Case):
    def assert_trains_alike(self, trainer, plain, until_update=3):
        with self.subTest(type(plain).__name__):
            for each in (trainer, plain):
                transformers.set_seed(7)
                each.train()
            self.assertEqual(len(plain.losses), len(trainer.losses))
            # Until the first update the arithmetic is PyTorch's own, and so are the bits.
            self.assertEqual(plain.losses[:until_update], trainer.losses[:until_update])
            # After it the optimizers round differently, by an ulp of a weight a step.
            for found, wanted in zip(trainer.losses, plain.losses):
                self.assertAlmostEqual(wanted, found, delta=2e-6 * wanted)
            for found, wanted in zip(trainer.logged("grad_norm"), plain.logged("grad_norm")):
                self.assertAlmostEqual(wanted, found, delta=2e-5 * wanted)
            self.assertEqual(len(plain.logged("grad_norm")), len(trainer.logged("grad_norm")))
            self.assertEqual(plain.logged("learning_rate"), trainer.logged("learning_rate"))
            state = trainer.model.state_dict()
            for name, value in plain.model.cpu().state_dict().items():
                self.assertLess((state[name] - value).abs().max().item(), 1e-5, name)

    def test_TrainsAsTransformersDoes(self):
        trainer = self.trainer()
        self.assert_trains_alike(trainer, self.plain())
        self.assertEqual(trainer.state.global_step, trainer.engine.current_step)
        self.assertEqual(trainer.state.global_step, len(trainer.logged("grad_norm")))
        self.assertEqual(0.1, trainer._planned["optimizer"]["params"]["weight_decay"])

    def test_TrainsAsTransformersDoesWithAnotherModel(self):
        self.assert_trains_alike(self.trainer(model(kind="llama")), self.plain(model(kind="llama")))

    def test_TrainsAModelWhosePartsHaveConfigurations(self):
        # In transformers 4 the embedding is a block that runs twice.
        example = {name: values[None] for name, values in examples(1)[0].items()}
        trainer = self.trainer(model(kind="t5"), options={"example": example})
        self.assertTrue(trainer.model.decoder.config.use_cache)
        self.assert_trains_alike(trainer, self.plain(model(kind="t5")))

    def test_LossesThatTheModelDoesNotWeight(self):
        networks = [model(), model()]
        for network in networks:
            network.accepts_loss_kwargs = False
        self.assert_trains_alike(self.trainer(networks[0]), self.plain(networks[1]))

    def test_Schedules(self):
        for kind, more in (("constant", {"max_grad_norm": 0}), ("cosine", {}), ("constant_with_warmup", {}),
                           ("polynomial", {}), ("inverse_sqrt", {}), ("linear", {"warmup_steps": 0})):
            options = {"lr_scheduler_type": kind, "gradient_accumulation_steps": 1, "max_steps": 5, **more}
            self.assert_trains_alike(self.trainer(configuration=self.configuration(kind), **options),
                                     self.plain(**options), 1)

    def test_TheConfigurationsScheduler(self):
        params = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto",
                  "total_num_steps": "auto", "warmup_type": "linear"}
        trainer = self.trainer(configuration=self.configuration(
            scheduler={"type": "WarmupDecayLR", "params": params}), max_steps=6, gradient_accumulation_steps=1)
        self.assert_error('"auto" is filled in by train', trainer.evaluate)
        trainer.train()
        wanted = [0, 0, 0.5, 1, 0.75, 0.5]  # of DeepSpeed's, which begins a step later than transformers'
        for rate, share in zip(trainer.logged("learning_rate"), wanted):
            self.assertAlmostEqual(1e-3 * share, rate, delta=1e-12)

    def test_AnotherTrainerComposes(self):
        class Smoothed(transformers.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **keywords):
                loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **keywords)
                loss = loss + 1e-3 * outputs.logits.pow(2).mean()
                return (loss, outputs) if return_outputs else loss

        class Spilled(Recording, spillway.trainer.Mixin, Smoothed):
            pass

        class PlainSmoothed(Recording, Smoothed):
            pass

        self.assert_trains_alike(self.trainer(kind=Spilled), self.plain(kind=PlainSmoothed))

    def test_Bf16IsTheTypeOfWeights(self):
        trainer = self.trainer(bf16=True, num_train_epochs=6, learning_rate=3e-3)
        trainer.train()
        self.assertEqual(torch.bfloat16, trainer.engine.dtype)
        if transformers.__version__ >= "5":  # which says it to accelerate, and not by the environment
            self.assertEqual("no", trainer.accelerator.mixed_precision)
        self.assertEqual(torch.bfloat16, trainer.model.state_dict()["lm_head.weight"].dtype)
        self.assertLess(trainer.logged("loss")[-1], trainer.logged("loss")[0] - 0.05)
        self.assertEqual((2, 4, VOCABULARY), trainer.predict([{"inputs_embeds": torch.zeros(4, 32)}] * 2)[0].shape)

    def test_GradientCheckpointingIsThereAlready(self):
        visits = []
        for wanted in (False, True):
            trainer = self.trainer(configuration=self.configuration(str(wanted)), gradient_checkpointing=wanted)
            with unittest.mock.patch.object(spillway.Engine, "weights_of", autospec=True,
                                            side_effect=spillway.Engine.weights_of) as visited:
                self.assert_trains_alike(trainer, self.plain())
            visits.append(visited.call_count)
        self.assertEqual(visits[0], visits[1])

    def test_EvaluatesBetweenSteps(self):
        options = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, "per_device_eval_batch_size": 2}
        trainer, plain = self.trainer(**options), self.plain(**options)
        self.assertEqual(plain.evaluate()["eval_loss"], trainer.evaluate()["eval_loss"])
        for each in (trainer, plain):
            transformers.set_seed(7)
            each.train()
        self.assertEqual(2, len(trainer.logged("eval_loss")))
        for found, wanted in zip(trainer.logged("eval_loss"), plain.logged("eval_loss")):
            self.assertAlmostEqual(wanted, found, delta=2e-6 * wanted)
        found, wanted = (t.predict(examples(3, seed=7)).predictions for t in (trainer, plain))
        self.assertLess(abs(found - wanted).max(), 1e-4)


class Checkpoints(Case):
    def test_ARunGoesOnWithTheSameBits(self):
        saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_steps": 5, "rows": 12}
        whole = self.trainer(**saving)
        whole.train()
        weights = whole.engine.master_weights()
        whole.engine.close()
        folders = sorted(path.name for path in (self.folder / "out").glob("checkpoint-*"))
        self.assertEqual(["checkpoint-3", "checkpoint-4", "checkpoint-5"], folders)
        files = {path.name for path in (self.folder / "out/checkpoint-3").iterdir()}
        self.assertLessEqual({"spillway", "trainer_state.json", "rng_state.pth", "scheduler.pt", "model.safetensors",
                              "config.json"}, files)
        self.assertFalse(files & {"optimizer.pt", "optimizer.bin"})
        again = self.trainer(model(seed=9), **saving)
        again.train(resume_from_checkpoint=str(self.folder / "out/checkpoint-3"))  # the middle of the second epoch
        steps = len(again.logged("learning_rate"))
        self.assertEqual(whole.logged("learning_rate")[-steps:], again.logged("learning_rate"))
        self.assertEqual(whole.losses[-len(again.losses):], again.losses)
        self.assertEqual(2 * 3, len(again.losses))
        for name, value in again.engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)

    def test_TheLastCheckpointIsFound(self):
        self.trainer(save_strategy="steps", save_steps=2, max_steps=2).train()
        again = self.trainer(model(seed=9), self.configuration("another"), max_steps=3)
        again.train(resume_from_checkpoint=True)
        self.assertEqual(3, again.engine.current_step)

    def test_SavedModelsAreWhatTransformersLoads(self):
        for options in ({}, {"bf16": True}):
            trainer = self.trainer(configuration=self.configuration(f"store{len(options)}"), max_steps=2, **options)
            trainer.save_model(str(self.folder / "untrained"))
            trainer.train()
            trainer.save_model()
            trainer.save_model()  # over the first
            out = self.folder / "out"
            self.assertFalse([path for path in out.iterdir() if path.is_dir()])
            self.assertEqual((self.folder / "untrained").stat().st_mode, out.stat().st_mode)
            self.assertTrue((out / "training_args.bin").exists() and (out / "generation_config.json").exists())
            loaded = transformers.AutoModelForCausalLM.from_pretrained(str(out), torch_dtype=trainer.engine.dtype)
            self.assertEqual(["GPT2LMHeadModel"], loaded.config.architectures)
            for name, value in trainer.model.state_dict().items():
                self.assertTrue(torch.equal(value, loaded.state_dict()[name].cpu()), name)
            untrained = transformers.AutoModelForCausalLM.from_pretrained(str(self.folder / "untrained"))
            self.assertFalse(torch.equal(untrained.lm_head.weight, loaded.lm_head.weight.float()))

    def test_BuffersAreSavedAndResumed(self):
        class Counting(transformers.GPT2LMHeadModel):
            def __init__(self, config):
                super().__init__(config)
                self.register_buffer("seen", torch.zeros(2))
                self.register_buffer("scratch", torch.ones(3), persistent=False)

            def forward(self, input_ids=None, labels=None, **keywords):
                if self.training and torch.is_grad_enabled():
                    self.seen[0] += 1
                return super().forward(input_ids=input_ids, labels=labels, **keywords)

        def counting():
            return Counting(model().config)

        trainer = self.trainer(counting(), max_steps=2, save_strategy="steps", save_steps=1)
        trainer.train()
        trainer.save_model()
        trainer.save_model()
        trainer.engine.close()
        micro_batches = len(trainer.losses)
        loaded = Counting.from_pretrained(str(self.folder / "out"))
        self.assertEqual([micro_batches, 0], loaded.seen.tolist())
        self.assertNotIn("scratch", (self.folder / "out/model.safetensors.index.json").read_text())
        for name, value in trainer.model.named_parameters():
            self.assertEqual(value.shape, loaded.get_parameter(name).shape)
        again = self.trainer(counting(), max_steps=2)
        again.train(resume_from_checkpoint=str(self.folder / "out/checkpoint-1"))
        self.assertEqual([micro_batches, 0], again.model.seen.tolist())

    @unittest.skipUnless(importlib.util.find_spec("peft"), "no peft in this Python")
    def test_AdaptersAreSavedAlone(self):
        import peft

        def adapted(seed=1):
            return peft.get_peft_model(model(seed, "llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))

        trainer, plain = self.trainer(adapted(), max_steps=2), self.plain(adapted(), max_steps=2)
        for each in (trainer, plain):
            transformers.set_seed(7)
            each.train()
            each.save_model()
        found, wanted = (peft.PeftModel.from_pretrained(model(1, "llama"), str(self.folder / name)).state_dict()
                         for name in ("out", "plain"))
        self.assertEqual(list(wanted), list(found))
        for name, value in wanted.items():
            self.assertLess((found[name] - value).abs().max().item(), 1e-5, name)
        self.assertFalse((self.folder / "out/model.safetensors").exists())


class Configuration(Case):
    def test_AutoIsFilledIn(self):
        path = self.folder / "ds_config.json"
        path.write_text("""{ // a comment, and "auto" wherever it may be
            "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
            "gradient_accumulation_steps": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                                      "weight_decay": "auto"}},
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}, /* and one */
        }""")
        trainer = self.trainer(configuration=path, adam_beta2=0.95, max_steps=1)
        trainer.train()
        found = trainer._planned
        self.assertEqual((6, 2, 3, 0.5), tuple(found[key] for key in (
            "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")))
        self.assertEqual({"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1},
                         found["optimizer"]["params"])
        self.assertEqual(({"enabled": False}, 0.9 * 32 * 32 // 1),
                         (found["bf16"], found["zero_optimization"]["stage3_prefetch_bucket_size"]))

    def test_AnOptimizersTypeIsTakenInAnyCase(self):
        optimizer = {"type": "adamw", "params": {"betas": "auto"}}
        trainer = self.trainer(configuration=self.configuration(optimizer=optimizer), adam_beta2=0.95,
                               adam_epsilon=1e-6)
        params = trainer._filled(None)["optimizer"]["params"]
        self.assertEqual(([0.9, 0.95], 1e-6), (params["betas"], params["eps"]))
        optimizer = {"type": "ADAM", "params": {"eps": 1e-7}}
        self.assert_error("eps is 1e-07, adam_epsilon 1e-08", self.trainer,
                          configuration=self.configuration(optimizer=optimizer))

    def test_WhatIsSaidOfAFileIsSaidOnceWithItsName(self):
        path = self.folder / "ds_config.json"
        path.write_text(json.dumps(self.configuration(steps_per_print=3)))
        with self.assertLogs("spillway", "INFO") as logged:
            self.trainer(configuration=path, max_steps=1).train()
        said = [line for line in logged.output if "without effect" in line]
        self.assertEqual([f"INFO:spillway:{path} (filled in): known, but without effect here: steps_per_print"], said)
        path.write_text(json.dumps(self.configuration(aio={"queue_depth": "deep"})))
        self.assert_error(r"ds_config.json \(filled in\):\d+:\d+: aio.queue_depth", self.trainer, configuration=path)

    def test_ContradictionsComeTogether(self):
        error = self.assert_error("contradicts TrainingArguments", self.trainer, configuration=self.configuration(
            gradient_accumulation_steps=4, optimizer={"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-8}},
            bf16={"enabled": True}, train_batch_size=6))
        for line in ("gradient_accumulation_steps is 4, gradient_accumulation_steps 3",
                     "optimizer.params.lr is 0.002, learning_rate 0.001", "bf16.enabled is true, bf16 false"):
            self.assertIn(line, str(error))
        self.assertEqual(4, len(str(error).splitlines()))
        late = self.trainer(configuration=self.configuration(scheduler={
            "type": "WarmupLR", "params": {"warmup_num_steps": 7}}))
        self.assert_error("warmup_num_steps is 7, warmup_steps 2", late.train)

    def test_OtherErrorsOfTheConfiguration(self):
        self.assert_error("optimizr", self.trainer, configuration=self.configuration(optimizr={}))
        self.assert_error("none.json: cannot be read", self.trainer, configuration=self.folder / "none.json")
        (self.folder / "broken.json").write_text('{"optimizer": tru}')
        self.assert_error(r"broken\.json:1:\d+: ", self.trainer, configuration=self.folder / "broken.json")
        (self.folder / "twice.json").write_text('{"aio": {"queue_depth": 8,\n"queue_depth": 9}}')
        self.assert_error(r'twice\.json:2:1: duplicate key "aio.queue_depth"; it stands in line 1', self.trainer,
                          configuration=self.folder / "twice.json")
        (self.folder / "marked.json").write_text("\ufeff" + json.dumps(self.configuration(aio={"queue_depth": 9})))
        self.assertEqual(9, self.trainer(configuration=self.folder / "marked.json")._filled(None)["aio"]["queue_depth"])
        self.assert_error("aio.queue_depth", self.trainer, options={"aio": {"aio": {"queue_depth": "deep"}}})
        self.assert_error("spillway: is missing", spillway.Trainer, model=model(), args=self.arguments())
        self.assert_error("on_existing: 'resume' is none of", self.trainer, options={"on_existing": "resume"})

    def test_WhatCannotWorkIsRefused(self):
        error = self.assert_error("not with Spillway", self.trainer, optim="adafactor", auto_find_batch_size=True,
                                  bf16_full_eval=True)
        for word in ("optim adafactor: ", "auto_find_batch_size: ", "bf16_full_eval, fp16_full_eval: "):
            self.assertIn(word, str(error))
        self.assertEqual("unsupported", error.code)
        if hasattr(transformers.TrainingArguments, "use_liger_kernel"):
            self.assert_error("use_liger_kernel: ", self.trainer, use_liger_kernel=True)
        best = {"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1,
                "save_steps": 1, "save_only_model": True}
        self.assert_error("load_best_model_at_end with save_only_model: ", self.trainer, **best)
        network = model()

        class Own(spillway.Trainer):
            def create_optimizer(self, *_):
                raise AssertionError("it is not asked")

        self.assert_error("Own.create_optimizer: would not be asked", self.trainer, kind=Own)
        self.assert_error("optimizer: cannot be given", self.trainer, network, options={
            "optimizers": (torch.optim.SGD(network.parameters(), lr=1), None)})

    def test_GroupsOfTheFileComeFirst(self):
        trainer = self.trainer(configuration=self.configuration(spillway={"no_decay": True}))
        self.assertNotIn("parameter_groups", trainer._filled(1)["spillway"])

    def test_TransformersIsNotImportedWithThePackage(self):
        program = "import sys, spillway; spillway.trainer; assert 'transformers' not in sys.modules; spillway.Trainer"
        subprocess.run([sys.executable, "-c", program], check=True, env={
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "python"), *sys.path])})


class Failures(Case):
    def assert_saved(self, trainer, folder):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(folder)).state_dict()
        for name, value in trainer.model.state_dict().items():
            self.assertTrue(torch.equal(value, loaded[name]), name)

    def test_ANonFiniteGradientEndsTrainingAndChangesNothing(self):
        class Exploding(Recording, spillway.Trainer):
            def compute_loss(self, *arguments, **keywords):
                loss = super().compute_loss(*arguments, **keywords)
                return loss * float("inf") if self.state.global_step == 1 else loss

        trainer = self.trainer(kind=Exploding, warmup_steps=0)
        self.assertEqual("non_finite", self.assert_error("nothing was changed", trainer.train).code)
        one = self.trainer(configuration=self.configuration("one"), warmup_steps=0,
                           options={"callbacks": [Stopping(1)]})
        one.train()
        trainer.save_model(str(self.folder / "exploded"))
        self.assert_saved(one, self.folder / "exploded")

    def test_ARunThatDidNotBeginIsNoBeginningOfAnother(self):
        first = self.trainer(save_strategy="steps", save_steps=2, max_steps=2)
        first.train()
        first.engine.close()
        trainer = self.trainer(max_steps=1, options={"on_existing": "replace"})
        with unittest.mock.patch.object(trainer, "create_scheduler", side_effect=KeyboardInterrupt):
            with self.assertRaises(KeyboardInterrupt):
                trainer.train(resume_from_checkpoint=str(self.folder / "out/checkpoint-2"))
        trainer.train()
        self.assertEqual(1, trainer.engine.current_step)

    def test_TheRestOfAnEpochWithoutALength(self):
        class Rows(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(examples(14))

        trainer = self.trainer(max_steps=4)
        trainer.train_dataset = Rows()
        try:
            trainer.train()  # older versions make a step of the rest
        except spillway.Error as error:
            self.assertIn("gradient_accumulation_steps: the micro-batches that are left at an epoch's end", str(error))
        self.assertEqual(trainer.state.global_step, trainer.engine.current_step)

    @unittest.skipUnless(hasattr(transformers.TrainerCallback, "on_pre_optimizer_step"), "no such callback here")
    def test_ARateThatComesTooLateIsRefused(self):
        class Late(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, optimizer=None, **_):
                optimizer.param_groups[0]["lr"] = 1.0

        trainer = self.trainer(options={"callbacks": [Late()]})
        self.assert_error("learning rate: was .* in the step's backward pass", trainer.train)
        self.assertEqual(0, trainer.engine.current_step)
        trainer.optimizer.param_groups[0]["lr"] = 0.0
        self.assert_error("step: no loss has been through backward", trainer.optimizer.step)

    def test_AnInterruptedRunCanBeSaved(self):
        def interrupt(*_):
            raise KeyboardInterrupt

        class InBetween(transformers.TrainerCallback):
            def on_substep_end(self, args, state, control, **_):
                if state.global_step == 3:
                    raise KeyboardInterrupt

        class InBackward(Recording, spillway.Trainer):
            began = False

            def compute_loss(self, *arguments, **keywords):
                loss = super().compute_loss(*arguments, **keywords)
                if self.began:
                    loss.register_hook(interrupt)
                self.began = self.state.global_step == 3  # and in its second micro-batch comes the interrupt
                return loss

        three = self.trainer(configuration=self.configuration("three"), options={"callbacks": [Stopping(3)]})
        three.train()
        class BeforeTheStep(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **_):
                if state.global_step == 3:
                    raise KeyboardInterrupt

        cases = [("between", {"options": {"callbacks": [InBetween()]}}), ("backward", {"kind": InBackward})]
        if hasattr(transformers.TrainerCallback, "on_pre_optimizer_step"):
            cases.append(("before", {"options": {"callbacks": [BeforeTheStep()]}}))
        for name, more in cases:
            trainer = self.trainer(configuration=self.configuration(name), **more)
            with self.assertRaises(KeyboardInterrupt):
                trainer.train()
            trainer.save_model(str(self.folder / "saved"))
            self.assert_saved(three, self.folder / "saved")


if __name__ == "__main__":
    main()
