"""Checkpoints as DeepSpeed saves them, of runs of Spillway's."""
import sys

from case import ROOT

sys.path.append(str(ROOT / "tests/cli"))
import torch_files  # noqa: E402

STATES = ("model", "exp_avg", "exp_avg_sq")


def deepspeeds(snapshot, network, step, **options):
    """A checkpoint of DeepSpeed's, not yet written, of the states in a snapshot of Spillway's."""
    arrays = {stem: torch_files.read_safetensors(snapshot / f"{stem}.safetensors") for stem in STATES}
    parameters = {name: (tuple(parameter.shape), arrays["model"][name][1],
                         *(arrays[stem][f"{name}.{stem}"][1] for stem in STATES[1:]))
                  for name, parameter in network.named_parameters() if parameter.requires_grad}
    return torch_files.Checkpoint(parameters, step=step, **{"bf16": False, **options})
