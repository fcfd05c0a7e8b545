#!/usr/bin/env python3
"""What transformers makes of the config.json of published decoders, and of small ones with every scaling of rotary
positions: tensors, windows, scales, cosines and sines. The references of tests/tools/models/decoder_test.cc, written to
the file that is named.

Models are made without weights, on the device "meta". The files' values are those of the Hugging Face hub, as far as
they matter here; the factors of Phi-3-mini-128k are others, of the same number.
"""
import argparse
import json
import platform

import torch
import transformers

SEQUENCE = 4096
LLAMA = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}
PHI = {"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32,
       "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_theta": 10000.0,
       "sliding_window": 262144, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_bias": False,
       "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
PHI4_LONG = [1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
             2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
             6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
             16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23,
             32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77]
GEMMA = {"head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 26,
         "query_pre_attn_scalar": 256, "attention_bias": False, "cache_implementation": "hybrid"}


def sizes(width, inner, layers, heads, kv_heads, vocabulary, positions):
    return {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
            "max_position_embeddings": positions}


PUBLISHED = {
    "Llama-2-7b": LLAMA | sizes(4096, 11008, 32, 32, 32, 32000, 4096) | {
        "pretraining_tp": 1, "rope_scaling": None, "tie_word_embeddings": False},
    "Llama-3.1-8B": LLAMA | sizes(4096, 14336, 32, 32, 8, 128256, 131072) | {
        "rope_scaling": LLAMA3 | {"factor": 8.0}, "rope_theta": 500000.0, "mlp_bias": False,
        "tie_word_embeddings": False},
    "Llama-3.2-1B": LLAMA | sizes(2048, 8192, 16, 32, 8, 128256, 131072) | {
        "head_dim": 64, "rope_scaling": LLAMA3 | {"factor": 32.0}, "rope_theta": 500000.0,
        "tie_word_embeddings": True},
    "Mistral-7B-v0.1": sizes(4096, 14336, 32, 32, 8, 32000, 32768) | {
        "model_type": "mistral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 4096, "tie_word_embeddings": False},
    "Qwen2.5-0.5B": sizes(896, 4864, 24, 14, 2, 151936, 32768) | {
        "model_type": "qwen2", "rope_theta": 1000000.0, "max_window_layers": 24, "sliding_window": 32768,
        "use_sliding_window": False, "use_mrope": False, "tie_word_embeddings": True},
    "Qwen3-0.6B": sizes(1024, 3072, 28, 16, 8, 151936, 40960) | {
        "model_type": "qwen3", "head_dim": 128, "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None,
        "max_window_layers": 28, "use_sliding_window": False, "attention_bias": False, "tie_word_embeddings": True},
    "Phi-3-mini-128k": PHI | {
        "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False,
        "rope_scaling": {"type": "longrope", "long_factor": [1 + i * 4 / 3 for i in range(48)],
                         "short_factor": [1 + i / 30 for i in range(48)]}},
    "Phi-4-mini": PHI | {
        "num_attention_heads": 24, "num_key_value_heads": 8, "vocab_size": 200064, "tie_word_embeddings": True,
        "partial_rotary_factor": 0.75, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "mlp_bias": False,
        "rope_scaling": {"type": "longrope", "long_factor": PHI4_LONG, "short_factor": [1.0] * 48}},
    "gemma-2-2b": GEMMA | {
        "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 256000, "max_position_embeddings": 8192,
        "sliding_window": 4096, "rope_theta": 10000.0, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0},
    "gemma-3-1b": GEMMA | {
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4,
        "num_key_value_heads": 1, "vocab_size": 262144, "max_position_embeddings": 32768, "sliding_window": 512,
        "sliding_window_pattern": 6, "rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": None,
        "attn_logit_softcapping": None, "final_logit_softcapping": None},
}

SMALL = sizes(128, 64, 4, 4, 2, 64, 8192)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
LONG = {"long_factor": [1 + i / 2 for i in range(12)], "short_factor": [1 + i / 8 for i in range(12)]}
SMALL_PHI = SMALL | {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": None,
                     "pad_token_id": None}
SCALED = {
    "parameters": SMALL | {"model_type": "qwen3", "head_dim": 32, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000000.0}},
    "linear": SMALL | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic-short": SMALL | {"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "dynamic-long": SMALL | {"model_type": "llama", "max_position_embeddings": 1024, "rope_scaling": {
        "type": "dynamic", "factor": 2.0}},
    "yarn": SMALL | {"model_type": "qwen2", "rope_theta": 1000000.0, "rope_scaling": YARN},
    "yarn-exact": SMALL | {"model_type": "mistral", "rope_scaling": YARN | {
        "truncate": False, "beta_fast": 16, "beta_slow": 2, "mscale": 0.8, "mscale_all_dim": 0.5}},
    "yarn-factor": SMALL | {"model_type": "llama", "rope_parameters": YARN | {
        "rope_theta": 50000.0, "attention_factor": 1.25}},
    "longrope-short": SMALL_PHI | {"original_max_position_embeddings": 4096, "rope_scaling": LONG | {
        "type": "longrope"}},
    "longrope-long": SMALL_PHI | {"original_max_position_embeddings": 1024, "rope_scaling": LONG | {
        "type": "su", "original_max_position_embeddings": 1024}},
    "longrope-factor": SMALL | {"model_type": "llama", "head_dim": 24, "rope_parameters": LONG | {
        "rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": 2048, "rope_theta": 10000.0}},
    "gemma3-linear": SMALL | {"model_type": "gemma3_text", "head_dim": 32, "rope_scaling": {
        "rope_type": "linear", "factor": 8.0}, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "gemma3-parameters": SMALL | {"model_type": "gemma3_text", "head_dim": 32, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0}, "full_attention": YARN}},
    "qwen2-windows": SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 100,
                              "max_window_layers": 1},
    "mistral-default-window": SMALL | {"model_type": "mistral"},
    "mistral-no-window": SMALL | {"model_type": "mistral", "sliding_window": None},
    "gemma2-no-caps": SMALL | {"model_type": "gemma2", "head_dim": 32, "attn_logit_softcapping": None},
}


def values(numbers):
    return " ".join(f"{float(number):.9g}" for number in numbers)


def facts(model, config):
    """Lines of one model: what is computed, and with which tensors."""
    layers = model.model.layers
    embedding, mlp, attention = model.model.embed_tokens, layers[0].mlp, layers[0].self_attn
    window = getattr(config, "sliding_window", None)
    norm = model.model.norm
    cap = model.config.final_logit_softcapping if config.model_type.startswith("gemma") else None
    scale = getattr(embedding, "scalar_embed_scale", 1.0)
    yield f"parameters {sum(parameter.numel() for parameter in model.parameters())}"
    yield "windows " + " ".join(str(getattr(layer.self_attn, "sliding_window", window) or 0) for layer in layers)
    rounded = [torch.tensor(scale).to(dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    yield "scales " + values([attention.scaling, *rounded])
    yield "caps " + values([getattr(attention, "attn_logit_softcapping", None) or 0, cap or 0])
    yield "epsilon " + values([norm.eps if hasattr(norm, "eps") else norm.variance_epsilon])
    yield "activation " + type(mlp.act_fn if hasattr(mlp, "act_fn") else mlp.activation_fn).__name__
    last = f"layers.{len(layers) - 1}."
    for name, parameter in model.named_parameters():
        if "layers." not in name or last in name:
            yield f"tensor {name} " + " ".join(str(extent) for extent in parameter.shape)


def tables(model, config, positions):
    """Cosines and sines, of the first layer of each kind."""
    rotary = type(model.model.rotary_emb)(config)
    nested = "sliding_attention" in config.rope_parameters or "full_attention" in config.rope_parameters
    kinds = config.layer_types if nested else [None]
    for kind in dict.fromkeys(kinds):
        arguments = {"layer_type": kind} if nested else {}
        cos, sin = rotary(torch.zeros(1), torch.arange(SEQUENCE)[None], **arguments)
        half = cos.shape[-1] // 2
        yield f"rotary {kinds.index(kind)} {SEQUENCE} {2 * half}"
        for position in positions:
            pairs = torch.stack([cos[0, position, :half], sin[0, position, :half]], dim=1)
            yield f"at {position} " + values(pairs.flatten().tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    lines = [f"# bench/peers/decoders.py; torch {torch.__version__}, transformers {transformers.__version__}, "
             f"python {platform.python_version()}"]
    a = parser.parse_args()
    for name, said in (PUBLISHED | SCALED).items():
        # from_dict() changes what it is given.
        config = transformers.CONFIG_MAPPING[said["model_type"]].from_dict(json.loads(json.dumps(said)))
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
        lines += [f"model {name} {json.dumps(said)}", *facts(model, config),
                  *tables(model, config, [SEQUENCE - 1] if name in PUBLISHED else [1000, SEQUENCE - 1])]
    with open(a.file, "w", encoding="utf-8") as out:
        out.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
