"""TRL's trainers on an engine, as they are but for the class: losses read the head's weight outside of the head."""
import os
import unittest
import unittest.mock

os.environ["HF_HUB_OFFLINE"] = "1"
from case import Case as Folder, main, need  # noqa: E402

need("trl", "no TRL in this Python; tools/test_newest.sh brings it with the newest PyTorch and transformers")
import datasets  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

import spillway.trainer  # noqa: E402
from trl_test import PREFERENCES, TEXTS, model, tokenizer  # noqa: E402

STEPS = 4
PROMPTS = {"prompt": ["the cat", "a dog"] * 16}
LABELLED = {"prompt": ["the cat", "a dog"] * 8, "completion": [" sat on the mat", " ran"] * 8,
            "label": [True, False] * 8}
PAIRS = {name: ["the cat" + text for text in PREFERENCES[name]] for name in ("chosen", "rejected")}
SAMPLING = {"num_generations": 4, "max_completion_length": 6}


def words(completions, **_):
    return [len(set(text)) + 0.1 * len(text) for text in completions]


def scoring():
    torch.manual_seed(1)
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(
        **{**model().config.to_dict(), "architectures": None, "num_labels": 1}))


def judge():
    made = scoring().eval()
    made.config._name_or_path = "judge"
    return made


@unittest.skipIf(int(trl.__version__.split(".")[0]) < 1, f"TRL {trl.__version__}; from 1.0 on these are the arguments")
class Trainers(Folder):
    def trained(self, name, data, ours, lora, of_trainer, more, together=False):
        network = scoring() if name == "Reward" else model()
        if more.get("beta") and not lora:  # of whose files the trainer makes a reference
            network.save_pretrained(self.folder / "policy")
            network = transformers.LlamaForCausalLM.from_pretrained(self.folder / "policy")
        arguments = getattr(trl, f"{name}Config")(
            output_dir=str(self.folder / "out"), max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1,
            gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=1e-2, lr_scheduler_type="cosine",
            warmup_steps=2, seed=3, report_to=[], use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True,
            **more)
        kind, options = getattr(trl, f"{name}Trainer"), {key: make() for key, make in of_trainer.items()}
        if lora:
            import peft
            options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"],
                                                     task_type="SEQ_CLS" if name == "Reward" else "CAUSAL_LM")
        if ours:
            kind = type(f"Spilled{name}", (spillway.trainer.Mixin, kind), {})
            place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
            options.update(on_existing="replace", spillway={
                "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
                "spillway": {"tile_elements": 4096, "micro_batches_together": together}})
        torch.manual_seed(7)
        trainer = kind(network, args=arguments, train_dataset=datasets.Dataset.from_dict(data),
                       processing_class=tokenizer(), **options)
        trainer.train()
        if ours:
            asked = ("ref_model" in options) + (bool(more.get("beta")) and not lora) + \
                ("reward_processing_classes" in options)
            self.assertEqual(asked, len(trainer.untrained.engines))
            for engine in (trainer.engine, *trainer.untrained.engines):
                engine.close()
        return [line["loss"] for line in trainer.state.log_history if "loss" in line]

    def check(self, name, data, loras=(False, True), of_trainer=None, **more):
        for lora in loras:
            with self.subTest(lora=lora):
                wanted, found = (self.trained(name, data, ours, lora, {} if lora and name in ("DPO", "KTO") else
                                              of_trainer or {}, more) for ours in (False, True))
                self.assertEqual((STEPS, STEPS), (len(wanted), len(found)))
                for one, other in zip(wanted, found):
                    self.assertAlmostEqual(one, other, delta=1e-5 * max(abs(one), 1e-2))

    def test_SFT(self):
        self.check("SFT", TEXTS, max_length=32)

    def test_SFTPacked(self):
        self.check("SFT", TEXTS, loras=(False,), max_length=16, packing=True)

    def test_DPO(self):
        self.check("DPO", PREFERENCES, of_trainer={"ref_model": model}, max_length=32)

    @unittest.skipIf(not hasattr(transformers.Trainer, "get_batch_samples"), "transformers before 4.46 cannot")
    def test_DPOsMicroBatchesTogether(self):
        """Beside a reference model, its probabilities computed before, and adapters that are switched off for it."""
        step = spillway.Engine.step
        for lora, more in ((False, {}), (False, {"precompute_ref_log_probs": True}), (True, {})):
            found, visits = [], []
            for together in (False, True):
                reports = []

                def watched(engine, *given, **options):
                    reports.append(step(engine, *given, **options))
                    return reports[-1]

                with unittest.mock.patch.object(spillway.Engine, "step", watched):
                    found.append(self.trained("DPO", PREFERENCES, True, lora, {} if lora else {"ref_model": model},
                                              {"max_length": 32, **more}, together))
                visits.append(reports[-1].visits)
            if not lora:  # beside adapters all of it stays in HBM
                self.assertEqual(2 * visits[1], visits[0])
            for one, other in zip(*found):
                self.assertAlmostEqual(one, other, delta=1e-6)

    def test_KTO(self):
        self.check("KTO", LABELLED, of_trainer={"ref_model": model}, max_length=32)

    def test_Reward(self):
        self.check("Reward", PAIRS, max_length=32)

    def test_GRPO(self):
        self.check("GRPO", PROMPTS, loras=(False,), of_trainer={"reward_funcs": lambda: words}, beta=0.0, **SAMPLING)
        self.check("GRPO", PROMPTS, loras=(True,), of_trainer={"reward_funcs": lambda: words}, beta=0.04, **SAMPLING)

    def judged(self, name, **more):
        """With a reference and a reward model."""
        self.check(name, PROMPTS, loras=(False,), of_trainer={
            "reward_funcs": lambda: [judge()], "reward_processing_classes": lambda: [tokenizer()]}, beta=0.04,
            **SAMPLING, **more)

    def test_GRPOWithModelsThatAreNotTrained(self):
        self.judged("GRPO")

    def test_RLOOWithModelsThatAreNotTrained(self):
        self.judged("RLOO")

    def test_ReferencesAreSynchronized(self):
        sync = {"sync_ref_model": True, "ref_model_sync_steps": 1}
        self.judged("GRPO", **sync)
        self.check("DPO", PREFERENCES, loras=(False,), of_trainer={"ref_model": model}, max_length=32, **sync)

    def test_RLOO(self):
        self.check("RLOO", PROMPTS, loras=(False,), of_trainer={"reward_funcs": lambda: words}, beta=0.0, **SAMPLING)
        self.check("RLOO", PROMPTS, loras=(True,), of_trainer={"reward_funcs": lambda: words}, beta=0.04, **SAMPLING)


if __name__ == "__main__":
    main()
