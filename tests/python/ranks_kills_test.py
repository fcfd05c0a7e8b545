"""Ranks under torchrun --max-restarts, of which random ones are killed at random moments: the run ends with the bits of
one that was never killed. SPILLWAY_KILLS says how many (3), SPILLWAY_SEED which."""
import json
import os
import pathlib
import random
import signal
import subprocess
import time

from ranks_case import SCRIPT, RanksCase, torchrun_command, torchrun_environment
from report import main
from seed import test_seed

KILLS = int(os.environ.get("SPILLWAY_KILLS") or 3)
RANKS, STEPS = 2, 6 + 2 * KILLS
PATIENCE = 300  # seconds for ranks to begin, on a machine that is busy


class Kills(RanksCase):
    def setUp(self):
        super().setUp()
        self.random = random.Random(test_seed())
        print(f"SPILLWAY_KILLS={KILLS}", flush=True)

    def wait(self, what, found):
        begun = time.monotonic()
        while not (value := found()):
            self.assertIsNone(self.run.poll(), f"torchrun ended before {what}")
            self.assertLess(time.monotonic() - begun, PATIENCE, what)
            time.sleep(0.01)
        return value

    def started(self, folder, before):
        """Process ids of ranks, none of which was there before."""
        files = [folder / f"pid{rank}" for rank in range(RANKS)]
        now = [int(file.read_text()) for file in files if file.exists()]
        return now if len(now) == RANKS and not {*now} & {*before} else None

    def kill_one(self, folder, pids):
        """At once, while a store is opened, say, or some steps later."""
        steps = folder / "steps.jsonl"

        def lines():
            return len(steps.read_text().splitlines()) if steps.exists() else 0

        if self.random.random() < 0.7:
            wanted = min(lines() + self.random.randint(1, 3), STEPS - 1)
            self.wait("a step", lambda: lines() >= wanted or (folder / "pid0").stat().st_mtime + 15 < time.time())
            time.sleep(self.random.uniform(0, 0.1))
        else:
            time.sleep(self.random.uniform(0, 1.5))
        os.kill(self.random.choice(pids), signal.SIGKILL)

    def test_TheRunEndsWithTheBitsOfOneThatWasNeverKilled(self):
        whole, cut = (pathlib.Path(self.folder_of(name)) for name in ("whole", "cut"))
        self.run_all(RANKS, [{"case": "train", "folder": str(whole), "steps": STEPS}])
        case = [{"case": "train", "folder": str(cut), "steps": STEPS, "noted": True}]
        with (self.folder / "said").open("w", encoding="utf-8") as said:
            self.run = subprocess.Popen(
                torchrun_command(RANKS, self.folder, SCRIPT, json.dumps(case), restarts=KILLS + 1), cwd=self.folder,
                env=torchrun_environment(), stdout=said, stderr=subprocess.STDOUT)
            self.addCleanup(self.run.wait)
            self.addCleanup(self.run.terminate)  # which ends the ranks, too
            pids = []
            for _ in range(KILLS):
                pids = self.wait("ranks have begun", lambda before=pids: self.started(cut, before))
                self.kill_one(cut, pids)
            (cut / "enough").touch()
            status = self.run.wait(timeout=PATIENCE)
        self.assertEqual(0, status, (self.folder / "said").read_text()[-4000:])
        expected, *_ = self.results(whole, RANKS)
        for result in self.results(cut, RANKS):
            self.assert_same_weights(result["weights"], expected["weights"])
        noted = [json.loads(line) for line in (cut / "steps.jsonl").read_text().splitlines()]
        for step, loss, norm in noted:
            self.assertEqual((expected["losses"][step], expected["norms"][step]), (loss, norm), f"step {step}")
        # One that was committed and not noted is a kill between the two.
        self.assertGreaterEqual(len({step for step, _, _ in noted}), STEPS - KILLS)
        print(f"{KILLS} kills: {len(noted)} steps noted of {STEPS}, first of the last life "
              f"{self.results(cut, RANKS)[0]['first']}", flush=True)


if __name__ == "__main__":
    main()
