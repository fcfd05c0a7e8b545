"""The stages of bench/gpu.py that train more than fits: a step over its slowest link, and NVMe to HBM."""
import json
import re
import shutil
import sys

import finetune_bench as fine
import link_probes as links
from gpu_session import GIB, GRACE_SECONDS, ROOT, Failed, Skip, memory_info
from gpu_stages import (BIG, LEAST_STEPS, MIB, PROBE_SECONDS, STORED_BYTES, TINY_DEEP, XL, Run, drive_rates,
                        judge_flops, memcpy_rates, model_of, room, runs, step_seconds)

WANTED_READ, WANTED_STEP = 0.95, 1.1  # of the slower of two links; times the slowest link


def smallest_budgets(s, model, shape, **how):
    """By doing what each refusal says."""
    budgets = {"hbm": "64KiB", "host": "64KiB"}
    for _ in range(6):
        run = Run(s, "smallest", model, 1, shape.seq, "--fresh", **how, **budgets)
        if run.good:
            return budgets
        refusal = next((line for line in run.out.splitlines() if "_bytes" in line and ";" in line), "")
        hint = runs.hinted_budget(refusal)
        if not hint:
            break
        budgets[hint[0].partition("_")[0]] = f"{hint[1]}B"
    raise Failed(f"no smallest budgets: {run.last_line}", run.out)


def import_seconds(drive, shape):
    return 2 * shape.parameters / drive["read"] + STORED_BYTES * shape.parameters / drive["write"]


def judge_step(s, name, run, drive, shape):
    """The step over its slowest link: by the run's own probe of its links, and by what was measured around it."""
    seconds = run.median("seconds")
    link = fine.median([line["link"] for line in run.settled()])
    percent = fine.median([line["link_percent"] for line in run.settled() if line["link"] == link])
    s.figure(name, f"{seconds:.3g} s, {run.tokens_per_second():.0f} tokens/s", f"{link}, by the run's own probe",
             100 / percent, at_most=WANTED_STEP, link_percent=percent)
    memcpy = memcpy_rates(s)
    found = {"compute": seconds - run.median("stall_seconds")}
    found |= {way: run.median(f"{way}_bytes") / memcpy[way] / 1e9 for way in ("h2d", "d2h") if way in memcpy}
    moved = run.median("nvme_read_bytes") + run.median("nvme_write_bytes")
    if drive:
        found["nvme"] = moved / drive["mixed"]
    slowest = max(found, key=found.get)
    beside = f"{found[slowest]:.3g} s, {slowest}, measured around it" if drive or not moved else None
    s.figure(f"{name}: own measurement", beside and f"{seconds:.3g} s", beside or "nothing measured the drive",
             seconds / found[slowest] if beside else None, at_most=WANTED_STEP, links=found)
    judge_flops(s, f"{name}: model flops", run.tokens_per_second(), shape)


def spans_of(trace):
    return [span for span in json.loads(trace.read_text())["traceEvents"] if span["ph"] == "X"]


def first_forward(trace):
    """Bytes that were read from NVMe in the forward pass of a trace's first step, those of weights among them, and the
    seconds from its begin to the last of these reads. At a resume the pass reads all that the last step has written."""
    spans = spans_of(trace)
    begin = min(span["ts"] for span in spans if re.fullmatch(r"step \d+", span["name"]))
    end = min(span["ts"] for span in spans if span["name"].startswith("backward ") and span["ts"] > begin)
    reads = [span for span in spans if span["pid"] == 2 and begin <= span["ts"] and span["ts"] + span["dur"] <= end]
    weights = [span for span in reads if span["name"].startswith("weights ")]
    last = max((span["ts"] + span["dur"] for span in reads), default=end)
    total, of_weights = (sum(span["args"]["bytes"] for span in some) for some in (reads, weights))
    return total, of_weights, (last - begin) / 1e6


def busy_share(trace):
    """Of the settled steps' time, the part in which the drive had a read or a write to do."""
    spans = spans_of(trace)
    steps = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if re.fullmatch(r"step \d+", span["name"]))
    moves = sorted((span["ts"], span["ts"] + span["dur"]) for span in spans if span["pid"] in (2, 3))
    total = idle = 0
    for begin, end in steps[2:]:
        total, done = total + end - begin, begin
        for first, last in moves:
            if last > done and first < end:
                idle, done = idle + max(0, first - done), last
        idle += max(0, end - done)
    return 1 - idle / total if total else None


def stores(s, shape, name, model):
    """Where a store goes, and commit_every: 0 where the drive has no room for two slots a tile."""
    folder = s.work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    room(s, STORED_BYTES * shape.parameters, "a store without commits", keep=model)
    free = shutil.disk_usage(s.work).free
    return folder, None if free > 1.02 * 2 * STORED_BYTES * shape.parameters + GIB else 0


def steps_that_fit(s, step, around, most, behind=0):
    """Steps of so many seconds each, with so many around them, in what is left; skips the stage where too few fit.
    `behind`: seconds for more that is done where they can be spared."""
    for more in (behind, 0):
        fit = int((s.left() - around - more) / step)
        if fit >= LEAST_STEPS:
            return min(most, fit)
    raise Skip(f"by the drive's rate a step takes {step:.0f} s, and what is around {LEAST_STEPS} of them "
               f"{around:.0f} s; {s.left():.0f} s are left: give the stage more, or a command of its own")


def ending(s, step, after):
    """When a run is asked to end, and how long it then has: so that its step ends and `after` is left. Half of what is
    left is the run's in any case."""
    seconds = max(s.left() / 2, s.left() - after - max(GRACE_SECONDS, 1.5 * step))
    return {"seconds": seconds, "grace": max(GRACE_SECONDS, min(1.5 * step, s.left() - after - seconds))}


def tiers(s):
    shape, steps = (TINY_DEEP, 5) if s.tiny else (XL, 7)
    model = model_of(s, shape, "bf16")
    nvme, commit_every = stores(s, shape, "store-tiers", model)
    how = {"nvme": nvme, "micro": shape.batch, "commit_every": commit_every}
    if s.tiny:
        how["tile_elements"] = 16384
    how |= smallest_budgets(s, model, shape, **how) if s.tiny else {"hbm": "4GiB", "host": "4GiB"}
    drives = [drive_rates(s, s.work)]
    step, begin = (step_seconds(drives[0], shape), import_seconds(drives[0], shape) + 15) if drives[0] else (10, 30)
    after = PROBE_SECONDS + 10
    if not s.tiny:
        again = step if commit_every is None else step + begin  # a step for NVMe to HBM
        steps = steps_that_fit(s, 1.1 * step, begin + after, steps, behind=1.2 * again + 20)
    run = Run(s, "tiers", model, steps, shape.seq, "--fresh", **ending(s, step, after), **how).checked()
    drives.append(drive_rates(s, s.work))
    drive = links.mean_of_drive([found for found in drives if found]) if any(drives) else None
    judge_step(s, "gpt2-xl over three tiers" if not s.tiny else "tiny over three tiers", run, drive, shape)
    if commit_every == 0:
        step += begin  # there is no store to go on with
    if not s.tiny and s.left() < 1.2 * step + 20:
        why = f"no time: one more step takes {step:.0f} s, {s.left():.0f} s are left"
        s.figure("NVMe in a forward pass", None, why,
                 at_least=WANTED_READ)
        return
    # A pass with little to compute, when nothing is in memory yet: what a read brings goes on to HBM.
    resume = ["--resume"] if commit_every is None else ["--fresh"]
    last = 1 + (run.lines[-1]["step"] if commit_every is None else 0)
    reading = Run(s, "tiers-read", model, last, shape.seq, *resume, traced=True, **{**how, "micro": 1})
    if not reading.whole:
        raise Failed(f"finetune: {reading.last_line}", reading.out)
    judge_reading(s, reading, drive)
    s.keep(reading.trace, "trace-tiers")


def judge_reading(s, reading, drive):
    probed = re.search(r"nvme link: ([\d.]+) GB/s read", reading.out)
    rates = {"drive": drive["read"] / 1e9 if drive else float(probed.group(1)) if probed else None,
             "h2d": memcpy_rates(s).get("h2d")}
    rates = {link: rate for link, rate in rates.items() if rate}
    total, weights, seconds = first_forward(reading.trace)
    s.say(first_forward_bytes=total, weight_bytes=weights, forward_seconds=seconds, rates=rates)
    if "drive" not in rates or total == 0:
        s.figure("NVMe in a forward pass", None, "nothing was read" if total == 0 else "the drive's rate is not known",
                 at_least=WANTED_READ)
        return
    slower = min(rates, key=rates.get)
    s.figure("NVMe in a forward pass", f"{total / seconds / 1e9:.2f} GB/s", f"{rates[slower]:.2f} GB/s, {slower} alone",
             total / seconds / 1e9 / rates[slower], at_least=WANTED_READ)


# Writes so many bytes, a piece at a time: where a virtual machine's memory grows as it is used, it has them then.
# It comes slower than it is written, and where it does not come, this is what the kernel ends.
GROW = """import sys, time
sys.path.insert(0, sys.argv[1])
from gpu_session import memory_info
open("/proc/self/oom_score_adj", "w").write("1000")
pieces = []
for _ in range(int(sys.argv[2]) >> 28):
    pieces.append(b"1" * (1 << 28))
    time.sleep(0.25 if memory_info()["MemAvailable"] < 1 << 30 else 0)
"""


def memory_for(s, needed):
    """Skips the stage where the machine has not so many bytes of memory."""
    before = memory_info()
    if before["MemAvailable"] < needed and not s.emulated:
        s.run([sys.executable, "-c", GROW, ROOT / "bench", needed], seconds=min(60, s.left() / 4))
    after = memory_info()
    s.say(memory_before=before["MemAvailable"], memory_available=after["MemAvailable"], total=after["MemTotal"])
    if after["MemAvailable"] < needed:
        raise Skip(f"it takes {needed / GIB:.0f} GiB of memory, {after['MemAvailable'] / GIB:.1f} are available")


def largest_that_fits(s, shape):
    """The shape, with as few layers less as the drive asks for: model and store without commits, no model beside."""
    kept = sum(file.stat().st_size for file in s.work.glob("model-*/*"))
    have = (shutil.disk_usage(s.work).free + kept - GIB) / 1.02
    layers = shape.layers
    while layers > shape.layers // 2 and (2 + STORED_BYTES) * shape.with_layers(layers).parameters > have:
        layers -= 1
    return shape.with_layers(layers)


def big(s):
    shape, steps = (TINY_DEEP, 4) if s.tiny else (largest_that_fits(s, BIG), 12)
    host = 64 * MIB if s.tiny else 32 * GIB
    memory_for(s, host + 4 * GIB if not s.tiny else host)
    model = model_of(s, shape, "bf16")
    nvme, commit_every = stores(s, shape, "store-big", model)
    budgets = {"hbm": "64MiB", "host": "64MiB"} if s.tiny else {"hbm": "10GiB", "host": "32GiB"}
    drive = drive_rates(s, s.work)
    step = GRACE_SECONDS
    if drive and not s.tiny:
        # Without commits what is at home in memory is not written; of its budget the pipeline takes some.
        resident = 0.8 * host / STORED_BYTES if commit_every == 0 else 0
        step = step_seconds(drive, shape, max(0.1, 1 - resident / shape.parameters))
        steps = steps_that_fit(s, 1.1 * step, import_seconds(drive, shape) + 30, steps)
    run = Run(s, "big", model, steps, shape.seq, "--fresh", **ending(s, step, 15 + PROBE_SECONDS), traced=True,
              nvme=nvme, micro=shape.batch, commit_every=commit_every, **budgets)
    busy = busy_share(run.trace) if run.trace.exists() else None
    s.keep(run.trace, "trace-big")
    run.checked()
    drives = [found for found in (drive, drive_rates(s, s.work)) if found]
    drive = links.mean_of_drive(drives) if drives else None
    s.say(commit_every=commit_every, parameters=shape.parameters, drive_busy=busy)
    judge_step(s, f"{shape.parameters / 1e9:.2g} B parameters over three tiers", run, drive, shape)
