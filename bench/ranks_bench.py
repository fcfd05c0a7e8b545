#!/usr/bin/env python3
"""A step on several ranks of this machine beside the same step on one, with the same rows and the same bits.

For each shape, with weights and states in host memory and with everything on NVMe: one rank with all cores, and --ranks
ranks that divide them, in turns; bf16, AdamW, clipping 1.0, as many micro-batches a step as ranks, and `sum_groups`
likewise. One JSON line a run:
  seconds        of a step, the median without each run's first
  peak_bytes     of the largest rank: the whole process, HBM emulated in RAM
  ledger         bytes of the plan's lines, of one rank
  loss           of the last step, which is the same on any number of ranks
The last line of a case has `of_one`, seconds / those of one rank in the same round, median; with --peer-python (an
environment with deepspeed) `of_peer`, seconds / those of as many DeepSpeed ZeRO-3 ranks over Gloo, a core each, and
`memory_of_peer`.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import finetune_bench as fine
import link_probes as links
import step_bench
from step_bench import SHAPES, Failed, Workplace, checked, say

PLACES = ("host", "nvme")


def add_launcher(parser):
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--mpi-option", dest="mpi_options", action="append", default=[], help="one word for mpirun")


def launcher(a, ranks, *options):
    """What comes before the command of so many ranks."""
    if ranks == 1:
        return []
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [a.mpirun, "-n", ranks, "--bind-to", "none", *options, *a.mpi_options, *root]


def finetune(place, a, where, ranks, hbm):
    settings = {"at_home": "cpu"} if where == "host" else {"nvme": place.nvme, "host": place.host}
    command = place.command(a.seq, hbm=hbm, accumulation=a.ranks // ranks, **settings)
    config = json.loads(place.config.read_text())
    config["spillway"]["sum_groups"] = a.ranks
    place.config.write_text(json.dumps(config))
    return [*launcher(a, ranks), *command, "--steps", 1 + a.steps, "--log", place.log]


def smallest_hbm(place, a, where, ranks):
    run = fine.watch(finetune(place, a, where, ranks, "64KiB"))
    found = re.search(r'set spillway\.hbm_bytes to "(\d+\w+)"', run["err"])
    if not found:
        raise Failed(f"no smallest hbm_bytes is named: {links.last_line(run['err'])}")
    return step_bench.bytes_of(found.group(1))


def ledger(out):
    lines = re.findall(r"^ +(hbm|host|nvme) +(\S[^\n]*?) +(\d+) bytes$", out, re.MULTILINE)
    return {f"{tier} {purpose}": int(size) for tier, purpose, size in lines}


def measure(place, a, where, ranks):
    hbm = f"{(smallest_hbm(place, a, where, ranks) * 5 // 4 >> 20) + 1}MiB"
    run = checked(fine.watch(finetune(place, a, where, ranks, hbm)))
    steps = [json.loads(line) for line in place.log.read_text().splitlines()]
    return {"hbm_bytes": hbm, "seconds": fine.median([step["seconds"] for step in steps[1:]]),
            "all_seconds": [round(step["seconds"], 3) for step in steps[1:]], "loss": steps[-1]["loss"],
            "peak_bytes": run["peak_bytes"], "stalls": steps[-1]["stalls"], "ledger": ledger(run["out"])}


def measure_peer(place, a, where):
    """As many ranks, each with a core, a micro-batch and its part of weights and states."""
    folder = tempfile.mkdtemp(prefix="spillway-bench-peer-", dir=a.work)
    cores = sorted(os.sched_getaffinity(0))
    command = [a.peer_python, fine.ROOT / "bench/peers/finetune_deepspeed.py", "--layers", place.layers, "--width",
               place.width, "--seq", a.seq, "--steps", 1 + a.steps, "--nvme", folder, "--offload",
               {"host": "cpu", "nvme": "nvme"}[where],
               # Its part of the largest tensor, GPT-2's embedding. Ranks prefetch more tensors than one process does.
               "--buffers", 24 * a.ranks, "--buffer-elements", 52_000 * place.width // a.ranks]
    try:
        ranks = [subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  text=True, preexec_fn=lambda r=r: os.sched_setaffinity(0, {cores[r % len(cores)]}),
                                  env={**os.environ, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1",
                                       "WORLD_SIZE": str(a.ranks), "MASTER_PORT": str(29600 + os.getpid() % 1000)})
                 for r in range(a.ranks)]
        said = [rank.communicate() for rank in ranks]
    finally:
        shutil.rmtree(folder)
    lines = [json.loads(line) for line in said[0][0].splitlines() if line.startswith("{")]
    failed = [err.strip().splitlines()[-1:] for rank, (_, err) in zip(ranks, said) if rank.returncode]
    steps = [line["seconds"] for line in lines if line.get("step", 0) > 1]
    peaks = [json.loads(line)["peak_rss_gb"] * 1e9 for out, _ in said for line in out.splitlines()
             if line.startswith('{"peak_rss_gb"')]
    return {"seconds": fine.median(steps), "peak_bytes": max(peaks, default=None), "error": failed or None}


def case(a, place, where):
    found = {kind: [] for kind in ("one", "several", "peer")}
    memory = {}
    for turn in range(a.rounds):
        for kind in ("one", "several")[:: 1 if turn % 2 == 0 else -1]:
            ranks = 1 if kind == "one" else a.ranks
            line = measure(place, a, where, ranks)
            found[kind].append(line["seconds"])
            memory[kind] = line["peak_bytes"]
            say(bench="ranks", shape=place.name, parameters=place.parameters, seq=a.seq, where=where, ranks=ranks,
                round=turn, **line)
        if a.peer_python:
            shutil.rmtree(place.nvme, ignore_errors=True)  # room for the peer's files
            line = measure_peer(place, a, where)
            say(bench="ranks", program="deepspeed", shape=place.name, seq=a.seq, where=where, ranks=a.ranks, round=turn,
                **line)
            if line["seconds"]:
                found["peer"].append(line["seconds"])
                memory["peer"] = line["peak_bytes"]

    def ratio(other):
        return fine.median([mine / theirs for mine, theirs in zip(found["several"], found[other])])

    say(bench="ranks", shape=place.name, seq=a.seq, where=where, ranks=a.ranks, rounds=a.rounds, of_one=ratio("one"),
        of_peer=ratio("peer"), memory_of_one=memory["several"] / memory["one"],
        memory_of_peer=memory["several"] / memory["peer"] if memory.get("peer") else None)


def parse():
    build = fine.ROOT / "build"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=build / "tools/spillway")
    add_launcher(parser)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: 124M and 355M")
    parser.add_argument("--where", action="append", choices=PLACES, help="default: both")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=256, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1, help="how often each is measured")
    parser.add_argument("--work", help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--peer-python", help="the python of an environment with deepspeed: run it in turn")
    parser.add_argument("--tiny", action="store_true", help="one small case; what the tests run")
    a = parser.parse_args()
    # What step_bench's places ask for.
    a.clipping, a.tile_elements, a.buffers, a.hbm, a.host = 1.0, None, None, None, None
    if a.tiny:
        a.shape, a.where, a.steps, a.rounds, a.seq = ["tiny"], ["nvme"], 2, 1, 64
    return a


def main():
    a = parse()

    def body():
        for name in a.shape or ["gpt2", "gpt2-medium"]:
            for where in a.where or PLACES:
                with Workplace(a, name) as place:
                    case(a, place, where)

    return step_bench.guarded("ranks_bench", body)



if __name__ == "__main__":
    sys.exit(main())
