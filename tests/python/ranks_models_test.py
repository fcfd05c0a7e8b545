"""Models of five architectures on two and on four processes, over Gloo: with the losses of one process of PyTorch.
With SPILLWAY_CASES, which tools/test.sh sets, on two alone."""
import os
import pathlib

from ranks_case import RanksCase, need
from report import main

need("transformers", "no transformers in this Python; `pip install transformers` brings it")

import torch

import ranks_models_script as script


def plain(name):
    """Losses and weights of one process of plain PyTorch, on all rows."""
    network = script.network(name)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for batch in script.batches():
        optimizer.zero_grad()
        loss = script.loss_of(network, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: parameter.detach() for key, parameter in network.named_parameters()}


class RanksModelsTest(RanksCase):
    script = pathlib.Path(script.__file__)

    def test_LossesOfTwentyStepsAreThoseOfOneProcess(self):
        self.assertEqual(5, len(script.MODELS))
        counts = (2,) if os.environ.get("SPILLWAY_CASES") else (2, 4)
        folders = {count: self.folder_of(f"of{count}") for count in counts}
        for count, folder in folders.items():
            self.run_all(count, [folder])
        results = {count: self.results(folder, count) for count, folder in folders.items()}
        for name in script.MODELS:
            losses, weights = plain(name)
            self.assertGreater(losses[0] - losses[-1], 0.05, name)  # it learns
            for count, of_ranks in results.items():
                with self.subTest(name, count=count):
                    # Another order of sums in fp32.
                    for expected, found in zip(losses, of_ranks[0][name]["losses"], strict=True):
                        self.assertAlmostEqual(expected, found, delta=1e-5)
                    for key, value in weights.items():
                        torch.testing.assert_close(of_ranks[0][name]["weights"][key], value, rtol=0, atol=1e-4)
                    for result in of_ranks:
                        self.assertEqual(result[name]["losses"], of_ranks[0][name]["losses"])
                        self.assert_same_weights(result[name]["weights"], of_ranks[0][name]["weights"])


if __name__ == "__main__":
    main()
