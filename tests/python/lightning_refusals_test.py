"""What Lightning's users may ask of Spillway in vain: one clear error each, and nothing is lost by it."""
import importlib.util
import os
import unittest.mock

import lightning_case  # first: where there is no Lightning, it ends the program
from case import main
from lightning_case import PACKAGES, Body, LightningCase, lightning, loader, module, pytorch_lightning

import torch

import spillway.lightning

Scheduler = torch.optim.lr_scheduler


def returning(make):
    class Returning(Body):
        def configure_optimizers(self):
            return make(self)
    return Returning


class Refusals(LightningCase):
    def refused(self, pattern, body=Body, configuration=None, options=None, **more):
        """A fit() is, and the module is as it was: a plain Trainer trains it."""
        made = module(body=body)
        self.closing(made)
        before = {name: value.clone() for name, value in made.state_dict().items()}
        self.assert_error(pattern, self.trainer(configuration, options=options, **more).fit, made, loader(2))
        self.assert_weights(before, made.state_dict())
        if "_spillway_engine" not in made.__dict__:
            self.assertTrue(all(parameter.device.type == "cpu" for parameter in made.parameters()))
            made.configure_optimizers = lambda: torch.optim.SGD(made.network.parameters(), 0.1)
            self.plain().fit(made, loader(1))
        return made

    def test_AllThatTheTrainerAsksForInOneError(self):
        class Own(Body):
            def backward(self, loss):
                loss.backward()

        average = lightning.pytorch.callbacks.StochasticWeightAveraging(1e-3)
        trainer = self.trainer(gradient_clip_val=1, gradient_clip_algorithm="value", callbacks=[average])
        self.assert_error("(?s)Trainer: not with Spillway.*algorithm \"value\".*Own.backward: would not.*"
                          "StochasticWeightAveraging: keeps a second", trainer.fit, module(body=Own), loader(2))
        made = module()
        made._compiler_ctx = {"compiler": "dynamo", "original_forward": None}
        with unittest.mock.patch.object(type(made), "_compiler_ctx", {}, create=True):
            self.assert_error("torch.compile: a compiled module", self.refusing, made)

    def refusing(self, made):
        from spillway.lightning import config as lightning_config
        lightning_config.refuse(self.plain(), made, lambda hook: False)

    def test_SeveralDevicesAndProcesses(self):
        for package in PACKAGES:
            strategy = spillway.lightning.strategy_of(package)()
            for count in (1, 2):
                strategy.parallel_devices = [torch.device("cpu")] * count
                self.assertEqual((strategy.is_distributed, strategy.processes), (count > 1, count))
            strategy.parallel_devices = [torch.device("cuda", index) for index in range(2)]
            strategy.cluster_environment = strategy._fabric("plugins.environments").LightningEnvironment()
            for index in range(2):
                with unittest.mock.patch.dict(os.environ, {"LOCAL_RANK": str(index)}):
                    self.assertEqual(torch.device("cuda", index), strategy.root_device)
        with unittest.mock.patch.dict(os.environ, {"WORLD_SIZE": "2"}):
            self.refused(r"WORLD_SIZE 2: the Trainer's devices= and num_nodes= say 1; start as many")

    def test_Optimizers(self):
        def adamw(made, **more):
            return torch.optim.AdamW(made.parameters(), lr=1e-3, **more)

        def two_groups(made, **more):
            first, *others = made.parameters()
            return torch.optim.AdamW([{"params": others}, {"params": [first], **more}], lr=1e-3)

        def cycling(made):
            optimizer = torch.optim.SGD(made.parameters(), 0.1, 0.9)
            return [optimizer], [Scheduler.OneCycleLR(optimizer, 0.1, 10)]

        for make, error in (
                (lambda made: torch.optim.RMSprop(made.parameters()), "RMSprop would be computed by PyTorch"),
                (lambda made: adamw(made, amsgrad=True), "amsgrad of AdamW: cannot be computed"),
                (lambda made: [adamw(made), adamw(made)], "gives 2 optimizers and 0 schedulers"),
                (lambda made: None, "gives no optimizer; return one, or name it"),
                (lambda made: two_groups(made, betas=(0.8, 0.9)), "groups have several betas; only rates and decays"),
                (lambda made: torch.optim.SGD(made.network.layers.parameters(), 0.1),
                 "network.embedding.weight, .* want gradients and no optimizer has them; give them to it, or say"),
                (lambda made: torch.optim.SGD([*made.parameters(), torch.nn.Parameter(torch.ones(1))], 0.1),
                 "has parameters that the module has not"),
                (lambda made: torch.optim.Adagrad(made.parameters(), lr_decay=0.1), "lr_decay and initial_accumulator"),
                (cycling, "OneCycleLR: would change the optimizer's momentum.*cycle_momentum=False")):
            with self.subTest(error):
                body = returning(make)
                body.automatic_optimization = "2 optimizers" not in error  # else Lightning refuses them itself
                self.refused(error, body)

    def test_RatesAndSettingsThatMoveLater(self):
        class Moving(Body):
            def configure_optimizers(self):
                first, *others = self.parameters()
                return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 5e-4}], lr=1e-3)

            def on_train_batch_start(self, batch, batch_idx):
                if batch_idx == 1:
                    self.move(self.trainer.optimizers[0].param_groups)

        def rate_of_a_group(groups):
            groups[1]["lr"] = 1e-3

        def rate_of_all(groups):
            groups[0]["lr"], groups[1]["lr"] = 5e-4, 2.5e-4

        def momentum(groups):
            groups[0]["betas"] = (0.5, 0.9)

        for number, (move, error, more) in enumerate((
                (rate_of_a_group, "a group's rate is 0.001 where 0.0005 is its share", {}),
                (momentum, "betas was .0.9, 0.999. and is .0.5, 0.9.; it counts as fit", {}),
                (rate_of_all, "gradients of the step have been pushed already", {"accumulate_grad_batches": 2}))):
            with self.subTest(error):
                body = type("Moving", (Moving,), {"move": staticmethod(move)})
                made, trainer = module(body=body), self.trainer(self.configuration(f"store{number}"), **more)
                self.closing(made)
                self.assert_error(error, trainer.fit, made, loader(2))
                self.assertEqual(0 if more else 1, trainer.strategy.engine.current_step)
        body = type("Moving", (Moving,), {"move": staticmethod(rate_of_all)})
        made = self.fit(module(body=body), self.trainer(self.configuration("moved")), 3)
        self.assertEqual(5e-4, made.kept.strategy.report.learning_rate)

    def test_ClippingOfTheModulesOwn(self):
        def clipping(value, algorithm="norm"):
            class Clipping(Body):
                def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
                    self.clip_gradients(optimizer, value, algorithm)
            return Clipping

        class ByHand(Body):
            def on_before_optimizer_step(self, optimizer):
                torch.nn.utils.clip_grad_norm_(self.parameters(), 0.5)

        same = self.fit(module(body=clipping(0.5)), self.trainer(self.configuration("same", gradient_clipping=0.5)), 2)
        self.assertEqual(2, same.kept.strategy.engine.current_step)
        for number, (body, error) in enumerate((
                (clipping(0.1), "clip_gradients: by norm to 0.1; step.. clips the norm, to 0: say gradient_clip_val"),
                (clipping(1, "value"), "clip_gradients: by value to 1"),
                (ByHand, "grad: its values are the engine's since backward"))):
            made, trainer = module(body=body), self.trainer(self.configuration(f"store{number}"))
            self.closing(made)
            self.assert_error(error, trainer.fit, made, loader(2))

    def test_ConfigurationsThatContradict(self):
        for more, asked, error in (
                ({"gradient_accumulation_steps": 2}, {}, "gradient_accumulation_steps is 2, accumulate_grad_batches 1"),
                ({"gradient_clipping": 1}, {"gradient_clip_val": 0.5}, "gradient_clipping is 1, gradient_clip_val 0.5"),
                ({"spillway": {"device": "cuda"}}, {}, 'spillway.device is "cuda", the Trainer\'s cpu "host"'),
                ({"scheduler": {"type": "WarmupLR"}}, {}, "scheduler: is the configuration's, beside an optimizer")):
            with self.subTest(error):
                self.refused(error, configuration=self.configuration(**more), **asked)
        self.refused("optimizer.type", configuration=self.configuration(optimizer={"type": "Muon"}))
        own = self.configuration(spillway={"no_decay": True})
        self.refused("beside groups of configure_optimizers", returning(lambda made: torch.optim.AdamW(
            [{"params": [parameter]} for parameter in made.parameters()])), own)
        self.assert_error("nowhere.json: cannot be read", spillway.lightning.SpillwayStrategy,
                          str(self.folder / "nowhere.json"))
        self.assert_error("on_existing: 'resume' is none of refuse, replace; fit.ckpt_path", self.trainer,
                          options={"on_existing": "resume"})

    def test_Plugins(self):
        plugins = lightning.pytorch.plugins
        self.assert_error("AsyncCheckpointIO: would not be asked", self.trainer, plugins=[plugins.AsyncCheckpointIO()])

        class Own(plugins.Precision):
            pass

        self.assert_error("precision: Own .32-true. is not here", self.trainer, plugins=[Own()])
        made = self.fit(module(), self.trainer(plugins=[plugins.HalfPrecision("bf16-true")]), 1)
        self.assertEqual(torch.bfloat16, made.kept.strategy.engine.dtype)

    def test_AStrategyOfTheOtherPackage(self):
        class Derived(spillway.lightning.strategy_of("lightning.pytorch")):
            pass

        self.assert_error('Derived: is of lightning.pytorch, and the Trainer of pytorch_lightning; derive it from '
                          'spillway.lightning.strategy_of."pytorch_lightning"', self.plain, pytorch_lightning,
                          strategy=Derived())
        self.assertIs(Derived, type(self.plain(strategy=Derived()).strategy))
        with unittest.mock.patch.object(importlib.util, "find_spec", lambda name: None):
            self.assert_error("neither lightning nor pytorch_lightning is installed", spillway.lightning._all)

    def test_WhatAnOptimizerDoesNotDo(self):
        made = self.fit(module(), self.trainer(), 1)
        optimizer = made.kept.optimizers[0]
        self.assert_error("its states are Spillway's; trainer.save_checkpoint", optimizer.state_dict)
        self.assert_error("its states are Spillway's; they come of fit", optimizer.load_state_dict, {})
        self.assert_error("add_param_group: what is trained is decided", optimizer.add_param_group,
                          {"params": [torch.nn.Parameter(torch.ones(1))]})
        self.assert_error("weights are Spillway's, torch.float32 on cpu, and cannot be moved", made.half)

    def test_BackwardTakesALossAndNoGradient(self):
        class Giving(Body):
            automatic_optimization = False

            def training_step(self, batch, batch_idx):
                self.manual_backward(self(batch), torch.ones(()))

        made = module(body=Giving)
        self.closing(made)
        self.assert_error("backward: takes a loss and retain_graph .tensor.1", self.trainer().fit, made, loader(1))

    def test_EmptyModules(self):
        with self.assertRaisesRegex(spillway.Error, "empty_init=True.: make the module on device meta"):
            with self.trainer().init_module(empty_init=True):
                pass
        with self.trainer(precision="bf16-true").init_module():
            self.assertEqual(torch.bfloat16, torch.nn.Linear(2, 2).weight.dtype)
        self.assertEqual(torch.float32, torch.nn.Linear(2, 2).weight.dtype)


if __name__ == "__main__":
    main()
