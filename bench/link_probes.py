"""What the links of this machine reach by themselves: the drive by fio, hashing and copying by bench/link_rates.cc; and
a drive that is made steady, so that its noise hides nothing."""
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import time

GIB = 1 << 30
READ_PERCENT = 54  # an update of bf16 weights with exact states reads 14 bytes a parameter and writes 12
# --thread: a job that is killed leaves no process of its own behind.
FIO = ["--bs=1M", "--iodepth=32", "--ioengine=io_uring", "--direct=1", "--fixedbufs=1", "--registerfiles=1",
       "--refill_buffers=0", "--scramble_buffers=0", "--thread", f"--rwmixread={READ_PERCENT}", "--output-format=json"]


class Unable(Exception):
    """This machine cannot do what was asked; the message says why and what to do."""


def last_line(text):
    return (text.strip().splitlines() or ["no message"])[-1]


def run_fio(file, size, mode, loops, timeout):
    """Bytes per second in all, and CPU seconds (user and system) per byte."""
    done = subprocess.run(["fio", "--name=link", f"--filename={file}", f"--size={size}", f"--rw={mode}",
                           f"--loops={loops}", *FIO], capture_output=True, text=True, check=False, timeout=timeout)
    if done.returncode:
        raise Unable(f"fio: {last_line(done.stderr)}")
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
    moved = [job[kind] for kind in ("read", "write") if job[kind]["io_bytes"]]
    total, seconds = sum(kind["io_bytes"] for kind in moved), max(kind["runtime"] for kind in moved) / 1000
    cpu_seconds = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return {"rate": total / max(seconds, 1e-3), "cpu_per_byte": cpu_seconds / total}


def run_aio_bench(aio_bench, file, size, mode, loops, timeout):
    mode = {"rw": "mix"}.get(mode, mode)
    done = subprocess.run([str(aio_bench), "--file", str(file), "--size", str(size), "--block", "1048576", "--depth",
                           "32", "--passes", str(loops), "--mode", mode], capture_output=True, text=True, check=False,
                          timeout=timeout)
    if done.returncode:
        raise Unable(last_line(done.stderr))
    line = json.loads(done.stdout.splitlines()[-1])
    return {"rate": line["gb_per_s"] * 1e9, "cpu_per_byte": line["cpu_s_per_gib"] / GIB}


def probe_by(run, size, seconds):
    """Passes over the file: three in each mode, or as few as those `seconds` allow."""
    end = time.monotonic() + 3 * seconds if seconds else None

    def measured(mode, loops):
        return run(mode, loops, end and max(0.1, end - time.monotonic()))

    first = measured("write", 1)  # space that was never written is read at no cost
    loops = max(1, min(3, int((seconds * first["rate"] / size - 1) / 3))) if seconds else 3
    return {name: measured(mode, loops) for name, mode in (("read", "read"), ("write", "write"), ("mixed", "rw"))}


def probe_drive(folder, size, aio_bench, seconds=None):
    """The rates of reading, writing and both at once on a file of its own, in bytes per second. By fio, or by aio_bench
    where there is no fio or it cannot (it wants direct I/O, which tmpfs may not grant); the reason is in "program".
    `seconds`: about as long as it may take; after three times as long it is given up."""
    file = pathlib.Path(folder, "link-probe")
    try:
        program = "fio"
        try:
            if not shutil.which("fio"):
                raise Unable("fio: is not installed")
            found = probe_by(lambda *how: run_fio(file, size, *how), size, seconds)
        except Unable as reason:
            program = f"aio_bench ({reason})"
            found = probe_by(lambda *how: run_aio_bench(aio_bench, file, size, *how), size, seconds)
    except subprocess.TimeoutExpired as late:
        raise Unable(f"{pathlib.Path(late.cmd[0]).name}: the drive's probe ran past {3 * seconds:.0f} s") from late
    finally:
        file.unlink(missing_ok=True)
    return {"program": program, **{name: line["rate"] for name, line in found.items()},
            "read_cpu_per_gib": found["read"]["cpu_per_byte"] * GIB,
            "write_cpu_per_gib": found["write"]["cpu_per_byte"] * GIB}


def mean_of_drive(probes):
    """Of several: the drive's rates before and after what is judged by them."""
    return {key: value if isinstance(value, str) else sum(probe[key] for probe in probes) / len(probes)
            for key, value in probes[0].items()}


def probe_cores(link_rates, tiny):
    """Bytes that a core hashes and copies per second: the better of one core alone and of all of them at once."""
    done = subprocess.run([str(link_rates), *(["--tiny"] if tiny else [])], capture_output=True, text=True, check=True)
    line = json.loads(done.stdout)
    return {"cores": line["cores"], **{
        kind: 1e9 * max(line[f"{kind}_one_gb_per_s"], line[f"{kind}_all_gb_per_s"] / line["cores"])
        for kind in ("hash", "copy")}, "measured": line}


class SteadyDrive:
    """While entered, this process and its children read and write at most `rate` bytes per second each on the drive
    that holds `folder`: a blkio cgroup (version 1), removed at the end. For root."""
    ROOT = pathlib.Path("/sys/fs/cgroup/blkio")

    def __init__(self, folder, rate):
        self.rate = rate
        self.device = self.device_of(folder)
        self.group = self.ROOT / f"spillway-bench-{os.getpid()}"
        self.home = None

    @staticmethod
    def device_of(folder):
        """MAJOR:MINOR of the whole drive; a throttle on a partition is refused by the kernel."""
        number = os.stat(folder).st_dev
        entry = pathlib.Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        if not entry.exists():
            raise Unable(f"--steady: {folder} lies on no block device of this machine; name another with --work")
        entry = entry.resolve()
        if (entry / "partition").exists():
            entry = entry.parent
        return (entry / "dev").read_text().strip()

    def __enter__(self):
        names = [f"blkio.throttle.{kind}_bps_device" for kind in ("read", "write")]
        if not all((self.ROOT / name).exists() for name in names):
            raise Unable(f"--steady: {self.ROOT} has no throttle (a machine with cgroup version 2 alone, or a kernel "
                         "without CONFIG_BLK_DEV_THROTTLING); run without --steady")
        paths = [line.split(":", 2)[2] for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines()
                 if "blkio" in line.split(":", 2)[1].split(",")]
        self.home = self.ROOT / (paths[0].lstrip("/") if paths else "")
        try:
            self.group.mkdir()
            for name in names:
                (self.group / name).write_text(f"{self.device} {int(self.rate)}\n")
            (self.group / "cgroup.procs").write_text(f"{os.getpid()}\n")
        except OSError as error:
            self.__exit__()
            raise Unable(f"--steady: {self.group}: {error.strerror}; run as root, or without --steady") from error
        return self

    def __exit__(self, *_):
        if not self.group.exists():
            return
        try:
            (self.home / "cgroup.procs").write_text(f"{os.getpid()}\n")
        finally:
            for _ in range(50):  # a child that was just killed still counts for a moment
                try:
                    self.group.rmdir()
                    return
                except OSError:
                    time.sleep(0.1)
            self.group.rmdir()

    def holds(self, drive):
        """Whether the group is what limits the drive, both ways at once too. Throws when it is not even in one."""
        for kind in ("read", "write"):
            if not 0.9 * self.rate < drive[kind] < 1.1 * self.rate:
                raise Unable(f"--steady: {kind}s reach {drive[kind] / 1e6:.0f} MB/s where {self.rate / 1e6:.0f} were "
                             "asked for: the drive is slower, or busy, or the throttle does not hold; ask for less")
        return drive["mixed"] > 0.9 * self.rate / (READ_PERCENT / 100)


def steady_drive(folder, mb_per_s):
    """A SteadyDrive of that many MB/s; of none (None), the drive stays as it is, and what is entered is None."""
    return SteadyDrive(folder, mb_per_s * 1e6) if mb_per_s else contextlib.nullcontext()
