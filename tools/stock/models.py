"""Random models of a few thousand parameters with their tokenizers, as directories for from_pretrained()."""
import pathlib

import tokenizers
import torch
import transformers

SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>", "<cls>", "<sep>"]
WORDS = ("the a one some every cat dog bird fish man woman child tree house river sat ran slept sang fell ate saw "
         "found on in by under over near mat log bed road hill red green blue old young small big quick slow and then "
         "while before after never often why where who what katze hund vogel baum haus fluss rot blau alt "
         "jung").split()
MARKS = [".", "?", ":", ","]
SIZE = 112
TEXT = {"vocab_size": SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
          "image_size": 32, "patch_size": 8}
TEMPLATE = ("{% for message in messages %}{{ message['content'] }} {% if message['role'] == 'assistant' %}<eos>"
            "{% endif %}{% endfor %}")


def tokenizer():
    ids = {word: place for place, word in enumerate(SPECIAL + WORDS + MARKS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="<unk>"))
    made.normalizer = tokenizers.normalizers.Lowercase()
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>",
        mask_token="<mask>", cls_token="<cls>", sep_token="<sep>", model_max_length=64)
    fast.chat_template = TEMPLATE
    return fast


def with_ends():
    """As BERT's: <cls> … <sep> … <sep>."""
    made = tokenizer()
    made.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<cls> $A <sep>", pair="<cls> $A <sep> $B:1 <sep>:1", special_tokens=[("<cls>", 5), ("<sep>", 6)])
    return made


def _save(folder, network, *processors):
    network.save_pretrained(folder)
    for each in processors:
        each.save_pretrained(folder)


def llama(folder):
    _save(folder, transformers.LlamaForCausalLM(transformers.LlamaConfig(
        **TEXT, num_key_value_heads=1, max_position_embeddings=128)), tokenizer())


def reward(folder):
    _save(folder, transformers.LlamaForSequenceClassification(transformers.LlamaConfig(
        **TEXT, num_key_value_heads=1, max_position_embeddings=128, num_labels=1)), tokenizer())


def gpt2(folder):
    _save(folder, transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=128, bos_token_id=1, eos_token_id=2,
        pad_token_id=0)), tokenizer())


def bert(folder):
    _save(folder, transformers.BertForMaskedLM(transformers.BertConfig(**TEXT, max_position_embeddings=128)),
          with_ends())


def xlnet(folder):
    _save(folder, transformers.XLNetLMHeadModel(transformers.XLNetConfig(
        vocab_size=SIZE, d_model=32, n_layer=2, n_head=2, d_inner=64)), with_ends())


def t5(folder):
    _save(folder, transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=SIZE, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0)),
        tokenizer())


def bart(folder):
    _save(folder, transformers.BartForConditionalGeneration(transformers.BartConfig(
        vocab_size=SIZE, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)), with_ends())


def _pictures(kind="ViTImageProcessor"):
    return getattr(transformers, kind)(size={"height": 32, "width": 32})


def vit(folder):
    _save(folder, transformers.ViTForImageClassification(transformers.ViTConfig(**VISION)), _pictures())


def mae(folder):
    _save(folder, transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(
        **VISION, decoder_hidden_size=32, decoder_intermediate_size=64, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2)), _pictures())


def clip(folder):
    _save(folder, transformers.CLIPModel(transformers.CLIPConfig(
        text_config=TEXT | {"max_position_embeddings": 64}, vision_config=VISION, projection_dim=16)), with_ends(),
        transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}))


def wav2vec2(folder):
    _save(folder, transformers.Wav2Vec2ForSequenceClassification(transformers.Wav2Vec2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, classifier_proj_size=16, num_labels=2)),
        transformers.Wav2Vec2FeatureExtractor())


def make(kind, folder):
    """The directory, which is made where it is not there."""
    path = pathlib.Path(folder, kind)
    if not path.exists():
        torch.manual_seed(1)
        globals()[kind](path)
    return path
