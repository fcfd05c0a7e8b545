"""Models that are not trained: engines over frozen weights alone, beside a trained one and by themselves."""
import unittest

from case import Case, main
import torch

import spillway.trainer
from toy_model import batches, config, model

try:
    import transformers
except ImportError:
    transformers = None


def frozen(seed=1):
    made = model(seed).eval()
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    return made


def results(*networks):
    with torch.no_grad():
        return [[network(batch).item() for batch in batches(2)] for network in networks]


class Alone(Case):
    def test_AnEngineThatTrainsNothingGivesPyTorchsResults(self):
        for device in ("nvme", "cpu"):
            with self.subTest(device=device):
                network = frozen()
                with self.engine(network, config(self.folder, device=device), on_existing="replace") as made:
                    for _ in range(3):
                        self.assertEqual(*results(frozen(), made))
                    self.assertEqual(made(batches(1)[0]).item(), results(frozen())[0][0])  # with a graph, too
                    self.assertNotIn("states", " ".join(purpose for _, purpose, _ in made.ledger()))

    def test_ItNeedsNoOptimizer(self):
        made = self.engine(frozen(), {"train_micro_batch_size_per_gpu": 1})
        self.assertEqual(*results(frozen(), made))

    def test_AWeightIsLentOutsideOfItsBlock(self):
        made, twin, x = self.engine(frozen()), frozen(), torch.ones(3, 48)
        for _ in range(2):
            self.assertTrue(torch.equal(x @ twin.head.weight.t(), x @ made.module.head.weight.t()))
            self.assertEqual(*results(twin, made))


class Written(Case):
    def pairs(self):
        """Of a model whose weights are the engine's, and PyTorch's of the same values."""
        for device in ("nvme", "cpu"):
            with self.subTest(device=device):
                network, twin = frozen(), frozen()
                with self.engine(network, config(self.folder, device=device), on_existing="replace") as made:
                    yield network, twin
                    self.assertEqual(*results(twin, made))
                    for name, value in made.master_weights().items():
                        self.assertTrue(torch.equal(twin.get_parameter(name), value), name)

    def test_WhatSyncRefModelCallbackWritesIsHonoured(self):
        source = model(2)
        for pair in self.pairs():
            for target in pair:
                for own, other in zip(target.parameters(), source.parameters()):
                    own.data.mul_(1 - 0.6).add_(other.data, alpha=0.6)

    def test_TheSourceMayBeAnEnginesToo(self):
        other = self.folder / "other"
        other.mkdir()
        source = self.engine(model(2), config(other)).module
        for pair in self.pairs():
            for target, read in zip(pair, (source, model(2))):
                for own, values in zip(target.parameters(), read.parameters()):
                    own.data.mul_(0.5).add_(values.data, alpha=0.5)

    def test_OtherOperationsInPlaceAreHonoured(self):
        for pair in self.pairs():
            for target in pair:
                with torch.no_grad():
                    target.embedding.weight.lerp_(torch.ones_like(target.embedding.weight), 0.1)
                    target.layers[0].up.bias.copy_(torch.full((192,), 0.25))
                    target.layers[0].up.weight.data[3:5].fill_(0.5)
                    target.layers[1].norm.weight[0] = 2.0
                    target.layers[1].norm.bias.data += 0.125
                    target.norm.bias.data = torch.full((48,), 0.0625)

    def test_LoadStateDictIsHonoured(self):
        for pair in self.pairs():
            for target in pair:
                target.load_state_dict(model(2).state_dict())


class OfATrained(Case):
    def test_WhatIsTrainedIsNotWrittenTo(self):
        made = self.engine(model())
        self.assert_error("norm.weight: was written to outside of its block", made.module.norm.weight.data.mul_, 2)


@unittest.skipIf(transformers is None, "no transformers in this Python")
class OfATrainer(Case):
    """What TRL does with a reference model, in a trainer of transformers."""

    def trainer(self, reference, budgets=None, **options):
        class Distilling(spillway.trainer.Mixin, transformers.Trainer):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)

            def compute_loss(self, model, inputs, *_, **__):
                with torch.no_grad():
                    wanted = self.reference(**inputs, use_cache=False).logits
                return (model(**inputs, use_cache=False).logits - wanted).square().mean()

        place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
        arguments = transformers.TrainingArguments(
            str(self.folder / "out"), max_steps=3, logging_steps=1, use_cpu=True, report_to=[], save_strategy="no",
            disable_tqdm=True)
        rows = [{"input_ids": row} for row in torch.arange(64).view(8, 8)]
        return Distilling(model=self.network(1), args=arguments, train_dataset=rows, on_existing="replace", spillway={
            "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
            "spillway": {"tile_elements": 4096, **(budgets or {})}}, **options)

    @staticmethod
    def network(seed):
        torch.manual_seed(seed)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2))

    def losses(self, trainer):
        trainer.train()
        trainer.engine.close()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    def test_AReferenceIsAnEngineWithinTheSameBudgets(self):
        reference = self.network(2)
        plain = self.trainer(torch.nn.Identity())
        plain.reference = self.network(2)
        wanted = self.losses(plain)
        budgets = {"hbm_bytes": 2 << 20, "host_bytes": 128 << 20}
        trainer = self.trainer(reference, budgets=budgets)
        engine, = trainer.untrained.engines
        self.assertIs(reference, trainer.reference)
        self.assertIsNot(engine, trainer.engine)
        self.assertTrue((self.folder / "store" / "untrained-1" / "spillway.store").exists())
        trainer.train()
        found = [line["loss"] for line in trainer.state.log_history if "loss" in line]
        for one, other in zip(wanted, found):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)
        for tier, key in (("hbm", "hbm_bytes"), ("host", "host_bytes")):
            sizes = [sum(size for of, _, size in each.ledger() if of == tier) for each in (engine, trainer.engine)]
            self.assertLessEqual(sizes[0], budgets[key] // 5)  # a frozen parameter for four of a trained one
            self.assertLessEqual(sum(sizes), budgets[key])
        trainer.engine.close()
        engine.close()

    def test_TheShareCanBeSaid(self):
        trainer = self.trainer(self.network(2), budgets={"host_bytes": 128 << 20}, untrained_share=0.5)
        engine, = trainer.untrained.engines
        self.assertEqual(64 << 20, int(engine.settings["spillway.host_bytes"]))
        self.assertEqual((128 << 20) - sum(size for tier, _, size in engine.ledger() if tier == "host"),
                         trainer._filled(None)["spillway"]["host_bytes"])
        self.assert_error("untrained_share: is 2; give the share", self.trainer, self.network(2), untrained_share=2)

    def test_ABudgetThatIsTooSmallNamesTheShare(self):
        self.assert_error(r"raise hbm_bytes or host_bytes, of which LlamaForCausalLM, which is not trained, has 20%, "
                          "or say untrained_share=", self.trainer, self.network(2), budgets={"hbm_bytes": 65536})


if __name__ == "__main__":
    main()
