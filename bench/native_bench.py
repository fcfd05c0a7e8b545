#!/usr/bin/env python3
"""Tokens per second of `spillway finetune`, everything resident, beside transformers with PyTorch's AdamW.

A shape, a type and a row's length are a case. Each round trains a random model of that shape in a process of
  spillway   spillway finetune on the host device, weights, states and the insides of all blocks in memory
  masters    transformers (its scaled_dot_product_attention), torch.optim.AdamW(fused=True), clip_grad_norm_; in bf16
             the model is bf16 and AdamW works on fp32 copies, which is what Spillway computes
  plain      bf16 alone: AdamW works on the bf16 weights, its states are bf16: less work, and less exact
one after the other, for all of them together do not fit a small machine. No activations are computed twice. The first
step of a process warms up; `step_seconds` is the median of those after it. The round also measures what the machine
multiplies at best in that type: `torch_gflops`, the fastest torch.mm of some sizes, and `panel_gflops`, the fastest
panel product of decoder_bench, both with all threads; `peak_gflops` is the larger one of all rounds.

The last line of a case has medians over rounds: tokens per second; `ratio` of spillway's to each other one's of the
same round; `share`, model arithmetic (6 a token and weight of a product, attention's products at half of T², nothing
that is computed again) over time and peak. A peer that is killed for memory has an `error`, and no ratio.

Needs PyTorch and transformers. --nice gives the timed processes a priority on a machine that others use, too.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
DECODER = {"tie_word_embeddings": True, "hidden_act": "silu", "attention_bias": False}
SHAPES = {
    "tiny": {**DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
             "intermediate_size": 128, "vocab_size": 512, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
             "max_position_embeddings": 4096},
    "qwen3-0.6b": {**DECODER, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
                   "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                   "intermediate_size": 3072, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
                   "max_position_embeddings": 40960},
    "llama-1b": {**DECODER, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
                 "num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                 "intermediate_size": 8192, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
                 "max_position_embeddings": 8192}}
RATES = {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


def step_flops(shape, sequence):
    width, layers, head = shape["hidden_size"], shape["num_hidden_layers"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer = width * (2 * queries + 2 * keys + 3 * shape["intermediate_size"])
    products = 6 * sequence * (layers * layer + width * shape["vocab_size"])
    return products + layers * 6 * sequence * sequence * queries  # three times two products of T²/2


PRODUCTS = ((1024, 1024, 1024), (2048, 1024, 3072), (2048, 2048, 2048), (256, 2048, 8192))  # m, k, n


def torch_peak(torch, dtype, products):
    best = 0
    for m, k, n in products:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        for _ in range(8):
            begin = time.monotonic()
            torch.mm(a, b)
            best = max(best, 2e-9 * m * k * n / (time.monotonic() - begin))
    return best


def run_peer(options):
    import torch
    import transformers
    torch.set_num_threads(options.threads)
    dtype = torch.float32 if options.dtype == "fp32" else torch.bfloat16
    peak = torch_peak(torch, dtype, ((64, 64, 64),) if options.shape == "tiny" else PRODUCTS)
    shape = dict(SHAPES[options.shape])
    torch.manual_seed(1)
    torch.set_default_dtype(dtype)  # the argument for it has had two names
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(shape.pop("model_type"), **shape, use_cache=False))
    torch.set_default_dtype(torch.float32)
    model.train()
    weights = list(model.parameters())
    copies = options.peer == "masters" and dtype != torch.float32
    masters = [p.detach().float().requires_grad_() for p in weights] if copies else weights
    fused = {} if options.shape == "tiny" else {"fused": True}  # which Debian's PyTorch has not
    optimizer = torch.optim.AdamW(masters, **{**RATES, "betas": tuple(RATES["betas"])}, **fused)
    seconds = []
    for step in range(1 + options.steps):
        ids = torch.randint(0, 65536 if shape["vocab_size"] > 65536 else 512, (1, options.seq + 1))
        begin = time.monotonic()
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        del logits
        loss.backward()
        if copies:
            for master, weight in zip(masters, weights):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if copies:
            with torch.no_grad():
                torch._foreach_copy_(weights, masters)
        value = loss.item()
        seconds.append(time.monotonic() - begin)
        del loss
    print(json.dumps({"loss": value, "seconds": seconds, "torch_gflops": peak, "torch": torch.__version__,
                      "transformers": transformers.__version__}))


def prioritized(options, command):
    return [*(["nice", "-n", str(options.nice)] if options.nice else []), *map(str, command)]


def lines_of(command, **keywords):
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **keywords)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def peer_seconds(options, case, peer):
    shape, dtype, seq = case
    try:
        line = lines_of(prioritized(options, [
            options.peer_python, __file__, "--peer", peer, "--shape", shape, "--dtype", dtype, "--seq", seq, "--steps",
            options.steps, "--threads", options.threads]))[-1]
    except subprocess.CalledProcessError as error:
        return {"error": f"status {error.returncode}"}, 0.0
    return {"loss": line["loss"], "step_seconds": statistics.median(line["seconds"][1:])}, line["torch_gflops"]


def spillway_seconds(options, program, case, folder):
    shape, dtype, seq = case
    log = folder / "log"
    log.unlink(missing_ok=True)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": dtype == "bf16"},
              "optimizer": {"type": "AdamW", "params": RATES},
              "spillway": {"threads": options.threads, "hbm_bytes": options.hbm}}
    (folder / "config.json").write_text(json.dumps(config))
    run = subprocess.run(prioritized(options, [
        program, "finetune", "--config", folder / "config.json", "--model", folder / shape, "--data",
        folder / "data.bin", "--seq", seq, "--steps", 1 + options.steps, "--log", log]), capture_output=True, text=True)
    if run.returncode:
        raise SystemExit(run.stderr)
    if "backward recomputes no block" not in run.stdout + run.stderr:
        raise SystemExit("--hbm is too small: backward recomputes blocks")
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    return {"loss": steps[-1]["loss"], "step_seconds": statistics.median(step["seconds"] for step in steps[1:]),
            "adam_seconds": statistics.median(step["adam_seconds"] for step in steps[1:])}


def measure(options, case, folder):
    shape, dtype, seq = case
    about = {"bench": "native", "shape": shape, "dtype": dtype, "seq": seq}
    peers = [peer for peer in options.peers if peer != "plain" or dtype == "bf16"]
    rounds, torch_gflops, panel_gflops = [], [], []
    for number in range(options.rounds):
        found = {"spillway": spillway_seconds(options, options.spillway, case, folder)}
        if options.before:
            found["before"] = spillway_seconds(options, options.before, case, folder)
        for peer in peers:
            found[peer], rate = peer_seconds(options, case, peer)
            torch_gflops.append(rate)
        panel_gflops += [line["gflops"] for line in lines_of(prioritized(options, [
            options.decoder_bench, "--peak", dtype, options.threads]))]
        rounds.append(found)
        print(json.dumps({**about, "round": number, **found, "torch_gflops": torch_gflops[-1],
                          "panel_gflops": panel_gflops[-1], "load": os.getloadavg()[0]}), flush=True)
    peak, flops = max(torch_gflops + panel_gflops), step_flops(SHAPES[shape], seq)
    seconds = {who: [found[who]["step_seconds"] for found in rounds if "error" not in found[who]] for who in rounds[0]}
    seconds = {who: values for who, values in seconds.items() if len(values) == len(rounds)}
    middle = {who: statistics.median(values) for who, values in seconds.items()}
    print(json.dumps({
        **about, "tokens_per_second": {who: round(seq / value, 1) for who, value in middle.items()},
        "ratio": {who: round(statistics.median(a / b for a, b in zip(values, seconds["spillway"])), 3)
                  for who, values in seconds.items() if who != "spillway"},
        "share": {who: round(flops * 1e-9 / value / peak, 3) for who, value in middle.items()},
        "torch_gflops": round(max(torch_gflops), 1), "panel_gflops": round(max(panel_gflops), 1),
        "peak_gflops": round(peak, 1), "model_gflop": round(flops * 1e-9, 1)}), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=ROOT / "build/tools/spillway")
    parser.add_argument("--before", type=pathlib.Path, help="another spillway program, timed in the same rounds")
    parser.add_argument("--decoder-bench", type=pathlib.Path, default=ROOT / "build/bench/decoder_bench")
    parser.add_argument("--peer-python", default=sys.executable, help="of an environment with PyTorch, transformers")
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="default: the two of the field")
    parser.add_argument("--dtype", action="append", choices=("fp32", "bf16"), help="default: both")
    parser.add_argument("--seq", type=int, action="append", help="default: 256 and 2048")
    parser.add_argument("--steps", type=int, default=3, help="of a process, after the first one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--hbm", default="17GiB", help="hbm_bytes: memory for everything of the largest case")
    parser.add_argument("--nice", type=int, default=0, help="of the timed processes; below 0 as root. Where the kernel "
                        "groups processes by session, start the bench in one whose /proc/self/autogroup says so, too")
    parser.add_argument("--work", type=pathlib.Path, help="where models are made; the default is a temporary folder")
    parser.add_argument("--peers", nargs="*", choices=("masters", "plain"), default=["masters", "plain"])
    parser.add_argument("--tiny", action="store_true", help="one round of a small model, to see that it runs")
    parser.add_argument("--peer", choices=("masters", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        options.shape, options.dtype, options.seq = options.shape[0], options.dtype[0], options.seq[0]
        return run_peer(options)
    if subprocess.run([options.peer_python, "-c", "import torch, transformers"], capture_output=True).returncode:
        print("skipped: this Python has no PyTorch or no transformers")
        sys.exit(77)
    if options.tiny:
        options.shape, options.seq, options.rounds, options.steps, options.hbm = ["tiny"], [32], 1, 2, "64MiB"
    folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-native-", dir=options.work))
    try:
        for shape in options.shape or ["qwen3-0.6b", "llama-1b"]:
            (folder / "shape.json").write_text(json.dumps(SHAPES[shape]))
            subprocess.run([options.spillway, "init-model", folder / shape, "--from", folder / "shape.json"],
                           check=True, stdout=subprocess.DEVNULL)
            words = min(65536, SHAPES[shape]["vocab_size"])
            tokens = random.Random(1).choices(range(words), k=1 << 16)
            (folder / "data.bin").write_bytes(b"".join(token.to_bytes(2, "little") for token in tokens))
            for seq in options.seq or [256, 2048]:
                for dtype in options.dtype or ["fp32", "bf16"]:
                    measure(options, (shape, dtype, seq), folder)
            shutil.rmtree(folder / shape)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
