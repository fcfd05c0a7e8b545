#!/usr/bin/env python3
"""Memory of a rank as `spillway plan --ranks` says it, beside what the ranks of a run take, for each ZeRO stage.

For each number of ranks and stage, with what the stage lets leave the device in host memory and on NVMe: the plan, then
a run of some steps without budgets, which exports its model at the end (the buffer for other ranks' tiles is for that);
bf16, AdamW, clipping 1.0, a micro-batch a rank. HBM is emulated in RAM. One JSON line a case, in bytes:
  planned        of the rank that has most: hbm, host and nvme as `plan` totals them
  measured       hbm, host: resident pages of the arenas, of the largest rank; nvme: blocks of the largest rank's store
  ratio          measured / planned; "memory": of both arenas together. An arena is mapped as large as the run's own
                 ledger, so that more than that would show outside
  peak           the whole process, the largest rank; "outside": the most that was resident outside its arenas
  of_all_ranks   resident in both arenas, rank by rank, the most
  ledger         the lines of the plan; "same_ledger": rank 0 of the run printed the same
`--table FILE` makes a Markdown table of such lines.
"""
import argparse
import json
import pathlib
import re
import shutil
import sys
import threading
import time

import finetune_bench as fine
import ranks_bench
import step_bench
from step_bench import SHAPES, Failed, Workplace, checked, say

# What leaves the device in each stage, and where to: parameters leave it in stage 3 alone.
CASES = [(0, "hbm"), (1, "host"), (1, "nvme"), (2, "host"), (2, "nvme"), (3, "host"), (3, "nvme")]
DEVICES = {"hbm": "none", "host": "cpu", "nvme": "nvme"}


def arenas(smaps):
    """{size: resident bytes} of the mappings that can be arenas, which lie between two that nobody may touch, and
    resident bytes of all."""
    found, total = [], 0
    for line in smaps.splitlines():
        if header := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)", line):
            first, end = int(header[1], 16), int(header[2], 16)
            found.append({"first": first, "end": end, "access": header[3], "file": header[4] != "0", "resident": 0})
        elif (key := line.partition(":")[0]) in ("Rss", "Private_Hugetlb", "Shared_Hugetlb"):
            found[-1]["resident"] += int(line.split()[1]) * 1024
            total += int(line.split()[1]) * 1024
    sizes = {}
    for before, it, after in zip(found, found[1:], found[2:]):
        closed = all(m["access"] == "---p" for m in (before, after))
        if closed and before["end"] == it["first"] and it["end"] == after["first"] and not it["file"]:
            if it["access"] == "rw-p":
                sizes[it["end"] - it["first"]] = it["resident"]
    return sizes, total


class Sampler(threading.Thread):
    """Looks at all processes of a run, which `mark` on their command lines tells, until it is stopped."""

    def __init__(self, program, mark):
        super().__init__(daemon=True)
        self.program, self.mark, self.samples = str(program), str(mark), {}
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.1):
            for folder in pathlib.Path("/proc").iterdir():
                try:
                    if not folder.name.isdigit():
                        continue
                    words = (folder / "cmdline").read_text(errors="replace").split("\0")
                    if words and words[0] == self.program and self.mark in words:
                        seen = arenas((folder / "smaps").read_text())
                        self.samples.setdefault(int(folder.name), []).append(seen)
                except OSError:
                    pass  # it ended

    def __exit__(self, *_):
        self.ended.set()
        self.join()

    def __enter__(self):
        self.start()
        return self


def of_rank(samples, first):
    """The most that was resident in a rank's arenas, and outside. `first`: their sizes, of the first rank. The HBM
    arena is as large on all, that in host memory as large or smaller by what ranks own less."""
    most = {"hbm": 0, "host": 0, "outside": 0}
    for sizes, total in samples:
        left = dict(sizes)
        hbm = left.pop(first["hbm"], 0)
        host = max((size for size in left if 0.9 * first["host"] <= size <= first["host"]), default=None)
        found = {"hbm": hbm, "host": left.get(host, 0)}
        for key, size in (*found.items(), ("outside", total - sum(found.values()))):
            most[key] = max(most[key], size)
    return most


def write_config(place, a, stage, where):
    fine.write_config(place.config, clipping=1.0, tile_elements=a.tile_elements)
    config = json.loads(place.config.read_text())
    zero = {"stage": stage}
    if where != "hbm":
        offload = {"device": DEVICES[where]} | ({"nvme_path": str(place.nvme)} if where == "nvme" else {})
        zero |= {"offload_optimizer": offload} | ({"offload_param": offload} if stage == 3 else {})
    config["zero_optimization"] = zero
    config["spillway"] |= {"sum_groups": a.sum_groups} if a.sum_groups else {}
    place.config.write_text(json.dumps(config))


def planned(place, a, ranks):
    run = checked(fine.watch([a.spillway, "plan", "--config", place.config, "--model", place.model, "--seq", a.seq,
                              "--ranks", ranks, "--device", "host", "--no-probe", "--json"]))
    memory = json.loads(run["out"])["memory"]
    tiers = ("hbm", "host", "nvme")
    ledger = {f"{tier} {purpose}": size for tier in tiers for purpose, size in memory[tier]["purposes"].items()}
    return {tier: memory[tier]["bytes"] for tier in tiers}, ledger


def case(place, a, stage, where, ranks):
    command = [*place.command(a.seq), "--steps", a.steps, "--log", place.log, "--fresh", "--out", place.folder / "out"]
    shutil.rmtree(place.folder / "out", ignore_errors=True)
    write_config(place, a, stage, where)
    plan, ledger = planned(place, a, ranks)
    started = time.monotonic()
    with Sampler(a.spillway, place.config) as sampler:
        run = checked(fine.watch([*ranks_bench.launcher(a, ranks, "--oversubscribe"), *command]))
    if len(sampler.samples) != ranks:
        raise Failed(f"{len(sampler.samples)} processes were seen of {ranks} ranks")
    first = {tier: fine.arena_bytes(run, tier)[1] for tier in ("hbm", "host")}
    found = [of_rank(samples, first) for samples in sampler.samples.values()]
    measured = {tier: max(rank[tier] for rank in found) for tier in ("hbm", "host")}
    stores = [place.nvme / f"rank{rank}" if ranks > 1 else place.nvme for rank in range(ranks)]
    measured["nvme"] = max(sum(path.stat().st_blocks * 512 for path in store.rglob("*") if path.is_file())
                           for store in stores)
    ratio = {tier: size / plan[tier] if plan[tier] else None for tier, size in measured.items()}
    together = [rank["hbm"] + rank["host"] for rank in found]
    ratio["memory"] = max(together) / (plan["hbm"] + plan["host"])
    say(bench="ranks_memory", shape=place.name, parameters=place.parameters, seq=a.seq, stage=stage, where=where,
        ranks=ranks, sum_groups=a.sum_groups, steps=a.steps, planned=plan, measured=measured, ratio=ratio,
        peak=run["peak_bytes"], outside=max(rank["outside"] for rank in found),
        of_all_ranks=sorted(together, reverse=True), ledger=ledger,
        same_ledger=ranks_bench.ledger(run["out"]) == ledger, samples=min(map(len, sampler.samples.values())),
        seconds=round(time.monotonic() - started, 1))


def table(lines):
    """Of the first shape: planned and measured MB of a rank's arenas and their ratio, and the most MB outside them; a
    row for each stage and place, a column for each number of ranks."""
    lines = [line for line in lines if line.get("bench") == "ranks_memory" and not line["sum_groups"]]
    lines = [line for line in lines if line["shape"] == lines[0]["shape"]]
    counts = sorted({line["ranks"] for line in lines})
    text = "| stage, offloaded to | " + " | ".join(f"{count} rank{'s' * (count > 1)}" for count in counts) + " |\n|---|"
    text += "---|" * len(counts)
    for stage, where in dict.fromkeys((line["stage"], line["where"]) for line in lines):
        text += f"\n| {stage}, {'nothing' if where == 'hbm' else {'host': 'RAM', 'nvme': 'NVMe'}[where]} |"
        for count in counts:
            line = next(l for l in lines if (l["stage"], l["where"], l["ranks"]) == (stage, where, count))
            plan = line["planned"]["hbm"] + line["planned"]["host"]
            text += (f" {plan / 1e6:.1f}, {line['of_all_ranks'][0] / 1e6:.1f}, {line['ratio']['memory']:.4f};"
                     f" {line['outside'] / 1e6:.0f} |")
    return text


def parse():
    build = fine.ROOT / "build"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=build / "tools/spillway")
    ranks_bench.add_launcher(parser)
    parser.add_argument("--shape", choices=list(SHAPES), default="gpt2")
    parser.add_argument("--ranks", action="append", type=int, help="default: 1, 2 and 4")
    parser.add_argument("--stage", action="append", type=int, choices=range(4), help="default: all of them")
    parser.add_argument("--where", action="append", choices=list(DEVICES), help="default: all of them")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tile-elements", type=int)
    parser.add_argument("--sum-groups", type=int, help="a multiple of the ranks; default: sums as MPI does them")
    parser.add_argument("--work", help="a directory on the drive; default: TMPDIR")
    parser.add_argument("--table", type=pathlib.Path, help="print the table of these results, and run nothing")
    parser.add_argument("--tiny", action="store_true", help="two small cases; what the tests run")
    a = parser.parse_args()
    a.clipping, a.buffers, a.hbm, a.host = 1.0, None, None, None  # what step_bench's places ask for
    if a.tiny:
        a.shape, a.ranks, a.stage, a.where, a.steps = "tiny", [1, 2], [3], ["host"], 30
    return a


def main():
    a = parse()
    if a.table:
        print(table([json.loads(line) for line in a.table.read_text().splitlines()]))
        return 0

    def body():
        with Workplace(a, a.shape) as place:
            for stage, where in CASES:
                if stage in (a.stage or range(4)) and where in (a.where or DEVICES):
                    for ranks in a.ranks or (1, 2, 4):
                        case(place, a, stage, where, ranks)

    return step_bench.guarded("ranks_memory", body)



if __name__ == "__main__":
    sys.exit(main())
