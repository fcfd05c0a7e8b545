#!/usr/bin/env python3
"""Reference fine-tune of a causal language model with plain PyTorch, everything in RAM, or in a GPU's memory.

Step s trains on rows r = s*B .. s*B+B-1 (micro-batches in that order); row r is tokens[r*T : r*T+T+1], inputs its
first T tokens and targets its last T; rows wrap round at the end of the file. Of a directory that `python -m
spillway.prepare` made a row is its documents, each with positions of its own, and targets are what is learned of them.
One JSON line per step: {"step", "loss", "grad_norm", "torch_norm", "seconds"}. `--save` writes the trained model as
safetensors.

grad_norm is the norm of PyTorch's gradients, summed in double. torch_norm is what clip_grad_norm_ returns and clips
with: it adds the squares of a tensor in fp32, which loses 1.5e-4 in an embedding of 12.9 M elements (the more, the
larger). --exact-clip clips with grad_norm instead.

--dtype fp32: everything in fp32.  --dtype bf16: bf16 weights and activations, fp32 master weights and Adam states
(what "bf16": {"enabled": true} means in a ds_config.json).

--adapter trains a LoRA adapter with peft, from what is in that directory, over the frozen model; --save writes it.

--device cuda trains on the GPU; a line says at the end how much of its memory PyTorch took. --fused takes AdamW's fused
kernel, --checkpointing has a layer's activations computed once more in backward, --no-masters has AdamW work on the
bf16 weights themselves, its states in bf16, too: less work, and less exact. --no-exact leaves grad_norm out: null.
"""
import argparse
import json
import pathlib
import time

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

a = argparse.ArgumentParser()
a.add_argument("--model", required=True)
a.add_argument("--data", required=True)
a.add_argument("--seq", type=int, default=256)
a.add_argument("--batch", type=int, default=1)
a.add_argument("--accumulate", type=int, default=1)
a.add_argument("--steps", type=int, default=20)
a.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
a.add_argument("--lr", type=float, default=1e-4)
a.add_argument("--weight-decay", type=float, default=0.01)
a.add_argument("--betas", type=float, nargs=2, default=(0.9, 0.999))
a.add_argument("--eps", type=float, default=1e-8)
a.add_argument("--clip", type=float, default=1.0)
a.add_argument("--exact-clip", action="store_true")
a.add_argument("--adapter")
a.add_argument("--save")
a.add_argument("--threads", type=int)
a.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
a.add_argument("--fused", action="store_true")
a.add_argument("--checkpointing", action="store_true")
a.add_argument("--no-masters", action="store_true")
a.add_argument("--no-exact", action="store_true")
a = a.parse_args()
if a.threads:
    torch.set_num_threads(a.threads)
if a.exact_clip and a.no_exact:
    raise SystemExit("--exact-clip: clips with the norm that --no-exact leaves out; give one of them")



class TokenFile:
    def __init__(self, file, seq):
        dtype = "<u2" if file.suffix == ".bin" else np.uint8
        self.tokens, self.seq = np.fromfile(file, dtype=dtype).astype(np.int64), seq
        self.rows = (len(self.tokens) - 1) // seq

    def batch(self, rows):
        """What the model takes, and targets."""
        chunk = torch.from_numpy(np.stack([self.tokens[r * self.seq:r * self.seq + self.seq + 1] for r in rows]))
        return {"input_ids": chunk[:, :-1]}, chunk[:, 1:]


class Prepared:
    def __init__(self, folder):
        header = json.loads((folder / "header.json").read_text())
        self.rows, seq = header["rows"], header["tokens_per_row"]
        dtype = {"uint16": "<u2", "uint32": "<u4"}[header["dtype"]]
        self.tokens = np.fromfile(folder / "tokens.bin", dtype=dtype).astype(np.int64).reshape(self.rows, seq)

        def bits(name):
            packed = np.fromfile(folder / name, dtype=np.uint8).reshape(self.rows, -1)
            return np.unpackbits(packed, axis=1, bitorder="little")[:, :seq].astype(bool)
        index = np.arange(seq)
        self.positions = index - np.maximum.accumulate(np.where(bits("starts.bin"), index, 0), axis=1)
        self.targets = np.where(bits("targets.bin"), np.roll(self.tokens, -1, axis=1), -100)

    def batch(self, rows):
        tokens, positions, targets = (torch.from_numpy(of[rows]) for of in
                                      (self.tokens, self.positions, self.targets))
        return {"input_ids": tokens, "position_ids": positions}, targets


data = Prepared(pathlib.Path(a.data)) if pathlib.Path(a.data).is_dir() else TokenFile(pathlib.Path(a.data), a.seq)
rows = data.rows
low = torch.bfloat16 if a.dtype == "bf16" else torch.float32
# The fused attention that is the default adds in an order, and on a GPU in pieces of TF32, of its own.
exact = {"attn_implementation": "eager"} if a.dtype == "fp32" else {}
config = AutoConfig.from_pretrained(a.model)
for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
    if hasattr(config, dropout):
        setattr(config, dropout, 0.0)
model = AutoModelForCausalLM.from_pretrained(a.model, config=config, dtype=torch.float32, **exact)
if a.adapter:
    from peft import PeftModel
    model = PeftModel.from_pretrained(model, a.adapter, is_trainable=True)
model.train()
model.to(a.device)
model.config.use_cache = False  # keys and values for generating text: memory that training has no use for
if a.checkpointing:
    model.gradient_checkpointing_enable()
params = [p for p in model.parameters() if p.requires_grad]
masters = [] if a.no_masters else [p.detach().clone() for p in params]
model.to(low)
for m in masters:
    m.requires_grad_(True)
masters = masters or params
opt = torch.optim.AdamW(masters, lr=a.lr, betas=tuple(a.betas), eps=a.eps, weight_decay=a.weight_decay,
                        **({"fused": True} if a.fused else {}))
row = 0
for step in range(1, a.steps + 1):
    t0 = time.perf_counter()
    losses = []
    for _ in range(a.accumulate):
        idx = [(row + b) % rows for b in range(a.batch)]
        row += a.batch
        inputs, targets = data.batch(idx)
        logits = model(**{name: values.to(a.device) for name, values in inputs.items()}).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.to(a.device).flatten())
        (loss / a.accumulate).backward()
        losses.append(loss.detach())
        del logits, loss
    if not a.no_masters:
        for m, p in zip(masters, params):
            m.grad = p.grad.float()
            p.grad = None
    exact = None if a.no_exact else sum(m.grad.double().square().sum() for m in masters).sqrt().item()
    limit = a.clip if a.clip > 0 else float("inf")
    if a.exact_clip:
        norm = exact
        torch.nn.utils.clip_grads_with_norm_(masters, limit, torch.tensor(exact))
    else:
        norm = torch.nn.utils.clip_grad_norm_(masters, limit).item()
    opt.step()
    if a.no_masters:
        opt.zero_grad()
    else:
        with torch.no_grad():
            for m, p in zip(masters, params):
                p.copy_(m)
    loss_sum = sum(loss.item() / a.accumulate for loss in losses)
    if a.device == "cuda":
        torch.cuda.synchronize()
    print(json.dumps({"step": step, "loss": loss_sum, "grad_norm": exact, "torch_norm": norm,
                      "seconds": time.perf_counter() - t0}), flush=True)
if a.device == "cuda":
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                      "peak_bytes": torch.cuda.max_memory_reserved()}), flush=True)
if a.save:
    with torch.no_grad():
        model.to(torch.float32)
        for m, p in zip(masters, params):
            p.copy_(m)
    model.save_pretrained(a.save)
