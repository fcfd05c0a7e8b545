#!/usr/bin/env python3
"""The loss of rows of several documents, of which parts are learned, by transformers and by `spillway finetune --eval`:
a small model of each family that has a config.json in tests/references/families, with the weights of `init-model`.

transformers computes it twice. Each document by itself, which needs no mask: these values are what is compared, and
what `--write` keeps in tests/references/evaluation.jsonl. And each row whole, with a mask that lets a document see
itself alone and positions that begin anew: a second opinion on what a packed row is.
"""
import argparse
import json
import pathlib
import platform
import random
import shutil
import subprocess
import sys

import torch
import transformers

ROOT = pathlib.Path(__file__).resolve().parents[2]
FAMILIES = ROOT / "tests/references/families"
LENGTH, VOCABULARY, SEED = 32, 300, 7  # no longer than what Phi-3 takes other rotary factors for
LIMITS = {"fp32": 1e-6, "bf16": 1e-2}  # relative; in bf16 PyTorch rounds in an order of its own


def make_rows():
    """Eight rows of three documents, lists of (token, whether it is learned); the last row is not full."""
    chance = random.Random(SEED)
    return [[[(chance.randrange(VOCABULARY), chance.random() < 0.6) for _ in range(length)]
             for length in (7, 14, 11 if row < 7 else 6)] for row in range(8)]


def losses_of(model, tokens, learned, **how):
    logits = model(input_ids=torch.tensor([tokens]), use_cache=False, **how).logits[0, :-1].float()
    losses = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    return losses[torch.tensor(learned[1:])].double()


def alone(model, row):
    return torch.cat([losses_of(model, [t for t, _ in document], [learns for _, learns in document])
                      for document in row])


def packed(model, row):
    """The whole row, masked by hand; nothing predicts a document's first token."""
    tokens = [token for document in row for token, _ in document]
    learned = [learns and at > 0 for document in row for at, (_, learns) in enumerate(document)]
    positions = torch.tensor([[at for document in row for at in range(len(document))]])
    of = torch.tensor([number for number, document in enumerate(row) for _ in document])
    sees = (of[:, None] == of[None, :]) & torch.ones(len(of), len(of)).tril().bool()
    low = torch.finfo(model.dtype).min
    masks = {}
    window = getattr(model.config, "sliding_window", None)
    near = sees & (torch.arange(len(of))[:, None] - torch.arange(len(of))[None, :] < (window or len(of)))
    for kind, allowed in (("full_attention", sees), ("sliding_attention", near)):
        masks[kind] = torch.zeros(allowed.shape, dtype=model.dtype).masked_fill(~allowed, low)[None, None]
    kinds = getattr(model.config, "layer_types", None) or []
    mask = masks if len(set(kinds)) > 1 or "gemma" in model.config.model_type else \
        masks["sliding_attention" if window else "full_attention"]
    return losses_of(model, tokens, learned, attention_mask=mask, position_ids=positions)


def with_transformers(folder, dtype, rows, loss):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        losses = torch.cat([loss(model, row) for row in rows])
    return losses.mean().item(), len(losses)


def with_spillway(spillway, work, model, data, dtype):
    log, config = work / "steps.jsonl", work / "ds_config.json"
    log.unlink(missing_ok=True)
    config.write_text(json.dumps({
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "zero_optimization": {"stage": 0}}))
    subprocess.run([spillway, "finetune", "--config", config, "--model", model, "--data", data, "--eval-data", data,
                    "--eval", "1", "--steps", "1", "--log", log], check=True, capture_output=True)
    return json.loads(log.read_text().splitlines()[0])


def compare(family, arguments, rows, data):
    model = arguments.work / family
    subprocess.run([arguments.spillway, "init-model", model, "--from", FAMILIES / f"{family}.json", "--seed", "1"],
                   check=True, capture_output=True)
    found, good = [], True
    for dtype in ("fp32", "bf16"):
        loss, tokens = with_transformers(model, dtype, rows, alone)
        whole, _ = with_transformers(model, dtype, rows, packed)
        ours = with_spillway(arguments.spillway, arguments.work, model, data, dtype)
        difference = abs(ours["eval_loss"] / loss - 1)
        good &= difference <= LIMITS[dtype] and ours["eval_tokens"] == tokens
        found.append({"family": family, "dtype": dtype, "loss": loss, "tokens": tokens})
        print(json.dumps({**found[-1], "packed": whole, "spillway": ours["eval_loss"],
                          "perplexity": ours["perplexity"], "relative_difference": float(f"{difference:.3g}"),
                          "of_packed": float(f"{abs(ours['eval_loss'] / whole - 1):.3g}"), "limit": LIMITS[dtype]}))
    return found, good


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--spillway", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    arguments.spillway, arguments.work = arguments.spillway.resolve(), arguments.work.resolve()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    sys.path.insert(0, str(ROOT / "tests/cli"))
    from prepared_data import write_prepared
    rows = make_rows()
    data = write_prepared(arguments.work / "data", rows, length=LENGTH)
    lines = [{"made_by": "bench/peers/evaluate.py --write", "seq": LENGTH, "rows": rows, "torch": torch.__version__,
              "transformers": transformers.__version__, "python": platform.python_version()}]
    good = True
    for file in sorted(FAMILIES.glob("*.json")):
        found, same = compare(file.stem, arguments, rows, data)
        lines += found
        good &= same
    if arguments.write:
        file = ROOT / "tests/references/evaluation.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("equal within the limits" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
