#!/usr/bin/env python3
"""Spillway's I/O queue beside fio on the same file, in turns. JSON lines: every run, and per case the median of ratios.

The file is written twice before anything is measured. A pair is one run of each program, the order alternating; both
move --gib gigabytes. A ratio is ours over fio's in the same pair: of bytes per second (higher is better) and of CPU
seconds per GiB during the I/O (lower is better; fio's job process, our whole process). Cases: read, write and mixed
14:12 as an optimizer update does, each with 1, 4 and 16 MiB blocks and with requests of 8 to 48 MiB, as tiles are.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MIB, GIB = 1 << 20, 1 << 30
# name: fio's block options, its depth; our block, depth and request
PATTERNS = {
    "1m": (["--bs=1m"], 32, "1m", 32, ["--request", "4m"]),
    "4m": (["--bs=4m"], 16, "4m", 16, ["--request", "4m"]),
    "16m": (["--bs=16m"], 8, "16m", 8, ["--request", "16m"]),
    "tiles": (["--bsrange=8m-48m"], 2, "1m", 32, ["--request", "48m", "--tiles"]),
}
FIO_MODES = {"read": ["--rw=read"], "write": ["--rw=write"], "mix": ["--rw=rw", "--rwmixread=54"]}
FIO_ENGINES = {"io_uring": ["--ioengine=io_uring", "--fixedbufs=1", "--registerfiles=1"],
               "libaio": ["--ioengine=libaio"],
               "threads": ["--ioengine=psync", "--thread", "--group_reporting"]}


def fio(a, mode, pattern):
    blocks, depth = PATTERNS[pattern][:2]
    jobs = min(depth, 16) if a.engine == "threads" else 1  # as many threads as our engine has, each with its own part
    parts = [f"--numjobs={jobs}", f"--offset_increment={a.size // jobs}"] if jobs > 1 else []
    command = ["fio", "--name=peer", f"--filename={a.file}", f"--size={a.size // jobs}", *FIO_MODES[mode], *blocks,
               *FIO_ENGINES[a.engine], *parts, f"--iodepth={depth}", "--direct=1", "--refill_buffers=0",
               "--scramble_buffers=0", "--randrepeat=1", "--time_based=0", f"--io_size={a.gib * GIB // jobs}",
               "--output-format=json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    job = json.loads(said[said.index("{"):])["jobs"][0]  # notes may stand before it
    sides = [job[side] for side in ("read", "write") if job[side]["io_bytes"]]
    moved, seconds = sum(side["io_bytes"] for side in sides), max(side["runtime"] for side in sides) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return {"bytes": moved, "gb_per_s": moved / seconds / 1e9, "cpu_s_per_gib": cpu / (moved / GIB)}


def spillway(a, mode, pattern):
    _, _, block, depth, request = PATTERNS[pattern]
    passes = max(1, a.gib * GIB // a.size)
    command = [a.bench, "--file", a.file, "--size", a.size, "--block", block, "--depth", depth, *request,
               "--engine", a.engine, "--mode", mode, "--passes", passes]
    done = subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)
    line = json.loads(done.stdout.splitlines()[-1])
    return {"bytes": line["read_bytes"] + line["write_bytes"], "gb_per_s": line["gb_per_s"],
            "cpu_s_per_gib": line["cpu_s_per_gib"], "engine": line["engine"]}


def deepspeed(a, pattern):
    """One run of DeepSpeed's aio handle: {"read": …, "write": …}."""
    script = ROOT / "bench/peers/aio_deepspeed.py"
    run = subprocess.run([a.deepspeed_python, script, a.file, "--mib", str(a.size // MIB), "--runs", "3"], check=False,
                         capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    # Its handle's thread is not joined, so the process often aborts at its end; the figures are printed by then.
    if len(lines) < 2:
        sys.exit(f"{script} failed:\n{run.stderr}")
    return {line["name"].rsplit("_", 1)[1]: line for line in lines}


def quartiles(values):
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, len(ordered) * q // 4)], 4) for q in (1, 2, 3)]


def report(line):
    print(json.dumps(line), flush=True)


def compare(a, mode, pattern):
    rates, costs = [], []
    for pair in range(a.pairs):
        order = [("spillway", spillway), ("fio", fio)]
        if pair % 2:
            order.reverse()
        result = {name: run(a, mode, pattern) for name, run in order}
        for name, figures in result.items():
            report({"bench": "aio", "program": name, "mode": mode, "pattern": pattern, "pair": pair, **figures})
        rates.append(result["spillway"]["gb_per_s"] / result["fio"]["gb_per_s"])
        costs.append(result["spillway"]["cpu_s_per_gib"] / max(1e-9, result["fio"]["cpu_s_per_gib"]))
    low, middle, high = quartiles(rates)
    cheap, cost, dear = quartiles(costs)
    report({"bench": "aio", "summary": f"{mode} {pattern}", "engine": a.engine, "pairs": a.pairs, "rate_ratio": middle,
            "rate_quartiles": [low, high], "cpu_ratio": cost, "cpu_quartiles": [cheap, dear]})


def compare_deepspeed(a):
    ratios = {mode: ([], []) for mode in ("read", "write")}
    for pair in range(a.pairs):
        peer = deepspeed(a, "1m")
        for mode, (rates, costs) in ratios.items():
            ours, theirs = spillway(a, mode, "1m"), peer[mode]
            report({"bench": "aio", "program": "spillway", "mode": mode, "pair": pair, **ours})
            report({"bench": "aio", "program": "deepspeed", "mode": mode, "pair": pair, **theirs})
            rates.append(ours["gb_per_s"] / theirs["gb_per_s"])
            costs.append(ours["cpu_s_per_gib"] / theirs["cpu_s_per_gib"])
    for mode, (rates, costs) in ratios.items():
        report({"bench": "aio", "summary": f"{mode} 1m, DeepSpeed's aio handle", "pairs": a.pairs,
                "rate_ratio": quartiles(rates)[1], "rate_quartiles": quartiles(rates)[::2],
                "cpu_ratio": quartiles(costs)[1], "cpu_quartiles": quartiles(costs)[::2]})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=pathlib.Path, default=ROOT / "build/bench/aio_bench")
    parser.add_argument("--work", default=None, help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--size", type=int, default=GIB, help="bytes of the file")
    parser.add_argument("--gib", type=int, default=2, help="GiB that a run moves")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--engine", default="io_uring", choices=list(FIO_ENGINES))
    parser.add_argument("--mode", action="append", choices=list(FIO_MODES), help="default: all")
    parser.add_argument("--pattern", action="append", choices=list(PATTERNS), help="default: all")
    parser.add_argument("--deepspeed-python", help="compare with DeepSpeed's aio handle instead of fio")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spillway-aio-", dir=a.work) as folder:
        a.file = os.path.join(folder, "file")
        subprocess.run([str(a.bench), "--file", a.file, "--size", str(a.size), "--mode", "write", "--passes", "1"],
                       check=True, stdout=subprocess.DEVNULL)  # a new file is filled before it is written
        if a.deepspeed_python:
            compare_deepspeed(a)
            return
        for pattern in a.pattern or PATTERNS:
            for mode in a.mode or FIO_MODES:
                compare(a, mode, pattern)


if __name__ == "__main__":
    sys.exit(main())
