#!/usr/bin/env python3
"""Spillway's optimizers beside PyTorch's fused AdamW and DeepSpeed's CPU Adam, in turns. JSON lines: every run, and per
case the median of ratios, theirs over ours (nanoseconds a parameter: more than 1 means that ours is faster).

  fp32 AdamW, the kernel alone          beside torch.optim.AdamW(fused=True) and beside DeepSpeedCPUAdam
  bf16 weights with their exact master: norm, NaN check and AdamW, all that a step computes on the CPU
                                        beside what DeepSpeed's stage 3 does there (cast, norm, scale, Adam, cast)

Tensors of --params parameters, far beyond any cache; the peers get huge pages too. --peer-python: see bench/peers.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PARAMS = 192 << 20  # of bench/optimizer_bench
CASES = {  # name: ours, theirs
    "fp32 AdamW beside PyTorch fused": ("adam/fp32", "torch_fused_adamw_fp32"),
    "fp32 AdamW beside DeepSpeedCPUAdam": ("adam/fp32", "deepspeed_cpu_adam_fp32"),
    "bf16 step beside DeepSpeed's stage 3": ("step/bf16", "deepspeed_stage3_path"),
}


def report(line):
    print(json.dumps(line), flush=True)


def spillway(a):
    """ns a parameter by the bench's names: the first instruction set of each is the one that is dispatched to."""
    only = f"--benchmark_filter=(adam/fp32|step/bf16).*params:{PARAMS}/tile:4194304/threads:{a.threads}/"
    done = subprocess.run([a.bench, only, "--benchmark_format=json", f"--benchmark_min_time={a.seconds}"], check=True,
                          capture_output=True, text=True)
    results = {}
    for run in json.loads(done.stdout)["benchmarks"]:
        name = "/".join(run["name"].split("/")[:2])
        results.setdefault(name, {key: run[key] for key in ("name", "ns_per_param", "GB_per_s", "of_stream")})
    return results


def peers(a):
    environment = {**os.environ, "THP_MEM_ALLOC_ENABLE": "1", "DS_ACCELERATOR": "cpu",
                   "OMP_NUM_THREADS": str(a.threads),
                   "PATH": f"{pathlib.Path(a.peer_python).parent}:{os.environ['PATH']}"}
    script = ROOT / "bench/peers/adam.py"
    done = subprocess.run([a.peer_python, script, "--params", str(PARAMS), "--threads", str(a.threads)], check=False,
                          capture_output=True, text=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if len(lines) < 4:
        sys.exit(f"{script} failed:\n{done.stderr}")
    return {line["name"]: line for line in lines}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/bench/optimizer_bench")
    parser.add_argument("--peer-python", required=True, help="a Python with torch and deepspeed")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1, help="least time of each of our measurements")
    a = parser.parse_args()
    ratios = {case: [] for case in CASES}
    for pair in range(a.pairs):
        order = [("spillway", spillway), ("peers", peers)]
        if pair % 2:
            order.reverse()
        results = {side: run(a) for side, run in order}
        for side, named in results.items():
            for figures in named.values():
                report({"bench": "optimizer", "program": side, "pair": pair, **figures})
        for case, (ours, theirs) in CASES.items():
            ratios[case].append(results["peers"][theirs]["ns_per_param"] / results["spillway"][ours]["ns_per_param"])
    for case, values in ratios.items():
        ordered = sorted(values)
        report({"bench": "optimizer", "summary": case, "pairs": a.pairs, "threads": a.threads,
                "ratio": round(ordered[len(ordered) // 2], 3), "least": round(ordered[0], 3),
                "most": round(ordered[-1], 3)})


if __name__ == "__main__":
    main()
