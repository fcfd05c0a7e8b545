"""Lightning's Trainer with two processes below a Spillway engine: that they train as one does, and go on."""
import os
import pathlib
import subprocess
import sys

import lightning_case  # first: where there is no Lightning, it ends the program
from ranks_case import ROOT, RanksCase
from report import main

import lightning_ranks_script as script
import torch


class LightningRanks(RanksCase):
    def launched(self, folder):
        """By the Trainer, which starts the script once more."""
        kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK", "LOCAL_RANK")}
        done = subprocess.run([sys.executable, script.__file__, folder], capture_output=True, text=True, check=False,
                              timeout=250, env={**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stderr

    def test_TrainsAsOneProcessAndGoesOn(self):
        folder = self.folder_of("two")
        said = self.launched(folder)
        self.assertEqual(said.count("does not cut rows by spillway.GlobalBatchSampler"), 1)  # of rank 0, once
        found = [torch.load(pathlib.Path(folder, f"rank{rank}.pt")) for rank in range(2)]
        made = lightning_case.module(body=script.Body)
        recording = script.Recording()
        trainer = lightning_case.lightning.pytorch.Trainer(
            devices=1, accelerator="cpu", callbacks=[recording], max_epochs=script.EPOCHS, logger=False,
            gradient_clip_val=1.0, enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
            num_sanity_val_steps=0, default_root_dir=folder)
        training, validation = script.loaders(script.ROWS)
        shuffled = torch.utils.data.DistributedSampler(training.dataset, 1, 0)  # as Lightning's own
        training = torch.utils.data.DataLoader(training.dataset, batch_size=script.ROWS, sampler=shuffled)
        trainer.fit(made, training, validation)
        for rank, result in enumerate(found):
            self.assertEqual(result["facts"], [rank, 2, rank == 0, 2])
            self.assertEqual((result["steps"], result["sampler"]), (script.EPOCHS * script.STEPS, "DistributedSampler"))
            self.assertEqual(result["losses"], found[0]["losses"])  # sync_dist
            for expected, loss in zip(recording.losses, result["losses"], strict=True):
                self.assertAlmostEqual(expected, loss, delta=1e-5)
            self.assertAlmostEqual(trainer.callback_metrics["val_loss"].item(), result["val_loss"], delta=1e-5)
            self.assert_same_weights(result["weights"], found[0]["weights"])
            for name, value in made.state_dict().items():
                torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-4)
        checkpoints = pathlib.Path(folder, "checkpoints")
        self.assertEqual({path.name for path in checkpoints.iterdir()}, {"epoch=0.ckpt", "epoch=1.ckpt"})
        self.assertEqual({path.name for path in pathlib.Path(folder, "store").iterdir()}, {"rank0", "rank1"})
        # After the first epoch, by torchrun.
        self.torchrun(2, script.__file__, folder, str(checkpoints / "epoch=0.ckpt"))
        for rank, result in enumerate(found):
            again = torch.load(pathlib.Path(folder, f"rank{rank}-again.pt"))
            self.assertEqual(again["losses"], result["losses"][script.STEPS:])
            self.assert_same_weights(again["weights"], result["weights"])
        torch.set_num_threads(1)
        alone = script.same_bits(self.folder_of("alone"), 1)
        self.assertEqual(alone["steps"], 6)
        for rank in range(2):
            self.assert_same_weights(torch.load(pathlib.Path(folder, f"bits{rank}.pt")), alone)
        one, other = (torch.load(pathlib.Path(folder, f"twice{rank}.pt")) for rank in range(2))
        for result in (one, other):
            self.assertEqual((len(result["read"]), result["same"], result["steps"]), (1, [True], 2))
        self.assertNotEqual(one["read"], other["read"])


if __name__ == "__main__":
    main()
