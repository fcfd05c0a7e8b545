"""deepspeed.accelerator."""
from spillway import absent
from spillway.deepspeed.accelerator import get_accelerator  # noqa: F401

__getattr__ = absent.of(__name__, globals())
