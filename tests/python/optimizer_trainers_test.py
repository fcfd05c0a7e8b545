"""spillway.AdamW below Accelerate, Hugging Face's Trainer and Lightning, which know it as an optimizer of PyTorch's."""
import itertools
import os
import sys
import types
import unittest
import unittest.mock
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
from case import main, need  # noqa: E402

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import accelerate  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from optimizer_loops import Case, Network, groups_of, loop  # noqa: E402
from toy_model import batches, model  # noqa: E402
from trainer_test import Plain, Stopping, examples  # noqa: E402
from trainer_test import model as language_model  # noqa: E402

try:
    try:  # LightningModule asks for it before PyTorch 2.1; PyTorch 1.13's own cannot be imported by Python 3.11
        import torch.distributed._shard.sharded_tensor  # noqa: F401
    except ValueError:
        nothing = types.ModuleType("torch.distributed._shard.sharded_tensor")
        nothing.pre_load_state_dict_hook = nothing.state_dict_hook = lambda *_, **__: None
        sys.modules[nothing.__name__] = nothing
    import lightning
except ImportError:
    lightning = None


class Accelerate(Case):
    def schedule(self, optimizer, **options):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 6e-2], total_steps=10, **options)

    def test_PreparedAfterAResume(self):
        """Accumulation, clipping, a schedule of rates and betas, two groups, an idle parameter, and a new process."""
        for accumulation, clip in itertools.product((1, 3), (None, 0.1)):
            with self.subTest(accumulation=accumulation, clip=clip):
                where = self.on_nvme(f"{accumulation} {clip}")
                expected, network = Network(), Network()
                theirs = torch.optim.AdamW(groups_of(expected), lr=1e-2)
                ours = spillway.AdamW(groups_of(network), lr=1e-2, **where)
                for trained, optimizer in ((expected, theirs), (network, ours)):
                    schedule = self.schedule(optimizer)
                    loop(trained, optimizer, 3, accumulation=accumulation, clip=clip, schedule=schedule)
                    if trained is expected:
                        loop(trained, optimizer, 4, first=3, accumulation=accumulation, clip=clip, schedule=schedule)
                ours.close()
                network = Network()
                ours = self.optimizer(network, parameters=groups_of(network), lr=1e-2, **where, on_existing="resume")
                schedule = self.schedule(ours, last_epoch=ours.current_step - 1)
                accelerator = accelerate.Accelerator(cpu=True)
                with unittest.mock.patch.object(ours._states, "export_state", side_effect=AssertionError), \
                        unittest.mock.patch.object(ours._states, "import_state", side_effect=AssertionError):
                    prepared, optimizer, schedule = accelerator.prepare(network, ours, schedule)
                loop(prepared, optimizer, 4, first=3, accumulation=accumulation, clip=clip, schedule=schedule,
                     accelerator=accelerator)
                self.assert_near(expected.parameters(), network.parameters(), 1e-5)

    def test_SaveStateAndLoadState(self):
        network = Network()
        accelerator = accelerate.Accelerator(cpu=True)
        made = self.optimizer(network, **self.on_nvme())
        prepared, optimizer = accelerator.prepare(network, made)
        loop(prepared, optimizer, 2, accelerator=accelerator)
        accelerator.save_state(str(self.folder / "saved"))
        loop(prepared, optimizer, 2, first=2, accelerator=accelerator)
        expected = [p.clone() for p in network.parameters()]
        accelerator.load_state(str(self.folder / "saved"))
        self.assertEqual(2, made.current_step)
        loop(prepared, optimizer, 2, first=2, accelerator=accelerator)
        self.assert_same(expected, network.parameters())


class Trainer(Case):
    def setUp(self):
        super().setUp()
        os.environ.pop("ACCELERATE_MIXED_PRECISION", None)

    def trainer(self, make, name="out", **more):
        network = language_model()
        decays = [p for p in network.parameters() if p.dim() > 1]
        rest = [p for p in network.parameters() if p.dim() <= 1]
        optimizer = make([{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
        if isinstance(optimizer, spillway.AdamW):
            self.made(optimizer)
        schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, 8)
        values = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8,
                  "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [],
                  "disable_tqdm": True, "use_cpu": True, **more}
        arguments = transformers.TrainingArguments(output_dir=str(self.folder / name), **values)
        made = Plain(model=network, args=arguments, train_dataset=examples(32), optimizers=(optimizer, schedule))
        made.remove_callback(transformers.PrinterCallback)
        return made, optimizer

    def test_TrainsAsWithPyTorchsAdamW(self):
        theirs, _ = self.trainer(lambda groups: torch.optim.AdamW(groups, lr=1e-3))
        theirs.train()
        for where in ({}, self.on_nvme()):
            ours, optimizer = self.trainer(lambda groups: spillway.AdamW(groups, lr=1e-3, **where))  # noqa: B023
            ours.train()
            self.assertEqual(8, optimizer.current_step)
            for wanted, found in zip(theirs.losses, ours.losses, strict=True):
                self.assertAlmostEqual(wanted, found, delta=1e-5 * wanted)
            self.assertEqual(theirs.logged("learning_rate"), ours.logged("learning_rate"))

    def test_ACheckpointGoesOn(self):
        """And wins over the store, which was a step further."""
        def make(on_existing):
            return lambda groups: spillway.AdamW(groups, lr=1e-3, **self.on_nvme(), on_existing=on_existing)

        whole, optimizer = self.trainer(lambda groups: spillway.AdamW(groups, lr=1e-3))
        whole.train()
        first, optimizer = self.trainer(make("refuse"), "run", save_strategy="steps", save_steps=3)
        first.add_callback(Stopping(4))
        first.train()
        optimizer.close()
        with self.assertLogs("spillway", "WARNING") as heard:
            again, optimizer = self.trainer(make("resume"), "run")
            self.assertEqual(4, optimizer.current_step)
            again.train(resume_from_checkpoint=str(self.folder / "run" / "checkpoint-3"))
        self.assertIn("step 3 of what is loaded takes the place of step 4 of the store", heard.output[-1])
        self.assertEqual(8, optimizer.current_step)
        self.assertEqual(whole.losses[6:], again.losses)

    def test_StreamedGradientsAreClippedByTheOptimizer(self):
        def make(groups):
            return spillway.AdamW(groups, lr=1e-3, stream_gradients=True, max_grad_norm=0.5)

        plain, _ = self.trainer(lambda groups: spillway.AdamW(groups, lr=1e-3, max_grad_norm=0.5), max_grad_norm=0)
        plain.train()
        trainer, _ = self.trainer(make)
        self.assert_error("give the optimizer max_grad_norm=", trainer.train)
        trainer, _ = self.trainer(make, max_grad_norm=0)
        trainer.train()
        self.assertEqual(plain.losses, trainer.losses)


@unittest.skipIf(lightning is None, "no lightning in this Python; `pip install lightning` brings it")
class Lightning(Case):
    def trained(self, make, steps=6, checkpoint=None):
        network, folder = model().eval(), str(self.folder)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.network, self.losses = network, []

            def training_step(self, ids, _):
                loss = self.network(ids[0])
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                optimizer = make(self.parameters())
                schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=10)
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        module = Module()
        loader = torch.utils.data.DataLoader(batches(24), batch_size=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = lightning.Trainer(max_steps=steps, accumulate_grad_batches=2, gradient_clip_val=0.5,
                                        accelerator="cpu", logger=False, enable_progress_bar=False,
                                        enable_model_summary=False, default_root_dir=folder,
                                        enable_checkpointing=False)
            trainer.fit(module, loader, ckpt_path=checkpoint)
        trainer.save_checkpoint(self.folder / f"{steps}.ckpt")
        optimizer = trainer.optimizers[0]
        if isinstance(optimizer, spillway.AdamW):
            self.made(optimizer)
        return module.losses

    def test_TrainsAsWithPyTorchsAdamW(self):
        """From the start, and from a checkpoint."""
        found = []
        for make in (lambda p: torch.optim.AdamW(p, lr=1e-3), lambda p: spillway.AdamW(p, lr=1e-3)):
            losses = self.trained(make)
            self.trained(make, steps=3)
            found.append(losses + self.trained(make, checkpoint=str(self.folder / "3.ckpt")))
        for wanted, value in zip(*found, strict=True):
            self.assertAlmostEqual(wanted, value, delta=1e-5 * wanted)


if __name__ == "__main__":
    main()
