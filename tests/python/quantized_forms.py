"""Llama's layers as bitsandbytes, torchao and HQQ quantize them, with LoRA beside them."""
import copy

import peft
import torch
import transformers


def quantized_model(make, **shape):
    """One layer is quantized, and the others are copies of it, each with its bytes in another order."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(**{
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8,
        "num_key_value_heads": 8, "vocab_size": 96, "max_position_embeddings": 64, **shape})
    count, config.num_hidden_layers = config.num_hidden_layers, 1
    model = transformers.LlamaForCausalLM(config)
    config.num_hidden_layers = count
    first = model.model.layers[0]
    replace_linears(first, make)
    for number in range(1, count):
        layer = copy.deepcopy(first)
        layer.self_attn.layer_idx = number
        for module in layer.modules():
            _turned(module, number)
        model.model.layers.append(layer)
    return model


def _turned(module, number):
    for weight in module._parameters.values():
        if weight is None or (weight.is_floating_point() and not hasattr(weight, "qdata")):
            continue
        values = getattr(weight, "qdata", weight.data)
        values.copy_(values.roll(number, 0))
        if getattr(weight, "quant_state", None) is not None:
            module.quant_state = weight.quant_state  # one again, as before it was copied
        if getattr(weight, "CB", None) is not None:
            weight.CB = weight.data


def replace_linears(layer, make):
    """As the packages' integrations do."""
    for module in list(layer.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, make(child))


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


def with_lora(make, **shape):
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = quantized_model(make, **shape)
    torch.manual_seed(8)
    return peft.get_peft_model(model, lora)


FORMS = {"nf4": nf4, "int8": int8, "torchao": torchao_int8, "hqq": hqq}
