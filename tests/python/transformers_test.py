"""Models of transformers' and peft's in a plain loop: generation, gradient checkpointing, adapters."""
import importlib.util
import unittest
import unittest.mock

from case import Case as Folder, main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402
import transformers  # noqa: E402

import spillway  # noqa: E402
from toy_model import DEVICE, config  # noqa: E402
from trainer_test import VOCABULARY, Case as TrainerCase, examples, model  # noqa: E402


def train(engine, steps):
    generator = torch.Generator().manual_seed(5)
    for step in range(steps):
        torch.manual_seed(step)
        ids = torch.randint(1, VOCABULARY, (2, 16), generator=generator).to(DEVICE)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


class Loops(Folder):
    def test_Generates(self):
        engine = self.engine(model())
        train(engine, 1)
        engine.eval()
        prompt = torch.tensor([[5, 6, 7]], device=DEVICE)
        found = engine.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        alone = model()
        alone.load_state_dict(engine.state_dict())
        wanted = alone.to(DEVICE).eval().generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
        self.assertEqual(wanted.tolist(), found.tolist())

    def test_ABatchInSlicesIsTheWholeOne(self):
        """T5's bias, rotary tables and Bloom's rows of every head, with a padded row."""
        ids = torch.randint(1, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(3)).to(DEVICE)
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        bloom = transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=2)
        for make in (lambda: model(kind="t5"), lambda: model(kind="llama"),
                     lambda: transformers.BloomForCausalLM(bloom)):
            found = []
            for slices in (1, 2):
                torch.manual_seed(2)
                network = make().eval()
                engine = self.engine(network, config(self.folder, "cpu", spillway={"block_slices": slices}))
                loss = engine(input_ids=ids, attention_mask=mask, labels=ids, use_cache=False).loss
                engine.backward(loss)
                found.append((loss.item(), engine.step().gradient_norm))
                engine.close()
            for whole, parts in zip(*found):
                self.assertAlmostEqual(whole, parts, delta=2e-5 * whole)

    def test_GradientCheckpointingIsThereAlready(self):
        """Before and after the engine's making; a block's forward runs twice a step, and not a third time."""
        runs = []
        for when in ("never", "before", "behind"):
            network = model(kind="llama")
            network.config.use_cache = when != "never"  # as it mostly is: checkpointing is what leaves the cache away
            if when == "before":
                network.gradient_checkpointing_enable()
            engine = self.engine(network, on_existing="replace")
            if when == "behind":
                engine.gradient_checkpointing_enable()
            count = []
            network.model.layers[0].mlp.register_forward_hook(lambda *_: count.append(1))
            engine.train()
            train(engine, 2)
            engine.close()
            runs.append(len(count))
        self.assertEqual([4, 4, 4], runs)

    def test_GradientCheckpointingLeavesAwayTheCachesOfEveryPart(self):
        ids = torch.ones(1, 4, dtype=torch.long)
        engine = self.engine(model(kind="t5"), example={"input_ids": ids, "labels": ids})
        engine.gradient_checkpointing_enable()
        train(engine, 1)
        self.assertEqual(1, engine.current_step)

    def test_AnotherSizeOfVocabularyIsANamedErrorAndChangesNothing(self):
        for kind, name in (("gpt2", r"transformer\.wte\.weight"), ("llama", r"model\.embed_tokens\.weight")):
            engine = self.engine(model(kind=kind), on_existing="replace")
            train(engine, 1)
            embeddings, size = engine.module.get_input_embeddings(), engine.module.num_parameters()
            for new in (VOCABULARY + 4, VOCABULARY - 4):
                self.assert_error(f"^{name}: was written to outside of its block", engine.resize_token_embeddings, new)
            self.assertIs(embeddings, engine.module.get_input_embeddings())
            self.assertEqual((size, VOCABULARY), (engine.module.num_parameters(), embeddings.weight.shape[0]))
            train(engine, 1)
            self.assertEqual(2, engine.current_step)
            engine.close()

    def test_AnExportGeneratesAsTheModelDid(self):
        """By what the model's files say of it: where a text ends, and with a cache."""
        for kind in ("llama", "t5"):
            network = model(kind=kind)
            network.config.use_cache = True
            network.generation_config.eos_token_id, network.generation_config.max_length = [5, 7], 23
            ids = torch.ones(1, 4, dtype=torch.long)
            engine = self.engine(network, example={"input_ids": ids, "labels": ids}, on_existing="replace")
            engine.gradient_checkpointing_enable()  # which leaves the cache away
            self.assertFalse(network.config.use_cache)
            engine.export(self.folder / kind)
            loaded = type(network).from_pretrained(self.folder / kind)
            self.assertEqual(([5, 7], 23), (loaded.generation_config.eos_token_id, loaded.generation_config.max_length))
            self.assertTrue(loaded.config.use_cache)
            self.assertFalse(network.config.use_cache)
            engine.close()

    def test_WhatIsAskedOfAModelWithoutItsValues(self):
        engine, alone = self.engine(model()), model()
        for ask in (lambda m: m.num_parameters(), lambda m: m.num_parameters(only_trainable=True), lambda m: m.dtype,
                    lambda m: m.get_memory_footprint(), lambda m: m.device.type):
            self.assertEqual(ask(alone.to(DEVICE)), ask(engine.module))
        engine.module.tie_weights()
        self.assertIs(engine.module.transformer.wte.weight, engine.module.lm_head.weight)
        train(engine, 1)

    def test_AnExportOfAScalarIsWhatTheModelLoads(self):
        """CLIP's temperature has no dimension."""
        tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}

        def clip():
            torch.manual_seed(1)
            return transformers.CLIPModel(transformers.CLIPConfig(
                text_config=tower | {"vocab_size": 100, "max_position_embeddings": 16, "eos_token_id": 2},
                vision_config=tower | {"image_size": 16, "patch_size": 8}, projection_dim=16))

        network = clip()
        engine = self.engine(network, blocks=[network])
        ids = torch.tensor([[5, 6, 2], [7, 8, 2]], device=DEVICE)
        pictures = torch.rand(2, 3, 16, 16).to(DEVICE)
        engine.backward(engine(input_ids=ids, pixel_values=pictures, return_loss=True).loss)
        engine.step()
        engine.export(self.folder / "out")
        loaded = transformers.CLIPModel.from_pretrained(self.folder / "out")
        weights = engine.master_weights()
        for name, value in loaded.named_parameters():
            self.assertTrue(torch.equal(weights[name], value.float()), name)
        engine.save(self.folder / "saved")
        engine.close()
        network = clip()
        engine = self.engine(network, blocks=[network], on_existing="replace", snapshot=self.folder / "saved")
        self.assertTrue(torch.equal(weights["logit_scale"], engine.master_weights()["logit_scale"]))


class Trainers(TrainerCase):
    def test_WhatIsSavedHasTheCacheThatTransformersSaves(self):
        """The model's, which newer versions' trainers leave away by themselves."""
        def caching():
            network = model(kind="llama")
            network.config.use_cache = True
            return network

        self.plain(caching()).save_model(str(self.folder / "theirs"))
        wanted = transformers.AutoConfig.from_pretrained(self.folder / "theirs").use_cache
        trainer = self.trainer(caching(), max_steps=2, save_strategy="steps", save_steps=2)
        trainer.train()
        self.assertFalse(trainer.model.config.use_cache)
        trainer.save_model(str(self.folder / "saved"))
        trainer.engine.export(self.folder / "exported")
        for name in ("saved", "exported", "out/checkpoint-2"):
            found = transformers.AutoConfig.from_pretrained(self.folder / name).use_cache
            self.assertEqual(wanted, found, name)

    def test_BeamSearchInEvaluationIsAsTransformersDoesIt(self):
        example = {name: values[None] for name, values in examples(1)[0].items()}
        results = []
        for bases, options in (((spillway.trainer.Mixin,), {"spillway": self.configuration(), "example": example}),
                               ((), {})):
            transformers.set_seed(7)
            trainer = type("Translating", (*bases, transformers.Seq2SeqTrainer), {})(
                model=model(kind="t5"), train_dataset=examples(8), eval_dataset=examples(5, seed=6), **options,
                compute_metrics=lambda found: {"sum": int(found.predictions.sum())},
                args=transformers.Seq2SeqTrainingArguments(
                    str(self.folder / "out"), per_device_train_batch_size=2, per_device_eval_batch_size=2, max_steps=4,
                    learning_rate=1e-2, eval_strategy="steps", eval_steps=2, save_strategy="no", report_to=[],
                    predict_with_generate=True, generation_num_beams=3, generation_max_length=12, disable_tqdm=True,
                    use_cpu=DEVICE == "cpu"))
            queries = []  # the lengths of what the decoder is given: with its cache, of one token each
            trainer.model.decoder.block[1].layer[0].register_forward_pre_hook(
                lambda _, given: None if torch.is_grad_enabled() else queries.append(given[0].shape[1]))
            trainer.train()
            found = trainer.predict(trainer.eval_dataset)
            results.append(([[entry["eval_sum"] for entry in trainer.state.log_history if "eval_sum" in entry],
                             found.predictions.tolist(), queries[len(bases):]],  # the first is the example's
                            found.metrics["test_loss"]))
            if bases:
                trainer.engine.close()
        (ours, loss), (theirs, wanted) = results
        self.assertEqual(theirs, ours)
        self.assertAlmostEqual(wanted, loss, delta=2e-6 * wanted)
        self.assertEqual({1, 16}, {*ours[2]})

    def test_ALossMayReadTheHeadOutside(self):
        class Chunks:  # as TRL's losses, which cut logits into chunks
            def compute_loss(self, model, inputs, return_outputs=False, **_):
                labels = inputs["labels"]
                hidden = model.transformer(inputs["input_ids"]).last_hidden_state
                logits = torch.nn.functional.linear(hidden, model.lm_head.weight)
                loss = torch.nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
                return (loss, {"loss": loss}) if return_outputs else loss

        losses = []
        for make, base in ((self.trainer, spillway.Trainer), (self.plain, transformers.Trainer)):
            trainer = make(kind=type("Chunked", (Chunks, base), {}))  # which seeds
            losses.append((trainer.evaluate()["eval_loss"], trainer.train().training_loss))
        for one, other in zip(*losses):
            self.assertAlmostEqual(one, other, delta=1e-5 * one)


@unittest.skipUnless(importlib.util.find_spec("transformers.core_model_loading"),
                     "this transformers reads models as their files have them; from 5 on it renames and fuses")
class FileNames(Folder):
    def test_AreThoseThatTransformersSaves(self):
        """Experts that are one tensor in memory and many in files, and two in memory that are one there."""
        def mixtral():
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(
                vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
                num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False))

        def dino():
            return transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(
                hidden_size=32, num_hidden_layers=2, num_attention_heads=2, use_swiglu_ffn=True, image_size=28,
                patch_size=14, drop_path_rate=0.0))

        for make, inputs, name in (
                (mixtral, {"input_ids": torch.arange(8)[None], "labels": torch.arange(8)[None]},
                 "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
                (dino, {"pixel_values": torch.ones(1, 3, 28, 28)}, "encoder.layer.0.mlp.weights_in.weight")):
            with self.subTest(make.__name__):
                torch.manual_seed(1)
                network = make()
                folder = self.folder / make.__name__
                network.save_pretrained(folder / "theirs")
                loaded = type(network).from_pretrained(folder / "theirs")
                engine = self.engine(loaded, config(folder), blocks=None if make is mixtral else [loaded])
                engine.export(folder / "ours")
                theirs, ours = (self.read(folder / each) for each in ("theirs", "ours"))
                self.assertEqual({*theirs}, {*ours})
                self.assertIn(name, ours)
                for each, value in theirs.items():
                    self.assertTrue(torch.equal(value, ours[each]), each)
                out = engine(**inputs)
                engine.backward(out.loss if make is mixtral else out.last_hidden_state.pow(2).mean())
                engine.step()
                engine.export(folder / "ours", replace=True)
                again = type(network).from_pretrained(folder / "ours")
                weights = engine.master_weights()
                for each, value in again.named_parameters():
                    self.assertTrue(torch.equal(weights[each], value.detach()), each)

    def read(self, folder):
        import safetensors.torch
        return safetensors.torch.load_file(folder / "model.safetensors")


@unittest.skipUnless(importlib.util.find_spec("peft"), "no peft in this Python")
class Adapters(Folder):
    def adapted(self, **more):
        import peft
        return peft.get_peft_model(model(1, "llama"), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], **more))

    def test_AreExportedAsPeftSavesThem(self):
        import peft
        for name, more in (("adapter", {}), ("with-head", {"modules_to_save": ["lm_head"]})):
            network, out = self.adapted(**more), self.folder / name
            engine = self.engine(network, on_existing="replace")
            train(engine, 2)
            engine.export(out)
            weights = engine.master_weights()
            self.assertEqual([], [path.name for path in out.iterdir() if path.name in ("config.json",
                                                                                       "model.safetensors")])
            loaded = peft.PeftModel.from_pretrained(model(1, "llama"), str(out))
            trained = 0
            for parameter, value in loaded.named_parameters():
                self.assertTrue(torch.equal(weights[parameter], value.cpu().float()), parameter)
                trained += "lora_B" in parameter and value.abs().max().item() > 0
            self.assertEqual(4, trained)
            error = self.assert_error("holds an adapter.*this time it was exported to", engine.export, out)
            self.assertEqual("exists", error.code)
            self.assertTrue((self.folder / f"{name}-2/adapter_config.json").exists())
            engine.export(out, replace=True)
            engine.close()

    def test_AMergeIsANamedErrorAndAdaptersCanBeSwitchedOff(self):
        engine, ids = self.engine(self.adapted(), on_existing="replace"), torch.ones(1, 4, dtype=torch.long).to(DEVICE)
        train(engine, 2)
        for merge in (engine.module.merge_adapter, engine.module.merge_and_unload):
            self.assert_error(r"q_proj\..*weight: was written to outside of its block", merge)
        trained, total = engine.module.get_nb_trainable_parameters()
        self.assertLess(trained, total)
        with torch.no_grad(), engine.module.disable_adapter():
            found = engine(input_ids=ids).logits
        self.assertTrue(torch.equal(model(1, "llama").to(DEVICE).train()(input_ids=ids).logits, found))
        train(engine, 1)
        self.assertEqual(3, engine.current_step)


if __name__ == "__main__":
    main()
