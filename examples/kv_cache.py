"""Attention over a long text whose cache of keys and values is ten times the host memory that it gets.

    python examples/kv_cache.py --store cache --tokens 4096

A text is read in chunks. Each chunk's keys and values go into a TensorStore, and each chunk attends to all before it,
which come back from NVMe while the one before is computed with. The weights are random: what counts is the cache.
"""
import argparse
import math

import torch

from spillway.io import TensorStore

CHUNK, HEADS, SIZE = 256, 4, 64  # tokens; heads of an attention, and the size of each
WIDTH = HEADS * SIZE


def chunks_of(store, layer, last):
    """Keys and values of all chunks up to the last, in order; the next ones are on their way meanwhile."""
    for chunk in range(last + 1):
        if chunk < last:
            store.prefetch([f"{layer} {chunk + 1} keys", f"{layer} {chunk + 1} values"])
        yield store.get([f"{layer} {chunk} keys", f"{layer} {chunk} values"])


def attend(queries, chunks):
    """Softmax over all chunks, of which one is in memory at a time: sums are scaled to the largest score so far."""
    best, total, out = torch.full((HEADS, CHUNK, 1), -math.inf), 0.0, 0.0
    for keys, values, is_last in chunks:
        scores = queries @ keys.transpose(1, 2) / math.sqrt(SIZE)
        if is_last:
            scores = scores.masked_fill(torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1), -math.inf)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        weights, kept = (scores - higher).exp(), (best - higher).exp()
        best, total, out = higher, total * kept + weights.sum(-1, keepdim=True), out * kept + weights @ values
    return out / total


def heads(x):
    return x.view(CHUNK, HEADS, SIZE).transpose(0, 1)


def read(text, layers, store):
    """What comes out for the text's last token."""
    for chunk, x in enumerate(text.split(CHUNK)):
        for layer, weight in enumerate(layers):
            queries, keys, values = map(heads, (x @ weight).chunk(3, dim=1))
            store.put({f"{layer} {chunk} keys": keys.contiguous(), f"{layer} {chunk} values": values.contiguous()})
            found = ((*pair, number == chunk) for number, pair in enumerate(chunks_of(store, layer, chunk)))
            x = x + attend(queries, found).transpose(0, 1).reshape(CHUNK, WIDTH)
    return x[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a directory of an NVMe drive")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(1)
    text = torch.randn(args.tokens // CHUNK * CHUNK, WIDTH)
    layers = [torch.randn(WIDTH, 3 * WIDTH) / math.sqrt(WIDTH) for _ in range(args.layers)]
    cache = args.layers * 2 * text.numel() * text.element_size()
    with torch.no_grad():
        with TensorStore(args.store, nvme_bytes=2 * cache, host_bytes=cache // 10, on_existing="replace") as store:
            spilled, stats = read(text, layers, store), store.stats()
        with TensorStore(host_bytes=2 * cache) as store:  # the same with room for all of it
            resident = read(text, layers, store)
    print(f"cache {cache >> 20} MiB, host memory {stats.host_capacity / 2**20:.1f} MiB: {stats.read_bytes >> 20} MiB "
          f"read, {stats.hits} of {stats.hits + stats.misses} tensors found in memory")
    print("the same bits as with room for all of it:", torch.equal(spilled, resident))


if __name__ == "__main__":
    main()
