"""A plain PyTorch model whose activations wait for backward on NVMe, by a `with` around its forward pass.

    python examples/spilled_activations.py --store activations --layers 8

Weights, gradients and optimizer are PyTorch's, and so are the bits: the first step is made once more without a store.
"""
import argparse

import torch

from spillway.io import TensorStore, spilled_activations


def model_of(width, layers):
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
                                 for _ in range(layers)))


def gradients(model, rows, store=None):
    """Of a step's loss, and the loss."""
    model.zero_grad()
    if store is None:
        loss = model(rows).square().mean()
    else:
        with spilled_activations(store, least_bytes=64 << 10):  # smaller ones stay where they are
            loss = model(rows).square().mean()
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in model.parameters()]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a directory of an NVMe drive")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    model = model_of(args.width, args.layers)
    rows = torch.randn(8, args.tokens, args.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, expected = gradients(model, rows)
    with TensorStore(args.store, nvme_bytes=1 << 30, host_bytes=8 << 20, on_existing="replace") as store:
        for step in range(args.steps):
            loss, found = gradients(model, rows, store)
            if step == 0:
                same = all(map(torch.equal, expected, found))
            optimizer.step()
            print(f"step {step + 1}  loss {loss:.6f}")
        stats = store.stats()
    print(f"host memory for activations {stats.host_capacity >> 20} MiB; to NVMe went {stats.write_bytes >> 20} MiB; "
          f"the same gradients as without: {same}")


if __name__ == "__main__":
    main()
