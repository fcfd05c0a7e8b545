#!/usr/bin/env python3
"""A few optimizer steps of one of loops.py's programs, at several numbers of tokens a step. JSON lines:

  {"step", "tokens", "seconds", "loss", "read_bytes", "written_bytes"}      each step, as soon as it is done
  {"size", "step_seconds", "tokens_per_second", peaks of memory, …}         each size; the first step does not count
  {"imported"}, {"ready"}                                                   how long libraries and set-up took
  {"failed"} or {"unfinished"}                                              why there is no more

`peak_hbm_bytes` is what PyTorch's tensors took, `hbm_bytes` what the process took of the GPU's memory with all that
is not PyTorch's: its context, its caches, and Spillway's. `peak_rss_bytes` is VmHWM, in which memory that CUDA pinned
may be missing; `host_bytes` is by how much less the machine had available than before, which has it. Sizes are begun
as far as --seconds go, by what the steps before took.

  train.py --variant spillway-host --shape llama-1b --device cuda --tokens 8192,16384,65536 --steps 4,3,3 --seconds 60
  train.py --tiny      every program that can run on a CPU, on a small shape
"""
import argparse
import contextlib
import gc
import json
import os
import pathlib
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time

START = time.monotonic()
HERE = pathlib.Path(__file__).resolve().parent
NAMES = ("pytorch", "spillway-hbm", "spillway-host", "deepspeed-cpu", "fsdp2", "torchao", "spillway-nvme",
         "deepspeed-nvme")


def kilobytes(file, field):
    return int(re.search(rf"^{field}:\s+(\d+)", pathlib.Path(file).read_text(), re.MULTILINE)[1]) * 1024


def drive_bytes():
    text = pathlib.Path("/proc/self/io").read_text()
    return [int(re.search(rf"^{field}: (\d+)", text, re.MULTILINE)[1]) for field in ("read_bytes", "write_bytes")]


class HostMemory:
    """The most by which the machine had less available than at the start, looked at ten times a second."""

    def __init__(self):
        self.before, self.most = self.used(), 0
        threading.Thread(target=self.watch, daemon=True).start()

    def used(self):
        return kilobytes("/proc/meminfo", "MemTotal") - kilobytes("/proc/meminfo", "MemAvailable")

    def look(self):
        self.most = max(self.most, self.used() - self.before)
        return self.most

    def watch(self):
        while True:
            self.look()
            time.sleep(0.1)


def expected_seconds(known, micro_batches):
    """Of a step, by the last two sizes, as part of it does not grow with its micro-batches; by one, in proportion."""
    if not known:
        return 0
    count, seconds = known[-1]
    most = seconds * micro_batches / count
    if len(known) == 1:
        return most
    slope = max(0, (seconds - known[-2][1]) / (count - known[-2][0]))
    return min(most, seconds + slope * (micro_batches - count))


class Runner:
    def __init__(self, options):
        self.options, self.memory = options, HostMemory()
        # What libraries print goes elsewhere.
        self.lines = open(options.lines, "a") if options.lines else os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.loop, self.ready, self.hbm = None, START, 0

    def say(self, **line):
        self.lines.write(json.dumps({"variant": self.options.variant, **line}) + "\n")
        self.lines.flush()

    def left(self):
        return START + self.options.seconds - time.monotonic()

    def prepare(self, torch, loops, accumulation):
        """The loop for so many micro-batches; seconds."""
        begin = self.ready
        if self.loop is None or not self.loop.accumulate(accumulation):
            if self.loop is not None:
                self.loop.close()
                self.loop = None
                gc.collect()
                if self.options.device == "cuda":
                    torch.cuda.empty_cache()
            self.loop = loops.LOOPS[self.options.variant](self.options, accumulation)
            if self.options.device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
        return time.monotonic() - begin

    def run(self):
        import torch

        import loops
        options = self.options
        if options.threads:
            torch.set_num_threads(options.threads)
        rows = torch.randint(0, loops.SHAPES[options.shape][1]["vocab_size"], (64, options.micro, options.seq),
                             generator=torch.Generator().manual_seed(2)).to(options.device)
        self.say(imported=time.monotonic() - START)
        known = []  # (micro-batches, seconds of a step) so far
        for tokens, steps in zip(options.tokens, options.steps):
            micro_batches = tokens // (options.micro * options.seq)
            step = expected_seconds(known, micro_batches)
            if 1.3 * step > self.left():
                self.say(unfinished=f"{tokens} tokens: a step takes some {step:.0f} s, {max(0, self.left()):.0f} are "
                                    "left")
                return
            setup = self.prepare(torch, loops, micro_batches)
            self.say(ready=tokens, setup_seconds=setup, seconds_left=self.left())
            seconds, read, written = self.steps(torch, rows, tokens, micro_batches, steps)
            settled = seconds[1:] or seconds
            middle = statistics.median(settled)
            known.append((micro_batches, middle))
            self.say(size=tokens, step_seconds=middle, tokens_per_second=tokens / middle, steps=len(settled),
                     first_counts=len(seconds) == 1, read_bytes=read, written_bytes=written, setup_seconds=setup,
                     about=self.loop.ABOUT,
                     parameters=options.parameters, peak_hbm_bytes=self.peak(torch), hbm_bytes=self.hbm,
                     peak_rss_bytes=kilobytes("/proc/self/status", "VmHWM"), host_bytes=self.memory.look(),
                     torch=torch.__version__, **self.loop.counters())
            self.ready = time.monotonic()

    def steps(self, torch, rows, tokens, micro_batches, steps):
        """(seconds of each, bytes read and written on the drive by the last one)."""
        seconds, row = [], 0
        for step in range(1, steps + 1):
            if seconds and 1.1 * seconds[-1] > self.left():
                break
            before, begin = drive_bytes(), time.perf_counter()
            batches = [rows[(row + i) % len(rows)] for i in range(micro_batches)]
            row += micro_batches
            loss = self.loop.step(batches).item()
            if self.options.device == "cuda":
                torch.cuda.synchronize()
                free, total = torch.cuda.mem_get_info()
                self.hbm = max(self.hbm, total - free)
            seconds.append(time.perf_counter() - begin)
            read, written = (now - then for now, then in zip(drive_bytes(), before))
            self.say(step=step, tokens=tokens, seconds=seconds[-1], loss=loss, read_bytes=read, written_bytes=written)
        return seconds, read, written

    def peak(self, torch):
        return torch.cuda.max_memory_allocated() if self.options.device == "cuda" else 0


def run_all(options):
    """Every program on the small shape, in a process of its own; 1 where one of Spillway or PyTorch alone fails."""
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            done = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--variant", name, "--folder", folder],
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            print(done.stdout, end="", flush=True)
            bad = done.returncode != 0 or '"failed"' in done.stdout
            if bad and name.split("-")[0] in ("spillway", "pytorch"):
                print(done.stderr[-3000:], file=sys.stderr)
                status = 1
    return status


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {"type": lambda text: [int(part) for part in text.split(",")]}
    parser.add_argument("--variant", choices=NAMES)
    parser.add_argument("--shape", default="llama-1b")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda, with --tiny cpu")
    parser.add_argument("--micro", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--seq", type=int, default=1024)
    parser.add_argument("--tokens", **numbers, default=[8192, 16384, 65536], help="of a step, one size after the other")
    parser.add_argument("--steps", **numbers, default=[4, 3, 3], help="of each size; the first does not count")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--states", choices=("fp32", "bf16", "int8"), default="fp32",
                        help="Spillway's moments; the peers have fp32")
    parser.add_argument("--folder", default="/tmp/peers", help="on the drive")
    parser.add_argument("--lines", help="a file for the JSON lines")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.device = options.device or ("cpu" if options.tiny else "cuda")
    if options.tiny:
        options.shape, options.micro, options.seq = "tiny", 2, 32
        options.tokens, options.steps, options.threads = [64, 128], [3, 2], 1
    return options


def main():
    options = parse()
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        print(f"skipped: {error}")
        return 77
    if options.variant is None:
        return run_all(options)
    # If memory does not suffice, this is what the kernel ends. DeepSpeed locks what it reads the drive into.
    pathlib.Path("/proc/self/oom_score_adj").write_text("1000")
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    shutil.rmtree(options.folder, ignore_errors=True)
    pathlib.Path(options.folder).mkdir(parents=True)
    runner = Runner(options)
    try:
        runner.run()
    except Exception as error:  # of a peer that is not there, or cannot: its line says why
        import traceback
        traceback.print_exc()
        runner.say(failed=f"{type(error).__name__}: {str(error)[:600]}", code=getattr(error, "code", None))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what libraries do at exit takes its time, and nothing is measured after it


if __name__ == "__main__":
    sys.exit(main())
