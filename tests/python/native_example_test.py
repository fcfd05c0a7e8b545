"""docs/native_example.md, as a reader would follow it: its Python and its commands, one after the other, with fewer
steps; and what comes of it."""
import importlib.util
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import unittest

from prepare_case import MISSING, ROOT
from report import main

PAGE = ROOT / "docs/native_example.md"
BINARY = os.environ.get("SPILLWAY_BINARY", "")
STEPS = 400


@unittest.skipIf(MISSING, f"this Python has no {', '.join(MISSING)}; `pip install transformers jinja2` brings them")
@unittest.skipUnless(BINARY, "SPILLWAY_BINARY names no program")
class NativeExample(unittest.TestCase):
    def run_ok(self, command, folder):
        environment = os.environ | {"PYTHONPATH": str(ROOT / "python"), "SPILLWAY_PYTHON": sys.executable}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        self.assertEqual(0, done.returncode, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_EveryStepOfThePageWorks(self):
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        programs = [text for kind, text in blocks if kind == "python"]
        commands = [shlex.split(line) for kind, text in blocks if not kind
                    for line in text.replace("\\\n", "").splitlines() if re.match("(?:spillway|python) ", line)]
        self.assertEqual((2, 5), (len(programs), len(commands)))
        with tempfile.TemporaryDirectory(prefix="spillway-native-example-") as name:
            folder = pathlib.Path(name)
            (folder / "make.py").write_text(programs[0])
            for program, *arguments in commands:
                arguments = [str(STEPS) if word == "1000" else word for word in arguments]
                log = ["--log", "log.jsonl"] if arguments[0] == "finetune" else []
                said = self.run_ok([{"spillway": BINARY, "python": sys.executable}[program], *arguments, *log], folder)
            lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
            evaluations = [line for line in lines if "eval_loss" in line]
            self.assertEqual([0, 200, STEPS], [line["step"] for line in evaluations])
            # Guessing takes the whole vocabulary, some 300 tokens.
            self.assertGreater(evaluations[0]["perplexity"], 100)
            self.assertLess(evaluations[-1]["perplexity"], 1.5)
            right = r"^\d+ plus \d+ is \d+\.$"  # if not the sum, after so few steps
            self.assertRegex(said.strip(), right)
            if importlib.util.find_spec("torch") is None:
                self.skipTest("the answers need PyTorch; everything before them was looked at")
            answers = self.run_ok([sys.executable, "-c", programs[1]], folder).splitlines()
            self.assertEqual(2, len(answers), answers)
            self.assertEqual(said.strip(), answers[0])
            for answer in answers:
                self.assertRegex(answer, right)


if __name__ == "__main__":
    main()
