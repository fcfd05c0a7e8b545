"""One fine-tune of a Llama or Qwen shape as each of several programs does it on one GPU, for train.py.

Every loop has the same weights (by the seed), the same tokens and AdamW, clips gradients to 1 where it can, keeps fp32
masters and states, computes in bf16 with PyTorch's scaled_dot_product_attention, and computes a layer once more in
backward. What differs is where things live. A loop has:
  ABOUT            its arithmetic and settings, for the results
  step(batches)    a whole optimizer step; the mean loss as a tensor
  accumulate(n)    whether it goes on with n micro-batches a step; else it is made anew
  counters()       what else is known of the last step
  close()
"""
import os
import sys

import torch

RATES = {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
LLAMA = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192}
# Transformers' class of configuration, its values, and host_bytes for Spillway on NVMe: a third of what it stores.
SHAPES = {
    "tiny": ("LlamaConfig", {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
                             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}, None),
    # Large enough for DeepSpeed to put weights on the drive: to see on a CPU that it does.
    "small": ("LlamaConfig", {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
                              "vocab_size": 16384, "num_attention_heads": 8, "num_key_value_heads": 8,
                              "tie_word_embeddings": True}, None),
    "llama-1b": ("LlamaConfig", {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
                                 "vocab_size": 128256, "tie_word_embeddings": True}, "5GiB"),
    "qwen3-1.7b": ("Qwen3Config", {**LLAMA, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28,
                                   "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
                                   "vocab_size": 151936, "tie_word_embeddings": True}, "7GiB"),
    "llama-8b": ("LlamaConfig", {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                                 "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                                 "vocab_size": 128256, "tie_word_embeddings": False}, "32GiB")}


def model(options):
    """Random weights in bf16, the same ones for every loop: made on the device, where that takes no time."""
    import transformers
    kind, values, _ = SHAPES[options.shape]
    config = getattr(transformers, kind)(**values, use_cache=False)
    attention = "sdpa" if hasattr(torch.nn.functional, "scaled_dot_product_attention") else "eager"
    before = torch.get_default_dtype()
    torch.manual_seed(1)
    try:
        torch.set_default_dtype(torch.bfloat16)
        if options.device == "cuda":
            torch.set_default_device("cuda")
        made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
        if options.device == "cuda":
            torch.set_default_device(None)
    options.parameters = sum(p.numel() for p in made.parameters())
    return made.train()


def checkpointed(made):
    made.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return made


def loss_of(network, ids):
    return network(input_ids=ids, labels=ids, use_cache=False).loss


def fused():
    """AdamW's fused kernel, which a CPU has since PyTorch 2.4."""
    return {"fused": True} if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 4) else {}


def join_world(options):
    """A process group of one. There is no network where this runs, and it needs none."""
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", NCCL_SOCKET_IFNAME="lo",
                      GLOO_SOCKET_IFNAME="lo", DS_ACCELERATOR=options.device)
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))


class Loop:
    ABOUT = ""

    def __init__(self, options, accumulation):
        self.options, self.accumulation = options, accumulation

    def accumulate(self, micro_batches):
        self.accumulation = micro_batches
        return True

    def counters(self):
        return {}

    def close(self):
        pass


class Plain(Loop):
    ABOUT = "bf16 weights and gradients, fp32 masters, states and sum of micro-batches, fused AdamW; all in HBM"

    def __init__(self, options, accumulation):
        super().__init__(options, accumulation)
        self.model = checkpointed(model(options))
        self.weights = list(self.model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.optimizer = torch.optim.AdamW(self.masters, **RATES, **fused())

    def step(self, batches):
        total = 0
        for ids in batches:
            loss = loss_of(self.model, ids)
            (loss / len(batches)).backward()
            for master, weight in zip(self.masters, self.weights):
                if master.grad is None:
                    master.grad = weight.grad.float()
                else:
                    master.grad += weight.grad
                weight.grad = None
            total += loss.detach()
            del loss
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights):
                weight.copy_(master)
        return total / len(batches)


class Spillway(Loop):
    PLACE = {"spillway-hbm": "none", "spillway-host": "cpu", "spillway-nvme": "nvme"}

    def __init__(self, options, accumulation):
        super().__init__(options, accumulation)
        import spillway
        device = self.PLACE[options.variant]
        place = {"device": device, **({"nvme_path": options.folder} if device == "nvme" else {})}
        own = {"device": "cuda" if options.device == "cuda" else "host", "states": options.states}
        if options.threads:
            own["threads"] = options.threads
        if device == "nvme":  # without commits, of which the peer has none; and what its budget holds stays there
            own["commit_every"] = 0
            if SHAPES[options.shape][2]:
                own["host_bytes"] = SHAPES[options.shape][2]
        made = model(options).cpu()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        self.engine = spillway.Engine(made, {
            "train_micro_batch_size_per_gpu": options.micro, "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {**RATES, "betas": list(RATES["betas"])}},
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": own}, on_existing="replace")
        self.ABOUT = f"bf16 weights, fp32 masters and sum of micro-batches; spillway: {own}"
        self.report = None

    def step(self, batches):
        total = 0
        for ids in batches:
            loss = loss_of(self.engine, ids)
            self.engine.backward(loss)
            total += loss.detach()
            del loss
            self.report = self.engine.step()
        return total / len(batches)

    def accumulate(self, micro_batches):
        return False  # the plan is of so many

    def counters(self):
        names = ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes", "stall_seconds", "stalls", "link",
                 "link_percent", "adam_seconds", "visits", "visit_hits")
        planned = {}
        for tier, _, size in self.engine.ledger():
            planned[tier] = planned.get(tier, 0) + size
        return {**{name: getattr(self.report, name) for name in names}, "planned_bytes": planned}

    def close(self):
        self.engine.close()


class DeepSpeed(Loop):
    def __init__(self, options, accumulation):
        super().__init__(options, accumulation)
        join_world(options)
        import deepspeed
        nvme = options.variant == "deepspeed-nvme"
        zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True}
        pinned = {"pin_memory": options.device == "cuda"}
        zero |= {"offload_optimizer": {"device": "cpu", **pinned}, "offload_param": {"device": "cpu", **pinned}}
        made = checkpointed(model(options))
        if nvme:
            # What its documentation and bench/results say is fast: both pipelines, which take 12 buffers of a
            # sub-group; several threads. Its weights stay in host memory: with them on NVMe, too, it ended in the
            # second step on an H100 ("Not enough buffers 0 for swapping 1", with 16 of the embedding's size; "already
            # assigned swap buffer", with 24 and fewer parameters in use at a time).
            zero["sub_group_size"] = options.parameters // 12
            zero["offload_optimizer"] = {"device": "nvme", "nvme_path": options.folder, "buffer_count": 12,
                                         "pipeline_read": True, "pipeline_write": True, **pinned}
        config = {"train_micro_batch_size_per_gpu": options.micro, "gradient_accumulation_steps": accumulation,
                  "gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": zero,
                  "optimizer": {"type": "AdamW", "params": {**RATES, "betas": list(RATES["betas"])}},
                  "aio": {"block_size": 1 << 20, "queue_depth": 64, "single_submit": False, "overlap_events": True,
                          "intra_op_parallelism": 4}}
        self.ABOUT = f"bf16 weights, gradients and their sum, fp32 masters and states; {zero}" + (
            f"; aio {config['aio']}" if nvme else "")
        deepspeed.init_distributed(dist_backend="nccl" if options.device == "cuda" else "gloo",
                                   auto_mpi_discovery=False)
        self.engine, *_ = deepspeed.initialize(model=made, config=config, model_parameters=made.parameters())

    def step(self, batches):
        total = 0
        for i, ids in enumerate(batches):
            self.engine.set_gradient_accumulation_boundary(i + 1 == len(batches))
            loss = loss_of(self.engine, ids)
            self.engine.backward(loss)
            total += loss.detach()
            del loss
            self.engine.step()
        return total / len(batches)

    def accumulate(self, micro_batches):
        self.engine.set_train_batch_size(self.options.micro * micro_batches)
        return super().accumulate(micro_batches)


class Torchao(Loop):
    ABOUT = "fp32 weights and gradients in HBM under autocast to bf16, fp32 states in host memory; does not clip"

    def __init__(self, options, accumulation):
        super().__init__(options, accumulation)
        from torchao.optim import CPUOffloadOptimizer
        self.model = checkpointed(model(options).float())
        once = accumulation == 1  # gradients of several micro-batches are summed in HBM
        self.ABOUT += f"; offload_gradients={once}"
        self.optimizer = CPUOffloadOptimizer(self.model.parameters(), torch.optim.AdamW, offload_gradients=once,
                                             **RATES)

    def step(self, batches):
        total = 0
        for ids in batches:
            with torch.autocast(self.options.device, torch.bfloat16):
                loss = loss_of(self.model, ids)
            (loss / len(batches)).backward()
            total += loss.detach()
            del loss
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total / len(batches)

    def accumulate(self, micro_batches):
        return self.accumulation > 1 and super().accumulate(micro_batches)


class Fsdp(Loop):
    ABOUT = "fp32 masters, gradients and states in host memory, bf16 weights, gradients summed in HBM; fused AdamW"

    def __init__(self, options, accumulation):
        super().__init__(options, accumulation)
        join_world(options)
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        gpu = options.device == "cuda"
        # The norm of gradients, in host memory, goes through gloo.
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", rank=0, world_size=1,
                                             store=torch.distributed.HashStore())
        mesh = torch.distributed.init_device_mesh(options.device, (1,))
        self.model = checkpointed(model(options).float())
        how = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16,
                                                               reduce_dtype=torch.float32),
               "offload_policy": CPUOffloadPolicy(pin_memory=gpu)}
        for layer in self.model.model.layers:
            fully_shard(layer, **how)
        fully_shard(self.model, **how)
        if gpu:
            torch.cuda.empty_cache()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **RATES, **fused())

    def step(self, batches):
        total = 0
        for i, ids in enumerate(batches):
            self.model.set_requires_gradient_sync(i + 1 == len(batches))
            loss = loss_of(self.model, ids)
            (loss / len(batches)).backward()
            total += loss.detach()
            del loss
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total / len(batches)

    def close(self):
        torch.distributed.destroy_process_group()


LOOPS = {"pytorch": Plain, "spillway-hbm": Spillway, "spillway-host": Spillway, "spillway-nvme": Spillway,
         "deepspeed-cpu": DeepSpeed, "deepspeed-nvme": DeepSpeed, "torchao": Torchao, "fsdp2": Fsdp}
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../python"))
