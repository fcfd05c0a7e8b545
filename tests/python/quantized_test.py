"""LoRA over models that bitsandbytes, torchao and HQQ have quantized, as they are installed.

packed_test.py has the mechanism on forms of its own; here the packages' own layers run.
"""
import importlib.util
import unittest

from case import Case, main, need

need("transformers", "no transformers here; tools/test_newest.sh brings one")
need("peft", "no peft here; tools/test_newest.sh brings one")

import torch

from packed_forms import bytes_of_passes
from quantized_forms import hqq, int8, nf4, torchao_int8, with_lora
from toy_model import batches, config

MISSING = {name: importlib.util.find_spec(name) is None for name in ("bitsandbytes", "torchao", "hqq")}


class Quantized(Case):
    def assert_trains_as_pytorch(self, make, least):
        """`least`: bytes of the layers' weights without any scales."""
        network = with_lora(make, num_hidden_layers=2)
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
        configuration = config(self.folder, clipping=0, spillway={"hbm_bytes": "8MiB"})
        engine = self.engine(with_lora(make, num_hidden_layers=2), configuration)
        layers = [packed.nbytes for packed in engine._layout.packed.values()]
        self.assertLess(least, sum(layers))
        self.assertLess(sum(layers), 1.3 * least)
        for step, ids in enumerate(batches(4)):
            loss = network(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(found)
            engine.step()
            if step == 0:
                self.assertEqual(loss.item(), found.item())
            self.assertAlmostEqual(loss.item(), found.item(), delta=1e-5 * loss.item())
        self.assert_state_is_pytorchs(network, engine)
        network.eval(), engine.module.eval()
        with torch.no_grad():
            self.assertAlmostEqual(network(input_ids=ids, labels=ids, use_cache=False).loss.item(),
                                   engine(input_ids=ids, labels=ids, use_cache=False).loss.item(), delta=1e-4)
        engine.export(self.folder / "adapters")
        self.assertTrue((self.folder / "adapters/adapter_config.json").exists())

    def assert_passes_move_the_bytes(self, make):
        """A forward and a backward pass read what the inner tensors take, of layers of 14 MB and more; LoRA's weights
        and what its update reads are apart. Of a backward pass after another one HBM keeps a layer, for forward."""
        layers = 6
        network = with_lora(make, num_hidden_layers=layers, hidden_size=1536, intermediate_size=4096,
                            num_attention_heads=16, num_key_value_heads=16)
        (self.folder / "passes").mkdir()
        engine = self.engine(network, config(self.folder / "passes", clipping=0, spillway={
            "tile_elements": 4 << 20, "hbm_bytes": "36MiB" if make is nf4 else "66MiB", "host_bytes": "64MiB"}))
        ids = batches(1)[0]
        size = sum(packed.nbytes for packed in engine._layout.packed.values())
        passes = bytes_of_passes(engine, lambda: engine(input_ids=ids, labels=ids, use_cache=False).loss)
        for direction, (read, copied, beside) in zip(("forward", "backward"), passes):
            fetched = min(layers, round(layers * read / size))
            self.assertGreaterEqual(fetched, layers - 2)
            print(f"{make.__name__}: a {direction} pass reads {read} bytes of NVMe and copies {copied} to HBM; inner "
                  f"tensors of {fetched} layers are {size * fetched // layers}, other weights at most {beside}")
            for link, moved in (("nvme", read), ("h2d", copied)):  # some of the others stay in memory
                self.assertGreater(moved, 0.99 * size * fetched / layers, (direction, link))
                self.assertLess(moved - beside, 1.01 * size * fetched / layers, (direction, link))
        engine.close()

    def assert_state_is_pytorchs(self, network, engine):
        wanted, found = network.state_dict(), engine.module.state_dict()
        self.assertEqual(list(wanted), list(found))
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__") and "lora" not in name:
                self.assertTrue(torch.equal(wanted[name], value), name)

    @unittest.skipIf(MISSING["bitsandbytes"], "no bitsandbytes here; tools/test_newest.sh brings one")
    def test_BitsandbytesFourBitsWithDoubleQuantization(self):
        self.assert_trains_as_pytorch(nf4, 2 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)
        self.assert_passes_move_the_bytes(nf4)

    @unittest.skipIf(MISSING["bitsandbytes"], "no bitsandbytes here; tools/test_newest.sh brings one")
    def test_BitsandbytesEightBits(self):
        self.assert_trains_as_pytorch(int8, 2 * (4 * 512 * 512 + 3 * 512 * 1024))
        self.assert_passes_move_the_bytes(int8)

    @unittest.skipIf(MISSING["torchao"], "no torchao here; tools/test_newest.sh brings one")
    def test_TorchaoEightBits(self):
        self.assert_trains_as_pytorch(torchao_int8, 2 * (4 * 512 * 512 + 3 * 512 * 1024))
        self.assert_passes_move_the_bytes(torchao_int8)

    @unittest.skipIf(MISSING["hqq"], "no hqq here; tools/test_newest.sh brings one")
    def test_HqqFourBits(self):
        self.assert_trains_as_pytorch(hqq, 2 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)


if __name__ == "__main__":
    main()
