"""spillway.prepare: what is refused, where, and what to do; and that nothing is left behind."""
import json
import os
import subprocess
import sys
import time
import unittest
import unittest.mock

from prepare_case import ROOT, UNMARKED, Case, make_model
from report import main

GOOD = {"text": "Hello there"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


class Records(Case):
    def test_EachIsNamedByFileAndLine(self):
        for bad, pattern in (
                ("{not json", r"line 2: is no JSON \(column 2: "),
                ('{"text": "a"} {"text": "b"}', r"line 2: is no JSON \(column 15: Extra data"),
                ("[1]", r"line 2: is no JSON object; a record is"),
                ({"title": "x", "body": "y"}, r'line 2: is a record of no kind that is known: it has "title", "body"'),
                ({}, r"line 2: .* it has no keys"),
                ({"text": "a", "messages": CHAT["messages"]}, r"line 2: has messages and also text"),
                (CHAT, r"line 2: has messages, and .*a\.jsonl: line 1 has text"),
                ({"text": 7}, r'line 2: "text" is no string'),
                ({"text": "\ud800"}, r'line 2: "text" has half of a surrogate pair'),
                ({"text": ""}, r"line 2: an empty document"),
                ({"text": " \n"}, r"line 2: an empty document")):
            with self.subTest(bad=bad):
                self.refused(pattern, self.file("a.jsonl", GOOD, bad))

    def test_BlankLinesAreNone(self):
        made = self.prepare(self.file("a.jsonl", GOOD, "", "  ", GOOD))
        self.assertEqual(2, made.header["documents"])
        self.refused(r"line 4: is no JSON", self.file("a.jsonl", GOOD, "", GOOD, "x"), out="out2")

    def test_ConversationsAreLookedThrough(self):
        turn = CHAT["messages"][0]
        for bad, pattern in (
                ({"messages": "Hi"}, r'"messages" is no list'),
                ({"messages": []}, r'"messages" is empty: an empty document'),
                ({"messages": [turn, {"content": "x"}]}, r'message 2 of "messages" has no "role"'),
                ({"messages": ["x"]}, r'message 1 of "messages" has no "role"'),
                ({"messages": [{"role": "user"}]}, r'message 1 of "messages" has no "content"'),
                ({"messages": [turn], "tools": "{"}, r'"tools" is a string that is no JSON'),
                ({"messages": [turn], "tools": 1}, r'"tools" is no list'),
                ({"conversations": [{"from": "narrator", "value": "x"}]}, r'turn 1 of "conversations" is not under'),
                ({"conversations": {}}, r'"conversations" is no list'),
                ({"prompt": "x", "completion": ["y"]}, r'"completion" is no string; make it one; or both a list'),
                ({"prompt": "x", "completion": ""}, r"an empty document")):
            with self.subTest(bad=bad):
                self.refused(r"a\.jsonl: line 1: " + pattern, self.file("a.jsonl", bad))

    def test_ArraysAreNamedByRecord(self):
        path = self.folder / "a.json"
        for text, pattern in (('[{"text": "a"}, 5]', r"record 2: is no JSON object"),
                              ('{"text": "a"}', r"a\.json: is no JSON array"),
                              ('[{"text":\n "a"', r"a\.json: is no JSON \(line 2, column"),
                              ("[]", r"a\.json: there is no document")):
            with self.subTest(text=text):
                path.write_text(text)
                self.refused(pattern, path)

    def test_BytesThatAreNoUtf8AreNamed(self):
        path = self.folder / "a.jsonl"
        path.write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
        self.refused(r"a\.jsonl: line 2: is no UTF-8 at its byte 10", path)
        text = self.folder / "a.txt"
        text.write_bytes(b"abc\xfe")
        self.refused(r"a\.txt: is no UTF-8 at its byte 3", text)
        text.write_bytes(b"")
        self.refused(r"a\.txt: an empty document", text)


class Files(Case):
    def test_FilesAreFoundAndNamedOnce(self):
        path = self.file("a.jsonl", GOOD)
        self.refused(r"none\.jsonl: there is no such file", self.folder / "none.jsonl", code="not_found")
        self.refused(r"\*\.json: there is no such file", self.folder / "*.json", code="not_found")
        self.refused(r"a\.jsonl: is .*a\.jsonl once more", path, self.folder / "*.jsonl")
        self.refused(r"is a directory", self.folder)
        self.refused(r"a\.csv: has a name that does not say", self.file("a.csv", "x"))
        (self.folder / "b.jsonl").symlink_to("nowhere")
        self.refused(r"b\.jsonl: cannot be read", self.folder / "b.jsonl", code="not_found")
        (self.folder / "c.jsonl").mkdir()
        self.refused(r"c\.jsonl: is a directory", self.folder / "c.jsonl")

    @unittest.skipIf(os.geteuid() == 0, "root may read everything")
    def test_WhatMayNotBeReadIsNamed(self):
        path = self.file("a.jsonl", GOOD)
        path.chmod(0)
        self.refused(r"a\.jsonl: cannot be read \(Permission denied\)", path, code="io")

    def test_AnOutputThatIsThereStays(self):
        out = self.folder / "out"
        for make in (out.mkdir, lambda: (out / "mine").write_text("x")):
            make()
            self.refused(r"out: is there already", self.file("a.jsonl", GOOD), code="exists")
        self.assertEqual(["mine"], os.listdir(out))
        self.refused(r"there/out: cannot be made", self.file("a.jsonl", GOOD), out="there/out", code="io")

    def test_ADiskThatIsFullLeavesNothing(self):
        from spillway.prepare import layout
        full = OSError(28, "No space left on device")
        with unittest.mock.patch.object(layout.Summed, "write", side_effect=full):
            self.refused(r"out: cannot be written \(No space left on device\)", self.file("a.jsonl", GOOD), code="io")
        self.assertFalse((self.folder / "out").exists())

    def test_PackagesThatAreMissingAreNamed(self):
        (self.folder / "a.parquet").write_bytes(b"PAR1")
        with unittest.mock.patch.dict("sys.modules", {"datasets": None}):
            self.refused(r"datasets: is needed for \.parquet files and cannot be imported.*; `pip install datasets`",
                         self.folder / "a.parquet", code="not_found")
        for package in ("transformers", "numpy"):
            with unittest.mock.patch.dict("sys.modules", {package: None}):
                self.refused(rf"{package}: is needed .*; `pip install {package}`", self.file("a.jsonl", GOOD),
                             code="not_found")


class Tokens(Case):
    def test_ATemplateWithoutMarksIsRefused(self):
        model = make_model(self.folder / "unmarked", UNMARKED)
        file = self.file("a.jsonl", CHAT)
        message = self.refused(r"unmarked: its chat template does not say what an assistant says",
                               file, "--assistant-only", model=model)
        for words in ("{% generation %}", "{% endgeneration %}", "--chat-template"):
            self.assertIn(words, message)
        self.prepare(file, model=model)
        other = self.folder / "other.jinja"
        other.write_text(UNMARKED)
        self.refused("--chat-template: its chat template does not say", file, "--assistant-only", "--chat-template",
                     other, out="out2")
        self.refused(r"none\.jinja: cannot be read", file, "--chat-template", self.folder / "none.jinja", out="out2",
                     code="not_found")

    def test_AMissingTemplateAndARefusingOneAreNamed(self):
        file = self.file("a.jsonl", CHAT)
        self.refused(r"bare: has no chat template, which .*line 1 needs", file,
                     model=make_model(self.folder / "bare", None))
        strict = self.folder / "strict.jinja"
        strict.write_text("{{ raise_exception('roles must alternate') }}")
        self.refused(r"line 1: the chat template does not take it \(.*roles must alternate", file, "--chat-template",
                     strict)
        strict.write_text("{% if %}")
        self.refused(r"line 1: the chat template does not take it \(TemplateSyntaxError", file, "--chat-template",
                     strict)

    def test_ATemplateThatRendersAPromptOtherwiseIsRefused(self):
        other = self.folder / "other.jinja"
        other.write_text("{{ messages | length }}" + UNMARKED)
        file = self.file("a.jsonl", {"prompt": CHAT["messages"][:1], "completion": CHAT["messages"][1:]})
        self.refused(r"line 1: the chat template renders its prompt alone otherwise", file, "--chat-template", other)

    def test_WhatHasNoTurnsHasNoAssistant(self):
        self.refused(r"line 1: is text, which has no turns", self.file("a.jsonl", GOOD), "--assistant-only")
        self.refused(r"line 1: is prompt and completion, which has no turns",
                     self.file("a.jsonl", {"prompt": "a", "completion": "b"}), "--assistant-only")

    def test_ATokenOutsideTheVocabularyIsNamed(self):
        ids = self.tokenizer("the tile")["input_ids"]
        over = max(ids)
        small = make_model(self.folder / "small", vocab_size=over)
        message = self.refused(rf"line 2: token {over} \(.*\), its number {ids.index(over) + 1}, is outside the "
                               rf"vocabulary of {over}",
                               self.file("a.jsonl", {"text": "a"}, {"text": "the tile"}), model=small)
        self.assertIn("own tokenizer", message)

    def test_ADocumentWithoutATargetIsRefusedOrCounted(self):
        only_asked = {"messages": CHAT["messages"][:1]}
        file = self.file("a.jsonl", CHAT, only_asked)
        self.refused(r"line 2: it has no target: nothing of it would be learned; .*--skip-useless", file,
                     "--assistant-only")
        made = self.prepare(file, "--assistant-only", "--skip-useless")
        self.assertEqual((1, {"empty": 0, "without_targets": 1}), (made.header["documents"], made.header["left_out"]))
        self.refused("there is nothing to learn: 2 documents were left out",
                     self.file("b.jsonl", only_asked, only_asked), "--assistant-only", "--skip-useless", out="out2")
        self.refused(r"line 1: it has one token, and so no target", self.file("c.jsonl", {"text": "a"}), "--eos-token",
                     "", out="out2")

    def test_ATextWithoutAnEndIsRefused(self):
        path = self.model / "tokenizer.json"
        code, _, err = self.command(self.file("a.jsonl", GOOD), "--tokenizer", path, "--out", self.folder / "out",
                                    "--seq", 32)
        self.assertEqual(1, code)
        self.assertRegex(err, r"^spillway: .*line 1: no token ends it: .*tokenizer\.json has no end-of-sequence token; "
                              r"name one by --eos-token")
        self.refused("--eos-token: .* has no token '<end>'", self.file("a.jsonl", GOOD), "--eos-token", "<end>")

    def test_LongDocumentsAreNamedWithTheirLength(self):
        long = {"text": "tile " * 100}
        length = len(self.tokenizer(long["text"])["input_ids"]) + 1
        self.refused(rf"line 2: a document of {length} tokens is longer than a row of 32; take --seq {length}",
                     self.file("a.jsonl", GOOD, long))
        longest = {"text": "tile " * 200}
        most = len(self.tokenizer(longest["text"])["input_ids"]) + 1
        self.refused(rf"line 1: .* and so are 2 more, the longest of {most} tokens at .*line 3",
                     self.file("a.jsonl", long, long, longest))
        asked = {"prompt": "tile " * 100, "completion": "x"}
        self.refused("line 1: its first 32 tokens have no target.*take a larger --seq", self.file("a.jsonl", asked),
                     "--long", "truncate")

    def test_ModelsAreLookedAtFirst(self):
        file = self.file("a.jsonl", GOOD)
        empty = self.folder / "empty"
        self.refused(r"empty/config\.json: cannot be read", file, model=empty, code="not_found")
        empty.mkdir()
        for text, pattern in (("{", "is no JSON"), ("[]", "is no JSON object"),
                              ('{"vocab_size": "x"}', '"vocab_size" is no whole number')):
            (empty / "config.json").write_text(text)
            self.refused(pattern, file, model=empty)
        # transformers 5 would make an empty tokenizer of it.
        (empty / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": 512}))
        self.refused("empty: holds no tokenizer: there is no tokenizer.json", file, model=empty, code="not_found")
        (empty / "tokenizer.json").write_text("{}")
        self.refused("empty: holds no tokenizer that transformers can open", file, model=empty)
        self.refused("none: there is no such directory", file, "--tokenizer", self.folder / "none", code="not_found")

    def test_HoldingOutAllIsRefused(self):
        self.refused("--holdout: 2 of 2 documents would be held out", self.file("a.jsonl", GOOD, GOOD), "--holdout", 2)


class Command(Case):
    def test_WrongWordsAreRefused(self):
        file = self.file("a.jsonl", GOOD)
        words = [file, "--out", self.folder / "out", "--seq", "32", "--model", self.model]
        for more, pattern in ((["--seq", "1"], "from 2 to"), (["--holdout", "0"], "neither a number of documents"),
                              (["--holdout", "1.5"], "neither"), (["--long", "x"], "invalid choice"),
                              (["--holdout", "x"], "neither")):
            code, _, err = self.command(*words, *more)
            self.assertEqual(2, code)
            self.assertIn(pattern, err)
        code, _, err = self.command(*words[:-2])
        self.assertEqual(2, code)
        self.assertIn("--model or --tokenizer is needed", err)

    def test_ErrorsAreOneLine(self):
        code, out, err = self.command(self.file("a.jsonl", GOOD, "x"), "--out", self.folder / "out", "--seq", 32,
                                      "--model", self.model)
        self.assertEqual((1, "", 1), (code, out, err.count("\n")))
        self.assertRegex(err, r"^spillway: .*a\.jsonl: line 2: is no JSON \(.*\); put one JSON object on each line")

    def test_WhoStopsItFindsNothingLeft(self):
        os.mkfifo(self.folder / "pipe.jsonl")  # reading waits for a writer
        for signal in (15, 2):
            running = subprocess.Popen(
                [sys.executable, "-m", "spillway.prepare", self.folder / "pipe.jsonl", "--out", self.folder / "out",
                 "--seq", "32", "--model", self.model], stderr=subprocess.PIPE, text=True,
                env=os.environ | {"PYTHONPATH": str(ROOT / "python")})
            limit = time.monotonic() + 60
            while not list(self.folder.glob("out.*.new/spool")) and time.monotonic() < limit:
                time.sleep(0.05)
            self.assertEqual(1, len(list(self.folder.glob("out.*.new/spool"))))
            running.send_signal(signal)
            self.assertEqual("", running.communicate(timeout=60)[1])
            self.assertEqual(128 + signal, running.returncode)
            self.assertEqual(["pipe.jsonl"], os.listdir(self.folder))


if __name__ == "__main__":
    main()
