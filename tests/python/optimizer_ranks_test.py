"""spillway.AdamW and its kin on several processes, each with a part of the states: that they train as one does."""
import json
import pathlib
import re
import tempfile

import ranks_case
from ranks_case import RanksCase
from report import main

import torch

import optimizer_ranks_script as script
import spillway
from spillway.optimizers.layout import shares


def plain(steps, kind="AdamW"):
    """Of one process of plain PyTorch, on all rows: losses, norms and weights."""
    model = script.network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01) if kind == "AdamW" else \
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    losses, norms = [], []
    for batch in script.batches(steps):
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), script.CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms, script.weights_of(model)


class Shares(RanksCase):
    def test_PartsCoverEveryTensorOnceAndAreAboutEqual(self):
        generator = torch.Generator().manual_seed(3)
        for trial in range(200):
            dims = torch.randint(1, 40, (12, 2), generator=generator).tolist()
            shapes = [torch.Size(dim[:trial % 3] if i % 2 else dim) for i, dim in enumerate(dims)]
            for count in (1, 2, 3, 8):
                bounds = shares(shapes, count)
                rows = [shape[0] if shape else 1 for shape in shapes]
                for of_tensor, most in zip(bounds, rows):
                    self.assertEqual((len(of_tensor), of_tensor[0], of_tensor[-1]), (count + 1, 0, most))
                    self.assertEqual(of_tensor, sorted(of_tensor))
                total, widest = sum(s.numel() for s in shapes), max(s.numel() // r for s, r in zip(shapes, rows))
                for rank in range(count):
                    mine = sum((b[rank + 1] - b[rank]) * (s.numel() // r) for b, s, r in zip(bounds, shapes, rows))
                    self.assertLessEqual(abs(mine - total / count), widest + 1)


WAYS = {"plain": {}, "averaged": {"ddp": True, "average_gradients": False}, "ddp": {"ddp": True},
        "sgd": {"kind": "SGD"}, "store": {"states": "nvme"}, "half": {"dtype": "bfloat16"}}


class OptimizerRanks(RanksCase):
    script = pathlib.Path(script.__file__)

    @classmethod
    def setUpClass(cls):
        """Two processes, which take longest to start, do most of it in turns."""
        folder = tempfile.TemporaryDirectory(prefix="spillway-optimizer-")
        cls.addClassCleanup(folder.cleanup)
        cls.two = pathlib.Path(folder.name)
        cases = {**{way: {"case": "train", **options} for way, options in WAYS.items()},
                 **{case: {"case": case} for case in ("carried", "uneven", "refused")},
                 **{f"parted {states}": {"case": "parted", "states": states} for states in ("cpu", "nvme")}}
        for name in cases:
            (cls.two / name).mkdir()
        processes = ranks_case.Processes(2, [{**case, "folder": str(cls.two / name)} for name, case in cases.items()],
                                         cls.script)
        cls.addClassCleanup(processes.kill)
        wrong = [output for status, output in processes.ended().values() if status]
        if wrong:
            raise AssertionError("\n".join(wrong))

    def assert_trains_as_one(self, folder, count, kind="AdamW", near=1e-5, near_weights=1e-4):
        losses, norms, weights = plain(6, kind)
        results = self.results(folder, count)
        for result in results:
            self.assertEqual((result["step"], result["norms"]), (6, results[0]["norms"]))
            self.assert_same_weights(result["weights"], results[0]["weights"])
            for expected, found in zip(losses + norms, result["losses"] + result["norms"], strict=True):
                self.assertAlmostEqual(expected, found, delta=near)  # another order of sums in fp32
        for name, value in weights.items():
            torch.testing.assert_close(results[0]["weights"][name].float(), value, rtol=0, atol=near_weights)

    def test_TheyTrainAsOneProcess(self):
        for way, options in WAYS.items():
            with self.subTest(way):
                self.assert_trains_as_one(self.two / way, 2, options.get("kind", "AdamW"),
                                          *([0.02, 0.01] if way == "half" else []))
        stored, plain_ones = (self.results(self.two / way, 2)[0] for way in ("store", "plain"))
        self.assertEqual({path.name for path in (self.two / "store/store").iterdir()}, {"rank0", "rank1"})
        self.assert_same_weights(stored["weights"], plain_ones["weights"])
        many = self.folder_of("many")
        self.run_all(4, [{"case": "train", "folder": many}])
        self.assert_trains_as_one(many, 4)
        optimizer = script.optimizer_of(script.network(), self.folder)
        whole = sum(size for tier, _, size in optimizer.ledger() if tier == "host")
        for result in self.results(many, 4):  # a quarter of the states
            self.assertLess(result["host"], 0.35 * whole)

    def test_ThePagesProgramTrains(self):
        page = (ranks_case.ROOT / "docs/optimizer_ranks.md").read_text()
        (self.folder / "train.py").write_text(re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1])
        norms = re.findall(r"step (\d+): gradient norm ([\d.]+)", self.torchrun(2, self.folder / "train.py"))
        self.assertEqual([int(step) for step, _ in norms], [*range(1, 21)])
        self.assertLess(float(norms[-1][1]), float(norms[0][1]))

    def test_GoesOnWithTheNewestStepThatAllHave(self):
        broken = self.folder_of("broken")
        processes = ranks_case.Processes(2, [{"case": "broken", "folder": broken, "states": "nvme", "die": [1, 4]}],
                                         self.script)
        self.addCleanup(processes.kill)
        self.assertEqual([status for status, _ in processes.ended().values()], [3, -9])
        code, message = json.loads(pathlib.Path(broken, "rank0.json").read_text())
        self.assertEqual(code, "io")
        self.assertIn("look at the other ranks and at the network, and start all ranks again", message)
        self.assert_error("store: has the states of several ranks", script.optimizer_of, script.network(), broken,
                          "nvme")
        self.run_all(2, [{"case": "train", "folder": broken, "states": "nvme"}])
        for result, expected in zip(self.results(broken, 2), self.results(self.two / "store", 2)):
            self.assertEqual((result["first"], result["step"]), (3, 6))
            self.assertEqual(result["norms"], expected["norms"][3:])
            self.assert_same_weights(result["weights"], expected["weights"])

    def test_StatesThatSomeHaveLoadedAreGivenUpWhateverTheirStep(self):
        """The first case would be two runs' by its steps, the others one's. So would another run's first commit."""
        ends = {"far": [3, 1], "before": [3, 2], "same": [3, 3], "replaced": [1, None]}
        folders = {name: self.folder_of(name) for name in ends}
        for name, (steps, loads) in ends.items():
            processes = ranks_case.Processes(2, [{"case": "cut", "folder": folders[name], "steps": steps,
                                                  "loads": loads}], self.script)
            self.addCleanup(processes.kill)
            self.assertEqual([status for status, _ in processes.ended().values()], [3, -9])
        replaced = folders.pop("replaced")
        self.run_all(2, [{"case": "reopened", "folder": replaced}] + [
            {"case": "train", "folder": folder, "states": "nvme"} for folder in folders.values()])
        for name, folder in folders.items():
            for result, expected in zip(self.results(folder, 2), self.results(self.two / "store", 2)):
                with self.subTest(name):
                    self.assertEqual((result["first"], result["step"]), (3, 6))
                    self.assertEqual(result["norms"], expected["norms"][3:])
                    self.assert_same_weights(result["weights"], expected["weights"])
        for rank in range(2):
            code, message = json.loads(pathlib.Path(replaced, f"rank{rank}.json").read_text())
            self.assertEqual(code, "corrupt")
            self.assertIn("ranks have committed steps 0, 1, which are not one run's; name the right nvme_path", message)

    def test_StatesAreCarried(self):
        folder = self.two / "carried"
        one, other = self.results(folder, 2)
        self.assertRegex(one["said"][0], r"state_dict: has a part of the states on each of 2 ranks; call consolidate_")
        for result in (one, other):
            self.assertEqual((result["before"], result["steps"]), (0, [6, 6, 6]))
            self.assertIn("ranks have snapshots of steps 6, 6, which are not one save's", result["said"][-1])
            self.assert_same_weights(result["weights"], result["middle"])
            for found in ("again", "third"):
                self.assert_same_weights(result["end"], result[found])
            self.assert_same_weights(result["end"], one["end"])
        self.assertEqual({path.name for path in pathlib.Path(folder, "snapshot").iterdir()}, {"rank0", "rank1"})
        # One process goes on with it, by torch's optimizer and ours.
        for make in (lambda model: torch.optim.AdamW(model.parameters()),
                     lambda model: script.optimizer_of(model, self.folder)):
            model, whole = script.network(), torch.load(pathlib.Path(folder, "whole.pt"))
            model.load_state_dict(whole["model"])
            optimizer = make(model)
            optimizer.load_state_dict(whole["optimizer"])
            for batch in script.batches(6)[3:]:
                optimizer.zero_grad()
                model(batch).backward()
                if isinstance(optimizer, torch.optim.AdamW):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), script.CLIP)
                optimizer.step()
            for name, value in script.weights_of(model).items():
                torch.testing.assert_close(value, one["end"][name], rtol=0, atol=1e-4)

    def test_AParameterOfSomeRanksIsUpdatedOnAll(self):
        one, other = self.results(self.two / "uneven", 2)
        self.assert_same_weights(one["weights"], other["weights"])
        torch.manual_seed(1)
        model = script.toy_model.Experts()
        first = script.weights_of(model)
        optimizer = script.optimizer_of(model, self.folder)
        for batch in script.batches(3):
            optimizer.zero_grad()
            halves = batch.chunk(2)
            sum(model(halves[rank], [rank], True) / 2 for rank in range(2)).backward()
            optimizer.step()
        self.assertAlmostEqual(one["norm"], optimizer.report.gradient_norm, delta=1e-5)
        for name, value in script.weights_of(model).items():
            torch.testing.assert_close(one["weights"][name], value, rtol=0, atol=1e-4)
        self.assertTrue(torch.equal(one["weights"]["experts.2.up.weight"], first["experts.2.up.weight"]))
        self.assertFalse(torch.equal(one["weights"]["experts.1.up.weight"], first["experts.1.up.weight"]))

    def test_WhatIsWrongOnOneRankAllSay(self):
        results = self.results(self.two / "refused", 2)
        expected = ["stream_gradients: leaves no gradient that could be averaged over 2 ranks", "ranks: is 'perhaps'",
                    "params: are too small for 2 ranks: rank 0 would have none", "store",
                    "its gradient differs between ranks, and average_gradients=False says",
                    "NaN or Inf in its gradient", "blob: is a str, not bytes", "could not convert string to float"]
        for result in results:
            self.assertEqual(len(result["said"]), len(expected), result["said"])
            for words, (_, message) in zip(expected, result["said"]):
                self.assertIn(words, message)
            self.assertEqual((result["said"][5][0], result["same"], result["step"]), ("non_finite", True, 1))

    def test_WhatFailsOnOneRankEndsOnAllWithOneStep(self):
        expected = [("invalid_argument", r"to is 5, and ranks are 0 to 1; name one of them"),
                    ("OSError|unexpected", r"No space left on device"),
                    ("invalid_argument", r"state_dict: has no exp_avg of "),
                    ("io", r"drive: does not answer; look at it; the optimizer has ended on all ranks: make model and "
                           r"optimizer anew, (with on_existing=.resume.|and load a checkpoint)$"),
                    ("invalid_argument", r"stopped after an earlier error \((rank 1: )?drive: does not answer"),
                    ("invalid_argument", r"stopped after an earlier error")]
        for states in ("cpu", "nvme"):
            for result in self.results(self.two / f"parted {states}", 2):
                for (code, words), said in zip(expected, result["said"], strict=True):
                    self.assertRegex(said[0], f"^({code})$", said)
                    self.assertRegex(said[1], words)
        for result, whole in zip(self.results(self.two / "parted nvme", 2), self.results(self.two / "store", 2)):
            self.assertEqual((result["step"], result["back"]), (2, []))
            self.assert_same_weights(result["weights"], whole["weights"])


if __name__ == "__main__":
    main()
