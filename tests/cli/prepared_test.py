"""`spillway finetune` on prepared data: documents of a row do not see each other, and what is not learned counts for
nothing. The directories are written here, as docs/data.md says; tests/python/prepare_test.py looks at those that
`python -m spillway.prepare` makes."""
import hashlib
import json
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import CliTest, sha256_of_model, spillway, test_seed  # noqa: E402

LENGTH, VOCABULARY = 40, 300
SEED = test_seed()


def bits(flags):
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        packed[i // 8] |= flag << i % 8
    return bytes(packed)


def write_prepared(folder, rows, *, length=LENGTH, **header):
    """`rows`: each some documents, lists of (token, whether it is learned)."""
    folder.mkdir()
    tokens, starts, targets, learned = b"", b"", b"", 0
    for documents in rows:
        ids, begins, wanted = [], [], []
        for document in documents:
            begins += [True] + [False] * (len(document) - 1)
            wanted += [learns for _, learns in document[1:]] + [False]
            ids += [token for token, _ in document]
        padding = length - len(ids)
        learned += sum(wanted)
        begins += [True] * bool(padding) + [False] * max(0, padding - 1)
        ids, wanted = ids + [0] * padding, wanted + [False] * padding
        tokens += b"".join(token.to_bytes(2, "little") for token in ids)
        starts, targets = starts + bits(begins), targets + bits(wanted)
    files = {"tokens": tokens, "starts": starts, "targets": targets}
    for name, data in files.items():
        (folder / f"{name}.bin").write_bytes(data)
    values = {"format": "spillway-prepared", "version": 1, "rows": len(rows), "tokens_per_row": length,
              "documents": sum(map(len, rows)), "targets": learned, "dtype": "uint16",
              "largest_token": VOCABULARY - 1,
              **{f"{name}_sha256": hashlib.sha256(data).hexdigest() for name, data in files.items()}, **header}
    (folder / "header.json").write_text(json.dumps(values))
    return folder


def documents(seed):
    """Twelve that fill four rows or less, of which parts are learned."""
    chance = random.Random(seed)
    return [[(chance.randrange(VOCABULARY), chance.random() < 0.7 or i == 1) for i in range(chance.randrange(5, 13))]
            for _ in range(12)]


class Prepared(CliTest):
    def first_step(self, family, data, rows, **config):
        model = self.place.folder / family
        if not model.exists():
            self.place.init_family(family)
        path = self.place.config(dtype="fp32", micro=1, accumulation=rows, parameters="none", states="none", clip=0,
                                 **config)
        self.place.log.unlink(missing_ok=True)
        out = self.place.folder / "out"
        self.assert_done(self.place.finetune(path, model, data=data, steps=1, seq=LENGTH, log=self.place.log, out=out))
        return self.place.steps()[0], sha256_of_model(out)

    def test_ARowsDocumentsAreTrainedAsIfEachWereAlone(self):
        some = documents(SEED)
        packed = write_prepared(self.place.folder / "packed", [some[i::4] for i in range(4)])
        alone = write_prepared(self.place.folder / "alone", [[document] for document in some])
        for family in ("llama", "mistral", "phi3", "gemma2", "gemma3_text"):
            with self.subTest(family=family):
                together, _ = self.first_step(family, packed, 4)
                apart, _ = self.first_step(family, alone, 12)
                self.assertLess(abs(together["loss"] / apart["loss"] - 1), 1e-6)
                self.assertLess(abs(together["grad_norm"] / apart["grad_norm"] - 1), 1e-5)

    def test_WhatIsNotLearnedDoesNotCount(self):
        some = documents(SEED)
        # Other tokens behind the last one that is learned change nothing.
        behind = [document + [(7, False)] for document in some]
        one = write_prepared(self.place.folder / "one", [[document] for document in some])
        two = write_prepared(self.place.folder / "two", [[document] for document in behind])
        self.assertEqual(*(self.first_step("qwen3", data, 12)[0]["loss"] for data in (one, two)))

    def test_Gpt2TakesADocumentARowAndRefusesMore(self):
        model = self.place.init_model(vocab=VOCABULARY)
        config = self.place.config()
        one = write_prepared(self.place.folder / "one", [[document] for document in documents(SEED)])
        self.assert_done(self.place.finetune(config, model, data=one, steps=2, seq=LENGTH, fresh=True))
        two = write_prepared(self.place.folder / "two", [documents(SEED)[:3]])
        self.assert_refused(self.place.finetune(config, model, data=two, steps=2, seq=LENGTH, fresh=True), str(two),
                            "--no-packing")

    def test_AnOrderOfRowsIsOfItsSeedAndGoesOnWhereItWas(self):
        model = self.place.init_family("llama")
        config = self.place.config(micro=1, accumulation=2)
        data = write_prepared(self.place.folder / "data", [[document] for document in documents(SEED)])

        def trained(*how):
            out = self.place.folder / "out"
            for steps, *options in how:
                self.assert_done(spillway(*self.place.arguments(config, model, data=data, steps=steps, seq=LENGTH,
                                                                out=out), *options))
            return sha256_of_model(out)

        # Nine steps are an epoch and a half.
        straight = trained((9, "--fresh", "--shuffle", 3))
        self.assertEqual(straight, trained((4, "--fresh", "--shuffle", 3), (9, "--resume", "--shuffle", 3)))
        self.assertNotEqual(straight, trained((9, "--fresh", "--shuffle", 4)))
        self.assertNotEqual(straight, trained((9, "--fresh")))

    def test_AnotherRowLengthAndATokenBeyondTheVocabularyAreRefused(self):
        model = self.place.init_family("qwen2")
        config = self.place.config()
        data = write_prepared(self.place.folder / "data", [[document] for document in documents(SEED)])
        self.assert_refused(self.place.finetune(config, model, data=data, seq=LENGTH + 1), "--seq", LENGTH)
        other = write_prepared(self.place.folder / "other", [[[(1, True), (2, True)]]], largest_token=VOCABULARY)
        self.assert_refused(self.place.finetune(config, model, data=other, seq=LENGTH), "header.json", "vocabulary")


if __name__ == "__main__":
    main()
