#!/usr/bin/env python3
"""Fine-tune step time and memory of DeepSpeed ZeRO-3 on the CPU accelerator, bf16, random GPT-2 weights; one rank, or
the one that RANK, LOCAL_RANK and WORLD_SIZE name, over Gloo.

--offload none | cpu | nvme_optimizer (states on NVMe, weights in RAM) | nvme (all on NVMe). The aio and swapper
settings are the good ones (both pipelines on, 12 optimizer buffers as they need, 1 MiB x 32), not the defaults.
One JSON line per step, then one with the peak resident memory.
"""
import argparse
import json
import os
import resource
import time

for name, alone in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29511"}.items():
    os.environ.setdefault(name, alone)
os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1")
import deepspeed  # noqa: E402  (reads the environment at import)
import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402

a = argparse.ArgumentParser()
a.add_argument("--layers", type=int, default=24)
a.add_argument("--width", type=int, default=1024)
a.add_argument("--seq", type=int, default=256)
a.add_argument("--steps", type=int, default=6)
a.add_argument("--offload", choices=["none", "cpu", "nvme_optimizer", "nvme"], default="nvme_optimizer")
a.add_argument("--buffers", type=int, default=24, help="of weights that come from NVMe")
a.add_argument("--buffer-elements", type=int, default=int(1.1e8))
a.add_argument("--nvme", default="/tmp/peers_nvme")
a.add_argument("--sub-group", type=float, default=5e7)
a = a.parse_args()

os.makedirs(a.nvme, exist_ok=True)
zero = {"stage": 3}
if a.offload == "cpu":
    zero |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
if a.offload.startswith("nvme"):
    zero["sub_group_size"] = int(a.sub_group)
    zero["offload_optimizer"] = {"device": "nvme", "nvme_path": a.nvme, "buffer_count": 12, "pipeline_read": True,
                                 "pipeline_write": True}
    zero["offload_param"] = {"device": "cpu"} if a.offload == "nvme_optimizer" else {
        "device": "nvme", "nvme_path": a.nvme, "buffer_count": a.buffers, "buffer_size": a.buffer_elements,
        "max_in_cpu": 0}
config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
          "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "zero_optimization": zero,
          "aio": {"block_size": 1048576, "queue_depth": 32, "single_submit": False, "overlap_events": True,
                  "intra_op_parallelism": 1}}
deepspeed.init_distributed(dist_backend="gloo")
torch.manual_seed(0)
with deepspeed.zero.Init(config_dict_or_path=config):
    model = GPT2LMHeadModel(GPT2Config(n_layer=a.layers, n_embd=a.width, n_head=a.width // 64))
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
print(json.dumps({"params": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())}), flush=True)
ids = torch.randint(0, 50257, (1, a.seq))
for step in range(1, a.steps + 1):
    t0 = time.perf_counter()
    loss = engine(input_ids=ids, labels=ids).loss
    t1 = time.perf_counter()
    engine.backward(loss)
    t2 = time.perf_counter()
    engine.step()
    t3 = time.perf_counter()
    print(json.dumps({"step": step, "forward_s": t1 - t0, "backward_s": t2 - t1, "update_s": t3 - t2,
                      "seconds": t3 - t0}), flush=True)
print(json.dumps({"peak_rss_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}))
