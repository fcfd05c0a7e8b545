"""The example of spillway/import.h takes a checkpoint with frozen parameters over. Its path comes from the environment
variable SPILLWAY_EXAMPLE."""
import array
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TESTS = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "cli")]
from report import main  # noqa: E402
import torch_files  # noqa: E402
from torch_files import Checkpoint, Storage, Tensor, size  # noqa: E402

STEP, FROZEN = 4, [0x3f80 + i for i in range(35)]  # bf16


def fp32(values):
    return array.array("f", values).tobytes()


class Frozen(Checkpoint):
    """first.weight was not trained: stage 3 keeps a part of it, padded, with the model states of each rank."""
    rank = 0

    def model_state(self):
        part = -(-len(FROZEN) // self.ranks) if self.stage == 3 else len(FROZEN)
        values = FROZEN + [0xffff] * (part * self.ranks - len(FROZEN))
        mine = array.array("H", values[part * self.rank:part * (self.rank + 1)]).tobytes()
        self.rank += 1
        return {**super().model_state(), "frozen_param_shapes": {"first.weight": size(7, 5)},
                "frozen_param_fragments": {"first.weight": Tensor(Storage(mine, "bf16"), (part,))}}


class Example(unittest.TestCase):
    def test_FrozenParametersAreTakenFromEveryRank(self):
        parameters = {
            "second.weight": ((5, 3), *(fp32(start + i / 8 for i in range(15)) for start in (1, 2, 3))),
            "second.bias": ((3,), *(fp32(start + i / 8 for i in range(3)) for start in (4, 5, 6)))}
        for stage, ranks in ((3, 1), (3, 2), (3, 4), (2, 2)):
            with self.subTest(stage=stage, ranks=ranks), tempfile.TemporaryDirectory() as folder:
                folder = pathlib.Path(folder)
                config = folder / "ds_config.json"
                config.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
                                              "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
                                              "zero_optimization": {"stage": 3}}))
                checkpoint = Frozen(parameters, stage=stage, ranks=ranks, step=STEP).write(folder / "checkpoint")
                out = folder / "snapshot"
                done = subprocess.run([os.environ["SPILLWAY_EXAMPLE"], config, checkpoint, out], capture_output=True,
                                      text=True, timeout=60, check=False)
                self.assertEqual(0, done.returncode, done.stderr)
                self.assertIn(f"DeepSpeed 0.19.8 stopped at step {STEP}\nthis run is at step {STEP}\n", done.stdout)
                weights = torch_files.read_safetensors(out / "model.safetensors")
                self.assertEqual(([7, 5], array.array("H", FROZEN).tobytes()), weights.pop("first.weight"))
                for which, stem in enumerate(("model", "exp_avg", "exp_avg_sq")):
                    found = torch_files.read_safetensors(out / f"{stem}.safetensors") if which else weights
                    suffix = f".{stem}" if which else ""
                    self.assertEqual({f"{name}{suffix}": value[1 + which] for name, value in parameters.items()},
                                     {name: data for name, (_, data) in found.items()})


if __name__ == "__main__":
    main()
