"""Two hosts on one machine: network namespaces with a name and an address each, and a cable between them. Open MPI
takes them for two, since it knows hosts by their names and reaches another one through an agent, which is ssh
otherwise. All of it ends with the process that made it.

    host-a  192.0.2.1 ──────── cable ──────── 192.0.2.2  host-b
"""
import os
import pathlib
import signal
import subprocess
import sys
import tempfile

from launch import MPIRUN
from mpirun import ANYWHERE

NAMES = ("host-a", "host-b")
NETWORK = "192.0.2.0/24"  # for documentation: no machine has it
# Between the hosts there is nothing but the cable, and on one host ranks use what they would between two: a test sees
# one way that messages take. A rank that waits gives its core to those who have work.
ENVIRONMENT = {**ANYWHERE, "OMPI_MCA_btl": "self,tcp", "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl_tcp_if_include": NETWORK,
               "OMPI_MCA_oob_tcp_if_include": NETWORK, "OMPI_MCA_mpi_yield_when_idle": "1"}


def as_root():
    """Restarts this program as the root of a user namespace of its own, where it is not root already."""
    as_its_root = ["unshare", "--user", "--map-root-user"]
    if os.geteuid() != 0 and subprocess.run([*as_its_root, "true"], capture_output=True, check=False).returncode == 0:
        os.execvp(as_its_root[0], [*as_its_root, sys.executable, *sys.argv])


class TwoHosts:
    """Raises OSError, with the reason, where there can be none."""

    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        self.holders = {}  # a process for each, which its namespaces live as long as
        try:
            for name in NAMES:
                self.holders[name] = self.hold(name)
            self.do(*self.on(NAMES[0]), "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns",
                    str(self.holders[NAMES[1]].pid))
            for number, name in enumerate(NAMES, 1):
                self.do(*self.on(name), "ip", "address", "add", f"192.0.2.{number}/24", "dev", "cable")
                self.do(*self.on(name), "ip", "link", "set", "lo", "up")
                self.do(*self.on(name), "ip", "link", "set", "cable", "up")
        except OSError:
            self.close()
            raise
        self.agent = pathlib.Path(self.folder.name, "agent")
        cases = "".join(f"{name}) pid={holder.pid} ;; " for name, holder in self.holders.items())
        self.agent.write_text(f'#!/bin/sh\ncase "$1" in {cases}esac\nshift\n'
                              'exec nsenter --target="$pid" --net --uts sh -c "$*"\n')
        self.agent.chmod(0o700)

    @staticmethod
    def do(*command):
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError as error:
            raise OSError(f"there is no {command[0]} here") from error
        if done.returncode != 0:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")

    @classmethod
    def hold(cls, name):
        keep = ["unshare", "--net", "--uts", "sh", "-c", f"hostname {name} && echo && exec cat"]
        cls.do(*keep[:3], "true")
        holder = subprocess.Popen(keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if not holder.stdout.readline():
            raise OSError(f"{' '.join(keep)}: {holder.communicate()[1].decode().strip()}")
        return holder

    def on(self, name):
        """What a command begins with that runs on this host."""
        return ["nsenter", f"--target={self.holders[name].pid}", "--net", "--uts"]

    def mpirun(self, ranks_of_each, *options):
        hosts = ",".join(f"{name}:{ranks_of_each}" for name in NAMES)
        return [*self.on(NAMES[0]), MPIRUN, "--mca", "plm_rsh_agent", self.agent, "-H", hosts, *options]

    def cut(self):
        self.do(*self.on(NAMES[0]), "ip", "link", "set", "cable", "down")

    def mend(self):
        self.do(*self.on(NAMES[0]), "ip", "link", "set", "cable", "up")

    def slow_down(self, rate):
        for name in NAMES:
            self.do(*self.on(name), "tc", "qdisc", "replace", "dev", "cable", "root", "tbf", "rate", rate, "burst",
                    "64kb", "latency", "100ms")

    def full_speed(self):
        for name in NAMES:
            self.do(*self.on(name), "tc", "qdisc", "delete", "dev", "cable", "root")

    def processes(self):
        """Those that run on one of the hosts."""
        networks = {os.stat(f"/proc/{holder.pid}/ns/net").st_ino for holder in self.holders.values()}
        found = []
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.stat(process / "ns/net").st_ino in networks:
                    found.append(int(process.name))
            except OSError:  # it has ended, or is a zombie
                pass
        return sorted(set(found) - {holder.pid for holder in self.holders.values()})

    def clear(self):
        """Ends all that runs on the hosts, launchers too."""
        for process in self.processes():
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def close(self):
        self.clear()
        for holder in self.holders.values():
            holder.communicate()
        self.folder.cleanup()
