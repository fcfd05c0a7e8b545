"""deepspeed.runtime.zero.stage3."""
from spillway import absent
from spillway.deepspeed.estimates import (estimate_zero3_model_states_mem_needs_all_cold,  # noqa: F401
                                          estimate_zero3_model_states_mem_needs_all_live)
from spillway.deepspeed.zero import unwrap_model_for_generation  # noqa: F401

__getattr__ = absent.of(__name__, globals())
