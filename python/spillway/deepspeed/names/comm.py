"""deepspeed.comm."""
from spillway import absent
from spillway.deepspeed.comm import (  # noqa: F401
    ReduceOp, all_gather, all_gather_into_tensor, all_gather_object, all_reduce, barrier, broadcast,
    broadcast_object_list, destroy_process_group, gather, get_global_rank, get_local_rank, get_rank, get_world_group,
    get_world_size, init_distributed, is_available, is_initialized, monitored_barrier, new_group, recv, reduce,
    reduce_scatter_tensor, scatter, send)

__getattr__ = absent.of(__name__, globals())
