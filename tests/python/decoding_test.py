"""Forward passes between steps, with everything on NVMe: each reads what does not fit once, and no more."""
from case import Case, main
import torch

from toy_model import batches, config, model

LAYERS = 12


class Passes(Case):
    def reads(self, hbm, passes):
        """Bytes from NVMe of a step with so many forward passes before it, and of one without; and of all weights."""
        network = model(width=128, layers=LAYERS)
        weights = 4 * sum(parameter.numel() for parameter in network.parameters())
        settings = {"tile_elements": 262144, **({"hbm_bytes": hbm} if hbm else {})}
        with self.engine(network, config(self.folder, spillway=settings), on_existing="replace") as engine:
            batch, = batches(1)

            def step():
                engine.backward(engine(batch))
                return engine.step().nvme_read_bytes

            step()
            without = max(step() for _ in range(3))
            with torch.no_grad():
                for _ in range(passes):
                    engine(batch)
            return step(), without, weights

    def test_WhatFitsIsReadOnce(self):
        read, without, weights = self.reads("32MiB", 12)
        self.assertLess(read, without + 2 * weights)

    def test_TheRestIsReadOncePerPass(self):
        read, without, weights = self.reads(None, 30)
        self.assertLess(read, without + 32 * weights)  # 30 passes; a step alone varies by as much as a pass reads


if __name__ == "__main__":
    main()
