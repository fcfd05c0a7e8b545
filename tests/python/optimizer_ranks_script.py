"""What each process of optimizer_ranks_test.py does: cases in turn, given as JSON, each with a folder of its own."""
import copy
import json
import os
import pathlib
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python"), str(ROOT / "tests/python")]

import torch  # noqa: E402
import torch.distributed as distributed  # noqa: E402

import spillway  # noqa: E402
import toy_model  # noqa: E402
from ranks_script import COUNT, RANK, batches, mean, network, parts  # noqa: E402
from spillway import log  # noqa: E402
from spillway.optimizers.offloaded_states import OffloadedStates  # noqa: E402

CLIP = 0.5


def optimizer_of(model, folder, states="cpu", kind="AdamW", **more):
    where = {"states": states, **({"nvme_path": str(pathlib.Path(folder, "store"))} if states == "nvme" else {})}
    options = {"lr": 1e-3, "weight_decay": 0.01} if kind == "AdamW" else {"lr": 1e-2, "momentum": 0.9}
    return getattr(spillway, kind)(model.parameters(), **options, **where, max_grad_norm=CLIP, **more)


def make_step(model, optimizer, batch, micro=2):
    """The mean of all ranks' losses."""
    rows, losses = parts(batch, micro), []
    optimizer.zero_grad()
    for one in rows:
        loss = model(one) / len(rows)
        loss.backward()
        losses.append(loss.item())
    optimizer.step()
    return mean(sum(losses))


def weights_of(model):
    return {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}


def keep(folder, **values):
    torch.save(values, pathlib.Path(folder, f"rank{RANK}.pt"))


def train(folder, steps=6, states="cpu", ddp=False, kind="AdamW", dtype="float32", die=None, **more):
    """Goes on with the store that is there. `die`: [rank, step], between the other ranks' commit and its own."""
    there = any(pathlib.Path(folder).glob("store/**/spillway.store"))
    model = network().to(getattr(torch, dtype))
    if not there:
        with torch.no_grad():  # rank 0's count
            model.head.weight += RANK
    optimizer = optimizer_of(model, folder, states, kind, on_existing="resume" if there else "refuse", **more)
    wrapped = torch.nn.parallel.DistributedDataParallel(model) if ddp else model
    first, losses, norms = optimizer.current_step, [], []
    plain = OffloadedStates.make_step
    for step, batch in enumerate(batches(steps)):
        if step < first:
            continue
        if die == [RANK, step + 1]:
            OffloadedStates.make_step = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        losses.append(make_step(wrapped, optimizer, batch))
        norms.append(optimizer.report.gradient_norm)
    OffloadedStates.make_step = plain
    host = sum(size for tier, _, size in optimizer.ledger() if tier == "host")
    keep(folder, losses=losses, norms=norms, weights=weights_of(model), first=first, host=host,
         step=optimizer.current_step)
    optimizer.close()


def broken(folder, **options):
    """One that others leave says so; which step it has is seen in its store."""
    try:
        train(folder, **options)
    except spillway.Error as error:
        pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps([error.code, str(error)]))
        os._exit(3)


def cut(folder, steps, loads):
    """Rank 1 is killed after so many steps, between the other's commit and its own: of the states of step `loads`, with
    other values; None: of another run's first."""
    model, whole = network(), None
    optimizer = optimizer_of(model, folder, "nvme")
    for step, batch in enumerate(batches(6)[:steps], 1):
        make_step(model, optimizer, batch)
        if step == loads:
            optimizer.consolidate_state_dict(None)
            whole = copy.deepcopy(optimizer.state_dict())
            for entry in whole["state"].values():
                entry["exp_avg"].zero_()
    if RANK == 1:
        OffloadedStates.import_state = OffloadedStates.import_weights = lambda *_, **__: os.kill(os.getpid(),
                                                                                                 signal.SIGKILL)
    try:
        if loads is None:
            optimizer.close()
            model = network()
            make_step(model, optimizer_of(model, folder, "nvme", on_existing="replace"), batches(1)[0])
        else:
            optimizer.load_state_dict(whole)
    except spillway.Error:
        os._exit(3)


def reopened(folder):
    try:
        optimizer_of(network(), folder, "nvme", on_existing="resume")
    except spillway.Error as error:
        pathlib.Path(folder, f"rank{RANK}.json").write_text(json.dumps([error.code, str(error)]))


def carried(folder):
    """States to one process and back: as a state_dict, and as a snapshot."""
    folder, data = pathlib.Path(folder), batches(6)
    model = network()
    optimizer = optimizer_of(model, folder)
    before = optimizer.state_dict()  # there are no states yet
    for batch in data[:3]:
        make_step(model, optimizer, batch)
    optimizer.save(folder / "snapshot")
    said = []
    if RANK == 0:
        try:
            optimizer.state_dict()
        except spillway.Error as error:
            said.append(str(error))
    optimizer.consolidate_state_dict()
    weights = weights_of(model)
    if RANK == 0:
        torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, folder / "whole.pt")
    distributed.barrier()
    for batch in data[3:]:
        make_step(model, optimizer, batch)
    end = weights_of(model)

    again = network()  # after a state_dict
    whole = torch.load(folder / "whole.pt")
    again.load_state_dict(whole["model"])
    other = optimizer_of(again, folder)
    other.load_state_dict(whole["optimizer"])
    for batch in data[3:]:
        make_step(again, other, batch)

    third = network()  # after a snapshot
    last = optimizer_of(third, folder)
    last.load(folder / "snapshot")
    middle = weights_of(third)
    for batch in data[3:]:
        make_step(third, last, batch)
    # Of two saves, at one step.
    last.save(folder / "other")
    last.consolidate_state_dict(None)
    changed = copy.deepcopy(last.state_dict())
    changed["state"][0]["exp_avg"].zero_()
    last.load_state_dict(changed)
    last.save(folder / "other" if RANK == 0 else folder / "another", replace=True)
    try:
        last.load(folder / "other")
    except spillway.Error as error:
        said.append(str(error))
    keep(folder, before=len(before["state"]), said=said, weights=weights, middle=middle, end=end,
         again=weights_of(again), third=weights_of(third), steps=[optimizer.current_step, other.current_step,
                                                                  last.current_step])


def uneven(folder):
    """Each rank goes through an expert of its own."""
    torch.manual_seed(1)
    model = toy_model.Experts()
    optimizer = optimizer_of(model, folder)
    for batch in batches(3):
        optimizer.zero_grad()
        mine, = parts(batch, len(batch))
        (model(mine, [RANK], True)).backward()
        optimizer.step()
    keep(folder, weights=weights_of(model), norm=optimizer.report.gradient_norm)


def refused(folder):
    said = []

    def note(call, *arguments, **options):
        try:
            call(*arguments, **options)
        except Exception as error:
            said.append([getattr(error, "code", type(error).__name__), str(error)])

    model = network()
    note(optimizer_of, model, folder, stream_gradients=True)
    note(optimizer_of, model, folder, ranks="perhaps")
    note(spillway.AdamW, [torch.nn.Parameter(torch.ones(1))])
    note(optimizer_of, model, folder, states="nvme", on_existing="resume")
    not_alike = optimizer_of(model, folder, average_gradients=False)
    note(make_step, model, not_alike, batches(1)[0])
    optimizer = optimizer_of(model, folder)
    before = weights_of(model)
    optimizer.zero_grad()
    (model(batches(1)[0]) * (float("nan") if RANK == 1 else 1)).backward()
    note(optimizer.step)
    optimizer.blob = b"" if RANK == 0 else "text"
    note(optimizer.step)
    optimizer.blob = b""
    if RANK == 1:
        optimizer.param_groups[0]["lr"] = "fast"
    note(make_step, model, optimizer, batches(1)[0])
    optimizer.param_groups[0]["lr"] = 1e-3
    same = all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    make_step(model, optimizer, batches(1)[0])
    keep(folder, said=said, same=same, step=optimizer.current_step)


def on_rank_1(name, error):
    """From here on OffloadedStates' function fails there."""
    if RANK == 1:
        def fails(*_, **__):
            raise error

        setattr(OffloadedStates, name, fails)


def parted(folder, states="cpu"):
    """What fails on rank 1 alone while the others go on. `states`: where."""
    said, plain = [], {name: getattr(OffloadedStates, name) for name in ("make_step", "export_state")}

    def note(call, *arguments):
        try:
            call(*arguments)
            said.append(None)
        except Exception as error:
            said.append([getattr(error, "code", type(error).__name__), str(error)])

    model, data = network(), batches(6)
    optimizer = optimizer_of(model, folder, states)
    for batch in data[:2]:
        make_step(model, optimizer, batch)
    note(optimizer.consolidate_state_dict, 5 if RANK == 1 else 0)
    on_rank_1("export_state", OSError(28, "No space left on device"))
    note(optimizer.consolidate_state_dict, None)
    OffloadedStates.export_state = plain["export_state"]
    optimizer.consolidate_state_dict(None)
    whole = optimizer.state_dict()
    if RANK == 1:
        for entry in whole["state"].values():
            del entry["exp_avg"]
    note(optimizer.load_state_dict, whole)
    on_rank_1("make_step", spillway.Error("io", "drive: does not answer; look at it"))
    note(make_step, model, optimizer, data[2])
    OffloadedStates.make_step = plain["make_step"]
    note(lambda: optimizer.current_step)
    note(optimizer.step)
    optimizer.close()
    weights, step, heard = None, None, []
    if states == "nvme":
        log.say = lambda _, message: heard.append(message)
        model = network()
        optimizer = optimizer_of(model, folder, states, on_existing="resume")
        step = optimizer.current_step
        for batch in data[2:]:
            make_step(model, optimizer, batch)
        weights = weights_of(model)
        optimizer.close()
    keep(folder, said=said, weights=weights, step=step, back=[line for line in heard if "had committed step" in line])


def main():
    cases = json.loads(sys.argv[1])
    if COUNT > 1:
        distributed.init_process_group("gloo")
    for case in cases:
        {"train": train, "broken": broken, "cut": cut, "reopened": reopened, "carried": carried, "uneven": uneven,
         "refused": refused, "parted": parted}[case.pop("case")](**case)


if __name__ == "__main__":
    main()
