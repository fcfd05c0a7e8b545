#!/usr/bin/env python3
"""Named tensors on a drive: Spillway's store and queue beside TensorNVMe's DiskOffloader and DeepSpeed's aio handle.

  queue            spillway/c_io.h: requests of one file, direct
  store            spillway.io.TensorStore: direct, with a checksum of every block, in --host of memory
  tensornvme-*     TensorNVMe's DiskOffloader with io_uring or libaio: through the page cache, without O_DIRECT
  deepspeed        DeepSpeed's aio handle, direct, tensors in memory that it has locked
  deepspeed-8      for rows, eight of its handles: one takes its requests one by one

each in a process of its own in --work, all with the same tensors, depth and blocks (TensorNVMe has none, it asks for a
tensor at a time). queue and deepspeed have one file in common, the store and TensorNVMe make files of their own. They
take turns, every other round the other way round.

Cases: `equal`, 16 tensors, of 64 MiB where --mib is 1024; `odd`, tensors of odd sizes (what is direct is padded to 4
KiB, and counts without); `rows`, --rows random rows of 4 KiB, of a table of --table-rows. A write ends when all is
durable: fdatasync, and the store's commit(). What TensorNVMe reads is dropped from the page cache before. All files are
written twice before anything is measured.

One JSON line for each turn: bytes, seconds, CPU seconds of the process with all its threads, whether what came back was
what was written, the machine's load. One for each of ours beside each peer: the median over the rounds of the ratio of
rates (higher is better) and of CPU seconds (lower is better), with quartiles. Peers that are not installed are left
out, and the first line says so.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import link_probes

ROOT = pathlib.Path(__file__).resolve().parents[1]
OURS = ("queue", "store")
PEERS = {"tensornvme-uring": "tensornvme", "tensornvme-aio": "tensornvme", "deepspeed": "deepspeed",
         "deepspeed-8": "deepspeed"}
WARM = 2  # rounds


class Turns:
    """A process that waits for its turn."""

    def __init__(self, a, folder, case, name):
        program = name.removesuffix("-8")
        place = pathlib.Path(folder) / case
        place.mkdir(exist_ok=True)
        options = {"program": program, "folder": place, "case": case, "bytes": a.mib << 20, "block": a.block,
                   "depth": a.depth, "host-bytes": a.host, "table-rows": a.table_rows, "rows": a.rows,
                   "handles": 8 if name != program else 1}
        self.name = name
        self.process = subprocess.Popen(
            [a.peer_python, ROOT / "bench/peers/tensors.py", *(f"--{key}={value}" for key, value in options.items())],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"{self.name}: ended with {self.process.wait()}")
        return line

    def turn(self, do, number):
        self.process.stdin.write(f"{do} {number}\n")
        self.process.stdin.flush()
        return json.loads(self.answer())

    def end(self):
        self.process.stdin.close()
        self.process.wait()


def quartiles(values):
    ordered = sorted(values)
    return [round(ordered[min(len(ordered) - 1, len(ordered) * q // 4)], 3) for q in (1, 2, 3)]


def medians(name, turns):
    return {f"{name}_gb_per_s": quartiles([turn["bytes"] / turn["seconds"] / 1e9 for turn in turns])[1],
            f"{name}_cpu_s_per_gib": quartiles([turn["cpu_seconds"] / turn["bytes"] * 2**30 for turn in turns])[1]}


def report(line):
    print(json.dumps(line), flush=True)


def compare(a, case, folder, names):
    rounds = {}  # of a step: for each program its figures, round by round
    programs = {}
    try:
        for name in names:
            programs[name] = Turns(a, folder, case, name)
            programs[name].answer()
        for number in range(-WARM, a.rounds):
            for do in ("rows",) if case == "rows" else ("write", "read"):
                for name in names if number % 2 else reversed(names):
                    figures = programs[name].turn(do, number + WARM)
                    if not figures.pop("right"):
                        sys.exit(f"{name}: what it has read is not what was written")
                    if number < 0:
                        continue
                    rounds.setdefault(do, {}).setdefault(name, []).append(figures)
                    report({"case": case, "do": do, "program": name, "round": number, **figures,
                            "gb_per_s": round(figures["bytes"] / figures["seconds"] / 1e9, 4),
                            "load": round(os.getloadavg()[0], 1)})
    finally:
        for program in programs.values():
            program.end()
    for do, of in rounds.items():
        for ours in (name for name in names if name in OURS):
            for peer in (name for name in names if name not in OURS):
                pairs = list(zip(of[ours], of[peer]))
                rates = quartiles([theirs["seconds"] / mine["seconds"] for mine, theirs in pairs])
                costs = quartiles([mine["cpu_seconds"] / theirs["cpu_seconds"] for mine, theirs in pairs])
                report({"summary": f"{case}, {do}: {ours} beside {peer}", "rounds": len(pairs),
                        "steady_mb_per_s": a.steady, "rate_ratio": rates[1], "rate_quartiles": rates[::2],
                        "cpu_ratio": costs[1], "cpu_quartiles": costs[::2],
                        **medians(ours, of[ours]), **medians(peer, of[peer])})


def installed(python, module):
    if python == sys.executable:
        return importlib.util.find_spec(module) is not None
    program = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec('{module}'))"
    return subprocess.run([python, "-c", program], check=False).returncode == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", default=sys.executable, help="has torch, and the peers")
    parser.add_argument("--work", default=None, help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--case", action="append", choices=["equal", "odd", "rows"], help="default: all")
    parser.add_argument("--program", action="append", choices=[*OURS, *PEERS], help="default: all that are installed")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mib", type=int, default=1024, help="MiB of all tensors")
    parser.add_argument("--host", type=int, default=256 << 20, help="host_bytes of the store")
    parser.add_argument("--block", type=int, default=1 << 20)
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--table-rows", type=int, default=65536)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--steady", type=float, metavar="MBPS", help="hold the drive to this rate each way, as root")
    parser.add_argument("--tiny", action="store_true", help="one small round, as the test suite runs it")
    a = parser.parse_args()
    if a.tiny:
        a.mib, a.host, a.table_rows, a.rows, a.rounds, a.case = 4, 1 << 20, 512, 64, 1, ["odd", "rows"]
    missing = sorted({module for module in PEERS.values() if not installed(a.peer_python, module)})
    named = a.program or [*OURS, *PEERS]
    names = [name for name in named if PEERS.get(name) not in missing]
    report({"bench": "tensors", "not_installed": missing, "mib": a.mib, "host_bytes": a.host, "block": a.block,
            "depth": a.depth, "table_rows": a.table_rows, "rows": a.rows, "steady_mb_per_s": a.steady})
    with tempfile.TemporaryDirectory(prefix="spillway-tensors-", dir=a.work) as folder:
        with link_probes.steady_drive(folder, a.steady):
            for case in a.case or ["equal", "odd", "rows"]:
                compare(a, case, folder, [name for name in names if case == "rows" or name != "deepspeed-8"])


if __name__ == "__main__":
    sys.exit(main())
