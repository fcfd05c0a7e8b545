"""deepspeed.utils.zero_to_fp32."""
from spillway import absent
from spillway.deepspeed.zero_to_fp32 import (  # noqa: F401
    convert_zero_checkpoint_to_fp32_state_dict, get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint)

__getattr__ = absent.of(__name__, globals())
