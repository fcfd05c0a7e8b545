#!/usr/bin/env python3
"""Kills a fine-tune with `kill -9` at random moments, many times over, and has it resumed to its end: what it exports
must equal, bit for bit, what a run exports that nothing happened to.

A small GPT-2 trains with clipping in several layouts over HBM, host memory and NVMe. After every kill the store is read
to the last byte (`spillway store --verify`) and must stand at the last step that was reported as durable, or after it.
The seed is printed; --seed draws the same moments again.
"""
import argparse
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time

from runs import BINARY, Workplace, hinted_budget, sha256_of_model, spillway

STEPS = 10
MIB = 1 << 20
# What differs between the layouts: where weights go between their visits, what host memory keeps of the tiles, commits.
# All of them train the same bits.
LAYOUTS = {
    "streamed": {"parameters": "nvme", "cache": 0},
    "cached": {"parameters": "nvme", "cache": 7 * MIB, "commit_every": 1},
    "weights in hbm": {"parameters": "none", "cache": 5 * MIB, "commit_every": 1},
    "every third": {"parameters": "nvme", "cache": 7 * MIB, "commit_every": 3},
}


class Failure(Exception):
    """What should not have happened, with what the program said."""


class KillSweep:
    def __init__(self, folder, seed, say, dtype="bf16"):
        self.place, self.say, self.dtype = Workplace(folder), say, dtype
        self.random = random.Random(seed)
        self.out = self.place.folder / "out"
        self.kills, self.ends, self.lost_records = 0, 0, 0
        self.budgets = {}
        self.model = self.place.init_model(layers=4, width=128)

    def run(self, kills):
        """Returns when so many runs were killed and what was left of them ended with the right bits."""
        wanted = {layout: self.reference(layout) for layout in LAYOUTS}
        bits = {digest for digest, _ in wanted.values()}
        if len(bits) != 1:
            raise Failure(f"layouts train different bits: {wanted}")
        self.wanted = bits.pop()
        attempts = 0
        while self.kills < kills:
            attempts += 1
            if attempts > 20 * kills + 100:
                raise Failure(f"{attempts} runs, and only {self.kills} were still there to be killed")
            layout = self.random.choice(list(LAYOUTS))
            self.one_round(layout, wanted[layout][1], kills)

    def one_round(self, layout, seconds, kills):
        """A new store, killed until chance lets a run end."""
        self.place.log.unlink(missing_ok=True)
        how, ended = ["--fresh"], False
        while not ended:
            to_the_end = self.kills >= kills or (how != ["--fresh"] and self.random.random() < 0.5)
            ended = self.train(layout, how, None if to_the_end else self.random.uniform(0, 1.05 * seconds))
            if ended:
                self.check_bits(layout)
            else:
                how = self.look(layout)

    def reference(self, layout):
        """Bits and seconds of a run that nothing happens to. It has to use all tiers, or the sweep would not."""
        self.find_budgets(layout)
        start = time.monotonic()
        said = self.succeed(*self.arguments(layout, ["--fresh"]))
        seconds = time.monotonic() - start
        home = re.search(r"at home: (\d+) MiB in hbm, (\d+) MiB in host memory, (\d+) MiB on nvme", said)
        in_host, on_nvme = int(home.group(2)), int(home.group(3))
        if on_nvme == 0 or (in_host > 0) != (LAYOUTS[layout]["cache"] > 0):
            raise Failure(f"{layout} does not use the tiers that it should: {said}")
        self.say(f"{layout}: {seconds:.2f} s uninterrupted; {home.group(0)}")
        return self.digest(), seconds

    def find_budgets(self, layout):
        """The smallest that are accepted, by doing what each refusal says; or what a pipeline needs and a cache."""
        cache = LAYOUTS[layout]["cache"]
        budgets = {} if cache else {"hbm_bytes": 65536, "host_bytes": 65536}
        while True:
            self.budgets[layout] = budgets
            run = spillway(*self.arguments(layout, ["--fresh"], steps=1))
            if run.status == 0:
                break
            budget, value = hinted_budget(run.err.strip()) or ("", 0)
            if value <= budgets.get(budget, value):
                raise Failure(f"{layout}: {run.err}")
            budgets[budget] = value
        if cache:
            need = re.search(r"^ +host +total +(\d+) bytes", run.out, re.MULTILINE)
            budgets["host_bytes"] = int(need.group(1)) + cache

    def train(self, layout, how, kill_after):
        """True: the run came to its end before it was killed."""
        command = [BINARY, *self.arguments(layout, how)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            try:
                out, err = run.communicate(timeout=kill_after)
            except subprocess.TimeoutExpired:
                run.kill()
                out, err = run.communicate()
        if run.returncode == 0:
            return True
        if run.returncode != -9:
            raise Failure(f"{layout}, {how}: exit code {run.returncode}\n{out}\n{err}")
        self.kills += 1
        self.last = f"kill {self.kills}: {layout}, {' '.join(how) or 'new'}, after {kill_after:.3f} s"
        return False

    def look(self, layout):
        """How to go on with what a killed run has left."""
        deadline = time.monotonic() + 30
        while True:  # the kernel may hold a dead process's files for a moment
            run = spillway("store", self.place.nvme, "--verify", "--json")
            if "in use" not in run.err or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        durable = max([step["durable_step"] for step in self.steps()], default=0)
        nothing = any(words in run.err for words in ("holds no store", "holds no committed step"))
        if nothing and durable == 0:
            self.say(f"{self.last}: no step is committed yet")
            return []
        try:
            store = json.loads(run.out)
        except json.JSONDecodeError:
            raise Failure(f"{self.last}: the store cannot be shown\n{run.out}\n{run.err}") from None
        if store["verified"]["bad"] or store["step"] < durable:
            raise Failure(f"{self.last}: step {durable} was durable\n{run.out}\n{run.err}")
        self.lost_records += bool(store["damage"])
        self.say(f"{self.last}: the store is at step {store['step']}, whole")
        return ["--resume"]

    def steps(self):
        log = self.place.log
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def check_bits(self, layout):
        self.ends += 1
        if self.digest() != self.wanted:
            raise Failure(f"{layout}: other bits than the uninterrupted run's, after {self.kills} kills")

    def digest(self):
        digest = sha256_of_model(self.out)
        shutil.rmtree(self.out)  # the next run has to write its own
        return digest

    def arguments(self, layout, how, steps=STEPS):
        of_layout = LAYOUTS[layout]
        commits = {"commit_every": of_layout["commit_every"]} if "commit_every" in of_layout else {}
        # In fp16 the first steps overflow, and some of the others.
        config = self.place.config(parameters=of_layout["parameters"], dtype=self.dtype,
                                   fp16={"initial_scale_power": 18, "loss_scale_window": 2},
                                   spillway_section={**self.budgets[layout], **commits})
        return [*self.place.arguments(config, self.model, steps=steps, out=self.out, log=self.place.log), *how]

    @staticmethod
    def succeed(*arguments):
        run = spillway(*arguments)
        if run.status:
            raise Failure(f"spillway {arguments[0]}: exit code {run.status}\n{run.out}\n{run.err}")
        return run.out


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0],
                                     epilog="SPILLWAY_BINARY, a variable of the environment, names the program.")
    parser.add_argument("--kills", default=200, type=int)
    parser.add_argument("--seed", default=random.randrange(1 << 32), type=int)
    parser.add_argument("--dir", help="where the store and the model go while it runs; default: a temporary directory")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    options = parser.parse_args()
    if not BINARY:
        parser.error("SPILLWAY_BINARY is not set; let it name the program: build/tools/spillway")
    print(f"--seed {options.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spillway-kills-", dir=options.dir) as folder:
        sweep = KillSweep(folder, options.seed, lambda line: print(line, flush=True), options.dtype)
        try:
            sweep.run(options.kills)
        except Failure as failure:
            sys.exit(f"kill_sweep.py: {failure}")
    print(f"{sweep.kills} kills, {sweep.ends} runs came to their end, each with the bits of the uninterrupted run; "
          f"{sweep.lost_records} records were torn; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
