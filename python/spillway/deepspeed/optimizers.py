"""DeepSpeed's optimizer classes, for initialize(optimizer=…): hyper-parameters, while the states are the engine's."""
import torch

from ..library import Error


class _Named(torch.optim.Optimizer):
    def step(self, closure=None):
        raise Error("unsupported", f"{type(self).__name__}: says hyper-parameters to initialize(optimizer=…), whose "
                                   "engine makes the steps; in a loop of PyTorch's own, spillway.AdamW and its kin do")


class DeepSpeedCPUAdam(_Named):
    def __init__(self, model_params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, weight_decay=0,
                 amsgrad=False, adamw_mode=True, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            raise Error("unsupported", "fp32_optimizer_states: False keeps states in the weights' type, and Spillway's "
                                       "are fp32; leave it out")
        super().__init__(model_params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                        "bias_correction": bias_correction, "amsgrad": amsgrad})
        self.adam_w_mode = adamw_mode


class FusedAdam(_Named):
    def __init__(self, params, lr=1e-3, bias_correction=True, betas=(0.9, 0.999), eps=1e-8, adam_w_mode=True,
                 weight_decay=0.0, amsgrad=False, set_grad_none=True):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay,
                                  "bias_correction": bias_correction, "amsgrad": amsgrad})
        self.adam_w_mode = adam_w_mode


class DeepSpeedCPUAdagrad(_Named):
    def __init__(self, model_params, lr=1e-2, eps=1e-10, weight_decay=0, amsgrad=False, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            raise Error("unsupported", "fp32_optimizer_states: False keeps states in the weights' type, and Spillway's "
                                       "are fp32; leave it out")
        super().__init__(model_params, {"lr": lr, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad})


class DeepSpeedCPULion(_Named):
    def __init__(self, model_params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0, fp32_optimizer_states=True):
        if not fp32_optimizer_states:
            raise Error("unsupported", "fp32_optimizer_states: False keeps states in the weights' type, and Spillway's "
                                       "are fp32; leave it out")
        super().__init__(model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})


class FusedLion(_Named):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), weight_decay=0.0, set_grad_none=True):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
