#!/usr/bin/env python3
"""Runs scripts that people have, as they are and with their few lines for Spillway, and compares the losses.

usage: stock_scripts.py --python PYTHON [--sources DIR] [--work DIR] [--out FILE.jsonl] [--processes N] [NAME...]
       stock_scripts.py --table FILE.jsonl

A row of tools/stock/rows.json says which script of which repository, its model, data and arguments, and which of its
lines change. Models are random and tiny (stock/models.py), data sets a few rows (stock/sets.py): no hub is asked. Both
runs are children of one PYTHON, which has the packages (stock/runner.py). "both" are lines that neither run can have,
since a hub or a download would be asked, or which are errors of the script. Scripts are read from DIR/NAME of the
repository, which is fetched there where it is missing; those of a package come from PYTHON's own. Each row is a line of
FILE.jsonl; the table is markdown. With N processes each script is run as torchrun runs it, and compared is the mean of
what they say.

SPILLWAY_LIBRARY and SPILLWAY_BINARY name a build's, as for the package.
"""
import argparse
import difflib
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
TOLERANCE = 1e-5


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="a Python with PyTorch and the scripts' packages")
    parser.add_argument("--sources", default="build-stock/sources", help="where checkouts are, or are fetched to")
    parser.add_argument("--work", default="build-stock/work", help="for models, data sets and what the runs write")
    parser.add_argument("--out", help="a line of JSON for each row goes to the end of this file")
    parser.add_argument("--processes", type=int, default=1, help="that run each script together; 1")
    parser.add_argument("--table", help="prints the table of such a file, and runs nothing")
    parser.add_argument("names", nargs="*", help="rows to run; all of them")
    return parser.parse_args()


def python_says(python, code):
    return subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def source_folder(name, source, options):
    """Of a repository's checkout, or of a package."""
    if "package" in source:
        code = f"import importlib.util as u; print(u.find_spec('{source['package']}').submodule_search_locations[0])"
        return pathlib.Path(python_says(options.python, code)).parent
    folder = pathlib.Path(options.sources, name).resolve()
    if not folder.exists():
        for words in (["init", "-q"], ["fetch", "-q", "--depth", "1", source["git"], source["at"]],
                      ["checkout", "-q", "FETCH_HEAD"]):
            folder.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "-C", folder, *words], check=True)
    return folder


def changed(text, changes, row):
    """The script with its other lines. Each is there exactly once."""
    for before, after in changes:
        if text.count(before) != 1:
            raise SystemExit(f"{row['name']}: {before!r} is in its script {text.count(before)} times, and not once; "
                             "mend its changes in rows.json")
        text = text.replace(before, after)
    return text


def lines_changed(before, after):
    """Lines that are other ones, new, or gone."""
    found = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in found if kind != "equal")


def configuration(row, folder):
    place = {"device": "nvme", "nvme_path": str(folder / "store")}
    made = {"zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"tile_elements": 4096, "device": "host"}}
    return made | row.get("config", {})


class Runner:
    """PYTHON with everything imported, which runs scripts in children of its own (stock/runner.py)."""

    def __init__(self, options):
        work = pathlib.Path(options.work).resolve()
        work.mkdir(parents=True, exist_ok=True)
        self.places = {"models": work / "models", "data": work / "data"}
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(work / "hub"), "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu",
            "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "python")])}
        self._process = subprocess.Popen([options.python, "-m", "stock.runner"], env=environment, text=True,
                                         stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def make(self, row):
        wanted = [(str(self.places[room]), room, kind) for room in self.places for kind in row.get(room, ())]
        if self.ask({"make": wanted}):
            raise SystemExit(f"{row['name']}: its model or data could not be made")


def run(row, kind, text, source, runner, options):
    """The losses of a run, and why it ended if not well."""
    folder = pathlib.Path(options.work, row["name"].replace(" ", "-").replace("/", "-"), kind).resolve()
    subprocess.run(["rm", "-rf", folder], check=True)
    folder.mkdir(parents=True)
    script, losses = folder / pathlib.Path(row["script"]).name, folder / "losses.jsonl"
    script.write_text(text)
    (folder / "ds_config.json").write_text(json.dumps(configuration(row, folder), indent=1))
    places = runner.places | {"out": folder / "out"}
    words = shlex.split(row.get("arguments", "") + " " + row.get(f"{kind}_arguments", ""))
    status = runner.ask({
        "processes": options.processes,
        "script": str(script), "words": [word.format(**places) for word in words], "folder": str(folder),
        "losses": str(losses), "watch": row.get("watch", "loss"), "environment": row.get("environment", {}),
        "path": [str(folder), str(pathlib.Path(source, row["script"]).parent)]})
    found, said = [], []
    for rank in range(options.processes):
        of_rank = folder / f"{losses.name}.{rank}"
        found.append([json.loads(line) for line in of_rank.read_text().splitlines()] if of_rank.exists() else [])
        said += [line for line in (folder / f"log.{rank}").read_text(errors="replace").splitlines() if line.strip()]
    # Ranks add their gradients up: what goes backward in Spillway is each one's part of the mean.
    parts = 1 if kind == "spillway" and row.get("watch", "loss") == "loss" else options.processes
    means = [sum(of_ranks) / parts for of_ranks in zip(*found)]
    return means, "" if status == 0 else f"{status}: {said[-1] if said else ''}"


def compare(row, sources, runner, options):
    source = sources[row["source"]]
    script = changed(pathlib.Path(source, row["script"]).read_text(), row.get("both", []), row)
    ours, plain = changed(script, row["changes"], row), script
    if "plain_script" in row:  # the same one in plain PyTorch, where its repository has it beside DeepSpeed's
        plain = changed(pathlib.Path(source, row["plain_script"]).read_text(), row.get("plain_both", []), row)
    steps, began = row.get("steps", 10), time.monotonic()
    wanted, failed = run(row, "plain", plain, source, runner, options)
    found, refused = run(row, "spillway", ours, source, runner, options)
    wanted, found = wanted[:steps], found[:steps]
    result = {"script": row["name"], "source": row["source"], "path": row["script"], "steps": len(found),
              "processes": options.processes,
              "watched": row.get("watch", "loss"), "lines_changed": lines_changed(script, ours),
              "seconds": round(time.monotonic() - began),
              "plain": wanted, "spillway": found}
    if failed or len(wanted) < steps:
        result["plain_failed"] = failed or f"{len(wanted)} losses instead of {steps}"
    if refused or len(found) < len(wanted):
        result["spillway_failed"] = refused or f"{len(found)} losses instead of {len(wanted)}"
    if wanted and len(wanted) == len(found):
        result["first_bits_equal"] = wanted[0] == found[0]
        result["equal_losses"] = sum(one == other for one, other in zip(wanted, found))
        result["difference"] = max(abs(one - other) / max(abs(one), 1e-12) for one, other in zip(wanted, found))
    return result


def versions(options):
    code = ("import importlib.metadata as m, json\nfound = {}\nfor n in ('torch', 'transformers', 'trl', 'peft', "
            "'lightning', 'accelerate', 'datasets', 'deepspeed'):\n    try: found[n] = m.version(n)\n"
            "    except m.PackageNotFoundError: pass\nprint(json.dumps(found))")
    return json.loads(python_says(options.python, code))


def good(result):
    return "difference" in result and "spillway_failed" not in result and "plain_failed" not in result and \
        result["difference"] <= result.get("tolerance", TOLERANCE)


def table(results):
    """The newest line of each script."""
    latest = {result["script"]: result for result in results}
    lines = ["| script | of | lines changed | losses | first loss | largest relative difference |",
             "|---|---|---|---|---|---|"]
    for result in latest.values():
        if "difference" in result:
            ends = ["same bits" if result["first_bits_equal"] else "other bits", f"{result['difference']:.1e}"]
        else:
            ends = ["", (result.get("spillway_failed") or result.get("plain_failed", ""))[:120]]
        lines.append("| " + " | ".join([f"{result['script']}", result["source"], str(result["lines_changed"]),
                                        str(result["steps"]), *ends]) + " |")
    return "\n".join(lines)


def main():
    options = arguments()
    if options.table:
        print(table(json.loads(line) for line in pathlib.Path(options.table).read_text().splitlines()))
        return 0
    description = json.loads((HERE / "stock" / "rows.json").read_text())
    rows = [row for row in description["rows"] if not options.names or row["name"] in options.names]
    if missing := set(options.names) - {row["name"] for row in rows}:
        raise SystemExit(f"rows.json has no {', '.join(sorted(missing))}")
    sources = {name: source_folder(name, description["sources"][name], options)
               for name in dict.fromkeys(row["source"] for row in rows)}
    common, results, runner = {"versions": versions(options)}, [], Runner(options)
    for row in rows:
        row["changes"] = [pair for each in row["changes"]
                          for pair in (description["changes"][each] if isinstance(each, str) else [each])]
        runner.make(row)
        results.append(compare(row, sources, runner, options) | common)
        state = "ok" if good(results[-1]) else "FAILED"
        said = {name: results[-1][name] for name in ("lines_changed", "steps", "first_bits_equal", "difference",
                                                     "plain_failed", "spillway_failed") if name in results[-1]}
        print(f"{state:7} {row['name']}: {said}", file=sys.stderr, flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(json.dumps(results[-1]) + "\n")
    print(table(results))
    return 0 if all(map(good, results)) else 1


if __name__ == "__main__":
    sys.exit(main())
