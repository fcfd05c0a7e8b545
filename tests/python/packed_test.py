"""Frozen weights in forms of their own: bytes that come and go with their block, and compute what PyTorch computes."""
import ctypes
import gc
import os
import pathlib
import subprocess
import unittest.mock

from case import Case, main

import torch

import packed_forms
from packed_forms import FORMS, Network, Nibbles, NibbleLinear, QuantState, Scaled, ScaledLinear, bytes_of_passes
from packed_forms import inner_bytes
from spillway.engine.packed import HEADER, Packed
from spillway.memory import plain
from toy_model import DEVICE, config

WIDTH = 320


def data(count):
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(6, WIDTH, generator=generator).to(DEVICE), torch.randn(6, 5, generator=generator).to(DEVICE))
            for _ in range(count)]


def loss_of(network, given, wanted):
    return ((network(given) - wanted) ** 2).mean()


def train(engine, pairs):
    losses = []
    for given, wanted in pairs:
        loss = loss_of(engine, given, wanted)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def alone(network, pairs):
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
    losses = []
    for given, wanted in pairs:
        optimizer.zero_grad()
        loss = loss_of(network, given, wanted)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def anonymous_bytes():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_bytes()


def resident_bytes():
    """As the kernel counts it: with what the allocator has not given back."""
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if "RssAnon" in line)
    return int(line.split()[1]) * 1024


def storage_bytes(tensor):
    return (tensor.untyped_storage() if hasattr(tensor, "untyped_storage") else tensor.storage()).nbytes()


class Forms(Case):
    def engine(self, network, **options):
        configuration = options.pop("configuration", None) or config(self.folder, clipping=0)
        return super().engine(network, configuration, **options)

    def assert_near(self, wanted, found):
        self.assertEqual(wanted[0], found[0])
        for one, other in zip(wanted, found):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_EveryFormTrainsAsInPyTorchAlone(self):
        for form in FORMS:
            with self.subTest(form):
                table = packed_forms.TABLE.clone()
                wanted = alone(Network(form).to(DEVICE), data(4))
                network = Network(form)
                size = sum(inner_bytes(layer.base) for layer in network.layers)
                engine = self.engine(network, on_existing="replace")
                self.assertEqual(size, sum(packed.nbytes for packed in engine._layout.packed.values()))
                self.assert_near(wanted, train(engine, data(4)))
                self.assertTrue(torch.equal(table, packed_forms.TABLE), "the package's own table")
                engine.close()

    def test_WhatTravelsAreTheBytesOfTheTensors(self):
        for form in FORMS:
            network = Network(form, width=1024, layers=2)
            size = sum(inner_bytes(layer.base) for layer in network.layers)
            engine = self.engine(network, on_existing="replace")
            travels = sum(4 * engine._layout.elements_of(place) for place in engine._layout.packed)
            self.assertLess(abs(travels - size), 0.01 * size, form)
            self.assertTrue(any("bytes of frozen weights" in line for line in engine.describe()), form)
            engine.close()

    def test_NothingRefersToTheMemoryOfABlockThatIsAway(self):
        for form in FORMS:
            network = Network(form)
            engine = self.engine(network, on_existing="replace")
            with torch.no_grad():
                engine(data(1)[0][0])
            for packed in engine._layout.packed.values():
                for part in packed.parts:
                    self.assertLessEqual(plain(storage_bytes, (), (part.tensor,), {}), 8, (form, part.path))
            engine.close()
        network = Network("eight bits", width=2048, layers=12)
        size, full = sum(inner_bytes(layer.base) for layer in network.layers), anonymous_bytes()
        engine = self.engine(network, on_existing="replace", configuration=config(
            self.folder, clipping=0, spillway={"hbm_bytes": "14MiB", "host_bytes": "6MiB"}))
        with torch.no_grad():
            engine(torch.zeros(2, 2048, device=DEVICE))
        self.assertLess(anonymous_bytes(), full - 0.4 * size)

    def test_APassReadsTheBytesOfTheTensors(self):
        """One forward and one backward pass, by the engine's counters; the update's reads are apart. Tiles on NVMe end
        at multiples of 64 KiB; quantized_test.py has layers that are large beside that."""
        given, wanted = torch.randn(6, 1024, device=DEVICE), torch.randn(6, 5, device=DEVICE)
        network = Network("meta", width=1024, layers=5)
        size = sum(inner_bytes(layer.base) for layer in network.layers)
        engine = self.engine(network, configuration=config(self.folder, clipping=0, spillway={
            "tile_elements": 1 << 20, "hbm_bytes": "4MiB", "host_bytes": "12MiB"}))
        passes = bytes_of_passes(engine, lambda: loss_of(engine, given, wanted))
        for read, copied, beside in passes:
            fetched = min(5, round(5 * copied / size))
            self.assertGreaterEqual(fetched, 3)  # after another pass HBM keeps the others
            inner = fetched * size // 5
            self.assertTrue(0.99 * inner < copied < 1.01 * inner + beside, (inner, copied, beside))
            self.assertTrue(0.99 * inner < read <= inner + beside + 5 * 2 * 65536, (inner, read, beside))

    def test_ATrainingStepKeepsNothingOfTheBlocksBehindIt(self):
        """Functions keep ctx.tensors, and unpack their weights to eight times as many bytes."""
        width, layers, seen = 1024, 16, []
        network = Network("nibbles", width=width, layers=layers)
        engine = self.engine(network, on_existing="replace", configuration=config(
            self.folder, clipping=0, spillway={"hbm_bytes": "14MiB", "host_bytes": "6MiB"}))
        for layer in network.layers:
            def forward(given, plain=layer.base.forward):
                seen.append(resident_bytes())
                return plain(given)
            layer.base.forward = forward
        anonymous_bytes()  # what making the engine has freed is no place for what blocks leave
        generator = torch.Generator().manual_seed(5)
        loss = engine(torch.randn(2, width, generator=generator).to(DEVICE)).sum()
        engine.backward(loss)
        self.assertGreaterEqual(len(seen), 2 * layers - 1)
        if DEVICE == "cpu" and hasattr(ctypes.CDLL(None), "malloc_trim"):
            kept = layers * 4 * width * width  # of all, unpacked; the kernel may make huge pages of what is there
            self.assertLess(max(seen) - seen[0], kept / 4)
        engine.step()

    def test_BitsPassAsTheyAreInEveryTypeOfWeights(self):
        every = torch.arange(-2 ** 15, 2 ** 15, dtype=torch.int32).to(torch.int16)  # those of NaN as well
        for name in ("fp32", "bf16", "fp16"):
            network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            network[0].bits = torch.nn.Parameter(every.clone(), False)
            network[0].bias.requires_grad_(False)
            more = {} if name == "fp32" else {name: {"enabled": True}}
            engine = self.engine(network, on_existing="replace", configuration=config(self.folder, **more))
            engine.save(self.folder / name)
            again = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
            again[0].bits = torch.nn.Parameter(torch.zeros_like(every), False)
            again[0].bias.requires_grad_(False)
            with engine.weights_of("0"):
                self.assertTrue(torch.equal(every.to(DEVICE), network[0].bits.data), name)
                self.assertEqual(torch.float32, network[0].bias.dtype)  # beside it, and as it is
            engine.close()
            engine = self.engine(again, on_existing="replace", snapshot=self.folder / name,
                                 configuration=config(self.folder, **more))
            with engine.weights_of("0"):
                self.assertTrue(torch.equal(every.to(DEVICE), again[0].bits.data), name)
            engine.close()

    def test_ARunGoesOnWithItsOwnBytes(self):
        for form in FORMS:
            with self.subTest(form):
                engine = self.engine(Network(form), on_existing="replace")
                wanted = train(engine, data(6))
                engine.close()
                engine = self.engine(Network(form), on_existing="replace")
                losses = train(engine, data(6)[:2])
                engine.save(self.folder / form, replace=True)
                train(engine, data(6)[2:4])
                engine.load_snapshot(self.folder / form)
                losses += train(engine, data(6)[2:4])
                engine.close()
                other = Network(form, seed=9)  # whose frozen weights are others
                engine = self.engine(other, on_existing="resume")
                self.assertEqual(wanted, losses + train(engine, data(6)[4:]))
                engine.close()

    def test_BytesOfAnotherFormAreRefused(self):
        engine = self.engine(Network("meta"))
        engine.close()
        network = Network("meta")
        for layer in network.layers:
            layer.base.W_q = torch.nn.Parameter(layer.base.W_q.data.view(torch.int8), False)
        engine = self.engine(network, on_existing="resume")
        self.assert_error("layers.0.base.W_q: was of another form where its bytes come from; make the model as it was",
                          train, engine, data(1))
        engine.close()
        self.assert_error("parameter . of block layers.0: layers.0.base.W_q .* bytes", self.engine,
                          Network("eight bits"), on_existing="resume")

    def test_WithoutAStoreThePlanIsMadeOnceMore(self):
        class Twice(Network):
            def forward(self, given):
                return super().forward(self.layers[0](given))

        for form in FORMS:
            engine = self.engine(Twice(form), configuration=config(self.folder, device="cpu", clipping=0))
            self.assert_near(alone(Twice(form).to(DEVICE), data(3)), train(engine, data(3)))
            engine.close()


class Model(Case):
    def engine(self, network, **options):
        return super().engine(network, config(self.folder, clipping=0), **options)

    def test_StateDictHasTheValuesAndKeepsThem(self):
        for form in FORMS:
            wanted, network = Network(form).state_dict(), Network(form)
            engine = self.engine(network, on_existing="replace")
            found = network.state_dict()
            with torch.no_grad():
                engine(data(1)[0][0])
            self.assertEqual(list(wanted), list(found))
            for name, value in found.items():
                if isinstance(value, Scaled):
                    self.assertTrue(torch.equal(wanted[name].values(), value.values()))
                else:
                    self.assertTrue(torch.equal(wanted[name], value.cpu()), (form, name))
            self.assertEqual({"head.bias", "head.weight"} | {f"layers.{i}.{name}.weight" for i in range(3)
                                                             for name in ("down", "up")}, set(engine.master_weights()))
            engine.close()

    def test_BuffersThatStayAreToldOf(self):
        for form, more, said in (("buffers", False, False), ("nibbles", True, True)):
            network, lines = Network(form, width=1024, layers=1), []
            if more:
                network.register_buffer("mask", torch.zeros(1, 1 << 19))
            with unittest.mock.patch("spillway.log.say", lambda level, text: lines.append(text)):
                self.engine(network, on_existing="replace").close()
            self.assertEqual(said, "buffers: 2 MiB stay on the device, in PyTorch's memory beside the budgets" in lines)

    def test_AModelOfBytesIsNoModelInFiles(self):
        engine = self.engine(Network("buffers"))
        self.assert_error("layers.0.base.qweight: is kept as bytes, as of a quantized weight", engine.export,
                          self.folder / "out")
        engine.close()
        made = subprocess.run([os.environ["SPILLWAY_BINARY"], "export", self.folder / "store", self.folder / "out"],
                              stderr=subprocess.PIPE, text=True)
        self.assertNotEqual(0, made.returncode)
        self.assertIn("layers.0.base.qweight: is kept as bytes of the program's own", made.stderr)
        self.assertFalse((self.folder / "out").exists())

    def test_OutsideOfItsBlockItIsNamed(self):
        network = Network("wrapper")
        engine = self.engine(network)
        weight = network.layers[1].base.weight
        self.assertEqual(((WIDTH, WIDTH), torch.float32, False), (tuple(weight.shape), weight.dtype,
                                                                  weight.requires_grad))
        self.assert_error("layers.1.base.weight: is read outside of its block", lambda: weight + 1)
        with engine.weights_of("layers.1"):
            self.assertTrue(torch.equal(Network("wrapper").layers[1].base.weight.values(), weight.values().cpu()))
        self.assert_error("layers.1.base.weight: was written", weight.zero_)

    def test_WhatABlockWritesToItIsRefused(self):
        network = Network("nibbles")
        plain = network.layers[0].base.forward

        def forward(given):
            network.layers[0].base.weight.quant_state.absmax.add_(1)
            return plain(given)

        network.layers[0].base.forward = forward
        engine = self.engine(network)
        self.assert_error("layers.0.base.weight: was written to", train, engine, data(1))

    def test_WhatABlockPutsInThePlaceOfAnAttributeIsPutBack(self):
        network = Network("nibbles")
        base = network.layers[0].base
        plain = base.forward

        def forward(given):  # as bitsandbytes repacks for a CPU, once
            state = base.weight.quant_state
            if not hasattr(state, "repacked"):
                state.repacked, state.absmax = True, state.absmax.clone()
                base.weight.data = base.weight.data.clone()
            return plain(given)

        base.forward = forward
        engine = self.engine(network)
        wanted = Network("nibbles").to(DEVICE)
        given = data(1)[0][0]
        with torch.no_grad():
            for _ in range(2):
                self.assertTrue(torch.equal(wanted(given), engine(given)))
        self.assertFalse(hasattr(base.quant_state, "repacked"))

    def test_FormsThatCannotComeAndGoAreRefused(self):
        class Anew(Scaled):
            turned = property(lambda self: self._turned.clone(), lambda self, value: setattr(self, "_turned", value))

        def refused(pattern, change):
            network = Network("wrapper")
            change(network.layers[1].base)
            self.assert_error(pattern, self.engine, network, on_existing="replace")

        def anew(layer):
            one = layer.weight
            layer.weight = torch.nn.Parameter(Anew(one.shape, one.dtype, one.turned, one.scale), False)

        def trained(layer):
            layer.weight.requires_grad_(True)

        refused("layers.1.base.weight: a Anew makes its tensor turned anew whenever it is asked", anew)
        refused("layers.1.base.weight: is a Scaled of torch.float32 that wants a gradient; Spillway trains", trained)

    def test_AWeightOfAnotherDeviceIsMadeAnewThere(self):
        absmax = torch.zeros(8, dtype=torch.uint8, device="meta")
        weight = Nibbles(torch.zeros(256, 1, dtype=torch.uint8, device="meta"),
                         QuantState(absmax, torch.zeros(16, device="meta")))
        scaled = torch.nn.Parameter(Scaled((8, 8), torch.float32, torch.zeros(8, 8, dtype=torch.int8, device="meta"),
                                           packed_forms.Halved((8,), torch.float32, torch.zeros(
                                               8, dtype=torch.float16, device="meta"))), False)
        for before, walk in ((weight, lambda made: (made, made.quant_state.absmax, made.quant_state.code)),
                             (scaled, lambda made: (made, made.turned, made.scale.half))):
            packed = Packed("w", before, torch.nn.Module(), True)
            made = packed.take_over(torch.device("cpu"), "w: is away")
            self.assertIsInstance(made, type(before))
            self.assertIsInstance(made, torch.nn.Parameter)
            for tensor in walk(made):
                self.assertEqual("cpu", tensor.device.type)
            memory = torch.arange(packed.elements(4), dtype=torch.int32).view(torch.uint8)
            memory[:HEADER] = torch.tensor(list(packed._form), dtype=torch.uint8)
            packed.fill(4, memory.data_ptr())
            shown = walk(made)[2].reshape(-1).view(torch.uint8)
            self.assertTrue(any(torch.equal(memory[part.first:part.first + part.size], shown)
                                for part in packed.parts))


if __name__ == "__main__":
    main()
