#!/usr/bin/env python3
"""`spillway plan --ranks` at the shapes of large models: no run, but the schedule of a rank, at several networks.

Models are like Llama, all at home on NVMe, bf16, a device, a drive and a share of host memory for each rank; what these
do is what `spillway plan` takes for typical, but for the network. One JSON line for each model, number of ranks and
network: seconds of a step, tokens a second of all ranks, the busiest link, each link's own seconds, what a rank moves
over the network and takes of memory, and what planning took. `--table FILE` makes a Markdown table of such lines.
"""
import argparse
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# hidden_size, intermediate_size, layers, heads, key-value heads, vocabulary
SHAPES = {"7B": (4096, 11008, 32, 32, 32, 32000), "70B": (8192, 28672, 80, 64, 8, 128256),
          "1T": (20480, 71680, 188, 160, 16, 128256), "tiny": (64, 192, 2, 4, 2, 500)}
RANKS = [8, 64, 512]
# Gbit/s of a rank, microseconds of a call. The last is like NVLink: 450 GB/s.
NETWORKS = {"10": "10,50", "25": "25,50", "100": "100,20", "400": "400,20", "NVLink": "3600,10"}
SEQUENCE = 4096


def model_json(name):
    width, inner, layers, heads, kv_heads, vocabulary = SHAPES[name]
    return {"model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
            "max_position_embeddings": 131072, "tie_word_embeddings": False}


def config_json(a):
    offload = {"device": "nvme", "nvme_path": "/mnt/nvme"}
    return {"train_micro_batch_size_per_gpu": a.rows, "gradient_accumulation_steps": 1, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
            "spillway": {"hbm_bytes": a.hbm, "host_bytes": a.host}}


def planned(a, folder, name, ranks, network):
    run = subprocess.run(
        [a.spillway, "plan", "--config", folder / "ds_config.json", "--model", folder / name, "--seq", str(SEQUENCE),
         "--device", "cuda", "--ranks", str(ranks), "--ranks-per-host", str(min(ranks, 8)), "--network",
         NETWORKS[network], "--no-probe", "--json"], capture_output=True, text=True)
    if run.returncode:
        return {"refused": run.stderr.strip().splitlines()[-1]}
    answer = json.loads(run.stdout)
    step, schedule = answer["step"], answer["schedule"]
    return {"seconds": step["seconds"], "tokens_per_second": answer["tokens_per_second"], "limit": schedule["limit"],
            "busy_seconds": schedule["busy_seconds"], "stall_seconds": schedule["stall_seconds"],
            "network_bytes": sum(step[f"network_{part}_bytes"] for part in ("gathered", "scattered", "norm")),
            "nvme_bytes": step["nvme_read_bytes"] + step["nvme_write_bytes"],
            "memory": {tier: answer["ranks"][tier] for tier in ("hbm", "host", "nvme")},
            "tiles": schedule["tiles"], "planning_seconds": answer["planning_seconds"]}


def table(lines):
    lines = [line for line in lines if "model" in line]
    networks = list(dict.fromkeys(line["network"] for line in lines))
    text = "| model | ranks | " + " | ".join(networks) + " |\n|---|---|" + "---|" * len(networks)
    for name, ranks in dict.fromkeys((line["model"], line["ranks"]) for line in lines):
        cells = []
        for network in networks:
            line = next(l for l in lines if (l["model"], l["ranks"], l["network"]) == (name, ranks, network))
            cells.append(f"{line['seconds']:.3g} s, {line['limit']}" if "seconds" in line else "does not fit")
        text += f"\n| {name} | {ranks} | " + " | ".join(cells) + " |"
    return text


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", type=pathlib.Path, default=ROOT / "build/tools/spillway")
    parser.add_argument("--model", action="append", choices=list(SHAPES), help="default: 7B, 70B and 1T")
    parser.add_argument("--ranks", action="append", type=int, help="default: 8, 64 and 512")
    parser.add_argument("--network", action="append", choices=list(NETWORKS), help="default: all of them")
    parser.add_argument("--rows", type=int, default=4, help=f"of {SEQUENCE} tokens, of a rank's step")
    parser.add_argument("--hbm", default="64GiB", help="of a rank; the rest of the device is PyTorch's")
    parser.add_argument("--host", default="128GiB", help="of a rank")
    parser.add_argument("--table", type=pathlib.Path, help="print the table of these results, and plan nothing")
    parser.add_argument("--tiny", action="store_true", help="one small case; what the tests run")
    a = parser.parse_args()
    if a.tiny:
        a.model, a.ranks, a.network = ["tiny"], [2], ["100"]
    return a


def main():
    a = parse()
    if a.table:
        print(table([json.loads(line) for line in a.table.read_text().splitlines()]))
        return 0
    print(json.dumps({"machine": platform.machine(), "cores": os.cpu_count()}), flush=True)
    refused = False
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "ds_config.json").write_text(json.dumps(config_json(a)))
        for name in a.model or ["7B", "70B", "1T"]:
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(model_json(name)))
            for ranks in a.ranks or RANKS:
                for network in a.network or NETWORKS:
                    line = planned(a, folder, name, ranks, network)
                    refused |= "refused" in line
                    print(json.dumps({"model": name, "ranks": ranks, "rows": a.rows, "network": network, **line}),
                          flush=True)
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
