"""What load_checkpoint() gives up of a run, and when: nothing, until all that can be wrong was looked at."""
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
