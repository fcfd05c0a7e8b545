"""A small language model in plain PyTorch with what real ones have: tied embeddings, dropout, tuples, keywords.

SPILLWAY_DEVICE=cuda runs everything on a GPU.
"""
import json
import os
import pathlib

import torch

VOCABULARY = 90
DEVICE = "cuda" if os.environ.get("SPILLWAY_DEVICE") == "cuda" else "cpu"  # PyTorch's name


class Layer(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x, *, scale=None):
        inner = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return {"hidden": x + self.drop(inner) * scale["value"], "width": x.shape[-1]}


class Model(torch.nn.Module):
    def __init__(self, width=48, layers=3):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.layers = torch.nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        self.head = torch.nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, scale={"value": self.scale.to(x.dtype)})["hidden"]
        logits = self.head(self.norm(x)).float()
        return torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), ids.flip(1).reshape(-1))


class Widened(torch.nn.Module):
    """Computes in fp32, as PyTorch has few operations in fp16 on a CPU."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(16))

    def forward(self, x):
        return x @ self.weight.float()


class Expert(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = torch.nn.Linear(width, 2 * width), torch.nn.Linear(2 * width, width)
        self.shift = torch.nn.Parameter(torch.zeros(width))
        self.spare = torch.nn.Parameter(torch.ones(width, 3))  # that nothing ever uses

    def forward(self, x, shifted):
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.shift if shifted else x


class Experts(torch.nn.Module):
    """What a batch does not go through gets no gradient of it."""

    def __init__(self, width=32, experts=3):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.experts = torch.nn.ModuleList(Expert(width) for _ in range(experts))
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(self, ids, chosen, shifted):
        x = self.embedding(ids)
        for expert in chosen:
            x = self.experts[expert](x, shifted)
        return torch.nn.functional.cross_entropy(self.head(x).view(-1, VOCABULARY), ids.flip(1).reshape(-1))


def model(seed=1, **shape):
    torch.manual_seed(seed)
    made = Model(**shape)
    with torch.no_grad():
        made.embedding.weight.mul_(0.1)
    return made


def batches(count, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (4, 16), generator=generator).to(DEVICE) for _ in range(count)]


def config(folder, device="nvme", accumulation=1, clipping=1.0, spillway=None, **more):
    """A ds_config.json of that folder; `device` is where weights and states live."""
    place = {"device": device}
    if device == "nvme":
        place["nvme_path"] = str(pathlib.Path(folder, "store"))
    path = pathlib.Path(folder, "ds_config.json")
    path.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
        "spillway": {"tile_elements": 4096, "device": "cuda" if DEVICE == "cuda" else "host", **(spillway or {})},
        **more}))
    return path


def train(engine, steps, first=0, accumulation=1, blob=b""):
    """Losses of all micro-batches, and the steps' reports; step s and its micro-batches have a seed of their own."""
    data = batches((first + steps) * accumulation)
    losses, reports = [], []
    for step in range(first, first + steps):
        torch.manual_seed(step)
        for micro in range(accumulation):
            loss = engine(data[step * accumulation + micro])
            engine.backward(loss)
            losses.append(loss.item())
            report = engine.step(blob)
        reports.append(report)
    return losses, reports
