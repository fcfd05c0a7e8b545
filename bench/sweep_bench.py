#!/usr/bin/env python3
"""The sweep against the exhaustive one: wall time, and both choices head to head on the same file.

usage: sweep_bench.py --spillway BINARY --load-bench BINARY [--path DIR] [--runs 5] [--rounds 12] [--tiny]

Prints a JSON line per run and one with the medians. `share` is the sweep's choice over the exhaustive one's, the median
over rounds in which both were measured one right after the other.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time


def sweep(options, *more):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "aio.json")
        start = time.monotonic()
        command = [options.spillway, "sweep", options.path, "--allow-buffered", "--json", file, *options.quick, *more]
        subprocess.run(command, check=True, capture_output=True)
        aio = json.loads(file.read_text())["aio"]
    return {"seconds": round(time.monotonic() - start, 1), "block_size": aio["block_size"],
            "queue_depth": aio["queue_depth"]}


def setting_of(choice):
    return f"{choice['block_size']}x{choice['queue_depth']}"


def head_to_head(options, settings):
    """Rates of each setting, round by round."""
    arguments = ["--tiny"] if options.tiny else ["--rounds", str(options.rounds), "--size", "2GiB"]
    done = subprocess.run([options.load_bench, "--path", options.path, *arguments, "--setting", *settings],
                          check=True, capture_output=True, text=True)
    rates = {}
    for line in map(json.loads, done.stdout.splitlines()):
        rates.setdefault(setting_of(line), []).append(line["gb_per_s"])
    return rates


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spillway", required=True)
    parser.add_argument("--load-bench", required=True)
    parser.add_argument("--path", default=tempfile.gettempdir())
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--tiny", action="store_true", help="one small iteration, as the test suite runs it")
    options = parser.parse_args()
    options.quick = ["--seconds", "1", "--size", "16MiB"] if options.tiny else []
    shares, seconds = [], []
    for _ in range(1 if options.tiny else options.runs):
        quick, full = sweep(options), sweep(options, "--exhaustive")
        share = 1.0
        if setting_of(quick) != setting_of(full) and not options.tiny:
            rates = head_to_head(options, [setting_of(quick), setting_of(full)])
            share = statistics.median(a / b for a, b in zip(rates[setting_of(quick)], rates[setting_of(full)]))
        elif options.tiny:
            head_to_head(options, [setting_of(quick)])
        shares.append(share)
        seconds.append(quick["seconds"])
        print(json.dumps({"name": "sweep", "sweep": quick, "exhaustive": full, "share": round(share, 3)}), flush=True)
    print(json.dumps({"name": "sweep_median", "runs": len(shares), "share": round(statistics.median(shares), 3),
                      "least_share": round(min(shares), 3), "sweep_seconds": statistics.median(seconds),
                      "most_sweep_seconds": max(seconds)}))


if __name__ == "__main__":
    main()
