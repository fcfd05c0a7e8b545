"""Which rows of a data set each rank trains, and in which micro-batch: GlobalBatchSampler."""
import math

import torch

from . import log
from .library import Error
from .ranks import processes


class GlobalBatchSampler(torch.utils.data.Sampler):
    """For DataLoader(batch_sampler=…): every step has the same rows, in the same micro-batches, on any number of ranks.

    A step's rows are the next `global_batch_size` of the epoch's order. Rank r of R has the r-th contiguous part of
    them, in lists of `batch_size` indices, as one process would go through them:

        rows of a step   0 1 2 3 4 5 6 7          global_batch_size=8, batch_size=2
        one process      [0 1] [2 3] [4 5] [6 7]
        two ranks        rank 0: [0 1] [2 3]      rank 1: [4 5] [6 7]

    `data_source`: what has a length, the data set. `global_batch_size`: rows of a step on all ranks, a configuration's
      train_batch_size. `batch_size`: rows of a micro-batch, its train_micro_batch_size_per_gpu.
    `shuffle`: the order is drawn by `seed` and the epoch, as torch's DistributedSampler draws it.
    `drop_last`: rows that do not fill a step are left out; else the epoch's first rows fill it, once more.
    `num_replicas`, `rank`: the default are torch.distributed's, of all processes; without a group, one.

    Its length, and that of a loader, is in micro-batches of this rank in a whole epoch. Errors: spillway.Error.
    """

    def __init__(self, data_source, global_batch_size, batch_size, *, shuffle=True, seed=0, drop_last=False,
                 num_replicas=None, rank=None):
        if (num_replicas is None) != (rank is None):
            raise Error("invalid_argument", "GlobalBatchSampler: takes num_replicas and rank together; give both, or "
                                            "none")
        if rank is None:
            num_replicas = processes()
            rank = torch.distributed.get_rank() if num_replicas > 1 else 0
        if not 0 <= rank < num_replicas:
            raise Error("invalid_argument", f"GlobalBatchSampler: rank {rank} of {num_replicas}; ranks count from 0")
        if batch_size < 1 or global_batch_size < 1 or global_batch_size % (batch_size * num_replicas):
            raise Error("invalid_argument", f"GlobalBatchSampler: a step of {global_batch_size} rows is not cut into "
                                            f"micro-batches of {batch_size} on {num_replicas} ranks; take a multiple "
                                            f"of {max(1, batch_size) * num_replicas}")
        self.data_source, self.global_batch_size, self.batch_size = data_source, global_batch_size, batch_size
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.num_replicas, self.rank = num_replicas, rank
        self.epoch, self._first = 0, 0

    @property
    def sampler(self):
        """Where loops look for set_epoch(), as of a torch.utils.data.BatchSampler."""
        return self

    @property
    def steps_per_epoch(self):
        steps = len(self.data_source) / self.global_batch_size
        return math.floor(steps) if self.drop_last else math.ceil(steps)

    def set_epoch(self, epoch):
        """Of the next iteration, which begins with the epoch's first step; a new epoch has another order. The epoch
        that set_step() has chosen goes on where that says."""
        if epoch != self.epoch:
            self.epoch, self._first = epoch, 0

    def set_step(self, step):
        """The next iteration goes on after so many steps, counted from epoch 0: engine.current_step after a resume. It
        also sets `epoch`."""
        if self.steps_per_epoch == 0:
            raise Error("invalid_argument", f"GlobalBatchSampler: {len(self.data_source)} rows are no step of "
                                            f"{self.global_batch_size}; give more, or drop_last=False")
        self.epoch, self._first = divmod(step, self.steps_per_epoch)

    def order(self):
        """Of the epoch: row numbers, a tensor with as many as its steps have."""
        rows = len(self.data_source)
        order = torch.arange(rows)
        if self.shuffle:
            order = torch.randperm(rows, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        wanted = self.steps_per_epoch * self.global_batch_size
        return order.repeat(math.ceil(wanted / rows))[:wanted] if rows else order

    def __iter__(self):
        first, self._first = self._first, 0
        mine = self.global_batch_size // self.num_replicas
        for step in self.order().view(-1, self.num_replicas, mine)[first:, self.rank]:
            yield from (rows.tolist() for rows in step.split(self.batch_size))

    def __len__(self):
        return self.steps_per_epoch * self.global_batch_size // self.num_replicas // self.batch_size


def words_without_promise(loader):
    """What rank 0 says of a training with sum_groups, once, where a loader does not cut rows as GlobalBatchSampler;
    else None."""
    if log.rank > 0 or isinstance(getattr(loader, "batch_sampler", None), GlobalBatchSampler):
        return None
    return (f"spillway.sum_groups: the {type(loader).__name__} does not cut rows by "
            "spillway.GlobalBatchSampler, so training is right, but the same bits on any number of "
            "ranks are not promised; DataLoader(batch_sampler=spillway.GlobalBatchSampler(…)) "
            "promises them")
