"""deepspeed.comm. Of one process each operation is among one rank, and leaves tensors as they are; of several
(docs/ranks_pytorch.md) it is torch.distributed's, and an error where that has no process group: one rank's answer would
be a wrong one.
"""
import functools
import os

import torch
import torch.distributed

from ..library import Error

ReduceOp = getattr(torch.distributed, "ReduceOp", None)
_begun = False
_asked = 1  # processes that init_distributed() was told of


# Rank, number, rank and number on the host: of Open MPI's mpirun, and of MPICH's and its kin.
_LAUNCHERS = (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE"), ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


class _Done:
    """What async_op=True gives."""

    def wait(self, *_):
        return True

    def is_completed(self):
        return True


def several():
    """Whether there are other processes, and a group of all."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _processes():
    return max(_asked, int(os.environ.get("WORLD_SIZE") or 1))


def _need_group(call):
    distributed = torch.distributed
    if _processes() > 1 and not (distributed.is_available() and distributed.is_initialized()):
        raise Error("invalid_argument", f"{call}: WORLD_SIZE is {_processes()}, and torch.distributed has no process "
                                        "group; call init_distributed() first, and this before "
                                        "destroy_process_group()")


def _of_ranks(one_rank):
    """With several processes, torch.distributed's function of the name. DeepSpeed's have arguments for its log, too."""
    @functools.wraps(one_rank)
    def call(*arguments, prof=None, log_name=None, debug=None, **keywords):
        _need_group(one_rank.__name__)
        function = getattr(torch.distributed, one_rank.__name__) if several() else one_rank
        return function(*arguments, **keywords)
    return call


def _backend(asked):
    """With GPUs."""
    by_device = hasattr(torch.distributed.distributed_c10d, "BackendConfig")  # PyTorch 2's
    return asked or ("cpu:gloo,cuda:nccl" if by_device else "gloo")


def _discover(port):
    """What mpirun says of the processes that it started goes where torchrun says it, and torch.distributed looks."""
    rank, size, local_rank, local_size = next(
        (found for found in ([os.environ.get(name) for name in names] for names in _LAUNCHERS)
         if int(found[1] or 1) > 1), (None, 1, None, 1))
    if size == 1:
        return
    found = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank,
             "MASTER_ADDR": "127.0.0.1" if local_size == size else None, "MASTER_PORT": str(port)}
    missing = [name for name, value in found.items() if value is None and name not in os.environ]
    if missing:
        raise Error("invalid_argument", f"init_distributed: mpirun has started {size} processes, and does not say "
                                        f"{' and '.join(missing)}; set these (-x), MASTER_ADDR to the address of rank "
                                        "0's host, or start them with torchrun, or one with python")
    for name, value in found.items():
        os.environ.setdefault(name, value or "")


def init_distributed(dist_backend=None, auto_mpi_discovery=True, distributed_port=29500, verbose=True, timeout=None,
                     init_method=None, dist_init_required=None, config=None, rank=-1, world_size=-1, **_):
    """Of one process no process group is made: torch.distributed itself is left out, or this module taken in its
    place. Of several one is, over Gloo; where there are GPUs, over `dist_backend`, or over NCCL for what lies on one.
    `timeout`: of its calls, a datetime.timedelta; the default is torch.distributed's. `auto_mpi_discovery`: processes
    that mpirun started are several, too; of one host they meet at `distributed_port`, of others at MASTER_ADDR."""
    global _begun, _asked  # the first of which is_initialized() says, as DeepSpeed's does
    if auto_mpi_discovery and "WORLD_SIZE" not in os.environ and world_size < 1 and not is_initialized():
        _discover(distributed_port)
    processes = max(world_size, int(os.environ.get("WORLD_SIZE") or 1))
    if processes > 1 and not torch.distributed.is_initialized():
        if init_method is None and "MASTER_ADDR" not in os.environ:
            raise Error("invalid_argument", f"init_distributed: WORLD_SIZE {processes}: and nothing says where they "
                                            "meet (MASTER_ADDR); start them with torchrun, or one with python")
        backend = _backend(dist_backend) if torch.cuda.is_available() else "gloo"
        limit = {} if timeout is None else {"timeout": timeout}
        torch.distributed.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size,
                                             **limit)
    _begun, _asked = True, processes


def is_initialized():
    """Of several processes, whether there is a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() or _begun and _processes() == 1


def is_available():
    return True


def destroy_process_group(group=None):
    global _begun
    if several():
        torch.distributed.destroy_process_group(group)
    _begun = False


@_of_ranks
def get_rank(group=None):
    return 0


def get_local_rank():
    return int(os.environ.get("LOCAL_RANK") or 0) if _processes() > 1 else 0


@_of_ranks
def get_world_size(group=None):
    return 1


def get_global_rank(group=None, group_rank=0):
    _need_group("get_global_rank")
    return group_rank if group is None else torch.distributed.get_global_rank(group, group_rank)


def get_world_group():
    _need_group("get_world_group")
    return torch.distributed.group.WORLD if several() else None


@_of_ranks
def new_group(ranks=None, *_, **__):
    if ranks is not None and [*ranks] != [0]:
        raise Error("unsupported", f"new_group: of ranks {[*ranks]}, and there is rank 0 alone")


def _refuse_rank(call, rank):
    if rank not in (0, None):
        raise Error("unsupported", f"{call}: names rank {rank}, and there is rank 0 alone")


def _done(async_op):
    return _Done() if async_op else None


@_of_ranks
def barrier(*_, async_op=False, **__):
    return _done(async_op)


@_of_ranks
def monitored_barrier(*_, **__):
    return None


@_of_ranks
def broadcast(tensor, src=0, group=None, async_op=False, **_):
    _refuse_rank("broadcast", src)
    return _done(async_op)


@_of_ranks
def broadcast_object_list(object_list, src=0, group=None, device=None):
    _refuse_rank("broadcast_object_list", src)


@_of_ranks
def all_reduce(tensor, op=None, group=None, async_op=False, **_):
    """Of one rank sum, mean, least and most are the tensor itself."""
    return _done(async_op)


@_of_ranks
def reduce(tensor, dst=0, op=None, group=None, async_op=False, **_):
    _refuse_rank("reduce", dst)
    return _done(async_op)


@_of_ranks
def all_gather(tensor_list, tensor, group=None, async_op=False, **_):
    tensor_list[0].copy_(tensor)
    return _done(async_op)


@_of_ranks
def all_gather_into_tensor(output_tensor, tensor, group=None, async_op=False, **_):
    output_tensor.view(-1).copy_(tensor.reshape(-1))
    return _done(async_op)


@_of_ranks
def all_gather_object(object_list, obj, group=None, **_):
    object_list[0] = obj


@_of_ranks
def reduce_scatter_tensor(output_tensor, tensor, op=None, group=None, async_op=False, **_):
    output_tensor.view(-1).copy_(tensor.reshape(-1))
    return _done(async_op)


@_of_ranks
def gather(tensor, gather_list=None, dst=0, group=None, async_op=False, **_):
    _refuse_rank("gather", dst)
    if gather_list:
        gather_list[0].copy_(tensor)
    return _done(async_op)


@_of_ranks
def scatter(tensor, scatter_list=None, src=0, group=None, async_op=False, **_):
    _refuse_rank("scatter", src)
    if scatter_list:
        tensor.copy_(scatter_list[0])
    return _done(async_op)


@_of_ranks
def send(tensor, dst, *_, **__):
    raise Error("unsupported", f"send: to rank {dst}, and there is rank 0 alone")


@_of_ranks
def recv(tensor, src=None, *_, **__):
    raise Error("unsupported", f"recv: from rank {src}, and there is rank 0 alone")
