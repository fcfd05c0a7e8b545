#!/usr/bin/env python3
"""What a training ends with when Adam's moments are kept in bf16 or int8, beside exact ones: `spillway finetune` from
the same weights on the same rows, once for each form and seed. A seed gives the first weights and the order of rows.

Rows are used once each, so the loss of a step is of text that the model has not seen. The text is that of DATA, files
and directories of text; bytes are its tokens. With --rare tokens are words, numbered by how often they come, and the
moments of the embedding are reduced as well: most of its rows get a gradient once in many steps.

One JSON line a run: `losses`, means of a fiftieth of its steps each, and `end`, the mean of its last tenth. The last
line has by form `end` of all seeds, `spread`, the largest less the smallest of exact states, and `apart`, by how much
the mean of a form lies above that of exact ones. Runs that --log has already are not made again.

  bench/convergence.py --data /usr/share/doc /usr/lib/python3 --layers 6 --width 384 --steps 3000 --log runs.jsonl
"""
import argparse
import array
import collections
import json
import os
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MEANS = 50


def text_of(places):
    """All of it, as bytes."""
    files = sorted(file for place in map(pathlib.Path, places)
                   for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file())
    parts = []
    for file in files:
        part = file.read_bytes()
        if b"\0" not in part:
            parts.append(part)
    return b"\n".join(parts)


def tokens_of(text, vocabulary):
    """Words, the commonest first; what the vocabulary has no room for is its last number."""
    words = re.findall(rb"\w+|[^\w\s]|\s+", text)
    numbers = {word: i for i, (word, _) in enumerate(collections.Counter(words).most_common(vocabulary - 1))}
    return array.array("H", (numbers.get(word, vocabulary - 1) for word in words))


def shuffled(values, row, seed, most):
    """Whole rows of the text in that seed's order, as a training reads them: row + 1 values each."""
    starts = list(range(0, len(values) - row, row + 1))
    random.Random(seed).shuffle(starts)
    if len(starts) < most:
        sys.exit(f"convergence.py: the text has {len(starts)} rows and {most} are wanted; name more of it in --data")
    return type(values)().join(values[start:start + row + 1] for start in starts[:most]) if isinstance(values, bytes) \
        else array.array("H", (value for start in starts[:most] for value in values[start:start + row + 1]))


class Runs:
    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.rows = options.steps * options.batch
        text = text_of(options.data)
        self.tokens = tokens_of(text, options.vocabulary) if options.rare else text
        self.vocabulary = options.vocabulary if options.rare else 256

    def say(self, *command):
        done = subprocess.run([self.options.spillway, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stderr}")

    def identity(self, form, seed):
        names = ("layers", "width", "steps", "batch", "sequence", "rate", "optimizer", "dtype", "rare")
        return {"bench": "convergence", "form": form, "seed": seed, "vocabulary": self.vocabulary,
                **{name: getattr(self.options, name) for name in names}}

    def run(self, form, seed):
        o, folder = self.options, self.folder
        model, data, log = folder / f"model{seed}", folder / f"rows{seed}.{'bin' if o.rare else 'txt'}", folder / "log"
        if not model.exists():
            self.say("init-model", model, "--layers", o.layers, "--width", o.width, "--heads", max(o.width // 64, 1),
                     "--vocab", self.vocabulary, "--context", o.sequence, "--seed", seed)
            data.write_bytes(bytes(shuffled(self.tokens, o.sequence, seed, self.rows)))
        config = folder / "ds_config.json"
        config.write_text(json.dumps({
            "train_micro_batch_size_per_gpu": o.batch, "gradient_clipping": 1.0,
            **({o.dtype: {"enabled": True}} if o.dtype != "fp32" else {}),
            "optimizer": {"type": o.optimizer, "params": {"lr": o.rate, "weight_decay": 0.1, "betas": [0.9, 0.95]
                                                          if o.optimizer != "Lion" else [0.9, 0.99]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": o.steps,
                                                               "warmup_num_steps": max(o.steps // 20, 1)}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "spillway": {"states": form, **({"exact_states": []} if o.rare and form != "fp32" else {})}}))
        log.unlink(missing_ok=True)
        self.say("finetune", "--config", config, "--model", model, "--data", data, "--seq", o.sequence,
                 "--steps", o.steps, "--log", log)
        losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
        each = max(len(losses) // MEANS, 1)
        return {**self.identity(form, seed), "losses": [round(statistics.fmean(losses[i:i + each]), 5)
                                                        for i in range(0, len(losses) - each + 1, each)],
                "end": statistics.fmean(losses[-max(len(losses) // 10, 1):])}


def summary(lines):
    ends = collections.defaultdict(list)
    for line in lines:
        ends[line["form"]].append(line["end"])
    said = {"bench": "convergence", "end": ends}
    if "fp32" in ends:
        exact = ends["fp32"]
        said["spread"] = max(exact) - min(exact)
        said["apart"] = {form: statistics.fmean(found) - statistics.fmean(exact) for form, found in ends.items()
                         if form != "fp32"}
    return said


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", nargs="+", default=["/usr/share/common-licenses"], metavar="DATA")
    add("--forms", nargs="+", default=["fp32", "bf16", "int8"])
    add("--seeds", type=int, default=3)
    for name, default in (("layers", 6), ("width", 384), ("steps", 3000), ("batch", 8), ("sequence", 128),
                          ("vocabulary", 32768)):
        add(f"--{name}", type=int, default=default)
    add("--rate", type=float, default=1e-3)
    add("--optimizer", default="AdamW")
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    add("--rare", action="store_true")
    add("--log", type=pathlib.Path, help="where runs are kept, a line each")
    add("--spillway", default=str(ROOT / "build/tools/spillway"))
    add("--tiny", action="store_true", help="a few small steps")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.width, options.steps, options.batch, options.sequence = 1, 64, 4, 2, 32
        options.seeds, options.vocabulary = 2, 64
    known = [json.loads(line) for line in options.log.read_text().splitlines()] \
        if options.log and options.log.exists() else []
    found = []
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(options, pathlib.Path(folder))
        for seed in range(1, options.seeds + 1):
            for form in options.forms:
                wanted = runs.identity(form, seed)
                line = next((line for line in known if wanted.items() <= line.items()), None)
                if line is None:
                    line = runs.run(form, seed)
                    print(json.dumps(line), flush=True)
                    if options.log:
                        with open(options.log, "a", encoding="utf-8") as log:
                            log.write(json.dumps(line) + "\n")
                            os.fsync(log.fileno())
                found.append(line)
    print(json.dumps(summary(found)))


if __name__ == "__main__":
    main()
