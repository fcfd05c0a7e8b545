"""The seed of Python's random tests: SPILLWAY_SEED, as seed.h has it for GoogleTest's."""
import os
import random


def test_seed():
    """The same in every run, another one, or a new one every time."""
    given = os.environ.get("SPILLWAY_SEED") or "20260103"
    seed = random.randrange(1 << 32) if given == "random" else int(given)
    print(f"SPILLWAY_SEED={seed}", flush=True)
    return seed
