#!/usr/bin/env python3
"""CPU Adam of the peers over N parameters, and the memory stream of the same machine, in one run. JSON lines.

`deepspeed_stage3_path` is what one DeepSpeed stage-3 step does to a parameter on the CPU: bf16 gradient to fp32, norm,
unscale-and-clip, DeepSpeedCPUAdam, fp32 to 16-bit weight. It is the path to compare a fused Adam with.
"""
import argparse
import json
import time

import torch

a = argparse.ArgumentParser()
a.add_argument("--params", type=int, default=64 << 20)
a.add_argument("--threads", type=int, default=2)
a.add_argument("--runs", type=int, default=7)
a = a.parse_args()
torch.set_num_threads(a.threads)
n = a.params


def report(name, bytes_per_param, work, count=n):
    work()
    times = []
    for _ in range(a.runs):
        t = time.perf_counter()
        work()
        times.append(time.perf_counter() - t)
    t = sorted(times)[len(times) // 2]
    print(json.dumps({"name": name, "ns_per_param": round(t * 1e9 / count, 3), "bytes_per_param": bytes_per_param,
                      "gb_per_s": round(bytes_per_param * count / t / 1e9, 1), "runs": a.runs, "threads": a.threads}),
          flush=True)


x = torch.zeros(2 * n)
report("stream_read_modify_write", 8, lambda: x.mul_(1.0000001), 2 * n)
del x

p = torch.nn.Parameter(torch.randn(n))
p.grad = torch.randn(n)
opt = torch.optim.AdamW([p], lr=1e-4, fused=True)
report("torch_fused_adamw_fp32", 28, opt.step)
del opt, p

from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402  (compiles at import; the figures above need none of it)

p = torch.nn.Parameter(torch.randn(n))
g32 = torch.randn(n)
p.grad = g32
opt = DeepSpeedCPUAdam([p], lr=1e-4)
report("deepspeed_cpu_adam_fp32", 28, opt.step)
g16 = g32.bfloat16()
w16 = torch.empty(n, dtype=torch.bfloat16)


def path():
    g32.copy_(g16)
    g32.norm()
    g32.mul_(1.0)
    opt.step()
    w16.copy_(p.data)


report("deepspeed_stage3_path", 42, path)
