"""Trains 64 Mi parameters on NVMe in a process of its own and saves a state_dict(), for optimizer_states_test.py.

optimizer_saving.py DIR idle: prints what the process takes without it, in bytes.
optimizer_saving.py DIR save HOST_BYTES: writes DIR/optimizer.pt.
"""
import pathlib
import resource
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "python"))
import torch  # noqa: E402

import spillway  # noqa: E402


def main():
    folder, what = pathlib.Path(sys.argv[1]), sys.argv[2]
    weights = [torch.nn.Parameter(torch.ones(4 << 20, dtype=torch.bfloat16)) for _ in range(16)]
    idle = what == "idle"  # with the library loaded, weights, and the gradients of a step
    where = {} if idle else {"states": "nvme", "nvme_path": folder / "store", "host_bytes": sys.argv[3]}
    optimizer = spillway.AdamW(weights[:1] if idle else weights, **where)
    for half in (weights[:8], weights[8:]):
        for weight in half:
            weight.grad = torch.ones_like(weight)
        if not idle:
            optimizer.step()
        for weight in half:
            weight.grad = None
    if idle:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    else:
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")


if __name__ == "__main__":
    main()
