"""bench/convergence*.py: the loops beside each other have the same weights, rows and rates, rows that are held
back train nothing, and the page's tables are those of the raw results."""
import json
import os
import subprocess
import sys
import unittest

import case
from case import ROOT, Case, main

case.need("transformers", "no transformers here; tools/test.sh brings it")
sys.path.insert(0, str(ROOT / "bench"))
import convergence  # noqa: E402
import convergence_pytorch  # noqa: E402

BINARY = os.environ.get("SPILLWAY_BINARY")
PAGE, RESULTS = ROOT / "docs/states_evidence.md", ROOT / "bench/results"


@unittest.skipUnless(BINARY, "SPILLWAY_BINARY names no program")
class Programs(Case):
    def lines(self, program, *arguments, path=None):
        done = subprocess.run([sys.executable, ROOT / "bench" / program, "--tiny", "--spillway", BINARY, *arguments],
                              capture_output=True, text=True, check=False,
                              env={**os.environ, **({"PYTHONPATH": str(path)} if path else {})})
        self.assertEqual(0, done.returncode, done.stderr)
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def test_ALoopInPyTorchHasTheWeightsRowsAndRatesOfTheProgram(self):
        own = self.lines("convergence.py", "--dtype", "fp32", "--forms", "fp32")[:-1]
        *loops, said = self.lines("convergence_pytorch.py", "--forms", "fp32", "torch")
        self.assertEqual([("fp32", 1), ("torch", 1), ("fp32", 2), ("torch", 2)],
                         [(line["form"], line["seed"]) for line in loops])
        for loop in loops:
            wanted = own[loop["seed"] - 1]
            # Another program's products of matrices: a row, weight or rate that is another one moves a loss by 1e-2.
            for a, b in zip([*wanted["losses"], wanted["end"]], [*loop["losses"], loop["end"]]):
                self.assertAlmostEqual(a, b, delta=2e-4)
        self.assertLess(abs(said["ours"]["spread"] - said["peers"]["spread"]), 2e-4)

    def test_AFineTuneOfAnEncoderStartsFromTheSameWeightsInEveryForm(self):
        before, *found, said = self.lines("convergence_pytorch.py", "--task", "encoder", "--forms", "fp32", "int8",
                                          "int8-all", "torch")
        self.assertEqual("before", before["form"])
        self.assertEqual(1, len({line["losses"][0] for line in found if line["seed"] == 1}))
        ends = {line["form"]: line["end"] for line in found if line["seed"] == 1}
        # The layers' states alone may move the loss by less than its last bit in so few steps.
        self.assertEqual(3, len({before["end"], ends["fp32"], ends["int8-all"]}))
        self.assertAlmostEqual(ends["int8"], ends["fp32"], delta=1e-4)
        self.assertAlmostEqual(ends["torch"], ends["fp32"], delta=1e-4)
        self.assertEqual({"int8", "int8-all"}, set(said["ours"]["apart"]))

    def test_ARunThatTheLogHasIsNotMadeAgain(self):
        log = self.folder / "log.jsonl"
        arguments = ("convergence.py", "--forms", "fp32", "--log", str(log))
        first, kept = self.lines(*arguments), log.read_text()
        self.assertEqual(first[-1:], self.lines(*arguments))
        self.assertEqual(kept, log.read_text())

    def test_WhatAPeerAnswersIsKept(self):
        (self.folder / "bitsandbytes.py").write_text("raise RuntimeError('not on this machine')")
        found = self.lines("convergence_pytorch.py", "--forms", "bitsandbytes8bit", path=self.folder)
        self.assertEqual({"RuntimeError: not on this machine"}, {line["refused"] for line in found[:-1]})


class Rows(unittest.TestCase):
    def test_ThoseHeldBackAreTheSameForEverySeedAndInNoTraining(self):
        values, sequence, training, held = list(range(1000)), 10, 60, 7
        found = [convergence.rows_of(values, sequence, seed, training, held) for seed in (1, 2)]
        self.assertEqual(found[0][training * sequence:], found[1][training * sequence:])
        trained = [list(of[:training * sequence]) for of in found]
        self.assertNotEqual(*trained)
        for each in trained:
            self.assertEqual(training * sequence, len(set(each)))
            self.assertFalse(set(each) & set(found[0][training * sequence:-1]))  # the last one is guessed only

    def test_TooFewAreAnError(self):
        with self.assertRaisesRegex(SystemExit, "has 99 rows and 101 are wanted"):
            convergence.rows_of(list(range(1000)), 10, 1, 100, 1)

    def test_PairsAreDocstringsAndTheirFunctionsWithoutThem(self):
        found = dict(convergence_pytorch.pairs_of([ROOT / "bench/convergence.py"], 100))
        code = found["About `most` bytes of it: whole files, in an order that is always the same."]
        self.assertTrue(code.startswith("def text_of(places, most):"), code)
        self.assertNotIn("always the same", code)


class Page(unittest.TestCase):
    def test_HasTheTablesOfTheRawResults(self):
        logs = sorted(RESULTS.glob("convergence-*.jsonl"))
        self.assertTrue(logs)
        done = subprocess.run([sys.executable, ROOT / "bench/convergence_plots.py", *logs, "--page", PAGE],
                              capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)


if __name__ == "__main__":
    main()
