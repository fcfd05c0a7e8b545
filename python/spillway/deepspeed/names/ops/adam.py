"""deepspeed.ops.adam."""
from spillway import absent
from spillway.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam  # noqa: F401

__getattr__ = absent.of(__name__, globals())
