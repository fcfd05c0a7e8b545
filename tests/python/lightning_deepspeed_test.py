"""What Lightning's own tests show of its DeepSpeed strategy, of Spillway's: docs/lightning.md lists them."""
import os
import subprocess
import unittest.mock

import lightning_case  # first: where there is no Lightning, it ends the program
from case import main
from lightning_case import LightningCase, lightning

import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torchmetrics import Accuracy


class Boring(BoringModel):
    def loss(self, preds, labels=None):
        return preds.float().square().mean()  # PyTorch 1.13 has no mse_loss in bf16


class Late(Boring):
    """What is trained is made in configure_model."""

    def __init__(self):
        super().__init__()
        self.layer = None

    def configure_model(self):
        if self.layer is None:
            self.layer = torch.nn.Linear(32, 2)

    def on_load_checkpoint(self, checkpoint):
        self.configure_model()


class LateByHand(Late):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.step(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Classifier(lightning.pytorch.LightningModule):
    by_hand = False

    def __init__(self):
        super().__init__()
        self.automatic_optimization = not self.by_hand
        self.model = None

    def configure_model(self):
        if self.model is None:
            self.accuracy = Accuracy(task="multiclass", num_classes=3)
            self.model = torch.nn.Sequential(
                *(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), torch.nn.ReLU()) for _ in range(3)),
                torch.nn.Linear(32, 3))

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]).float(), batch[1])
        self.log("accuracy", self.accuracy(self.model(batch[0]).float().detach(), batch[1]))
        if self.by_hand:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def test_step(self, batch, batch_idx):
        logits = self.model(batch[0]).float()
        self.log("test_loss", torch.nn.functional.cross_entropy(logits, batch[1]))
        self.log("test_accuracy", self.accuracy(logits, batch[1]))

    def validation_step(self, batch, batch_idx):
        self.log("val_accuracy", self.accuracy(self.model(batch[0]).float(), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ByHand(Classifier):
    by_hand = True


def classes(rows=40):
    generator = torch.Generator().manual_seed(3)
    numbers = torch.randn(rows, 32, generator=generator)
    return torch.utils.data.DataLoader(list(zip(numbers, (numbers[:, 0] > 0).long() + (numbers[:, 1] > 0).long())), 8)


class AsDeepSpeeds(LightningCase):
    def boring(self, kind, more_of_config=None, **more):
        made = kind()
        self.closing(made)
        trainer = self.trainer(self.configuration(f"store{len(os.listdir(self.folder))}", **(more_of_config or {})),
                               limit_train_batches=5, limit_val_batches=2, limit_test_batches=2, **more)
        made.__dict__["kept"] = trainer
        return made, trainer

    def assert_saved(self, made):
        """What the program makes of a checkpoint are the weights."""
        made.kept.save_checkpoint(str(self.folder / "model.ckpt"))
        if not os.path.exists(os.environ.get("SPILLWAY_BINARY", "")):
            self.skipTest("SPILLWAY_BINARY names no program")
        subprocess.run([os.environ["SPILLWAY_BINARY"], "export", str(self.folder / "model.ckpt/spillway"),
                        str(self.folder / "exported")], check=True, stdout=subprocess.DEVNULL)
        from safetensors.torch import load_file
        self.assert_weights({name: value.float() for name, value in sorted(made.state_dict().items())},
                            dict(sorted(load_file(self.folder / "exported/model.safetensors").items())))

    def test_TestsAndThenTrains(self):
        for kind in (Late, LateByHand):
            made, trainer = self.boring(kind)
            with unittest.mock.patch.object(made, "configure_optimizers", wraps=made.configure_optimizers) as asked:
                trainer.test(made, verbose=False)
            asked.assert_not_called()
            trainer.fit(made)
            self.assertEqual(5, trainer.global_step)
        self.assert_saved(made)

    def test_PartsMadeEarlyAndLateAreOfOneType(self):
        class Both(Late):
            def __init__(self):
                super().__init__()
                self.early = torch.nn.Linear(32, 32)

            def forward(self, x):
                return self.layer(self.early(x))

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

            def on_train_epoch_start(self):
                assert all(parameter.dtype == torch.bfloat16 for parameter in self.parameters())

        made, trainer = self.boring(Both, precision="bf16-true")
        trainer.fit(made)
        self.assertEqual(5, trainer.strategy.engine.current_step)

    def test_ARecurrentLayer(self):
        class Recurrent(Boring):
            def __init__(self):
                super().__init__()
                self.rnn = torch.nn.GRU(32, 32)

            def forward(self, x):
                return self.layer(self.rnn(x)[0])

            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), lr=0.1)

        made, trainer = self.boring(Recurrent)
        trainer.fit(made)
        self.assertEqual(5, trainer.strategy.engine.current_step)

    def test_CheckpointsOfAModelWithMetrics(self):
        for kind, more in ((ByHand, {}), (Classifier, {"accumulate_grad_batches": 2})):
            keeping = lightning.pytorch.callbacks.ModelCheckpoint(
                str(self.folder / kind.__name__), monitor="val_accuracy", mode="max", save_last=True, save_top_k=-1)
            made, data = kind(), classes()
            self.closing(made)
            trainer = self.trainer(self.configuration(kind.__name__), max_epochs=3, callbacks=[keeping],
                                   enable_checkpointing=True, **more)
            trainer.fit(made, data, data)
            trainer.test(made, data, ckpt_path=keeping.best_model_path, verbose=False)
            results = trainer.test(dataloaders=data, ckpt_path="best", verbose=False)
            again = kind()
            self.closing(again)
            other = self.trainer(self.configuration(kind.__name__ + "again"))
            self.assertEqual(results, other.test(again, data, ckpt_path=keeping.best_model_path, verbose=False))

    def test_StepsAreCountedAlike(self):
        seen = []

        class Looking(lightning.pytorch.Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                seen.append((trainer.global_step, trainer.strategy.engine.current_step))

        made, trainer = self.boring(Boring, accumulate_grad_batches=2, max_epochs=2, callbacks=[Looking()])
        trainer.fit(made)
        self.assertEqual(10, len(seen))
        self.assertTrue(all(one == other for one, other in seen))

    def test_SchedulesStepAsOften(self):
        for interval, wanted in (("step", 1 + 2 * 5), ("epoch", 1 + 2)):
            class Scheduled(Boring):
                def configure_optimizers(self):
                    optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
                    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
                    assert self.device.type == "cpu" and self.trainer.estimated_stepping_batches == 10
                    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": interval}}

            with unittest.mock.patch.object(torch.optim.lr_scheduler.StepLR, "step", autospec=True) as step:
                made, trainer = self.boring(Scheduled, max_epochs=2)
                trainer.fit(made)
            self.assertEqual(wanted, step.call_count)

    def test_TheConfigurationIsTheStrategys(self):
        sections = {"fp16": {"loss_scale": 16, "initial_scale_power": 11, "loss_scale_window": 12, "hysteresis": 3,
                             "min_loss_scale": 2},
                    "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
        _, trainer = self.boring(Boring, sections)
        self.assertEqual(12, trainer.strategy.config["fp16"]["loss_scale_window"])
        made, trainer = self.boring(Boring, {"bf16": {"enabled": True}})
        trainer.validate(made, verbose=False)
        self.assertEqual(torch.bfloat16, made.layer.weight.dtype)
        self.assertIsInstance(self.plain(strategy="spillway").strategy.config["zero_optimization"], dict)


if __name__ == "__main__":
    main()
