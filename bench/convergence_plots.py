#!/usr/bin/env python3
"""Tables and plots of what convergence.py and convergence_pytorch.py found.

Each LOG is one experiment, and its name without `.jsonl` is the plot's. Prints a table in Markdown for each: where each
seed ends, the mean, and by how much each lies above the exact run of the same seed: Spillway's for its forms,
PyTorch's AdamW for the peers. --out draws LOG.svg: losses, losses less those of the exact run of the same seed, and
ends, with a band between the exact runs' highest and lowest. --page says whether a document has these tables, each
after a comment `<!-- LOG -->`; --write puts them there.

  bench/convergence_plots.py bench/results/convergence-*.jsonl --out docs --page docs/states_evidence.md --write

Drawing needs Matplotlib (Debian: python3-matplotlib).
"""
import argparse
import collections
import importlib.util
import json
import pathlib
import re
import statistics
import sys

NAMES = {"fp32": "exact", "torch": "torch AdamW", "torchao8bit": "torchao AdamW8bit",
         "bitsandbytes8bit": "bitsandbytes AdamW8bit", "int8-default": "int8, embedding exact",
         "bf16-all": "bf16, embedding too", "int8-all": "int8, embedding too", "fp32-nudged": "exact, nudged"}
EXACT_OF = {"torch": "torch", "torchao8bit": "torch", "bitsandbytes8bit": "torch"}
COLOURS = {"fp32": "#1f2933", "fp32-nudged": "#a0a8b0", "bf16": "#1f77b4", "bf16-all": "#aec7e8", "int8": "#d62728",
           "int8-all": "#ff9896", "int8-default": "#ff9896", "torch": "#7f7f7f", "torchao8bit": "#2ca02c",
           "bitsandbytes8bit": "#9467bd"}


def read(log):
    """{form: {seed: line}}, in the order of first appearance; refusals are {form: words}."""
    runs, refused = collections.defaultdict(dict), {}
    for line in map(json.loads, log.read_text().splitlines()):
        if "refused" in line:
            refused[line["form"]] = line["refused"]
        elif "losses" in line:
            runs[line["form"]][line["seed"]] = line
    order = [*COLOURS]
    return dict(sorted(runs.items(), key=lambda item: order.index(item[0]))), refused


def exact_of(form, runs):
    return runs.get(EXACT_OF.get(form, "fp32"), {})


def table(runs, refused):
    seeds = sorted({seed for of in runs.values() for seed in of})
    lines = ["| states | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | above the exact run, by seed |",
             "|---|" + "---|" * (len(seeds) + 2)]
    for form, of in runs.items():
        ends = [f"{of[seed]['end']:.4f}" if seed in of else "" for seed in seeds]
        exact = exact_of(form, runs)
        found = [line["end"] for line in of.values()]
        if exact is of:
            said = f"spread {max(found) - min(found):.4f}" if len(found) > 1 else ""
        else:
            apart = [of[seed]["end"] - exact[seed]["end"] for seed in seeds if seed in of and seed in exact]
            said = ", ".join(f"{value:+.4f}" for value in apart)
            said += f"; mean {statistics.fmean(apart):+.4f}" if len(apart) > 1 else ""
        lines.append(f"| {NAMES.get(form, form)} | {' | '.join(ends)} | {statistics.fmean(found):.4f} | {said} |")
    lines += [f"| {NAMES.get(form, form)} | refused: {words} |" for form, words in refused.items()]
    return "\n".join(lines)


def draw(runs, title, file):
    import matplotlib
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "spillway", "font.size": 8, "axes.spines.top": False,
                                "axes.spines.right": False, "svg.fonttype": "none", "path.simplify": True})
    from matplotlib import pyplot
    figure, (losses, apart, ends) = pyplot.subplots(1, 3, figsize=(10, 3), layout="constrained")
    for place, (form, of) in enumerate(runs.items()):
        colour, exact = COLOURS[form], exact_of(form, runs)
        some = next(iter(of.values()))
        steps = [(i + 1) * some["steps"] / len(some["losses"]) for i in range(len(some["losses"]))]
        losses.plot(steps, [statistics.fmean(row) for row in zip(*(line["losses"] for line in of.values()))],
                    color=colour, linewidth=1, label=NAMES.get(form, form))
        both = [seed for seed in of if seed in exact]
        for seed in both if exact is not of else []:
            apart.plot(steps, [a - b for a, b in zip(of[seed]["losses"], exact[seed]["losses"])], color=colour,
                       linewidth=0.7)
        found = [line["end"] for line in of.values()]
        if exact is of:
            ends.axhspan(min(found), max(found), color=colour, alpha=0.12, linewidth=0)
        ends.plot([place] * len(found), found, "o", color=colour, markersize=4)
    apart.axhline(0, color=COLOURS["fp32"], linewidth=0.7)
    losses.set(title=f"{title}: loss, mean of seeds", xlabel="step")
    losses.legend(frameon=False, loc="upper right")
    apart.set(title="less the exact run of the same seed", xlabel="step")
    ends.set(title="end, by seed; band: exact")
    ends.set_xticks(range(len(runs)), [NAMES.get(form, form).replace(" ", "\n", 1) for form in runs], rotation=30)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", type=pathlib.Path, metavar="LOG")
    parser.add_argument("--out", type=pathlib.Path, help="a folder for plots")
    parser.add_argument("--page", type=pathlib.Path, help="fail where this document lacks a table")
    parser.add_argument("--write", action="store_true", help="put the tables into it")
    options = parser.parse_args()
    if options.out and importlib.util.find_spec("matplotlib") is None:
        print("skipped: this Python has no Matplotlib")
        sys.exit(77)
    page = options.page.read_text(encoding="utf-8") if options.page else None
    lacks = []
    for log in options.logs:
        runs, refused = read(log)
        made = table(runs, refused)
        print(f"{log.stem}\n\n{made}\n")
        if page is not None and options.write:
            page = re.sub(rf"(?<=<!-- {log.stem} -->\n)\n(\|.*\n|\n(?=\|))*",
                          lambda _, made=made: f"\n{made}\n", page)
            options.page.write_text(page, encoding="utf-8")
        if page is not None and f"<!-- {log.stem} -->\n\n{made}\n" not in page:
            lacks.append(log.stem)
        if options.out:
            draw(runs, log.stem, options.out / f"{log.stem}.svg")
    if lacks:
        sys.exit(f"{options.page}: has not the tables of {', '.join(lacks)} as they are now; copy them from above")


if __name__ == "__main__":
    main()
