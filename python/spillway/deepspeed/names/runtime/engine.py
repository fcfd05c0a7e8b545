"""deepspeed.runtime.engine."""
from spillway import absent
from spillway.deepspeed import DeepSpeedEngine  # noqa: F401

__getattr__ = absent.of(__name__, globals())
