"""A table of embeddings that host memory has no room for, of which rows are read as they are asked for.

    python examples/embedding_rows.py --store table --rows 200000 --width 256

The table is filled part by part, so it is never in memory whole. A row of 1 KiB costs a block of 4 KiB from NVMe.
"""
import argparse
import time

import torch

from spillway.io import TensorStore

PART = 16384  # rows of a tensor of the store


def fill(store, rows, width):
    for first in range(0, rows, PART):
        generator = torch.Generator().manual_seed(first)
        store.put(f"part {first // PART}", torch.randn(min(PART, rows - first), width, generator=generator),
                  block_bytes=4096)
    store.commit()  # the next run has them


def look_up(store, ids, width):
    """The table's rows `ids`, in their order: of each part those that are its."""
    found = torch.empty(len(ids), width)
    parts = ids // PART
    for part in parts.unique().tolist():
        here = (parts == part).nonzero().view(-1)
        found[here] = store.rows(f"part {part}", ids[here] % PART)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a directory of an NVMe drive")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batches", type=int, default=20)
    args = parser.parse_args()
    table = args.rows * args.width * 4
    room = table * 5 // 4 + (8 << 20)
    with TensorStore(args.store, nvme_bytes=room, host_bytes=4 << 20, on_existing="resume") as store:
        if len(store) == 0:
            fill(store, args.rows, args.width)
        before, begun = store.stats().read_bytes, time.monotonic()
        for batch in range(args.batches):
            ids = torch.randint(0, args.rows, (8, 64), generator=torch.Generator().manual_seed(batch))
            embedded = look_up(store, ids.view(-1), args.width).view(8, 64, args.width)
        seconds, read = time.monotonic() - begun, store.stats().read_bytes - before
        print(f"table {table >> 20} MiB, host memory 4 MiB: {args.batches} batches of 512 rows, {read >> 20} MiB read, "
              f"{args.batches * 512 / seconds:.0f} rows a second; mean of the last batch {embedded.mean():.6f}")


if __name__ == "__main__":
    main()
