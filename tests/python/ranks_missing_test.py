"""What becomes of the ranks of a model when one of them is missing; and how a run goes on."""
import json
import pathlib
import signal
import time

from ranks_case import SCRIPT, Processes, RanksCase
from report import main


class Missing(RanksCase):
    def missed(self, how, count=3, patience=60, step=3):
        folder = self.folder_of(f"{how}-{step}")
        processes = Processes(count, [{"case": "missed", "folder": folder, "patience": patience, "rows": 6,
                                       "harm": {"rank": 1, "step": step, "how": how}}])
        self.addCleanup(processes.kill)
        others = [rank for rank in range(count) if rank != 1]
        for rank, (status, output) in processes.ended(but=[1]).items():
            self.assertEqual(status, 3, f"rank {rank}:\n{output}")
        return [json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text()) for rank in others], processes

    def test_ARankThatIsKilledIsNamedAtOnce(self):
        for said in self.missed("kill", patience=600)[0]:
            self.assertEqual(said["code"], "io")
            self.assertRegex(said["message"], r"rank \d: torch\.distributed .*gloo: from or to rank 1: ")
            self.assertLess(said["seconds"], 240)  # sooner than patience would say so

    def test_ARankThatIsStoppedIsNamedAfterPatience(self):
        begun = time.monotonic()
        said, processes = self.missed("stop", patience=8)
        for each in said:
            self.assertRegex(each["message"], r"no progress in 8 s: rank 1 \(\S+\) does not answer")
        self.assertGreater(time.monotonic() - begun, 8)
        self.assertIsNone(processes.started[1].poll())
        processes.started[1].send_signal(signal.SIGCONT)

    def test_ARankThatLeavesIsNamed(self):
        for said in self.missed("leave", patience=20, step=0)[0]:
            self.assertEqual(said["code"], "io")
            self.assertRegex(said["message"], r"rank 1 \(\S+\) has left after \d+ collectives")

    def test_ARankThatKeepsItsLastStepBeforeItLeavesIsNamed(self):
        for said in self.missed("leave", patience=20)[0]:
            self.assertEqual(said["code"], "io", said["message"])
            self.assertRegex(said["message"], r"all_gather of .*: rank 1 \(\S+\) ends before it; that rank's own")

    def test_ARankIsWaitedForAsLongAsItsWorkMoves(self):
        folder = self.folder_of("work")
        self.run_all(2, [{"case": "at_work", "folder": folder}])
        for rank, itself in enumerate((", this one,", "")):
            facts, said = json.loads(pathlib.Path(folder, f"rank{rank}.json").read_text())
            self.assertEqual({"step": 7}, facts)
            self.assertIn(f"no progress in 4 s: rank 0{itself} has not come to it", said)

    def test_ElasticRestartsGoOnFromTheNewestStepOfAll(self):
        whole, cut = self.folder_of("whole"), self.folder_of("cut")
        self.run_all(2, [{"case": "train", "folder": whole, "steps": 8}])
        cases = [{"case": "train", "folder": cut, "steps": 8, "harm": {"rank": 1, "step": 5, "how": "kill"}}]
        self.torchrun(2, SCRIPT, json.dumps(cases), restarts=1)
        expected = self.results(whole, 2)[0]
        for result in self.results(cut, 2):
            self.assertIn(result["first"], (4, 5))  # the fifth step may have been committed on one of them alone
            self.assertEqual(result["losses"], expected["losses"][result["first"]:])
            self.assert_same_weights(result["weights"], expected["weights"])


if __name__ == "__main__":
    main()
