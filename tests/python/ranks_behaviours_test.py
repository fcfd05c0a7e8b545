"""DeepSpeed's behaviours on several ranks, as docs/ranks_deepspeed.md lists them. torchrun starts the ranks once, and
each makes all tests of ranks_steps.py, ranks_models.py and ranks_values.py; here they are seen to hold on all."""
import ast
import functools
import json
import pathlib
import subprocess
import tempfile
import unittest

from ranks_case import ROOT, torchrun
from report import main

from behaviours import table

HERE, PAGE = pathlib.Path(__file__).parent, "docs/ranks_deepspeed.md"
SUITES, RANKS = ("ranks_steps", "ranks_models", "ranks_values"), 2


@functools.lru_cache(None)
def outcomes():
    """What each rank says of each test: nothing, where it holds."""
    with tempfile.TemporaryDirectory(prefix="spillway-python-") as folder:
        try:
            done = torchrun(RANKS, folder, HERE / "several_ranks.py", folder, timeout=900)
        except subprocess.TimeoutExpired as error:  # kept, as what is said is: no other test waits once more
            return [str(error)] * RANKS
        files = [pathlib.Path(folder, f"rank{rank}.json") for rank in range(RANKS)]
        return [json.loads(file.read_text()) if file.exists() else done.stdout + done.stderr for file in files]


def tests():
    """{name: whether it sees a refusal}"""
    return {node.name: "assert_refused" in ast.unparse(node) for suite in SUITES
            for node in ast.walk(ast.parse((HERE / f"{suite}.py").read_text()))
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


class OnAllRanks(unittest.TestCase):
    def said(self, name):
        for rank, said in enumerate(outcomes()):
            self.assertIsInstance(said, dict, f"rank {rank} has left nothing:\n{said}")
            self.assertEqual("", said.get(name, "was not run"), f"rank {rank}")


for each in tests():
    setattr(OnAllRanks, each, functools.partialmethod(OnAllRanks.said, each))


class Table(unittest.TestCase):
    def test_EveryRowHasItsTestAndEveryTestItsRow(self):
        rows = {name.replace(" ", ""): said != "holds" for name, said in table(PAGE).items()}
        self.assertEqual(rows, {name[5:].lower(): refused for name, refused in tests().items()})

    def test_ThePageCountsThem(self):
        rows, text = table(PAGE), (ROOT / PAGE).read_text()
        self.assertRegex(text, rf"{sum(said == 'holds' for said in rows.values())} of\s+the\s+{len(rows)}\s+hold")


if __name__ == "__main__":
    main()
