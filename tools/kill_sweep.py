#!/usr/bin/env python3
"""Kills a fine-tune with `kill -9` at random moments, many times over, and has it resumed to its end: what it exports
must equal, bit for bit, what a run exports that nothing happened to.

A small GPT-2 trains with clipping in several layouts over HBM, host memory and NVMe. After every kill the store is read
to the last byte (`spillway store --verify`) and must stand at the last step that was reported as durable, or behind it.
The seed is printed; --seed draws the same moments again.
"""
import argparse
import hashlib
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
STEPS = 10
NVME = {"device": "nvme"}
MIB = 1 << 20
# What differs between the layouts: where weights go between their visits, what host memory keeps of the tiles, commits.
# All of them train the same bits.
LAYOUTS = {
    "streamed": {"offload_param": NVME, "cache": 0},
    "cached": {"offload_param": NVME, "cache": 7 * MIB, "commit_every": 1},
    "weights in hbm": {"offload_param": {"device": "none"}, "cache": 5 * MIB, "commit_every": 1},
    "every third": {"offload_param": NVME, "cache": 7 * MIB, "commit_every": 3},
}
HINT = re.compile(r"(hbm_bytes|host_bytes) to \"?(\d+)(KiB|MiB)?\"? or more")


class Failure(Exception):
    """What should not have happened, with what the program said."""


class KillSweep:
    def __init__(self, binary, folder, seed, say, dtype="bf16"):
        self.binary, self.folder, self.say, self.dtype = str(binary), pathlib.Path(folder), say, dtype
        self.random = random.Random(seed)
        self.store, self.log, self.out = self.folder / "nvme", self.folder / "steps.jsonl", self.folder / "out"
        self.model = self.folder / "model"
        self.folder.mkdir(exist_ok=True)
        self.kills, self.ends, self.lost_records = 0, 0, 0
        self.budgets = {}
        self.succeed("init-model", self.model, "--layers", 4, "--width", 128, "--heads", 4, "--vocab", 256,
                     "--context", 64, "--seed", 1)

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
        self.log.unlink(missing_ok=True)
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
        said = self.succeed(*self.arguments(["--fresh"]))
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
            self.write_config(layout)
            run = subprocess.run([self.binary, *self.arguments(["--fresh"], steps=1)], capture_output=True, text=True,
                                 check=False)
            if run.returncode == 0:
                break
            hint = HINT.search(run.stderr)
            value = int(hint.group(2)) * {None: 1, "KiB": 1 << 10, "MiB": MIB}[hint.group(3)] if hint else 0
            if not hint or value <= budgets.get(hint.group(1), value):
                raise Failure(f"{layout}: {run.stderr}")
            budgets[hint.group(1)] = value
        if cache:
            need = re.search(r"^ +host +total +(\d+) bytes", run.stdout, re.MULTILINE)
            budgets["host_bytes"] = int(need.group(1)) + cache
            self.write_config(layout)

    def train(self, layout, how, kill_after):
        """True: the run came to its end before it was killed."""
        self.write_config(layout)
        command = [self.binary, *self.arguments(how)]
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
            run = subprocess.run([self.binary, "store", str(self.store), "--verify", "--json"], capture_output=True,
                                 text=True, check=False)
            if "in use" not in run.stderr or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        durable = max([step["durable_step"] for step in self.steps()], default=0)
        nothing = any(words in run.stderr for words in ("holds no store", "holds no committed step"))
        if nothing and durable == 0:
            self.say(f"{self.last}: no step is committed yet")
            return []
        try:
            store = json.loads(run.stdout)
        except json.JSONDecodeError:
            raise Failure(f"{self.last}: the store cannot be shown\n{run.stdout}\n{run.stderr}") from None
        if store["verified"]["bad"] or store["step"] < durable:
            raise Failure(f"{self.last}: step {durable} was durable\n{run.stdout}\n{run.stderr}")
        self.lost_records += bool(store["damage"])
        self.say(f"{self.last}: the store is at step {store['step']}, whole")
        return ["--resume"]

    def steps(self):
        lines = self.log.read_text().splitlines(keepends=True) if self.log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def check_bits(self, layout):
        self.ends += 1
        if self.digest() != self.wanted:
            raise Failure(f"{layout}: other bits than the uninterrupted run's, after {self.kills} kills")

    def digest(self):
        digest = hashlib.sha256()
        for file in sorted(self.out.glob("*.safetensors")):
            digest.update(file.read_bytes())
            file.unlink()  # the next run has to write its own
        return digest.hexdigest()

    def arguments(self, how, steps=STEPS):
        config = self.folder / "ds_config.json"
        return ["finetune", "--config", str(config), "--model", str(self.model), "--data", str(ROOT / "LICENSE"),
                "--steps", str(steps), "--seq", "32", "--out", str(self.out), "--log", str(self.log), *how]

    def write_config(self, layout):
        path = {"nvme_path": str(self.store)}
        parameters = LAYOUTS[layout]["offload_param"]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": self.dtype == "bf16"},
            # In fp16 the first steps overflow, and some of the others.
            "fp16": {"enabled": self.dtype == "fp16", "initial_scale_power": 18, "loss_scale_window": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {**NVME, **path},
                                  "offload_param": {**parameters, **(path if parameters == NVME else {})}},
            "spillway": {"tile_elements": 16384, **self.budgets[layout]},
        }
        if "commit_every" in LAYOUTS[layout]:
            config["spillway"]["commit_every"] = LAYOUTS[layout]["commit_every"]
        (self.folder / "ds_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def succeed(self, *arguments):
        run = subprocess.run([self.binary, *map(str, arguments)], capture_output=True, text=True, check=False)
        if run.returncode:
            raise Failure(f"spillway {arguments[0]}: exit code {run.returncode}\n{run.stdout}\n{run.stderr}")
        return run.stdout


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--binary", default=ROOT / "build-test/tools/spillway", type=pathlib.Path)
    parser.add_argument("--kills", default=200, type=int)
    parser.add_argument("--seed", default=random.randrange(1 << 32), type=int)
    parser.add_argument("--dir", help="where the store and the model go while it runs; default: a temporary directory")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"])
    options = parser.parse_args()
    print(f"--seed {options.seed}", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spillway-kills-", dir=options.dir) as folder:
        sweep = KillSweep(options.binary, folder, options.seed, lambda line: print(line, flush=True),
                          options.dtype)
        try:
            sweep.run(options.kills)
        except Failure as failure:
            sys.exit(f"kill_sweep.py: {failure}")
    print(f"{sweep.kills} kills, {sweep.ends} runs came to their end, each with the bits of the uninterrupted run; "
          f"{sweep.lost_records} records were torn; {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
