"""deepspeed.runtime.zero.partition_parameters."""
from spillway import absent
from spillway.deepspeed.zero import (GatheredParameters, Init, register_external_parameter,  # noqa: F401
                                     unregister_external_parameter)

__getattr__ = absent.of(__name__, globals())
