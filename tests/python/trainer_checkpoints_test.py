"""What a trainer can go on from, and what it says where there is nothing."""
import json
import os
import re
import shutil
import subprocess
import unittest.mock

import trainer_test  # first: where there is no transformers, it ends the program
from case import main

import torch
import transformers

import spillway


class Checkpoints(trainer_test.Case):
    def test_TheLastStepIsDurable(self):
        trainer = self.trainer(configuration=self.configuration(spillway={"commit_every": 100}))
        trainer.train()
        shutil.copytree(self.folder / "store", self.folder / "copy")  # as a crash would find it
        planned = json.loads(json.dumps(trainer._planned).replace(str(self.folder / "store"),
                                                                  str(self.folder / "copy")))
        again = self.engine(trainer_test.model(), planned, on_existing="resume")
        self.assertEqual(trainer.state.global_step, again.current_step)

    def test_WhatIsNoCheckpoint(self):
        trainer = self.trainer(save_strategy="steps", save_steps=1, save_only_model=True, max_steps=1)
        trainer.train()
        checkpoint = str(self.folder / "out/checkpoint-1")
        self.assert_error("train..: has begun a run before, now at step 1", trainer.train)
        self.assert_error("checkpoint-1/spillway: is not there; take a checkpoint",
                          self.trainer().train, resume_from_checkpoint=checkpoint)
        trainer.engine.close()
        (self.folder / "broken/spillway").mkdir(parents=True)
        self.assert_error("broken/trainer_state.json: is not there", self.trainer().train,
                          resume_from_checkpoint=str(self.folder / "broken"))

    def test_ACheckpointThatFailsIsGone(self):
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "rows": 12}
        trainer, save = self.trainer(**saving), spillway.Engine.save

        def fills(engine, directory, replace):
            if engine.current_step == 4:
                raise spillway.Error("io", "the drive is full")
            save(engine, directory, replace)

        with unittest.mock.patch.object(spillway.Engine, "save", fills):
            self.assertEqual("io", self.assert_error("the drive is full", trainer.train).code)
        trainer.engine.close()
        self.assertEqual(["checkpoint-2"], [path.name for path in (self.folder / "out").glob("checkpoint-*")])
        again = self.trainer(trainer_test.model(seed=9), **saving)
        with self.assertLogs("spillway", "INFO") as logged:
            again.train(resume_from_checkpoint=True)
        self.assertNotIn("was not saved", "".join(logged.output))
        self.assertEqual(trainer.losses[6:], again.losses)

    def test_ASaveThatFailsBehindItsSnapshotLeavesThatAlone(self):
        """Also over an earlier run's checkpoint, of which the state would be taken for this one's."""
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "options": {"on_existing": "replace"}}
        first = self.trainer(**saving)
        first.train()
        first.engine.close()
        for over in (True, False):
            trainer = self.trainer(**saving)
            with unittest.mock.patch.object(transformers.TrainerState, "save_to_json", side_effect=OSError(28, "full")):
                self.assertRaisesRegex(OSError, "full", trainer.train)
            trainer.engine.close()
            self.assertTrue((self.folder / "out/checkpoint-2/spillway").exists(), over)
            self.assert_error("out: has no checkpoint that .*checkpoint-2 was not saved to its end",
                              self.trainer().train, resume_from_checkpoint=True)
            shutil.rmtree(self.folder / "out")

    def test_WhatAKilledSaveLeftIsPassedOver(self):
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
        first = self.trainer(**saving)
        first.train()
        first.engine.close()
        out = self.folder / "out"
        shutil.copytree(out / "checkpoint-2", out / "checkpoint-10")  # saved, and not to the end of its last file
        (out / "checkpoint-10/trainer_state.json").write_text('{"global_step": 1')
        shutil.copytree(out / "checkpoint-2", out / "checkpoint-9")
        shutil.rmtree(out / "checkpoint-9/spillway")
        again = self.trainer(trainer_test.model(seed=9), max_steps=3)
        with self.assertLogs("spillway", "WARNING") as logged:
            again.train(resume_from_checkpoint=True)
        said = [line for line in logged.output if "was not saved to its end, or with save_only_model" in line]
        self.assertRegex("\n".join(said), "^[^\n]*checkpoint-10, [^\n]*checkpoint-9: was not [^\n]*checkpoint-2$")
        self.assertEqual(3, again.engine.current_step)
        again.engine.close()
        self.assert_error("checkpoint-10/trainer_state.json: cannot be read, or was not written to its end",
                          self.trainer().train, resume_from_checkpoint=str(out / "checkpoint-10"))
        self.assert_error("checkpoint-9/spillway: is not there; take .*: .*/out/checkpoint-2$", self.trainer().train,
                          resume_from_checkpoint=str(out / "checkpoint-9"))
        shutil.rmtree(out / "checkpoint-2")
        self.assert_error("out: has no checkpoint that .*checkpoint-9 was not saved to its end", self.trainer().train,
                          resume_from_checkpoint=True)

    def test_WhatCanBeDoneWithAStoreIsSaid(self):
        trainer = self.trainer(save_strategy="steps", save_steps=2, max_steps=2)
        trainer.train()
        weights = trainer.model.state_dict()
        trainer.engine.close()
        said = self.assert_error("a store exists; go on with", self.trainer().train)
        self.assertEqual("exists", said.code)
        self.assertRegex(str(said), r'go on with train\(resume_from_checkpoint=True\), from .*/out/checkpoint-2, or '
                                    'start over with on_existing="replace"$')
        self.assert_error('store: a store exists; on_existing="replace" lets the checkpoint replace this store$',
                          self.trainer(options={"on_existing": "refuse"}).train, resume_from_checkpoint=True)
        shutil.rmtree(self.folder / "out")
        said = str(self.assert_error("of which there is none in", self.trainer().train))
        self.assertIn("no checkpoint that a run can go on from; begin without", str(self.assert_error(
            "out: has", self.trainer().train, resume_from_checkpoint=True)))
        command = re.search("`spillway (export .*)`", said)[1].replace("DIR", str(self.folder / "exported")).split()
        subprocess.run([os.environ["SPILLWAY_BINARY"], *command], check=True, stdout=subprocess.DEVNULL)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(str(self.folder / "exported")).state_dict()
        for name, value in weights.items():
            self.assertTrue(torch.equal(value, loaded[name]), name)
        two = [str(self.folder / "store"), str(self.folder / "other one")]
        for own, advice in (({"nvme_paths": two}, f"`spillway export {two[0]} DIR --with '{two[1]}'` makes"),
                            ({"commit_every": 0}, "begin without resume_from_checkpoint$")):
            self.assert_error(advice, self.trainer(configuration=self.configuration(spillway=own)).train,
                              resume_from_checkpoint=True)
        self.assert_error("begin without resume_from_checkpoint$", self.trainer(configuration={
            "zero_optimization": True}).train, resume_from_checkpoint=True)


class TheBest(trainer_test.Case):
    def trained(self, scores, kind=None, **arguments):
        """A trainer for which these are the scores of its steps, and its step-by-step weights in checkpoints."""
        scores, network = iter(scores), self.counting()
        trainer = self.trainer(network, kind=kind, rows=12, max_steps=4, save_strategy="steps", save_steps=1,
                               eval_strategy="steps", eval_steps=1, load_best_model_at_end=True,
                               metric_for_best_model="score", greater_is_better=True,
                               options={"compute_metrics": lambda _: {"score": next(scores)}}, **arguments)
        with self.assertLogs("spillway", "INFO") as logged:
            trainer.train()
        return trainer, "\n".join(logged.output)

    def counting(self):
        """With a persistent buffer, which counts evaluations' and training's forward passes."""
        network = trainer_test.model()
        network.register_buffer("seen", torch.zeros((), dtype=torch.long))
        network.register_forward_pre_hook(lambda module, _: module.seen.add_(1) and None)
        return network

    def assert_saved(self, trainer, checkpoint):
        import safetensors.torch
        trainer.save_model(str(self.folder / "saved"))
        for name in ("model-weights.safetensors", "model-buffers.safetensors"):
            found, wanted = (safetensors.torch.load_file(str(folder / name))
                             for folder in (self.folder / "saved", checkpoint))
            self.assertEqual({*wanted}, {*found})
            for tensor, value in wanted.items():
                self.assertTrue(torch.equal(value, found[tensor]), tensor)

    def test_TakesThePlaceOfTheLastStepAndOfItsStore(self):
        trainer, said = self.trained([1, 5, 3, 2])
        checkpoint = self.folder / "out/checkpoint-2"
        self.assertIn(f"{checkpoint}: is the best one; its weights and states take the place of the last step's", said)
        self.assertEqual((4, 2), (trainer.state.global_step, trainer.engine.current_step))
        self.assert_saved(trainer, checkpoint)
        trainer.compute_metrics = None
        best = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry][1]
        self.assertEqual(best, trainer.evaluate()["eval_loss"])
        planned = trainer._planned
        trainer.engine.close()
        self.assertEqual(2, self.engine(self.counting(), planned, on_existing="resume").current_step)

    def test_IsTheLastStepWithoutBeingLoaded(self):
        with unittest.mock.patch.object(spillway.Engine, "load_snapshot", side_effect=AssertionError):
            trainer, said = self.trained([1, 2, 3, 4])
        self.assertNotIn("is the best one", said)
        self.assert_saved(trainer, self.folder / "out/checkpoint-4")

    def test_LeavesTheLastStepWhereItIsNotThereOrDamaged(self):
        snapshot = self.folder / "out/checkpoint-2/spillway"

        class Removing(spillway.Trainer):
            def _load_best_model(self):
                shutil.rmtree(snapshot)
                super()._load_best_model()

        class Damaging(spillway.Trainer):
            def _load_best_model(self):
                file = snapshot / "exp_avg.safetensors"
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
                super()._load_best_model()

        for kind in (Removing, Damaging):
            trainer, said = self.trained([1, 5, 3, 2], kind=kind)
            self.assertRegex(said, rf"WARNING:spillway:{snapshot}\S*: .*; the weights stay those of the last step")
            self.assertEqual(4, trainer.engine.current_step)
            self.assert_saved(trainer, self.folder / "out/checkpoint-4")
            trainer.engine.close()
            shutil.rmtree(self.folder)
            self.folder.mkdir()

    def test_EndsARunEarly(self):
        trainer, _ = self.trained([1, 5, 3, 2], kind=type("Early", (Patient, spillway.Trainer), {}))
        self.assertEqual((3, 2), (trainer.state.global_step, trainer.engine.current_step))


class Patient:
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.add_callback(transformers.EarlyStoppingCallback(early_stopping_patience=1))


if __name__ == "__main__":
    main()
