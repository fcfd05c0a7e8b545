#!/usr/bin/env python3
"""Uses the installed Python package as its users do: the command `spillway`, `python -m spillway`, a model in PyTorch
that trains with weights and states on NVMe, goes on after a restart, and has the bits of a run in memory; a tensor in a
file and back by direct I/O, and that library by itself.

    tools/try_package.py [--spillway-first] [DIR]    DIR: for the store, and with room for it; the present one

Needs PyTorch, and nothing else of what Spillway is built with. `--spillway-first` imports it before PyTorch.
"""
import ctypes
import hashlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

FIRST = "--spillway-first" in sys.argv
if FIRST:
    import spillway
    spillway.library.library()  # its libraries come before PyTorch's
import torch  # noqa: E402
if not FIRST:
    import spillway  # noqa: E402

PLACE = next((argument for argument in sys.argv[1:] if not argument.startswith("--")), ".")
PROGRAM = pathlib.Path(sysconfig.get_path("scripts")) / "spillway"


def say(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 256)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(6))
        self.last = torch.nn.Linear(256, 16)

    def forward(self, x, y):
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(self.last(x), y)


def trained(folder, device, steps, on_existing="refuse"):
    """The loss of each step, and a hash of the weights afterwards."""
    torch.manual_seed(1)
    x, y = torch.randn(32, 64), torch.randn(32, 16)
    place = {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}
    engine = spillway.Engine(Model(), {
        "train_micro_batch_size_per_gpu": 32, "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
    }, on_existing=on_existing)
    losses = []
    while engine.current_step < steps:
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    weights = dict(engine.master_weights())
    engine.close()
    hashed = hashlib.sha256()
    for name in sorted(weights):
        hashed.update(bytes(weights[name].detach().cpu().contiguous().view(torch.uint8).flatten().tolist()))
    return losses, hashed.hexdigest()


def moved(path):
    """What is read of a tensor that was written, by which engine."""
    values, found = (spillway.io.empty(100_000, torch.float32) for _ in range(2))
    values.normal_()
    with spillway.io.File(path, create=True) as file, spillway.io.Queue() as queue:
        queue.write(file, 0, values).wait()
        queue.read(file, 0, found).wait()
        return torch.equal(values, found), queue.describe()


def main():
    package = pathlib.Path(spillway.__file__).parent
    if "SPILLWAY_LIBRARY" in os.environ:
        sys.exit("try_package.py: SPILLWAY_LIBRARY is set, so another library would be tried; unset it")
    print(f"package: {package}; Python {sys.version.split()[0]}, PyTorch {torch.__version__},",
          "imported after it" if FIRST else "imported before it")
    print(say(PROGRAM, "--version").splitlines()[0], "as a command,", end=" ")
    print(say(sys.executable, "-m", "spillway", "--version").splitlines()[0], "as a module")
    for option in ("--cmake-dir", "--pkgconfig-dir"):
        print(option, say(sys.executable, "-m", "spillway", option))
    print(say(PROGRAM, "plan", "--params", "7B").splitlines()[0])

    with tempfile.TemporaryDirectory(prefix="try-package-", dir=PLACE) as folder:
        folder = pathlib.Path(folder)
        first, _ = trained(folder / "nvme", "nvme", 3)
        more, on_nvme = trained(folder / "nvme", "nvme", 6, "resume")
        losses, in_memory = trained(None, "none", 6)
        same, engine = moved(folder / "values")
    print("losses:", " ".join(f"{loss:.4f}" for loss in losses))
    if first + more != losses or on_nvme != in_memory or not losses[-1] < losses[0]:
        sys.exit(f"try_package.py: on NVMe {first + more} {on_nvme}, in memory {losses} {in_memory}")
    print("the same bits on NVMe, over a restart, and in memory:", in_memory[:16])
    if not same:
        sys.exit(f"try_package.py: a tensor that {engine} wrote and read is another one")
    print("a tensor in a file and back:", engine)
    with open("/proc/self/maps", encoding="utf-8") as maps:
        loaded = {line.split()[-1] for line in maps if "libspillway" in line}
    if loaded != {str((package / "lib/libspillway.so.0").resolve())}:
        sys.exit(f"try_package.py: the library is {loaded}, and not the package's")
    alone = ctypes.CDLL(str(package / "lib/libspillway_io.so.0"))
    if not alone.spillway_io_queue_create or not (package / "lib/pkgconfig/spillway_io.pc").exists():
        sys.exit("try_package.py: the package has no libspillway_io")


main()
