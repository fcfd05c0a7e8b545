#!/usr/bin/env python3
"""How close a training step comes to its slowest link, with the links' own rates measured in the same run.

For each shape and row length, all at home on NVMe, bf16, clipping 1.0, one micro-batch: probes of the links, the same
step with everything resident, the offloaded step (as finetune_bench measures it, but without the first step of each
process, which has no update to make), the probes again. One JSON line:
  drive, cores        rates in bytes per second (cores: of one core), CPU seconds per GiB of I/O
  resident            seconds of a step, and of its backward pass; null with "resident_skipped" where memory is short
  offloaded           seconds of a step, bytes over each link, stalls by cause, the link that its log names, peak memory
                      of the whole process (HBM is emulated in RAM and counts); "prediction": what its schedule said
  limit               seconds that the links need by themselves:
    cpu               resident step + (bytes hashed / rate + bytes copied / rate + CPU seconds of I/O) / cores
    nvme              bytes / mixed rate; with --steady the slower direction's bytes / rate (where "steady" is false the
                      drive cannot do as much both ways at once, and its mixed rate counts)
    seconds, link     of the slowest
    clipping          seconds with the order that clipping imposes: states are read and written during forward, so that
                      it takes max(cpu, nvme) of forward + max(cpu, nvme) of backward; each of them is in "windows"
  ratio               step / limit; 1.1 is what is promised
  clipping_ratio      step / limit.clipping; says nothing where clipping has no effect (speculative_blocks)
Hashed is every byte that is read from or written to NVMe, copied every byte that goes up or down; half of what goes up
counts for either pass. Peers and other questions: --peer-python, --accumulation, --commit, --snapshot,
--slope.
"""
import argparse
import collections
import contextlib
import json
import os
import pathlib
import platform
import re
import shutil
import signal
import sys
import tempfile

import finetune_bench as fine
import link_probes as links

MIB, GIB = 1 << 20, 1 << 30
# name: layers, width, HBM budget, host budget; the whole process stays below 1.6 GiB at 355M and 3 GiB at 1.3B
SHAPES = {
    "tiny": (2, 64, "64MiB", "64MiB"),
    "tiny-deep": (4, 64, "64MiB", "64MiB"),
    "gpt2": (12, 768, "448MiB", "448MiB"),
    "gpt2-medium": (24, 1024, "640MiB", "896MiB"),
    "gpt2-large": (36, 1280, "896MiB", "1280MiB"),
    "24x2048": (24, 2048, "1280MiB", "1664MiB"),
    "48x1600": (48, 1600, "1152MiB", "1536MiB"),
}
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": MIB, "GiB": GIB}


class Failed(Exception):
    """A run that should have worked did not; the message is its last line."""


def bytes_of(text):
    """Of a size as configurations and messages have it: 448MiB."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
    return int(number) * UNITS[unit]


def say(**line):
    print(json.dumps(line), flush=True)


def checked(run):
    if run["status"]:
        raise Failed(links.last_line(run["err"]))
    return run


def guarded(name, body):
    """The exit status of a bench: that of its body, where None is 0. SIGTERM ends it as Ctrl-C does: everything is
    taken away first."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    say(machine=platform.machine(), kernel=platform.release(), cores=os.cpu_count())
    try:
        return body() or 0
    except (Failed, links.Unable) as failure:
        print(f"{name}: {failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class Workplace:
    """A directory on the drive with a model, its text and a store; gone at the end, whatever that is."""

    def __init__(self, a, name):
        self.a, self.name = a, name
        self.layers, self.width, self.hbm, self.host = SHAPES[name]
        self.hbm, self.host = a.hbm or self.hbm, a.host or self.host
        self.block_parameters = 12 * self.width**2 + 13 * self.width

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-step-", dir=self.a.work))
        try:
            self.model, self.nvme, self.data = (self.folder / name for name in ("model", "nvme", "text"))
            self.log, self.config = self.folder / "steps.jsonl", self.folder / "ds_config.json"
            self.data.write_bytes((fine.ROOT / "LICENSE").read_bytes() * 8)
            made = checked(fine.init_model(self.a.spillway, self.model, self.layers, self.width))
            self.parameters = int(re.search(r"a new GPT-2 of (\d+) parameters", made["out"]).group(1))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        shutil.rmtree(self.folder)

    def command(self, seq, **config):
        """To train in a new store with these settings."""
        shutil.rmtree(self.nvme, ignore_errors=True)
        self.nvme.mkdir()
        self.log.unlink(missing_ok=True)
        fine.write_config(self.config, clipping=self.a.clipping, tile_elements=self.a.tile_elements,
                          buffers=self.a.buffers, **config)
        return [self.a.spillway, "finetune", "--config", self.config, "--model", self.model, "--data", self.data,
                "--seq", seq]

    def smallest(self, tier, seq, **config):
        """The smallest budget that is accepted, as the refusal of a smaller one names it."""
        run = fine.watch([*self.command(seq, **config, **{tier: "64KiB"}), "--steps", 1])
        found = re.search(rf'set spillway\.{tier}_bytes to "(\d+\w+)"', run["err"])
        if not found:
            raise Failed(f"no smallest {tier}_bytes is named: {links.last_line(run['err'])}")
        return found.group(1)


def available_bytes():
    found = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024


def backward_seconds(trace, steps):
    """Of each step, the time in which its backward visits ran."""
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    begins = {event["name"]: event["ts"] for event in spans if re.fullmatch(r"step \d+", event["name"])}
    lengths = {event["name"]: event["dur"] for event in spans if event["name"] in begins}
    visits = [event for event in spans if event["name"].startswith("backward ")]
    return [sum(visit["dur"] for visit in visits if 0 <= visit["ts"] - begins[name] < lengths[name]) / 1e6
            for name in (f"step {step}" for step in steps)]


def measure_resident(place, seq, steps):
    """The step with everything in HBM, its pass backward, and the process' memory; or why not."""
    need = bytes_of(place.smallest("hbm", seq))
    if need + GIB > available_bytes():
        return None, f"{need / GIB:.1f} GiB of HBM, emulated in RAM, and {available_bytes() / GIB:.1f} GiB are left"
    trace = place.folder / "trace.json"
    run = checked(fine.watch([*place.command(seq), "--steps", 1 + steps, "--log", place.log, "--trace", trace]))
    lines = [json.loads(line) for line in place.log.read_text().splitlines()][1:]
    backward = fine.median(backward_seconds(trace, [line["step"] for line in lines]))
    trace.unlink()
    return {"seconds": fine.median([line["seconds"] for line in lines]), "backward_seconds": backward,
            "steps": len(lines), "peak_bytes": run["peak_bytes"]}, None


BYTES = ("h2d_bytes", "d2h_bytes", "tile_bytes", "tile_hit_bytes")


def reserved(run, tier, word):
    """Bytes of the ledger's reservations in a tier that are for `word`."""
    lines = re.findall(rf"^ +{tier} +[^\n]*{word}[^\n]* (\d+) bytes$", run["out"], re.MULTILINE)
    return sum(map(int, lines))


def prediction(run):
    """What the run says at its end of the step that its schedule predicted, and of the one that it measured."""
    found = re.search(r"^step: ([\d.]+) s predicted, ([\d.]+) s measured", run["out"], re.MULTILINE)
    return {"predicted_seconds": float(found.group(1)), "measured_seconds": float(found.group(2))} if found else None


def measure_offloaded(place, seq, steps, hbm=None, **settings):
    """Bytes are what `steps` more steps cost in a process that resumes, so that its start and end count for nothing; on
    NVMe by the kernel's accounts, because the log's steps share what is read ahead."""
    command = place.command(seq, nvme=place.nvme, hbm=hbm or place.hbm, host=place.host, **settings)
    first, short, long = map(checked, fine.three_runs(command, place.log, steps))
    settled = short["steps"][1:] + long["steps"][1:]
    moved = {key: (sum(step[key] for step in long["steps"]) - sum(step[key] for step in short["steps"])) / steps
             for key in BYTES}
    moved |= {f"nvme_{kind}_bytes": (long["io"][f"{kind}_bytes"] - short["io"][f"{kind}_bytes"]) / steps
              for kind in ("read", "write")}
    return {"hbm_bytes": hbm or place.hbm, "host_bytes": place.host, "steps": len(settled),
            "seconds": fine.median([step["seconds"] for step in settled]),
            "all_seconds": [round(step["seconds"], 3) for step in settled], "prediction": prediction(long), **moved,
            "spilled_gradient_bytes": reserved(long, "nvme", "gradient"),
            "spilled_activation_bytes": reserved(long, "nvme", "activation"),
            "kept_bytes": reserved(long, "hbm", "activations"),  # kept between visits, and inside of blocks
            "read_ratio": fine.ratio_of(short, long, "read"), "write_ratio": fine.ratio_of(short, long, "write"),
            "stall_seconds": fine.median([step["stall_seconds"] for step in settled]),
            "stalls": {cause: fine.median([step["stalls"][cause] for step in settled])
                       for cause in settled[0]["stalls"]},
            "adam_seconds": fine.median([step["adam_seconds"] for step in settled]),
            "link": collections.Counter(step["link"] for step in settled).most_common(1)[0][0],
            "link_percent": fine.median([step["link_percent"] for step in settled]),
            "speculative_blocks": fine.median([step["speculative_blocks"] for step in settled]),
            "taken_back": sum(step["taken_back"] for step in settled),
            "peak_bytes": max(run["peak_bytes"] for run in (first, short, long)), **fine.arena_summary(long)}


def nvme_seconds(read, write, drive, steady):
    """What goes both ways at once at the mixed rate, the rest at its own; apart, where the drive holds them apart."""
    if steady:
        return max(read / drive["read"], write / drive["write"])
    both = min(read, write)
    return 2 * both / drive["mixed"] + (read - both) / drive["read"] + (write - both) / drive["write"]


def limits_of(resident, moved, drive, cores, steady):
    """The lower bounds of a step, see above."""
    read, write = moved["nvme_read_bytes"], moved["nvme_write_bytes"]
    spilled = moved["spilled_gradient_bytes"]
    # The update of the step before: states and master weights, and the gradients where they were spilled. Gradients are
    # spilled, activations read again and weights fetched a second time in the backward pass.
    forward = {"read": min(read, moved["tile_bytes"] - moved["tile_hit_bytes"] + spilled),
               "write": max(0, write - spilled), "up": moved["h2d_bytes"] / 2, "down": 0}
    backward = {"read": read - forward["read"], "write": write - forward["write"], "up": moved["h2d_bytes"] / 2,
                "down": moved["d2h_bytes"]}
    windows = {}
    for name, part in (("forward", forward), ("backward", backward)):
        moving = ((part["read"] + part["write"]) / cores["hash"] + (part["up"] + part["down"]) / cores["copy"] +
                  (part["read"] * drive["read_cpu_per_gib"] + part["write"] * drive["write_cpu_per_gib"]) / GIB)
        compute = None if not resident else resident["backward_seconds"] if name == "backward" else (
            resident["seconds"] - resident["backward_seconds"])
        windows[name] = {"read_bytes": part["read"], "write_bytes": part["write"],
                         "nvme": nvme_seconds(part["read"], part["write"], drive, steady),
                         "cpu": None if compute is None else compute + moving / cores["cores"]}
    found = {"nvme": nvme_seconds(read, write, drive, True) if steady else (read + write) / drive["mixed"]}
    if resident:
        found["cpu"] = sum(window["cpu"] for window in windows.values())
    link = max(found, key=found.get)
    return {**found, "seconds": found[link], "link": link, "windows": windows,
            "clipping": sum(max(window["nvme"], window["cpu"] or 0) for window in windows.values())}


def step_case(a, place, seq, steady):
    """One line; with a peer a second and a third."""
    line = {"bench": "step", "shape": place.name, "layers": place.layers, "width": place.width,
            "parameters": place.parameters, "seq": seq, "clipping": a.clipping, "steady_mb_per_s": steady,
            "tile_elements": a.tile_elements, "buffers": a.buffers}
    with links.steady_drive(place.folder, steady) as group:
        probes = [links.probe_drive(place.folder, a.probe_bytes, a.aio_bench)]
        held = group.holds(probes[0]) if group else False
        resident, skipped = measure_resident(place, seq, a.steps)
        offloaded = measure_offloaded(place, seq, a.steps)
        probes.append(links.probe_drive(place.folder, a.probe_bytes, a.aio_bench))
        cores = links.probe_cores(a.link_rates, a.tiny)
    drive = links.mean_of_drive(probes)
    # A block that is updated inside backward has its new weights read once more: the price of that order, and no need.
    again = 2 * place.block_parameters * offloaded["speculative_blocks"]
    needed = {**offloaded, "nvme_read_bytes": offloaded["nvme_read_bytes"] - again}
    limit = limits_of(resident, needed, drive, cores, held)
    line |= {"steady": held, "ratio": offloaded["seconds"] / limit["seconds"],
             "clipping_ratio": offloaded["seconds"] / limit["clipping"]}
    if skipped:
        line["resident_skipped"] = f"{skipped}; so the limit is NVMe's alone, and the ratios say little"
    say(**line, limit=limit, offloaded=offloaded, resident=resident, drive=drive, drive_probes=probes, cores=cores)
    if a.peer_python and not steady:
        shutil.rmtree(place.nvme)  # room for the peer's files
        peer = fine.run_peer(argparse.Namespace(**{**vars(a), "seq": seq}), place.name, place.layers, place.width)
        say(**peer)
        if peer["step_seconds"]:
            say(bench="step", shape=place.name, seq=seq, times_faster=peer["step_seconds"] / offloaded["seconds"],
                memory_ratio=offloaded["peak_bytes"] / peer["peak_bytes"])
    return True


def accumulation_case(a, place, seq):
    """NVMe bytes of a step with one micro-batch and with several, what is spilled of activations apart. What more
    micro-batches need and keep in HBM comes on top of the budget, or fewer blocks' weights would stay there. Every step
    is committed, for how often tiles in memory are is chosen by the clock otherwise."""
    counts = (1, a.accumulation)
    least = [bytes_of(place.smallest("hbm", seq, nvme=place.nvme, accumulation=count)) for count in counts]
    one = measure_offloaded(place, seq, a.steps, commit_every=1)
    more = least[1] - least[0] + (a.accumulation - 1) * one["kept_bytes"]
    hbm = [place.hbm, f"{bytes_of(place.hbm) + more >> 10}KiB"]
    runs = [one, measure_offloaded(place, seq, a.steps, hbm=hbm[1], accumulation=a.accumulation, commit_every=1)]
    apart = [{kind: run[f"nvme_{kind}_bytes"] - run["spilled_activation_bytes"] for kind in ("read", "write")}
             for run in runs]
    # The kernel also counts pages of the program and of the log; a block's weights are more than a thousandth.
    equal = all(abs(one - other) < max(MIB / a.steps, one / 1000) for one, other in
                ((apart[0][kind], apart[1][kind]) for kind in ("read", "write")))
    say(bench="step_accumulation", shape=place.name, seq=seq, accumulation=counts, hbm_bytes=hbm, equal=equal,
        seconds=[run["seconds"] for run in runs], read_bytes=[part["read"] for part in apart],
        write_bytes=[part["write"] for part in apart],
        spilled_activation_bytes=[run["spilled_activation_bytes"] for run in runs])
    return equal


def straight_run(place, seq, steps, commit_every):
    """In one process, for a store without commits cannot be resumed. The first two steps are left out."""
    command = place.command(seq, nvme=place.nvme, hbm=place.hbm, host=place.host, commit_every=commit_every)
    checked(fine.watch([*command, "--steps", 2 + steps, "--log", place.log]))
    lines = [json.loads(line) for line in place.log.read_text().splitlines()][2:]
    return {key: fine.median([of(line) for line in lines]) for key, of in {
        "seconds": lambda line: line["seconds"], "read_bytes": lambda line: line["nvme_read_bytes"],
        "write_bytes": lambda line: line["nvme_write_bytes"], "commit": lambda line: line["stalls"]["commit"]}.items()}


def commit_case(a, place, seq, steady):
    """Steps with a commit at every step beside steps with none, in turn: what being a checkpoint costs."""
    with links.steady_drive(place.folder, steady):
        runs = [[straight_run(place, seq, a.steps, every) for every in (1, 0)] for _ in range(a.rounds)]
    pairs = [committed["seconds"] / without["seconds"] for committed, without in runs]
    found = {key: [fine.median([run[key] for run in side]) for side in zip(*runs)]
             for key in ("seconds", "read_bytes", "write_bytes")}
    say(bench="step_commit", shape=place.name, seq=seq, steady_mb_per_s=steady, commit_every=[1, 0], ratios=pairs,
        ratio=fine.median(pairs), **found,
        commit_stall_share=fine.median([run["commit"] / run["seconds"] for run, _ in runs]))
    return True


def snapshot_case(a, place, seq, steady):
    """Steps after a snapshot beside the others of the same run, and how long the update takes, to the end of its
    commit, with a snapshot and without: training never stands still longer than what they differ by."""
    trace, every = place.folder / "trace.json", 3
    with links.steady_drive(place.folder, steady):
        command = place.command(seq, nvme=place.nvme, hbm=place.hbm, host=place.host, commit_every=1)
        checked(fine.watch([*command, "--steps", 2 + every * (a.steps + 1), "--log", place.log, "--trace", trace,
                            "--save", place.folder / "saved", "--save-every", every, "--keep", 1]))
    shutil.rmtree(place.folder / "saved")
    lines = [json.loads(line) for line in place.log.read_text().splitlines()][2:]
    ends = {kind: {int(event["name"].split()[-1]): event["ts"] + event["dur"]
                   for event in json.loads(trace.read_text())["traceEvents"]
                   if event["ph"] == "X" and event["name"].startswith(f"{kind} of ")} for kind in ("commit", "step()")}
    updates = {line["step"]: (ends["commit"][line["step"]] - ends["step()"][line["step"]]) / 1e6 for line in lines}
    found = {"seconds": [], "update_seconds": []}
    for saved in (True, False):
        # The step after the snapshot makes the update that the snapshot sees.
        found["seconds"].append(fine.median([line["seconds"] for line in lines
                                             if (line["step"] % every == 1) == saved]))
        found["update_seconds"].append(fine.median([updates[step] for step in updates if (step % every == 0) == saved]))
    say(bench="step_snapshot", shape=place.name, seq=seq, steady_mb_per_s=steady, snapshot=[True, False], **found,
        save_stall_seconds=fine.median([line["stalls"]["save"] for line in lines if line["step"] % every == 1]),
        longer_by_updates=(found["seconds"][0] - found["seconds"][1]) / found["update_seconds"][1])
    return True


def slope(points):
    """Of the straight line that fits best."""
    xs, ys = zip(*points)
    x0, y0 = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x in xs)


def slope_case(a, names, seq):
    """Host bytes per parameter: the smallest budgets, and what a run with them has resident outside HBM."""
    budgets, resident = [], []
    for name in names:
        with Workplace(a, name) as place:
            hbm = place.smallest("hbm", seq, nvme=place.nvme)
            host = place.smallest("host", seq, nvme=place.nvme, hbm=hbm)
            budgets.append((place.parameters, bytes_of(host)))
            line = {"bench": "step_slope", "shape": name, "parameters": place.parameters, "seq": seq,
                    "hbm_bytes": hbm, "host_bytes": host}
            if name in (a.slope_train or names):
                command = place.command(seq, nvme=place.nvme, hbm=hbm, host=host)
                run = checked(fine.watch([*command, "--steps", 2], sample=True))
                arena = fine.arena_bytes(run, "hbm")[1]
                outside = max(total - large.get(arena, 0) for total, large in run["samples"])
                resident.append((place.parameters, outside))
                line["resident_outside_hbm_bytes"] = outside
            say(**line)
    found = {"budget_bytes_per_parameter": slope(budgets)}
    if len(resident) > 1:
        found["resident_bytes_per_parameter"] = slope(resident)
    say(bench="step_slope", shapes=names, **found)
    return a.tiny or all(value < 0.1 for value in found.values())


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = fine.ROOT / "build"
    parser.add_argument("--spillway", type=pathlib.Path, default=build / "tools/spillway")
    parser.add_argument("--link-rates", type=pathlib.Path, default=build / "bench/link_rates")
    parser.add_argument("--aio-bench", type=pathlib.Path, default=build / "bench/aio_bench", help="for want of fio")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: 355M, 774M and 1.3B")
    parser.add_argument("--seq", action="append", type=int, help="tokens of a row; default: 256 and 64")
    parser.add_argument("--hbm", help="HBM budget, for example 576MiB")
    parser.add_argument("--host", help="host budget")
    parser.add_argument("--clipping", type=float, default=1.0,
                        help="gradient_clipping; a new model's norms are far above 1, a trained one's mostly below: "
                             "1e9 stands for steps in which it has no effect")
    parser.add_argument("--steps", type=int, default=4, help="steps of the resident run; the offloaded ones do 3 x")
    parser.add_argument("--probe-bytes", type=int, default=GIB, help="size of the file that the drive is probed with")
    parser.add_argument("--rounds", type=int, default=1, help="how often each case is measured")
    parser.add_argument("--work", default=None, help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--steady", action="append", type=float, metavar="MBPS",
                        help="on a drive that a blkio cgroup holds at so many MB/s each way")
    parser.add_argument("--peer-python", help="the python of an environment with deepspeed: run it in turn")
    parser.add_argument("--tile-elements", type=int, metavar="N", help="spillway.tile_elements")
    parser.add_argument("--buffers", type=int, metavar="N", help="offload_optimizer.buffer_count")
    parser.add_argument("--accumulation", type=int, metavar="N",
                        help="only this: NVMe bytes with N micro-batches beside those with one")
    parser.add_argument("--commit", action="store_true", help="only this: what a commit at every step costs")
    parser.add_argument("--snapshot", action="store_true", help="only this: what a snapshot costs the step after it")
    parser.add_argument("--slope", action="store_true", help="only this: host bytes per parameter, 124M to 1.5B")
    parser.add_argument("--slope-train", action="append", choices=list(SHAPES),
                        help="sizes that train two steps with the smallest budgets; default: all")
    parser.add_argument("--tiny", action="store_true", help="one small case of each kind; what the tests run")
    a = parser.parse_args()
    if a.tiny:
        a.probe_bytes, a.steps, a.seq, a.shape, a.accumulation, a.slope = 16 * MIB, 2, [64], ["tiny"], 2, True
        a.commit = a.snapshot = True
    return a


def cases(a):
    """What to measure, one function a case."""
    seqs = a.seq or [256, 64]
    for name in a.shape or ["gpt2-medium", "gpt2-large", "24x2048"]:
        if a.slope and not (a.tiny or a.accumulation or a.commit or a.snapshot):
            break
        with Workplace(a, name) as place:
            for seq in seqs:
                if a.tiny or not (a.accumulation or a.commit or a.snapshot):
                    for _ in range(a.rounds):
                        for steady in a.steady or [None]:
                            yield lambda: step_case(a, place, seq, steady)
                if a.accumulation:
                    yield lambda: accumulation_case(a, place, seq)
                if a.commit:
                    for steady in a.steady or [None]:
                        yield lambda: commit_case(a, place, seq, steady)
                if a.snapshot:
                    for steady in a.steady or [None]:
                        yield lambda: snapshot_case(a, place, seq, steady)
    if a.slope:
        all_sizes = ["gpt2", "gpt2-medium", "gpt2-large", "24x2048", "48x1600"]
        names = ["tiny", "tiny-deep"] if a.tiny else a.shape or all_sizes
        yield lambda: slope_case(a, names, seqs[0])


def main():
    a = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: everything is taken away first
    say(machine=platform.machine(), kernel=platform.release(), cores=os.cpu_count(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    good = True
    try:
        with contextlib.closing(cases(a)) as todo:
            for case in todo:
                good &= case()
    except Failed as failure:
        print(f"step_bench: {failure}", file=sys.stderr)
        return 1
    except links.Unable as reason:
        print(f"step_bench: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
