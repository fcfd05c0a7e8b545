"""spillway.AdamW below TRL's trainers, which patch the model and know its optimizer as one of PyTorch's."""
import os
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"
from case import main, need  # noqa: E402

need("trl", "no TRL in this Python; tools/test_newest.sh brings it with the newest PyTorch and transformers")
import datasets  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

import spillway  # noqa: E402
from optimizer_loops import Case  # noqa: E402

datasets.disable_progress_bars()
WORDS = "the a cat dog sat ran on mat log <pad> <eos> <unk>".split()
TEXTS = {"text": ["the cat sat on the mat", "a dog ran on a log"] * 16}
PREFERENCES = {"prompt": ["the cat", "a dog"] * 8, "chosen": [" sat on the mat", " ran on a log"] * 8,
               "rejected": [" ran", " sat"] * 8}


def tokenizer():
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>",
                                                unk_token="<unk>")


def model():
    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, pad_token_id=WORDS.index("<pad>"),
        eos_token_id=WORDS.index("<eos>")))


class Trainers(Case):
    def trained(self, trainer, configuration, data, optimizer_of, **options):
        """Losses of six steps with accumulation, clipping and a schedule, and the weights after them."""
        network = model()
        arguments = configuration(
            output_dir=str(self.folder / "trainer"), max_steps=6, per_device_train_batch_size=4, logging_steps=1,
            gradient_accumulation_steps=2, max_grad_norm=0.5, lr_scheduler_type="cosine", warmup_steps=2, seed=3,
            report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, max_length=32)
        made = trainer(network, args=arguments, train_dataset=datasets.Dataset.from_dict(data),
                       processing_class=tokenizer(), optimizers=(optimizer_of(network), None), **options)
        made.train()
        losses = [line["loss"] for line in made.state.log_history if "loss" in line]
        self.assertEqual(6, len(losses))
        return losses, [p.detach().clone() for p in network.parameters()]

    def check(self, *of_trainer, **options):
        expected, weights = self.trained(
            *of_trainer, lambda network: torch.optim.AdamW(network.parameters(), lr=1e-2), **options)
        self.assertLess(expected[-1], expected[0])
        for where in ({}, self.on_nvme()):
            with self.subTest(where=where):
                losses, ours = self.trained(
                    *of_trainer, lambda network: self.optimizer(network, lr=1e-2, **where), **options)
                for ours_of_step, theirs in zip(losses, expected):
                    self.assertAlmostEqual(theirs, ours_of_step, delta=1e-4)
                self.assert_near(weights, ours, 1e-5)

    def test_SFT(self):
        self.check(trl.SFTTrainer, trl.SFTConfig, TEXTS)

    def test_DPO(self):
        self.check(trl.DPOTrainer, trl.DPOConfig, PREFERENCES, ref_model=model())


if __name__ == "__main__":
    main()
