#!/usr/bin/env python3
"""What only a machine with a GPU can show of the `cuda` device, in stages that share a time box.

  suites      the three test programs of the device and of the trainer's operations
  same_bits   where tensors live changes no bit: tests/cli/same_bits_test.py
  reference   losses beside PyTorch's, kept and made anew
  copies      copies, the optimizer's kernels and the trainer's products beside what CUDA itself reaches
  resident    gpt2-xl with everything in HBM: share of the GPU's product rate; beside PyTorch, in turns
  tiers       gpt2-xl in 4 GiB of HBM and 4 GiB of host memory, all on NVMe: the step over its slowest link
  pytorch     a PyTorch loop through Spillway: its tests, and beside PyTorch alone
  peers       a Llama shape by a PyTorch loop through Spillway, and by what a user would take instead
  big         3 billion parameters in 10 GiB of HBM and 32 GiB of host memory
  sanitizer   the suites under compute-sanitizer, as far as the rest of the time goes

  bench/gpu.py --bin build --out results --work /mnt/nvme/spillway-gpu            # of a build directory
  bench/gpu.py --bin spillway/bin --out results --stages resident --seconds 525   # of a bundle (tools/bundle.sh)
  bench/gpu.py --table results more-results                                       # what was found, once more

--out gets results.jsonl (a line as soon as there is one: the machine, figures, raw lines of the benches, how each stage
ended), log.txt (commands and what they printed) and traces. A stage that does not fit the time that is left is skipped,
one that fails says why and the next one goes on. Models in --work are used again, stores are removed.

Exit code: 0; 1 a stage failed (a figure that is not as wanted is no failure, a wrong result is); 2 a wrong option; 77
there is no GPU. SPILLWAY_DEVICE=emulated and LD_LIBRARY_PATH=BUILD/kernels/cuda/emulator rehearse on an emulated one.
"""
import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import gpu_peers
import gpu_stages
import gpu_tests
import gpu_tiers
from gpu_session import ROOT, Failed, Session, Skip

# Name: what does it, seconds below which it is not begun, and what it takes at most where others follow.
STAGES = {
    "suites": (gpu_tests.suites, 30, 150), "same_bits": (gpu_tests.same_bits, 40, 300),
    "reference": (gpu_stages.reference, 30, 120), "copies": (gpu_stages.copies, 30, 150),
    "resident": (gpu_stages.resident, 120, 420), "tiers": (gpu_tiers.tiers, 120, 500),
    "pytorch": (gpu_tests.pytorch, 90, 240), "peers": (gpu_peers.peers, 240, 480), "big": (gpu_tiers.big, 200, 500),
    "sanitizer": (gpu_tests.sanitizer, 30, 600)}
TINY_SECONDS = (1, 300)
EMULATED_GPU = "libspillway_emulated_gpu.so"
COLUMNS = ("stage", "figure", "value", "beside", "ratio", "wanted", "reached")


def run_stage(session, name, after):
    """One stage in its share of the time, so that those `after` it can begin."""
    perform, *seconds = STAGES[name]
    least, most = TINY_SECONDS if session.tiny else seconds
    start = time.monotonic()
    reserved = sum(TINY_SECONDS[0] if session.tiny else STAGES[other][1] for other in after)
    share = session.end - start - reserved if not after else min(most, session.end - start - reserved)
    session.stage, session.stage_end = name, start + share
    status, reason, tail = "done", "", ""
    print(f"{name}: {share:.0f} s at most", flush=True)
    try:
        if share < least:
            raise Skip(f"{share:.0f} s are left, and it takes {least} or more")
        perform(session)
    except Skip as why:
        status, reason = "skipped", str(why)
    except Failed as why:
        status, reason, tail = "failed", str(why), why.tail
    except Exception as error:  # one stage's trouble must not be the next one's
        status, reason = "failed", f"{type(error).__name__}: {error}"
    for left in (*session.work.glob("store-*"), *session.work.glob("spillway-pytorch-*")):  # also of what was killed
        shutil.rmtree(left, ignore_errors=True)
    if status == "failed":
        session.failures.append(name)
    session.stage_end = session.end
    session.say(status=status, reason=reason, tail=tail, seconds=time.monotonic() - start, gpu=session.gpu())
    if status != "done":
        session.found.append({"stage": name, "figure": status, "value": None, "beside": reason})
    print(f"{name}: {status} in {time.monotonic() - start:.0f} s{': ' if reason else ''}{reason}", flush=True)


def why_no_gpu():
    if os.environ.get("SPILLWAY_DEVICE") == "emulated":
        folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
        return "" if any(pathlib.Path(folder, EMULATED_GPU).is_file() for folder in folders) else (
            f"LD_LIBRARY_PATH names no folder with {EMULATED_GPU}; it is built where there is a CUDA toolkit")
    if not shutil.which("nvidia-smi"):
        return "nvidia-smi is not there, so there is no NVIDIA GPU; SPILLWAY_DEVICE=emulated rehearses (see --help)"
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 and "GPU" in done.stdout else f"nvidia-smi: {done.stdout.strip()}"


def cells(line):
    ratio, wanted = line.get("ratio"), ""
    if line.get("at_least") is not None:
        wanted = f">= {line['at_least']:g}"
    elif line.get("at_most") is not None:
        wanted = f"<= {line['at_most']:g}"
    reached = {True: "yes", False: "NO", None: "-" if wanted else ""}[line.get("reached")]
    return (line["stage"], line["figure"], line.get("value") or "not measured", line.get("beside") or "",
            "" if ratio is None else f"{ratio:.3g}" if ratio < 0.01 else f"{ratio:.3f}", wanted, reached)


def print_table(lines):
    rows = [COLUMNS, *map(cells, lines)]
    widths = [min(60, max(len(row[i]) for row in rows)) for i in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def kept_lines(folder):
    """The lines of an earlier table."""
    for line in map(json.loads, (folder / "results.jsonl").read_text().splitlines()):
        if "figure" in line:
            yield line
        elif line.get("status", "done") != "done":
            yield {**line, "figure": line["status"], "value": None, "beside": line["reason"]}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build", help="a bundle's bin, or a build directory")
    parser.add_argument("--out", type=pathlib.Path, help="where results go; default: gpu-results")
    parser.add_argument("--work", type=pathlib.Path, help="where models and stores go: on the drive that is to be "
                        "measured, with 50 GB free; default: spillway-gpu in TMPDIR")
    parser.add_argument("--stages", default=",".join(STAGES), help="which, separated by commas, in their order")
    parser.add_argument("--seconds", type=float, default=3600, help="the time box")
    parser.add_argument("--peer-python", default=sys.executable,
                        help="a python with torch and transformers; none: no peer")
    parser.add_argument("--peer-shape", default="llama-1b", choices=("llama-1b", "qwen3-1.7b", "llama-8b"),
                        help="the model of the stage peers")
    parser.add_argument("--tiny", action="store_true", help="small shapes, all in a minute or two; what would go to a "
                        "default of --out or --work is thrown away")
    parser.add_argument("--table", nargs="+", type=pathlib.Path, metavar="DIR", help="only print what these --out hold")
    a = parser.parse_args()
    a.stages = a.stages.split(",")
    unknown = set(a.stages) - set(STAGES)
    if unknown:
        parser.error(f"--stages: there is no {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return a


def main():
    a = parse()
    if a.table:
        print_table([line for folder in a.table for line in kept_lines(folder)])
        return 0
    why = why_no_gpu()
    if why:
        print(f"skipped: {why}")
        return 77
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="spillway-gpu-") as folder:
        place = pathlib.Path(folder)
        a.out = a.out or (place / "out" if a.tiny else pathlib.Path("gpu-results"))
        a.work = a.work or (place / "work" if a.tiny else pathlib.Path(tempfile.gettempdir(), "spillway-gpu"))
        try:
            session = Session(a)
        except Skip as reason:
            print(f"gpu.py: --bin: {reason}", file=sys.stderr)
            return 2
        session.machine()
        try:
            for i, name in enumerate(a.stages):
                run_stage(session, name, a.stages[i + 1:])
        finally:
            print_table(session.found)
    return 1 if session.failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
