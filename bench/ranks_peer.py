#!/usr/bin/env python3
"""Two ranks of Spillway beside two of DeepSpeed's ZeRO-3, over Gloo on a CPU: the same model, weights, rows and
ds_config.json in fp32, AdamW, clipped to 1; and beside one process of PyTorch on all rows.

With --peer-python (an environment with deepspeed and torch) DeepSpeed trains, too, and saves a checkpoint half-way,
with which 1, 2 and 3 ranks of Spillway go on. One JSON line a step with the loss of each program, then one with the
largest difference of each to DeepSpeed, or without it to PyTorch. Exit status 1 where one is larger than --within.
"""
import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
RATE = 3e-3
ROWS, MICRO, LENGTH = 12, 2, 16  # rows of a step, on all ranks together, which 1, 2 and 3 ranks divide


def configuration(ranks, zero=True):
    """Of both programs; DeepSpeed ignores the section that is Spillway's."""
    place = {"device": "cpu"}
    return {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": ROWS // MICRO // ranks, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8,
                                                      "weight_decay": 0.01, "torch_adam": True}},
            "zero_optimization": {"stage": 3, **({"offload_param": place, "offload_optimizer": place} if zero else {})},
            "spillway": {"device": "host"}}


def network():
    import torch
    from toy_model import model
    made = model(width=64, layers=4)
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):  # each process draws numbers of its own
            module.p = 0
    return made


def batches(steps):
    import torch
    from toy_model import VOCABULARY
    generator = torch.Generator().manual_seed(5)
    two = [torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2)]
    return [two[step % 2] for step in range(steps)]


def pytorch(a):
    import torch
    made = network()
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE, weight_decay=0.01)
    for batch in batches(a.steps):
        loss = made(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def ranks(a):
    """Of DeepSpeed and of Spillway by the same lines, but for the name of the package."""
    import torch
    if a.role == "deepspeed":
        import deepspeed
    else:
        import spillway as deepspeed
    deepspeed.init_distributed(dist_backend="gloo")
    rank, count = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
    made = network()
    engine, *_ = deepspeed.initialize(model=made, model_parameters=made.parameters(),
                                      config=configuration(count, zero=a.role == "spillway"))
    first = 0
    if a.load:
        engine.load_checkpoint(a.load)
        first = engine.global_steps
    for step, batch in enumerate(batches(a.steps)):
        if step < first:
            continue
        total = torch.zeros(())
        for rows in batch.chunk(count)[rank].split(MICRO):
            loss = engine(rows)
            engine.backward(loss)
            engine.step()
            total += loss.detach() * MICRO / ROWS
        deepspeed.comm.all_reduce(total)
        yield total.item()
        if a.save and step + 1 == a.steps // 2:
            engine.save_checkpoint(a.save)
    engine.destroy()
    if torch.distributed.is_initialized():  # DeepSpeed's destroy() has ended it
        torch.distributed.destroy_process_group()


def worker(a):
    sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]
    import torch
    losses = list(pytorch(a) if a.role == "pytorch" else ranks(a))
    if int(os.environ.get("RANK", 0)) == 0:
        pathlib.Path(a.out).write_text(json.dumps({"losses": losses, "torch": torch.__version__}))


def launch(a, python, role, count, **options):
    """Losses of so many processes."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    out = a.folder / f"{role}{count}.json"
    command = [python, __file__, "--role", role, "--out", out, "--steps", a.steps,
               *(word for name, value in options.items() for word in (f"--{name}", value))]
    shared = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(port), "WORLD_SIZE": str(count)}
    started = [subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                text=True, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
               for rank in range(count)]
    said = [process.communicate()[0] for process in started]
    for rank, process in enumerate(started):
        if process.returncode:
            sys.exit(f"{role}, rank {rank} of {count}: ended with {process.returncode}\n{said[rank][-3000:]}")
    print(f"ranks_peer: {role} with {count} has ended", file=sys.stderr, flush=True)
    return json.loads(out.read_text())["losses"]


def compare(a):
    found = {"pytorch": launch(a, sys.executable, "pytorch", 1),
             "spillway": launch(a, a.peer_python or sys.executable, "spillway", 2)}
    if a.peer_python:
        saved = a.folder / "checkpoint"
        found["deepspeed"] = launch(a, a.peer_python, "deepspeed", 2, save=saved)
        half = [None] * (a.steps // 2)  # which DeepSpeed has trained
        for count in (1, 2, 3):
            found[f"spillway_{count}_from_deepspeed_2"] = half + launch(a, a.peer_python, "spillway", count, load=saved)
    for step in range(a.steps):
        print(json.dumps({"bench": "ranks_peer", "step": step + 1,
                          **{name: losses[step] for name, losses in found.items()}}), flush=True)
    last = found["deepspeed" if a.peer_python else "pytorch"]
    worst = {name: max(abs(one - other) for one, other in zip(losses, last) if one is not None)
             for name, losses in found.items()}
    print(json.dumps({"bench": "ranks_peer", "steps": a.steps, "against": "deepspeed" if a.peer_python else "pytorch",
                      "largest_difference": worst}), flush=True)
    return max(worst.values()) > a.within


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", help="the python of an environment with deepspeed")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--within", type=float, default=1e-5, help="of a loss of about 4.5: sums in another order")
    parser.add_argument("--tiny", action="store_true", help="4 steps; what the tests run")
    for name in ("role", "out", "save", "load"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.role:
        return worker(a)
    a.steps = 4 if a.tiny else a.steps
    print(f"ranks_peer: {a.steps} steps of {ROWS} rows of {LENGTH} tokens", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="spillway-ranks-peer-") as folder:
        a.folder = pathlib.Path(folder)
        return compare(a)


if __name__ == "__main__":
    sys.exit(main())
