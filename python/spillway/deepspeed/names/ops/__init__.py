"""deepspeed.ops."""
from spillway import absent

__getattr__ = absent.of(__name__, globals(), rooms=("adagrad", "adam", "lion"))
