#!/usr/bin/env python3
"""Where PyTorch's and DeepSpeed's optimizers take 32 fp32 weights in 1,000 steps: the references of
tests/kernels/optimizer_course_test.cc, written to the file that is named.
"""
import argparse
import platform

import deepspeed
import numpy
import torch
from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.lion import DeepSpeedCPULion

COUNT, STEPS = 32, (1, 10, 100, 1000)
COMMON = {"lr": 2e-3, "weight_decay": 0.05}
ADAGRAD = {"lr": 5e-2, "eps": 1e-10, "weight_decay": 0.05}
OPTIMIZERS = {
    "torch.AdamW": lambda p: torch.optim.AdamW(p, **COMMON),
    "torch.AdamW-fused": lambda p: torch.optim.AdamW(p, **COMMON, fused=True),
    "torch.Adam": lambda p: torch.optim.Adam(p, **COMMON),
    "torch.Adagrad": lambda p: torch.optim.Adagrad(p, **ADAGRAD),
    "torch.SGD": lambda p: torch.optim.SGD(p, **COMMON, momentum=0.9),
    "torch.SGD-dampening": lambda p: torch.optim.SGD(p, **COMMON, momentum=0.9, dampening=0.5),
    "torch.SGD-nesterov": lambda p: torch.optim.SGD(p, **COMMON, momentum=0.9, nesterov=True),
    "deepspeed.CPUAdam": lambda p: DeepSpeedCPUAdam(p, **COMMON),
    "deepspeed.CPUAdagrad": lambda p: DeepSpeedCPUAdagrad(p, **ADAGRAD),
    "deepspeed.CPULion": lambda p: DeepSpeedCPULion(p, **COMMON, betas=(0.9, 0.99)),
}


def gradient(step):
    """Exact in fp32; tests/kernels/optimizer_course_test.cc has the same lines."""
    i = numpy.arange(COUNT, dtype=numpy.uint64)
    x = ((i + 1) * 2654435761 + step * 2246822519) & 0xffffffff
    x ^= x >> numpy.uint64(15)
    x = (x * 2654435761) & 0xffffffff
    x ^= x >> numpy.uint64(13)
    return ((x >> numpy.uint64(16)).astype(numpy.float32) - 32768 + 2048 * (i % 16).astype(numpy.float32)) / 2**15


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    lines = [f"# bench/peers/optimizers.py; torch {torch.__version__}, deepspeed {deepspeed.__version__}, "
             f"python {platform.python_version()}"]
    a = parser.parse_args()
    for name, make in OPTIMIZERS.items():
        weight = torch.nn.Parameter(torch.arange(COUNT, dtype=torch.float32) / 16 - 1)
        optimizer = make([weight])
        for step in range(1, STEPS[-1] + 1):
            weight.grad = torch.from_numpy(gradient(step))
            optimizer.step()
            if step in STEPS:
                values = " ".join(f"{value:.9g}" for value in weight.detach().tolist())
                lines.append(f"{name} {step} {values}")
    with open(a.file, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
