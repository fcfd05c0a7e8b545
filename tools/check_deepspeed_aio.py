#!/usr/bin/env python3
"""Gives the JSON of `spillway sweep` to DeepSpeed's own loader and compares what it reads; needs DeepSpeed installed.

usage: check_deepspeed_aio.py SWEEP.json

Exit status 0 when every key arrives with its value and type, and the section "spillway" is no offence.
"""
import json
import sys


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    with open(sys.argv[1], encoding="utf-8") as file:
        fragment = json.load(file)
    import deepspeed
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config

    # One function reads the section; the whole configuration reads it through the same one.
    config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, **fragment}
    readers = {"get_aio_config": get_aio_config(config), "DeepSpeedConfig": DeepSpeedConfig(config).aio_config}
    wrong = 0
    for reader, read in readers.items():
        for key in sorted(set(fragment["aio"]) | set(read)):
            wanted, found = fragment["aio"].get(key), read.get(key)
            same = type(wanted) is type(found) and wanted == found
            wrong += not same
            print(f"{reader}: {key}: {wanted!r} -> {found!r}{'' if same else '  DIFFERS'}")
    print(f"DeepSpeed {deepspeed.__version__}: {'every key is read as it stands' if not wrong else f'{wrong} differ'}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
