"""What the suites of Lightning share: packages, modules and trainers, and what a hand-written loop gives."""
import contextlib
import io
import logging
import sys
import types
import warnings

from case import Case, need

for missing in ("lightning", "pytorch_lightning"):
    need(missing, f"no {missing} in this Python; `pip install lightning pytorch_lightning` brings both")
import torch  # noqa: E402

try:  # LightningModule asks for it before PyTorch 2.1; PyTorch 1.13's own cannot be imported by Python 3.11
    import torch.distributed._shard.sharded_tensor  # noqa: F401
except ValueError:
    nothing = types.ModuleType("torch.distributed._shard.sharded_tensor")
    nothing.pre_load_state_dict_hook = nothing.state_dict_hook = lambda *_, **__: None
    sys.modules[nothing.__name__] = nothing

warnings.filterwarnings("ignore")
with contextlib.redirect_stderr(io.StringIO()):
    import lightning.pytorch  # noqa: E402
    import pytorch_lightning  # noqa: E402

import spillway.lightning  # noqa: E402
import toy_model  # noqa: E402

for package in ("lightning", "lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
    logging.getLogger(package).setLevel(logging.ERROR)

logging.getLogger("spillway").setLevel(logging.WARNING)

PACKAGES = {"lightning.pytorch": lightning.pytorch, "pytorch_lightning": pytorch_lightning}


class Body:
    """A language model, in front of a package's LightningModule."""

    def __init__(self, seed=1, **shape):
        super().__init__()
        self.network = toy_model.model(seed, **shape)
        self.losses = []

    def forward(self, ids):
        return self.network(ids)

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)  # Lightning's loaders draw numbers, too
        loss = self(batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self(batch))

    def predict_step(self, batch, batch_idx):
        return self(batch).item()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)


def module(package=lightning.pytorch, body=Body, seed=1, **shape):
    return type(body.__name__, (body, package.LightningModule), {})(seed, **shape)


class LightningCase(Case):
    def configuration(self, name="store", device="nvme", **more):
        place = {"device": device, **({"nvme_path": str(self.folder / name)} if device == "nvme" else {})}
        return {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}, **more,
                "spillway": {"tile_elements": 4096, **more.get("spillway", {})}}

    def trainer(self, configuration=None, package=lightning.pytorch, options=None, **more):
        strategy = spillway.lightning.SpillwayStrategy(configuration or self.configuration(), **(options or {}))
        return self.plain(package, strategy=strategy, **more)

    def plain(self, package=lightning.pytorch, **more):
        values = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1,
                  "enable_model_summary": False, "accelerator": "cpu" if toy_model.DEVICE == "cpu" else "gpu",
                  "devices": 1, "default_root_dir": str(self.folder / "root"), "num_sanity_val_steps": 0, **more}
        return package.Trainer(**values)

    def fit(self, made, trainer, data=8, **more):
        """`made`: a module. Its engine is closed with the case."""
        self.closing(made)
        made.__dict__["kept"] = trainer  # of which a module has a weak reference, with some versions
        trainer.fit(made, loader(data), **more)
        return made

    def closing(self, made):
        self.addCleanup(lambda: made.__dict__.get("_spillway_engine") and made._spillway_engine._end())

    def assert_weights(self, wanted, found, exactly=True):
        self.assertEqual(list(wanted), list(found))
        for name, value in wanted.items():
            if exactly:
                self.assertTrue(torch.equal(value, found[name]), name)
            else:
                self.assertLess((value - found[name]).abs().max().item(), 2e-5, name)


def loader(count, seed=5):
    """Of micro-batches, in order."""
    return torch.utils.data.DataLoader(toy_model.batches(count, seed), batch_size=None)


def by_hand(case, made, configuration, schedule=None, micro_batches=8, accumulation=1, **options):
    """The same in a loop: losses, weights and steps of a plain engine. `schedule`: of rates, by step."""
    engine = case.engine(made, configuration, **options)
    losses, data = [], toy_model.batches(micro_batches)
    for position, batch in enumerate(data):
        torch.manual_seed(position)
        if schedule and position % accumulation == 0:
            engine.set_learning_rate(schedule(engine.current_step))
        loss = engine(batch)
        losses.append(loss.item())
        engine.backward(loss / accumulation, scale_wrt_gas=False)
        if (position + 1) % accumulation == 0 or position + 1 == len(data):
            engine.step(early=True)
    result = losses, made.state_dict(), engine.current_step
    engine.close()
    return result
