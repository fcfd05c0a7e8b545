"""One model on several processes of torch.distributed, over Gloo: that it is the model that one process trains."""
import json
import logging
import os
import pathlib
import re
import unittest.mock

from ranks_case import ROOT, RanksCase
from report import main

import torch

import ranks_script
import spillway

PAGE = ROOT / "docs/ranks_pytorch.md"
GROUPS = {"case": "train", "steps": 4, "micro": 1, "sum_groups": 4}


def tensors_of(file):
    """Of a safetensors file in fp32, by name."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: torch.frombuffer(bytearray(data[start:][slice(*of["data_offsets"])]), dtype=torch.float32).reshape(
        of["shape"]) for name, of in header.items()}


def plain_losses(steps):
    """Of one process of plain PyTorch, on all rows; and its weights."""
    network = ranks_script.network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for batch in ranks_script.batches(steps):
        optimizer.zero_grad()
        loss = network(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: parameter.detach() for name, parameter in network.named_parameters()}


class RanksTest(RanksCase):
    def assert_trains_as_one(self, folder, count, steps):
        losses, weights = plain_losses(steps)
        results = self.results(folder, count)
        for rank, result in enumerate(results):
            self.assertEqual(result["ranks"], [rank, count])
            self.assertEqual(result["norms"], results[0]["norms"])
            self.assert_same_weights(result["weights"], results[0]["weights"])
            # Another order of sums in fp32; Adam's first steps are as large for the smallest gradients.
            for expected, found in zip(losses, result["losses"], strict=True):
                self.assertAlmostEqual(expected, found, delta=1e-5)
        for name, value in weights.items():
            torch.testing.assert_close(results[0]["weights"][name], value, rtol=0, atol=1e-4)

    def test_LossesAreThoseOfOneProcessOnAllRows(self):
        alone = self.folder_of("alone")
        self.run_all(1, [{**GROUPS, "folder": alone}])
        of = {2: {"backward": 20, "plain": 5, "train_batch": 5}, 4: {"backward": 20}}
        if os.environ.get("SPILLWAY_CASES"):  # which tools/test.sh sets
            del of[4]
        for count, ways in of.items():
            folders = {way: self.folder_of(f"{way}{count}") for way in (*ways, "groups")}
            options = {"backward": {}, "plain": {"micro": 8 // count, "device": "cpu"},
                       "train_batch": {"micro": 1, "device": "cpu"}}
            self.run_all(count, [{**GROUPS, "folder": folders["groups"]}] + [
                {"case": "train", "folder": folders[way], "way": way, "steps": steps, **options[way]}
                for way, steps in ways.items()])
            for way, steps in ways.items():
                with self.subTest(count=count, way=way):
                    self.assert_trains_as_one(folders[way], count, steps)
            self.assertEqual({path.name for path in pathlib.Path(folders["backward"], "store").iterdir()},
                             {f"rank{rank}" for rank in range(count)})
            with self.subTest(count=count, way="sum_groups"):  # the same bits as of one process, with as many threads
                expected, = self.results(alone, 1)
                for result in self.results(folders["groups"], count):
                    self.assert_same_weights(result["weights"], expected["weights"])
                    self.assertEqual(result["norms"], expected["norms"])

    def test_AllTrainTheModelOfTheFirst(self):
        kept, fresh = self.folder_of("kept"), self.folder_of("fresh")
        strange = {"case": "train", "strange": True}
        self.run_all(2, [{**strange, "folder": kept, "steps": 0}])
        made = {name: value.detach() for name, value in ranks_script.network().named_parameters()}
        for result in self.results(kept, 2):
            self.assert_same_weights(result["weights"], made)
        self.run_all(2, [{**strange, "folder": kept, "steps": 4},  # which resumes, with buffers that a store has not
                         {**strange, "folder": fresh, "steps": 4, "device": "cpu"}])
        for folder in (kept, fresh):
            with self.subTest(pathlib.Path(folder).name):
                self.assert_trains_as_one(folder, 2, 4)

    def test_ModelsOfOtherTensorsAreRefused(self):
        folder = self.folder_of("other")
        self.run_all(2, [{"case": "other_buffers", "folder": folder}])
        for rank in range(2):
            self.assertRegex(pathlib.Path(folder, f"said{rank}").read_text(),
                             r"^ranks: rank 1's model has extra, \(2,\) of torch\.float32, where rank 0's has extra, ")

    def test_AnotherNumberOfRanksGoesOnWithTheSameBits(self):
        alone, changed = self.folder_of("alone"), self.folder_of("changed")
        self.run_all(1, [{**GROUPS, "folder": alone}])
        expected, = self.results(alone, 1)
        norms = []
        for steps, count in enumerate((1, 2, 4, 1), 1):
            self.run_all(count, [{**GROUPS, "folder": changed, "steps": steps}])
            result, *_ = results = self.results(changed, count)
            self.assertEqual([result["first"] for result in results], [steps - 1] * count)
            norms += result["norms"]
        self.assertEqual(norms, expected["norms"])
        self.assert_same_weights(result["weights"], expected["weights"])
        self.assertEqual([path.name for path in pathlib.Path(changed, "store").iterdir()], ["spillway.store"])

    def test_TheFirstRankWritesWhatAllHave(self):
        folder = self.folder_of("files")
        self.run_all(2, [{"case": "files", "folder": folder}])
        one, other = self.results(folder, 2)
        self.assertEqual(one["step"], 2)
        self.assert_same_weights(one["weights"], other["weights"])
        self.assertEqual(one["said"][0], other["said"][0])
        self.assertEqual([code for code, _ in other["said"]], ["exists", "exists"])
        self.assertIn("model-2", one["said"][0][1])
        for directory in ("model", "model-2"):
            self.assert_same_weights(tensors_of(pathlib.Path(folder, directory, "model.safetensors")), one["weights"])
        with spillway.Engine(ranks_script.network(), ranks_script.config(self.folder, "cpu", 8),
                             snapshot=pathlib.Path(folder, "snapshot")) as engine:
            self.assertEqual(engine.current_step, 2)
            self.assert_same_weights(engine.master_weights(), one["weights"])

    def test_APlanIsMadeOnceMoreOnHostsThatSeeNothingOfEachOther(self):
        near, far, files = self.folder_of("near"), self.folder_of("far"), self.folder_of("files")
        again = {"case": "planned_again"}
        self.run_all(2, [{**again, "folder": near}, {**again, "folder": far, "elsewhere": True},
                         {"case": "same_files", "folder": files}])
        first, other = self.results(near, 2)
        self.assertEqual((len(first["read"]), first["read"]), (1, other["read"]))
        for result in self.results(far, 2):
            self.assert_same_weights(result["weights"], first["weights"])
        first, other = self.results(far, 2)
        self.assertEqual([1, 1], [len(result["read"]) for result in (first, other)])
        self.assertNotEqual(first["read"], other["read"])
        for rank, place in enumerate(("files", "beside0")):
            (copied, content), *failed = json.loads(pathlib.Path(files, f"rank{rank}.json").read_text())
            self.assertEqual((copied, content), (place, {"large": True, "none": True, "small": True}))
            for failing, (code, message) in zip((0, 1, 0), failed, strict=True):
                self.assertIn("Input/output error" if code != "io" else "large: is shorter than the 9437184 bytes",
                              message)
                self.assertEqual(message.startswith(f"rank {failing}: "), rank != failing, message)

    def test_TheProgramOfThePageTrainsAndGoesOn(self):
        program, = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        script = self.folder / "train.py"
        steps = []
        for count in (12, 15):
            script.write_text(program.replace("ROWS, STEPS = 16, 30", f"ROWS, STEPS = 16, {count}"))
            steps += [(int(step), float(loss)) for step, loss in
                      re.findall(r"step (\d+): loss ([\d.]+)", self.torchrun(2, script))]
        self.assertEqual([step for step, _ in steps], [*range(1, 16)])
        self.assertLess(steps[-1][1], steps[0][1])
        self.assertEqual(len(tensors_of(self.folder / "trained/model.safetensors")), 51)

    def test_LoopsThatWereWrittenForDeepSpeedTrainOnSeveralRanks(self):
        folder = self.folder_of("deepspeed")
        self.run_all(2, [{"case": "deepspeed", "folder": folder}])
        results = self.results(folder, 2)
        losses, weights = plain_losses(4)
        for rank, result in enumerate(results):
            self.assertEqual(result["facts"], [rank, 2, rank, 2, ranks_script.ROWS, 8, 2])
            self.assertEqual((result["client"], result["samples"]), ({"epoch": 3}, 4 * ranks_script.ROWS))
            self.assertEqual(result["losses"][2:4], result["losses"][4:])  # once more after load_checkpoint()
            self.assert_same_weights(result["weights"], result["first"])
            for name, value in weights.items():
                torch.testing.assert_close(result["weights"][name], value, rtol=0, atol=1e-4)
        rows = torch.cat([result["seen"] for result in results])
        self.assertEqual(sorted(rows.tolist()), sorted(torch.cat(ranks_script.batches(4)).tolist()))  # each once
        data = ranks_script.Rows()
        alone = [data[rows] for rows in spillway.GlobalBatchSampler(data, ranks_script.ROWS, 2, seed=1)]
        for rank, result in enumerate(results):  # with sum_groups: two of a step's four micro-batches each
            expected = [rows for first in range(2 * rank, len(alone), 4) for rows in alone[first:first + 2]]
            self.assertEqual([rows.tolist() for rows in result["cut"]], [rows.tolist() for rows in expected])
        whole = torch.load(pathlib.Path(folder, "whole/pytorch_model.bin"))
        self.assertTrue(torch.equal(whole["embedding.weight"], results[0]["weights"]["embedding.weight"]))

    def test_AnEngineThatIsRefusedClosesItsRanks(self):
        folder = self.folder_of("refused")
        self.run_all(2, [{"case": "refused", "folder": folder}])
        for rank in range(2):
            self.assertEqual(json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text()), [[], 0])

    def test_AForgottenEngineThatIsCollectedInASendHoldsUpNothing(self):
        self.run_all(2, [{"case": "forgotten", "folder": self.folder_of("forgotten")}])

    def test_CommAnswersForAllRanksOrNotAtAll(self):
        folder = self.folder_of("comm")
        self.run_all(2, [{"case": "comm", "folder": folder}])
        for rank in range(2):
            before, *facts, behind, begun = json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text())
            for said in (before, behind):
                self.assertRegex(said, "all_reduce: WORLD_SIZE is 2, and torch.distributed has no process group; call ")
            self.assertEqual(facts[:4], [rank, 2, 1, True])
            self.assertFalse(begun)
            if rank == 0:
                self.assertLess(facts[4], 8)  # by its timeout, before the other one is there, and not by PyTorch's

    def test_WhatIsNoGroupIsRefused(self):
        make = ranks_script.network
        self.assert_error("ranks: is 'gloo'; give \"auto\", a process group", spillway.Engine, make(),
                          ranks_script.config(self.folder, "cpu", 8), ranks="gloo")
        self.addCleanup(os.environ.pop, "WORLD_SIZE", None)
        os.environ["WORLD_SIZE"] = "2"
        self.assert_error("ranks: WORLD_SIZE is 2, and torch.distributed has no process group; call ",
                          spillway.Engine, make(), ranks_script.config(self.folder, "cpu", 8))
        with self.engine(make(), ranks_script.config(self.folder, "cpu", 8), ranks=None) as engine:
            self.assertIsNone(engine.ranks)

    def test_ARanksGpuIsTheCurrentOneOrElseThatOfLocalRank(self):
        for local, current, several, taken in (("1", 0, True, [1]), ("1", 2, True, []), ("0", 0, True, []),
                                               ("4", 0, True, []), (None, 0, True, []), ("1", 0, False, [])):
            now, chosen, begun = [current], [], []

            def choose(gpu):
                now[0] = gpu
                chosen.append(gpu)

            variables = {} if local is None else {"LOCAL_RANK": local}
            with self.subTest(local=local, current=current), unittest.mock.patch.multiple(
                    torch.cuda, is_available=lambda: True, is_initialized=lambda: True, device_count=lambda: 4,
                    current_device=lambda: now[0], set_device=choose, synchronize=lambda: begun.extend(now)), \
                    unittest.mock.patch.dict(os.environ, variables), self.assertLogs("spillway", "INFO") as said:
                spillway.log.say(logging.INFO, "asked")
                spillway.ranks.take_gpu(several)
            self.assertEqual((taken, [gpu for gpu in now if gpu]), (chosen, begun))
            self.assertEqual([f"GPU {gpu} is the current one from here on" for gpu in taken],
                             [line.split("ranks: ")[1].split(",")[0] for line in said.output[1:]])


if __name__ == "__main__":
    main()
