"""deepspeed.ops.lion."""
from spillway import absent
from spillway.deepspeed.optimizers import DeepSpeedCPULion, FusedLion  # noqa: F401

__getattr__ = absent.of(__name__, globals())
