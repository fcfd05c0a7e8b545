"""Several processes with one optimizer, each of which has a part of the states: Shared; Alone is one process.

    step()   gradients   the mean over ranks, in every rank's .grad, unless DistributedDataParallel has made it
             the norm    of each rank's part, and from these of all; whatever is wrong on one rank, all say
             the update  of each rank's part, and its commit
             weights     each part from the rank that has updated it, to all

A step begins with what no rank passes before all have come to it. So every rank has committed the step before, when
one begins to write, and ranks of a crash are one commit apart at most. A store has its last two: the newest that all
have is gone on from. Numbers of steps alone do not tell commits apart, for load_state_dict() commits any step, and
another run has the same ones: each says by a token of which change of which run it is (kept_groups.py).

It goes through torch.distributed, over a group of Gloo's that is the optimizer's alone.
"""
import logging
import os
import pathlib
import secrets
import tempfile
import weakref

import torch

from .. import log
from ..library import Error
from ..ranks import Agreement, Ranks, own_group, processes, why_of
from . import kept_groups
from .layout import part_of
from .streaming import refuse_sparse
from .tensor_carrier import CPU, rows

BUCKET = 4 << 20     # elements that travel at once
PATIENCE = 30 * 60   # seconds that a rank is waited for, torch.distributed's own
STORE = "spillway.store"


class Alone:
    """One process. Of Shared it has the calls, which have nothing to do."""

    rank, count = 0, 1

    def agree(self, work):
        """What `work` returns on each rank, by rank. What it raises on one is raised on all."""
        return [work()]

    def place(self, path):
        """Of a path, what is this rank's."""
        return path

    def check_stores(self, paths):
        """That they are of as many ranks."""
        for path in map(pathlib.Path, paths):
            if any(path.glob(f"rank*/{STORE}")):
                raise Error("exists", f"{path}: has the states of several ranks, in rank0 and beside; start as many "
                                      "processes, or name another nvme_path")

    def check_snapshot(self, directory):
        """Before what there is ends in its favour."""

    def token(self):
        """Of a run that begins, or of states that become others: the same on all ranks."""
        return None

    def begin(self, layout):
        """Every rank has rank 0's weights."""

    def bring(self, layout, average):
        """Gradients, before a step; whether there is one."""
        return any(parameter.grad is not None for parameter in layout.parameters)

    def give(self, layout):
        """Weights, after a step."""

    def close(self):
        pass


class Shared(Agreement, Alone):
    """`group`: of torch.distributed; None: all processes. They make the same calls, in the same order."""

    def __init__(self, group):
        self._group, self._compared = own_group(group, PATIENCE), False
        self.rank, self.count = self._group.rank(), self._group.size()
        some = self.count < torch.distributed.get_world_size()
        self._roots = torch.distributed.get_process_group_ranks(group) if some else range(self.count)
        self._finalizer = weakref.finalize(self, _end, self._group, os.getpid())
        log.rank = self.rank

    def close(self):
        self._finalizer()

    def _call(self, name, *arguments, **options):
        try:
            return getattr(torch.distributed, name)(*arguments, group=self._group, **options)
        except RuntimeError as error:
            raise Error("io", f"optimizer: rank {self.rank}: {name} of torch.distributed over gloo: {why_of(error)}; "
                              "look at the other ranks and at the network, and start all ranks again") from None

    def each(self, value):
        """Every rank's, by rank: numbers, texts, lists of them."""
        found = [None] * self.count
        self._call("all_gather_object", found, value)
        return found

    def place(self, path):
        return os.path.join(path, f"rank{self.rank}")

    def check_stores(self, paths):
        if self.rank > 0:
            return
        for path in map(pathlib.Path, paths):
            others = {each.parent.name for each in path.glob(f"*/{STORE}")} - {f"rank{r}" for r in range(self.count)}
            if (path / STORE).exists() or any(name.startswith("rank") for name in others):
                raise Error("exists", f"{path}: has the states of another number of processes than {self.count}; start "
                                      "as many, or name another nvme_path; load_state_dict() carries states over")

    def check_snapshot(self, directory):
        if not os.path.isdir(directory):
            raise Error("not_found", f"{directory}: is not there; take what save() wrote on {self.count} ranks")

    # -- tensors --------------------------------------------------------------------------------------------------

    @staticmethod
    def _through(tensors, move, dtype=None):
        """`move` changes copies of them in CPU memory, many at a time; what it makes is written back."""
        bucket, size = [], 0

        def flush():
            if not bucket:
                return
            flat = torch.cat([piece.reshape(-1).to(CPU, dtype or piece.dtype) for piece in bucket])
            move(flat)
            at = 0
            for piece in bucket:
                piece.copy_(flat[at:at + piece.numel()].view(piece.shape))
                at += piece.numel()
            bucket.clear()

        for tensor in tensors:
            for first in range(0, tensor.numel(), BUCKET):
                count = min(BUCKET, tensor.numel() - first)
                if size + count > BUCKET:
                    flush()
                    size = 0
                bucket += rows(tensor, first, count) if tensor.dim() else [tensor.view(1)]
                size += count
        flush()

    def _parts(self, layout, rank):
        return [part_of(parameter.detach(), (bounds[rank], bounds[rank + 1]))
                for _, parameter, bounds in layout.everything if bounds[rank] < bounds[rank + 1]]

    def _from(self, rank, tensors):
        """Its values, in every rank's. They travel as bytes, since Gloo has not all types in every PyTorch."""
        self._through(tensors, lambda flat: self._call("broadcast", flat.view(torch.uint8), self._roots[rank]))

    def token(self):
        return self.agree(lambda: secrets.token_hex(16))[0]

    @torch.no_grad()
    def begin(self, layout):
        self._from(0, [parameter.detach() for _, parameter, _ in layout.everything])

    @torch.no_grad()
    def give(self, layout):
        for rank in range(self.count):
            self._from(rank, self._parts(layout, rank))

    @torch.no_grad()
    def bring(self, layout, average):
        """A parameter that has a gradient on one rank has one on all, of zeros where it was not used."""
        def found():
            for name, parameter, _ in layout.everything:
                if parameter.grad is not None:
                    refuse_sparse(name, parameter.grad)
            return [parameter.grad is not None for _, parameter, _ in layout.everything]

        brought = [any(of_ranks) for of_ranks in zip(*self.agree(found))]
        entries = [entry for entry, one in zip(layout.everything, brought) if one]
        for _, parameter, _ in entries:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if average:
            self._through([parameter.grad for _, parameter, _ in entries], self._mean, torch.float32)
        elif not self._compared:
            self._compare(entries)
            self._compared = True
        return bool(entries)

    def _mean(self, flat):
        self._call("all_reduce", flat)
        flat.div_(self.count)

    def _compare(self, entries):
        """That they are alike everywhere, as the caller says."""
        sums = torch.tensor([[value.sum(dtype=torch.float64), value.abs().sum(dtype=torch.float64)] for value in
                             (parameter.grad for _, parameter, _ in entries)], dtype=torch.float64).nan_to_num()
        low, high = sums.clone(), sums.clone()
        self._call("all_reduce", low, torch.distributed.ReduceOp.MIN)
        self._call("all_reduce", high, torch.distributed.ReduceOp.MAX)
        for (name, _, _), differs in zip(entries, (low != high).any(1).tolist()):
            if differs:
                raise Error("invalid_argument", f"{name}: its gradient differs between ranks, and "
                                                "average_gradients=False says that it does not; leave it out, or wrap "
                                                "the model in DistributedDataParallel")

    @torch.no_grad()
    def whole(self, layout, parts, keep, folder):
        """Of every parameter its values, fp32: `parts` has those of this rank's. None where `keep` is false. `folder`:
        they are in files there, which have no names."""
        found = []
        self.agree(lambda: found.extend(_empty(parameter.shape, folder) if keep else None
                                        for _, parameter, _ in layout.everything))
        mine = {id(parameter): part for parameter, part in zip(layout.parameters, parts)}
        for whole, (_, parameter, bounds) in zip(found, layout.everything):
            row = parameter.numel() // bounds[-1]
            for rank in range(self.count):
                first, count = bounds[rank] * row, (bounds[rank + 1] - bounds[rank]) * row
                if count:
                    part = mine[id(parameter)].reshape(-1) if rank == self.rank else torch.empty(count)
                    self._call("broadcast", part, self._roots[rank])
                    if keep:
                        whole.view(-1)[first:first + count] = part
        return found


def _empty(shape, folder):
    if folder is None:
        return torch.empty(shape)
    with tempfile.TemporaryDirectory(dir=folder) as room:
        return torch.from_file(os.path.join(room, "values"), shared=True, size=shape.numel()).view(shape)


def _end(group, process):
    if os.getpid() == process and torch.distributed.is_initialized():
        try:
            torch.distributed.destroy_process_group(group)
        except (RuntimeError, ValueError, AssertionError):  # the script has destroyed all groups
            pass


def shared_by(asked):
    """Alone, or Shared: `ranks` of an optimizer."""
    if asked is None:
        return Alone()
    if isinstance(asked, str):
        if asked != "auto":
            raise Error("invalid_argument", f"ranks: is '{asked}'; give \"auto\", a process group of "
                                            "torch.distributed, or None for this process alone")
        return Shared(None) if processes() > 1 else Alone()
    if isinstance(asked, Ranks):
        raise Error("invalid_argument", "ranks: an Engine takes a Ranks; give an optimizer the process group of "
                                        "torch.distributed")
    return Shared(asked) if asked.size() > 1 else Alone()


def renew(shared, states):
    """What they commit from here on is of a run of its own. Returns its token."""
    token = shared.token()
    if token is not None:
        states.set_blob(kept_groups.with_token(token, kept_groups.without_token(states.blob())))
    return token


def common_step(shared, states, reopen=None):
    """The states at the newest commit that all ranks have: who is ahead goes back. `reopen`: makes the states anew,
    once more; None: they are of snapshots, which are of one save() or none."""
    def commits():  # the newest first
        found = states.commits() if reopen else [(states.current_step, states.blob())]
        return [(step, kept_groups.token_of(kept)) for step, kept in found]

    if shared.count == 1:
        return states
    every = shared.agree(commits)
    common = next((one for one in every[0] if all(one in of_rank for of_rank in every)), None)
    if common is None:
        states.close()
        steps = ", ".join(str(of_rank[0][0]) for of_rank in every)
        raise Error("corrupt", f"optimizer: ranks have committed steps {steps}, which are not one run's; name the "
                               'right nvme_path, or start over with on_existing="replace"' if reopen else
                               f"optimizer: ranks have snapshots of steps {steps}, which are not one save's; take what "
                               "one save() has written on all ranks")
    if all(of_rank[0] == common for of_rank in every):
        return states
    step, ahead = common[0], every[shared.rank][0]

    def back():
        if ahead == common:
            return states
        states.close()
        states.roll_back()
        log.say(logging.WARNING, f"optimizer: rank {shared.rank} had committed step {ahead[0]}, which others had not; "
                                 f"all go on after step {step}")
        return reopen()

    made = []
    shared.agree(lambda: made.append(back()))
    return made[0]


def change(shared, states, end, work):
    """`work` changes the states of all ranks, or the optimizer ends on all of them, by `end`, with an error: where one
    has failed and another has not, there is no way on. Stores go back to the step that all had."""
    def at():
        return states.current_step, states.blob()

    before, done = at(), []
    try:
        shared.agree(lambda: done.append(work()))
    except Exception as error:
        changed = shared.agree(lambda: bool(done) or at() != before)
        if not any(changed) or shared.count == 1:
            raise
        why, anew = str(error), "make model and optimizer anew"
        end(f"optimizer: stopped after an earlier error ({why})")
        if changed[shared.rank] and states.paths:
            try:
                states.roll_back()
            except Error as more:
                log.say(logging.WARNING, f"optimizer: rank {shared.rank} stays a step ahead ({more})")
        way = 'with on_existing="resume"' if states.paths else "and load a checkpoint"
        raise Error(getattr(error, "code", "unexpected"), f"{why}; the optimizer has ended on all ranks" + (
            "" if anew in why else f": {anew}, {way}")) from error
