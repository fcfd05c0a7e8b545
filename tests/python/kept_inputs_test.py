"""Where block inputs wait for backward: the same step, with what autograd keeps in host memory or on the drives."""
from case import Case as Folder
from case import main

import gc
import itertools
import os
import subprocess
import sys

import torch
from torch.nn import functional as F

import toy_model
from spillway.engine import kept_inputs
from toy_model import DEVICE, config

WIDTH, NARROW = 64, 32


class Reads(torch.nn.Module):
    """A decoder's block: a memory and a mask that all of them are given."""

    def __init__(self):
        super().__init__()
        self.mix, self.look = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, memory, mask):
        return x + torch.tanh(self.mix(x)) * mask + self.look(memory)


class Decoder(torch.nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        torch.manual_seed(6)
        self.encoder = torch.nn.Linear(WIDTH, WIDTH)
        self.layers = torch.nn.ModuleList(Reads() for _ in range(layers))

    def forward(self, x):
        memory, mask = self.encoder(x), (x > 0).float()
        for layer in self.layers:
            x = layer(x, memory, mask)
        return F.mse_loss(x, torch.ones_like(x))


def saved(engine, step):
    """Bytes of tensors that autograd has between forward and backward, in memory: by their storages."""
    found = {}

    def look(values):
        if torch.is_tensor(values):
            found[values.data_ptr()] = values.numel() * values.element_size()
        elif isinstance(values, (tuple, list)):
            for value in values:
                look(value)
        elif type(values).__name__ == "_Entry":
            for value in (values.memory, values.here):
                if value is not None:
                    look(value)

    plain = torch.autograd.graph.saved_tensors_hooks

    class Watched(plain):
        def __init__(self, pack, unpack):
            def packed(tensor):
                made = pack(tensor)
                kept.append(made)
                return made
            super().__init__(packed, unpack)

    kept = []
    torch.autograd.graph.saved_tensors_hooks = Watched
    try:
        loss = step()
    finally:
        torch.autograd.graph.saved_tensors_hooks = plain
    for made in kept:
        look(made)
    engine.backward(loss)
    return sum(found.values())


class KeptInHost(kept_inputs.KeptInputs):
    """Notes what is in host memory once the plan has said what may be."""
    most_in_host = 0

    def pack(self, tensor):
        made = super().pack(tensor)
        if self._room is not None:
            self.most_in_host = max(self.most_in_host, self._in_host)
        return made


class KeptInputs(Folder):
    def engine(self, network, place=None, **more):
        folder = self.folder / f"{len(list(self.folder.iterdir()))}"
        folder.mkdir()
        spillway = {"nvme_paths": [str(folder / "drive")], **more.pop("spillway", {})}
        if place is not None:
            spillway["block_inputs"] = place
        return super().engine(network, config(folder, device="cpu", spillway=spillway, **more))

    def test_AStepIsTheSameBitForBit(self):
        """Of inputs that are moved; dropout, tied weights, and slices too."""
        ids = torch.randint(0, toy_model.VOCABULARY, (2, 256), device=DEVICE)
        for slices in (1, 2):
            found = []
            for place in ("none", "nvme") if DEVICE == "cpu" else ("none", "cpu", "nvme"):
                engine = self.engine(toy_model.model(), place, spillway={"block_slices": slices})
                steps = []
                for step in range(2):
                    torch.manual_seed(step)
                    loss = engine(ids)
                    engine.backward(loss)
                    steps.append((loss.item(), engine.step().gradient_norm))
                found.append((steps, engine.master_weights()))
                if place == "nvme":
                    self.assertGreater(engine.together.kept.moved[1], 2 * 4 * 2 * 256 * 48 * 4 - 1)
            for steps, weights in found[1:]:
                self.assertEqual(found[0][0], steps)
                for name, values in weights.items():
                    self.assertTrue(torch.equal(values, found[0][1][name]), name)

    def test_WhatManyBlocksAreGivenIsStoredOnce(self):
        engine, x = self.engine(Decoder(layers=6), "nvme"), torch.randn(512, WIDTH, device=DEVICE)
        engine.backward(engine(x))
        engine.step()
        size = x.numel() * x.element_size()
        kept = engine.together.kept
        self.assertEqual((6 + 2) * size, kept.kept_bytes)  # x of each layer, the first one's also the encoder's
        self.assertLessEqual(kept.moved[1], (6 + 2) * size)

    def test_DeepSpeedsKeyMeansHostMemory(self):
        engine = self.engine(Decoder(), activation_checkpointing={"cpu_checkpointing": True})
        if DEVICE == "cpu":  # which is where they are
            self.assertIsNone(engine.together.kept)
        else:
            self.assertEqual((0, 0), engine.together.kept.moved)

    def test_OnTheDriveTheyTakeNoMemory(self):
        """Between forward and backward, for more blocks and for longer sequences, what is on its way is there."""
        for tokens in (1024, 2048):
            x = torch.randn(tokens, WIDTH, device=DEVICE)
            size, found = x.numel() * x.element_size(), []
            for layers in (8, 16):
                engine = self.engine(Decoder(layers), "nvme")
                found.append(saved(engine, lambda: engine(x)))
                engine.close()
            self.assertLessEqual(max(found), 3 * size + 2 ** 16)
            self.assertLessEqual(abs(found[1] - found[0]), size)

    def test_AnInputThatIsWrittenLaterIsKeptAsItWas(self):
        class InPlace(Decoder):
            def forward(self, x):
                memory, mask, x = self.encoder(x), (x > 0).float(), x * 1
                for layer in self.layers:
                    x = layer(x, memory, mask).clone()
                    with torch.no_grad():
                        mask *= 0.5
                return F.mse_loss(x, torch.ones_like(x))

        class OutOfPlace(Decoder):
            def forward(self, x):
                memory, mask, x = self.encoder(x), (x > 0).float(), x * 1
                for layer in self.layers:
                    x, mask = layer(x, memory, mask).clone(), mask * 0.5
                return F.mse_loss(x, torch.ones_like(x))

        x, norms = torch.randn(512, WIDTH, device=DEVICE), []
        for network in (InPlace(), OutOfPlace()):
            engine = self.engine(network, "nvme")
            engine.backward(engine(x))
            norms.append(engine.step().gradient_norm)
        self.assertEqual(*norms)

    def test_AGraphThatIsThrownAwayGivesItsPlaceBack(self):
        engine, x = self.engine(Decoder(), "nvme"), torch.randn(512, WIDTH, device=DEVICE)
        for _ in range(8):
            engine(x)
        engine.backward(engine(x))
        engine.step()
        size = x.numel() * x.element_size()
        self.assertLessEqual(sum(engine.together.kept._files._ends), 24 * size)

    def test_TheyHaveAPlaceInThePlan(self):
        """As much as the longest batch so far takes; in the ledger, in the facts, and in the budgets."""
        engine = self.engine(Decoder(layers=4), "nvme")
        for tokens, planned in ((512, 512), (256, 512), (1024, 1024)):
            x = torch.randn(tokens, WIDTH, device=DEVICE)
            engine.backward(engine(x))
            engine.step()
            size = planned * WIDTH * 4
            kept = {(tier, purpose): n for tier, purpose, n in engine.ledger() if purpose.startswith("block inputs")}
            self.assertEqual({("nvme", "block inputs"): (4 + 2) * size,
                              ("host", "block inputs on their way"): 5 * size}, kept)
            self.assertEqual(1, sum("block inputs" in line and "nvme" in line for line in engine.describe()))
        store = sum(n for tier, purpose, n in engine.ledger() if tier == "nvme" and purpose != "block inputs")
        engine = self.engine(Decoder(layers=4), "nvme", spillway={"nvme_bytes": f"{store // 1024 + 1000}KiB"})
        self.assert_error("spillway.nvme_bytes: .* is too small", engine.backward, engine(x))

    def test_WhatHostMemoryHasNoRoomForGoesToTheDrive(self):
        """From the first backward pass on, and the step is the same."""
        x, found, usual, size = torch.randn(1024, WIDTH, device=DEVICE), [], {}, 1024 * WIDTH * 4
        for place in ("none", "nvme"):
            engine = self.engine(Decoder(layers=8), place, spillway=usual)
            if place == "none":  # five are on their way, and three stay
                host = sum(n for tier, _, n in engine.ledger() if tier == "host")
                usual = {"host_bytes": f"{(host + (5 + 3) * size) // 1024}KiB"}
            else:
                kept = engine.together.kept = KeptInHost(engine, "cpu")  # as on a GPU
            steps = []
            for _ in range(3):
                loss = engine(x)
                engine.backward(loss)
                steps.append((loss.item(), engine.step().gradient_norm))
            found.append(steps)
        self.assertEqual(*found)
        listed = {(tier, purpose): n for tier, purpose, n in engine.ledger() if purpose.startswith("block inputs")}
        self.assertEqual((8 + 2) * size, listed["nvme", "block inputs"] + listed["host", "block inputs"])
        self.assertLess(abs(listed["host", "block inputs"] - 3 * size), size)
        self.assertGreaterEqual(kept.moved[1], listed["nvme", "block inputs"])
        self.assertLessEqual(kept.most_in_host, listed["host", "block inputs"])

    def test_WithoutADriveItIsRefused(self):
        engine = super().engine(Decoder(), config(self.folder, device="cpu", spillway={"block_inputs": "nvme"}))
        self.assert_error("spillway.nvme_paths: is missing", engine, torch.randn(512, WIDTH, device=DEVICE))

    def test_ALongSequenceCostsOneBlocksShare(self):
        """Resident memory of a step of 8 Ki and of 16 Ki tokens, of a program of its own: inputs of 24 blocks."""
        first = ("nvme", 1024)  # what stays in memory from then on
        runs = [word for place, tokens in (first, *itertools.product(("none", "nvme"), (8192, 16384)))
                for word in (place, str(tokens), str(self.folder / f"{place}{tokens}"))]
        run = subprocess.run([sys.executable, __file__, "--narrow", *runs], capture_output=True, text=True, env={
            **os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"})  # else malloc keeps what is freed
        self.assertEqual(0, run.returncode, run.stderr)
        peaks = [int(line.split(", ")[-1].split()[0]) for line in run.stdout.splitlines()]
        grown, share = {"none": peaks[2] - peaks[1], "nvme": peaks[4] - peaks[3]}, 8192 * NARROW * 4
        self.assertGreater(grown["none"], 22 * share, grown)
        self.assertLess(grown["nvme"], 14 * share, grown)  # of one block's inside and of what is on its way


def status(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def step(place, tokens, folder, width=WIDTH):
    """Prints the most memory that the process has had, and how much more than it had before."""
    os.makedirs(folder)
    gc.collect()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the most begins anew
    before = status("VmRSS")
    spillway = {"nvme_paths": [folder + "/drive"], "block_inputs": place}
    network = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())
                                    for _ in range(24)))
    engine = toy_engine(network, config(folder, device="cpu", spillway=spillway))
    x = torch.randn(int(tokens), width)
    engine.backward(engine(x).square().mean())
    engine.step()
    most = status("VmHWM")
    print(f"{place}, {tokens} tokens: {most} bytes at most, {most - before} more than before", flush=True)
    engine.close()


def toy_engine(network, path):
    import spillway
    return spillway.Engine(network, path, blocks=list(network))


if __name__ == "__main__":
    if sys.argv[1:2] in (["--step"], ["--narrow"]):
        for first in range(2, len(sys.argv), 3):
            step(*sys.argv[first:first + 3], width=WIDTH if sys.argv[1] == "--step" else NARROW)
    else:
        main()
