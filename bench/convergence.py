#!/usr/bin/env python3
"""What a training ends with when Adam's moments are kept in bf16 or int8, beside exact ones: `spillway finetune` from
the same weights on the same rows, once for each form and seed. A seed gives the first weights and the order of rows.

The text is that of DATA, files and directories of text; bytes are its tokens. Rows are used once each. The last ones,
a twentieth as many steps as the training has, are the same for all seeds and train nothing: the rate is 0 by then, so
their mean loss, `end`, is of what was learned. With --rare tokens are words, numbered by how often they come, and the
moments of the embedding are reduced as well: most of its rows get a gradient once in many steps. There `int8-default`
is int8 with the embedding exact, as it is where a configuration says nothing of it. `fp32-nudged` is exact at a rate
that is a millionth higher: how far apart two runs of a seed end when next to nothing sets them apart.

One JSON line a run: `losses`, means of a fiftieth of its steps each, and `end`. The last line has by form `end` of all
seeds, `spread`, the largest less the smallest of exact states, and `apart`, by how much each seed of a form lies above
the exact run of that seed. Runs that --log has already are not made again, so that several may share a log.
convergence_pytorch.py has the peers, convergence_plots.py draws.

  bench/convergence.py --data /usr/lib/python3.11 --layers 6 --width 384 --steps 3000 --log runs.jsonl
"""
import argparse
import array
import collections
import functools
import json
import os
import pathlib
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
MEANS = 50
HELD_SHARE = 20  # one step in so many looks at what was learned


def text_of(places, most):
    """About `most` bytes of it: whole files, in an order that is always the same."""
    files = sorted(file for place in map(pathlib.Path, places)
                   for file in (place.rglob("*") if place.is_dir() else [place])
                   if file.is_file() and not file.is_symlink())
    random.Random(0).shuffle(files)
    parts, size = [], 0
    for file in files:
        if size >= most:
            break
        part = file.read_bytes()
        try:
            readable = b"\0" not in part and bool(part.decode())
        except UnicodeDecodeError:
            readable = False
        if readable:
            parts.append(part)
            size += len(part)
    return b"\n".join(parts)


def tokens_of(text, vocabulary):
    """Words, the commonest first; what the vocabulary has no room for is its last number."""
    words = re.findall(rb"\w+|[^\w\s]|\s+", text)
    numbers = {word: i for i, (word, _) in enumerate(collections.Counter(words).most_common(vocabulary - 1))}
    return array.array("H", (numbers.get(word, vocabulary - 1) for word in words))


def rows_of(values, sequence, seed, training, held):
    """Rows for `training` in that seed's order, then `held` ones that are in no seed's training, end to end: row r is
    values r * sequence to (r + 1) * sequence, and the one after it, which is the last token to be guessed."""
    starts = list(range(0, len(values) - sequence, sequence))
    random.Random(0).shuffle(starts)
    if len(starts) < training + held:
        sys.exit(f"convergence.py: the text has {len(starts)} rows and {training + held} are wanted; name more of it "
                 "in --data, or take more of that by --bytes")
    kept, rest = starts[:held], starts[held:]
    random.Random(seed).shuffle(rest)
    found = array.array("H")
    for start in [*rest[:training], *kept]:
        found.extend(values[start:start + sequence])
    found.append(values[start + sequence])
    return found


def means_of(losses):
    each = max(len(losses) // MEANS, 1)
    return [round(statistics.fmean(losses[i:i + each]), 5) for i in range(0, len(losses) - each + 1, each)]


def nudge_of(form):
    """Of the rate. The least that makes a run another one, which shows how far apart runs end for no reason at all."""
    return 1 + 1e-6 if form.endswith("-nudged") else 1


def cpu_seconds():
    """Of commands that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Task:
    """The model, the rows and the rates of a run, by the program's own commands."""

    def __init__(self, options, folder):
        self.options, self.folder = options, folder
        self.held = max(options.steps // HELD_SHARE, 1)
        self.warmup = max(options.steps // 20, 1)
        text = text_of(options.data, options.bytes)
        self.tokens = tokens_of(text, options.vocabulary) if options.rare else text
        self.vocabulary = options.vocabulary if options.rare else 256

    def say(self, *command):
        done = subprocess.run([self.options.spillway, *map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stderr}")

    def identity(self, form, seed):
        names = ("layers", "width", "steps", "batch", "sequence", "rate", "optimizer", "dtype", "rare", "data", "bytes")
        return {"bench": "convergence", "form": form, "seed": seed, "vocabulary": self.vocabulary,
                **{name: getattr(self.options, name) for name in names}}

    def model(self, seed):
        """A directory with that seed's first weights."""
        o, model = self.options, self.folder / f"model{seed}"
        if not model.exists():
            self.say("init-model", model, "--layers", o.layers, "--width", o.width, "--heads", max(o.width // 64, 1),
                     "--vocab", self.vocabulary, "--context", o.sequence, "--seed", seed)
        return model

    def rows(self, seed):
        o = self.options
        return rows_of(self.tokens, o.sequence, seed, o.steps * o.batch, self.held * o.batch)

    def config(self, form):
        o = self.options
        exact = {"exact_states": []} if o.rare and form in ("bf16", "int8") else {}
        return {
            "train_micro_batch_size_per_gpu": o.batch, "gradient_clipping": 1.0,
            **({o.dtype: {"enabled": True}} if o.dtype != "fp32" else {}),
            "optimizer": {"type": o.optimizer, "params": {
                "lr": o.rate * nudge_of(form), "weight_decay": 0.1,
                "betas": [0.9, 0.95] if o.optimizer != "Lion" else [0.9, 0.99]}},
            "scheduler": {"type": "WarmupCosineLR", "params": {
                "total_num_steps": o.steps, "warmup_num_steps": self.warmup, "cos_min_ratio": 0}},
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
            "spillway": {"states": form.partition("-")[0], "threads": o.threads, **exact}}

    def run(self, form, seed):
        o = self.options
        data, log, config = (self.folder / name for name in ("rows.bin", "log", "ds_config.json"))
        data.write_bytes(self.rows(seed).tobytes())
        config.write_text(json.dumps(self.config(form)))
        log.unlink(missing_ok=True)
        begin = cpu_seconds()
        self.say("finetune", "--config", config, "--model", self.model(seed), "--data", data, "--seq", o.sequence,
                 "--steps", o.steps + self.held, "--log", log)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        losses = [line["loss"] for line in lines]
        if any(line["lr"] for line in lines[o.steps:]):
            sys.exit(f"convergence.py: the rate was {lines[o.steps]['lr']} after the schedule's end, and rows that are "
                     "held back were trained on")
        return {**self.identity(form, seed), "losses": means_of(losses[:o.steps]),
                "end": statistics.fmean(losses[o.steps:]), "cpu_seconds": round(cpu_seconds() - begin)}


def summary(lines, exact="fp32"):
    """By form: where seeds end, and by how much above the exact run of the same seed."""
    ends = collections.defaultdict(dict)
    for line in lines:
        if "end" in line:
            ends[line["form"]][line["seed"]] = line["end"]
    said = {"end": {form: list(found.values()) for form, found in ends.items()}}
    if exact in ends:
        found = ends[exact]
        said["spread"] = max(found.values()) - min(found.values())
        said["apart"] = {form: [end - found[seed] for seed, end in of.items() if seed in found]
                         for form, of in ends.items() if form != exact}
    return said


def known_or_made(log, wanted, make):
    """A run's line: what the log has of it, or what make() returns, which goes there."""
    known = log.read_text().splitlines() if log and log.exists() else []
    for line in map(json.loads, known):
        if wanted.items() <= line.items():
            return line
    line = make()
    print(json.dumps(line), flush=True)
    if log:
        with open(log, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            os.fsync(file.fileno())
    return line


def arguments(description):
    """What both programs take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", nargs="+", default=["/usr/share/common-licenses"], metavar="DATA")
    add("--bytes", type=int, default=16 << 20, help="of the text, about")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3])
    for name, default in (("layers", 6), ("width", 384), ("steps", 3000), ("batch", 8), ("sequence", 128),
                          ("vocabulary", 32768)):
        add(f"--{name}", type=int, default=default)
    add("--rate", type=float, default=1e-3)
    add("--threads", type=int, default=0, help="that compute; 0: as many as there are cores")
    add("--rare", action="store_true")
    add("--log", type=pathlib.Path, help="where runs are kept, a line each")
    add("--spillway", default=str(ROOT / "build/tools/spillway"))
    add("--tiny", action="store_true", help="a few small steps")
    return parser


def make_tiny(options):
    options.layers, options.width, options.steps, options.batch, options.sequence = 1, 64, 4, 2, 32
    options.seeds, options.vocabulary = [1, 2], 64


def main():
    parser = arguments(__doc__)
    parser.add_argument("--forms", nargs="+", default=["fp32", "bf16", "int8"])
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), default="bf16")
    options = parser.parse_args()
    if options.tiny:
        make_tiny(options)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(options, pathlib.Path(folder))
        found = [known_or_made(options.log, task.identity(form, seed), functools.partial(task.run, form, seed))
                 for seed in options.seeds for form in options.forms]
    print(json.dumps({"bench": "convergence", **summary(found)}))


if __name__ == "__main__":
    main()
