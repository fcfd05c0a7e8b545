"""spillway.prepare: documents become rows, and none is lost, changed, cut or learned across a boundary."""
import collections
import json
import os
import random
import subprocess
import sys
import unittest

from prepare_case import CHATML, MISSING, UNMARKED, Case, Prepared, ROOT, make_model
from report import main

# So that 16 of them are less than 200 tokens, whatever the vocabulary has learned of the documents.
WORDS = [word for word in (ROOT / "README.md").read_text().split() if word.isascii() and len(word) < 12]
SEED = 20261127


def texts(count, seed, longest=16):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, longest))) for _ in range(count)]


@unittest.skipIf("numpy" in MISSING, "this Python has no numpy")
class Packing(unittest.TestCase):
    def test_EveryPieceHasARowThatHoldsIt(self):
        import numpy as np
        from spillway.prepare import packing
        draw = random.Random(SEED)
        for case in range(200):
            room = draw.choice([2, 3, 7, 32, 1000])
            lengths = np.array([draw.randint(1, room) for _ in range(draw.randint(1, 80))])
            with self.subTest(case=case, room=room, lengths=lengths.tolist()):
                row_of, rows = packing.packed(lengths, room, np)
                self.assertEqual(set(range(rows)), set(row_of.tolist()))
                self.assertLessEqual(np.bincount(row_of, lengths).max(), room)
                least = -(-int(lengths.sum()) // room)
                # Two rows that are both at most half full would have been one: the least that any fit promises.
                self.assertLess(rows, 2 * least + 1)
                self.assertEqual(sorted(first(row_of)), first(row_of))

    def test_ItFitsWhereItIsKnownToFit(self):
        import numpy as np
        from spillway.prepare import packing
        # 6 + 4, 7 + 3, 5 + 5, in the order of the data.
        row_of, rows = packing.packed(np.array([3, 5, 6, 4, 5, 7]), 10, np)
        self.assertEqual((3, [0, 1, 2, 2, 1, 0]), (rows, row_of.tolist()))

    def test_AnOrderIsAPermutationThatASeedDecides(self):
        import numpy as np
        from spillway.prepare import packing
        orders = [packing.order_of(seed, "rows", 100, np).tolist() for seed in (1, 1, 2)]
        self.assertEqual(list(range(100)), sorted(orders[0]))
        self.assertEqual(orders[0], orders[1])
        self.assertNotEqual(orders[0], orders[2])
        # With any version of numpy, on any machine.
        self.assertEqual([4, 3, 1, 2, 0], packing.order_of(0, "holdout", 5, np).tolist())


def first(row_of):
    """The first piece of each row."""
    return [row_of.tolist().index(row) for row in range(int(row_of.max()) + 1)]


class Texts(Case):
    def expected(self, documents):
        return [tuple(self.tokenizer(text)["input_ids"] + [0]) for text in documents]

    def assert_holds(self, prepared, wanted):
        """Each document once and whole, with a target at all of its positions but the last; else padding."""
        found = list(prepared.documents())
        real = [(ids, targets) for ids, targets in found if any(targets)]
        for ids, targets in found:
            if not any(targets):
                self.assertEqual({3}, set(ids), "padding")
        self.assertEqual(collections.Counter(wanted), collections.Counter(ids for ids, _ in real))
        for ids, targets in real:
            self.assertEqual((True,) * (len(ids) - 1) + (False,), targets)
        self.assertEqual(sum(map(len, wanted)), prepared.header["document_tokens"])
        self.assertEqual(sum(len(ids) - 1 for ids in wanted), prepared.header["targets"])
        self.assertEqual(prepared.header["targets"], prepared.targets.sum())
        self.assertEqual(prepared.header["largest_token"], prepared.tokens.max())
        self.assertTrue(prepared.starts[:, 0].all())
        self.assertTrue(prepared.sums_are_right())

    def test_EveryDocumentIsThereOnceWhole(self):
        for seed in range(SEED, SEED + 6):
            with self.subTest(seed=seed):
                documents = texts(60, seed)
                file = self.file(f"{seed}.jsonl", *({"text": text} for text in documents))
                room = max(map(len, self.expected(documents))) + seed % 3
                self.assert_holds(self.prepare(file, seq=room, out=f"out{seed}"), self.expected(documents))

    def test_PackingFillsRowsThatADocumentEachDoesNot(self):
        file = self.file("a.jsonl", *({"text": text} for text in texts(100, SEED)))
        packed, single = (self.prepare(file, *more, seq=200, out=f"out{len(more)}") for more in ((), ("--no-packing",)))
        self.assertEqual(100, single.header["rows"])
        self.assertGreater(single.header["rows"], 1.5 * packed.header["rows"])
        self.assert_holds(single, self.expected(texts(100, SEED)))
        self.assertEqual([ids for ids, targets in single.documents() if any(targets)],
                         self.expected(texts(100, SEED)))

    def test_TheSameCommandMakesTheSameBytes(self):
        file = self.file("a.jsonl", *({"text": text} for text in texts(50, SEED)))
        for more in ((), ("--shuffle", "--holdout", "0.1")):
            one, two = (self.folder / f"{name}{len(more)}" for name in "ab")
            for out in (one, two):
                self.prepare(file, *more, seq=200, out=out.name)
            paths = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
            self.assertEqual(8 if more else 4, len(paths))
            for path in paths:
                self.assertEqual((one / path).read_bytes(), (two / path).read_bytes(), path)

    def test_ShufflingChangesTheOrderOfRowsOnly(self):
        file = self.file("a.jsonl", *({"text": text} for text in texts(50, SEED)))
        plain, one, two = (self.prepare(file, *more, seq=200, out=f"out{number}") for number, more in enumerate(
            ((), ("--shuffle",), ("--shuffle", "--seed", "1"))))
        rows = [[tuple(row) for row in made.tokens.tolist()] for made in (plain, one, two)]
        self.assertEqual(sorted(rows[0]), sorted(rows[1]))
        self.assertEqual(sorted(rows[0]), sorted(rows[2]))
        self.assertEqual(3, len(set(map(tuple, rows))))

    def test_WhatIsHeldOutIsInTheOtherPartOnly(self):
        documents = [f"{number}: {text}" for number, text in enumerate(texts(50, SEED))]
        file = self.file("a.jsonl", *({"text": text} for text in documents))
        for asked, count in (("0.1", 5), ("7", 7), ("0.001", 1)):
            out = self.folder / asked
            train = self.prepare(file, "--holdout", asked, seq=200, out=asked)
            held = Prepared(out / "eval")
            self.assertEqual((50 - count, count), (train.header["documents"], held.header["documents"]))
            self.assertEqual(("train", "eval"), (train.header["part"], held.header["part"]))
            parts = [{ids for ids, targets in part.documents() if any(targets)} for part in (train, held)]
            self.assertEqual(set(), parts[0] & parts[1])
            self.assertEqual(set(self.expected(documents)), parts[0] | parts[1])
        other = self.prepare(file, "--holdout", "7", "--seed", "1", seq=200, out="other")
        self.assertNotEqual(Prepared(self.folder / "7").bytes, other.bytes)

    def test_LongDocumentsAreCutAsAsked(self):
        ids = self.expected(texts(1, SEED, 200))[0]
        file = self.file("a.jsonl", {"text": texts(1, SEED, 200)[0]})
        # A last piece of one token would be left out. Tokenizers are trained anew, and not always to the same tokens.
        room = next(room for room in range(len(ids) // 3, 1, -1) if len(ids) % room != 1)
        self.assertEqual([ids[:room]], [d for d, _ in self.prepare(file, "--long", "truncate", seq=room).documents()])
        split = self.prepare(file, "--long", "split", seq=room, out="split")
        pieces = [d for d, _ in split.documents() if d[0] != 3]
        self.assertEqual(ids, sum(pieces, ()))  # full rows first, as they come
        self.assertEqual(len(pieces), split.header["pieces"])
        self.assertEqual(len(ids) - len(pieces), split.header["targets"])  # a piece's first token is not predicted
        self.assertEqual(1, split.header["documents"])

    def test_PiecesThatShareARowAreApart(self):
        line = " ".join(WORDS[:60])
        room = len(self.expected([line])[0]) * 2 // 3 + 1
        made = self.prepare(self.file("a.jsonl", *[{"text": line}] * 3), "--long", "split", seq=room)
        # Two of the ends are in one row, though there are more rows than documents.
        self.assertEqual((3, 6, 5), tuple(made.header[key] for key in ("documents", "pieces", "rows")))

    def test_PiecesWithoutATargetAreLeftOut(self):
        chat = {"messages": [{"role": "user", "content": " ".join(WORDS[:100])},
                             {"role": "assistant", "content": "A part"}]}
        file = self.file("a.jsonl", chat)
        for options in ((), ("--no-packing",)):
            made = self.prepare(file, "--long", "split", "--assistant-only", *options, seq=64, out=f"out{len(options)}")
            pieces = [targets for ids, targets in made.documents() if any(targets)]
            self.assertEqual(made.header["rows"], len(pieces))
            self.assertEqual(made.header["pieces"], len(pieces))
            self.assertGreater(made.header["pieces_left_out"], 1)

    def test_TextFilesAreADocumentOrAsManyAsParagraphs(self):
        first, second = self.folder / "a.txt", self.folder / "b.txt"
        first.write_text("One line\nand another\n\n  \nSecond paragraph\r\n\n\nThird")
        second.write_text("Fourth\n")
        whole = self.prepare(str(self.folder / "*.txt"), "--no-packing", seq=64)
        self.assertEqual(self.expected([first.read_bytes().decode(), "Fourth\n"]),
                         [ids for ids, targets in whole.documents() if any(targets)])
        parts = self.prepare(first, second, "--paragraphs", "--no-packing", seq=64, out="parts")
        self.assertEqual(self.expected(["One line\nand another", "Second paragraph", "Third", "Fourth"]),
                         [ids for ids, targets in parts.documents() if any(targets)])

    def test_JsonArraysAreRecordsToo(self):
        path = self.folder / "a.json"
        path.write_text('\ufeff[{"text": "Hello there"}, {"text": "Two", "source": 1}]')
        made = self.prepare(path, "--no-packing")
        self.assertEqual(self.expected(["Hello there", "Two"]), [d for d, t in made.documents() if any(t)])

    def test_ParquetAndArrowAreReadByDatasets(self):
        try:
            import datasets
        except ImportError:
            self.skipTest("this Python has no datasets; `pip install datasets` brings it")
        rows = datasets.Dataset.from_list([{"text": "Hello there"}, {"text": "Two"}])
        rows.to_parquet(str(self.folder / "a.parquet"))
        rows.save_to_disk(str(self.folder / "saved"))
        arrow = next((self.folder / "saved").glob("*.arrow"))
        for number, path in enumerate((self.folder / "a.parquet", arrow)):
            made = self.prepare(path, "--no-packing", out=f"out{number}")
            self.assertEqual(self.expected(["Hello there", "Two"]), [d for d, t in made.documents() if any(t)])
        (self.folder / "b.parquet").write_text("no Parquet")
        self.refused(r"b\.parquet: cannot be read by datasets", self.folder / "b.parquet", out="refused")

    def test_WhatEndsATextIsChosen(self):
        file = self.file("a.jsonl", {"text": "Hello there"})
        ids = tuple(self.tokenizer("Hello there")["input_ids"])
        for token, end in (("<|im_end|>", (2,)), ("", ())):
            made = self.prepare(file, "--eos-token", token, "--no-packing", out="out" + token[2:4])
            self.assertEqual(ids + end, next(made.documents())[0])

    def test_ALargeVocabularyTakesFourBytes(self):
        large = make_model(self.folder / "large", vocab_size=65537)
        file = self.file("a.jsonl", {"text": "Hello there"})
        made = self.prepare(file, model=large)
        self.assertEqual(("uint32", 4 * 32), (made.header["dtype"], len(made.bytes["tokens"])))
        self.assertEqual(self.prepare(file, out="small").tokens.tolist(), made.tokens.tolist())


TURNS = [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "What is a tile?"},
         {"role": "assistant", "content": "A part of a shard"}, {"role": "user", "content": "And a block?"},
         {"role": "assistant", "content": "A layer"}]


class Conversations(Case):
    def learned(self, prepared):
        """The text of each run of learned tokens."""
        runs = []
        for ids, targets in prepared.documents():
            run = []
            for position, target in enumerate((*targets, False)):
                if target:
                    run.append(ids[position + 1])
                elif run:
                    runs.append(self.tokenizer.decode(run))
                    run = []
        return runs

    def test_OnlyTheAssistantsTurnsAreLearned(self):
        file = self.file("a.jsonl", {"messages": TURNS}, {"messages": TURNS[1:3]})
        made = self.prepare(file, "--assistant-only", seq=128)
        self.assertEqual(["A part of a shard<|im_end|>", "A layer<|im_end|>", "A part of a shard<|im_end|>"],
                         self.learned(made))
        # As transformers says it, token by token; a target is one position before its token.
        wanted = [self.tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
                  for turns in (TURNS, TURNS[1:3])]
        found = [(list(ids), list(map(int, targets))) for ids, targets in made.documents() if any(targets)]
        self.assertEqual([(w["input_ids"], w["assistant_masks"][1:] + [0]) for w in wanted], found)
        self.assertEqual(sum(sum(w["assistant_masks"]) for w in wanted), made.header["targets"])

    def test_WithoutItAllIsLearned(self):
        file = self.file("a.jsonl", {"messages": TURNS})
        made = self.prepare(file, seq=128)
        whole = self.tokenizer.apply_chat_template(TURNS, tokenize=False)
        self.assertEqual([self.tokenizer.decode(self.tokenizer(whole)["input_ids"][1:])], self.learned(made))

    def test_ShareGptIsTheSame(self):
        names = {"system": "system", "user": "human", "assistant": "gpt"}
        turns = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
        file = self.file("a.jsonl", {"conversations": turns},
                         {"conversations": turns[1:], "system": turns[0]["value"]})
        same = self.file("b.jsonl", {"messages": TURNS}, {"messages": TURNS})
        self.assertEqual(*(self.prepare(f, "--assistant-only", seq=128, out=f.stem).bytes for f in (file, same)))

    def test_ACompletionIsLearnedAndItsPromptOnlyOnRequest(self):
        file = self.file("a.jsonl", {"prompt": "What is a tile? ", "completion": "A part"},
                         {"prompt": "", "completion": "Alone"})
        # The space is of the token after it. A document's first token is not predicted.
        alone = self.tokenizer.decode(self.tokenizer("Alone")["input_ids"][1:])
        self.assertEqual([" A part<|endoftext|>", alone + "<|endoftext|>"],
                         self.learned(self.prepare(file, "--no-packing")))
        every = self.prepare(file, "--loss", "all", "--no-packing", out="all")
        self.assertEqual([len(ids) - 1 for ids, t in every.documents() if any(t)],
                         [sum(t) for _, t in every.documents() if any(t)])

    def test_ATokenOfBothSidesIsLearned(self):
        # The space before a word is of its token: " part" begins in the prompt.
        file = self.file("a.jsonl", {"prompt": "What is a tile? A ", "completion": "part of it"})
        whole = self.tokenizer("What is a tile? A part of it", return_offsets_mapping=True)
        wanted = [end > len("What is a tile? A ") for _, end in whole["offset_mapping"]] + [True]
        made = self.prepare(file, "--no-packing")
        ids, targets = next(d for d in made.documents() if any(d[1]))
        self.assertEqual(whole["input_ids"] + [0], list(ids))
        self.assertEqual(wanted[1:] + [False], list(targets))

    def test_WhatATokenizerPutsAroundATextStays(self):
        # As Llama's does before a text, and T5's after it, which then ends once.
        import tokenizers
        import transformers
        bpe = tokenizers.Tokenizer.from_file(str(self.model / "tokenizer.json"))
        bpe.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
        bpe.normalizer = tokenizers.normalizers.NFC()
        for pattern in ("<|im_start|> $A", "<|im_start|> $A <|endoftext|>"):
            bpe.post_processor = tokenizers.processors.TemplateProcessing(
                single=pattern, special_tokens=[("<|im_start|>", 1), ("<|endoftext|>", 0)])
            place = self.folder / f"model{len(pattern)}"
            transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>").save_pretrained(place)
            (place / "config.json").write_text('{"vocab_size": 512}')
            file = self.file("a.jsonl", {"prompt": "tile", "completion": "mark"})
            made = self.prepare(file, "--no-packing", model=place, out=f"out{len(pattern)}")
            ids, targets = next(made.documents())
            self.assertEqual((1, 0), (ids[0], ids[-1]))
            self.assertEqual(1, ids.count(0))
            learned = [ids[i + 1] for i, target in enumerate(targets) if target]
            whole = bpe.encode("tilemark")
            wanted = [token for token, (_, end) in zip(whole.ids, whole.offsets) if end > len("tile")] + [0]
            self.assertEqual(wanted, learned)
            self.assertLess(len(wanted), len(ids) - 1)
            text = self.prepare(self.file("b.jsonl", {"text": "tile"}), model=place, out=f"text{len(pattern)}")
            self.assertEqual([1, *bpe.encode("tile", add_special_tokens=False).ids, 0],
                             list(next(text.documents())[0]))

    def test_ACompletionOfMessagesIsLearned(self):
        file = self.file("a.jsonl", {"prompt": TURNS[:4], "completion": TURNS[4:]})
        # The prompt ends where the assistant begins to speak.
        self.assertEqual(["A layer<|im_end|>\n"], self.learned(self.prepare(file, seq=128)))
        self.assertEqual(["A layer<|im_end|>"], self.learned(self.prepare(file, "--assistant-only", seq=128, out="b")))
        self.assertEqual(["A part of a shard<|im_end|>", "A layer<|im_end|>"], self.learned(
            self.prepare(file, "--assistant-only", "--loss", "all", seq=128, out="c")))

    def test_AnotherTemplateTakesThePlaceOfTheTokenizers(self):
        other = self.folder / "other.jinja"
        other.write_text(CHATML.replace("system", "x").replace("<|im_start|>", "<|pad|>"))
        file = self.file("a.jsonl", {"messages": TURNS})
        model = make_model(self.folder / "model", UNMARKED)
        made = self.prepare(file, "--assistant-only", "--chat-template", other, model=model, seq=128)
        self.assertEqual(["A part of a shard<|im_end|>", "A layer<|im_end|>"], self.learned(made))
        self.assertEqual(3, made.tokens[0][0])

    def test_ToolsReachTheTemplate(self):
        template = "{% if tools %}{{ tools[0]['function']['name'] }}{% endif %}" + CHATML
        model = make_model(self.folder / "model", template)
        tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
        for number, given in enumerate((tools, json.dumps(tools))):
            made = self.prepare(self.file("a.jsonl", {"messages": TURNS, "tools": given}), model=model, seq=128,
                                out=f"out{number}")
            self.assertTrue(self.tokenizer.decode(made.tokens[0].tolist()).startswith("weather"))


class Imports(unittest.TestCase):
    def test_NothingIsImportedBeforeItIsNeeded(self):
        names = ", ".join(f"spillway.prepare.{path.stem}" for path in (ROOT / "python/spillway/prepare").glob("*.py"))
        done = subprocess.run([sys.executable, "-c", f"import sys, {names}; "
                               "print(sorted({'torch', 'transformers', 'tokenizers', 'datasets', 'numpy', "
                               "'spillway.engine'} & set(sys.modules)), "
                               "'libspillway' in open('/proc/self/maps').read())"], capture_output=True, text=True,
                              check=False, env=os.environ | {"PYTHONPATH": str(ROOT / "python")})
        self.assertEqual("[] False\n", done.stdout, done.stderr)


class Command(Case):
    def test_ItSaysWhatItMadeAndNeedsNoPyTorch(self):
        file = self.file("a.jsonl", *({"text": text} for text in texts(20, SEED)))
        code, out, err = self.command(file, "--model", self.model, "--out", self.folder / "out", "--seq", 128,
                                      "--holdout", 2)
        self.assertEqual((0, ""), (code, err))
        self.assertRegex(out, r"(?s)train: \d+ rows of 128 tokens, 18 documents, .*packed to \d+\.\d\d %\n"
                              r"eval: .* 2 documents")

    def test_ItCountsWhatItLeavesOutAndTruncates(self):
        file = self.file("a.jsonl", {"text": ""}, {"text": "a " * 100}, {"text": " "})
        other = self.file("b.jsonl", {"prompt": "a " * 100, "completion": "b"})
        code, out, err = self.command(file, other, "--model", self.model, "--out", self.folder / "out", "--seq", 32,
                                      "--skip-useless", "--long", "truncate")
        self.assertEqual((0, ""), (code, err))
        self.assertIn("left out, empty: 2 documents\nleft out, with nothing to learn: 1 documents\n"
                      "truncated: 1 documents\n", out)

    def test_ATokenizerAloneDoes(self):
        file = self.file("a.jsonl", {"text": "Hello there"})
        made = []
        for place in (self.model, self.model / "tokenizer.json"):
            out = self.folder / f"out{len(made)}"
            code, _, err = self.command(file, "--tokenizer", place, "--eos-token", "<|endoftext|>", "--out", out,
                                        "--seq", 32)
            self.assertEqual((0, ""), (code, err))
            made.append(Prepared(out))
        self.assertEqual(made[0].tokens[0][:4].tolist(), made[1].tokens[0][:4].tolist())
        self.assertEqual({"tokenizer.json"}, set(made[1].header["tokenizer"]["sha256"]))


if __name__ == "__main__":
    main()
