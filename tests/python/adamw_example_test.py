"""examples/adamw_loop.py: it learns, and a run that was killed goes on with the same bits."""
import os
import re
import signal
import subprocess
import sys

from case import ROOT, Case, main

SMALL = ["--text", ROOT / "README.md", "--batch", "4", "--context", "32", "--width", "64", "--layers", "2"]


class Example(Case):
    def start(self, store, steps, *more):
        command = [sys.executable, "-u", ROOT / "examples/adamw_loop.py", *SMALL, "--store", self.folder / store,
                   "--steps", steps, *more]
        return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                env={**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"})

    def lines(self, run):
        out, errors = run.communicate(timeout=200)
        self.assertEqual(0, run.returncode, errors[-3000:])
        return re.findall(r"^step .*", out, re.MULTILINE), out

    def test_LearnsAndGoesOnWithTheSameBits(self):
        whole, _ = self.lines(self.start("whole", 30, "--bf16"))
        losses = [float(re.search(r"loss ([\d.]+)", line)[1]) for line in whole]
        self.assertEqual(30, len(losses))
        self.assertLess(sum(losses[-5:]), 0.8 * sum(losses[:5]))
        run = self.start("killed", 30, "--bf16")
        while not run.stdout.readline().startswith("step 12 "):
            self.assertIsNone(run.poll())
        os.kill(run.pid, signal.SIGKILL)
        run.communicate()
        rest, out = self.lines(self.start("killed", 30, "--bf16", "--host-bytes", "64MiB"))
        self.assertRegex(out, r'(?m)^goes on after step (1[2-9]|[23]\d): {"step": \d+, "loss": ')
        self.assertEqual(whole[-len(rest):], rest)


if __name__ == "__main__":
    main()
