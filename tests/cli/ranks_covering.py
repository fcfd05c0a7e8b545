#!/usr/bin/env python3
"""Trains one model on 1, 2 and 4 ranks under mpirun, with one configuration after the other, which together have every
pair of stage, places, types, forms of moments, clipping, accumulation, tails and optimizer. Losses, norms, the exported
model, and the weights and moments of a snapshot must be equal on any number of ranks.
"""
import argparse
import hashlib
import itertools
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

from ranks_kill_sweep import MPIRUN, ONE_HOST, Failure
from runs import BINARY, Run, Workplace, sha256_of_model, spillway

RANKS, GROUPS, STEPS = (1, 2, 4), 4, 3
# Where weights and states live.
PLACES = {"hbm": ("none", "none"), "states in host": ("none", "cpu"), "states on nvme": ("none", "nvme"),
          "host": ("cpu", "cpu"), "host and nvme": ("cpu", "nvme"), "nvme": ("nvme", "nvme")}
FACTORS = {
    "stage": (3, 2, 1, 0),
    "place": tuple(PLACES),
    "dtype": ("bf16", "fp16", "fp32"),
    "states": ("fp32", "bf16", "int8"),
    "clip": (0, 1e-2, 1e9),  # none, in effect, without effect
    "micro_batches": (4, 8, 16),
    "width": (64, 72),
    "tile": (1024, 5120, 1 << 20),  # elements: many of a block; some, the last one smaller; the whole block
    "optimizer": ("AdamW", "Lion"),
}
NAMES = tuple(FACTORS)


def allowed(of):
    """What Spillway takes: whole weights are in HBM, and stage 0 offloads nothing."""
    return of["place"] == "hbm" or of["stage"] == 3 or of["stage"] > 0 and PLACES[of["place"]][0] == "none"


def pairs_of(row):
    return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(NAMES, 2)}


def covering():
    """Greedy: each next row is the allowed one with most pairs that no row has yet; of equals the first."""
    rows = [row for row in (dict(zip(NAMES, values)) for values in itertools.product(*FACTORS.values()))
            if allowed(row)]
    with_pairs = [(row, pairs_of(row)) for row in rows]
    left = set().union(*(pairs for _, pairs in with_pairs))
    chosen = []
    while left:
        row, pairs = max(with_pairs, key=lambda entry: len(entry[1] & left))
        chosen.append(row)
        left -= pairs
    return chosen


def train(folder, model, of, ranks):
    """What it ended with."""
    place = Workplace(folder / f"ranks{ranks}")
    parameters, states = PLACES[of["place"]]
    config = place.config(
        parameters=parameters, states=states, dtype=of["dtype"], accumulation=of["micro_batches"] // ranks,
        clip=of["clip"], spillway_section={"tile_elements": of["tile"], "states": of["states"], "sum_groups": GROUPS},
        fp16={"initial_scale_power": 8}, optimizer={"type": of["optimizer"], "params": {"lr": 1e-3}})
    values = json.loads(config.read_text())
    values["zero_optimization"]["stage"] = of["stage"]
    config.write_text(json.dumps(values))
    command = place.arguments(config, model, steps=STEPS, out=place.folder / "out", log=place.log,
                              save=place.folder / "snapshots", every=STEPS)
    if ranks == 1:
        run = spillway(*command)
    else:
        done = subprocess.run([MPIRUN, "-n", str(ranks), BINARY, *command], env=ONE_HOST, capture_output=True,
                              text=True, timeout=300, check=False)
        run = Run(done.returncode, done.stdout, done.stderr)
    if run.status:
        raise Failure(f"{ranks} ranks ended with {run.status}: {run.err}")
    saved = hashlib.sha256()
    files = sorted((place.folder / "snapshots").rglob("*.safetensors"))
    assert files, "a snapshot has been written"
    for file in files:
        saved.update(file.read_bytes())
    steps = [(step["loss"], step["grad_norm"], step["tokens"]) for step in place.steps()]
    return steps, sha256_of_model(place.folder / "out"), saved.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10**9, help="of the configurations, the first ones; default: all")
    a = parser.parse_args()
    rows, failures = covering(), 0
    for number, row in enumerate(rows[:a.runs], 1):
        folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-covering-"))
        try:
            model = Workplace(folder).init_model(width=row["width"])
            ends = [train(folder, model, row, ranks) for ranks in RANKS]
        except (Failure, AssertionError, subprocess.TimeoutExpired) as failure:
            ends = str(failure)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        equal = isinstance(ends, list) and all(end == ends[0] for end in ends)
        failures += not equal
        says = ", ".join(f"{name} {value}" for name, value in row.items())
        print(f"{number} of {len(rows)}: {says}: {'equal' if equal else f'DIFFERENT: {ends}'}", flush=True)
    print(f"{min(a.runs, len(rows))} of {len(rows)} configurations, {failures} different")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
