"""What scripts ask TRL's SFTTrainer for, on an engine: losses of ten steps as without one, full and with LoRA."""
import os
import unittest

os.environ["HF_HUB_OFFLINE"] = "1"
from case import Case as Folder, main, need  # noqa: E402

need("trl", "no TRL in this Python; tools/test_newest.sh brings it with the newest PyTorch and transformers")
import datasets  # noqa: E402
import torch  # noqa: E402
import trl  # noqa: E402

import spillway.trainer  # noqa: E402
from trl_test import TEXTS, model, tokenizer  # noqa: E402

STEPS = 10
TALKS = {"messages": [[{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on the mat"}],
                      [{"role": "user", "content": "a dog"}, {"role": "assistant", "content": "ran on a log"}]] * 16}
TEMPLATE = ("{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }} "
            "<eos>{% endgeneration %}{% else %}{{ message.content }} {% endif %}{% endfor %}")


@unittest.skipIf(int(trl.__version__.split(".")[0]) < 1, f"TRL {trl.__version__}; from 1.0 on these are the arguments")
class Options(Folder):
    def trained(self, data, ours, lora, more):
        """What the trainer logs: losses, and those of evaluations."""
        arguments = trl.SFTConfig(**{
            "output_dir": str(self.folder / f"out-{ours}-{lora}"), "max_steps": STEPS, "logging_steps": 1, "seed": 3,
            "per_device_train_batch_size": 4, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "bf16": False,
            "save_strategy": "no", "disable_tqdm": True, "max_length": 32, **more})
        kind, options, words = trl.SFTTrainer, {}, tokenizer()
        words.chat_template = TEMPLATE
        if lora:
            import peft
            options["peft_config"] = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        if arguments.eval_strategy != "no":
            options["eval_dataset"] = datasets.Dataset.from_dict({name: rows[:6] for name, rows in data.items()})
        if ours:
            kind = type("Spilled", (spillway.trainer.Mixin, kind), {})
            place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
            options.update(on_existing="replace", spillway={
                "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place},
                "spillway": {"tile_elements": 4096}})
        torch.manual_seed(7)
        trainer = kind(model(), args=arguments, train_dataset=datasets.Dataset.from_dict(data),
                       processing_class=words, **options)
        trainer.train()
        found = [line[name] for line in trainer.state.log_history for name in ("loss", "eval_loss") if name in line]
        if arguments.load_best_model_at_end:
            found.append(trainer.evaluate()["eval_loss"])
        if ours:
            trainer.engine.close()
        return found

    def check(self, data, **more):
        for lora in (False, True):
            with self.subTest(lora=lora):
                wanted, found = (self.trained(data, ours, lora, more) for ours in (False, True))
                self.assertEqual(len(wanted), len(found))
                self.assertGreaterEqual(len(found), STEPS)
                for one, other in zip(wanted, found):
                    self.assertAlmostEqual(one, other, delta=1e-5 * one)

    def test_AssistantOnlyLoss(self):
        self.check(TALKS, assistant_only_loss=True)

    def test_EvaluationAndTheBestModelAtTheEnd(self):
        self.check(TEXTS, eval_strategy="steps", eval_steps=3, save_strategy="steps", save_steps=3,
                   load_best_model_at_end=True)

    def test_Packing(self):
        self.check(TEXTS, packing=True, max_length=16)

    def test_PaddingFree(self):
        self.check(TEXTS, padding_free=True, max_length=None)


if __name__ == "__main__":
    main()
