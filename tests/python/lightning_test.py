"""Lightning's Trainer on Spillway: the bits of a hand-written loop, and what Lightning gives without."""
import os
import unittest.mock

import lightning_case  # first: where there is no Lightning, it ends the program
from case import main
from lightning_case import PACKAGES, Body, LightningCase, by_hand, lightning, loader, module

import torch

import spillway
from toy_model import batches

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}}
Scheduler = torch.optim.lr_scheduler


def returning(make):
    """A module's body with another optimizer: what `make` gives of its parameters by name."""
    class Returning(Body):
        def configure_optimizers(self):
            return make(dict(self.named_parameters()))
    return Returning


def with_schedule(make, **how):
    """`make`: of an optimizer."""
    class Scheduled(Body):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **how}}
    return Scheduled


class Manual(Body):
    automatic_optimization = False
    micro_batches, by_closure = 1, False

    def training_step(self, batch, batch_idx):
        def closure():
            loss = super(Manual, self).training_step(batch, batch_idx)
            self.manual_backward(loss / self.micro_batches)
            return loss

        optimizer = self.optimizers()
        if self.by_closure:
            optimizer.zero_grad()
            optimizer.step(closure=closure)
            return
        closure()
        if (batch_idx + 1) % self.micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()


class Plain(Body):
    """Whose step() follows PyTorch's own backward."""
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx).backward()
        self.optimizers().step()
        self.optimizers().zero_grad()


class Twice(Plain):
    """Of one graph, in two passes."""

    def training_step(self, batch, batch_idx):
        loss = Body.training_step(self, batch, batch_idx)
        self.manual_backward(0.25 * loss, retain_graph=True)
        self.manual_backward(0.75 * loss)
        self.optimizers().step()
        self.optimizers().zero_grad()


class Case(LightningCase):
    def hand(self, body=Body, accumulation=1, clipping=0, optimizer=None, schedule=None, **more):
        sections = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation,
                    "gradient_clipping": clipping, "optimizer": optimizer or OPTIMIZER, **more}
        store = f"hand{len(os.listdir(self.folder))}"
        return by_hand(self, module(body=body), self.configuration(store, **sections), schedule,
                       accumulation=accumulation)

    def assert_as_by_hand(self, body=Body, trainer=None, configuration=None, data=8, options=None, **hand):
        """Losses and weights of a Trainer are those of the loop. The module comes back."""
        losses, weights, steps = self.hand(body, **hand)
        made = self.fit(module(body=body), self.trainer(configuration, options=options, **(trainer or {})), data)
        self.assertEqual(losses, made.losses)
        self.assert_weights(weights, made.state_dict())
        self.assertEqual(steps, made.trainer.strategy.engine.current_step)
        return made


class Training(Case):
    def test_BothPackagesGiveTheBitsOfALoopByHand(self):
        losses, weights, _ = self.hand()
        for name, package in PACKAGES.items():
            made = self.fit(module(package), self.trainer(self.configuration(name), package))
            self.assertEqual(losses, made.losses)
            self.assert_weights(weights, made.state_dict())
            self.assertEqual((8, 8), (made.trainer.global_step, made.trainer.strategy.engine.current_step))
            self.assertEqual(name, made.trainer.strategy.package)

    def test_TheNameAloneKeepsAllInHostMemory(self):
        _, weights, _ = self.hand()
        for package in PACKAGES.values():
            made = self.fit(module(package), self.plain(package, strategy="spillway"))
            self.assert_weights(weights, made.state_dict())
            self.assertFalse([entry for entry in made.trainer.strategy.engine.ledger() if entry[0] == "nvme"])

    def test_AFileThatAVariableNames(self):
        (self.folder / "ds.json").write_text('{"optimizer": {"type": "Lion", "params": {"lr": 2e-4}}}')
        for name in ("SPILLWAY_CONFIG", "PL_DEEPSPEED_CONFIG_PATH"):
            with unittest.mock.patch.dict(os.environ, {name: str(self.folder / "ds.json")}):
                made = self.fit(module(), self.plain(strategy="spillway"), 2)
                self.assertEqual("Lion", made.trainer.strategy.engine.settings["optimizer.type"])

    def test_TrainsAsLightningAloneDoes(self):
        accumulating = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "max_epochs": 2}
        halving = with_schedule(lambda optimizer: Scheduler.StepLR(optimizer, 1, 0.5))
        plateau = with_schedule(lambda optimizer: Scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1),
                                monitor="loss", interval="step", strict=False)
        sgd = returning(lambda named: torch.optim.SGD(named.values(), 0.05, 0.9, weight_decay=0.01, nesterov=True))
        for number, (body, more) in enumerate((
                (Body, {}), (Body, accumulating), (halving, {"max_epochs": 3}), (plateau, {}), (sgd, {}), (Manual, {}),
                (Plain, {}), (Twice, {}),
                (returning(lambda named: torch.optim.Adam(named.values(), 1e-3, weight_decay=0.1)), {}),
                (returning(lambda named: torch.optim.Adagrad(named.values(), 1e-2, weight_decay=0.1)), {}))):
            with self.subTest(number):
                plain, made = module(body=body), module(body=body)
                plain.__dict__["kept"] = self.plain(**more)
                plain.kept.fit(plain, loader(8))
                self.fit(made, self.trainer(self.configuration(f"store{number}"), **more))
                self.assertEqual(plain.losses[0], made.losses[0])
                for wanted, found in zip(plain.losses, made.losses):  # the optimizers round differently
                    self.assertAlmostEqual(wanted, found, delta=1e-5 * wanted)
                self.assertEqual(plain.trainer.global_step, made.trainer.global_step)
                self.assertEqual(plain.trainer.optimizers[0].param_groups[0]["lr"],
                                 made.trainer.optimizers[0].param_groups[0]["lr"])

    def test_AccumulationAndClippingAreTheTrainers(self):
        # Of 8 micro-batches the last two are a step of their own, as Lightning has it.
        made = self.assert_as_by_hand(trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
                                      accumulation=3, clipping=0.5)
        self.assertEqual(3, made.trainer.global_step)
        self.assertGreater(made.trainer.strategy.report.gradient_norm, 0.5)

    def test_AccumulationThatChangesByEpoch(self):
        growing = lightning.pytorch.callbacks.GradientAccumulationScheduler({0: 1, 1: 4})
        made = self.fit(module(), self.trainer(callbacks=[growing], max_epochs=2))
        self.assertEqual(8 + 2, made.trainer.strategy.engine.current_step)
        self.assertEqual(4, made.trainer.strategy.engine.settings["gradient_accumulation_steps"])

    def test_SchedulesOfPyTorch(self):
        def rate(step):
            return 1e-3 * (step + 1) / 4

        self.assert_as_by_hand(with_schedule(lambda optimizer: Scheduler.LambdaLR(
            optimizer, lambda step: (step + 1) / 4), interval="step"), schedule=rate)

    def test_GroupsOfParameters(self):
        def make(named):
            norms = {name: parameter for name, parameter in named.items() if "norm" in name}
            others = [parameter for name, parameter in named.items() if name not in norms]
            groups = [{"params": others, "weight_decay": 0.1}, {"params": norms.values(), "lr": 5e-4}]
            optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0)
            return [optimizer], [{"scheduler": Scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
                                  "interval": "step"}]

        self.assert_as_by_hand(
            returning(make), optimizer={"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
            spillway={"parameter_groups": [{"parameters": ["*norm*"], "lr": 5e-4, "weight_decay": 0}]},
            schedule=lambda step: 1e-3 / (1 + step))

    def test_TheConfigurationsOptimizerAndSchedule(self):
        sections = {"optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
                    "scheduler": {"type": "WarmupDecayLR", "params": {
                        "warmup_max_lr": 0.05, "warmup_num_steps": 3, "total_num_steps": 8, "warmup_type": "linear"}}}
        uncalled = returning(lambda named: self.fail("configure_optimizers was called"))
        logged = []

        class Watching(uncalled):
            def on_train_batch_start(self, *_):
                logged.append(self.trainer.optimizers[0].param_groups[0]["lr"])

        _, weights, _ = by_hand(self, module(), self.configuration(
            "hand", train_micro_batch_size_per_gpu=1, gradient_clipping=0, **sections))
        made = self.fit(module(body=Watching), self.trainer(self.configuration(**sections)))
        self.assert_weights(weights, made.state_dict())
        self.assertEqual(7, len(set(logged)))  # the first two are 0, as DeepSpeed has it
        self.assertEqual("SGD", type(made.trainer.optimizers[0]).__name__)

    def test_ManualOptimization(self):
        class ByClosure(Manual):
            by_closure = True

        class Accumulating(Manual):
            micro_batches = 4

        self.assert_as_by_hand(Manual)
        self.assert_as_by_hand(ByClosure, configuration=self.configuration("closure"))
        made = self.assert_as_by_hand(Accumulating, configuration=self.configuration(
            "four", gradient_accumulation_steps=4), accumulation=4)
        self.assertEqual(2, made.trainer.global_step)
        with self.assertRaisesRegex(spillway.Error, "has had its 1 micro-batches .gradient_accumulation_steps"):
            self.fit(module(body=Accumulating), self.trainer(self.configuration("one")))

    def test_AStepWithoutALossUpdatesNothing(self):
        class Skipping(Body):
            def training_step(self, batch, batch_idx):
                return None if batch_idx in (2, 3, 5) else super().training_step(batch, batch_idx)

            def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
                optimizer.zero_grad(set_to_none=True)  # PyTorch's default since 2.0

        made, plain = module(body=Skipping), module(body=Skipping)
        self.plain(accumulate_grad_batches=2).fit(plain, loader(8))
        self.fit(made, self.trainer(accumulate_grad_batches=2))
        self.assertEqual((4, 3), (made.trainer.global_step, made.trainer.strategy.engine.current_step))
        self.assert_weights(plain.state_dict(), made.state_dict(), exactly=False)

    def test_OptimizersAreWhatTheModuleReturned(self):
        seen = {}

        class Looking(with_schedule(lambda optimizer: Scheduler.StepLR(optimizer, 1), name="steps")):
            def configure_optimizers(self):
                made = super().configure_optimizers()
                seen["made"] = made["optimizer"]
                return made

            def on_train_start(self):
                optimizer = self.optimizers(use_pl_optimizer=False)
                seen.update(same=optimizer is seen["made"], kind=isinstance(optimizer, torch.optim.AdamW),
                            name=self.trainer.lr_scheduler_configs[0].name, params=optimizer.param_groups[0]["params"])

        monitor = lightning.pytorch.callbacks.LearningRateMonitor()
        made = self.fit(module(body=Looking), self.trainer(
            callbacks=[monitor], logger=lightning.pytorch.loggers.CSVLogger(str(self.folder)), log_every_n_steps=1))
        self.assertEqual({"steps": [1e-3]}, monitor.lrs)
        self.assertEqual((True, True, "steps"), (seen["same"], seen["kind"], seen["name"]))
        self.assertEqual([id(p) for p in made.parameters()], [id(p) for p in seen["params"]])
        self.assertEqual({}, dict(seen["made"].state))  # PyTorch's states are nowhere


class Types(Case):
    def test_PrecisionIsTheWeightsType(self):
        section = {"bf16": {"enabled": True}}
        _, weights, _ = self.hand(**section)
        made = self.fit(module(), self.trainer(precision="bf16-mixed"))
        self.assert_weights(weights, made.state_dict())
        self.assertEqual({torch.bfloat16}, {value.dtype for value in made.state_dict().values()})
        self.assertEqual(("bf16-mixed", torch.bfloat16), (made.trainer.precision, made.dtype))
        by_file = self.fit(module(), self.trainer(self.configuration("file", **section)))
        self.assert_weights(weights, by_file.state_dict())

    def test_NumbersOfABatchComeInThatType(self):
        seen = []

        class Looking(Body):
            def training_step(self, batch, batch_idx):
                seen.extend([batch["ids"].dtype, batch["numbers"].dtype])
                return super().training_step(batch["ids"], batch_idx)

        data = [{"ids": ids, "numbers": torch.ones(2, dtype=torch.float64)} for ids in batches(1)]
        made = module(body=Looking)
        self.closing(made)
        self.trainer(precision="bf16-true").fit(made, torch.utils.data.DataLoader(data, batch_size=None))
        self.assertEqual([torch.int64, torch.bfloat16], seen)

    def test_WhatIsNoTypeOfWeights(self):
        self.assert_error("precision: DoublePrecision .64-true. is not here", self.trainer, precision="64-true")
        trainer = self.trainer(self.configuration(bf16={"enabled": False}), precision="bf16-mixed")
        self.assert_error("contradicts the Trainer.*\n.*bf16.enabled is false, precision=bf16-mixed true",
                          trainer.fit, module(), loader(2))


if __name__ == "__main__":
    main()
