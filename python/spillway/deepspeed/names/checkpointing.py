"""deepspeed.checkpointing."""
from spillway import absent
from spillway.deepspeed.recomputing import (checkpoint, configure, get_cuda_rng_tracker,  # noqa: F401
                                            is_configured, model_parallel_cuda_manual_seed, reset)

__getattr__ = absent.of(__name__, globals())
