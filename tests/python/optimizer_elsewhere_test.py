"""Weights and gradients that lie on a GPU, or not row by row: copied piece by piece, with the bits of those that need
no copy. Where there is no GPU, tensors of the CPU are said to be elsewhere, and go the same way."""
from case import main

import contextlib
import os
import signal
import unittest
import unittest.mock

import torch

import spillway
from optimizer_loops import Case, Network, groups_of, loop
from spillway.optimizers import tensor_carrier

DEVICES = ["said"] + ["cuda"] * torch.cuda.is_available()


def elsewhere(device):
    """On "said", whatever there is counts as elsewhere."""
    if device == "said":
        return unittest.mock.patch.object(tensor_carrier, "in_place", lambda tensor: False)
    return contextlib.nullcontext()


def large(dtype=torch.float32, device="cpu"):
    """More than a piece, of a size that divides by nothing."""
    torch.manual_seed(4)
    made = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(shape).to(dtype))
                                   for shape in ((1031, 523), (7,), (3, 1031, 211))])
    return made.to(device) if device != "said" else made


def set_gradients(network, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device, parameter.dtype)


class Bits(Case):
    """As with tensors in place."""

    def trained(self, dtype, device, kind="AdamW", resumes=False, **options):
        network = large(dtype, device or "cpu")
        with elsewhere(device):
            optimizer = self.optimizer(network, kind, lr=1e-2, **options)
            for step in range(3):
                set_gradients(network, step)
                if step == 1:
                    network[0].grad = None
                    with torch.no_grad():
                        network[2][1, 5:7] = 0.25  # a weight that the loop writes counts
                optimizer.step()
                if resumes and step == 1:
                    optimizer.close()
                    for parameter in network.parameters():
                        parameter.data.zero_()
                    optimizer = self.optimizer(network, kind, lr=1e-2, on_existing="resume", **options)
            states = optimizer.state_dict()["state"]
            moments = [value.clone() for state in states.values() for value in state.values()
                       if torch.is_tensor(value) and value.dim()]
            optimizer.save(self.folder / f"saved-{kind}-{dtype}", replace=True)
            optimizer.close()
        return [parameter.detach().cpu() for parameter in network.parameters()], moments

    def check(self, dtype, **options):
        for device in DEVICES:
            with self.subTest(device=device, dtype=dtype, **options):
                places = [self.on_nvme(f"{dtype} {device} {place}") if options.get("resumes") else {}
                          for place in ("here", "there")]
                expected, moments = self.trained(dtype, None, **options, **places[0])
                found, found_moments = self.trained(dtype, device, **options, **places[1])
                self.assert_same(expected, found)
                self.assert_same(moments, found_moments)

    def test_InMemory(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            self.check(dtype)
        for kind in ("Adagrad", "Lion", "SGD"):
            self.check(torch.bfloat16, kind=kind)

    def test_WithClipping(self):
        for dtype in (torch.float32, torch.bfloat16):
            self.check(dtype, max_grad_norm=0.5)

    def test_OnNvme(self):
        for dtype in (torch.float32, torch.bfloat16):
            self.check(dtype, max_grad_norm=0.5, resumes=True)

    def test_WithALoopAndStreamedGradients(self):
        for device in DEVICES:
            for streams in (False, True):
                trained = []
                for where in (None, device):
                    network = Network(torch.bfloat16)
                    with elsewhere(where):
                        optimizer = self.optimizer(network, parameters=groups_of(network), stream_gradients=streams,
                                                   max_grad_norm=0.1)
                        loop(network, optimizer, 4, accumulation=2)
                        state = optimizer.state_dict()
                        optimizer.load_state_dict(torch.optim.AdamW(groups_of(Network(torch.bfloat16))).state_dict())
                        optimizer.load_state_dict(state)
                        loop(network, optimizer, 2, first=4)
                    trained.append(list(network.parameters()))
                self.assert_same(*trained)

    def test_AModelThatMovesWhenItsOptimizerIsMade(self):
        """As with Accelerate and Trainers. Where no GPU was to be expected there is room for little, and that does."""
        expected, _ = self.trained(torch.bfloat16, None)
        for device in DEVICES:
            network = large(torch.bfloat16)
            optimizer = self.optimizer(network, lr=1e-2)
            for step in range(3):
                set_gradients(network, step)
                if step == 1:
                    network[0].grad = None
                    network[2].data[1, 5:7] = 0.25
                    if device != "said":
                        network.to(device)
                with elsewhere(device if step else None):
                    optimizer.step()
            self.assert_same(expected, [parameter.detach().cpu() for parameter in network.parameters()])


class Pieces(Case):
    def test_RowsAreTheTensorInOrderAndNoCopy(self):
        for tensor in (torch.randn(5, 7), torch.randn(7, 5).t(), torch.randn(2, 3, 4, 5).permute(2, 0, 3, 1),
                       torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last), torch.randn(9)[::2],
                       torch.randn(3, 1).expand(3, 4)):
            flat = tensor.reshape(-1)
            for first in range(len(flat)):
                for count in range(1, len(flat) - first + 1):
                    parts = list(tensor_carrier.rows(tensor, first, count))
                    self.assertTrue(torch.equal(flat[first:first + count],
                                                torch.cat([part.reshape(-1) for part in parts])))
                    self.assertEqual({tensor.storage().data_ptr()}, {part.storage().data_ptr() for part in parts})

    def test_NoPieceIsLargerThanItsPlaceAndTheBudgetCountsIt(self):
        network = large(torch.bfloat16)
        with elsewhere("said"):
            optimizer = self.optimizer(network)
            planned = {purpose: size for _, purpose, size in optimizer.ledger()}["tensors on their way"]
            set_gradients(network, 1)
            optimizer.step()  # the first has the weights brought once more, to begin with
            sizes = []
            at = tensor_carrier.tensor_at
            with unittest.mock.patch.object(tensor_carrier, "tensor_at",
                                            lambda *given: (sizes.append(given[2]), at(*given))[1]):
                set_gradients(network, 1)
                optimizer.step()
        self.assertEqual(planned, optimizer._states._staging[1])
        elements = sum(parameter.numel() for parameter in network.parameters())
        self.assertEqual(3 * 2 * elements, sum(sizes))  # down twice and up once, each byte
        self.assertLessEqual(max(sizes), planned // 6)

    def test_ANormHasTheLibrarysBits(self):
        for device in DEVICES:
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                network = large(dtype)
                optimizer = self.optimizer(network, max_grad_norm=1.0, lr=0.0)
                set_gradients(network, 3)
                optimizer.step()
                expected = optimizer.report.gradient_norm
                moved = network.to(device) if device != "said" else network
                with elsewhere(device), unittest.mock.patch.object(tensor_carrier, "NORM_PIECE", 5 * 1024):
                    set_gradients(moved, 3)
                    optimizer.step()
                self.assertEqual(expected, optimizer.report.gradient_norm)


class Errors(Case):
    def test_AGradientThatIsNotFinite(self):
        for device in DEVICES:
            for clips in (None, 1.0):
                network = large(torch.float16, device)
                with elsewhere(device):
                    optimizer = self.optimizer(network, max_grad_norm=clips)
                    for value in (float("nan"), float("-inf")):
                        set_gradients(network, 1)
                        network[2].grad[2, 1030, 210] = value
                        error = self.assert_error(r"param_groups\.0\.2: NaN or Inf in its gradient; nothing was",
                                                  optimizer.step)
                        self.assertEqual("non_finite", error.code)
                    self.assert_same(large(torch.float16), [p.detach().cpu() for p in network.parameters()])
                    set_gradients(network, 1)
                    optimizer.step()

    def test_WhatACopyRaisesIsRaised(self):
        network = large()
        with elsewhere("said"):
            optimizer = self.optimizer(network, **self.on_nvme())
            set_gradients(network, 1)
            optimizer.step()
            before = [parameter.detach().clone() for parameter in network.parameters()]
            with unittest.mock.patch.object(tensor_carrier, "rows", side_effect=RuntimeError("CUDA error")):
                self.assertRaisesRegex(RuntimeError, "CUDA error", optimizer.step)
            self.assert_error("stopped after an earlier error .*on_existing=\"resume\"", optimizer.step)
            optimizer.close()
            self.optimizer(network, on_existing="resume", **self.on_nvme())
        self.assert_same(before, network.parameters())

    def test_CtrlCIsHeardBehindTheStep(self):
        network = large()
        copy, left = tensor_carrier.rows, [2]

        def interrupting(*arguments):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return copy(*arguments)

        with elsewhere("said"):
            optimizer = self.optimizer(network)
            set_gradients(network, 1)
            optimizer.step()
            with unittest.mock.patch.object(tensor_carrier, "rows", interrupting):
                self.assertRaises(KeyboardInterrupt, optimizer.step)
            self.assertEqual(2, optimizer.current_step)
            self.assertEqual(2, optimizer.state[network[0]]["step"].item())
            optimizer.step()
        self.assertIs(signal.default_int_handler, signal.getsignal(signal.SIGINT))


@unittest.skipUnless(torch.cuda.is_available(), "no GPU that PyTorch sees")
class Gpu(Case):
    """What only a GPU shows; the rest runs with its tensors above."""

    def test_StagingIsPinnedAndNoWeightHasAHostCopy(self):
        network = torch.nn.Linear(8192, 8192, bias=False).to("cuda", torch.bfloat16)  # 128 MiB, and gradients as many
        optimizer = self.optimizer(network)
        set_gradients(network, 1)
        optimizer.step()
        address, staged = optimizer._states._staging
        self.assertTrue(tensor_carrier.tensor_at(torch.device("cpu"), address, staged).is_pinned())
        ledger = sum(size for tier, _, size in optimizer.ledger() if tier == "host")
        self.assertLess(ledger, 10 * network.weight.numel() + staged + (64 << 20))

    def test_AGradScalerAndAStreamOfItsOwn(self):
        stream = torch.cuda.Stream()
        trained = []
        for device in ("cpu", "cuda"):
            network = torch.nn.Linear(512, 512).to(device)
            with torch.no_grad():
                network.weight.fill_(1 / 512), network.bias.zero_()
            optimizer = self.optimizer(network, lr=1e-2)
            scaler = torch.amp.GradScaler(device, init_scale=64.0) if device == "cuda" else None
            x = torch.eye(512, device=device)
            with torch.cuda.stream(stream) if scaler else contextlib.nullcontext():
                stream.wait_stream(torch.cuda.default_stream())
                for _ in range(3):
                    optimizer.zero_grad()
                    loss = network(x).square().mean()
                    (scaler.scale(loss) if scaler else loss).backward()
                    scaler.step(optimizer) if scaler else optimizer.step()
                    scaler.update() if scaler else None
            trained.append([parameter.detach().cpu() for parameter in network.parameters()])
            self.assertEqual(3, optimizer.current_step)
        self.assert_near(*trained, tolerance=1e-4)  # a GPU's products are rounded otherwise


if __name__ == "__main__":
    main()
