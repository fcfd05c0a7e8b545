"""An optimizer of one's own, whose states are in a TensorStore: weights and states of a commit belong together.

    python examples/adam_states.py --store states --steps 40

It goes on with the last commit, with the same bits. For AdamW as PyTorch has it take spillway.AdamW (adamw_loop.py),
which does this and clips, averages over ranks and keeps 16-bit weights exact; here is how an update that nobody has
written yet finds its states.
"""
import argparse

import torch

from spillway.io import TensorStore


def states_of(name):
    return [f"{name} exp_avg", f"{name} exp_avg_sq"]


def update(store, parameters, step, rate=1e-2, betas=(0.9, 0.999), eps=1e-8):
    """Adam's, parameter after parameter; the states of the next one are on their way meanwhile."""
    names = list(parameters)
    for number, name in enumerate(names):
        store.prefetch([state for after in names[number + 1:number + 2] for state in states_of(after)])
        mean, square = store.get(states_of(name))
        gradient = parameters[name].grad
        mean.mul_(betas[0]).add_(gradient, alpha=1 - betas[0])
        square.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        scaled = (square / (1 - betas[1]**step)).sqrt_().add_(eps)
        parameters[name].data.addcdiv_(mean, scaled, value=-rate / (1 - betas[0]**step))
        store.put(dict(zip(states_of(name), (mean, square))))


def begin(store, parameters):
    """Returns how many steps there were."""
    if "step" in store:
        for name, parameter in parameters.items():
            store.get(name, out=parameter.data)
        return int(store.get("step"))
    for name, parameter in parameters.items():
        store.put({state: torch.zeros_like(parameter) for state in states_of(name)})
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="a directory of an NVMe drive")
    parser.add_argument("--steps", type=int, default=40, help="of the whole run, those before a resume included")
    parser.add_argument("--commit-every", type=int, default=10)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(1)
    width = args.width
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.GELU(), torch.nn.Linear(width, width),
                                torch.nn.GELU(), torch.nn.Linear(width, 64))
    parameters = dict(model.named_parameters())
    size = 4 * sum(parameter.numel() for parameter in parameters.values())
    # Weights, two states, and all of that once more: what a commit has stays until the next one.
    with TensorStore(args.store, nvme_bytes=8 * size + (8 << 20), host_bytes=1 << 20, on_existing="resume") as store:
        for step in range(begin(store, parameters) + 1, args.steps + 1):
            rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows.roll(1, dims=1)).square().mean()
            model.zero_grad()
            loss.backward()
            update(store, parameters, step)
            if step % args.commit_every == 0 or step == args.steps:
                store.put({name: parameter.data for name, parameter in parameters.items()})
                store.put("step", torch.tensor(step))
                store.commit()
            print(f"step {step}  loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
