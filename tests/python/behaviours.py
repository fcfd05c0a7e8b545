"""What the suites of DeepSpeed's behaviours share: a model and a loop as its own tests have them, and the tables of
docs/deepspeed_calls.md, or of another page, which say of each behaviour that it holds, or what is said in its place."""
import re

from case import ROOT, Case

import torch

import spillway as deepspeed
from toy_model import DEVICE

WIDTH = 16


def table(page="docs/deepspeed_calls.md"):
    """{behaviour: "holds" or what is said}"""
    text = (ROOT / page).read_text()
    kept = re.search(r"^\| of \| behaviours that hold \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.M)[1]
    found = {name: "holds" for row in kept.splitlines() for name in row.split("|")[2].strip().split(", ")}
    return {**found, **dict(re.findall(r"^\| ([a-z0-9 ]+) \| (refused: .*) \|$", text, re.M))}


class SimpleModel(torch.nn.Module):
    def __init__(self, layers=2, bias=True):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias) for _ in range(layers))

    def forward(self, x, y):
        for linear in self.linears:
            x = linear(x)
        return torch.nn.functional.cross_entropy(x.float(), y)


def simple(**shape):
    torch.manual_seed(1)
    return SimpleModel(**shape)


def data(count=1, seed=5, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, WIDTH, generator=generator).to(DEVICE, dtype),
             torch.randint(0, WIDTH, (4,), generator=generator).to(DEVICE)) for _ in range(count)]


class Behaviours(Case):
    page = "docs/deepspeed_calls.md"

    def settings(self, device="cpu", stage=3, optimizer=True, accumulation=1, spillway=None, zero=None,
                 **more):
        place = {"device": device, **({"nvme_path": str(self.folder / "store")} if device == "nvme" else {})}
        found = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": accumulation,
                 "zero_optimization": {"stage": stage, **(zero or {})},
                 "spillway": {"device": "cuda" if DEVICE == "cuda" else "host", "tile_elements": 4096,
                              **(spillway or {})}, **more}
        if optimizer is True:
            optimizer = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}}
        if optimizer:
            found["optimizer"] = optimizer
        if stage == 3:
            found["zero_optimization"]["offload_param"] = place
        if stage > 1:
            found["zero_optimization"]["offload_optimizer"] = place
        return found

    def start(self, network=None, initialize=None, **settings):
        """(engine, optimizer, loader, scheduler)"""
        made = deepspeed.initialize(model=simple() if network is None else network, config=self.settings(**settings),
                                    **{"on_existing": "replace", **(initialize or {})})
        self.addCleanup(made[0].close)
        return made

    def engine_of(self, network=None, **settings):
        return self.start(network, **settings)[0]

    def train(self, engine, batches):
        losses = []
        for x, y in batches:
            loss = engine(x.to(engine.dtype), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        return losses

    def pytorch(self, batches, network=None, optimizer=None, clip=1.0, schedule=None):
        """The same with PyTorch alone: (network, losses)."""
        network = (simple() if network is None else network).to(DEVICE)
        optimizer = (optimizer or (lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.01)))(network.parameters())
        losses = []
        for x, y in batches:
            loss = network(x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in network.parameters() if p.grad is not None], clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        return network, losses

    def assert_same_weights(self, engine, network, within=1e-5):
        found = engine.master_weights()
        for name, parameter in network.named_parameters():
            if name in found:
                worst = (found[name] - parameter.detach().cpu().float()).abs().max().item()
                self.assertLess(worst, within, name)

    def assert_refused(self, function, *arguments, **options):
        """In the words that the tables have for the behaviour that the test is named after."""
        name = self._testMethodName.removeprefix("test_").lower()
        said = {row.replace(" ", ""): said for row, said in table(self.page).items()}[name]
        self.assertRegex(said, "^refused: ", name)
        with self.assertRaises((deepspeed.Error, AttributeError, ImportError)) as raised:
            function(*arguments, **options)
        self.assertIn(said.removeprefix("refused: "), str(raised.exception))
        return raised.exception
