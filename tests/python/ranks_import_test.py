"""Checkpoints that DeepSpeed has saved with any number of ranks, loaded by any number of Spillway's."""
import itertools

from ranks_case import RanksCase
from report import main

import torch

import ranks_script
from deepspeed_files import deepspeeds

ROWS, STEPS, SAVED = 6, 4, 2  # of a step, which 1, 2 and 3 ranks divide
MADE = {"stage3 of 1": {"ranks": 1}, "stage3 of 2": {"ranks": 2, "group_elements": 4000},
        "stage2 of 2": {"ranks": 2, "stage": 2}, "stage1 of 3": {"ranks": 3, "stage": 1}}


class Import(RanksCase):
    def alone(self, network):
        """A run of one process, and what it saved in between."""
        snapshot = self.folder / f"own{len(list(self.folder.iterdir()))}"
        engine = self.engine(network, ranks_script.config(self.folder, "cpu", 1, ROWS))
        norms = []
        for step, batch in enumerate(ranks_script.batches(STEPS, ROWS)):
            if step == SAVED:
                engine.save(snapshot)
                saved = engine.master_weights()
            norms.append(ranks_script.make_step(engine, "backward", batch.split(1))[1].gradient_norm)
        weights = engine.master_weights()
        engine.close()
        return snapshot, saved, norms[SAVED:], weights

    def loaded(self, count, checkpoints, **options):
        """{name: results of the ranks}"""
        folders = {name: self.folder_of(f"{name} into {count}") for name in checkpoints}
        self.run_all(count, [{"case": "imported", "folder": folders[name], "checkpoint": str(path), "steps": STEPS,
                              "rows": ROWS, **options} for name, path in checkpoints.items()])
        return {name: self.results(folder, count) for name, folder in folders.items()}

    def assert_goes_on(self, results, saved, norms, weights):
        for result in results:
            self.assertEqual(SAVED, result["first"])
            self.assert_same_weights(result["loaded"], saved)
            self.assert_same_weights(result["weights"], results[0]["weights"])
            for here, there in zip(result["norms"], norms, strict=True):  # sums in another order
                self.assertAlmostEqual(here, there, delta=1e-5 * there)
            for name, value in weights.items():
                torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-5)
            self.assertEqual({"latest", f"global_step{SAVED}"}, {*result["left"]})

    def test_AnyNumberOfRanksGoesOnFromAnyNumberOfDeepSpeeds(self):
        snapshot, *expected = self.alone(ranks_script.network())
        checkpoints = {name: deepspeeds(snapshot, ranks_script.network(), SAVED, **options).write(self.folder / name)
                       for name, options in MADE.items()}
        for count in (1, 2, 3):
            for name, results in self.loaded(count, checkpoints).items():
                with self.subTest(name, ranks=count):
                    self.assert_goes_on(results, *expected)

    def test_FrozenWeightsThatItDoesNotHaveAreTheFirstRanksModels(self):
        network = ranks_script.frozen_network
        snapshot, *expected = self.alone(network())
        saved = deepspeeds(snapshot, network(), SAVED, ranks=2).write(self.folder / "saved")
        self.assert_goes_on(self.loaded(3, {"frozen": saved}, frozen=True)["frozen"], *expected)

    def test_AMissingPartIsNamedOnAllRanks(self):
        snapshot, *_ = self.alone(ranks_script.network())
        checkpoints = {}
        for rank, kind in itertools.product(range(2), ("optim", "model")):
            made = deepspeeds(snapshot, ranks_script.network(), SAVED, ranks=2).write(self.folder / f"{kind}{rank}")
            (made / f"global_step{SAVED}/zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt").unlink()
            checkpoints[f"none of rank {rank} (…_{kind}_states.pt)"] = made
        for missing, results in self.loaded(2, checkpoints).items():
            with self.subTest(missing):
                self.assertEqual(results[0]["said"], results[1]["said"])
                self.assertIn(missing, results[0]["said"])
                self.assertEqual({"latest", f"global_step{SAVED}"}, {*results[0]["left"]})

    def test_ACheckpointThatOneRankDoesNotSeeIsAnErrorOnAll(self):
        folder = self.folder_of("apart")
        self.run_all(2, [{"case": "apart", "folder": folder}])
        one, other = self.results(folder, 2)
        self.assertIn("rank1/saved/global_step2/spillway: is not there", other["said"])
        self.assertEqual(f"rank 1: {other['said']}", one["said"])


if __name__ == "__main__":
    main()
