"""A parameter for which a step brings no gradient is left out of it, as PyTorch's optimizers leave it out."""
from case import Case, main

import torch

from toy_model import DEVICE, Experts, batches, config


class LeftOut(Case):
    # By step and micro-batch: the experts that it goes through, and whether they shift.
    USED = [[((0, 1), True), ((0,), True)], [((0,), True), ((0,), True)], [((0,), False), ((0,), True)],
            [((0, 1, 2), True), ((1,), True)], [((0, 1), False), ((0, 2), False)], [((0, 1, 2), True), ((0,), True)]]

    def assert_leaves_out_as_pytorch_does(self, accumulation, again=None, clipping=1.0, **options):
        network = Experts().to(DEVICE)
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
        configuration = config(self.folder, accumulation=accumulation, clipping=clipping, optimizer={
            "type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}, **options)
        engine = self.engine(Experts(), configuration, on_existing="replace")
        data = iter(batches(2 * len(self.USED)))
        for used in self.USED:
            for chosen, shifted in used[:accumulation]:
                ids = next(data)
                loss = network(ids, chosen, shifted)
                (loss / accumulation).backward()
                found = engine(ids, chosen, shifted)
                engine.backward(found)
                self.assertAlmostEqual(loss.item(), found.item(), delta=1e-5)
            norm = torch.nn.utils.clip_grad_norm_(network.parameters(), clipping).item()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)  # the default since PyTorch 2.0
            self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=2e-5 * norm)
            for name, value in engine.master_weights().items():
                wanted = network.get_parameter(name).detach().cpu()
                self.assertLess((value - wanted).abs().max().item(), 2e-5, (name, engine.current_step))
            if again:
                engine = again(engine, configuration)
        self.assertTrue(torch.equal(torch.ones(32, 3), engine.master_weights()["experts.0.spare"]))
        engine.close()

    def test_AParameterWithoutAGradientIsLeftOutAsByPyTorch(self):
        for place in ("cpu", "nvme"):
            self.assert_leaves_out_as_pytorch_does(1, device=place)
            self.assert_leaves_out_as_pytorch_does(1, device=place, clipping=1e6)
            self.assert_leaves_out_as_pytorch_does(2, device=place)

    def test_AResumedRunLeavesOutAsIfItHadNotEnded(self):
        def resumed(engine, configuration):
            engine.close()
            return self.engine(Experts(), configuration, on_existing="resume")

        self.assert_leaves_out_as_pytorch_does(1, again=resumed)

    def test_ASnapshotKnowsWhatWasLeftOut(self):
        def from_snapshot(engine, configuration):
            engine.save(self.folder / "saved", replace=True)
            engine.close()
            return self.engine(Experts(), configuration, on_existing="replace", snapshot=self.folder / "saved")

        self.assert_leaves_out_as_pytorch_does(2, again=from_snapshot)


if __name__ == "__main__":
    main()
