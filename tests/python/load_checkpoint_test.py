"""What load_checkpoint() gives up of a run, and when: nothing, until all that can be wrong was looked at."""
import logging
import os

from case import Case as Folder
from case import main

import torch

import spillway
from toy_model import config, model, train


class LoadCheckpoint(Folder):
    def initialize(self, network=None, **options):
        made = spillway.initialize(model=network or model(), config=config(self.folder), **options)
        self.addCleanup(made[0].close)
        return made

    def test_ACheckpointWithoutFrozenParametersIsLoadedOverThem(self):
        def frozen(seed=0):
            network = model(seed=seed)
            for parameter in network.embedding.parameters():
                parameter.requires_grad_(False)
            return network

        saved = self.folder / "saved"
        engine = self.initialize(frozen())[0]
        train(engine, 2)
        engine.save_checkpoint(saved, "all")
        engine.save_checkpoint(saved, "trained", exclude_frozen_parameters=True)
        size = {tag: (saved / tag / "spillway/model.safetensors").stat().st_size for tag in ("all", "trained")}
        self.assertLess(size["trained"] + 4 * 90 * 48 // 2, size["all"])
        wanted = train(engine, 1, first=2)[0]
        engine.load_checkpoint(saved, "trained")
        self.assertEqual((2, wanted), (engine.global_steps, train(engine, 1, first=2)[0]))
        engine.close()
        engine = self.initialize(frozen(), on_existing="replace")[0]
        engine.load_checkpoint(saved, "trained")
        self.assertEqual(wanted, train(engine, 1, first=2)[0])
        engine.close()
        self.assert_error("trained/spillway: was saved without the frozen weights; make the engine with the model's",
                          self.initialize, frozen(), on_existing="replace", snapshot=saved / "trained/spillway")
        self.assert_error("nothing of the model is trained", self.initialize(
            model().requires_grad_(False), on_existing="replace")[0].save_checkpoint, saved, "none",
            exclude_frozen_parameters=True)

    def test_WeightsAloneLeaveTheConfigurationsScheduleWhereItIs(self):
        """As it counts the store's steps, which is said; one of the caller's goes on from the checkpoint's."""
        def schedule(**more):
            return config(self.folder, scheduler={"type": "WarmupLR", "params": {
                "warmup_max_lr": 1e-3, "warmup_num_steps": 4, "warmup_type": "linear"}}, **more)

        def caller(optimizer):
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** step)

        saved = self.folder / "saved"
        engine = spillway.initialize(model=model(), config=schedule())[0]
        train(engine, 3)
        engine.save_checkpoint(saved)
        engine.close()
        for words, options in (("step 3, and the configuration's scheduler goes on from the optimizer's step 0, with "
                                "the learning rate 0, as no states were loaded", {}),
                               ("^$", {"load_lr_scheduler_states": False}), ("^$", {"load_module_only": True})):
            engine = spillway.initialize(model=model(), config=schedule(), on_existing="replace")[0]
            with self.assertLogs("spillway", "WARNING") as heard:
                spillway.log.say(logging.WARNING, "nothing else")
                engine.load_checkpoint(saved, load_optimizer_states=False, **options)
            self.assertRegex("\n".join(record.getMessage() for record in heard.records[1:]), words)
            self.assertEqual([0], engine.get_lr())
            engine.close()
        engine = self.initialize(lr_scheduler=caller, on_existing="replace")[0]
        train(engine, 3)
        engine.save_checkpoint(saved)
        engine.close()
        engine = self.initialize(lr_scheduler=caller, on_existing="replace")[0]
        engine.load_checkpoint(saved, load_optimizer_states=False)
        self.assertEqual(([1.25e-4], 3), (engine.lr_scheduler.get_last_lr(), engine.lr_scheduler.last_epoch))
        train(engine, 1)
        self.assertEqual([6.25e-5], engine.get_lr())

    def test_ACheckpointThatIsRefusedInMidRunChangesNothing(self):
        saved, engine = self.folder / "saved", self.initialize()[0]
        train(engine, 1)
        engine.save_checkpoint(saved)
        wanted = train(engine, 2, first=1)[0]
        engine.load_checkpoint(saved)
        train(engine, 1, first=1)
        step = saved / "global_step1"
        for file in ("spillway/model.safetensors", "spillway/exp_avg.safetensors", "spillway/spillway.json"):
            whole = (step / file).read_bytes()
            (step / file).write_bytes(whole[:-50] + bytes([whole[-50] ^ 1]) + whole[-49:])
            self.assertEqual("corrupt", self.assert_error("", engine.load_checkpoint, saved).code, file)
            (step / file).write_bytes(whole)
        os.rename(step / "spillway/exp_avg.safetensors", step / "spillway/elsewhere")
        self.assert_error("exp_avg.safetensors", engine.load_checkpoint, saved)
        engine.module.register_buffer("more", torch.zeros(1))
        self.assert_error("global_step1: has no buffer more; load it with the model", engine.load_checkpoint, saved)
        self.assertEqual((2, wanted[1:]), (engine.global_steps, train(engine, 1, first=2)[0]))


if __name__ == "__main__":
    main()
