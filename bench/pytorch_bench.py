#!/usr/bin/env python3
"""Step time of a PyTorch loop: PyTorch alone with everything in memory, beside the same loop through Spillway.

A GPT of plain PyTorch modules, trained by
  pytorch   torch.optim.AdamW, activation checkpointing by block (what Spillway does, too): all in RAM
  none      spillway.Engine, weights and states in the device's memory
  nvme      spillway.Engine, weights and states on NVMe
each in a process of its own; all live for the whole bench and make their steps in turns, so that they meet the same
machine. One JSON line a turn: `step_seconds` is the median of its steps but the first, `cpu_seconds` the processor time
of such a step, all threads together, which tells more on a machine that others use, `peak_bytes` the largest resident
set so far. The last line has the ratios to `pytorch` of the same round, medians of all.

With --deepspeed the model is transformers' GPT-2 in bf16, batch 1, and beside `nvme` the same loop runs through
DeepSpeed, with the states on NVMe and the weights in RAM (peers/finetune_deepspeed.py, which is started anew for every
round); ratios are to that.

Needs PyTorch; SPILLWAY_LIBRARY names the library where the dynamic linker does not find it.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
VARIANTS = ("pytorch", "none", "nvme", "deepspeed")
WARM_UP = 2  # steps


def model(torch, layers, width, vocabulary, sequence):
    nn = torch.nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.register_buffer("mask", torch.full((sequence, sequence), float("-inf")).triu(1), persistent=False)

        def forward(self, x):
            batch, length, _ = x.shape
            q, k, v = (t.view(batch, length, -1, 64).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
            weights = torch.softmax(q @ k.transpose(-1, -2) / 8 + self.mask.to(x.dtype), -1)
            x = x + self.out((weights @ v).transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(vocabulary, width)
            self.layers = nn.ModuleList(Layer() for _ in range(layers))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, vocabulary, bias=False)
            self.run_layer = lambda layer, x: layer(x)

        def forward(self, ids):
            x = self.embedding(ids)
            for layer in self.layers:
                x = self.run_layer(layer, x)
            logits = self.head(self.norm(x))[:, :-1].float()
            return nn.functional.cross_entropy(logits.reshape(-1, vocabulary), ids[:, 1:].reshape(-1))

    torch.manual_seed(1)
    return Gpt()


def transformers_model(torch, options):
    from transformers import GPT2Config, GPT2LMHeadModel
    torch.manual_seed(1)
    network = GPT2LMHeadModel(GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=options.width // 64))
    options.vocabulary = network.config.vocab_size
    return network


def config(options, device, folder):
    place = {"device": device, **({"nvme_path": str(folder)} if device == "nvme" else {})}
    return {"train_micro_batch_size_per_gpu": options.batch, "gradient_clipping": 1.0,
            "bf16": {"enabled": options.dtype == "bf16"},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"threads": options.threads, "device": options.device,
                         **({"host_bytes": options.host} if options.host else {})}}


def run(options, folder):
    import torch
    from torch.utils.checkpoint import checkpoint
    torch.set_num_threads(options.threads)
    network = transformers_model(torch, options) if options.deepspeed else \
        model(torch, options.layers, options.width, options.vocabulary, options.sequence)
    parameters = sum(p.numel() for p in network.parameters())
    batch = torch.randint(0, options.vocabulary, (options.batch, options.sequence),
                          generator=torch.Generator().manual_seed(2))
    if options.device == "cuda":
        batch = batch.cuda()
    if options.variant == "pytorch":
        network.to(batch.device, torch.bfloat16 if options.dtype == "bf16" else torch.float32)
        network.run_layer = lambda layer, x: checkpoint(layer, x, use_reentrant=True)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=0.01)

        def step():
            loss = network(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss
    else:
        sys.path.insert(0, str(ROOT / "python"))
        import spillway
        engine = spillway.Engine(network, config(options, options.variant, folder))

        def step():
            loss = engine(input_ids=batch, labels=batch, use_cache=False).loss if options.deepspeed else engine(batch)
            engine.backward(loss)
            engine.step()
            return loss
    for _ in range(WARM_UP):
        step().item()
    about = {"bench": "pytorch", "variant": options.variant, "parameters": parameters, "dtype": options.dtype,
             "tokens": batch.numel(), "device": options.device, "threads": options.threads, "torch": torch.__version__}
    print("ready", flush=True)
    for _ in sys.stdin:  # a line for every turn
        seconds, cpu_seconds = [], []
        for _ in range(options.steps):
            begin, cpu_begin = time.monotonic(), time.process_time()
            loss = step().item()
            seconds.append(time.monotonic() - begin)
            cpu_seconds.append(time.process_time() - cpu_begin)
        print(json.dumps({**about, "last_loss": loss, "step_seconds": statistics.median(seconds[1:]),
                          "cpu_seconds": statistics.median(cpu_seconds[1:]),
                          "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}), flush=True)


class Turns:
    """A variant in a process that waits for its turns; DeepSpeed's is started anew for each."""

    def __init__(self, variant):
        self.command = [sys.executable, __file__, *sys.argv[1:], "--variant", variant]
        self.process = None if variant == "deepspeed" else subprocess.Popen(
            self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self.process:
            self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise subprocess.CalledProcessError(self.process.wait(), self.command)
        return line

    def take(self):
        if not self.process:
            return subprocess.run(self.command, check=True, stdout=subprocess.PIPE, text=True).stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self):
        if self.process:
            self.process.stdin.close()
            self.process.wait()


def run_deepspeed(options, folder):
    """The peer's own lines, made into one of ours."""
    done = subprocess.run([sys.executable, ROOT / "bench/peers/finetune_deepspeed.py", "--layers", str(options.layers),
                           "--width", str(options.width), "--seq", str(options.sequence), "--steps",
                           str(options.steps), "--offload", "nvme_optimizer", "--nvme", folder],
                          check=True, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(json.dumps({
        "bench": "pytorch", "variant": "deepspeed", "parameters": lines[0]["params"], "dtype": "bf16",
        "tokens": options.sequence, "threads": options.threads,
        "step_seconds": statistics.median([line["seconds"] for line in lines if "seconds" in line][2:]),
        "peak_bytes": int(lines[-1]["peak_rss_gb"] * 1e9)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--steps", type=int, default=4, help="of a turn, two or more")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=("host", "cuda"), default="host")
    parser.add_argument("--host", help="host_bytes of the configuration; the default is what the plan asks for")
    parser.add_argument("--deepspeed", action="store_true", help="compare with DeepSpeed, which must be installed")
    parser.add_argument("--work", type=pathlib.Path, help="where the store is made; the default is a temporary folder")
    parser.add_argument("--tiny", action="store_true", help="one round of a small model, to see that it runs")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("torch") is None:
        print("skipped: this Python has no PyTorch")
        sys.exit(77)
    if options.tiny:
        options.layers, options.width, options.vocabulary, options.sequence = 2, 64, 256, 16
        options.rounds, options.steps = 1, 3
    if options.deepspeed:
        options.batch, options.dtype = 1, "bf16"
    variants = ("nvme", "deepspeed") if options.deepspeed else VARIANTS[:3]
    against = "deepspeed" if options.deepspeed else "pytorch"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-pytorch-", dir=options.work))
    try:
        if options.variant:
            return (run_deepspeed if options.variant == "deepspeed" else run)(options, folder / "store")
        found = {variant: [] for variant in variants}
        turns = {variant: Turns(variant) for variant in variants}
        for _ in range(options.rounds):
            for variant in variants:
                line = turns[variant].take()
                print(line, end="", flush=True)
                found[variant].append(json.loads(line))
        for turn in turns.values():
            turn.end()

        def ratios(of):
            return {variant: round(statistics.median(a[of] / b[of] for a, b in zip(found[variant], found[against])), 3)
                    for variant in variants if variant != against}

        print(json.dumps({"bench": "pytorch", f"ratio_to_{against}": ratios("step_seconds"), **(
            {} if options.deepspeed else {f"cpu_ratio_to_{against}": ratios("cpu_seconds")})}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
