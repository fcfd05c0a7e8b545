"""Fine-tunes a causal language model on a text: Lightning's Trainer on a Spillway engine.

    python examples/lightning_finetune.py --model meta-llama/Llama-3.2-1B --text book.txt --output out --bf16 \
        --nvme /mnt/nvme/run1

Checkpoints are directories in --output, with weights and optimizer states. --resume goes on with the last one, to the
same bits as a run that was never stopped.
"""
import argparse
import pathlib

import lightning.pytorch as pl
import torch
import transformers

import spillway.lightning


class FineTuning(pl.LightningModule):
    def __init__(self, model, lr):
        super().__init__()
        self.model, self.lr = model, lr

    def loss_of(self, rows):
        return self.model(input_ids=rows, labels=rows, use_cache=False).loss

    def training_step(self, rows, index):
        loss = self.loss_of(rows)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, rows, index):
        self.log("val_loss", self.loss_of(rows), prog_bar=True, on_epoch=True)

    def configure_optimizers(self):  # PyTorch's, whose states the engine has
        spared = [p for p in self.parameters() if p.dim() < 2]  # biases and norms do not decay
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.01},
                                       {"params": spared, "weight_decay": 0.0}], lr=self.lr)
        schedule = transformers.get_cosine_schedule_with_warmup(
            optimizer, num_warmup_steps=2, num_training_steps=int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def rows_of(text, tokenizer, length):
    """Tokens of a text, in rows of the same length."""
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if len(ids) < 2 * length:
        raise SystemExit(f"--text: has {len(ids)} tokens, and two rows of --length {length} are the least")
    return list(ids[:len(ids) // length * length].view(-1, length))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory, or a name on the hub")
    parser.add_argument("--text", required=True, help="a file of plain text")
    parser.add_argument("--output", required=True, help="for checkpoints and the trained model")
    parser.add_argument("--nvme", help="where weights and optimizer states live; without it in host memory")
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --output")
    return parser.parse_args()


def main():
    args = arguments()
    pl.seed_everything(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model)
    rows = rows_of(pathlib.Path(args.text).read_text(encoding="utf-8"), tokenizer, args.length)
    held_out = max(1, len(rows) // 10)

    place = {"device": "nvme", "nvme_path": args.nvme} if args.nvme else {"device": "cpu"}
    strategy = spillway.lightning.SpillwayStrategy(
        {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place}},
        on_existing="replace")  # the store of the run before may go; its checkpoints stay
    saving = pl.callbacks.ModelCheckpoint(args.output, filename="{epoch}", save_last="link")
    trainer = pl.Trainer(
        strategy=strategy, accelerator="cpu" if args.cpu else "auto", devices=1, max_epochs=args.epochs,
        precision="bf16-true" if args.bf16 else "32-true", accumulate_grad_batches=args.accumulation,
        gradient_clip_val=1.0, callbacks=[saving], default_root_dir=args.output, logger=False)
    module = FineTuning(model, args.lr)
    trainer.fit(module, torch.utils.data.DataLoader(rows[:-held_out], args.batch),
                torch.utils.data.DataLoader(rows[-held_out:], args.batch),
                ckpt_path="last" if args.resume else None)

    # As from_pretrained() takes it. All of it is in memory for that, in the type of training; what does not fit there
    # is written tile by tile with trainer.strategy.engine.export(DIR), under the LightningModule's names.
    model.save_pretrained(args.output, state_dict=model.state_dict())
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
