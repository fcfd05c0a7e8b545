"""Checkpoints that transformers made with DeepSpeed are resumed: same bits, one count of steps, said what differs."""
import importlib.util
import json
import logging
import os
import unittest

import trainer_test  # first: where there is no transformers, it ends the program
from case import main
from deepspeed_import_test import deepspeeds

import torch


class Resuming(trainer_test.Case):
    def deepspeeds_checkpoint(self, step=3, adam=3, counted=3, **options):
        """A run, the directory of one of its checkpoints, DeepSpeed's now and not yet written, and the arguments."""
        saving = {"save_strategy": "steps", "save_steps": step, "max_steps": 5, "rows": 12, **options}
        whole = self.trainer(**saving)
        whole.train()
        checkpoint = self.folder / f"out/checkpoint-{step}"
        made = deepspeeds(checkpoint / "spillway", trainer_test.model(), adam, ranks=2)
        made.more = {"global_steps": counted, "skipped_steps": counted - adam}
        made.settings = [{"lr": 1e-3 * 2 / 3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
                         for decay in (0.1, 0.0)]
        for name in ("spillway", "scheduler.pt"):
            os.rename(checkpoint / name, self.folder / name)
        return whole, checkpoint, made, saving

    def resumed(self, checkpoint, saving, **options):
        trainer = self.trainer(trainer_test.model(seed=9), **{**saving, **options})
        with self.assertLogs("spillway", logging.INFO) as logged:
            trainer.train(resume_from_checkpoint=str(checkpoint))
        return trainer, [line.partition(f"{checkpoint}: ")[2] for line in logged.output if f"{checkpoint}: " in line]

    def test_ACheckpointThatTransformersMadeWithDeepSpeedIsResumed(self):
        whole, checkpoint, made, saving = self.deepspeeds_checkpoint()
        weights = whole.engine.master_weights()
        whole.engine.close()
        made.scheduler = {"last_epoch": 3}
        made.write(checkpoint)
        again, said = self.resumed(checkpoint, saving)
        self.assertEqual(["is DeepSpeed's; taken are weights, exp_avg, exp_avg_sq and Adam's 3 steps, "
                          "after 6 samples"], said)
        steps = len(again.logged("learning_rate"))
        self.assertEqual(whole.logged("learning_rate")[-steps:], again.logged("learning_rate"))
        self.assertEqual(whole.losses[-2 * 3:], again.losses)
        self.assertEqual(5, again.engine.current_step)
        for name, value in again.engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)
        again.engine.close()
        os.unlink(checkpoint / "trainer_state.json")
        self.assert_error("checkpoint-3/trainer_state.json: is not there; take a checkpoint", self.trainer().train,
                          resume_from_checkpoint=str(checkpoint))

    def test_SkippedStepsAreCountedInItsOwnCheckpoints(self):
        """Adam's steps, the schedule's and the trainer's are three different numbers, in a second resumption, too."""
        whole, checkpoint, made, saving = self.deepspeeds_checkpoint(adam=1, save_steps=1)
        whole.engine.close()
        made.scheduler, made.settings[0]["lr"], made.settings[1]["lr"] = {"last_epoch": 2}, 1e-3, 1e-3
        made.write(checkpoint)
        again, said = self.resumed(checkpoint, saving)
        self.assertEqual(["is DeepSpeed's; taken are weights, exp_avg, exp_avg_sq and Adam's 1 steps (DeepSpeed's "
                          "engine counted 3, 2 of them skipped), after 2 samples"], said)
        self.assertEqual((3, 5), (again.engine.current_step, again.state.global_step))
        self.assertEqual(whole.logged("learning_rate")[2:4], again.logged("learning_rate")[-2:])
        again.engine.close()
        own, _ = self.resumed(self.folder / "out/checkpoint-4", saving)
        self.assertEqual((3, 5), (own.engine.current_step, own.state.global_step))
        self.assertEqual(again.losses[-3:], own.losses)
        self.assertEqual(again.logged("learning_rate")[-1:], own.logged("learning_rate")[-1:])

    def test_StepsThatTheTrainerAndDeepSpeedCountedAgree(self):
        whole, checkpoint, made, saving = self.deepspeeds_checkpoint()
        whole.engine.close()

        def resumed(counted, epoch):
            made.more, made.scheduler = {"global_steps": counted, "skipped_steps": counted - 1}, None
            made.tag = f"global_step{counted}"
            made.write(checkpoint)
            state = json.loads((checkpoint / "trainer_state.json").read_text())
            (checkpoint / "trainer_state.json").write_text(json.dumps({**state, "epoch": epoch}))
            return self.resumed(checkpoint, saving)

        for counted, epoch in ((1, 1.5), (4, 1.5)):
            self.assert_error(f"checkpoint-3: DeepSpeed made {counted} steps, and its trainer_state.json is of step 3; "
                              "take another", resumed, counted, epoch)
        trainer, said = resumed(2, 1.5)  # an epoch has ended, with a step of its last micro-batches
        self.assertTrue(said[0].endswith("; its trainer counted 3 steps"), said)
        self.assertEqual(5, trainer.state.global_step)
        # Where the files have no schedule, it had made the steps that were not skipped.
        self.assertNotIn("anew", said[0])
        self.assertEqual(whole.logged("learning_rate")[1:3], trainer.logged("learning_rate")[-2:])

    def test_OneOfTwoCheckpointsIsNotChosenSilently(self):
        whole, checkpoint, made, saving = self.deepspeeds_checkpoint()
        whole.engine.close()
        made.write(checkpoint)
        os.rename(self.folder / "spillway", checkpoint / "spillway")
        self.assert_error(r"checkpoint-3: has a checkpoint of DeepSpeed's \(latest\) and one of Spillway's "
                          r"\(spillway\)", self.resumed, checkpoint, saving)
        os.rename(checkpoint / "spillway", self.folder / "spillway")
        trainer = self.trainer(options={"on_existing": "replace"}, **saving)
        self.assert_error("out/checkpoint-3: is DeepSpeed's, of a later step than this run's; move", trainer.train)
        self.assertIsNone(trainer.engine)

    def test_SchedulesAndSettingsAreSaidWhereTheyDiffer(self):
        whole, checkpoint, made, saving = self.deepspeeds_checkpoint(lr_scheduler_type="reduce_lr_on_plateau",
                                                                     eval_strategy="steps", eval_steps=1)
        whole.engine.close()
        made.scheduler = {"last_epoch": 9}
        made.write(checkpoint)
        unlike = "; trained otherwise from here: lr 0.001, not 0.000666667; weight_decay 0 and 0.2, not 0 and 0.1"
        trainer, said = self.resumed(checkpoint, saving, weight_decay=0.2)
        self.assertTrue(said[0].endswith(f"after 6 samples{unlike}; lr_scheduler begins anew"), said)
        trainer.engine.close()
        schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-3, "warmup_min_lr": 0}}
        saving["configuration"] = self.configuration(scheduler=schedule)
        _, said = self.resumed(checkpoint, saving, weight_decay=0.2)
        self.assertTrue(said[0].endswith(f"{unlike}; the schedule had made 9 steps, and goes on from 3"), said)

    @unittest.skipUnless(importlib.util.find_spec("peft"), "no peft in this Python")
    def test_AdaptersGoOnWithTheModelTheyAreFor(self):
        """Transformers has DeepSpeed save adapters alone."""
        import peft

        def adapted(seed=1):
            torch.manual_seed(seed)
            adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
            return peft.get_peft_model(trainer_test.model(1, "llama"), adapters)

        saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 5, "rows": 12}
        whole = self.trainer(adapted(), **saving)
        whole.train()
        weights = whole.engine.master_weights()
        whole.engine.close()
        checkpoint = self.folder / "out/checkpoint-3"
        made = deepspeeds(checkpoint / "spillway", adapted(), 3, ranks=2)
        made.scheduler = {"last_epoch": 3}
        made.write(checkpoint)
        for name in ("spillway", "scheduler.pt"):
            os.rename(checkpoint / name, self.folder / name)
        again = self.trainer(adapted(seed=9), **saving)
        with self.assertLogs("spillway", logging.INFO) as logged:
            again.train(resume_from_checkpoint=str(checkpoint))
        frozen = sum(not parameter.requires_grad for parameter in adapted().parameters())
        self.assertRegex("\n".join(logged.output), f"it has no frozen parameters, so the model's own {frozen} stay")
        self.assertEqual(whole.losses[-2 * 3:], again.losses)
        for name, value in again.engine.master_weights().items():
            self.assertTrue(torch.equal(weights[name], value), name)


if __name__ == "__main__":
    main()
