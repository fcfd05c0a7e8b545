#!/usr/bin/env python3
"""spillway.AdamW beside other AdamWs of a PyTorch loop, on a CPU: step time, resident memory, losses.

The GPT of pytorch_bench.py, trained by a plain loop with
  foreach, fused   torch.optim.AdamW, states in RAM beside weights and gradients
  torchao          torchao's CPUOffloadOptimizer, where it is installed; it refuses machines without a GPU, in its words
  cpu, nvme        spillway.AdamW, states in RAM and on NVMe (in --folder)
each in a process of its own, in turns. One JSON line a run: `update_seconds` is the median of optimizer.step() alone,
`step_seconds` of all of a step, without the first two; `resident_bytes` is resident memory at its peak, `grown_bytes`
by how much resident memory is larger after the last update than before the optimizer was made, with gradients there
in both. `nvme` says what it read and wrote in a step, and with --spillway which time the drive needs for that by
itself, as `spillway sweep` measures it in the same run. The last line has the ratios to `fused`.

Needs PyTorch; SPILLWAY_LIBRARY names the library where the dynamic linker does not find it.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
VARIANTS = ("foreach", "fused", "torchao", "cpu", "nvme")
RATES = {"lr": 1e-4, "weight_decay": 0.01}


def status_bytes(field):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def made(options, torch, network, folder):
    """The variant's optimizer."""
    if options.variant in ("foreach", "fused"):
        return torch.optim.AdamW(network.parameters(), **RATES, **{options.variant: True})
    if options.variant == "torchao":
        from torchao.optim import CPUOffloadOptimizer
        return CPUOffloadOptimizer(network.parameters(), torch.optim.AdamW, **RATES)
    sys.path.insert(0, str(ROOT / "python"))
    import spillway
    where = {"states": "nvme", "nvme_path": folder / "store"} if options.variant == "nvme" else {}
    return spillway.AdamW(network.parameters(), **RATES, **where, host_bytes=options.host,
                          stream_gradients=options.stream)


def run(options, folder):
    import torch
    sys.path.insert(0, str(ROOT / "bench"))
    from pytorch_bench import model
    torch.set_num_threads(options.threads)
    network = model(torch, options.layers, options.width, options.vocabulary, options.sequence)
    network.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    line = {"bench": "torch_optimizer", "variant": options.variant, "dtype": options.dtype,
            "parameters": sum(p.numel() for p in network.parameters()), "threads": options.threads,
            "torch": torch.__version__}
    batch = torch.randint(0, options.vocabulary, (options.batch, options.sequence),
                          generator=torch.Generator().manual_seed(2))
    for _ in range(3):  # after which PyTorch's own memory grows no more
        network.zero_grad(set_to_none=True)
        network(batch).backward()
    before = status_bytes("VmRSS")
    try:
        optimizer = made(options, torch, network, folder)
    except (ImportError, AssertionError, RuntimeError, TypeError) as error:  # of a peer that cannot
        if options.variant in ("cpu", "nvme"):
            raise
        print(json.dumps({**line, "refused": str(error)}), flush=True)
        return
    updates, steps, losses = [], [], []
    for _ in range(options.steps):
        begin = time.monotonic()
        for parameter in network.parameters():
            parameter.grad = None
        loss = network(batch)
        loss.backward()
        middle = time.monotonic()
        optimizer.step()
        updates.append(time.monotonic() - middle)
        steps.append(time.monotonic() - begin)
        losses.append(loss.item())
    first = min(2, options.steps - 1)
    line |= {"update_seconds": statistics.median(updates[first:]), "step_seconds": statistics.median(steps[first:]),
             "resident_bytes": status_bytes("VmHWM"), "grown_bytes": status_bytes("VmRSS") - before,
             "losses": losses}
    if options.variant in ("cpu", "nvme"):
        report = optimizer.report
        line |= {"ledger_host_bytes": sum(size for tier, _, size in optimizer.ledger() if tier == "host"),
                 "read_bytes": report.nvme_read_bytes, "written_bytes": report.nvme_write_bytes,
                 "stall_seconds": report.stall_seconds}
    print(json.dumps(line), flush=True)


def drive_rate(options):
    """Bytes per second, read and written at once; None without a program to measure it."""
    if options.spillway is None:
        return None
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        out = pathlib.Path(folder, "sweep.json")
        subprocess.run([options.spillway, "sweep", folder, "--seconds", "20", "--size", "1GiB", "--json", out],
                       check=True, stdout=sys.stderr)
        return json.loads(out.read_text())["spillway"]["nvme_rates"][0] * 1e9


def round_of(options):
    """The variants' lines by name."""
    lines = {}
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--store", folder]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": str(options.threads)})
        lines[variant] = json.loads(done.stdout.splitlines()[-1])
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--host", help="host_bytes of cpu and nvme; what the plan asks for when missing")
    parser.add_argument("--stream", action="store_true", help="stream_gradients of cpu and nvme")
    parser.add_argument("--folder", default=".", help="on the drive")
    parser.add_argument("--spillway", help="the program, to measure the drive")
    parser.add_argument("--tiny", action="store_true", help="one small round")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.vocabulary, options.sequence = 2, 64, 256, 16
        options.steps, options.rounds = 3, 1
    if options.variant:
        return run(options, options.store)
    ratios = {}
    for _ in range(options.rounds):
        rate, lines = drive_rate(options), round_of(options)
        if rate:
            nvme = lines["nvme"]
            nvme["drive_seconds"] = (nvme["read_bytes"] + nvme["written_bytes"]) / rate
            ratios.setdefault("nvme over drive", []).append(nvme["update_seconds"] / nvme["drive_seconds"])
        for name, line in lines.items():
            print(json.dumps(line), flush=True)
            if name in ("foreach", "cpu", "nvme") and "update_seconds" in lines["fused"]:
                ratios.setdefault(name, []).append(line["update_seconds"] / lines["fused"]["update_seconds"])
    print(json.dumps({"bench": "torch_optimizer", "of": "update_seconds over fused",
                      **{name: statistics.median(found) for name, found in ratios.items()}}), flush=True)


if __name__ == "__main__":
    main()
