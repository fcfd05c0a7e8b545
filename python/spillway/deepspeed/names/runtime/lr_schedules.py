"""deepspeed.runtime.lr_schedules: those that no scheduler section has; PyTorch's serve as well."""
from spillway import absent
from spillway.deepspeed.schedules import LRRangeTest, OneCycle  # noqa: F401

__getattr__ = absent.of(__name__, globals())
