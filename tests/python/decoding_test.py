"""Forward passes between steps, with everything on NVMe: each reads what does not stay once, and no more."""
import importlib.util
import re
import unittest

from case import Case, main
import torch

from toy_model import DEVICE, batches, config, model

LAYERS, WIDTH = 12, 128


class Passes(Case):
    def planned(self, engine):
        """Bytes a forward pass reads, and those of all weights, by the line that the plan has for people."""
        line, = (line for line in engine.describe() if line.startswith("decoding: "))
        weights, fetched, read = (int(number) << 20 for number in re.findall(r"(\d+) MiB", line))
        self.assertLessEqual(read, fetched)
        return read, weights

    def engine_of(self, network, hbm=None):
        # Which blocks are updated inside backward is a matter of time otherwise, and their weights are read again.
        settings = {"tile_elements": 262144, "speculative_blocks": 0, **({"hbm_bytes": hbm} if hbm else {})}
        return self.engine(network, config(self.folder, spillway=settings), on_existing="replace")

    def counted(self, engine, step, passes):
        """Planned bytes from NVMe of the forward passes that passes() makes before a step and counts, counted ones, and
        bytes of all weights."""
        step()
        without = max(step() for _ in range(3))
        with torch.no_grad():
            made = passes()
        planned, weights = self.planned(engine)
        return planned * made, step() - without, weights

    def reads(self, hbm, passes):
        with self.engine_of(model(width=WIDTH, layers=LAYERS), hbm) as engine:
            batch, = batches(1)

            def step():
                engine.backward(engine(batch))
                return engine.step().nvme_read_bytes

            return self.counted(engine, step, lambda: len([engine(batch) for _ in range(passes)]))

    def test_WhatFitsIsReadOnce(self):
        planned, read, weights = self.reads("64MiB", 12)
        self.assertEqual(planned, 0)
        self.assertLess(read, 2 * weights)

    def test_TheRestIsReadOncePerPass(self):
        planned, read, weights = self.reads(None, 30)
        self.assertGreater(planned, 15 * weights)
        self.assertLess(abs(read - planned), 2 * weights + (30 << 20))  # it says whole MiB

    @unittest.skipIf(importlib.util.find_spec("transformers") is None, "no transformers here")
    def test_TokensAreSuchPasses(self):
        from transformers import GPT2Config, GPT2LMHeadModel
        torch.manual_seed(1)
        form = GPT2Config(n_layer=8, n_embd=128, n_head=4, vocab_size=256, n_positions=64, bos_token_id=0,
                          eos_token_id=0)
        ids, made = torch.arange(1, 33).view(4, 8).to(DEVICE), []
        for beams in (1, 3):
            with self.subTest(beams=beams), self.engine_of(GPT2LMHeadModel(form)) as engine:
                engine.module.register_forward_hook(lambda *_: made.append(1))

                def step():
                    engine.backward(engine(input_ids=ids, labels=ids).loss)  # noqa: B023
                    return engine.step().nvme_read_bytes  # noqa: B023

                def texts():
                    made.clear()
                    engine.module.eval()  # noqa: B023
                    engine.module.generate(ids[:1], max_new_tokens=20, min_new_tokens=20, num_beams=beams,  # noqa: B023
                                           do_sample=False, pad_token_id=0)
                    engine.module.train()  # noqa: B023
                    return len(made)

                planned, read, weights = self.counted(engine, step, texts)
                self.assertGreater(planned, 10 * weights)
                self.assertLess(abs(read - planned), 2 * weights + (20 << 20))


if __name__ == "__main__":
    main()
