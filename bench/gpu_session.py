"""What the stages of bench/gpu.py share: programs and how they are run, places, the clock, and where results go."""
import gzip
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
GIB = 1 << 30
# Where a build directory has what a bundle has in bin; on an emulated GPU others stand in for some.
PLACES = {
    "spillway": "tools/spillway", "cuda_device_test": "tests/kernels/cuda_device_test",
    "cuda_tensor_store_test": "tests/swap/cuda_tensor_store_test",
    "tools_cuda_ops_test": "tests/tools/tools_cuda_ops_test",
    "tools_cuda_attention_test": "tests/tools/tools_cuda_attention_test", "cuda_bench": "bench/cuda_bench",
    "cuda_attention_bench": "bench/cuda_attention_bench", "cuda_product_bench": "bench/cuda_product_bench",
    "aio_bench": "bench/aio_bench"}
EMULATED_PLACES = PLACES | {
    "cuda_device_test": "tests/emulated_gpu/cuda_device_test",
    "cuda_tensor_store_test": "tests/emulated_gpu/cuda_tensor_store_test",
    "tools_cuda_ops_test": "tests/emulated_gpu/cuda_ops_test",
    "tools_cuda_attention_test": "tests/emulated_gpu/cuda_attention_test", "cuda_bench": "bench/emulated_cuda_bench",
    "cuda_product_bench": "bench/emulated_cuda_product_bench"}
GRACE_SECONDS = 45  # in which a run that was asked to end ends
LOG_CHARACTERS = 40_000  # of one program
GPU_FACTS = ("name,driver_version,vbios_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.gen.current,"
             "pcie.link.width.current,clocks.max.sm,clocks.max.mem,clocks.sm,clocks.mem,power.limit,power.draw,"
             "temperature.gpu")


class Skip(Exception):
    """A stage cannot be measured here; the message says why."""


class Failed(Exception):
    """A stage went wrong; the message says how, and `tail` is the end of what the program printed."""

    def __init__(self, message, tail=""):
        super().__init__(message)
        self.tail = tail[-2000:]


class Done:
    """A program that ended: exit status (None: it was killed at its time), what it printed, seconds."""

    def __init__(self, status, out, seconds):
        self.status, self.out, self.seconds = status, out, seconds

    def lines(self):
        """The JSON lines among what it printed. One that was killed may have left half a line."""
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{") and line.endswith("}")]

    def last_line(self):
        return (self.out.strip().splitlines() or ["no message"])[-1]


class Session:
    """What stages share: programs, places, the clock, and where results go."""

    def __init__(self, a):
        self.a, self.bin, self.tiny = a, a.bin.resolve(), a.tiny
        self.emulated = os.environ.get("SPILLWAY_DEVICE") == "emulated"
        self.out, self.work = a.out.resolve(), a.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = open(self.out / "results.jsonl", "a")
        self.log = open(self.out / "log.txt", "a")
        self.writing = threading.Lock()
        self.end = time.monotonic() + a.seconds
        self.stage, self.stage_end = "machine", self.end
        self.found, self.failures = [], []
        self.device = "emulated" if self.emulated else "cuda"
        self.environment = {**os.environ, "SPILLWAY_BINARY": str(self.find("spillway")),
                            "SPILLWAY_DEVICE": self.device}
        folder = folder_of_cublas(cublas_of(self.bin), a.peer_python)
        if folder:
            before = os.environ.get("LD_LIBRARY_PATH")
            self.environment["LD_LIBRARY_PATH"] = f"{before}:{folder}" if before else folder
        self.limits = {}  # what one stage measured and another one compares with
        self._peer = None

    # Programs.

    def find(self, name):
        for place in (name, (EMULATED_PLACES if self.emulated else PLACES)[name]):
            if (self.bin / place).is_file():
                return self.bin / place
        raise Skip(f"{name} is not in {self.bin}; build it, or name it to tools/bundle.sh")

    def left(self):
        """Seconds of this stage."""
        return max(0.0, self.stage_end - time.monotonic())

    def run(self, command, seconds=None, env=None, grace=None):
        """Runs a program; what it prints goes to the log, too. After `seconds`, or with the stage's time, it is killed;
        `grace`: it gets Ctrl-C first, and so many seconds more. Thread-safe."""
        command = [str(part) for part in command]
        start, limit = time.monotonic(), min(seconds or self.left(), self.left())
        with tempfile.TemporaryFile("w+", errors="replace") as text:
            run = subprocess.Popen(command, stdout=text, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                   env={**self.environment, **(env or {})}, start_new_session=True)
            try:
                status = wait_for(run, limit, grace)
            except BaseException:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
                raise
            text.seek(0)
            done = Done(status, text.read(), time.monotonic() - start)
        shown = done.out
        if len(shown) > LOG_CHARACTERS:
            shown = f"{shown[:LOG_CHARACTERS // 2]}\n[…]\n{shown[-LOG_CHARACTERS // 2:]}"
        ended = "killed at its time" if status is None else f"exit status {status}"
        with self.writing:
            self.log.write(f"\n$ {shlex.join(command)}\n{shown.rstrip()}\n[{ended}, {done.seconds:.1f} s]\n")
            self.log.flush()
        return done

    def checked(self, command, **keywords):
        done = self.run(command, **keywords)
        if done.status != 0:
            how = f"ran past its {done.seconds:.0f} s" if done.status is None else f"exit status {done.status}"
            raise Failed(f"{pathlib.Path(command[0]).name}: {how}: {done.last_line()}", done.out)
        return done

    def peer(self):
        """(python, device) of the PyTorch that is beside; or None and the reason."""
        if self.a.peer_python == "none":
            self._peer = None, "--peer-python none"
        if self._peer is None:
            code = "import json, torch, transformers as t; " \
                   "print(json.dumps([torch.__version__, t.__version__, torch.cuda.is_available()]))"
            done = self.run([self.a.peer_python, "-c", code])
            lines = [line for line in done.out.splitlines() if line.startswith("[")]
            if done.status or not lines:
                self._peer = None, f"{self.a.peer_python}: {done.last_line()}"
            else:
                torch, transformers, gpu = json.loads(lines[-1])
                self.say(torch=torch, transformers=transformers, gpu=gpu)
                if gpu or self.emulated:
                    self._peer = (self.a.peer_python, "cpu" if self.emulated else "cuda"), ""
                else:
                    self._peer = None, "PyTorch sees no GPU"
        return self._peer

    def gpu(self):
        """What nvidia-smi says, as texts; nothing on an emulated GPU."""
        if self.emulated:
            return {}
        done = self.run(["nvidia-smi", f"--query-gpu={GPU_FACTS}", "--format=csv,noheader,nounits"], seconds=30)
        values = done.out.splitlines()[0].split(", ") if done.status == 0 and done.out.strip() else []
        return dict(zip(GPU_FACTS.split(","), values))

    def free_mib(self):
        """Of the GPU's memory: asked for by itself, for one name that a driver does not know spoils all others."""
        done = self.run(["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"], seconds=30)
        return int(done.out.split()[0])

    # Results.

    def say(self, **line):
        with self.writing:
            self.results.write(json.dumps({"stage": self.stage, **line}) + "\n")
            self.results.flush()

    def figure(self, name, value, beside="", ratio=None, at_least=None, at_most=None, **more):
        """A line of the table. `value` and `beside` (the limit or the peer) are texts with units; value None: not
        measured, with the reason in `beside`."""
        wanted = at_least if at_least is not None else at_most
        reached = None
        if ratio is not None and wanted is not None:
            reached = ratio >= wanted if at_least is not None else ratio <= wanted
        line = {"figure": name, "value": value, "beside": beside, "ratio": ratio, "at_least": at_least,
                "at_most": at_most, "reached": reached, **more}
        self.found.append({"stage": self.stage, **line})
        self.say(**line)
        return reached

    def keep(self, file, name):
        """A trace, packed, among the results; the original goes."""
        if file.exists():
            with open(file, "rb") as whole, gzip.open(self.out / f"{name}.json.gz", "wb", 6) as packed:
                shutil.copyfileobj(whole, packed)
            file.unlink()

    def machine(self):
        self.run(["nvidia-smi", "-q"], seconds=30) if not self.emulated else None
        self.run([self.find("spillway"), "doctor", self.work, "--no-probe"], seconds=60)
        cpu = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
        memory = memory_info()
        print(f"memory: {memory['MemAvailable'] / GIB:.1f} GiB available of {memory['MemTotal'] / GIB:.1f}; "
              f"{self.work}: {shutil.disk_usage(self.work).free / GIB:.1f} GiB free", flush=True)
        self.say(machine=platform.machine(), cpu=cpu, cores=len(os.sched_getaffinity(0)), kernel=platform.release(),
                 memory_bytes=memory["MemTotal"], memory_available_bytes=memory["MemAvailable"],
                 disk_free_bytes=shutil.disk_usage(self.work).free, commit=commit_of(self.a), arguments=sys.argv[1:],
                 python=platform.python_version(), emulated=self.emulated, tiny=self.tiny, gpu=self.gpu(),
                 library_path=self.environment.get("LD_LIBRARY_PATH"))


def wait_for(run, limit, grace):
    """The exit status; None: it had to be killed."""
    for seconds, signal_number in ((limit, signal.SIGINT), (grace, signal.SIGKILL)) if grace else (
            (limit, signal.SIGKILL),):
        try:
            return run.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal_number)
    run.wait()
    return None


def memory_info():
    """/proc/meminfo in bytes. A virtual machine's may begin small and grow as it is used."""
    lines = (line.split() for line in pathlib.Path("/proc/meminfo").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines}


def cublas_of(folder):
    """The cuBLASLt that the plugin asks for, with its version; None where there is no plugin."""
    for place in ("../lib", "tools/models"):
        plugin = folder / place / "libspillway_models_cuda.so"
        if plugin.is_file():
            found = re.search(rb"libcublasLt\.so\.\d+", plugin.read_bytes())
            return found.group().decode() if found else None
    return None


def folder_of_cublas(library, python):
    """Where that library of PyTorch's lies, for machines without one of the toolkit's; None: it is not needed."""
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    if library is None or library in known or pathlib.Path("/usr/local/cuda/lib64", library).exists():
        return None
    prefix = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True,
                            check=False).stdout.strip()
    files = sorted(pathlib.Path(prefix or "/nowhere").glob(f"lib/python*/site-packages/nvidia/*/lib/{library}"))
    return str(files[-1].parent) if files else None


def commit_of(a):
    """Of what is measured: a bundle carries it in a file, a build directory's sources lie around it."""
    file = a.bin.resolve().parent / "commit"
    if file.is_file():
        return file.read_text().strip()
    done = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"],
                          capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"
