#!/usr/bin/env python3
"""Runs finetune_torch.py and `spillway finetune` on the same model, text and settings, and compares every step; then
loads what Spillway exported with transformers and compares its loss. Called by tools/compare_pytorch.sh.

The text is LICENSE, as bytes: the same on every machine, so that the values can be kept as references.
"""
import argparse
import json
import pathlib
import platform
import shutil
import subprocess
import sys

import numpy
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "LICENSE"
SEQ, BATCH, STEPS, RATE = 256, 4, 20, 3e-4
SHAPE = ["--layers", "4", "--width", "256", "--heads", "4", "--vocab", "50257", "--context", "256", "--seed", "1"]
# Relative. PyTorch differs from itself by 2e-7 and 1e-6 in fp32; in bf16 it rounds in an order of its own.
LIMITS = {"fp32": {"loss": 1e-5, "grad_norm": 1e-4}, "bf16": {"loss": 1e-2}}


def run(*command):
    print("+", *command, flush=True)
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def with_torch(model, dtype, save):
    command = ["bench/peers/finetune_torch.py", "--model", model, "--data", TEXT, "--seq", SEQ, "--batch", BATCH,
               "--steps", STEPS, "--lr", RATE, "--dtype", dtype, "--save", save]
    return [json.loads(line) for line in run(sys.executable, ROOT / command[0], *command[1:]).splitlines()
            if line.startswith("{")]


def with_spillway(spillway, model, dtype, work, out):
    nvme, log, config = work / "nvme", work / f"spillway-{dtype}.jsonl", work / f"ds_config-{dtype}.json"
    nvme.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": 1.0, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": RATE, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload}}, indent=2))
    run(spillway, "finetune", "--config", config, "--model", model, "--data", TEXT, "--seq", SEQ, "--steps", STEPS,
        "--fresh", "--log", log, "--out", out)
    return [json.loads(line) for line in log.read_text().splitlines()]


def compare(dtype, reference, ours):
    """Prints the largest difference of each value; returns whether all are within their limits."""
    good = len(reference) == len(ours) == STEPS
    for key, limit in LIMITS[dtype].items():
        worst = max((abs(o[key] / r[key] - 1), r["step"]) for r, o in zip(reference, ours))
        good &= worst[0] <= limit
        print(json.dumps({"dtype": dtype, "value": key, "largest_relative_difference": float(f"{worst[0]:.3g}"),
                          "at_step": worst[1], "limit": limit}))
    return good


def loss_of(folder, row):
    """The loss of a saved model on one row, by transformers in fp32."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = numpy.frombuffer(TEXT.read_bytes(), dtype=numpy.uint8).astype(numpy.int64)
    part = torch.from_numpy(tokens[row * SEQ:row * SEQ + SEQ + 1])[None]
    with torch.no_grad():
        logits = model(input_ids=part[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).item()


def write_reference(folder, dtype, steps):
    folder.mkdir(parents=True, exist_ok=True)
    about = {"made_by": "tools/compare_pytorch.sh --write", "init_model": " ".join(SHAPE), "data": TEXT.name,
             "seq": SEQ, "batch": BATCH, "lr": RATE, "dtype": dtype, "torch": torch.__version__,
             "transformers": transformers.__version__, "python": platform.python_version()}
    lines = [about, *({key: step[key] for key in ("step", "loss", "grad_norm", "torch_norm")} for step in steps)]
    (folder / f"gpt2_4x256_{dtype}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--spillway", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--references", type=pathlib.Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    spillway = arguments.spillway.resolve()
    run(spillway, "init-model", work / "model", *SHAPE)
    good = True
    for dtype in ("fp32", "bf16"):
        reference = with_torch(work / "model", dtype, work / f"torch-{dtype}")
        if arguments.write:
            write_reference(arguments.references, dtype, reference)
        own = max(abs(step["torch_norm"] / step["grad_norm"] - 1) for step in reference)
        print(json.dumps({"dtype": dtype, "value": "PyTorch's fp32 norm against the norm of its gradients",
                          "largest_relative_difference": float(f"{own:.3g}")}))
        ours = with_spillway(spillway, work / "model", dtype, work, work / f"trained-{dtype}")
        good &= compare(dtype, reference, ours)
        losses = {side: loss_of(work / f"{side}-{dtype}", row=40) for side in ("torch", "trained")}
        difference = abs(losses["trained"] / losses["torch"] - 1)
        limit = LIMITS[dtype]["loss"]
        print(json.dumps({"dtype": dtype, "value": "loss of the exported model", **losses,
                          "largest_relative_difference": float(f"{difference:.3g}"), "limit": limit}))
        good &= difference <= limit
    print("equal within the limits" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
