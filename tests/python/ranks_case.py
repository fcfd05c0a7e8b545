"""What the suites of several processes share: how these are started, and what they have left. Import it first."""
import itertools
import json
import os
import pathlib
import socket
import subprocess
import sys

from case import ROOT, Case, need  # first of all: it reports the suite as skipped where there is no PyTorch

need("torch.distributed", "this PyTorch has no torch.distributed")

import torch  # noqa: E402

SCRIPT = pathlib.Path(__file__).with_name("ranks_script.py")


# Below those that the system gives to whoever asks for any: between here and the process that listens, which loads
# PyTorch first, nobody else takes one of these. Suites that run beside each other begin at different ones.
_ports = itertools.count(10000 + os.getpid() * 16 % 20000)


def free_port():
    for port in _ports:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass


class Processes:
    """As torchrun starts them, without its agent, which would end all of them with the first."""

    def __init__(self, count, cases, script=SCRIPT):
        shared = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
                  "OMP_NUM_THREADS": "1"}
        self.started = [subprocess.Popen([sys.executable, str(script), json.dumps(cases)], text=True,
                                         env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for rank in range(count)]

    def ended(self, but=()):
        """(status, output) of each but these, by rank."""
        return {rank: (process.communicate(timeout=250)[0], process.returncode)[::-1]
                for rank, process in enumerate(self.started) if rank not in but}

    def kill(self):
        for process in self.started:
            process.kill()
            process.communicate()


def torchrun_command(count, folder, script, *arguments, restarts=0):
    """With a port of its own, as --standalone has one for all before PyTorch 2.0, and with output in files as well, as
    that starts nothing otherwise on Python 3.11."""
    return [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=c10d",
            f"--rdzv_endpoint=localhost:{free_port()}", f"--nproc_per_node={count}", f"--max_restarts={restarts}",
            "--monitor_interval=1", "-r", "1", "-t", "1", "--log_dir", str(pathlib.Path(folder, "logs")), str(script),
            *map(str, arguments)]


def torchrun_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")}


def torchrun(count, folder, script, *arguments, restarts=0, timeout=280):
    """subprocess.run()'s result."""
    return subprocess.run(torchrun_command(count, folder, script, *arguments, restarts=restarts), cwd=folder,
                          env=torchrun_environment(), capture_output=True, text=True, timeout=timeout, check=False)


class RanksCase(Case):
    script = SCRIPT

    def folder_of(self, name):
        made = self.folder / name
        made.mkdir()
        return str(made)

    def run_all(self, count, cases):
        processes = Processes(count, cases, self.script)
        self.addCleanup(processes.kill)
        for rank, (status, output) in processes.ended().items():
            self.assertEqual(status, 0, f"rank {rank}:\n{output}")

    def torchrun(self, count, script, *arguments, restarts=0, folder=None):
        """What it printed."""
        done = torchrun(count, folder or self.folder, script, *arguments, restarts=restarts)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def run_alone(self, script, *arguments):
        """As one process of torchrun's, in the script's folder."""
        done = subprocess.run([sys.executable, str(script), *arguments], cwd=script.parent,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python"),
                                   "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                                   "MASTER_PORT": str(free_port())},
                              capture_output=True, text=True, timeout=250, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    @staticmethod
    def results(folder, count):
        return [torch.load(pathlib.Path(folder, f"rank{rank}.pt")) for rank in range(count)]

    def assert_same_weights(self, one, other):
        self.assertEqual(one.keys(), other.keys())
        for name in one:
            self.assertTrue(torch.equal(one[name], other[name]), name)
