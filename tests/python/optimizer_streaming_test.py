"""stream_gradients=True: gradients leave PyTorch as they are made, and all else is as ever."""
from case import main

import unittest.mock

import torch

from optimizer_loops import Case, Network, loop
from spillway.optimizers.streaming import GradientStream, StreamedGradient

AHEAD = "stream_gradients=True; in place of clip_grad_norm_\\(\\) give the optimizer max_grad_norm=, and in place of " \
        "a GradScaler loss_scale="


class Streaming(Case):
    def pair(self, dtype=torch.float32, **options):
        networks = Network(dtype), Network(dtype)
        return networks, (self.optimizer(networks[0]), self.optimizer(networks[1], stream_gradients=True, **options))

    def test_HasTheBitsOfGradientsThatStay(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for accumulation in (1, 3):
                for where in ({}, self.on_nvme(f"{dtype}{accumulation}")):
                    with self.subTest(dtype=dtype, accumulation=accumulation, **where):
                        networks, optimizers = self.pair(dtype, **where)
                        losses = [loop(network, optimizer, 5, accumulation=accumulation)
                                  for network, optimizer in zip(networks, optimizers)]
                        self.assertEqual(losses[0], losses[1])
                        self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_ClipsAndTakesALossScaleOut(self):
        networks, optimizers = self.pair(max_grad_norm=0.1, loss_scale=1024.0)
        for step in range(3):
            for network, optimizer in zip(networks, optimizers):
                optimizer.zero_grad()
                loss = network(torch.full((4, 24), 0.1 * (step + 1)))
                (loss * 1024 if optimizer is optimizers[1] else loss).backward()
                if optimizer is optimizers[0]:
                    norm = torch.nn.utils.clip_grad_norm_(network.parameters(), 0.1)
                optimizer.step()
            self.assertAlmostEqual(norm.item(), optimizers[1].report.gradient_norm, delta=1e-6)
        self.assert_near(networks[0].parameters(), networks[1].parameters(), 1e-5)

    def test_NothingIsLeftInPyTorch(self):
        network = Network()
        optimizer = self.optimizer(network, stream_gradients=True)
        network(torch.ones(4, 24)).backward()
        for parameter in network.parameters():
            gradient = parameter.grad
            self.assertIsInstance(gradient, StreamedGradient)
            self.assertEqual((parameter.shape, parameter.dtype), (gradient.shape, gradient.dtype))
            self.assertEqual({0}, {step for size, step in zip(gradient.shape, gradient.stride()) if size > 1})
            self.assertIn("that the optimizer has", repr(gradient))
        optimizer.step()

    def test_WhatClipsOrScalesOutsideIsAnErrorThatNamesIt(self):
        network = Network()
        optimizer = self.optimizer(network, stream_gradients=True)
        network(torch.ones(4, 24)).backward()
        from torch.nn.utils import clip_grad_norm_, clip_grad_value_
        for call in (lambda: clip_grad_norm_(network.parameters(), 1.0),
                     lambda: clip_grad_norm_(network.parameters(), 1.0, norm_type=float("inf")),
                     lambda: clip_grad_value_(network.parameters(), 1.0),
                     lambda: network.last.weight.grad.mul_(2), lambda: network.last.weight.grad[0] + 1):
            self.assertEqual("unsupported", self.assert_error(AHEAD, call).code)
        if hasattr(torch.amp, "GradScaler"):
            scaler = torch.amp.GradScaler("cpu")
            optimizer.zero_grad()
            scaler.scale(network(torch.ones(4, 24))).backward()
            self.assert_error(AHEAD, scaler.unscale_, optimizer)
            self.assert_error(AHEAD, scaler.step, optimizer)
        optimizer.step()  # what is there is whole

    def test_ANormIsNoClipping(self):
        """As transformers 5 logs it."""
        if not hasattr(torch.nn.utils, "get_total_norm"):
            self.skipTest("this PyTorch's clip_grad_norm_() is another one, and no transformers 5 runs on it")
        networks, optimizers = self.pair()
        for network, optimizer in zip(networks, optimizers):
            network(torch.ones(4, 24)).backward()
        norms = [torch.nn.utils.clip_grad_norm_(network.parameters(), float("inf")) for network in networks]
        self.assertAlmostEqual(norms[0].item(), float(norms[1]), delta=1e-6)
        self.assert_error(AHEAD, torch.nn.utils.clip_grad_norm_, networks[1].parameters(), 1e6)
        for optimizer in optimizers:
            optimizer.step()
        self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_ZeroingIsPyTorchs(self):
        """Whoever does it: it discards micro-batches that no step has had; and without it they go on adding up."""
        def of_the_optimizer(network, optimizer):
            optimizer.zero_grad(set_to_none=True)

        def kept(network, optimizer):
            optimizer.zero_grad(set_to_none=False)  # zeros, by which moments change

        def of_the_model(network, optimizer):
            network.zero_grad(set_to_none=True)

        def of_one(network, optimizer):
            network.last.weight.grad = None

        def of_nobody(network, optimizer):
            pass

        for zero in (of_the_optimizer, kept, of_the_model, of_one, of_nobody):
            with self.subTest(zero=zero.__name__):
                networks, optimizers = self.pair()
                for network, optimizer in zip(networks, optimizers):
                    for step in range(3):
                        network(torch.full((4, 24), 1.0 + step)).backward()
                        zero(network, optimizer)
                        network(torch.full((4, 24), 0.5), (step % 2,)).backward()
                        optimizer.step()
                self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_AGradientThatALoopSets(self):
        networks, optimizers = self.pair()
        for network, optimizer in zip(networks, optimizers):
            for _ in range(2):
                network.last.bias.grad = torch.ones(3)
                network(torch.ones(4, 24)).backward()  # adds to it
                optimizer.step()
                network.first.weight.grad = torch.ones(24, 24)
                optimizer.step()
        self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_ParametersThatLearnLater(self):
        networks = Network(), Network()
        for network in networks:
            network.first.requires_grad_(False)
        optimizers = self.optimizer(networks[0]), self.optimizer(networks[1], stream_gradients=True)
        for network, optimizer in zip(networks, optimizers):
            loop(network, optimizer, 1)
            network.first.requires_grad_(True)
            loop(network, optimizer, 2, first=4)
        self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_AClosedOptimizersHooksAreGone(self):
        network = Network()
        optimizer = self.optimizer(network, stream_gradients=True)
        network(torch.ones(4, 24)).backward()
        optimizer.close()
        self.assertIsNone(network.last.weight.grad)
        network(torch.ones(4, 24)).backward()
        self.assertIs(torch.Tensor, type(network.last.weight.grad))

    def test_ALoadedOptimizerStreamsOn(self):
        networks, optimizers = self.pair()
        for network, optimizer in zip(networks, optimizers):
            loop(network, optimizer, 2)
            optimizer.save(self.folder / "saved", replace=True)
            optimizer.load(self.folder / "saved")
            loop(network, optimizer, 2, first=2)
        self.assert_same(networks[0].parameters(), networks[1].parameters())
        self.assertIsInstance(networks[1].last.weight.grad, StreamedGradient)

    def test_AnOlderPyTorchsHooks(self):
        """Before 2.1 it has none after the accumulation but those of its node."""
        plain = GradientStream._hooks
        with unittest.mock.patch.object(GradientStream, "_hooks", lambda *of, **_: plain(*of, of_nodes=True)):
            self.test_ZeroingIsPyTorchs()
            self.test_ParametersThatLearnLater()


if __name__ == "__main__":
    main()
