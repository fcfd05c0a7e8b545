"""What each process of lightning_ranks_test.py does: a run of Lightning's Trainer on two processes.

    lightning_ranks_script.py FOLDER [CHECKPOINT]
"""
import pathlib
import sys

import lightning_case
import torch
from lightning_case import lightning, module

import spillway
import spillway.lightning
from spillway.lightning import engine
from spillway.lightning.engine import LightningEngine

EPOCHS, STEPS, ROWS = 2, 10, 8  # steps of an epoch; rows of a step, on all processes together


class Body(lightning_case.Body):
    """Without dropout, whose numbers are each process's own."""

    def __init__(self, seed=1, **shape):
        super().__init__(seed, **shape)
        for part in self.network.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0

    def training_step(self, batch, batch_idx):
        loss = self(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch), sync_dist=True)


class Recording(lightning.pytorch.Callback):
    def __init__(self):
        self.losses, self.sampler = [], None

    def on_train_batch_end(self, trainer, *_):
        self.losses.append(trainer.callback_metrics["loss"].item())
        self.sampler = type(trainer.train_dataloader.sampler).__name__


def rows(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randint(0, lightning_case.toy_model.VOCABULARY, (count, 16), generator=generator))


def loaders(size):
    return [torch.utils.data.DataLoader(data, batch_size=size) for data in (rows(STEPS * ROWS), rows(ROWS, 6))]


def configuration(folder, groups=2):
    place = {"device": "nvme", "nvme_path": str(pathlib.Path(folder, "store"))}
    return {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"tile_elements": 4096, **({"sum_groups": groups} if groups else {})}}


class Seeded(Body):
    """With dropout, before its first block too."""

    def __init__(self, seed=1, **shape):
        super().__init__(seed, **shape)
        self.drop = torch.nn.Dropout(0.1)
        for part in self.network.modules():
            if isinstance(part, torch.nn.Dropout):
                part.p = 0.1

    def training_step(self, batch, batch_idx):
        loss = self.network(batch) * self.drop(torch.ones(64)).mean()
        self.log("loss", loss, sync_dist=True)
        return loss


def same_bits(folder, devices):
    """Weights of a run whose rows GlobalBatchSampler cuts, on so many processes."""
    lightning.pytorch.seed_everything(3)
    micro_batches = 4 // devices
    trainer = lightning.pytorch.Trainer(
        strategy=spillway.lightning.SpillwayStrategy(configuration(folder, 4)), devices=devices, accelerator="cpu",
        accumulate_grad_batches=micro_batches, use_distributed_sampler=False, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False, default_root_dir=folder)
    data = rows(19)
    sampler = spillway.GlobalBatchSampler(data, ROWS, 2, num_replicas=trainer.world_size, rank=trainer.global_rank)
    made = module(body=Seeded)
    trainer.fit(made, torch.utils.data.DataLoader(data, batch_sampler=sampler))
    weights = {"steps": torch.tensor(trainer.global_step), **made.state_dict()}
    trainer.strategy.engine.close()
    return weights


def fit_again(folder):
    """Once more from the weights of the run before, on hosts that see nothing of each other's files: how many steps,
    and of which files the weights came."""
    trained, read, is_dir = module(body=Body), [], pathlib.Path.is_dir
    plain = engine.weights_in

    def weights_in(place):
        read.append(str(place))
        return plain(place)

    for run in range(2):
        trainer = lightning.pytorch.Trainer(
            strategy=spillway.lightning.SpillwayStrategy(configuration(folder, None)), devices=2, accelerator="cpu",
            max_steps=2, logger=False, enable_progress_bar=False, enable_checkpointing=False,
            enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder)
        if run == 1:
            engine.weights_in = weights_in
            if trainer.global_rank != 0:
                pathlib.Path.is_dir = lambda path: (path.name != "weights") and is_dir(path)
            before = trained.state_dict()
            spied = LightningEngine._import

            def imported(self, weights):
                spied(self, weights)
                same.append(all(torch.equal(value, before[name]) for name, value in self.module.state_dict().items()))

            same, LightningEngine._import = [], imported
        trainer.fit(trained, *loaders(ROWS // 2))
    pathlib.Path.is_dir, engine.weights_in, LightningEngine._import = is_dir, plain, spied
    trained._spillway_engine.close()
    return {"read": read, "same": same, "steps": trainer.global_step}


def main():
    folder, *checkpoint = sys.argv[1:]
    saving = lightning.pytorch.callbacks.ModelCheckpoint(f"{folder}/checkpoints", filename="{epoch}", save_top_k=-1)
    recording = Recording()
    trainer = lightning.pytorch.Trainer(
        strategy=spillway.lightning.SpillwayStrategy(configuration(folder)), devices=2, accelerator="cpu",
        callbacks=[saving, recording], max_epochs=EPOCHS, logger=False, enable_progress_bar=False, log_every_n_steps=1,
        gradient_clip_val=1.0, enable_model_summary=False, num_sanity_val_steps=0, default_root_dir=folder)
    made = module(body=Body, seed=1 + trainer.global_rank)  # rank 0's counts
    trainer.fit(made, *loaders(ROWS // 2), ckpt_path=checkpoint[0] if checkpoint else None)
    torch.save({"losses": recording.losses, "sampler": recording.sampler, "steps": trainer.global_step,
                "val_loss": trainer.callback_metrics["val_loss"].item(), "weights": made.state_dict(),
                "facts": [trainer.global_rank, trainer.world_size, trainer.is_global_zero,
                          trainer.strategy.engine.ranks.count]},
               pathlib.Path(folder, f"rank{trainer.global_rank}{'-again' if checkpoint else ''}.pt"))
    trainer.strategy.engine.close()
    if not checkpoint:
        torch.save(same_bits(f"{folder}/bits", 2), pathlib.Path(folder, f"bits{trainer.global_rank}.pt"))
        torch.save(fit_again(f"{folder}/twice"), pathlib.Path(folder, f"twice{trainer.global_rank}.pt"))


if __name__ == "__main__":
    main()
