#!/usr/bin/env python3
"""A LoRA step over a frozen base on NVMe, against the drive: a PyTorch loop through spillway.Engine whose base weights
are fetched for every visit, on a drive that is held to a known rate.

A GPT of plain PyTorch modules in bf16 (pytorch_bench's), all frozen but adapters at each linear layer of its layers.
One JSON line: `step_seconds` (the median of all steps but two), `read_bytes` of such a step as the kernel counts them,
`rate` in bytes per second that the drive is held to, as probed in the same run, and
  of_drive    step_seconds / (read_bytes / rate): 1 is a step that is nothing but its reads
  of_base     read_bytes / the bytes of all frozen weights: 2 is all of them, once forward and once backward
Needs PyTorch and, to hold the drive, root; SPILLWAY_LIBRARY names the library where the linker does not find it.

  bench/lora_bench.py --steady 500 --layers 24 --width 1024 --sequence 64
"""
import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile
import time

import link_probes as links
import pytorch_bench
from finetune_bench import process_io

ROOT = pathlib.Path(__file__).resolve().parents[1]


def with_adapters(torch, network, rank):
    nn = torch.nn

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
            self.b = nn.Parameter(torch.zeros(base.out_features, rank))

        def forward(self, x):
            return self.base(x) + (x @ self.a.T.to(x.dtype)) @ self.b.T.to(x.dtype)

    network.requires_grad_(False)
    for layer in network.layers:
        for name in ("qkv", "out", "up", "down"):
            setattr(layer, name, Adapted(getattr(layer, name)))
    return network


def train(options, torch, folder):
    torch.set_num_threads(options.threads)
    network = with_adapters(
        torch, pytorch_bench.model(torch, options.layers, options.width, options.vocabulary, options.sequence),
        options.rank)
    frozen = sum(p.numel() for p in network.parameters() if not p.requires_grad)
    batch = torch.randint(0, options.vocabulary, (options.batch, options.sequence),
                          generator=torch.Generator().manual_seed(2))
    sys.path.insert(0, str(ROOT / "python"))
    import spillway
    place = {"device": "nvme", "nvme_path": str(folder / "store")}
    with spillway.Engine(network, {
            "train_micro_batch_size_per_gpu": options.batch, "gradient_clipping": 1.0, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"threads": options.threads, "device": "host"}}) as engine:
        seconds, read = [], []
        for _ in range(options.steps):
            begin, before = time.monotonic(), process_io(os.getpid())["read_bytes"]
            engine.backward(engine(batch))
            engine.step()
            seconds.append(time.monotonic() - begin)
            read.append(process_io(os.getpid())["read_bytes"] - before)
    settled = slice(min(2, options.steps - 1), None)
    return {"frozen": frozen, "step_seconds": statistics.median(seconds[settled]),
            "read_bytes": statistics.median(read[settled]), "all_seconds": [round(s, 3) for s in seconds]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--width", type=int, default=1024, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=8, help="of the adapters")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steady", type=float, metavar="MBPS", help="hold the drive to this rate each way, as root")
    parser.add_argument("--aio-bench", type=pathlib.Path, default=ROOT / "build/bench/aio_bench",
                        help="for want of fio")
    parser.add_argument("--work", type=pathlib.Path, help="where the store is made; the default is a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="a few steps of a small model, to see that it runs")
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("skipped: this Python has no PyTorch")
        sys.exit(77)
    if options.tiny:
        options.layers, options.width, options.vocabulary, options.sequence, options.steps = 2, 64, 256, 16, 3
    import torch
    folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-lora-", dir=options.work))
    try:
        with links.steady_drive(folder, options.steady) as group:
            rate = None
            if group:
                probed = links.probe_drive(folder, 1 << 30, options.aio_bench)
                group.holds(probed)
                rate = probed["read"]
            line = train(options, torch, folder)
        base = 2 * line["frozen"]
        print(json.dumps({
            "bench": "lora", "torch": torch.__version__, "layers": options.layers, "width": options.width,
            "tokens": options.batch * options.sequence, **line, "rate": rate,
            "of_drive": rate and line["step_seconds"] * rate / line["read_bytes"],
            "of_base": line["read_bytes"] / base}))
    except links.Unable as reason:
        sys.exit(f"lora_bench: {reason}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
