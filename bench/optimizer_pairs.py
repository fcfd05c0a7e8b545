#!/usr/bin/env python3
"""A step of spillway.AdamW, states in RAM, beside PyTorch's fused AdamW, for a machine that does other work as well.

Both have tensors of a small GPT's shapes and new gradients in each round, on one thread of one process, and step in
turns. What counts is processor time: on one thread it hardly changes with what else runs. With --clip the norm of all
gradients is clipped, as Trainers do by default: by clip_grad_norm_() in front of both ("loop"), and of Spillway by
max_grad_norm, in its step ("ours"). Prints one JSON line with medians in milliseconds and of the ratios within a round.

Needs PyTorch; SPILLWAY_LIBRARY names the library where the dynamic linker does not find it.
"""
import argparse
import json
import os
import pathlib
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SHAPES = [(768, columns) for columns in [3072, 768, 768, 768, 768, 3072] * 3 + [8192]]
NOT_COUNTED = 3  # rounds: the first have memory come into being


def timed(step):
    begin = time.process_time()
    step()
    return 1e3 * (time.process_time() - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--clip", type=float, default=0, metavar="NORM")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--tiny", action="store_true", help="a few small rounds")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # Spillway has a thread for each core
    import torch
    sys.path.insert(0, str(ROOT / "python"))
    import spillway
    torch.set_num_threads(1)
    shapes = [(8, 16)] if options.tiny else SHAPES
    rounds = NOT_COUNTED + 1 if options.tiny else max(options.rounds, NOT_COUNTED + 1)
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float32

    def parameters():
        torch.manual_seed(0)
        return [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    sets = {"fused": parameters(), "ours": parameters(), **({"loop": parameters()} if options.clip else {})}
    line = {"bench": "optimizer_pairs", "dtype": options.dtype, "clip": options.clip, "torch": torch.__version__,
            "parameters": sum(p.numel() for p in sets["ours"])}
    try:
        fused = torch.optim.AdamW(sets["fused"], lr=1e-4, fused=True)
    except (RuntimeError, TypeError) as error:  # an older PyTorch has none for a CPU
        print(json.dumps({**line, "refused": str(error)}))
        return

    def clipped(name, optimizer):
        def step():
            torch.nn.utils.clip_grad_norm_(sets[name], options.clip)
            optimizer.step()
        return step if options.clip else optimizer.step
    steps = {"fused": clipped("fused", fused),
             "ours": spillway.AdamW(sets["ours"], lr=1e-4, max_grad_norm=options.clip or None).step}
    if options.clip:
        steps["loop"] = clipped("loop", spillway.AdamW(sets["loop"], lr=1e-4))
    found = {name: [] for name in steps}
    for i in range(rounds):
        for values in sets.values():
            for p in values:
                p.grad = None
        for values in sets.values():
            for p in values:
                p.grad = torch.full_like(p, 1e-3)
        for name in list(steps)[::1 if i % 2 else -1]:
            found[name].append(timed(steps[name]))
    counted = {name: values[NOT_COUNTED:] for name, values in found.items()}
    over = {f"{name} over fused": statistics.median(b / a for a, b in zip(counted["fused"], counted[name]))
            for name in steps if name != "fused"}
    print(json.dumps({**line, **{f"{name}_ms": statistics.median(values) for name, values in counted.items()}, **over,
                      "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
