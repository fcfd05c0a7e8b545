"""deepspeed.runtime.zero.stage_1_and_2."""
from spillway import absent
from spillway.deepspeed.estimates import (estimate_zero2_model_states_mem_needs_all_cold,  # noqa: F401
                                          estimate_zero2_model_states_mem_needs_all_live)

__getattr__ = absent.of(__name__, globals())
