"""deepspeed.utils."""
from spillway import absent
from spillway.deepspeed.fragments import (safe_get_full_fp32_param, safe_get_full_grad,  # noqa: F401
                                          safe_get_full_optimizer_state, safe_get_local_fp32_param,
                                          safe_get_local_grad, safe_get_local_optimizer_state,
                                          safe_set_full_fp32_param, safe_set_full_grad,
                                          safe_set_full_optimizer_state, safe_set_local_fp32_param,
                                          safe_set_local_grad, safe_set_local_optimizer_state,
                                          safe_update_full_grad_vectorized)
from spillway.deepspeed.leaves import (get_z3_leaf_modules, set_z3_leaf_module, set_z3_leaf_modules,  # noqa: F401
                                       set_z3_leaf_modules_by_name, set_z3_leaf_modules_by_suffix,
                                       unset_z3_leaf_modules, z3_leaf_module, z3_leaf_parameter)
from spillway.deepspeed.loops import RepeatingLoader, log_dist, logger  # noqa: F401

__getattr__ = absent.of(__name__, globals(), rooms=("logging", "zero_to_fp32"))
