"""What each process of ranks_models_test.py does: trains models of several architectures, one after the other.

It leaves `rank<r>.pt`: of each model its losses, the mean of all ranks', and its weights.
"""
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import ranks_script  # noqa: E402 before the others: it says where they are

import torch  # noqa: E402
import torch.distributed as distributed  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from architectures import LENGTH, ROWS_OF, VOCABULARY  # noqa: E402

MODELS = ("GPT-2", "Llama 3", "Qwen2", "Gemma 2", "Mistral")
STEPS = 20
LEFT_OUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # ranks draw numbers of their own


def network(name):
    described, kind, options, *_ = ROWS_OF[name]
    torch.manual_seed(1)
    return getattr(transformers, kind)(getattr(transformers, described)(**options, **(
        LEFT_OUT if name == "GPT-2" else {}), use_cache=False))


def batches():
    """Rows that count upwards. Each has as many tokens that count, so that the mean over ranks is one over tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, VOCABULARY - LENGTH, (ranks_script.ROWS, 1), generator=generator) + torch.arange(LENGTH)
            for _ in range(STEPS)]


def loss_of(model, rows):
    return model(input_ids=rows, labels=rows).loss


def train(folder, name):
    losses = []
    with spillway.Engine(network(name), ranks_script.config(folder, "nvme" if name == MODELS[0] else "cpu")) as engine:
        for batch in batches():
            parts = ranks_script.parts(batch, 2)
            total = 0
            for rows in parts:
                loss = loss_of(engine, rows)
                total += loss.item() / len(parts)
                engine.backward(loss)
                engine.step()
            losses.append(ranks_script.mean(total))
        assert engine.current_step == STEPS
        return {"losses": losses, "weights": engine.master_weights()}


def main():
    folder = pathlib.Path(json.loads(sys.argv[1])[0])
    distributed.init_process_group("gloo")
    torch.save({name: train(folder / name, name) for name in MODELS}, folder / f"rank{ranks_script.RANK}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
