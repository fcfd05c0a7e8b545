#!/usr/bin/env python3
"""Greedy tokens of transformers' generate() and of `spillway generate` for the same models, in fp32: a GPT-2, and a
small model of each family that has a config.json in tests/references/families; and of some with a LoRA adapter, by
peft. Called by tools/compare_pytorch.sh.

`--write` keeps transformers' tokens, with the logarithm of each one's probability, in tests/references/generated.jsonl,
and those with adapters in generated_adapters.jsonl.
"""
import json
import shutil
import subprocess
import sys

import peft
import torch
import transformers

from compare import ROOT, TEXT, arguments_of_references  # which finds tests/cli as well
from loud_model import make_adapter, make_loud

PROMPT, TOKENS = 70, 60  # longer than the families' windows, and than what their scaled positions were trained with
GPT2 = ["--layers", "3", "--width", "72", "--heads", "4", "--vocab", "300", "--context", "160", "--seed", "1"]
# Products alone and fused, before an activation, and after it.
ADAPTERS = {
    "gpt2": {"rank": 4, "alpha": 8, "targets": ["c_attn", "c_fc", "c_proj"], "seed": 1},
    "gemma2": {"rank": 3, "alpha": 6, "targets": ["q_proj", "v_proj", "o_proj", "down_proj"], "seed": 2},
    "llama": {"rank": 4, "alpha": 2, "targets": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                 "down_proj"], "seed": 3},
    "phi3": {"rank": 2, "alpha": 4, "targets": ["qkv_proj", "gate_up_proj"], "seed": 4},
}
LIMIT = 1e-4  # of a log probability; they are near -5


def models():
    yield "gpt2", GPT2
    for file in sorted((ROOT / "tests/references/families").glob("*.json")):
        yield file.stem, ["--from", str(file.relative_to(ROOT))]


def run(*command):
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True, cwd=ROOT).stdout


def with_transformers(folder, prompt, adapter):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter:
        model = peft.PeftModel.from_pretrained(model, adapter)
    model.eval()
    made = model.generate(input_ids=torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                          max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None,
                          pad_token_id=0, return_dict_in_generate=True, output_logits=True)
    tokens = made.sequences[0, len(prompt):].tolist()
    logits = torch.stack([step[0].double() for step in made.logits])
    logs = logits.log_softmax(-1)
    best = logits.topk(2).values
    return {"tokens": tokens, "log_probabilities": [round(logs[i, t].item(), 6) for i, t in enumerate(tokens)],
            "nearest": (best[:, 0] - best[:, 1]).min().item()}


def with_spillway(spillway, folder, prompt, adapter, work):
    log = work / "tokens.jsonl"
    log.unlink(missing_ok=True)
    run(spillway, "generate", "--model", folder, "--ids", "--prompt", " ".join(map(str, prompt)), "--tokens", TOKENS,
        "--past-end", "--log", log, *(["--adapter", adapter] if adapter else []))
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [step for step in steps if "token" in step]
    return [step["token"] for step in steps], [step["log_probability"] for step in steps]


def compare(spillway, work, name, init, prompt, wanted):
    """A line of the references, and whether both give the same. `wanted`: the adapter, if any."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    run(spillway, "init-model", work / "model", *init)
    make_loud(work / "model")
    adapter = None
    if wanted:
        adapter = work / "adapter"
        make_adapter(work / "model", adapter, **wanted)
    theirs = with_transformers(work / "model", prompt, adapter)
    tokens, logs = with_spillway(spillway, work / "model", prompt, adapter, work)
    worst = max(abs(a - b) for a, b in zip(logs, theirs["log_probabilities"], strict=True))
    same = tokens == theirs["tokens"] and worst <= LIMIT
    print(json.dumps({"model": name, "value": "greedy tokens" + (" with an adapter" if wanted else ""),
                      "same": tokens == theirs["tokens"], "different_tokens": len(set(tokens)),
                      "log_probability_difference": float(f"{worst:.3g}"), "limit": LIMIT,
                      "nearest_logits": float(f"{theirs['nearest']:.3g}")}))
    line = {"model": name, "init_model": " ".join(init), **({"adapter": wanted} if wanted else {}), "prompt": prompt,
            "tokens": theirs["tokens"], "log_probabilities": theirs["log_probabilities"]}
    return line, same


def main():
    arguments = arguments_of_references()
    spillway, work = arguments.spillway.resolve(), arguments.work.resolve() / "generate"
    prompt = list(TEXT.read_bytes()[1000:1000 + PROMPT])
    about = {"made_by": "tools/compare_pytorch.sh --write", "data": TEXT.name, "dtype": "fp32",
             "torch": torch.__version__, "transformers": transformers.__version__}
    good = True
    for file, adapters in (("generated", {}), ("generated_adapters", ADAPTERS)):
        lines = [about | ({"peft": peft.__version__} if adapters else {})]
        for name, init in models():
            if (adapters and name not in adapters) or (arguments.only and arguments.only not in name):
                continue
            line, same = compare(spillway, work, name, init, prompt, adapters.get(name))
            lines.append(line)
            good &= same
        if arguments.write and not arguments.only:
            (arguments.references / f"{file}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    print("equal within the limits" if good else "DIFFERENT")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
