#!/usr/bin/env python3
"""Kills a fine-tune of several ranks under mpirun with `kill -9` at random moments, many times over: a rank, all of
them, or the launcher. It is resumed after each, and what it exports in the end must equal what a run of one rank
exports that nothing happened to. After every kill the others must end by themselves, and the stores are read to the
last byte (`spillway store --verify`). The seed is printed; --seed draws the same moments again.
"""
import argparse
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from mpirun import ONE_HOST, processes_of  # noqa: E402
from runs import BINARY, Workplace, sha256_of_model, spillway  # noqa: E402

MPIRUN = os.environ.get("SPILLWAY_MPIRUN", "") or shutil.which("mpirun") or ""
MICRO_BATCHES, STEPS_A_KILL = 4, 25
ENDS_WITHIN = 90  # seconds: the patience of those who wait, and a margin
VICTIMS = ("rank", "rank", "all", "launcher")


class Failure(Exception):
    """What should not have happened, with what the program said."""


def ranks_of(launcher):
    """Process ids of its ranks, by rank."""
    found = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
        except (OSError, ValueError, IndexError):
            continue
        rank = [word for word in variables if word.startswith(b"OMPI_COMM_WORLD_RANK=")]
        if parent == launcher and rank:
            found[int(rank[0].partition(b"=")[2])] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


class RanksKillSweep:
    def __init__(self, folder, ranks, kills, seed, say):
        self.place, self.ranks, self.kills, self.say = Workplace(folder), ranks, kills, say
        self.random = random.Random(seed)
        self.steps = kills * STEPS_A_KILL
        self.model = self.place.init_model()
        self.out, self.said = self.place.folder / "out", self.place.folder / "said"

    def config(self, ranks):
        return self.place.config(accumulation=MICRO_BATCHES // ranks, spillway_section={"sum_groups": MICRO_BATCHES})

    def arguments(self, **how):
        return Workplace.arguments(self.config(self.ranks), self.model, steps=self.steps, log=self.place.log, **how)

    def launch(self, **how):
        with open(self.said, "w", encoding="utf-8") as said:
            return subprocess.Popen([MPIRUN, "-n", str(self.ranks), BINARY, *self.arguments(**how)], env=ONE_HOST,
                                    stdout=said, stderr=subprocess.STDOUT, start_new_session=True)

    def reference(self):
        place = Workplace(self.place.folder / "alone")
        config = place.config(accumulation=MICRO_BATCHES, spillway_section={"sum_groups": MICRO_BATCHES})
        done = spillway(*Workplace.arguments(config, self.model, steps=self.steps, out=place.folder / "out"))
        if done.status:
            raise Failure(done.err)
        return sha256_of_model(place.folder / "out")

    def wait_for_the_end(self, what, launcher):
        deadline = time.monotonic() + ENDS_WITHIN
        while left := [pid for pid in processes_of(self.place.folder) if pid != launcher.pid]:
            if time.monotonic() > deadline:
                raise Failure(f"{what}: {left} go on {ENDS_WITHIN} s later")
            time.sleep(0.02)
        try:
            launcher.wait(5)
        except subprocess.TimeoutExpired:  # Open MPI's own: a rank was killed while it was about to come to it
            launcher.kill()
            launcher.wait()

    def one_round(self, number):
        """False: the run came to its end first."""
        resume = any(self.place.nvme.glob("rank*/spillway.store"))
        run = self.launch(resume=resume, fresh=not resume)
        time.sleep(self.random.uniform(0.1, 1.5))
        while len(ranks := ranks_of(run.pid)) < self.ranks and run.poll() is None:
            time.sleep(0.01)
        victim = self.random.choice(VICTIMS)
        if run.poll() is not None:
            if run.returncode:
                raise Failure(f"round {number}: a run that nobody killed ended with {run.returncode}: "
                              f"{self.said.read_text()}")
            return None
        if victim == "rank":
            kill(self.random.choice(ranks))
        elif victim == "all":
            for pid in ranks:
                kill(pid)
        else:
            kill(run.pid)
        self.wait_for_the_end(f"round {number}: {victim} killed", run)
        if any(self.place.nvme.glob("rank*/spillway.store")):
            self.look(f"round {number}: {victim} killed")
        return victim

    def look(self, what):
        """The kernel lets go of a ring's files a moment after the process that had it has ended."""
        for _ in range(100):
            looked = spillway("store", self.place.nvme, "--verify")
            if looked.status == 0:
                return
            if "in use" not in looked.err:
                break
            time.sleep(0.1)
        raise Failure(f"{what}: {looked.out}{looked.err}")

    def run(self):
        wanted = self.reference()
        counts = dict.fromkeys(VICTIMS, 0)
        attempts = 0
        while sum(counts.values()) < self.kills:
            attempts += 1
            if attempts > 10 * self.kills:
                raise Failure(f"{attempts} runs, and only {counts} killed")
            victim = self.one_round(attempts)
            if victim is None:  # the run has come to its end: begin anew
                shutil.rmtree(self.place.nvme)
                self.place.nvme.mkdir()
                continue
            counts[victim] += 1
        resume = any(self.place.nvme.glob("rank*/spillway.store"))
        last = self.launch(resume=resume, fresh=not resume, out=self.out)
        if last.wait():
            raise Failure(f"the last run: {self.said.read_text()}")
        if sha256_of_model(self.out) != wanted:
            raise Failure(f"after {counts} another model was trained than without")
        self.say(f"killed {counts}; {self.steps} steps end with the bits of a run of one rank")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    a = parser.parse_args()
    print(f"seed {a.seed}", flush=True)
    folder = tempfile.mkdtemp(prefix="spillway-ranks-kill-")
    try:
        RanksKillSweep(folder, a.ranks, a.kills, a.seed, print).run()
    except Failure as failure:
        print(f"ranks_kill_sweep: {failure}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
