"""LoRA over models that bitsandbytes, torchao and HQQ have quantized, as they are installed.

packed_test.py has the mechanism on forms of its own; here the packages' own layers run.
"""
import importlib.util
import unittest

from case import Case, main, need

need("transformers", "no transformers here; tools/test_newest.sh brings one")
need("peft", "no peft here; tools/test_newest.sh brings one")

import torch

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

    def assert_state_is_pytorchs(self, network, engine):
        wanted, found = network.state_dict(), engine.module.state_dict()
        self.assertEqual(list(wanted), list(found))
        for name, value in found.items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "__tensor_flatten__") and "lora" not in name:
                self.assertTrue(torch.equal(wanted[name], value), name)

    @unittest.skipIf(MISSING["bitsandbytes"], "no bitsandbytes here; tools/test_newest.sh brings one")
    def test_BitsandbytesFourBitsWithDoubleQuantization(self):
        self.assert_trains_as_pytorch(nf4, 2 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)

    @unittest.skipIf(MISSING["bitsandbytes"], "no bitsandbytes here; tools/test_newest.sh brings one")
    def test_BitsandbytesEightBits(self):
        self.assert_trains_as_pytorch(int8, 2 * (4 * 512 * 512 + 3 * 512 * 1024))

    @unittest.skipIf(MISSING["torchao"], "no torchao here; tools/test_newest.sh brings one")
    def test_TorchaoEightBits(self):
        self.assert_trains_as_pytorch(torchao_int8, 2 * (4 * 512 * 512 + 3 * 512 * 1024))

    @unittest.skipIf(MISSING["hqq"], "no hqq here; tools/test_newest.sh brings one")
    def test_HqqFourBits(self):
        self.assert_trains_as_pytorch(hqq, 2 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)


if __name__ == "__main__":
    main()
