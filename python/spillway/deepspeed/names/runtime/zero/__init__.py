"""deepspeed.runtime.zero."""
from spillway import absent
from spillway.deepspeed.zero import (GatheredParameters, Init, register_external_parameter,  # noqa: F401
                                     unregister_external_parameter, unwrap_model_for_generation)

__getattr__ = absent.of(__name__, globals(), rooms=("partition_parameters", "stage3", "stage_1_and_2"))
