"""deepspeed.zero."""
from spillway import absent
from spillway.deepspeed.zero import (GatheredParameters, Init, register_external_parameter,  # noqa: F401
                                     unregister_external_parameter, unwrap_model_for_generation)

__getattr__ = absent.of(__name__, globals())
