#!/usr/bin/env python3
"""Runs finetune_torch.py and `spillway finetune` on the same model, text and settings, and compares every step; then
loads what Spillway exported with transformers and compares its loss. Called by tools/compare_pytorch.sh.

A GPT-2, and a small model of each family that has a config.json in tests/references/families. The text is LICENSE, as
bytes: the same on every machine, so that the values can be kept as references. Families train on documents as well,
several in a row, of which a part is learned: tests/references/packed. LoRA adapters of some are trained by peft, which
loads them as Spillway exported them, too.
"""
import argparse
import itertools
import json
import pathlib
import platform
import shutil
import subprocess
import sys

import numpy
import peft
import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/cli"))
from prepared_data import write_prepared  # noqa: E402

TEXT = ROOT / "LICENSE"
PACKED = ROOT / "tests/references/packed"
STEPS, SEQ, BATCH = 20, 64, 4
RATES = {"phi3": 1e-3}  # with 3e-3 PyTorch differs from itself by 1e-3, when it clips with the exact norm
# Relative. PyTorch differs from itself by 2e-7 and 1e-6 in fp32; in bf16 it rounds in an order of its own.
LIMITS = {"fp32": {"loss": 1e-5, "grad_norm": 1e-4}, "bf16": {"loss": 1e-2}}


class Task:
    """A model, by arguments of init-model, and how it is trained."""

    def __init__(self, name, init, seq, batch, rate, data=TEXT, dtypes=("fp32", "bf16"), lora=None):
        self.name, self.init, self.seq, self.batch, self.rate = name, init, seq, batch, rate
        self.data, self.dtypes, self.lora = data, dtypes, lora


def tasks():
    shape = ["--layers", "4", "--width", "256", "--heads", "4", "--vocab", "50257", "--context", "256", "--seed", "1"]
    families = sorted((ROOT / "tests/references/families").glob("*.json"))

    def family(file, more, **how):
        return Task(f"families/{file.stem}{more}", ["--from", file.relative_to(ROOT)], SEQ, BATCH,
                    RATES.get(file.stem, 3e-3), **how)
    return [Task("gpt2_4x256", shape, 256, 4, 3e-4), *(family(file, "") for file in families),
            *(family(file, "_packed", data=PACKED, dtypes=("fp32",)) for file in families),
            Task("lora/llama", ["--from", "tests/references/families/llama.json"], SEQ, BATCH, 3e-3,
                 lora={"rank": 8, "alpha": 16, "targets": ["all-linear"]}),
            Task("lora/phi3", ["--from", "tests/references/families/phi3.json"], SEQ, BATCH, 3e-3,
                 lora={"rank": 4, "alpha": 4, "targets": ["qkv_proj", "gate_up_proj", "down_proj"]}),
            Task("lora/qwen3_upper", ["--from", "tests/references/families/qwen3.json"], SEQ, BATCH, 3e-3,
                 lora={"rank": 8, "alpha": 16, "targets": ["layers.2.self_attn.q_proj", "layers.2.mlp.down_proj"]}),
            Task("lora/gpt2", ["--layers", "3", "--width", "64", "--heads", "4", "--vocab", "256", "--context", "64",
                               "--seed", "1"], SEQ, BATCH, 3e-3,
                 lora={"rank": 8, "alpha": 20, "targets": ["c_attn", "c_fc", "mlp.c_proj", "h.1.attn.c_proj"]})]


def write_packed():
    """Rows of documents of many lengths, pieces of the text, none of which begins where another did; two of three
    tokens are learned, in runs."""
    text = TEXT.read_bytes()
    lengths = itertools.cycle([11, 30, 23, 64, 5, 2, 41, 20, 17, 33, 14])
    rows, taken, length = [], 0, next(lengths)
    for _ in range(STEPS * BATCH):
        rows.append([])
        room = SEQ
        while length <= room:
            rows[-1].append([(text[taken + i], (taken + i - 1) // 4 % 3 != 0) for i in range(length)])
            taken, room, length = taken + length, room - length, next(lengths)
    shutil.rmtree(PACKED, ignore_errors=True)
    largest = max(token for row in rows for document in row for token, _ in document)
    write_prepared(PACKED, rows, length=SEQ, largest_token=largest)


def run(*command):
    print("+", *command, flush=True)
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def with_torch(task, model, dtype, save, start):
    command = ["bench/peers/finetune_torch.py", "--model", model, "--data", task.data, "--seq", task.seq,
               "--batch", task.batch, "--steps", STEPS, "--lr", task.rate, "--dtype", dtype, "--save", save,
               *(["--adapter", start] if start else [])]
    return [json.loads(line) for line in run(sys.executable, ROOT / command[0], *command[1:]).splitlines()
            if line.startswith("{")]


def first_adapter(task, spillway, model, work):
    """The adapter that Spillway begins with, as peft saves it: a step with a rate of 0 leaves it as it is."""
    config, out = work / "start.json", work / "start"
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"lr": 0}},
        "spillway": {"device": "host", "lora": task.lora}}))
    run(spillway, "finetune", "--config", config, "--model", model, "--data", TEXT, "--seq", task.seq, "--steps", 1,
        "--out", out)
    return out


def with_spillway(task, spillway, model, dtype, work, out):
    nvme, log, config = work / "nvme", work / f"spillway-{dtype}.jsonl", work / f"ds_config-{dtype}.json"
    nvme.mkdir(exist_ok=True)
    log.unlink(missing_ok=True)
    offload = {"device": "nvme", "nvme_path": str(nvme)}
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": task.batch, "gradient_clipping": 1.0, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW",
                      "params": {"lr": task.rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        **({"spillway": {"lora": task.lora}} if task.lora else {})}, indent=2))
    run(spillway, "finetune", "--config", config, "--model", model, "--data", task.data, "--seq", task.seq,
        "--steps", STEPS, "--fresh", "--log", log, "--out", out)
    return [json.loads(line) for line in log.read_text().splitlines()]


def compare(name, dtype, reference, ours):
    """Prints the largest difference of each value; returns whether all are within their limits."""
    good = len(reference) == len(ours) == STEPS
    for key, limit in LIMITS[dtype].items():
        worst = max((abs(o[key] / r[key] - 1), r["step"]) for r, o in zip(reference, ours))
        good &= worst[0] <= limit
        print(json.dumps({"model": name, "dtype": dtype, "value": key,
                          "largest_relative_difference": float(f"{worst[0]:.3g}"),
                          "at_step": worst[1], "limit": limit}))
    return good


def loss_of(task, base, folder, row):
    """The loss of a saved model on one row, by transformers in fp32; of an adapter, over the base."""
    model = transformers.AutoModelForCausalLM.from_pretrained(base if task.lora else folder, dtype=torch.float32)
    if task.lora:
        model = peft.PeftModel.from_pretrained(model, folder)
    model = model.eval()
    tokens = numpy.frombuffer(TEXT.read_bytes(), dtype=numpy.uint8).astype(numpy.int64)
    part = torch.from_numpy(tokens[row * task.seq:(row + 1) * task.seq + 1])[None]
    with torch.no_grad():
        logits = model(input_ids=part[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten()).item()


def write_reference(folder, task, dtype, steps):
    about = {"made_by": "tools/compare_pytorch.sh --write", "init_model": " ".join(map(str, task.init)),
             **({"lora": task.lora} if task.lora else {}),
             "data": task.data.relative_to(ROOT).as_posix(), "seq": task.seq, "batch": task.batch,
             "lr": task.rate, "dtype": dtype,
             "torch": torch.__version__, "transformers": transformers.__version__,
             **({"peft": peft.__version__} if task.lora else {}),
             "python": platform.python_version()}
    lines = [about, *({key: step[key] for key in ("step", "loss", "grad_norm", "torch_norm")} for step in steps)]
    file = folder / f"{task.name}_{dtype}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def run_task(task, arguments, spillway, work):
    good = True
    run(spillway, "init-model", work / "model", *task.init)
    start = first_adapter(task, spillway, work / "model", work) if task.lora else None
    for dtype in task.dtypes:
        reference = with_torch(task, work / "model", dtype, work / f"torch-{dtype}", start)
        if arguments.write:
            write_reference(arguments.references, task, dtype, reference)
        own = max(abs(step["torch_norm"] / step["grad_norm"] - 1) for step in reference)
        print(json.dumps({"model": task.name, "dtype": dtype,
                          "value": "PyTorch's fp32 norm against the norm of its gradients",
                          "largest_relative_difference": float(f"{own:.3g}")}))
        ours = with_spillway(task, spillway, work / "model", dtype, work, work / f"trained-{dtype}")
        good &= compare(task.name, dtype, reference, ours)
        losses = {side: loss_of(task, work / "model", work / f"{side}-{dtype}", row=40)
                  for side in ("torch", "trained")}
        difference = abs(losses["trained"] / losses["torch"] - 1)
        limit = LIMITS[dtype]["loss"]
        print(json.dumps({"model": task.name, "dtype": dtype, "value": "loss of the exported model", **losses,
                          "largest_relative_difference": float(f"{difference:.3g}"), "limit": limit}))
        good &= difference <= limit
    return good


def arguments_of_references():
    """What tools/compare_pytorch.sh gives each of its programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--spillway", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--references", type=pathlib.Path, required=True)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help="of the models, those whose name has this")
    return parser.parse_args()


def main():
    arguments = arguments_of_references()
    good = True
    if arguments.write:
        write_packed()
    for task in tasks():
        if arguments.only and arguments.only not in task.name:
            continue
        work = arguments.work.resolve()
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        good &= run_task(task, arguments, arguments.spillway.resolve(), work)
    print("equal within the limits" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
