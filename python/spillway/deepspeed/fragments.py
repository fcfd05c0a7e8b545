"""deepspeed.utils' safe_get_… and safe_set_…: a parameter's fp32 values, states and gradient, read and written.

All of a parameter is local: ranks cut blocks, and not parameters. Values come in fp32 and CPU memory, as the engine's
weights do elsewhere; the gradient is what DeepSpeed's is: of all the step's micro-batches, and multiplied by the loss
scale in fp16. What is written reaches the fp32 master, and so the next step and what is saved; states stay as they are.
Several ranks make these calls together. All get the same values; rank 0's are written, as every rank gives the same.
"""
from ..engine import values
from ..library import Error


def safe_get_full_fp32_param(param):
    """None for one that is not trained or not an engine's, as with DeepSpeed."""
    return values.read(param) if _trained(param) else None


def safe_set_full_fp32_param(param, value):
    """Beside an engine's, and for frozen ones, nothing is done, as with DeepSpeed."""
    if _trained(param):
        values.write(param, value)


def safe_get_full_optimizer_state(param, optim_state_key):
    """`optim_state_key`: as PyTorch's optimizers name it, "exp_avg" say."""
    return values.read(param, _state(optim_state_key)) if _trained(param) else None


def safe_set_full_optimizer_state(param, value, optim_state_key):
    """The weight stays as it is."""
    if _trained(param):
        values.write(param, value, _state(optim_state_key))


def safe_get_full_grad(param):
    """After the step's last backward() and before step(). None where there is none."""
    if values.engine_of(param) is None:
        return param.grad
    return values.read_gradient(param) if param.requires_grad else None


def safe_set_full_grad(param, value):
    if values.engine_of(param) is not None:
        values.write_gradient(param, value)
    elif param.grad is not None:
        param.grad.copy_(value)


def safe_update_full_grad_vectorized(param_list, update_func):
    """update_func(gradient, parameter) gives the one in its place."""
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


safe_get_local_fp32_param, safe_set_local_fp32_param = safe_get_full_fp32_param, safe_set_full_fp32_param
safe_get_local_grad, safe_set_local_grad = safe_get_full_grad, safe_set_full_grad
safe_get_local_optimizer_state = safe_get_full_optimizer_state
safe_set_local_optimizer_state = safe_set_full_optimizer_state


def _trained(param):
    return values.engine_of(param) is not None and param.requires_grad


def _state(key):
    if key not in values.STATES:
        raise Error("invalid_argument", f"optim_state_key: '{key}' is none of {', '.join(values.STATES)}")
    return values.STATES[key]
