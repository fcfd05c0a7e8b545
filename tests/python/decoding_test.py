"""Forward passes between steps, with everything on NVMe: each reads what does not stay once, and no more."""
import re

from case import Case, main
import torch

from toy_model import batches, config, model

LAYERS, WIDTH = 12, 128


class Passes(Case):
    def planned(self, engine):
        """Bytes a forward pass reads, and those of all weights, by the line that the plan has for people."""
        line, = (line for line in engine.describe() if line.startswith("decoding: "))
        weights, fetched, read = (int(number) << 20 for number in re.findall(r"(\d+) MiB", line))
        self.assertLessEqual(read, fetched)
        return read, weights

    def reads(self, hbm, passes):
        """Planned and counted bytes from NVMe of so many forward passes before a step, and bytes of all weights."""
        # Which blocks are updated inside backward is a matter of time otherwise, and their weights are read again.
        settings = {"tile_elements": 262144, "speculative_blocks": 0, **({"hbm_bytes": hbm} if hbm else {})}
        with self.engine(model(width=WIDTH, layers=LAYERS), config(self.folder, spillway=settings),
                         on_existing="replace") as engine:
            batch, = batches(1)

            def step():
                engine.backward(engine(batch))
                return engine.step().nvme_read_bytes

            step()
            without = max(step() for _ in range(3))
            with torch.no_grad():
                for _ in range(passes):
                    engine(batch)
            planned, weights = self.planned(engine)
            return planned * passes, step() - without, weights

    def test_WhatFitsIsReadOnce(self):
        planned, read, weights = self.reads("64MiB", 12)
        self.assertEqual(planned, 0)
        self.assertLess(read, 2 * weights)

    def test_TheRestIsReadOncePerPass(self):
        planned, read, weights = self.reads(None, 30)
        self.assertGreater(planned, 15 * weights)
        self.assertLess(abs(read - planned), 2 * weights + (30 << 20))  # it says whole MiB


if __name__ == "__main__":
    main()
