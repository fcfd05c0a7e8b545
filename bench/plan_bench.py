#!/usr/bin/env python3
"""`spillway plan` beside `spillway finetune`: predicted against measured memory, bytes and seconds of a step.

For each shape and each pair of budgets, all at home on NVMe, bf16, every step committed: the plan, which times the
machine first, then a run, then the plan again, since drives and shared machines change their mind. One JSON line:
  predicted   bytes reserved in each tier; of a step, seconds (both plans'), bytes over each link, and the limiting link
  measured    pages of the arenas that were touched and space that the store takes on the drive; of a step, the median
              of seconds and the mean of bytes, the first two steps left out; "engine": what the run itself predicted,
              with its own measurements
  error       measured / predicted - 1 of each; promised are 0.02 for memory, 0.10 for seconds, 0.01 for bytes
  kept        whether all of them are within that
A step in which clipping has an effect is compared with the plan's prediction of such steps (speculative_blocks 0).
"""
import argparse
import json
import pathlib
import sys

import finetune_bench as fine
import link_probes as links
import step_bench as step

MOST = {"memory": 0.02, "seconds": 0.10, "bytes": 0.01}
# Of a shape's budgets: the smallest that is comfortable, a cache in host memory, and room in HBM as well.
BUDGETS = [(1, 1), (1, 2), (1.5, 3)]
SKIPPED = 2
LINKS = ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes")


def scaled(budget, factor):
    return f"{round(step.bytes_of(budget) * factor) >> 10}KiB"


def planned(place, command, more):
    """The answer of `spillway plan` for what `command` is going to train."""
    arguments = dict(zip(map(str, command[2::2]), command[3::2]))
    run = step.checked(fine.watch([place.a.spillway, "plan", "--config", arguments["--config"], "--model",
                                   arguments["--model"], "--seq", arguments["--seq"], "--probe", "--json", *more]))
    return json.loads(run["out"])


def store_bytes(folder):
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*") if path.is_file())


def trained(place, command, steps):
    run = step.checked(fine.watch([*command, "--steps", SKIPPED + steps, "--log", place.log], sample=True))
    lines = [json.loads(line) for line in place.log.read_text().splitlines()][SKIPPED:]
    facts = fine.arena_summary(run)
    found = {f"{tier}_bytes": facts[f"{tier}_touched"] * fine.arena_bytes(run, tier)[0] for tier in ("hbm", "host")}
    found |= {"nvme_bytes": store_bytes(place.nvme), "seconds": fine.median([line["seconds"] for line in lines]),
              "all_seconds": [round(line["seconds"], 3) for line in lines]}
    found |= {link: sum(line[link] for line in lines) / len(lines) for link in LINKS}
    found |= {"clipped": all(line["speculative_blocks"] == 0 for line in lines), "engine": step.prediction(run),
              "link": fine.median([line["link"] for line in lines]), "outside_bytes": facts["outside_bytes"]}
    return found


def compare(place, seq, steps, factors, clipping, steady, more):
    hbm, host = (scaled(budget, factor) for budget, factor in zip((place.hbm, place.host), factors))
    command = place.command(seq, nvme=place.nvme, hbm=hbm, host=host, commit_every=1)
    with links.steady_drive(place.folder, steady):
        before = planned(place, command, more)
        measured = trained(place, command, steps)
        after = planned(place, command, more)
    kind = "clipped_step" if measured["clipped"] else "step"
    predicted = {f"{tier}_bytes": before["memory"][tier]["bytes"] for tier in ("hbm", "host", "nvme")}
    predicted |= {"seconds": (before[kind]["seconds"] + after[kind]["seconds"]) / 2,
                  "all_seconds": [round(answer[kind]["seconds"], 3) for answer in (before, after)],
                  "link": before["schedule"]["limit"]}
    # Blocks may be updated inside backward in the plan and not in the run: bytes are those of the same kind of step.
    predicted |= {link: before[kind][link] for link in LINKS}
    error = {key: measured[key] / predicted[key] - 1 if predicted[key] else float(measured[key] > 0)
             for key in ("hbm_bytes", "host_bytes", "nvme_bytes", "seconds", *LINKS)}
    most = {key: MOST["seconds" if key == "seconds" else "bytes" if key in LINKS else "memory"] for key in error}
    kept = all(abs(error[key]) <= most[key] for key in error)
    step.say(bench="plan", shape=place.name, parameters=place.parameters, seq=seq, hbm=hbm, host=host,
             clipping=clipping, steady_mb_per_s=steady, predicted=predicted, measured=measured,
             error={key: round(value, 4) for key, value in error.items()}, kept=kept,
             rates={key: rate["value"] for key, rate in before["rates"].items()},
             planning_seconds=before["planning_seconds"])
    return kept


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=fine.ROOT / "build/tools/spillway")
    parser.add_argument("--shape", action="append", choices=list(step.SHAPES), help="default: 124M to 1.3B")
    parser.add_argument("--seq", action="append", type=int, help="tokens of a row; default: 256")
    parser.add_argument("--budget", action="append", metavar="HBM,HOST",
                        help="factors of the shape's budgets; default: 1,1 and 1,2 and 1.5,3")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--clipping", type=float, default=1.0)
    parser.add_argument("--steady", action="append", type=float, metavar="MBPS",
                        help="hold the drive at this many MB/s each way: what is wrong then is the plan's fault, and "
                        "not the drive's")
    parser.add_argument("--work", default=None, help="a directory on the drive; default: TMPDIR")
    parser.add_argument("--option", action="append", default=[], help="one more word for spillway plan")
    parser.add_argument("--tiny", action="store_true", help="one small case, nothing promised; what the tests run")
    a = parser.parse_args()
    a.hbm = a.host = a.tile_elements = a.buffers = None
    if a.tiny:
        a.shape, a.seq, a.budget, a.steps = ["tiny"], [64], ["1,1"], 4
    return a


def main():
    a = parse()
    budgets = [tuple(map(float, budget.split(","))) for budget in a.budget or []] or BUDGETS

    def body():
        kept = True
        for name in a.shape or ["gpt2", "gpt2-medium", "gpt2-large", "24x2048"]:
            with step.Workplace(a, name) as place:
                for seq in a.seq or [256]:
                    for factors in budgets:
                        for steady in a.steady or [None]:
                            kept &= compare(place, seq, a.steps, factors, a.clipping, steady, a.option)
        return 0 if kept or a.tiny else 1

    return step.guarded("plan_bench", body)



if __name__ == "__main__":
    sys.exit(main())
