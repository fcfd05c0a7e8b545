"""Logits in slices of the tokens of transformers' models: losses, adapters, generation, Trainers."""
import importlib.util
import unittest

from case import main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from logit_slices_test import Case as Folder  # noqa: E402
from toy_model import DEVICE  # noqa: E402
from trainer_test import VOCABULARY, Case as TrainerCase, examples, model  # noqa: E402

WEIGHTED = hasattr(transformers.Trainer, "get_batch_samples")  # losses take num_items_in_batch and shift_labels
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}


def made(kind, **more):
    """A model of that kind, whose logits are scaled, capped or shifted, some of them."""
    torch.manual_seed(1)
    if kind == "Bart":
        network = transformers.BartForConditionalGeneration(transformers.BartConfig(
            vocab_size=VOCABULARY, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, dropout=0.0, max_position_embeddings=32,
            bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2))
        network.final_logits_bias.uniform_(-1, 1)
        return network
    if kind == "Opt":
        return transformers.OPTForCausalLM(transformers.OPTConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, dropout=0.0,
            word_embed_proj_dim=32, max_position_embeddings=32, use_cache=False))
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(
        **{**SIZES, "pad_token_id": 0, **more}))


KINDS = {"Llama": {}, "Gemma2": {"final_logit_softcapping": 2.0, "head_dim": 16},
         "Cohere": {"logit_scale": 0.25}, "Granite": {"logits_scaling": 4.0}, "Bart": {}, "Opt": {}}


class Models(Folder):
    def setUp(self):
        super().setUp()
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, VOCABULARY, (3, 14), generator=generator).to(DEVICE)
        self.labels = self.ids.masked_fill(self.ids % 4 == 0, -100)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, 9:] = 0

    def steps(self, network, slices, lr=None, **options):
        engine = self.engine(network, slices)
        found = self.trained(engine, 3, lambda engine, *_: engine(
            input_ids=self.ids, attention_mask=self.mask, labels=self.labels, **options).loss)
        engine.close()
        return found

    def test_LossesOfOtherArchitectures(self):
        """The head may be tied, its logits capped, scaled, or shifted by a buffer."""
        for kind, more in KINDS.items():
            if not hasattr(transformers, f"{kind}Config"):
                continue
            with self.subTest(kind), self.assertNoLogs("spillway", "WARNING"):
                self.assert_alike(*(self.steps(made(kind, **more), slices) for slices in (1, 5)), 2e-6)

    def test_LossesOfTheModelsThatOtherSuitesHave(self):
        for kind in ("gpt2", "t5", "llama"):
            found = []
            for slices in (1, 4):
                network = model(kind=kind).eval()  # without dropout
                network.config.tie_word_embeddings = kind != "llama"
                found.append(self.steps(network, slices))
            self.assert_alike(*found, 2e-6)

    @unittest.skipIf(not WEIGHTED, "transformers before 4.46 has no such arguments")
    def test_LossesByCountedTokensAndShiftedLabels(self):
        shifted = torch.nn.functional.pad(self.labels, (0, 1), value=-100)[:, 1:].contiguous()
        for options in ({"num_items_in_batch": 31}, {"num_items_in_batch": torch.tensor(29)},
                        {"shift_labels": shifted}, {"shift_labels": shifted, "num_items_in_batch": 5}):
            self.assert_alike(*(self.steps(made("Llama"), slices, **options) for slices in (1, 4)), 2e-6)

    def test_AnEvaluationAndTextAreTheSame(self):
        for kind in ("Llama", "Cohere", "Bart"):
            found = []
            for slices in (1, 4):
                engine = self.engine(made(kind, **KINDS[kind]).eval(), slices)
                given = self.ids[:, :5]
                with torch.no_grad():
                    outputs = engine(input_ids=self.ids, attention_mask=self.mask, labels=self.labels)
                    alone = engine(input_ids=self.ids, attention_mask=self.mask,
                                   **({"decoder_input_ids": self.ids} if kind == "Bart" else {})).logits
                texts = [engine.generate(given, max_new_tokens=6, min_new_tokens=6, pad_token_id=1, **options).tolist()
                         for options in ({"do_sample": False}, {"num_beams": 3})]
                found.append((outputs.loss.item(), outputs.logits.softmax(-1), alone[:, -1].exp(), texts))
                engine.close()
            self.assertAlmostEqual(found[0][0], found[1][0], delta=1e-6 * found[0][0])
            for one, other in zip(found[0][1:3], found[1][1:3]):
                torch.testing.assert_close(one, other)
            self.assertEqual(found[0][3], found[1][3])

    @unittest.skipIf(importlib.util.find_spec("peft") is None, "no peft in this Python; `pip install peft` brings it")
    def test_Adapters(self):
        """On the head, elsewhere with the head frozen, and a head that is trained whole beside them."""
        import peft
        for more in ({"target_modules": ["q_proj", "lm_head"]}, {"target_modules": ["q_proj"]},
                     {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}):
            found = []
            for slices in (1, 4):
                network = peft.get_peft_model(made("Llama"), peft.LoraConfig(
                    r=4, init_lora_weights=False, task_type="CAUSAL_LM", **more))
                torch.manual_seed(4)
                for parameter in network.parameters():
                    if parameter.requires_grad:
                        torch.nn.init.normal_(parameter, std=0.1)
                found.append(self.steps(network, slices))
            self.assert_alike(*found, 2e-6)

    @unittest.skipIf(importlib.util.find_spec("peft") is None, "no peft in this Python; `pip install peft` brings it")
    def test_AnAdapterThatWasSwitchedOffStaysOffForItsLogits(self):
        import peft
        found = []
        for slices in (1, 4):
            torch.manual_seed(1)
            network = peft.get_peft_model(made("Llama"), peft.LoraConfig(
                r=4, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=["q_proj", "lm_head"]))
            torch.manual_seed(4)
            for parameter in network.parameters():
                if parameter.requires_grad:
                    torch.nn.init.normal_(parameter, std=0.1)
            engine = self.engine(network, slices)
            with torch.no_grad():
                with network.disable_adapter():
                    reference = engine(input_ids=self.ids).logits
                found.append((reference.float().log_softmax(-1).sum(0), engine(input_ids=self.ids).logits.exp()))
            engine.close()
        self.assertFalse(torch.allclose(found[0][0].exp(), found[0][1].sum(0)))
        for one, other in zip(*found):
            torch.testing.assert_close(one, other)


class Trainers(TrainerCase):
    def run_of(self, slices, network, spillway_keys=None, **arguments):
        seen = []

        def metric(prediction):
            seen.append(prediction.predictions)
            return {}

        configuration = self.configuration(f"{slices}{len(list(self.folder.iterdir()))}", spillway={
            "logit_slices": slices, **(spillway_keys or {})})
        trainer = self.trainer(network, configuration, options={"compute_metrics": metric}, max_steps=3, **arguments)
        transformers.set_seed(7)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.engine.close()
        return trainer.losses, [loss], torch.as_tensor(seen[0])

    def test_TrainAndEvaluateAlike(self):
        """The evaluation reads the logits; a label smoother reads them in training, too."""
        for arguments in ({}, {"label_smoothing_factor": 0.1}):
            one, other = (self.run_of(slices, model(kind="llama"), **arguments) for slices in (1, 4))
            for wanted, found in zip(one[:2], other[:2]):
                for first, second in zip(wanted, found):
                    self.assertAlmostEqual(first, second, delta=2e-6 * first)
            torch.testing.assert_close(one[2], other[2], rtol=1e-4, atol=1e-5)

    @unittest.skipIf(not WEIGHTED, "transformers before 4.46 cannot; tools/test_newest.sh brings a newer one")
    def test_MicroBatchesTogether(self):
        one, other = (self.run_of(slices, model(kind="llama", tie_word_embeddings=False),
                                  {"micro_batches_together": together}) for slices, together in ((1, False), (4, True)))
        for first, second in zip(one[0], other[0]):
            self.assertAlmostEqual(first, second, delta=2e-6 * first)


if __name__ == "__main__":
    main()
