"""What transformers' models give beside logits trains as without Spillway: router losses, hidden states, adapters."""
from case import Case as Folder, main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")

import importlib.util
import unittest

import torch
import transformers

from toy_model import DEVICE, config

STEPS, VOCABULARY = 3, 64
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "attn_implementation": "eager"}


def mixtral():
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2))


def qwen2_moe():
    return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="eager"))


def router_losses(network, ids):
    return network(input_ids=ids, labels=ids, output_router_logits=True).loss


def states(network, ids):
    found = network(input_ids=ids, labels=ids, output_hidden_states=True, output_attentions=True)
    attentions = found.cross_attentions if "cross_attentions" in found else found.attentions
    hidden = found.decoder_hidden_states if "decoder_hidden_states" in found else found.hidden_states
    return found.loss + sum(each.pow(2).mean() for each in hidden) + 0.1 * sum(each.pow(2).sum() for each in attentions)


def causal(network, ids):
    return network(input_ids=ids, labels=ids).loss


class Case(Folder):
    def made(self, make):
        torch.manual_seed(0)
        return make().train()

    def tokens(self, step):
        return torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(step)).to(DEVICE)

    def assert_trains(self, make, loss_of, **options):
        alone, network = self.made(make).to(DEVICE), self.made(make)
        engine = self.engine(network, config(self.folder, **options), on_existing="replace")
        optimizer = torch.optim.AdamW([p for p in alone.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.01)
        for step in range(STEPS):
            loss, wanted = loss_of(network, self.tokens(step)), loss_of(alone, self.tokens(step))
            if step == 0:
                self.assertEqual(wanted.item(), loss.item())
            self.assertAlmostEqual(wanted.item(), loss.item(), delta=1e-5 * abs(wanted.item()))
            engine.backward(loss)
            wanted.backward()
            norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0).item()
            self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=2e-5 * norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        engine.close()


class Outputs(Case):
    def test_RouterLosses(self):
        for make in (mixtral, qwen2_moe):
            for device in ("nvme", "cpu"):
                with self.subTest(model=make.__name__, device=device):
                    self.assert_trains(make, router_losses, device=device)

    def test_HiddenStatesAndAttentions(self):
        for make in (mixtral, qwen2_moe, llama, t5):
            with self.subTest(model=make.__name__):
                self.assert_trains(make, states)

    def test_MoreTokensThanTheModelHad(self):
        def make():
            network = llama()
            network.resize_token_embeddings(VOCABULARY + 6)
            return network

        self.assert_trains(make, causal)

    def test_CachesAreForGeneratingAlone(self):
        engine = self.engine(self.made(llama), config(self.folder))
        self.assertTrue(engine.config.use_cache)
        loss = engine(input_ids=self.tokens(0), labels=self.tokens(0))
        self.assertIsNone(loss.get("past_key_values"))
        engine.backward(loss.loss)
        engine.step()
        self.assertTrue(engine.config.use_cache)
        engine.eval()
        with torch.no_grad():
            self.assertIsNotNone(engine(input_ids=self.tokens(0)).past_key_values)
        self.assertEqual(16, engine.generate(self.tokens(0), max_new_tokens=4, do_sample=False).shape[1])
        self.assert_error("is given a cache of keys and values", engine, input_ids=self.tokens(0), use_cache=True)

    @unittest.skipUnless(importlib.util.find_spec("peft"), "peft is missing")
    def test_AdaptersThatAreSwitchedOffForOnePass(self):
        import peft

        def make():
            return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

        def loss_of(network, ids):
            with network.disable_adapter():  # under autograd, as some do it
                without = network(input_ids=ids, labels=ids).loss
            return (network(input_ids=ids, labels=ids).loss - without.detach()).exp() + 0.1 * without

        self.assert_trains(make, loss_of)


if __name__ == "__main__":
    main()
