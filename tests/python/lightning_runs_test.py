"""Runs of Lightning's Trainer one after another: checkpoints, evaluations, second fits, and what ends one."""
import contextlib
import io
import os
import shutil
import unittest.mock

import lightning_case  # first: where there is no Lightning, it ends the program
from case import main
from lightning_case import PACKAGES, Body, LightningCase, lightning, loader, module

import torch

import spillway
import toy_model

Scheduler = torch.optim.lr_scheduler


class Scheduled(Body):
    """With momentum, a schedule, a buffer that counts and a hyper-parameter."""

    def __init__(self, seed=1, **shape):
        super().__init__(seed, **shape)
        self.save_hyperparameters()
        self.register_buffer("seen", torch.zeros(()))
        self.loaded = []

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [{"scheduler": Scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                              "interval": "step"}]

    def on_load_checkpoint(self, checkpoint):
        assert len(checkpoint["lr_schedulers"]) == 1 and "optimizer_states" not in checkpoint
        self.loaded.append(checkpoint["epoch"])


def saving(folder, **more):
    return lightning.pytorch.callbacks.ModelCheckpoint(str(folder), filename="{epoch}", save_top_k=-1, **more)


class Checkpoints(LightningCase):
    def run_of(self, epochs, name="store", seed=1, ckpt_path=None, folder=None, **more):
        callbacks = [saving(folder)] if folder else []
        trainer = self.trainer(self.configuration(name), max_epochs=epochs, callbacks=callbacks,
                               enable_checkpointing=bool(folder), options=more.pop("options", None), **more)
        return self.fit(module(body=Scheduled, seed=seed), trainer, 4, ckpt_path=ckpt_path)

    def test_GoesOnWithTheBitsOfARunThatWasNeverStopped(self):
        for precision in ("32-true", "bf16-mixed"):
            folder = self.folder / precision
            whole = self.run_of(3, f"{precision}1", folder=folder, precision=precision)
            again = self.run_of(3, f"{precision}2", seed=9, ckpt_path=str(folder / "epoch=0.ckpt"), precision=precision)
            self.assertEqual(whole.losses[4:], again.losses)
            self.assert_weights(whole.state_dict(), again.state_dict())
            self.assertEqual([0], again.loaded)
            self.assertEqual((12, 12.0), (again.kept.global_step, again.seen.item()))
            self.assertEqual(whole.kept.lr_scheduler_configs[0].scheduler.state_dict(),
                             again.kept.lr_scheduler_configs[0].scheduler.state_dict())
            whole.kept.strategy.engine.close()
            again.kept.strategy.engine.close()

    def test_ACheckpointReplacesTheStore(self):
        first = self.run_of(1, folder=self.folder / "out")
        first.kept.strategy.engine.close()
        self.assert_error(r"a store exists; go on with fit\(ckpt_path=PATH\), of a checkpoint, or start over with "
                          'on_existing="replace"', self.run_of, 2)
        checkpoint = str(self.folder / "out/epoch=0.ckpt")
        self.assert_error("a store exists", self.run_of, 2, ckpt_path=checkpoint, options={"on_existing": "refuse"})
        evaluated = module(body=Scheduled)
        self.closing(evaluated)
        self.assert_error('name another nvme_path to evaluate with, or say on_existing="replace"', self.trainer().test,
                          evaluated, loader(1), ckpt_path=checkpoint)
        self.assertEqual(8, self.run_of(2, seed=9, ckpt_path=checkpoint).kept.strategy.engine.current_step)

    def test_WhatACheckpointHolds(self):
        made = self.run_of(2, folder=self.folder / "out")
        self.assertEqual(["epoch=0.ckpt", "epoch=1.ckpt"], sorted(os.listdir(self.folder / "out")))
        checkpoint = self.folder / "out/epoch=1.ckpt"
        self.assertEqual({"spillway", "checkpoint.pt", "spillway_buffers.pt"}, set(os.listdir(checkpoint)))
        state = torch.load(checkpoint / "checkpoint.pt")
        self.assertEqual((1, 8, {"seed": 1}), (state["epoch"], state["global_step"], state["hyper_parameters"]))
        self.assertFalse({"state_dict", "optimizer_states"} & state.keys())
        self.assert_error("storage_options: have no effect", made.kept.save_checkpoint, str(checkpoint),
                          storage_options={})
        self.assert_error("s3://bucket/one: checkpoints are directories of a local", made.kept.strategy.save_checkpoint,
                          {}, "s3://bucket/one")

    def test_TheSamePathIsReplacedAndOldOnesGo(self):
        keeping = lightning.pytorch.callbacks.ModelCheckpoint(str(self.folder / "out"), filename="{epoch}_{step}",
                                                              save_top_k=1)
        made = self.fit(module(body=Scheduled), self.trainer(
            max_epochs=2, callbacks=[keeping], enable_checkpointing=True), 1)
        self.assertEqual(["epoch=1_step=2.ckpt"], os.listdir(self.folder / "out"))
        made.kept.save_checkpoint(keeping.best_model_path)
        self.assertEqual(["epoch=1_step=2.ckpt"], os.listdir(self.folder / "out"))

    def test_WeightsAlone(self):
        made = self.run_of(1)
        made.kept.save_checkpoint(str(self.folder / "weights.ckpt"), weights_only=True)
        self.assertEqual({"weights", "checkpoint.pt"}, set(os.listdir(self.folder / "weights.ckpt")))
        (wanted,) = made.kept.validate(made, loader(2), verbose=False)
        again = module(body=Body, seed=9)
        self.closing(again)
        trainer = self.trainer(self.configuration("other"))
        self.assertEqual([wanted], trainer.validate(again, loader(2), ckpt_path=str(self.folder / "weights.ckpt"),
                                                    verbose=False))
        self.assert_weights({name: value for name, value in made.state_dict().items() if name != "seen"},
                            again.state_dict())
        self.assert_error("weights.ckpt: has weights alone .save_weights_only., for evaluations; take a whole",
                          self.run_of, 2, "third", ckpt_path=str(self.folder / "weights.ckpt"))
        self.assertFalse((self.folder / "third").exists())

    def test_ACheckpointsRateCounts(self):
        class Slower(Scheduled):
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.decay)

        made = []
        for name, rate, decay, ckpt_path in (("one", 1e-3, 0.1, None), ("two", 1e-5, 0.2, str(self.folder / "at"))):
            each = module(body=Slower)
            each.lr, each.decay, each.on_load_checkpoint = rate, decay, lambda checkpoint: None
            made.append(self.fit(each, self.trainer(self.configuration(name), max_epochs=2 if ckpt_path else 1), 4,
                                 ckpt_path=ckpt_path))
            if not ckpt_path:
                each.kept.save_checkpoint(str(self.folder / "at"))
        engine = made[1].kept.strategy.engine
        self.assertEqual((1e-3, 0.1), (made[1].kept.strategy.report.learning_rate,
                                       engine.settings["optimizer.params.weight_decay"]))

    def test_AFileOfLightningsOwn(self):
        plain = module(body=Body)
        self.plain().fit(plain, loader(4))
        path = str(self.folder / "plain.ckpt")
        trainer = self.plain()
        trainer.strategy.connect(plain)
        trainer.fit(plain, loader(1))
        trainer.save_checkpoint(path)
        made = module(body=Body, seed=9)
        self.closing(made)
        self.assert_error("plain.ckpt: is a file, of which weights alone can be taken; say "
                          "SpillwayStrategy.load_full_weights=True", self.trainer().test, made, loader(1),
                          ckpt_path=path)
        trainer = self.trainer(options={"load_full_weights": True}, max_epochs=2)
        trainer.test(made, loader(1), ckpt_path=path, verbose=False)
        self.assert_weights(plain.state_dict(), made.state_dict())
        with self.assertLogs("spillway", "WARNING") as logged:
            trainer.fit(made, loader(1), ckpt_path=path)
        self.assertIn("has weights alone, so the optimizer begins anew", "".join(logged.output))
        self.assertEqual((2, 1), (trainer.global_step, trainer.strategy.engine.current_step))

    def test_WhatIsNoCheckpoint(self):
        self.run_of(1, folder=self.folder / "out").kept.strategy.engine.close()
        whole, cut = self.folder / "out/epoch=0.ckpt", self.folder / "cut"
        for change, error in (
                (lambda: os.remove(cut / "checkpoint.pt"), "checkpoint.pt: is not there; take a checkpoint that was "
                                                           "saved to its end"),
                (lambda: (cut / "checkpoint.pt").write_bytes(b"PK"), "checkpoint.pt: is empty, cut short or damaged"),
                (lambda: shutil.rmtree(cut / "spillway"), "cut/spillway: is not there"),
                (lambda: (cut / "latest").write_text("checkpoint"), "cut: is DeepSpeed's; make a snapshot of it with "
                                                                    "spillway.import_deepspeed")):
            shutil.rmtree(cut, ignore_errors=True)
            shutil.copytree(whole, cut)
            change()
            self.assert_error(error, self.run_of, 2, "other", ckpt_path=str(cut))
        other = module(body=Scheduled, layers=2)
        self.closing(other)
        self.assert_error("6 tensors of model are no part of this model",
                          self.trainer(self.configuration("other")).fit, other, loader(1), ckpt_path=str(whole))

    def test_ACheckpointThatFailsIsNone(self):
        made = self.run_of(1)
        with unittest.mock.patch.object(spillway.Engine, "save", side_effect=spillway.Error("io", "drive is full")):
            self.assert_error("drive is full", made.kept.save_checkpoint, str(self.folder / "none"))
        self.assertFalse((self.folder / "none").exists())
        with unittest.mock.patch.object(torch, "save", side_effect=OSError(28, "full")):
            self.assertRaisesRegex(OSError, "full", made.kept.save_checkpoint, str(self.folder / "half"))
        self.assert_error("half/checkpoint.pt: is not there", self.run_of, 2, "other",
                          ckpt_path=str(self.folder / "half"))

    def test_ASnapshotToBeginWith(self):
        whole = self.run_of(2, folder=self.folder / "out")
        again = self.run_of(1, "other", seed=9, options={"snapshot": str(self.folder / "out/epoch=0.ckpt/spillway")})
        self.assertEqual(8, again.kept.strategy.engine.current_step)
        self.assertEqual(whole.losses[4], again.losses[0])

    def test_ACheckpointThatIsSavedAfterAnEvaluation(self):
        class ByMomentum(Scheduled):
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

        made = self.fit(module(body=ByMomentum), self.trainer(), 4)
        made.kept.validate(made, loader(1), verbose=False)
        made.kept.save_checkpoint(str(self.folder / "one"))
        state = torch.load(self.folder / "one/checkpoint.pt")["spillway"]
        self.assertEqual(("SGD", 0.9, 4), (state["optimizer"]["type"], state["groups"][0]["momentum"], state["step"]))


class Meta(Body):
    """Its parameters are nowhere until the engine has them."""

    def __init__(self, seed=1, **shape):
        super().__init__(seed, **shape)
        self.seed, self.network = seed, None

    def configure_model(self):
        if self.network is None:
            self.network = toy_model.model(self.seed)
            for part in self.network.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None:
                        part._parameters[name] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
            self.network.head.weight = self.network.embedding.weight




class Runs(LightningCase):
    def test_AModelOnMeta(self):
        whole = module()
        values = {name: value.clone() for name, value in whole.state_dict().items()}
        self.fit(whole, self.trainer())
        made = self.fit(module(body=Meta, seed=9), self.trainer(self.configuration("meta"),
                                                                options={"weights": values.__getitem__}))
        self.assert_weights(whole.state_dict(), made.state_dict())
        whole.kept.save_checkpoint(str(self.folder / "one"))
        again = module(body=Meta, seed=9)
        self.closing(again)
        trainer = self.trainer(self.configuration("again"))
        wanted = whole.kept.test(whole, loader(2), verbose=False)
        self.assertEqual(wanted, trainer.test(again, loader(2), ckpt_path=str(self.folder / "one"), verbose=False))
        without = module(body=Meta)
        self.assert_error("is a parameter on device meta and has no values; give weights=",
                          self.trainer(self.configuration("without")).fit, without, loader(1))

    def test_EvaluationsBeforeAndBehindTraining(self):
        plain, made = module(), module()
        alone, trainer = self.plain(), self.trainer()
        self.closing(made)
        asked = []
        with unittest.mock.patch.object(type(made), "configure_optimizers", lambda *_: asked.append(1)):
            for each, of in ((plain, alone), (made, trainer)):
                each.before = of.test(each, loader(2), verbose=False), of.predict(each, loader(2))
        self.assertEqual([], asked)
        self.assertEqual(plain.before, made.before)
        for each, of in ((plain, alone), (made, trainer)):
            of.fit(each, loader(8), loader(2))
            each.behind = of.validate(each, loader(2), verbose=False)
        self.assertEqual(plain.losses[0], made.losses[0])
        for wanted, found in zip(plain.losses, made.losses):
            self.assertAlmostEqual(wanted, found, delta=1e-5 * wanted)
        self.assertAlmostEqual(plain.behind[0]["val_loss"], made.behind[0]["val_loss"], delta=1e-4)
        self.assertEqual(8, trainer.strategy.engine.current_step)

    def test_ValidationInsideOfASteps(self):
        alone, made = module(), module()
        self.fit(alone, self.trainer(self.configuration("alone"), accumulate_grad_batches=4))
        self.closing(made)
        self.trainer(accumulate_grad_batches=4, val_check_interval=2).fit(made, loader(8), loader(1))
        self.assertEqual(alone.losses, made.losses)
        self.assert_weights(alone.state_dict(), made.state_dict())

    def test_ASecondFitBeginsWithAnotherOptimizer(self):
        for package in PACKAGES.values():
            plain, made = module(package), module(package)
            alone, trainer = self.plain(package), self.trainer(self.configuration(package.__name__), package)
            self.closing(made)
            for of, each in ((alone, plain), (trainer, made)):
                of.fit(each, loader(4))
                of.fit_loop.max_epochs = 2
                of.fit(each, loader(4))
            self.assertEqual(len(plain.losses), len(made.losses))
            self.assert_weights(plain.state_dict(), made.state_dict(), exactly=False)

    def test_AnotherTrainerGoesOnWithTheModule(self):
        made = self.fit(module(), self.trainer())
        (wanted,) = made.kept.validate(made, loader(2), verbose=False)
        weights, engine = made.state_dict(), made.kept.strategy.engine
        other = self.trainer(self.configuration("unused"))
        self.assertEqual([wanted], other.validate(made, loader(2), verbose=False))
        self.assertIs(engine, other.strategy.engine)
        self.assert_weights(weights, made.state_dict())
        self.assertFalse((self.folder / "unused").exists())
        self.fit(module(), self.trainer(self.configuration("of another run"))).kept.strategy.engine.close()
        self.assert_error("of another run: a store exists, of another run; name another", self.trainer(
            self.configuration("of another run")).fit, made, loader(1))
        self.assert_weights(weights, made.state_dict())
        self.assert_error("weights are torch.float32 on cpu, as its first run had them", self.trainer(
            self.configuration("narrow"), precision="bf16-true").fit, made, loader(1))
        self.assert_weights(weights, made.state_dict())
        self.trainer(self.configuration("third"), accumulate_grad_batches=4).fit(made, loader(8))
        self.assertEqual((2, 4), (engine.current_step, engine.settings["gradient_accumulation_steps"]))
        engine.close()
        self.assert_error("module: its engine has been closed", other.validate, made, loader(1))

    def test_AnExceptionLeavesTheLastStep(self):
        class Failing(Body):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                if batch_idx == 5:
                    raise ValueError("here")
                return loss

        whole = self.fit(module(), self.trainer(self.configuration("whole"), accumulate_grad_batches=4), 4)
        made, trainer = module(body=Failing), self.trainer(accumulate_grad_batches=4)
        self.closing(made)
        self.assertRaisesRegex(ValueError, "here", trainer.fit, made, loader(8))
        trainer.save_checkpoint(str(self.folder / "last"))
        self.assert_weights(whole.state_dict(), made.state_dict())
        self.assertEqual(1, trainer.strategy.engine.current_step)

    def test_CtrlCAndNaNLeaveIt(self):
        class Ending(Body):
            def training_step(self, batch, batch_idx):
                loss = super().training_step(batch, batch_idx)
                return self.end(loss) if batch_idx == 2 else loss

        def interrupt(loss):
            raise KeyboardInterrupt

        two = self.fit(module(), self.trainer(self.configuration("two")), 2).state_dict()
        for number, (end, ends) in enumerate(((interrupt, (KeyboardInterrupt, SystemExit)),  # by version
                                              (lambda loss: loss * float("nan"), spillway.Error))):
            made, trainer = module(body=Ending), self.trainer(self.configuration(f"store{number}"))
            self.closing(made)
            made.end = end
            with contextlib.suppress(ends):
                trainer.fit(made, loader(4))
            self.assertEqual(2, trainer.strategy.engine.current_step)
            trainer.save_checkpoint(str(self.folder / f"saved{number}"))
            self.assert_weights(two, made.state_dict())

    def test_ALearningRateThatATunerFinds(self):
        made, trainer = module(), self.trainer()
        self.closing(made)
        made.lr = 1e-3
        weights = {name: value.clone() for name, value in made.state_dict().items()}
        with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
            found = lightning.pytorch.tuner.Tuner(trainer).lr_find(made, loader(20), num_training=10)
        self.assertEqual(10, len(found.results["lr"]))
        self.assert_weights(weights, made.state_dict())
        self.assertEqual(0, trainer.strategy.engine.current_step)


if __name__ == "__main__":
    main()
