"""A plain PyTorch loop with spillway.AdamW, whose states are on NVMe. It goes on where it was, after kill -9 as well.

    python examples/adamw_loop.py --text README.md --store store --steps 200

The model learns to tell the next byte of a text. Weights and gradients are PyTorch's, on a GPU where there is one. In
the place of spillway.AdamW may stand torch.optim.AdamW, with its own arguments alone.
"""
import argparse
import json

import torch

import spillway


class Reader(torch.nn.Module):
    """A causal transformer over bytes."""

    def __init__(self, width, layers, context):
        super().__init__()
        self.bytes = torch.nn.Embedding(256, width)
        self.places = torch.nn.Embedding(context, width)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers))
        self.head = torch.nn.Linear(width, 256)

    def forward(self, ids):
        length = ids.shape[1]
        x = self.bytes(ids) + self.places(torch.arange(length, device=ids.device))
        mask = torch.full((length, length), float("-inf"), device=ids.device, dtype=x.dtype).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        return self.head(x).float()


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="a file to learn")
    parser.add_argument("--store", required=True, help="a directory of an NVMe drive, for weights and states")
    parser.add_argument("--host-bytes", help='the most host memory for states on their way, "8GiB" say')
    parser.add_argument("--steps", type=int, default=200, help="of the whole run, those before a resume included")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bf16", action="store_true")
    return parser.parse_args()


def micro_batch(text, args, step, micro):
    """Depends on its number alone, so that a resumed run sees the same."""
    generator = torch.Generator().manual_seed(step * args.accumulation + micro)
    begins = torch.randint(0, len(text) - args.context, (args.batch,), generator=generator)
    return torch.stack([text[begin:begin + args.context + 1] for begin in begins]).long()


def main():
    args = arguments()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Reader(args.width, args.layers, args.context).to(device, torch.bfloat16 if args.bf16 else torch.float32)
    with open(args.text, "rb") as file:
        text = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)

    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]

    def adamw(on_existing):
        return spillway.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                              lr=args.lr, states="nvme", nvme_path=args.store, host_bytes=args.host_bytes,
                              on_existing=on_existing)

    try:
        optimizer = adamw("resume")  # the weights are the store's then
        print(f"goes on after step {optimizer.current_step}: {optimizer.blob.decode()}")
    except spillway.Error as error:
        if error.code != "not_found":
            raise
        optimizer = adamw("refuse")
    first = optimizer.current_step
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 10), last_epoch=first - 1)

    for step in range(first, args.steps):
        optimizer.zero_grad(set_to_none=True)
        for micro in range(args.accumulation):
            ids = micro_batch(text, args, step, micro).to(device)
            logits = model(ids[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 256), ids[:, 1:].reshape(-1))
            (loss / args.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.blob = json.dumps({"step": step + 1, "loss": round(loss.item(), 4)}).encode()
        optimizer.step()  # durable, weights included, when it returns
        rate.step()
        print(f"step {optimizer.current_step}  loss {loss.item():.4f}  rate {rate.get_last_lr()[0]:.2e}")


if __name__ == "__main__":
    main()
