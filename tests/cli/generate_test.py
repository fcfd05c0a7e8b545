"""`spillway generate`: the tokens of transformers, the same ones wherever weights, keys and values live, and text that
a fine-tune has learned. tests/references/generated*.jsonl were made by tools/compare_pytorch.sh --write."""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from loud_model import header_of, make_adapter, make_loud, write_adapter  # noqa: E402
from report import main  # noqa: E402
from runs import BINARY, DEVICE, EMULATED, LIMIT_SECONDS, ROOT, CliTest, spillway  # noqa: E402



def references(name):
    about, *lines = [json.loads(line) for line in (ROOT / f"tests/references/{name}.jsonl").read_text().splitlines()]
    assert lines, about
    return lines


REFERENCES, ADAPTED = references("generated"), references("generated_adapters")
MOST = 8 if EMULATED else 60  # of their tokens
LOG_PROBABILITY = 1e-4  # of the reference's, whose sums have another order
SENTENCE = "the quick brown fox jumps over the lazy dog. "


class GenerateTest(CliTest):
    def generate(self, model, *more, **keywords):
        return spillway("generate", "--model", model, *more, **keywords)

    def tokens(self, model, prompt, *more):
        """New ones, of a prompt of tokens."""
        done = self.generate(model, "--ids", "--prompt", " ".join(map(str, prompt)), *more)
        self.assert_done(done)
        return [int(word) for word in done.out.split()]

    def loud(self, reference):
        model = self.place.folder / reference["model"]
        self.assert_done(spillway("init-model", model, *reference["init_model"].split(), cwd=ROOT))
        make_loud(model)
        return model

    def adapter(self, model, reference):
        folder = self.place.folder / f"{reference['model']}-adapter"
        make_adapter(model, folder, **reference["adapter"])
        return folder

    def named_adapter(self, model, reference):
        return ["--adapter", self.adapter(model, reference)] if "adapter" in reference else []

    def logged(self, model, prompt, *more):
        """Tokens, and the logarithms of their probabilities."""
        log = self.place.folder / "tokens.jsonl"
        log.unlink(missing_ok=True)
        tokens = self.tokens(model, prompt, "--past-end", "--log", log, *more)
        steps = [json.loads(line) for line in log.read_text().splitlines()][:-1]
        self.assertEqual(tokens, [step["token"] for step in steps])
        return tokens, [step["log_probability"] for step in steps]

    def config(self, **more):
        return self.place.config(**{"states": "none", "dtype": "fp32", "accumulation": 1, **more})


    def check_tokens(self, model, reference, *more):
        tokens = reference["tokens"][:MOST]
        found, logarithms = self.logged(model, reference["prompt"], "--tokens", len(tokens), *more)
        self.assertEqual(tokens, found)
        for wanted, logarithm in zip(reference["log_probabilities"][:MOST], logarithms, strict=True):
            self.assertAlmostEqual(wanted, logarithm, delta=LOG_PROBABILITY)


class Transformers(GenerateTest):
    def check(self, reference):
        model = self.loud(reference)
        wanted = reference["tokens"]
        self.check_tokens(model, reference)
        for size in (1, 7):
            self.assertEqual(wanted, self.tokens(model, reference["prompt"], "--tokens", len(wanted), "--past-end",
                                                 "--slice", size), f"slices of {size}")
        # Where its own end comes first, it ends.
        config = json.loads((model / "config.json").read_text())
        at = max(range(len(wanted)), key=lambda i: wanted.index(wanted[i]))
        for ends in (wanted[at], [299, wanted[at]]):
            (model / "config.json").write_text(json.dumps({**config, "eos_token_id": ends}))
            self.assertEqual(wanted[:wanted.index(wanted[at]) + 1],
                             self.tokens(model, reference["prompt"], "--tokens", len(wanted)))


class Tiers(GenerateTest):
    """The same bits, so the same tokens and the same probabilities, whatever is where."""

    def check(self, reference):
        model = self.loud(reference)
        adapter = self.named_adapter(model, reference)

        def run(*more):
            return self.logged(model, reference["prompt"], "--tokens", 24, *adapter, *more)

        for dtype in ("fp32", "bf16"):
            wanted = run("--config", self.config(parameters="none", dtype=dtype))
            for threads in (1, 2):
                section = {"threads": threads}
                for parameters in ("cpu", "nvme"):
                    config = self.config(parameters=parameters, dtype=dtype, spillway_section=section)
                    for cache in ("hbm", "host", "nvme"):
                        self.assertEqual(wanted, run("--config", config, "--cache", cache),
                                         (dtype, threads, parameters, cache))
        self.assertEqual([], list(self.place.nvme.iterdir()), "what was written for a run goes with it")


def checks(reference):
    return lambda self: self.check(reference)


class Peft(GenerateTest):
    def check(self, reference):
        model = self.loud(reference)
        adapter = self.adapter(model, reference)
        self.check_tokens(model, reference, "--adapter", adapter)
        self.check_tokens(model, reference, "--adapter", adapter, "--slice", 7)
        base = self.tokens(model, reference["prompt"], "--tokens", len(reference["tokens"]), "--past-end")
        self.assertNotEqual(reference["tokens"], base)
        # Beside its base, as transformers takes it.
        for file in adapter.iterdir():
            file.rename(model / file.name)
        self.check_tokens(model, reference)


class Gpu(GenerateTest):
    """The `cuda` device: the tokens that the host device gives as well, and the same bits in every tier."""

    def check(self, reference):
        model = self.loud(reference)
        adapter = self.named_adapter(model, reference)
        in_fp32 = ("--config", self.config(parameters="none"), *adapter)
        self.check_tokens(model, reference, *in_fp32)
        self.check_tokens(model, reference, *in_fp32, "--slice", 7)

        def run(parameters, cache):
            config = self.config(parameters=parameters, dtype="bf16")
            return self.logged(model, reference["prompt"], "--tokens", MOST, "--config", config, "--cache", cache,
                               *adapter)

        wanted = run("none", "hbm")
        for parameters, cache in (("cpu", "host"), ("nvme", "nvme")):
            self.assertEqual(wanted, run(parameters, cache), (parameters, cache))


for of in REFERENCES:
    title = "".join(part.capitalize() for part in of["model"].split("_"))
    setattr(Transformers, f"test_{title}GivesTheTokensOfTransformers", checks(of))
    setattr(Gpu, f"test_{title}GivesTheTokensOfTheHost", checks(of))
    setattr(Tiers, f"test_{title}GivesTheSameBitsInEveryTier", checks(of))


for of in ADAPTED:
    title = of["model"].capitalize()
    setattr(Peft, f"test_{title}GivesTheTokensOfPeft", checks(of))
    setattr(Tiers, f"test_{title}WithAnAdapterGivesTheSameBitsInEveryTier", checks(of))
    setattr(Gpu, f"test_{title}WithAnAdapterGivesTheTokensOfTheHost", checks(of))


class Sources(GenerateTest):
    def trained(self):
        """A model of bytes that has learned a sentence, and the store that it was trained in."""
        data = self.place.folder / "sentence.txt"
        data.write_text(SENTENCE * 400)
        model, out = self.place.init_model(), self.place.folder / "trained"
        config = self.place.config(dtype="bf16", micro=4, accumulation=1, clip=1.0, lr=3e-3)
        self.assert_done(self.place.finetune(config, model, data=data, steps=120, seq=48, out=out))
        return model, out

    def test_AFineTuneThatTookGoesOnWithWhatItLearned(self):
        model, out = self.trained()
        store = {file: (self.place.nvme / file).read_bytes() for file in self.place.stored_files()}
        prompt = "the quick brown fox"
        wanted = SENTENCE[len(prompt):]
        for source in (out, self.place.nvme):
            done = self.generate(source, "--prompt", prompt, "--tokens", len(wanted))
            self.assert_done(done)
            self.assertEqual(wanted + "\n", done.out)
        self.assertNotEqual(wanted + "\n", self.generate(model, "--prompt", prompt, "--tokens", len(wanted)).out)
        # The store's weights, streamed in turn; it stays as it is, but for the times of its files.
        config = self.config(dtype="bf16", nvme=self.place.folder / "other")
        done = self.generate(self.place.nvme, "--config", config, "--prompt", prompt, "--tokens", len(wanted))
        self.assertEqual(wanted + "\n", done.out)
        self.assertEqual(store, {file: (self.place.nvme / file).read_bytes() for file in self.place.stored_files()})
        self.assertEqual([], list((self.place.folder / "other").iterdir()))

    def test_AFineTunesAdapterIsTakenFromItsStoreASnapshotOrADirectory(self):
        for family in ("gpt2", "llama"):
            with self.subTest(family=family):
                model = self.loud(next(of for of in REFERENCES if of["model"] == family))
                out, saved = self.place.folder / f"{family}-out", self.place.folder / f"{family}-saved"
                lora = {"lora": {"rank": 4, "alpha": 8, "targets": ["all-linear"]}}
                config = self.place.config(dtype="fp32", lr=1e-2, micro=2, accumulation=1, spillway_section=lora)
                self.assert_done(self.place.finetune(config, model, steps=20, seq=48, out=out, save=saved, every=20,
                                                     fresh=True))
                store = {file: (self.place.nvme / file).read_bytes() for file in self.place.stored_files()}
                how = ([1, 2, 3], "--tokens", 24)
                wanted = self.logged(model, *how, "--adapter", out)
                self.assertNotEqual(wanted[1], self.logged(model, *how)[1])
                for source in (self.place.nvme, saved / "step-000020"):
                    self.assertEqual(wanted, self.logged(source, *how))
                    self.assert_refused(self.generate(source, "--adapter", out, "--prompt", "x"), "--adapter",
                                        "has adapters")
                self.assertEqual(store, {file: (self.place.nvme / file).read_bytes()
                                         for file in self.place.stored_files()})

    def test_AKeptStoreHasTheAdapterThatItWasMadeWith(self):
        reference = next(of for of in ADAPTED if of["model"] == "llama")
        model = self.loud(reference)
        adapter, store = self.adapter(model, reference), self.place.folder / "kept"
        how = ("--config", self.config(), "--tokens", 12, "--store", store)
        wanted = self.tokens(model, [1, 2, 3], *how, "--adapter", adapter)
        before = (store / "spillway.store").read_bytes()
        self.assertEqual(wanted, self.tokens(model, [1, 2, 3], *how, "--adapter", adapter))
        self.assertEqual(before, (store / "spillway.store").read_bytes())
        self.assert_refused(self.generate(model, "--ids", "--prompt", "1", *how), "kept", "of another model")

    def test_AKeptStoreIsTakenTheNextTime(self):
        model = self.loud(REFERENCES[0])
        config, store = self.config(), self.place.folder / "kept"
        how = ("--config", config, "--tokens", 12, "--store", store)
        wanted = self.tokens(model, [1, 2, 3], *how)
        before = (store / "spillway.store").read_bytes()
        self.assertEqual(wanted, self.tokens(model, [1, 2, 3], *how))
        self.assertEqual(before, (store / "spillway.store").read_bytes(), "nothing is written to it any more")
        other = self.place.init_model()
        self.assert_refused(self.generate(other, "--ids", "--prompt", "1", *how), "kept", "of another model")

    def test_WhatAConfigurationSaysOfTrainingHasNoEffect(self):
        model = self.place.init_model()
        prompt = ("--ids", "--prompt", "1 2 3", "--tokens", 4, "--past-end")
        wanted = self.tokens(model, [1, 2, 3], *prompt[3:])

        def check(config, *more):
            done = self.generate(model, *prompt, "--config", config, *more)
            self.assert_done(done)
            self.assertEqual(wanted, [int(word) for word in done.out.split()])
            return done.err

        several = {"train_batch_size": 4}  # rows of four ranks
        decay = {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}}}
        groups = [{"parameters": ["no.such.*"], "lr": 1e-4}, {"parameters": ["*.bias"], "weight_decay": 0}]
        for parameters in ("cpu", "nvme"):
            with self.subTest(parameters=parameters):
                said = check(self.config(parameters=parameters))
                check(self.config(parameters=parameters, **several))
                check(self.config(parameters=parameters, spillway_section={"sum_groups": 4}))
                check(self.config(parameters=parameters, spillway_section={"parameter_groups": groups}))
                told = check(self.config(parameters=parameters, **decay))
                self.assertEqual([], re.findall("total_num_steps|warmup", told), said)
                autos = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
                self.assertNotIn("train_", check(self.config(parameters=parameters, **autos)))
        other = self.place.folder / "other"
        rates = {"nvme_paths": [str(self.place.nvme), str(other)], "nvme_rates": [1, 2]}
        check(self.config(parameters="cpu", states="nvme", spillway_section=rates))
        check(self.config(spillway_section=rates), "--store", self.place.folder / "kept")

    def test_ASeedDrawsTheSameTokensAndAnotherOneOthers(self):
        model = self.loud(REFERENCES[0])
        how = ("--tokens", 40, "--past-end", "--temperature", 1.5, "--top-p", 0.95)
        drawn = [self.tokens(model, [1, 2, 3], *how, "--seed", seed) for seed in (1, 1, 2)]
        self.assertEqual(drawn[0], drawn[1])
        self.assertNotEqual(drawn[0], drawn[2])
        greedy = self.tokens(model, [1, 2, 3], "--tokens", 40, "--past-end")
        # Of the most likely token alone nothing can be drawn but it.
        self.assertEqual(greedy, self.tokens(model, [1, 2, 3], "--tokens", 40, "--past-end", "--top-p", 0.0))

    def test_ItStopsAtTheModelsPositions(self):
        model = self.place.init_model(context=24)
        self.assertEqual(24 - 10 + 1, len(self.tokens(model, range(10), "--tokens", 100)))

    def test_ABytePromptMayBeAnyBytesAndComesFromAFileAsWell(self):
        model = self.place.init_model()
        text = bytes(range(40, 60)) + b"\xff\xc3"
        file = self.place.folder / "prompt"
        file.write_bytes(text)
        done = subprocess.run([BINARY, "generate", "--model", model, "--prompt-file", file, "--tokens", "9"],
                              capture_output=True, timeout=LIMIT_SECONDS, check=True)
        piped = subprocess.run([BINARY, "generate", "--model", model, "--prompt-file", "-", "--tokens", "9"],
                               input=text, capture_output=True, timeout=LIMIT_SECONDS, check=True)
        self.assertEqual(bytes(self.tokens(model, text, "--tokens", 9)) + b"\n", done.stdout)
        self.assertEqual(done.stdout, piped.stdout)

    def test_CtrlCEndsItAfterATokenAndNothingIsLeft(self):
        model = self.loud(REFERENCES[1])
        config = self.config()
        run = subprocess.Popen([BINARY, "generate", "--config", config, "--model", model, "--ids", "--prompt", "1 2",
                                "--tokens", "200000", "--past-end", "--log", self.place.log], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(600):
            if self.place.log.exists() and self.place.log.read_text():
                break
            time.sleep(0.05)
        run.send_signal(signal.SIGINT)
        out, err = run.communicate(timeout=LIMIT_SECONDS)
        if len(out.split()) < 254:  # else it was done before
            self.assertEqual(130, run.returncode, err)
        self.assertEqual([], list(self.place.nvme.iterdir()))


class BadInput(GenerateTest):
    def refused(self, model, *more, words, **keywords):
        line = self.assert_refused(self.generate(model, *more, **keywords), *words)
        self.assertEqual([], list(self.place.nvme.iterdir()))
        return line

    def test_APromptThatIsNoneIsRefused(self):
        model = self.place.init_model(vocab=300)
        self.refused(self.place.folder / "none", "--prompt", "x", words=["none", "config.json", "--model wants"])
        self.refused(model, words=["--prompt", "is empty"])
        self.refused(model, "--prompt", "", words=["--prompt", "is empty"])
        self.refused(model, "--prompt", "x", words=["no tokenizer", "--tokenizer"])
        self.refused(model, "--ids", "--prompt", " , ", words=["no token"])
        self.refused(model, "--ids", "--prompt", "1 x", words=['"x" is no number'])
        self.refused(model, "--ids", "--prompt", "1 -1", words=['"-1" is no number'])
        self.refused(model, "--ids", "--prompt", "1 4294967296", words=["4294967296"])
        self.refused(model, "--ids", "--prompt", "299 300", words=["300", "vocabulary"])
        self.refused(model, "--ids", "--prompt", "1 " * 64, words=["64 tokens", "63 or less"])
        self.refused(model, "--ids", "--prompt-file", self.place.folder / "none", words=["none", "cannot be read"])
        self.refused(model, "--ids", "--prompt", "1", "--prompt-file", "x", words=["--prompt-file"])
        self.refused(model, "--ids", "--prompt", "1", "--greedy", "--top-p", 0.5, words=["--greedy"])
        self.refused(model, "--ids", "--prompt", "1", "--temperature", 0, words=["--temperature"])
        self.refused(model, "--ids", "--prompt", "1", "--tokens", 0, words=["--tokens"])
        self.refused(model, "--ids", "--prompt", "1", "--chat", words=["--chat"])
        self.refused(model, "--prompt", "x", "--chat", words=["--chat", "tokenizer"])

    def test_WithoutPythonATokenizersPromptIsRefused(self):
        model = self.place.init_model(vocab=300)
        (model / "tokenizer.json").write_text("{}")
        how = {**os.environ, "SPILLWAY_PYTHON": str(self.place.folder / "python")}
        self.refused(model, "--prompt", "x", env=how, words=["cannot be started", "--ids"])
        how = {**os.environ, "SPILLWAY_PYTHON": "false"}
        self.refused(model, "--prompt", "x", env=how, words=["process ended", "pip install"])
        how = {**os.environ, "SPILLWAY_PYTHON": sys.executable, "PYTHONPATH": str(self.place.folder)}
        (self.place.folder / "spillway").mkdir()
        self.refused(model, "--prompt", "x", env=how, words=["process ended", "spillway.prepare"])

    def test_AModelThatIsDamagedOrOfAnotherShapeIsRefused(self):
        model = self.place.init_model()
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "n_layer": 4}))
        self.refused(model, "--prompt", "x", words=["tensor", "is missing"])
        (model / "config.json").write_text(json.dumps({**config, "eos_token_id": "x"}))
        self.refused(model, "--prompt", "x", words=["eos_token_id"])
        (model / "config.json").write_text("{")
        self.refused(model, "--prompt", "x", words=["config.json"])

    def test_AnAdapterThatIsNoneOfTheModelsIsRefused(self):
        reference = next(of for of in ADAPTED if of["model"] == "llama")
        model = self.loud(reference)
        adapter = self.adapter(model, reference)
        config = json.loads((adapter / "adapter_config.json").read_text())
        self.refused(adapter, "--ids", "--prompt", "1", words=["without its base", "--adapter"])
        self.refused(model, "--adapter", self.place.folder / "none", "--prompt", "x",
                     words=["none", "adapter_config.json", "save_pretrained()"])
        other = self.place.init_family("phi3")
        self.refused(other, "--adapter", adapter, "--ids", "--prompt", "1",
                     words=["adapter_config.json", '"q_proj" matches no product of a layer', "qkv_proj"])
        for change, *words in (
                ({"target_modules": ["q_proj", "lm_head"]}, '"lm_head" matches no product'),
                ({"target_modules": ["q_proj"]}, "is of no adapter that its target_modules asks for"),
                ({"target_modules": None}, '"target_modules" names none'),
                ({"target_modules": ".*q_proj"}, '"target_modules" is a pattern'),
                ({"layers_to_transform": [0]}, '"layers_to_transform" is set'),
                ({"r": 8}, "tensor", "has shape", "the base that the adapter is of"),
                ({"peft_type": "IA3"}, '"peft_type" is "IA3"'),
                ({"use_dora": True}, '"use_dora" is true'),
                ({"modules_to_save": ["lm_head"]}, '"modules_to_save" is set'),
                ({"init_lora_weights": "pissa"}, '"init_lora_weights" is "pissa"', "save_pretrained()")):
            with self.subTest(change=change):
                (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
                self.refused(model, "--adapter", adapter, "--ids", "--prompt", "1", words=words)
        (adapter / "adapter_config.json").write_text(json.dumps(config))
        tensors = {name: (tensor["shape"], bytes(4 * tensor["shape"][0] * tensor["shape"][1]))
                   for name, tensor in header_of(adapter / "adapter_model.safetensors").items()
                   if name != "__metadata__"}
        lost = next(name for name in tensors if "up_proj" in name)
        write_adapter(adapter, {name: tensors[name] for name in tensors if name != lost}, config)
        self.refused(model, "--adapter", adapter, "--ids", "--prompt", "1",
                     words=["adapter_model.safetensors", lost, "is missing"])
        wide = {**tensors, lost: ((4, 32), bytes(4 * 4 * 32))}
        write_adapter(adapter, wide, config)
        self.refused(model, "--adapter", adapter, "--ids", "--prompt", "1", words=[lost, "has shape [4, 32]"])

    def test_WhatDoesNotFitIsRefusedBeforeAnythingIsWritten(self):
        model = self.place.init_model(layers=6, width=256)
        config = self.config(spillway_section={"hbm_bytes": "2MiB"})
        self.refused(model, "--config", config, "--prompt", "x", words=["hbm_bytes"])
        store = self.place.folder / "kept"
        self.refused(model, "--store", store, "--prompt", "x", words=["--store", "--config"])
        self.refused(model, "--config", self.config(parameters="cpu"), "--store", store, "--prompt", "x",
                     words=["--store", "offload_param"])


if DEVICE == "host":
    del Gpu
else:
    del Transformers, Peft, Tiers, Sources, BadInput

if __name__ == "__main__":
    main()
