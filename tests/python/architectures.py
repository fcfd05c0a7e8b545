"""Small models of the architectures that people train, each as its own class in transformers makes it.

A row says what the class needs to be small, what it is given, and whether it generates. Nothing here is for Spillway.
"""
import inspect

import torch
import transformers

VOCABULARY, WIDTH, LENGTH, ROWS = 96, 32, 10, 2
TEXT = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = TEXT | {"num_key_value_heads": 1, "max_position_embeddings": 64}
EXPERTS = GROUPED | {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 16}
BERT = TEXT | {"max_position_embeddings": 64}
VISION = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 16, "patch_size": 8}
SPEECH = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
          "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "vocab_size": 32}


def ids(seed, length=LENGTH, low=3, high=VOCABULARY):
    return torch.randint(low, high, (ROWS, length), generator=torch.Generator().manual_seed(seed))


def noise(seed, *shape):
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


def causal(seed):
    return {"input_ids": ids(seed), "labels": ids(seed)}


def padded(seed):
    """As a collator gives a batch: a row is shorter, and its end counts in no loss."""
    batch = causal(seed)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, -3:] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def from_text(seed):
    return {"input_ids": ids(seed), "labels": ids(seed + 100, 6)}


def classes(seed):
    return {"input_ids": ids(seed), "labels": torch.tensor([0, 1])}


def picture(seed):
    return {"pixel_values": noise(seed, 3, 16, 16), "labels": torch.tensor([0, 1])}


def pairs(seed):
    return {"input_ids": ids(seed), "pixel_values": noise(seed, 3, 16, 16), "return_loss": True}


def asked(seed):
    """A text with a picture in it: four patches, each in a token's place; before transformers 4.45, one for all."""
    known = inspect.signature(transformers.LlavaConfig).parameters
    batch, places = padded(seed), 4 if "image_seq_length" in known else 1
    batch["input_ids"][:, :places] = VOCABULARY - 1
    batch["input_ids"][:, places:].clamp_(max=VOCABULARY - 2)
    return batch | {"pixel_values": noise(seed, 3, 16, 16)}


def sound(seed):
    return {"input_values": noise(seed, 800), "labels": ids(seed, 5, 1, 32)}


def spoken(seed):
    return {"input_features": noise(seed, 16, 40), "labels": ids(seed, 6)}


def prompt(seed):
    return {"input_ids": ids(seed)[:, :5]}


def without_labels(batch):
    return lambda seed: {name: value for name, value in batch(seed).items() if name != "labels"}


# name: configuration's class, model's class, what makes it small, a batch, what it generates from (None: it does not).
ROWS_OF = {
    "GPT-2": ("GPT2Config", "GPT2LMHeadModel", {
        "vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0}, padded, prompt),
    "Llama 3": ("LlamaConfig", "LlamaForCausalLM", GROUPED | {
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32}}, padded, prompt),
    "Llama 4": ("Llama4TextConfig", "Llama4ForCausalLM", GROUPED | {
        "intermediate_size_mlp": 48, "num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 4,
        "interleave_moe_layer_step": 2}, padded, prompt),
    "Qwen2": ("Qwen2Config", "Qwen2ForCausalLM", GROUPED | {"tie_word_embeddings": True}, padded, prompt),
    "Qwen3": ("Qwen3Config", "Qwen3ForCausalLM", GROUPED | {"head_dim": 16}, padded, prompt),
    "Qwen3-MoE": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", EXPERTS | {
        "num_experts": 4, "output_router_logits": True}, padded, prompt),
    "Gemma 2": ("Gemma2Config", "Gemma2ForCausalLM", GROUPED | {
        "head_dim": 16, "sliding_window": 6}, padded, prompt),
    "Gemma 3": ("Gemma3TextConfig", "Gemma3ForCausalLM", GROUPED | {
        "head_dim": 16, "sliding_window": 6}, padded, prompt),
    "Mistral": ("MistralConfig", "MistralForCausalLM", GROUPED | {"sliding_window": 6}, padded, prompt),
    "Mixtral": ("MixtralConfig", "MixtralForCausalLM", GROUPED | {
        "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}, padded, prompt),
    "DeepSeek-V3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", GROUPED | {
        "num_key_value_heads": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}, padded, prompt),
    "gpt-oss": ("GptOssConfig", "GptOssForCausalLM", EXPERTS | {
        "num_local_experts": 4, "sliding_window": 6}, padded, prompt),
    "Phi": ("PhiConfig", "PhiForCausalLM", BERT, padded, prompt),
    "Phi-3": ("Phi3Config", "Phi3ForCausalLM", GROUPED, padded, prompt),
    "OPT": ("OPTConfig", "OPTForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "word_embed_proj_dim": WIDTH, "ffn_dim": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2}, padded, prompt),
    "Bloom": ("BloomConfig", "BloomForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 2, "pad_token_id": 0}, padded, prompt),
    "Falcon": ("FalconConfig", "FalconForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}, padded, prompt),
    "GPT-NeoX": ("GPTNeoXConfig", "GPTNeoXForCausalLM", BERT, padded, prompt),
    "T5": ("T5Config", "T5ForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2,
        "decoder_start_token_id": 0}, from_text, prompt),
    "BART": ("BartConfig", "BartForConditionalGeneration", {
        "vocab_size": VOCABULARY, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2, "forced_eos_token_id": 2}, from_text, prompt),
    "BERT": ("BertConfig", "BertForMaskedLM", BERT, padded, None),
    "RoBERTa": ("RobertaConfig", "RobertaForSequenceClassification", BERT, classes, None),
    "ALBERT": ("AlbertConfig", "AlbertForMaskedLM", BERT | {"embedding_size": 16}, padded, None),
    "ViT": ("ViTConfig", "ViTForImageClassification", VISION, picture, None),
    "CLIP": ("CLIPConfig", "CLIPModel", {
        "text_config": TEXT | {"max_position_embeddings": 64}, "vision_config": VISION, "projection_dim": 16},
        pairs, None),
    "Llava": ("LlavaConfig", "LlavaForConditionalGeneration", {
        "text_config": GROUPED | {"model_type": "llama"},
        "vision_config": VISION | {"model_type": "clip_vision_model"},
        "image_token_index": VOCABULARY - 1, "image_seq_length": 4}, asked, without_labels(asked)),
    "wav2vec2": ("Wav2Vec2Config", "Wav2Vec2ForCTC", SPEECH | {"mask_time_length": 2}, sound, None),
    "Whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {
        "vocab_size": VOCABULARY, "num_mel_bins": 16, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
        "max_source_positions": 20, "max_target_positions": 24, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3, "begin_suppress_tokens": None, "suppress_tokens": None},
        spoken, without_labels(spoken)),
    "Mamba": ("MambaConfig", "MambaForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 0,
        "eos_token_id": 2, "use_mambapy": False}, causal, prompt),
    "Mamba 2": ("Mamba2Config", "Mamba2ForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "state_size": 8, "head_dim": 8,
        "num_heads": 8, "n_groups": 1, "chunk_size": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        causal, prompt),
    "RWKV": ("RwkvConfig", "RwkvForCausalLM", {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2, "context_length": 64,
        "rescale_every": 0, "bos_token_id": 1, "eos_token_id": 2}, causal, prompt),
}


class Lstm(torch.nn.Module):
    """Two layers over embeddings, as PyTorch's own word model has them."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = torch.nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels):
        hidden, _ = self.rnn(self.embedding(input_ids))
        loss = torch.nn.functional.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss}
