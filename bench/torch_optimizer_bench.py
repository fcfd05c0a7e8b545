#!/usr/bin/env python3
"""spillway.AdamW beside other AdamWs of a PyTorch loop, on a CPU: step time, resident memory, losses.

The GPT of pytorch_bench.py, trained by a plain loop with
  foreach, fused   torch.optim.AdamW, states in RAM beside weights and gradients
  cpu, nvme        spillway.AdamW, states in RAM and on NVMe (in --folder)
  torchao          in the first round, where it is installed: its CPUOffloadOptimizer, which refuses machines without
                   a GPU; the line has its words. With --torchao its AdamW8bit as well, which runs on a CPU but
                   compiles an update for each shape of a weight
each in a process of its own, on the same --threads cores, in turns; every other round the other way round.

One JSON line a run. Of all steps but the first two `update_seconds` is the median of optimizer.step() alone,
`update_cpu_seconds` of the processor time of all its threads (with --threads 1 it hardly changes with what else runs),
`step_seconds` of all of a step. `load` is the machine's at the end. `grown_bytes` is how far the peak of resident
memory in training lies above the peak of
forward and backward before the optimizer was made. nvme's bytes are those inside of step(), which returns when all of
them are durable: what it reads ahead while backward runs counts neither as bytes nor as time. `drive_seconds` is what
the drive needs for those bytes by itself, reads and writes mixed, by fio (or aio_bench) before and after the run.

The last line has medians over the rounds: update_seconds over fused, nvme's over the drive's, by how much memory grew
beyond host_bytes (the plan's where --host is missing), whether cpu and nvme have the same losses, and how far they are
from fused's.

Needs PyTorch; SPILLWAY_LIBRARY names the library where the dynamic linker does not find it.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import link_probes

ROOT = pathlib.Path(__file__).resolve().parents[1]
VARIANTS, PEERS, OURS = ("foreach", "fused", "cpu", "nvme"), ("torchao", "torchao8bit"), ("cpu", "nvme")
RATES = {"lr": 1e-4, "weight_decay": 0.01}


def status_bytes(field):
    text = pathlib.Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def forget_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew


def made(options, torch, network, folder):
    """The variant's optimizer."""
    if options.variant in ("foreach", "fused"):
        return torch.optim.AdamW(network.parameters(), **RATES, **{options.variant: True})
    if options.variant == "torchao":
        from torchao.optim import CPUOffloadOptimizer
        return CPUOffloadOptimizer(network.parameters(), torch.optim.AdamW, **RATES)
    if options.variant == "torchao8bit":
        from torchao.optim import AdamW8bit
        return AdamW8bit(network.parameters(), **RATES)
    sys.path.insert(0, str(ROOT / "python"))
    import spillway
    where = {"states": "nvme", "nvme_path": folder / "store"} if options.variant == "nvme" else {}
    return spillway.AdamW(network.parameters(), **RATES, **where, host_bytes=options.host,
                          stream_gradients=options.stream)


def run(options, folder):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])  # Spillway has a thread for each
    import torch
    from pytorch_bench import model
    torch.set_num_threads(options.threads)
    network = model(torch, options.layers, options.width, options.vocabulary, options.sequence)
    network.to(torch.bfloat16 if options.dtype == "bf16" else torch.float32)
    line = {"bench": "torch_optimizer", "variant": options.variant, "dtype": options.dtype,
            "parameters": sum(p.numel() for p in network.parameters()), "threads": options.threads,
            "torch": torch.__version__}
    batch = torch.randint(0, options.vocabulary, (options.batch, options.sequence),
                          generator=torch.Generator().manual_seed(2))
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])  # whose first has PyTorch import 150 MB of its own
    for i in range(4):  # after which PyTorch's memory grows no more
        if i == 3:
            forget_peak()
        network.zero_grad(set_to_none=True)
        network(batch).backward()
    before = status_bytes("VmHWM")
    forget_peak()
    try:
        optimizer = made(options, torch, network, folder)
    except (ImportError, AssertionError, RuntimeError, TypeError) as error:  # of a peer that cannot
        if options.variant in OURS:
            raise
        print(json.dumps({**line, "refused": str(error)}), flush=True)
        return
    updates, cpu_seconds, steps, losses, moved = [], [], [], [], []
    for _ in range(options.steps):
        begin = time.monotonic()
        for parameter in network.parameters():
            parameter.grad = None
        loss = network(batch)
        loss.backward()
        middle, cpu = time.monotonic(), time.process_time()
        optimizer.step()
        updates.append(time.monotonic() - middle)
        cpu_seconds.append(time.process_time() - cpu)
        steps.append(time.monotonic() - begin)
        losses.append(loss.item())
        if options.variant in OURS:
            moved.append((optimizer.report.nvme_read_bytes, optimizer.report.nvme_write_bytes,
                          optimizer.report.stall_seconds))
    first = min(2, options.steps - 1)
    line |= {"update_seconds": statistics.median(updates[first:]),
             "update_cpu_seconds": statistics.median(cpu_seconds[first:]),
             "step_seconds": statistics.median(steps[first:]), "load": os.getloadavg()[0],
             "peak_bytes": status_bytes("VmHWM"), "grown_bytes": status_bytes("VmHWM") - before, "losses": losses}
    if options.variant in OURS:
        ledger = sum(size for tier, _, size in optimizer.ledger() if tier == "host")
        line |= {"host_bytes": ledger, **{name: statistics.median(values[first:]) for name, values in zip(
            ("read_bytes", "written_bytes", "stall_seconds"), zip(*moved))}}
    print(json.dumps(line), flush=True)


def mixed_rate(options):
    """The drive's, in bytes per second; None where it is not asked for."""
    if not options.drive_seconds:
        return None
    return link_probes.probe_drive(options.folder, 1 << 30, options.aio_bench, options.drive_seconds)["mixed"]


def run_apart(options, variant):
    """The variant's line."""
    rates = [mixed_rate(options)] if variant == "nvme" else []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant, "--store", folder]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": str(options.threads)})
    line = json.loads(done.stdout.splitlines()[-1])
    if variant == "nvme" and rates[0]:
        rates.append(mixed_rate(options))
        line |= {"drive_rates": rates,
                 "drive_seconds": (line["read_bytes"] + line["written_bytes"]) / statistics.mean(rates)}
    return line


def compared(lines):
    """What a round says, by name."""
    fused, cpu, nvme = lines["fused"], lines["cpu"], lines["nvme"]
    found = {"cpu and nvme lose alike": cpu["losses"] == nvme["losses"]}
    for line in (cpu, nvme):
        found[f"{line['variant']} grown beyond host_bytes, MiB"] = (line["grown_bytes"] - line["host_bytes"]) / 2**20
    if "drive_seconds" in nvme:
        found["nvme over drive"] = nvme["update_seconds"] / nvme["drive_seconds"]
    if "update_seconds" in fused:  # an older PyTorch has none
        for name in ("foreach", "cpu", "nvme"):
            found[f"{name} over fused"] = lines[name]["update_seconds"] / fused["update_seconds"]
        found["cpu over fused, CPU seconds"] = cpu["update_cpu_seconds"] / fused["update_cpu_seconds"]
        found["loss from fused's"] = max(abs(a - b) for a, b in zip(cpu["losses"], fused["losses"]))
    return found


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
    parser.add_argument("--torchao", action="store_true", help="its AdamW8bit as well, in the first round; minutes")
    parser.add_argument("--drive-seconds", type=float, default=8, help="for each measurement of the drive; 0: none")
    parser.add_argument("--aio-bench", type=pathlib.Path, default=ROOT / "build/bench/aio_bench",
                        help="measures the drive where there is no fio")
    parser.add_argument("--tiny", action="store_true", help="one small round")
    parser.add_argument("--variant", choices=VARIANTS + PEERS, help=argparse.SUPPRESS)
    parser.add_argument("--store", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.vocabulary, options.sequence = 2, 64, 256, 16
        options.steps, options.rounds, options.drive_seconds = 3, 1, 0
    if options.variant:
        return run(options, options.store)
    peers = PEERS if options.torchao else PEERS[:1] if importlib.util.find_spec("torchao") else ()
    rounds = []
    for i in range(options.rounds):
        order = VARIANTS if i % 2 == 0 else VARIANTS[::-1]
        lines = {}
        for variant in order + (peers if i == 0 else ()):
            lines[variant] = run_apart(options, variant)
            print(json.dumps({**lines[variant], "round": i}), flush=True)
        rounds.append(compared(lines))
    print(json.dumps({"bench": "torch_optimizer", "rounds": options.rounds, **{
        name: all(found) if isinstance(found[0], bool) else statistics.median(found)
        for name, found in ((name, [one[name] for one in rounds]) for name in rounds[0])}}), flush=True)


if __name__ == "__main__":
    main()
