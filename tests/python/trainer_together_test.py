"""gradient_accumulation_steps of a Trainer with "micro_batches_together": the same run, and weights come once."""
import unittest
import unittest.mock

from trainer_test import Case, Recording, VOCABULARY, main, model

import spillway
import torch
import transformers
from toy_model import DEVICE

COLLECTS = hasattr(transformers.Trainer, "get_batch_samples")
TOGETHER = {"spillway": {"micro_batches_together": True}}


def untied(**more):
    """Without dropout; tied weights are added in another order."""
    return model(kind="llama", tie_word_embeddings=False, **more)


class TogetherCase(Case):
    def run_of(self, name, together, kind=spillway.Trainer, network=None, **arguments):
        """A trainer that has trained, and its steps' reports."""
        reports, step = [], spillway.Engine.step

        def watched(engine, *given, **options):
            reports.append(step(engine, *given, **options))
            return reports[-1]

        configuration = self.configuration(name, **(TOGETHER if together else {}))
        configuration["spillway"]["hbm_bytes"] = "256KiB"
        trainer = self.trainer(network or untied(), configuration, kind, **arguments)
        with unittest.mock.patch.object(spillway.Engine, "step", watched):
            transformers.set_seed(7)
            trainer.train()
        return trainer, [report for report in reports if report is not None]


class WithSumGroups(TogetherCase):
    def test_TheLogSaysOnceThatRowsAreNotCutAlike(self):
        with self.assertLogs("spillway", "WARNING") as said:
            trainer = self.trainer(untied(), self.configuration("groups", spillway={"sum_groups": 2}),
                                   save_strategy="no", gradient_accumulation_steps=2)
            trainer.get_train_dataloader()
            trainer.train()
        self.assertEqual(1, sum("does not cut rows by spillway.GlobalBatchSampler" in line for line in said.output))


@unittest.skipIf(not COLLECTS, "transformers before 4.46 cannot; tools/test_newest.sh brings a newer one")
class Together(TogetherCase):
    def test_ARunIsTheSameBitForBit(self):
        """What is logged, weighted by tokens or not, the norms and weights; with an epoch's last step of one."""
        for weighted in (True, False):
            found = []
            for together in (False, True):
                network = untied()
                network.accepts_loss_kwargs = weighted
                trainer, reports = self.run_of(f"{weighted}{together}", together, network=network, save_strategy="no")
                found.append(([{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k}
                               for entry in trainer.state.log_history],
                              [(r.step, r.gradient_norm) for r in reports], trainer.engine.master_weights()))
            self.assertEqual(6, len(found[0][1]))
            self.assertEqual(found[0][:2], found[1][:2])
            for name, values in found[0][2].items():
                self.assertTrue(torch.equal(values, found[1][2][name]), name)

    def test_ATrainersOwnLossAndItsCallbacksAreCalledAsOften(self):
        calls = []

        class Own(spillway.Trainer):
            def compute_loss(self, model, inputs, return_outputs=False, **_):
                calls.append("loss")
                outputs = model(input_ids=inputs["input_ids"])
                loss = torch.nn.functional.cross_entropy(outputs.logits.view(-1, VOCABULARY),
                                                         inputs["labels"].reshape(-1))
                return (loss, outputs) if return_outputs else loss

        class Counts(transformers.TrainerCallback):
            def on_substep_end(self, *_, **__):
                calls.append("substep")

            def on_step_end(self, *_, **__):
                calls.append("step")

        logged = []
        for together in (False, True):
            calls.clear()
            trainer, _ = self.run_of(f"own{together}", together, Own, options={"callbacks": [Counts()]}, max_steps=3)
            self.assertEqual([7, 4, 3], [calls.count(name) for name in ("loss", "substep", "step")])
            logged.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        self.assertEqual(*logged)

    def test_WhatAStepReadsDoesNotDependOnMicroBatches(self):
        read = []
        for count in (1, 4):
            _, reports = self.run_of(f"read{count}", True, rows=4 * 2 * count, gradient_accumulation_steps=count,
                                     num_train_epochs=1)
            self.assertEqual(4, len(reports))
            read.append([(r.visits, r.unplanned_visits, r.h2d_bytes, r.d2h_bytes, r.nvme_write_bytes)
                         for r in reports] + [sum(r.nvme_read_bytes for r in reports)])
        self.assertEqual(read[0][:-1], read[1][:-1])
        self.assertGreater(read[0][-1], 0)
        self.assertLess(abs(read[1][-1] - read[0][-1]), read[0][-1] / 8)  # what was read ahead of the next step


class Seam(TogetherCase):
    def test_TheFirstCallComputesAllOfThem(self):
        """The loop of newer versions by hand, on whatever is installed."""
        found = []
        for together in (False, True):
            trainer = self.trainer(untied(), self.configuration(f"hand{together}", **(TOGETHER if together else {})),
                                   spillway.Trainer)
            with unittest.mock.patch("spillway.trainer.why_not", lambda *_: None):
                trainer.create_optimizer_and_scheduler(4)
            losses, batches = [], list(trainer.get_train_dataloader())
            trainer.current_gradient_accumulation_steps = 3
            for first in (0, 3):
                if together:
                    trainer.together.collected(batches[first:first + 3])
                for batch in batches[first:first + 3]:
                    losses.append(trainer.training_step(trainer.model, batch).item())
                trainer.optimizer.step()
                losses.append(trainer.optimizer.gradient_norm.item())
            found.append(losses)
            if together:
                trainer.together.collected(batches[:2])
                with self.assertRaisesRegex(spillway.Error, "a micro-batch that get_batch_samples"):
                    trainer.training_step(trainer.model, batches[4])
        self.assertEqual(*found)

    def test_ATrainerWithAStepOfItsOwnFallsBackAndSaysItOnce(self):
        Own = type("Own", (Recording, spillway.Trainer), {})
        with self.assertLogs("spillway") as logs:
            trainer, _ = self.run_of("own", True, Own)
        said = [line for line in logs.output if "micro_batches_together" in line]
        self.assertEqual(1, len(said), said)
        self.assertIn("Recording.training_step is its own" if COLLECTS else "before 4.46", said[0])
        alone, _ = self.run_of("alone", False, Own)
        self.assertEqual(alone.losses, trainer.losses)


if __name__ == "__main__":
    main()
