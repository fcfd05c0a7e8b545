"""deepspeed.comm for the one process that trains: each operation among one rank, which leaves tensors as they are.

Where a script has made torch.distributed's process group itself, that is of one rank, too: more are refused, as
initialize() refuses them.
"""
import os

import torch
import torch.distributed

from ..library import Error

ReduceOp = getattr(torch.distributed, "ReduceOp", None)
_begun = False


class _Done:
    """What async_op=True gives."""

    def wait(self, *_):
        return True

    def is_completed(self):
        return True


def refuse_others(call, world_size=-1):
    processes = max(world_size, int(os.environ.get("WORLD_SIZE", 1)))
    if processes > 1:
        raise Error("unsupported", f"{call}: WORLD_SIZE {processes}: a model is trained by one process, on one GPU; "
                                   "start it with python")


def init_distributed(*_, world_size=-1, **__):
    """No process group is made: torch.distributed itself is left away, or this module taken in its place."""
    global _begun  # which is_initialized() says, as DeepSpeed's does
    refuse_others("init_distributed", world_size)
    _begun = True


def is_initialized():
    return _begun


def is_available():
    return True


def destroy_process_group(group=None):
    global _begun
    _begun = False


def get_rank(group=None):
    return 0


get_local_rank = get_rank


def get_world_size(group=None):
    return 1


def get_global_rank(group=None, group_rank=0):
    return group_rank


def get_world_group():
    return None


def new_group(ranks=None, *_, **__):
    if ranks is not None and [*ranks] != [0]:
        raise Error("unsupported", f"new_group: of ranks {[*ranks]}, and there is rank 0 alone")


def _refuse_rank(call, rank):
    if rank not in (0, None):
        raise Error("unsupported", f"{call}: names rank {rank}, and there is rank 0 alone")


def _done(async_op):
    return _Done() if async_op else None


def barrier(*_, async_op=False, **__):
    return _done(async_op)


monitored_barrier = barrier


def broadcast(tensor, src=0, group=None, async_op=False, **_):
    _refuse_rank("broadcast", src)
    return _done(async_op)


def broadcast_object_list(object_list, src=0, group=None, device=None):
    _refuse_rank("broadcast_object_list", src)


def all_reduce(tensor, op=None, group=None, async_op=False, **_):
    """Of one rank sum, mean, least and most are the tensor itself."""
    return _done(async_op)


def reduce(tensor, dst=0, op=None, group=None, async_op=False, **_):
    _refuse_rank("reduce", dst)
    return _done(async_op)


def all_gather(tensor_list, tensor, group=None, async_op=False, **_):
    tensor_list[0].copy_(tensor)
    return _done(async_op)


def all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False, **_):
    output_tensor.view(-1).copy_(tensor.reshape(-1))
    return _done(async_op)


def all_gather_object(object_list, obj, group=None, **_):
    object_list[0] = obj


def reduce_scatter_tensor(output_tensor, tensor, op=None, group=None, async_op=False, **_):
    output_tensor.view(-1).copy_(tensor.reshape(-1))
    return _done(async_op)


def gather(tensor, gather_list=None, dst=0, group=None, async_op=False, **_):
    _refuse_rank("gather", dst)
    if gather_list:
        gather_list[0].copy_(tensor)
    return _done(async_op)


def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False, **_):
    _refuse_rank("scatter", src)
    if scatter_list:
        tensor.copy_(scatter_list[0])
    return _done(async_op)


def send(tensor, dst, *_, **__):
    raise Error("unsupported", f"send: to rank {dst}, and there is rank 0 alone")


def recv(tensor, src=None, *_, **__):
    raise Error("unsupported", f"recv: from rank {src}, and there is rank 0 alone")
