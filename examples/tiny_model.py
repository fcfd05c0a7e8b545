"""Writes a tiny random model, as from_pretrained() takes it, to try the examples with: nothing is downloaded.

    python examples/tiny_model.py t5|llama DIR

The tokenizer is ByT5's, whose tokens are bytes and which has no vocabulary to be learned.
"""
import argparse

import torch
import transformers


def make(kind, folder, seed=1):
    torch.manual_seed(seed)
    tokenizer = transformers.ByT5Tokenizer(extra_ids=0)
    common = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
              "eos_token_id": tokenizer.eos_token_id}
    if kind == "t5":
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
            decoder_start_token_id=tokenizer.pad_token_id, **common))
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=None, **common))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("t5", "llama"))
    parser.add_argument("folder")
    arguments = parser.parse_args()
    make(arguments.kind, arguments.folder)
