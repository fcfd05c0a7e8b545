"""deepspeed's estimate_zero…_model_states_mem_needs…, answered as Spillway's plan divides memory.

A bf16 parameter has 2 bytes of weight, 2 of gradient and 10 of states and residual (docs/how_it_works.md). What must be
in HBM at least are two places for the largest block's weights and its gradient; the rest lives where the configuration
says. Exact figures, with activations, are in the plan that an engine prints, and of `spillway plan`.
"""
from ..engine.blocks import find_blocks

WEIGHT, GRADIENT, STATES = 2, 2, 10
SMALLEST_PLACES = 2 * WEIGHT + GRADIENT  # of the largest block: one computes, one is on its way


def _layers(model):
    own = (sum(parameter.numel() for parameter in module.parameters(recurse=False)) for module in model.modules())
    return sum(parameter.numel() for parameter in model.parameters()), max(own, default=0)


def needs(total_params, largest_block_params):
    """[(options, HBM, host memory, NVMe)] in bytes; a store on NVMe keeps two versions of what it has."""
    least = largest_block_params * SMALLEST_PLACES
    everything = total_params * (WEIGHT + GRADIENT + STATES)
    return [("offload_param=nvme, offload_optimizer=nvme", least, total_params * GRADIENT,
             2 * total_params * (WEIGHT + STATES)),
            ("offload_param=cpu , offload_optimizer=nvme", least, total_params * (WEIGHT + GRADIENT),
             2 * total_params * (WEIGHT + STATES)),
            ("offload_param=cpu , offload_optimizer=cpu ", least, everything, 0),
            ("offload_param=none, offload_optimizer=cpu ", total_params * WEIGHT + largest_block_params * GRADIENT,
             total_params * (GRADIENT + STATES), 0),
            ("offload_param=none, offload_optimizer=none", everything, 0, 0)]


def _say(stage, total_params, largest, unit):
    print(f"Memory of weights, gradients and states, bf16 with Adam, on one GPU (stage {stage}):\n"
          f"a model of {total_params / 1e6:.0f}M parameters, {largest / 1e6:.0f}M in the largest {unit}.\n"
          "  HBM at least | host memory |        NVMe | options")
    for options, *places in needs(total_params, largest):
        if stage == 3 or "offload_param=none" in options:
            hbm, host, nvme = (f"{place / 2**30:8.2f}GiB" for place in places)
            print(f"   {hbm} | {host} | {nvme} | {options}")
    print("An engine prints its exact plan when it is made, activations too; `spillway plan` does it beforehand.")


def estimate_zero3_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    """Of a model that is there, on device meta say."""
    total = sum(parameter.numel() for parameter in model.parameters())
    blocks = [sum(parameter.numel() for parameter in block.module.parameters()) for block in find_blocks(model, None)]
    _say(3, total, max(blocks, default=0), "block")


def estimate_zero3_model_states_mem_needs_all_cold(total_params, largest_layer_params, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    _say(3, total_params, largest_layer_params, "layer")


def estimate_zero2_model_states_mem_needs_all_live(model, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    _say(2, *_layers(model), "layer")


def estimate_zero2_model_states_mem_needs_all_cold(total_params, num_gpus_per_node=1, num_nodes=1,
                                                   additional_buffer_factor=1.5):
    _say(2, total_params, 0, "layer")
