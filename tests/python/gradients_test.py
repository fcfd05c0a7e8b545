"""Gradients are the engine's: what a loop of its own finds in .grad, and what clips them."""
import json

from case import Case as Folder
from case import main

import torch

from toy_model import Experts, batches, config, model


class Gradients(Folder):
    def engine(self, network=None, configuration=None, **options):
        return super().engine(network or model(), configuration, **options)

    def test_ALoopsOwnClippingIsNoZero(self):
        """Also one that was imported before Spillway was: what is in .grad refuses."""
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_
        network = model()
        network.norm.requires_grad_(False)
        engine = self.engine(network)
        self.assertEqual(0, clip_grad_norm_(network.parameters(), 1.0))  # as PyTorch says it before a backward
        words = r"embedding\.weight\.grad: its values are the engine's since backward\(\), .*gradient_clipping in " \
            "the configuration .* gradient_norm"
        for micro in range(2):
            engine.backward(engine(batches(1)[0]))
            for clip in (lambda: clip_grad_norm_(network.parameters(), 1.0),
                         lambda: clip_grad_norm_(list(network.parameters()), 1.0, norm_type=float("inf")),
                         lambda: clip_grad_value_(network.parameters(), 1.0),
                         lambda: network.embedding.weight.grad.norm(), lambda: network.embedding.weight.grad.mul_(2),
                         lambda: network.embedding.weight.grad.data, lambda: network.embedding.weight.grad[0],
                         lambda: torch.stack([network.embedding.weight.grad])):
                self.assertEqual("unsupported", self.assert_error(words, clip).code)
            gradient = network.embedding.weight.grad
            self.assertEqual((torch.Size([90, 48]), torch.float32, 4320), (gradient.shape, gradient.dtype,
                                                                          gradient.numel()))
            self.assertIn("of embedding.weight", repr(gradient))
            self.assertIsNone(network.norm.weight.grad)
            self.assertGreater(engine.step().gradient_norm, 0)
            self.assert_error(words, clip_grad_norm_, network.parameters(), 1.0)
        engine.optimizer.zero_grad()
        self.assertEqual(0, clip_grad_norm_(network.parameters(), 1.0))
        engine.backward(engine(batches(1)[0]))
        engine.discard_step()
        self.assertTrue(all(parameter.grad is None for parameter in network.parameters()))

    def test_WhatGotNoneHasNone(self):
        network = Experts()
        engine = self.engine(network, config(self.folder, accumulation=2))
        for chosen, idle in (((0,), {"1", "2"}), ((1,), {"2"})):
            engine.backward(engine(batches(1)[0], chosen, True))
            without = {name.split(".")[1] for name, parameter in network.named_parameters()
                       if parameter.grad is None and not name.endswith("spare")}
            self.assertEqual(idle, without)
        engine.step()

    def test_ZeroingThatKeepsTensorsIsNoRead(self):
        network = model()
        engine = self.engine(network)
        engine.backward(engine(batches(1)[0]))
        network.layers[0].zero_grad(set_to_none=False)
        torch.optim.SGD(network.parameters(), 0.1).zero_grad(set_to_none=False)
        self.assertIn("of embedding.weight", f"{network.embedding.weight.grad}")
        self.assertGreater(engine.step().gradient_norm, 0)

    def test_ClippingIsSaid(self):
        tail = "in step() (1 where it is left out, as by DeepSpeed); 0 switches it off"
        for written, said in ((None, f"to a norm of 1, {tail}"), (0.5, f"to a norm of 0.5, {tail}"),
                              (0, "is 0, so nothing is clipped; a loop's own clip_grad_norm_() is refused")):
            values = json.loads(config(self.folder, "cpu").read_text())
            del values["gradient_clipping"]
            values.update({} if written is None else {"gradient_clipping": written})
            with self.assertLogs("spillway", "INFO") as heard:
                self.engine(configuration=values)
            self.assertEqual([f"gradient_clipping: {said}"], [record.getMessage() for record in heard.records if
                                                              record.getMessage().startswith("gradient_clipping")])


if __name__ == "__main__":
    main()
