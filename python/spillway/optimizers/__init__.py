"""torch.optim's optimizers with their states elsewhere: AdamW, Adam, Adagrad, Lion, SGD.

Signatures, defaults and keys of param_groups are those of the installed PyTorch. What all of them take besides, and
what a step does, is OffloadOptimizer's.
"""
import inspect

import torch

from ..library import Hyperparameters
from .offload_optimizer import OffloadOptimizer, refuse

IGNORED = ("foreach", "fused", "capturable")  # how PyTorch's own kernels are chosen


def _defaults(kind, values):
    """Those of PyTorch's optimizer, which checks them, under the keys that this version of it has."""
    refuse(values)
    known = inspect.signature(kind.__init__).parameters
    given = {name: value for name, value in values.items() if name in known and name not in IGNORED}
    found = kind([torch.zeros(1, requires_grad=True)], **given).defaults
    return {**found, **{name: values[name] for name in IGNORED if name in found and values.get(name) is not None}}


class _Adam(OffloadOptimizer):
    library_type = "AdamW"
    counts_steps = True

    @staticmethod
    def hyperparameters(group, _):
        beta1, beta2 = map(float, group["betas"])
        return Hyperparameters(learning_rate=float(group["lr"]), beta1=beta1, beta2=beta2, epsilon=group["eps"],
                               weight_decay=float(group["weight_decay"]))


class AdamW(_Adam):
    """torch.optim.AdamW, whose states lie in host memory or on NVMe. `**where`: of OffloadOptimizer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, amsgrad=False, *,
                 maximize=False, foreach=None, capturable=False, differentiable=False, fused=None, **where):
        super().__init__(params, _defaults(torch.optim.AdamW, {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": fused}), **where)

    @staticmethod
    def hyperparameters(group, count):
        found = _Adam.hyperparameters(group, count)
        found.decoupled_decay = 1
        return found


class Adam(_Adam):
    """torch.optim.Adam, whose states lie in host memory or on NVMe. `**where`: of OffloadOptimizer."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0, amsgrad=False, *, foreach=None,
                 maximize=False, capturable=False, differentiable=False, fused=None, decoupled_weight_decay=False,
                 **where):
        values = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
                  "maximize": maximize, "foreach": foreach, "capturable": capturable,
                  "differentiable": differentiable, "fused": fused, "decoupled_weight_decay": decoupled_weight_decay}
        found = _defaults(torch.optim.Adam, values)
        if decoupled_weight_decay:  # which an older PyTorch has not got
            found["decoupled_weight_decay"] = True
        super().__init__(params, found, **where)

    @staticmethod
    def hyperparameters(group, count):
        found = _Adam.hyperparameters(group, count)
        found.decoupled_decay = int(group.get("decoupled_weight_decay", False))
        return found


class Adagrad(OffloadOptimizer):
    """torch.optim.Adagrad, whose states lie in host memory or on NVMe. `**where`: of OffloadOptimizer."""

    library_type = "Adagrad"
    counts_steps = True
    states_from_the_start = True

    def __init__(self, params, lr=1e-2, lr_decay=0, weight_decay=0, initial_accumulator_value=0, eps=1e-10,
                 foreach=None, *, maximize=False, differentiable=False, fused=None, **where):
        super().__init__(params, _defaults(torch.optim.Adagrad, {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps,
            "initial_accumulator_value": initial_accumulator_value, "foreach": foreach, "maximize": maximize,
            "differentiable": differentiable, "fused": fused}), **where)

    @staticmethod
    def initial_value(group):
        return float(group["initial_accumulator_value"])

    @staticmethod
    def hyperparameters(group, count):
        rate = float(group["lr"]) / (1 + count * group["lr_decay"])
        return Hyperparameters(learning_rate=rate, epsilon=group["eps"], weight_decay=float(group["weight_decay"]))


class Lion(OffloadOptimizer):
    """Lion (Chen et al. 2023, algorithm 2), whose states lie in host memory or on NVMe: signs of a momentum, decoupled
    weight decay. PyTorch has none; a rate is a tenth of AdamW's, a decay ten times. `**where`: of OffloadOptimizer."""

    library_type = "Lion"
    counts_steps = True

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, *, maximize=False, foreach=None,
                 capturable=False, differentiable=False, fused=None, **where):
        refuse({"maximize": maximize, "differentiable": differentiable})
        for name, value, right in (("learning rate", lr, lr >= 0), ("beta parameter at index 0", betas[0],
                                                                    0 <= betas[0] < 1),
                                   ("beta parameter at index 1", betas[1], 0 <= betas[1] < 1),
                                   ("weight_decay value", weight_decay, weight_decay >= 0)):
            if not right:
                raise ValueError(f"Invalid {name}: {value}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize,
                                  "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
                                  "fused": fused}, **where)

    @staticmethod
    def hyperparameters(group, _):
        beta1, beta2 = map(float, group["betas"])
        return Hyperparameters(learning_rate=float(group["lr"]), beta1=beta1, beta2=beta2,
                               weight_decay=float(group["weight_decay"]), decoupled_decay=1)


class SGD(OffloadOptimizer):
    """torch.optim.SGD, whose momentum lies in host memory or on NVMe. `**where`: of OffloadOptimizer."""

    library_type = "SGD"

    def __init__(self, params, lr=1e-3, momentum=0, dampening=0, weight_decay=0, nesterov=False, *, maximize=False,
                 foreach=None, differentiable=False, fused=None, **where):
        super().__init__(params, _defaults(torch.optim.SGD, {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize, "foreach": foreach, "differentiable": differentiable,
            "fused": fused}), **where)

    @staticmethod
    def shows_states(group):
        return group["momentum"] != 0

    @staticmethod
    def hyperparameters(group, _):
        momentum = float(group["momentum"])
        return Hyperparameters(learning_rate=float(group["lr"]), weight_decay=float(group["weight_decay"]),
                               momentum=momentum, nesterov=int(bool(group["nesterov"])),
                               dampening=float(group["dampening"]) if momentum else 0)  # as in PyTorch
