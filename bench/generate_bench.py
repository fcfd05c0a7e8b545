#!/usr/bin/env python3
"""Tokens a second of `spillway generate` with a model of three times the memory, beside the drive's own limit.

A Llama of random bf16 weights; HBM and host memory together are a third of it. One JSON line a round:
  seconds          median of the tokens after the prompt
  read_bytes       from NVMe for each of them
  drive            what the drive reads by itself, before and after (link_probes.py)
  of_drive         read_bytes / seconds, as a share of that: 0.9 is what is aimed at
  peak_of_weights  largest resident set and huge pages, over the bytes of the weights
  in_memory        seconds of a token of the same model with all of it in memory, and whether the tokens are the same
"""
import argparse
import json
import pathlib
import sys
import tempfile

import finetune_bench as fine
import link_probes as links
from step_bench import checked, guarded, say

# layers, width, inner, heads, key/value heads, vocabulary
SHAPES = {"tiny": (4, 64, 176, 4, 2, 300), "836M": (16, 2048, 5632, 32, 4, 32000),
          "2.6B": (24, 2816, 8192, 22, 11, 32000)}
PROMPT = 32


def write_shape(path, shape):
    layers, width, inner, heads, key_heads, vocabulary = shape
    path.write_text(json.dumps({
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": key_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 4096, "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "rope_theta": 10000.0, "eos_token_id": 2}))
    layer = width * (2 * width + 2 * key_heads * (width // heads)) + 3 * width * inner + 2 * width
    return 2 * (layers * layer + (2 * vocabulary + 1) * width)


def write_config(path, folder, hbm, host):
    path.write_text(json.dumps({
        "train_batch_size": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}},
        "spillway": {"device": "host", "hbm_bytes": hbm, "host_bytes": host}}))


def generated(a, model, folder, name, *more):
    log = folder / f"{name}.jsonl"
    log.unlink(missing_ok=True)
    run = checked(fine.watch([a.spillway, "generate", "--model", model, "--ids", "--past-end", "--tokens", a.tokens,
                              "--prompt", " ".join(str(3 + i % 250) for i in range(PROMPT)), "--log", log, *more]))
    *tokens, whole = [json.loads(line) for line in log.read_text().splitlines()]
    return {"tokens": [token["token"] for token in tokens],
            "seconds": fine.median([token["seconds"] for token in tokens[1:]]),
            "prompt_seconds": whole["prompt_seconds"], "read_bytes": whole["nvme_read_bytes"] / whole["passes"],
            "stall_seconds": whole["stall_seconds"] / whole["passes"], "peak_bytes": run["peak_bytes"]}


def measure(a, folder):
    weights = write_shape(folder / "config.json", SHAPES[a.shape])
    model, config, nvme = folder / "model", folder / "ds_config.json", folder / "nvme"
    checked(fine.watch([a.spillway, "init-model", model, "--from", folder / "config.json", "--dtype", "bf16"]))
    hbm = int(weights / 3 * a.hbm_share)
    write_config(config, nvme, hbm, int(weights / 3) - hbm if a.shape != "tiny" else 64 << 20)
    with links.steady_drive(folder, a.steady) as group:
        for turn in range(a.rounds):
            probes = [links.probe_drive(folder, a.probe_bytes, a.aio_bench)]
            if group:
                group.holds(probes[0])
            streamed = generated(a, model, folder, "streamed", "--config", config)
            probes.append(links.probe_drive(folder, a.probe_bytes, a.aio_bench))
            resident = generated(a, model, folder, "resident")
            rate = links.mean_of_drive(probes)["read"]
            same = streamed.pop("tokens") == resident.pop("tokens")
            say(bench="generate", shape=a.shape, weight_bytes=weights, memory_bytes=int(weights / 3), round=turn,
                tokens_per_second=1 / streamed["seconds"], steady_mb_per_s=a.steady,
                of_drive=streamed["read_bytes"] / streamed["seconds"] / rate, drive_read=rate,
                drive_probes=[probe["read"] for probe in probes], program=probes[0]["program"],
                peak_of_weights=streamed["peak_bytes"] / weights, **streamed,
                in_memory={"seconds": resident["seconds"], "same_tokens": same})
            if not same:
                raise SystemExit("the streamed model gave other tokens")


def parse():
    build = fine.ROOT / "build"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=build / "tools/spillway")
    parser.add_argument("--aio-bench", type=pathlib.Path, default=build / "bench/aio_bench", help="for want of fio")
    parser.add_argument("--shape", choices=list(SHAPES), default="836M")
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hbm-share", type=float, default=0.55, help="of the memory; the rest is host memory")
    parser.add_argument("--steady", type=float, metavar="MBPS", help="hold the drive to this rate each way, as root")
    parser.add_argument("--work", help="a directory on the drive to measure; default: TMPDIR")
    parser.add_argument("--tiny", action="store_true", help="one small case; what the tests run")
    a = parser.parse_args()
    a.probe_bytes = 1 << 30
    if a.tiny:
        a.shape, a.rounds, a.probe_bytes, a.tokens, a.hbm_share = "tiny", 1, 16 << 20, 6, 60
    return a


def main():
    a = parse()

    def body():
        with tempfile.TemporaryDirectory(prefix="spillway-bench-", dir=a.work) as folder:
            measure(a, pathlib.Path(folder))

    return guarded("generate", body)


if __name__ == "__main__":
    sys.exit(main())
