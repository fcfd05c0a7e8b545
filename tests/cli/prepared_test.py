"""`spillway finetune` on prepared data: documents of a row do not see each other, and what is not learned counts for
nothing. The directories are written here, as docs/data.md says; tests/python/prepare_test.py looks at those that
`python -m spillway.prepare` makes."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from prepared_data import LENGTH, VOCABULARY, documents, write_prepared  # noqa: E402
from runs import CliTest, sha256_of_model, spillway  # noqa: E402
from seed import test_seed  # noqa: E402

SEED = test_seed()


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
        # Other tokens after the last one that is learned change nothing.
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

    def test_AStepWithNothingToLearnIsRefused(self):
        model = self.place.init_family("qwen2")
        learned, other = ([[(token, learns) for token in range(20)]] for learns in (True, False))
        data = write_prepared(self.place.folder / "data", [learned, other])
        refused = self.place.finetune(self.place.config(micro=1, accumulation=1), model, data=data, seq=LENGTH)
        self.assert_refused(refused, data, "no token of the 1 rows of step 2 is to be predicted")
        self.assertIn("ended after step 1; --resume continues\n", refused.out)
        self.assert_done(self.place.finetune(self.place.config(micro=1, accumulation=2), model, data=data, seq=LENGTH,
                                             resume=True))

    def test_AnotherRowLengthAndATokenBeyondTheVocabularyAreRefused(self):
        model = self.place.init_family("qwen2")
        config = self.place.config()
        data = write_prepared(self.place.folder / "data", [[document] for document in documents(SEED)])
        self.assert_refused(self.place.finetune(config, model, data=data, seq=LENGTH + 1), "--seq", LENGTH)
        other = write_prepared(self.place.folder / "other", [[[(1, True), (2, True)]]], largest_token=VOCABULARY)
        self.assert_refused(self.place.finetune(config, model, data=other, seq=LENGTH), "header.json", "vocabulary")

    def test_AnotherTokenizerIsRefused(self):
        model = self.place.init_family("qwen2")
        (pathlib.Path(model) / "tokenizer.json").write_text("{}")
        data = write_prepared(self.place.folder / "data", [[document] for document in documents(SEED)],
                              tokenizer={"name": "other", "sha256": {"tokenizer.json": "0" * 64}})
        self.assert_refused(self.place.finetune(self.place.config(), model, data=data, seq=LENGTH), "another tokenizer",
                            "spillway.prepare --model")

    def test_TextIsRefusedForAModelWithATokenizer(self):
        model = self.place.init_family("qwen2")
        (pathlib.Path(model) / "tokenizer.json").write_text("{}")
        self.assert_refused(self.place.finetune(self.place.config(), model, seq=LENGTH),
                            "is text, of which each byte is a token", "tokenizer.json", "spillway.prepare")
        self.assertEqual([], self.place.stored_files())


if __name__ == "__main__":
    main()
