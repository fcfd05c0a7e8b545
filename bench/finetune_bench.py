#!/usr/bin/env python3
"""Fine-tune step time, memory and traffic of `spillway finetune`, all on NVMe, beside DeepSpeed in the same run.

Each shape is trained in three processes. The first imports a random model and does step 1; the second resumes and does
N steps, the third resumes and does 2 N. Both resumed runs open the store, probe the drive and end in the same way, so
the difference between them is N steps and nothing else: what the kernel charged for it (/proc/PID/io) must be what the
log says. One JSON line per run; the last fields say what to look at:
  step_seconds        median of all resumed steps
  adam_share          of that time, the median share spent in Adam (it overlaps with I/O)
  peak_bytes          largest resident set, children included, plus huge pages
  outside_bytes       the most that was resident outside the arenas: code, libraries, stacks, no part of the model
  hbm_touched, host_touched   resident pages of an arena over what the ledger reserves in it: 1 within 2 %
  read_ratio, write_ratio   bytes the kernel counted over bytes the log counted: 1 within 1 %
  cached_bytes        pages of the store in the page cache: 0 when direct I/O did its work
"""
import argparse
import ctypes
import json
import mmap
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# name: layers, width, HBM budget, host budget. The budgets can be given on the command line instead.
SHAPES = {
    "tiny": (2, 64, "64MiB", "64MiB"),
    "gpt2": (12, 768, "768MiB", "768MiB"),
    "gpt2-medium": (24, 1024, "768MiB", "1536MiB"),
    "gpt2-large": (36, 1280, "1024MiB", "2560MiB"),
    "24x2048": (24, 2048, "1280MiB", "3584MiB"),
}


def status_bytes(pid, field):
    try:
        text = pathlib.Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def process_io(pid):
    lines = pathlib.Path(f"/proc/{pid}/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def cached_bytes(folder):
    """Bytes of a folder's files that lie in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    total = 0
    for path in pathlib.Path(folder).rglob("*"):
        size = path.stat().st_size if path.is_file() else 0
        if not size:
            continue
        fd = os.open(path, os.O_RDONLY)
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        os.close(fd)
        if address in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), f"mmap of {path}")
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if libc.mincore(address, size, pages):
            raise OSError(ctypes.get_errno(), f"mincore of {path}")
        libc.munmap(address, size)
        total += sum(page & 1 for page in bytes(pages)) * mmap.PAGESIZE
    return total


def watch(command, sample=False, **keywords):
    """Runs a program to its end: seconds, peak resident bytes and what /proc/PID/io said last."""
    started = time.monotonic()
    run = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                           **keywords)
    texts = [None, None]
    readers = [threading.Thread(target=lambda i=i, pipe=pipe: texts.__setitem__(i, pipe.read()))
               for i, pipe in enumerate((run.stdout, run.stderr))]
    for reader in readers:
        reader.start()
    huge, samples = 0, []
    try:
        while True:
            # A zombie keeps its I/O accounts until it is reaped, and nothing can be missing from them any more.
            ended = os.waitid(os.P_PID, run.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            huge = max(huge, status_bytes(run.pid, "HugetlbPages"))
            if ended:
                break
            if sample:
                samples.append(mappings(run.pid))
            time.sleep(0.1)
    except BaseException:  # Ctrl-C: what it writes is about to be removed
        run.kill()
        run.wait()
        raise
    io = process_io(run.pid)
    _, status, usage = os.wait4(run.pid, 0)
    run.returncode = os.waitstatus_to_exitcode(status)
    for reader in readers:
        reader.join()
    # A run looks how fast its drive is, for some time and not for some bytes.
    probed = re.search(r"nvme link: .*; (\d+) MiB read and (\d+) written", texts[1])
    for kind, mib in zip(("read", "write"), probed.groups() if probed else ()):
        io[f"{kind}_bytes"] -= int(mib) << 20
    # ru_maxrss is the high-water mark of the process or of a child it waited for, whichever is larger.
    return {"status": run.returncode, "out": texts[0], "err": texts[1], "seconds": time.monotonic() - started,
            "peak_bytes": usage.ru_maxrss * 1024 + huge, "io": io, "samples": samples}


def mappings(pid):
    """Resident bytes in all, and those of large anonymous mappings by their size: {size: resident}."""
    try:
        smaps = pathlib.Path(f"/proc/{pid}/smaps").read_text()
    except OSError:
        return 0, {}
    total, large, size, anonymous = 0, {}, 0, False
    for line in smaps.splitlines():
        key, _, value = line.partition(":")
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            anonymous = line.split()[4] == "0"
        elif key == "Size":
            size = int(value.split()[0]) * 1024
        elif key in ("Rss", "Private_Hugetlb", "Shared_Hugetlb"):
            total += int(value.split()[0]) * 1024
            if anonymous and size >= 1 << 24:
                large[size] = large.get(size, 0) + int(value.split()[0]) * 1024
    return total, large


def arena_bytes(run, tier):
    """Bytes reserved in an arena by the ledger, and bytes of its mapping."""
    total = re.search(rf"^ +{tier} +total +(\d+) bytes of (\d+)", run["out"], re.MULTILINE)
    reserved, budget = int(total.group(1)), int(total.group(2))
    return reserved, -(-(budget if tier == "hbm" else reserved) // mmap.PAGESIZE) * mmap.PAGESIZE


def arena_summary(run):
    """Pages touched and the rest, from the samples of a run. An arena shows by its size, which the ledger says: the
    HBM arena is as large as its budget, the host arena as what is reserved in it."""
    facts, arenas = {}, set()
    for tier in ("hbm", "host"):
        reserved, size = arena_bytes(run, tier)
        facts[f"{tier}_touched"] = max(large.get(size, 0) for _, large in run["samples"]) / reserved
        arenas.add(size)
    facts["outside_bytes"] = max(total - sum(large.get(size, 0) for size in arenas) for total, large in run["samples"])
    return facts


def median(values):
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else None


def resumed(command, log, steps):
    """A resumed run to its end, with the lines of its log."""
    log.unlink(missing_ok=True)
    run = watch([*command, "--steps", steps, "--resume", "--log", log], sample=True)
    run["steps"] = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return run


def ratio_of(short, long, kind):
    """Bytes by the kernel over bytes by the log, for the steps that `long` did and `short` did not."""
    counted = long["io"][f"{kind}_bytes"] - short["io"][f"{kind}_bytes"]
    logged = [sum(step[f"nvme_{kind}_bytes"] for step in run["steps"]) for run in (short, long)]
    return counted / max(1, logged[1] - logged[0])


def write_config(path, nvme=None, hbm=None, host=None, commit_every=None, accumulation=1, clipping=1.0,
                 tile_elements=None, buffers=None, micro=1, dtype="bf16", optimizer=None, device=None, states=None,
                 at_home=None, speculative_blocks=None):
    """A configuration with everything at home on NVMe, in host memory (at_home="cpu") or, by default, in HBM."""
    zero = {"stage": 3}
    if at_home:
        zero |= {"offload_param": {"device": at_home}, "offload_optimizer": {"device": at_home}}
    if nvme:
        offload = {"device": "nvme", "nvme_path": str(nvme)}
        count = {"buffer_count": buffers} if buffers else {}
        zero |= {"offload_param": offload, "offload_optimizer": offload | count}
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": optimizer or {"lr": 1e-4}}, "zero_optimization": zero,
        "spillway": {key: value for key, value in (("device", device), ("hbm_bytes", hbm), ("host_bytes", host),
                                                   ("commit_every", commit_every), ("tile_elements", tile_elements),
                                                   ("states", states), ("speculative_blocks", speculative_blocks))
                      if value is not None}}))


def init_model(spillway, folder, layers, width):
    return watch([spillway, "init-model", folder, "--layers", layers, "--width", width, "--heads", max(1, width // 64),
                  "--dtype", "bf16"])


def three_runs(command, log, steps):
    """Step 1 in a new store, then `steps` and twice as many more, resumed. After a failure the rest is that run."""
    first = watch([*command, "--steps", 1])
    short = first if first["status"] else resumed(command, log, 1 + steps)
    return first, short, short if short["status"] else resumed(command, log, 1 + 3 * steps)


def run_spillway(a, name, layers, width, hbm, host, aio=None):
    work = pathlib.Path(tempfile.mkdtemp(prefix="spillway-bench-", dir=a.work))
    try:
        nvme, log, config, data = work / "nvme", work / "steps.jsonl", work / "ds_config.json", work / "text"
        nvme.mkdir()
        data.write_bytes((ROOT / "LICENSE").read_bytes() * 8)
        write_config(config, nvme, a.hbm or hbm, a.host or host)
        made = init_model(a.spillway, work / "model", layers, width)
        command = [a.spillway, "finetune", "--config", config, "--model", work / "model", "--data", data,
                   "--seq", a.seq, *(["--aio", aio] if aio else [])]
        first, short, run = (made,) * 3 if made["status"] else three_runs(command, log, a.steps)
        result = {"bench": "finetune", "program": "spillway", "shape": name, "layers": layers, "width": width,
                  "seq": a.seq, "hbm_bytes": a.hbm or hbm, "host_bytes": a.host or host,
                  "aio": json.loads(pathlib.Path(aio).read_text()) if aio else "defaults"}
        if run["status"]:
            return {**result, "error": run["err"].strip().splitlines()[-1:], "status": run["status"]}
        steps = short["steps"] + run["steps"]
        peak = max(short["peak_bytes"], run["peak_bytes"])
        return {**result, "steps": len(steps), "step_seconds": median([step["seconds"] for step in steps]),
                "tokens_per_second": median([step["tokens"] / step["seconds"] for step in steps]),
                "stall_seconds": median([step["stall_seconds"] for step in steps]),
                "link": steps[-1]["link"], "link_percent": steps[-1]["link_percent"],
                "adam_share": median([step["adam_seconds"] / step["seconds"] for step in steps]),
                "read_bytes_per_step": median([step["nvme_read_bytes"] for step in steps]),
                "write_bytes_per_step": median([step["nvme_write_bytes"] for step in steps]),
                "read_ratio": ratio_of(short, run, "read"), "write_ratio": ratio_of(short, run, "write"),
                "import_peak_bytes": first["peak_bytes"], "peak_bytes": peak,
                **arena_summary(run),
                "cached_bytes": cached_bytes(nvme)}
    finally:
        shutil.rmtree(work)


def run_peer(a, name, layers, width):
    folder = tempfile.mkdtemp(prefix="spillway-bench-peer-", dir=a.work)
    try:
        run = watch([a.peer_python, ROOT / "bench/peers/finetune_deepspeed.py", "--layers", layers, "--width", width,
                     "--seq", a.seq, "--steps", 1 + a.steps, "--offload", "nvme_optimizer", "--nvme", folder])
        lines = [json.loads(line) for line in run["out"].splitlines() if line.startswith("{")]
        result = {"bench": "finetune", "program": "deepspeed", "shape": name, "layers": layers, "width": width,
                  "seq": a.seq, "peak_bytes": run["peak_bytes"]}
        # The first step allocates; a peer that is killed for memory still says how far it came.
        steps = [line["seconds"] for line in lines if line.get("step", 0) > 1]
        if run["status"]:
            result |= {"status": run["status"], "error": run["err"].strip().splitlines()[-1:]}
        return {**result, "steps": len(steps), "step_seconds": median(steps)}
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=ROOT / "build/tools/spillway")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: the three of the field")
    parser.add_argument("--hbm", help="HBM budget, for example 768MiB")
    parser.add_argument("--host", help="host budget")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured")
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1, help="how often each program runs, alternately")
    parser.add_argument("--work", default=None, help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--aio", help="what `spillway sweep --json` wrote: each run is repeated with these settings")
    parser.add_argument("--peer-python", help="the python of an environment with deepspeed: run it alternately")
    parser.add_argument("--tiny", action="store_true", help="one small shape; what the tests run")
    a = parser.parse_args()
    if a.tiny:
        a.steps, a.seq, a.shape = 3, 64, ["tiny"]
    print(json.dumps({"machine": platform.machine(), "kernel": platform.release(), "cores": os.cpu_count(),
                      "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}), flush=True)
    good = True
    for name in a.shape or ["gpt2-medium", "gpt2-large", "24x2048"]:
        layers, width, hbm, host = SHAPES[name]
        for _ in range(a.rounds):
            ours = run_spillway(a, name, layers, width, hbm, host)
            print(json.dumps(ours), flush=True)
            good &= "error" not in ours
            if a.aio:
                tuned = run_spillway(a, name, layers, width, hbm, host, a.aio)
                print(json.dumps(tuned), flush=True)
                good &= "error" not in tuned
            if a.peer_python:
                peer = run_peer(a, name, layers, width)
                print(json.dumps(peer), flush=True)
                if "error" not in ours and peer["step_seconds"]:
                    print(json.dumps({"shape": name, "times_faster": peer["step_seconds"] / ours["step_seconds"],
                                      "memory_ratio": ours["peak_bytes"] / peer["peak_bytes"]}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
