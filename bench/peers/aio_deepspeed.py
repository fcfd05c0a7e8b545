#!/usr/bin/env python3
"""Read and write rate of DeepSpeed's asynchronous I/O handle on one file, pinned buffer. JSON lines; see fio.sh."""
import argparse
import json
import time

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

a = argparse.ArgumentParser()
a.add_argument("file")
a.add_argument("--mib", type=int, default=1024)
a.add_argument("--block-kib", type=int, default=1024)
a.add_argument("--queue-depth", type=int, default=32)
a.add_argument("--threads", type=int, default=1)
a.add_argument("--runs", type=int, default=5)
a = a.parse_args()

n = a.mib << 20
handle = AsyncIOBuilder().load(verbose=False).aio_handle(a.block_kib << 10, a.queue_depth, False, True, a.threads)
buf = handle.new_cpu_locked_tensor(n, torch.empty(0, dtype=torch.uint8))
buf.fill_(1)
for op in ("write", "read"):
    rates, cpu = [], []
    for _ in range(a.runs):
        c, t = time.process_time(), time.perf_counter()
        (handle.async_pwrite if op == "write" else handle.async_pread)(buf, a.file, 0)
        handle.wait()
        rates.append(n / (time.perf_counter() - t) / 1e9)
        cpu.append((time.process_time() - c) / (n / 2**30))
    middle = len(rates) // 2
    print(json.dumps({"name": f"deepspeed_aio_{op}", "gb_per_s": round(sorted(rates)[middle], 2),
                      "cpu_s_per_gib": round(sorted(cpu)[middle], 4), "block_kib": a.block_kib,
                      "queue_depth": a.queue_depth}), flush=True)
