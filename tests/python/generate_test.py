"""`spillway generate` with a tokenizer, which is a process of this Python's; and that process by itself."""
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from prepare_case import CHATML, MISSING, ROOT, make_model
from report import main

BINARY = os.environ.get("SPILLWAY_BINARY", "")
TEXT = "Größe — 漢字 und 🙂, the store’s weights"


@unittest.skipIf(MISSING, f"this Python has no {', '.join(MISSING)}; `pip install transformers jinja2` brings them")
class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.mkdtemp(prefix="spillway-generate-")
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        cls.folder, cls.tokenizer = Path(folder), make_model(Path(folder) / "tokenizer")
        import transformers
        cls.inner = transformers.AutoTokenizer.from_pretrained(cls.tokenizer)


class Speaking(Case):
    """Of spillway.prepare.tokens."""

    def speaker(self):
        return importlib.import_module("spillway.prepare.tokens").Speaker(str(self.tokenizer))

    def test_TextComesAsItsTokensDoAndNoCharacterIsTorn(self):
        ids = self.inner(TEXT)["input_ids"]
        self.assertGreater(len(ids), len(TEXT.split()), "a character of several bytes has several tokens here")
        for begin in (1, 5, len(ids) - 1):
            speaker = self.speaker()
            self.assertEqual(ids, speaker.prompt(TEXT, False))
            speaker.ids, speaker.context, speaker.shown = ids[:begin], 0, begin
            pieces = [speaker.add(token) for token in ids[begin:]]
            self.assertEqual(TEXT[len(self.inner.decode(ids[:begin])):], "".join(pieces) + speaker.rest())
            self.assertNotIn("�", "".join(pieces))
            self.assertGreater(sum(map(bool, pieces)), (len(ids) - begin) // 4, "it does not wait for the end")

    def test_WhatIsLeftOfACharacterIsShownAtTheEnd(self):
        ids = self.inner("🙂")["input_ids"]
        self.assertGreater(len(ids), 1)
        speaker = self.speaker()
        speaker.prompt("a", False)
        self.assertEqual("", "".join(speaker.add(token) for token in ids[:-1]))
        self.assertEqual("�", speaker.rest())
        self.assertEqual("", speaker.rest())

    def test_AChatIsWhatTheTemplateMakesOfIt(self):
        speaker = self.speaker()
        wanted = self.inner.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        wanted = wanted if isinstance(wanted, list) else wanted["input_ids"]
        self.assertEqual(list(wanted), speaker.prompt("hello", True))
        self.assertIn("assistant", CHATML)


class Program(unittest.TestCase):
    def test_TheCommandThatPipInstallsSaysWhichPythonItIs(self):
        program = importlib.import_module("spillway.program")
        with (mock.patch.object(program, "program", lambda: Path("bin/spillway")), mock.patch("os.execv") as begun,
              mock.patch.dict(os.environ)):
            os.environ.pop("SPILLWAY_PYTHON", None)
            program.main()
            self.assertEqual(sys.executable, os.environ["SPILLWAY_PYTHON"])
        begun.assert_called_once()


@unittest.skipUnless(BINARY, "SPILLWAY_BINARY names no program")
class Generating(Case):
    def setUp(self):
        self.model = self.folder / self._testMethodName
        self.run_program("init-model", self.model, "--layers", 2, "--width", 64, "--heads", 2, "--vocab", 512,
                         "--context", 128)

    def run_program(self, *arguments, status=0):
        done = subprocess.run([BINARY, *map(str, arguments)], capture_output=True, check=False, timeout=300,
                              env={**os.environ, "SPILLWAY_PYTHON": sys.executable,
                                   "PYTHONPATH": str(ROOT / "python")})
        self.assertEqual(status, done.returncode, done.stderr)
        return done

    def generated(self, *more):
        return self.run_program("generate", "--model", self.model, "--tokens", 30, "--seed", 4, "--temperature", 2,
                                *more).stdout

    def test_TextIsTheTokensDecoded(self):
        ids = self.inner(TEXT)["input_ids"]
        tokens = list(map(int, self.generated("--ids", "--prompt", " ".join(map(str, ids))).split()))
        wanted = self.inner.decode([*ids, *tokens], skip_special_tokens=True)[len(TEXT):]
        found = self.generated("--tokenizer", self.tokenizer, "--prompt", TEXT).decode()
        self.assertEqual(wanted + "\n", found)
        self.assertEqual(found, self.generated("--tokenizer", self.tokenizer / "tokenizer.json", "--prompt",
                                               TEXT).decode())

    def test_AChatGoesThroughTheTemplateAndEndsWhereTheModelsFilesSayIt(self):
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
            if (self.tokenizer / name).exists():
                shutil.copy(self.tokenizer / name, self.model)
        ids = self.inner.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)
        ids = ids if isinstance(ids, list) else ids["input_ids"]
        wanted = list(map(int, self.generated("--ids", "--prompt", " ".join(map(str, ids))).split()))
        found = self.generated("--chat", "--prompt", "hello").decode()
        text = self.inner.decode([*ids, *wanted], skip_special_tokens=True)
        self.assertTrue(text.endswith(found[:-1]), (text, found))
        (self.model / "generation_config.json").write_text('{"eos_token_id": [511, %d]}' % wanted[4])
        shorter = self.generated("--chat", "--prompt", "hello").decode()
        self.assertTrue(found.startswith(shorter[:-1]) and len(shorter) < len(found), (shorter, found))

    def test_AWrongTokenizerIsRefused(self):
        def refused(*more, words):
            done = self.run_program("generate", "--model", self.model, "--prompt", "the store", *more, status=1)
            for word in words:
                self.assertIn(word, done.stderr.decode())

        refused("--tokenizer", self.folder / "none", words=["none", "there is no such directory"])
        refused("--tokenizer", self.model, words=["holds no tokenizer"])
        broken = self.folder / "broken"
        broken.mkdir(exist_ok=True)
        (broken / "tokenizer.json").write_text("{}")
        refused("--tokenizer", broken, words=["holds no tokenizer that transformers can open"])
        bare = make_model(self.folder / "bare", template=None)
        refused("--tokenizer", bare, "--chat", words=["has no chat template"])
        # A model whose vocabulary is smaller than the tokenizer's.
        small = self.folder / "small"
        self.run_program("init-model", small, "--layers", 1, "--width", 32, "--heads", 1, "--vocab", 260)
        done = self.run_program("generate", "--model", small, "--tokenizer", self.tokenizer, "--prompt", "the store",
                                status=1)
        self.assertIn("the model's vocabulary has 260", done.stderr.decode())


if __name__ == "__main__":
    main()
