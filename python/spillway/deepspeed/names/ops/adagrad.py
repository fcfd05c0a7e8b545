"""deepspeed.ops.adagrad."""
from spillway import absent
from spillway.deepspeed.optimizers import DeepSpeedCPUAdagrad  # noqa: F401

__getattr__ = absent.of(__name__, globals())
