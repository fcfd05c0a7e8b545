"""LoRA over models that bitsandbytes, torchao and HQQ have quantized, as they are installed: the losses of PyTorch alone.

packed_test.py has the mechanism on forms of its own; here the packages' own layers run.
"""
import importlib.util
import unittest

from case import Case, main, need

need("transformers", "no transformers here; tools/test_newest.sh brings one")
need("peft", "no peft here; tools/test_newest.sh brings one")

import peft
import torch
import transformers

from toy_model import batches, config

MISSING = {name: importlib.util.find_spec(name) is None for name in ("bitsandbytes", "torchao", "hqq")}


def plain_model():
    torch.manual_seed(7)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=96, max_position_embeddings=64))


def replace_linears(model, make):
    """As the packages' integrations do, in the layers."""
    for module in list(model.model.layers.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, make(child))
    return model


def nf4(linear):
    import bitsandbytes
    made = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4",
                                      compute_dtype=torch.float32, compress_statistics=True)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def int8(linear):
    import bitsandbytes
    made = bitsandbytes.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    made.load_state_dict(linear.state_dict())
    return made.to("cpu")


def torchao_int8(linear):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    quantize_(linear, Int8WeightOnlyConfig())
    return linear


def hqq(linear):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    return HQQLinear(linear, BaseQuantizeConfig(nbits=4, group_size=64), compute_dtype=torch.float32, device="cpu")


def with_lora(make):
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = replace_linears(plain_model(), make)
    torch.manual_seed(8)
    return peft.get_peft_model(model, lora)


class Quantized(Case):
    def assert_trains_as_pytorch(self, make, least):
        """`least`: bytes of the layers' weights without any scales."""
        network = with_lora(make)
        optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
        engine = self.engine(with_lora(make), config(self.folder, clipping=0, spillway={"hbm_bytes": "8MiB"}))
        layers = [packed.nbytes for packed in engine._layout.packed.values()]
        self.assertLess(least, sum(layers))
        self.assertLess(sum(layers), 1.2 * least)
        for step, ids in enumerate(batches(4)):
            loss = network(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found = engine(input_ids=ids, labels=ids).loss
            engine.backward(found)
            engine.step()
            if step == 0:
                self.assertEqual(loss.item(), found.item())
            self.assertAlmostEqual(loss.item(), found.item(), delta=1e-5 * loss.item())
        network.eval(), engine.module.eval()
        with torch.no_grad():
            self.assertAlmostEqual(network(input_ids=ids, labels=ids).loss.item(),
                                   engine(input_ids=ids, labels=ids).loss.item(), delta=1e-4)
        self.assert_state_is_pytorchs(network, engine)
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
        self.assert_trains_as_pytorch(nf4, 3 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)

    @unittest.skipIf(MISSING["bitsandbytes"], "no bitsandbytes here; tools/test_newest.sh brings one")
    def test_BitsandbytesEightBits(self):
        self.assert_trains_as_pytorch(int8, 3 * (4 * 512 * 512 + 3 * 512 * 1024))

    @unittest.skipIf(MISSING["torchao"], "no torchao here; tools/test_newest.sh brings one")
    def test_TorchaoEightBits(self):
        self.assert_trains_as_pytorch(torchao_int8, 3 * (4 * 512 * 512 + 3 * 512 * 1024))

    @unittest.skipIf(MISSING["hqq"], "no hqq here; tools/test_newest.sh brings one")
    def test_HqqFourBits(self):
        self.assert_trains_as_pytorch(hqq, 3 * (4 * 512 * 512 + 3 * 512 * 1024) // 2)


if __name__ == "__main__":
    main()
