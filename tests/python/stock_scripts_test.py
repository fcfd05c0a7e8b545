"""The driver of tools/stock_scripts.py: its rows name what is there, lines are counted as a reader would, and a script
that is another one than its row knows is an error."""
import ast
import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tools")]
import stock_scripts  # noqa: E402
from report import main  # noqa: E402

STOCK = ROOT / "tools/stock"
DESCRIPTION = json.loads((STOCK / "rows.json").read_text())


def functions(name):
    body = ast.parse((STOCK / f"{name}.py").read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


class Rows(unittest.TestCase):
    def test_NameWhatIsThere(self):
        models, sets = functions("models"), functions("sets")
        names = [row["name"] for row in DESCRIPTION["rows"]]
        self.assertEqual(len(names), len(set(names)))
        self.assertGreaterEqual(len(names), 25)
        for row in DESCRIPTION["rows"]:
            with self.subTest(row["name"]):
                self.assertIn(row["source"], DESCRIPTION["sources"])
                self.assertLessEqual({*row.get("models", ())}, models)
                self.assertLessEqual({*row.get("data", ())}, sets)
                changes = [pair for each in row["changes"] for pair in
                           (DESCRIPTION["changes"][each] if isinstance(each, str) else [each])]
                before = "".join(pair[0] for pair in changes)
                lines = stock_scripts.lines_changed(before, stock_scripts.changed(before, changes, row))
                self.assertTrue(1 <= lines <= 3, f"{lines} lines")

    def test_ResultsAreOfTheseRows(self):
        page = (ROOT / "docs/stock_scripts.md").read_text()
        for file in ("stock-scripts.jsonl", "stock-scripts-ranks.jsonl"):
            lines = (ROOT / "bench/results" / file).read_text().splitlines()
            results = [json.loads(line) for line in lines]
            names = [result["script"] for result in results]
            self.assertEqual(len(names), len(set(names)))
            self.assertLessEqual(set(names), {row["name"] for row in DESCRIPTION["rows"]})
            for line in stock_scripts.table(results).splitlines():
                self.assertIn(line, page)


class Driver(unittest.TestCase):
    def test_CountsLinesThatAreOthersNewOrGone(self):
        for after, lines in (("a\nb\nc\n", 0), ("a\nx\nc\n", 1), ("a\nb\nnew\nc\n", 1), ("a\nc\n", 1),
                             ("x\ny\nb\nc\n", 2)):
            self.assertEqual(lines, stock_scripts.lines_changed("a\nb\nc\n", after), after)

    def test_AnotherScriptIsAnError(self):
        row = {"name": "run"}
        self.assertEqual("one three", stock_scripts.changed("one two", [["two", "three"]], row))
        for text in ("one", "two two"):
            with self.assertRaisesRegex(SystemExit, "^run: 'two' is in its script . times, and not once"):
                stock_scripts.changed(text, [["two", "three"]], row)

    def test_ATableSaysWhatFailed(self):
        result = {"script": "run", "source": "us", "lines_changed": 2, "steps": 0, "spillway_failed": "1: no"}
        self.assertIn("| run | us | 2 | 0 |  | 1: no |", stock_scripts.table([result]))
        self.assertFalse(stock_scripts.good(result))
        for difference, good in ((1e-6, True), (1e-4, False)):
            self.assertEqual(good, stock_scripts.good({"difference": difference}))


if __name__ == "__main__":
    main()
