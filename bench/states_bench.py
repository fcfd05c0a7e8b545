#!/usr/bin/env python3
"""What a step costs with states in bf16 and int8, beside the same step with exact ones (`spillway.states`).

For each shape: bf16 weights, AdamW, clipping 1.0, one micro-batch, all at home on NVMe; forms in turns, a round after
the other. One JSON line a run, with the fields of step_bench's `offloaded` and
  plan              what `spillway plan` says of that configuration, with as many blocks updated on a guess as the run
                    had: bytes read and written a step, bytes of host memory and of HBM
  of_plan           measured / planned: read, written (as the kernel counts) and seconds (as predicted by the run)
  of_drive          with --steady: seconds / (the larger of bytes read and written / rate); 1.05 is what is promised
With --memory all states are in host memory: `peak_bytes` of the whole process and seconds of a step, no bytes.
The last line of a shape has by form `of_exact`, seconds / those of exact states in the same round, medians, and
with --peer-python (DeepSpeed with its optimizer on NVMe, one run a round) `of_peer`, seconds / DeepSpeed's.
"""
import argparse
import json
import pathlib
import shutil
import sys

import finetune_bench as fine
import link_probes as links
import step_bench
from step_bench import SHAPES, Workplace, checked, say

FORMS = ("fp32", "bf16", "int8")


def planned(place, seq, form, guessed):
    """Of a run of that form that updates so many blocks on a guess, which depends on the links' rates."""
    place.command(seq, nvme=place.nvme, hbm=place.hbm, host=place.host, states=form, speculative_blocks=guessed)
    found = json.loads(checked(fine.watch([place.a.spillway, "plan", "--config", place.config, "--model", place.model,
                                           "--seq", seq, "--no-probe", "--json"]))["out"])
    return {**{key: found["step"][key] for key in ("nvme_read_bytes", "nvme_write_bytes")},
            **{f"{tier}_bytes": found["memory"][tier]["bytes"] for tier in ("hbm", "host")}}


def ratio(measured, plan):
    return measured / plan if plan else None  # a small model's tiles stay in memory


def measure_on_nvme(place, seq, form, steady):
    moved = step_bench.measure_offloaded(place, seq, place.a.steps, states=form)
    plan = planned(place, seq, form, moved["speculative_blocks"])
    prediction = moved["prediction"]
    line = {**moved, "plan": plan,
            "of_plan": {"read": ratio(moved["nvme_read_bytes"], plan["nvme_read_bytes"]),
                        "written": ratio(moved["nvme_write_bytes"], plan["nvme_write_bytes"]),
                        "seconds": prediction and prediction["measured_seconds"] / prediction["predicted_seconds"]}}
    if steady:
        line["of_drive"] = moved["seconds"] * steady * 1e6 / max(moved["nvme_read_bytes"], moved["nvme_write_bytes"])
    return line


def measure_in_memory(place, seq, form):
    run = checked(fine.watch([*place.command(seq, host=place.a.host, hbm=place.hbm, states=form, at_home="cpu"),
                              "--steps", 1 + place.a.steps, "--log", place.log]))
    lines = [json.loads(line) for line in place.log.read_text().splitlines()][1:]
    return {"seconds": fine.median([line["seconds"] for line in lines]), "steps": len(lines),
            "peak_bytes": run["peak_bytes"]}


def shape_case(a, place, seq):
    found = {form: [] for form in (*a.form, "deepspeed")}
    with links.steady_drive(place.folder, a.steady) as group:
        for turn in range(a.rounds):
            held = group.holds(links.probe_drive(place.folder, a.probe_bytes, a.aio_bench)) if group else None
            for form in a.form[:: 1 if turn % 2 == 0 else -1]:
                line = measure_in_memory(place, seq, form) if a.memory else measure_on_nvme(place, seq, form, a.steady)
                found[form].append(line["seconds"])
                say(bench="states", shape=place.name, parameters=place.parameters, seq=seq, states=form, round=turn,
                    in_memory=a.memory, steady_mb_per_s=a.steady, steady=held, **line)
            if a.peer_python:
                shutil.rmtree(place.nvme, ignore_errors=True)  # room for the peer's files
                peer = fine.run_peer(argparse.Namespace(**{**vars(a), "seq": seq}), place.name, place.layers,
                                     place.width)
                say(**peer)
                found["deepspeed"].append(peer["step_seconds"])

    def ratios(to):
        return {form: fine.median([mine / other for mine, other in zip(found[form], found[to])])
                for form in a.form if form != to} if found.get(to) and None not in found[to] else None

    say(bench="states", shape=place.name, seq=seq, in_memory=a.memory, steady_mb_per_s=a.steady, rounds=a.rounds,
        of_exact=ratios("fp32"), of_peer=ratios("deepspeed"))


def parse():
    build = fine.ROOT / "build"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=build / "tools/spillway")
    parser.add_argument("--aio-bench", type=pathlib.Path, default=build / "bench/aio_bench", help="for want of fio")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: 355M")
    parser.add_argument("--form", action="append", choices=FORMS, help="default: all")
    parser.add_argument("--seq", type=int, default=64, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=3, help="a resumed run of as many and one of twice as many")
    parser.add_argument("--rounds", type=int, default=1, help="how often each form is measured")
    parser.add_argument("--steady", type=float, metavar="MBPS", help="hold the drive to this rate each way, as root")
    parser.add_argument("--memory", action="store_true", help="states and weights in host memory")
    parser.add_argument("--hbm", help="HBM budget; default: by shape")
    parser.add_argument("--host", help="host budget; default: by shape, and what is needed with --memory")
    parser.add_argument("--work", help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--peer-python", help="the python of an environment with deepspeed: run it in turn")
    parser.add_argument("--tiny", action="store_true", help="one small case; what the tests run")
    a = parser.parse_args()
    a.form = tuple(a.form or FORMS)
    # What step_bench's places and probes ask for.
    a.clipping, a.tile_elements, a.buffers, a.probe_bytes = 1.0, None, None, 1 << 30
    if a.tiny:
        a.shape, a.steps, a.rounds, a.probe_bytes = ["tiny"], 1, 1, 16 << 20
    return a


def main():
    a = parse()

    def body():
        for name in a.shape or ["gpt2-medium"]:
            with Workplace(a, name) as place:
                shape_case(a, place, a.seq)

    return step_bench.guarded("states_bench", body)



if __name__ == "__main__":
    sys.exit(main())
