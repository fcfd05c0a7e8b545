"""What each process of ranks_test.py does: cases in turn, given as JSON, each with a folder of its own.

A case leaves `rank<r>.pt` there: what its steps said, and the weights.
"""
import datetime
import gc
import json
import os
import pathlib
import signal
import sys
import threading
import time
import weakref

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python"), str(ROOT / "tests/python")]

import torch  # noqa: E402
import torch.distributed as distributed  # noqa: E402

import spillway  # noqa: E402
from spillway import ranks as ranks_module  # noqa: E402
from spillway.deepspeed import checkpoints  # noqa: E402
from spillway.ranks import Ranks  # noqa: E402
from toy_model import VOCABULARY, model  # noqa: E402

RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
ROWS = 8  # of a step, on all ranks together


def network(strange=False):
    """`strange`: other values on every rank but the first."""
    made = model(seed=1 + strange * RANK)
    made.scale += strange * RANK
    for module in made.modules():
        if isinstance(module, torch.nn.Dropout):  # ranks draw numbers of their own
            module.p = 0
    return made


def batches(steps, rows=ROWS):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (rows, 16), generator=generator) for _ in range(steps)]


def config(folder, device="nvme", micro=2, rows=ROWS, **more):
    place = {"device": device}
    if device == "nvme":
        place["nvme_path"] = str(pathlib.Path(folder, "store"))
    return {"train_batch_size": rows, "train_micro_batch_size_per_gpu": micro, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"tile_elements": 4096, "device": "host", **more}}


def parts(batch, micro):
    """This rank's rows, a contiguous part of all, in micro-batches."""
    rows = len(batch) // COUNT
    return batch[RANK * rows:(RANK + 1) * rows].split(micro)


def mean(value):
    """Over ranks."""
    total = torch.tensor(value, dtype=torch.float64)
    if COUNT > 1:
        distributed.all_reduce(total)
    return total.item() / COUNT


def make_step(engine, way, micro_batches):
    """Returns the mean of this rank's losses."""
    if way == "train_batch":
        return engine.train_batch(list(micro_batches)).item(), engine.report
    losses, report = [], None
    for rows in micro_batches:
        loss = engine(rows)
        losses.append(loss.item())
        if way == "backward":
            engine.backward(loss)
            report = engine.step()
        else:
            loss.backward()
    return sum(losses) / len(losses), report or engine.step()


def note_pid(folder):
    beside = pathlib.Path(folder, f".pid{RANK}")
    beside.write_text(str(os.getpid()))
    beside.rename(pathlib.Path(folder, f"pid{RANK}"))


def note_step(folder, step, *values):
    if RANK == 0:
        with pathlib.Path(folder, "steps.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps([step, *values]) + "\n")


def wait_for(path):
    while not path.exists():
        time.sleep(0.05)


def train(folder, steps=20, way="backward", micro=2, device="nvme", rows=ROWS, harm=None, strange=False,
          noted=False, **more):
    """Goes on with the store that is there. `harm`: {"rank": …, "step": …, "how": "kill", "stop" or "leave"}. `noted`:
    each step is a line of steps.jsonl, and the last one waits for a file that is called "enough"."""
    folder = pathlib.Path(folder)
    if noted:
        note_pid(folder)
    patience = more.pop("patience", 60.0)
    ranks = Ranks(patience=patience) if COUNT > 1 else None
    there = any(folder.glob("store/**/spillway.store"))  # of any number of ranks
    with spillway.Engine(network(strange), config(folder, device, micro, rows, **more),
                         on_existing="resume" if there else "refuse", ranks=ranks) as engine:
        losses, norms, first = [], [], engine.current_step
        for step, batch in enumerate(batches(steps, rows)):
            if step < first:
                continue
            if harm and [harm["rank"], harm["step"]] == [RANK, step] and first == 0:
                if harm["how"] == "leave":
                    break
                os.kill(os.getpid(), signal.SIGKILL if harm["how"] == "kill" else signal.SIGSTOP)
            if noted and step + 1 == steps:
                wait_for(folder / "enough")
            loss, report = make_step(engine, way, parts(batch, micro))
            losses.append(mean(loss))
            norms.append(report.gradient_norm)
            if noted:
                note_step(folder, step, losses[-1], norms[-1])
        else:
            weights = engine.master_weights()
            torch.save({"losses": losses, "norms": norms, "first": first, "weights": weights,
                        "ranks": engine.ranks and [engine.ranks.rank, engine.ranks.count]},
                       folder / f"rank{RANK}.pt")
    if ranks is not None:
        ranks.close()


def missed(folder, **options):
    """Says what ends the training, and when."""
    begun = time.monotonic()
    try:
        train(folder, **options)
    except spillway.Error as error:
        pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps(
            {"message": str(error), "code": error.code, "seconds": time.monotonic() - begun}))
        os._exit(3)  # not after what the others have not come to


def files(folder):
    """Exports and snapshots, of ranks that the engine finds itself."""
    folder, said = pathlib.Path(folder), []
    engine = spillway.Engine(network(), config(folder, "cpu"))
    for batch in batches(2):
        make_step(engine, "backward", parts(batch, 2))
    engine.export(folder / "model")
    engine.save(folder / "snapshot")
    for call in (lambda: engine.export(folder / "model"), lambda: engine.save(folder / "snapshot")):
        try:
            call()
        except spillway.Error as error:
            said.append([error.code, str(error)])
    make_step(engine, "backward", parts(batches(3)[2], 2))
    engine.load_snapshot(folder / "snapshot")
    torch.save({"said": said, "weights": engine.master_weights(), "step": engine.current_step},
               folder / f"rank{RANK}.pt")
    # The process ends with the engine still open, and with the group destroyed.


def other_buffers(folder):
    """Of models that differ in what no plan counts."""
    made = network()
    made.register_buffer("extra", torch.zeros(1 + RANK))
    try:
        spillway.Engine(made, config(folder, "cpu"))
    except spillway.Error as error:
        pathlib.Path(folder, f"said{RANK}").write_text(str(error))
        return
    raise AssertionError("an engine was made")


def comm(folder):
    """Before, with and after the process group."""
    def refused():
        try:
            comm.all_reduce(torch.ones(1))
        except spillway.Error as error:
            return str(error)

    comm, said = spillway.comm, []
    said.append(refused())
    pathlib.Path(folder, f"here{RANK}").touch()
    wait_for(pathlib.Path(folder, f"here{1 - RANK}"))  # so that both begin within the timeout
    comm.init_distributed(timeout=datetime.timedelta(seconds=3))
    said += [comm.get_rank(), comm.get_world_size(), comm.get_global_rank(None, 1), comm.is_initialized()]
    begun = time.monotonic()
    try:
        if RANK == 0:
            comm.barrier()  # to which the other one does not come in time
        else:
            time.sleep(8)
    except RuntimeError:
        said.append(time.monotonic() - begun)
    comm.destroy_process_group()
    said += [refused(), comm.is_initialized()]
    pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps(said))


def planned_again(folder, elsewhere=False, **more):
    """A step that asks for more gradients than were planned, of an engine that keeps nothing on NVMe. `elsewhere`: the
    other ranks are on another host, which has not what rank 0 writes."""
    folder, read = pathlib.Path(folder), []
    is_dir, create = pathlib.Path.is_dir, spillway.Engine._create

    def created(self, on_existing, snapshot):
        read.append(snapshot)
        return create(self, on_existing, snapshot)

    spillway.Engine._create = created
    if elsewhere and RANK != 0:
        pathlib.Path.is_dir = lambda path: path.name != "snapshot" and is_dir(path)
    with spillway.Engine(network(), config(folder, "cpu", **more), ranks="auto") as engine:
        for step, batch in enumerate(batches(4)):
            micro_batches = parts(batch, 2)
            for rows in micro_batches:
                loss = engine(rows)
                engine.backward(loss, retain_graph=step == 2)
                if step == 2:
                    engine.backward(loss)
            engine.step()
        torch.save({"weights": engine.master_weights(), "read": read[1:]}, folder / f"rank{RANK}.pt")


class _Breaking:
    """A file whose `name`d call fails the second time."""

    def __init__(self, file, name):
        self._file, self._name, self._calls = file, name, 0

    def __getattr__(self, name):
        if name == self._name:
            self._calls += 1
            if self._calls == 2:
                raise OSError(5, "Input/output error")
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()


def same_files(folder):
    """To a host that does not see rank 0's; what fails on one of them is said on both, at the file that it is of."""
    folder, said = pathlib.Path(folder), []
    first, ranks, is_dir = folder / "first", Ranks(), pathlib.Path.is_dir
    if RANK == 0:
        first.mkdir()
        (first / "large").write_bytes(os.urandom(9 << 20))
        (first / "none").write_bytes(b"")
        (first / "small").write_bytes(b"small")
    pathlib.Path.is_dir = lambda path: (RANK == 0 or path != first) and is_dir(path)

    def cut(path, mode):
        os.truncate(path, 3)
        return open(path, mode)

    for number, (rank, opens) in enumerate(((None, None), (0, lambda *file: _Breaking(open(*file), "readinto")),
                                            (1, lambda *file: _Breaking(open(*file), "write")), (0, cut))):
        beside = folder / f"beside{number}"
        if RANK == 1:
            beside.mkdir()
        if RANK == rank:
            ranks_module.open = opens
        try:
            copy = ranks.same_files(first, beside)
            said.append([copy.parent.name, {file.name: file.read_bytes() == (first / file.name).read_bytes()
                                            for file in copy.iterdir()}])
        except Exception as error:
            said.append([getattr(error, "code", type(error).__name__), str(error)])
        vars(ranks_module).pop("open", None)
    pathlib.Path.is_dir = is_dir
    ranks.close()
    pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps(said))


def refused(folder):
    """Engines that are not made, for reasons that every rank has; what they leave open."""
    wrong = {**config(folder, "cpu"), "zero_optimization": {"stage": 7}}
    kept = []
    for options in ({"config": wrong}, {"config": config(folder, "cpu"), "on_existing": "perhaps"},
                    {"config": config(folder, "cpu"), "blocks": ["nowhere"]}):
        try:
            spillway.Engine(network(), **options)
        except Exception as error:
            kept.append(error)  # and with it the engine
            continue
        raise AssertionError(f"an engine was made of {options}")
    lanes = [thread.name for thread in threading.enumerate() if thread.name.startswith(("send", "receive"))]
    open_ones = [each for each in gc.get_objects() if isinstance(each, Ranks) and each._finalizer.alive]
    pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps([lanes, len(open_ones)]))


def forgotten(folder):
    """The garbage collector comes by in a send, and finds engines: one of the ranks that send, one with its own."""
    folder, found = pathlib.Path(folder), []
    ranks = Ranks()
    gc.disable()
    ended = []
    for asked in (ranks, "auto"):
        one = spillway.Engine(network(), config(folder, "cpu"), ranks=asked)
        make_step(one, "backward", parts(batches(1)[0], 2))
        one.itself = one  # which counting references does not end
        ended.append(one._finalizer)
    ended.append(one.ranks._finalizer)
    engine = spillway.Engine(network(), config(folder, "cpu"), ranks=ranks)
    start = ranks_module._Messages._put

    def collecting(self, name, *arguments):
        if name == "send" and not found:
            found.append(gc.collect())
        start(self, name, *arguments)

    del one
    assert all(each.alive for each in ended)
    ranks_module._Messages._put = collecting
    make_step(engine, "backward", parts(batches(1)[0], 2))
    assert found and not any(each.alive for each in ended)
    engine.close()
    ranks.close()


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self._rows = torch.cat(batches(4))

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def deepspeed(folder):
    """A loop that was written for DeepSpeed, cut in two by a checkpoint."""
    folder, comm = pathlib.Path(folder), spillway.comm
    engine, _, loader, _ = spillway.initialize(model=network(), config=config(folder, "cpu"), training_data=Rows())
    facts = [engine.global_rank, engine.world_size, comm.get_rank(), comm.get_world_size(), engine.train_batch_size(),
             len(loader), engine.gradient_accumulation_steps()]
    losses = []

    def run(made, steps):
        for batch in steps:
            for rows in parts(batch, 2):
                loss = made(rows)
                made.backward(loss)
                made.step()
            total = loss.detach().clone()
            comm.all_reduce(total)
            losses.append(total.item() / COUNT)

    run(engine, batches(4)[:2])
    engine.save_checkpoint(folder / "checkpoints", client_state={"epoch": 3})
    run(engine, batches(4)[2:])
    first = engine.master_weights()
    path, client = engine.load_checkpoint(folder / "checkpoints")
    run(engine, batches(4)[2:])
    engine.save_16bit_model(folder / "whole")
    cut = spillway.initialize(model=network(), config=config(folder, "cpu", sum_groups=4), training_data=Rows())[2]
    torch.save({"cut": list(cut), "facts": facts, "losses": losses, "client": client, "first": first,
                "samples": engine.global_samples, "weights": engine.master_weights(),
                "seen": torch.cat(list(loader))}, folder / f"rank{RANK}.pt")
    engine.destroy()


def frozen_network():
    made = network(strange=True)
    made.layers[1].requires_grad_(False)
    return made


def imported(folder, checkpoint, steps, rows, frozen=False):
    """Goes on with a checkpoint that DeepSpeed has saved; or says why not."""
    folder, made = pathlib.Path(folder), frozen_network() if frozen else network(strange=True)
    engine, *_ = spillway.initialize(model=made, config=config(folder, "cpu", 1, rows))
    try:
        engine.load_checkpoint(checkpoint)
    except spillway.Error as error:
        torch.save({"said": str(error), "left": os.listdir(checkpoint)}, folder / f"rank{RANK}.pt")
        engine.close()
        return
    first, weights, norms = engine.global_steps, engine.master_weights(), []
    for batch in batches(steps, rows)[first:]:
        norms.append(make_step(engine, "backward", parts(batch, 1))[1].gradient_norm)
    torch.save({"first": first, "loaded": weights, "norms": norms, "weights": engine.master_weights(),
                "left": os.listdir(checkpoint)}, folder / f"rank{RANK}.pt")
    engine.close()


def apart(folder):
    """Each rank has a directory of its own, and the first alone a checkpoint in it."""
    folder, said = pathlib.Path(folder), None
    engine, *_ = spillway.initialize(model=network(), config=config(folder, "cpu"))
    engine.save_checkpoint(folder / "rank0/saved", "global_step2")
    try:
        engine.load_checkpoint(folder / f"rank{RANK}/saved", "global_step2")
    except spillway.Error as error:
        said = str(error)
    torch.save({"said": said}, folder / f"rank{RANK}.pt")
    engine.close()


def works(rank, seconds=9):
    """A function that takes longer than patience on that rank, where the processor has something to do."""
    def work():
        end = time.monotonic() + (seconds if RANK == rank else 0)
        while time.monotonic() < end:
            sum(range(1000))

    return work


def at_work(folder):
    """What one rank does while the others wait for longer than their patience; and what stands still."""
    folder, ranks, said = pathlib.Path(folder), Ranks(patience=4), []
    ranks.together(works(0))
    ranks.agree(works(1))

    def imports(*_):
        works(0)()
        return {"step": 7}

    checkpoints._imported = imports
    with checkpoints.snapshot_of_all(ranks, folder, None, None, None, None) as (_, facts):
        said.append(facts)
    try:
        ranks.together(lambda: time.sleep(12) if RANK == 0 else None)
    except spillway.Error as error:
        said.append(str(error))
    ranks.close()
    pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps(said))


def main():
    cases = json.loads(sys.argv[1])
    if COUNT > 1 and cases[0]["case"] not in ("deepspeed", "comm"):  # which make their own
        distributed.init_process_group("gloo")
    for case in cases:
        {each.__name__: each for each in (train, missed, files, deepspeed, other_buffers, refused, forgotten, comm,
                                          imported, apart, planned_again, same_files,
                                          at_work)}[case.pop("case")](**case)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
