"""deepspeed.utils.logging."""
from spillway import absent
from spillway.deepspeed.loops import log_dist, logger  # noqa: F401

__getattr__ = absent.of(__name__, globals())
