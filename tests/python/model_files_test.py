"""Weights by directory: safetensors, one file or several, under the names that transformers gives them."""
import io
import json
import os
import subprocess
import sys
import unittest

from case import ROOT, Case, main, need

need("safetensors", "no package safetensors in this Python")
import safetensors.torch  # noqa: E402
import torch  # noqa: E402

import spillway  # noqa: E402
from spillway.engine.model_files import Files  # noqa: E402
from toy_model import model, train  # noqa: E402

try:
    import accelerate
    import transformers
except ImportError:
    transformers = None
FIVE = transformers is not None and int(transformers.__version__.split(".")[0]) >= 5
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def on_meta(network):
    """As to(device="meta") makes it: tied weights stay tied, and buffers keep their values."""
    moved = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = moved.setdefault(
                    id(parameter), torch.nn.Parameter(torch.empty(parameter.shape, device="meta")))
    return network


class Plain(Case):
    def saved(self, dtype=torch.float32):
        """Of the toy model, whose head is tied: in two files."""
        tensors = {name: value.to(dtype).clone() for name, value in model().state_dict().items()
                   if name != "head.weight"}
        names = sorted(tensors)
        shards = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
        place = self.folder / "model"
        place.mkdir(exist_ok=True)
        for file, own in shards.items():
            safetensors.torch.save_file({name: tensors[name] for name in own}, place / file, {"format": "pt"})
        (place / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {}, "weight_map": {name: file for file, own in shards.items() for name in own}}))
        return place, tensors

    def test_FilesTrainAsTheModelItself(self):
        place, _ = self.saved()
        with self.engine(on_meta(model()), weights=place) as engine:
            losses, _ = train(engine, 2)
        self.assertEqual(train(self.engine(model(), on_existing="replace"), 2)[0], losses)

    def test_OneFileAndAnotherTypeAreTaken(self):
        _, tensors = self.saved()
        path = self.folder / "all.safetensors"
        safetensors.torch.save_file({name: value.bfloat16() for name, value in tensors.items()}, path)
        found = self.engine(on_meta(model()), weights=str(path)).master_weights()
        for name, value in tensors.items():
            self.assertTrue(torch.equal(value.bfloat16().float(), found[name]), name)

    def test_PersistentBuffersComeAlong(self):
        network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        network[1].running_mean.fill_(0.25)
        safetensors.torch.save_file(network.state_dict(), self.folder / "model.safetensors")
        network[1].running_mean.zero_()
        made = self.engine(network.eval(), weights=self.folder)
        self.assertEqual([0.25] * 4, made.module[1].running_mean.tolist())

    def test_WhatDoesNotFitIsOneErrorBeforeAnyStore(self):
        place, tensors = self.saved()
        del tensors["norm.weight"]
        tensors["embedding.weight"] = tensors["embedding.weight"][:50]
        tensors["layers.0.up.bias"] = tensors["layers.0.up.bias"].to(torch.int32)
        path = self.folder / "wrong.safetensors"
        safetensors.torch.save_file({**tensors, "adapter": torch.ones(3)}, path)
        self.assert_error(r"wrong.safetensors: is not of this Model: the files lack norm.weight; the model has no "
                          r"adapter; of the wrong shape or type: embedding.weight is \(50, 48\) in the files and "
                          r"\(90, 48\) in the model, .*layers.0.up.bias is packed or quantized; make the model by",
                          self.engine, on_meta(model()), weights=path)
        self.assertFalse((self.folder / "store").exists())

    def test_FilesThatAreNoneAreNamed(self):
        place, _ = self.saved()
        for weights, said in ((self.folder / "no", "no: is no directory of a model; download it first"),
                              (self.folder, "has neither model.safetensors nor .*, but ds_config.json, model; name"),
                              ({}, r"weights: is a dict; give a directory with safetensors, or a function")):
            self.assert_error(said, self.engine, on_meta(model()), weights=weights)
        (self.folder / "pytorch_model.bin").write_bytes(b"")
        self.assert_error("holds pickled weights, which cannot be read tensor by tensor; save_pretrained",
                          self.engine, on_meta(model()), weights=self.folder)
        second = place / "model-00002-of-00002.safetensors"
        whole = second.read_bytes()
        second.write_bytes(whole[:len(whole) // 2])
        self.assert_error("model-00002-of-00002.safetensors: cannot be read .*download the model again",
                          self.engine, on_meta(model()), weights=place)
        second.unlink()
        self.assert_error("model-00002-of-00002.safetensors: is not there, though the index names it", self.engine,
                          on_meta(model()), weights=place)
        (place / "model.safetensors.index.json").write_text("[]")
        self.assert_error("index.json: is no index of safetensors files", Files, place)

    def test_NothingIsHeldTwice(self):
        """256 MiB of weights come into a process that takes little more memory for them than its engine's plan."""
        generator = torch.Generator().manual_seed(1)
        safetensors.torch.save_file(
            {f"{i}.weight": torch.randn(2048, 2048, generator=generator) / 45 for i in range(16)},
            self.folder / "model.safetensors")
        place = {"device": "nvme", "nvme_path": str(self.folder / "store")}
        script = f"""
import re, threading, torch, spillway
if hasattr(torch, "compile"):
    import torch._dynamo  # which every engine asks for, and which takes 80 MiB

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

def watch():
    global most
    while not done.wait(0.002):
        most = max(most, anonymous())

network = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(16)))
for layer in network:
    layer.weight = torch.nn.Parameter(torch.empty(2048, 2048, device="meta"), requires_grad=False)
before = most = anonymous()
done = threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
engine = spillway.Engine(network, {{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {{
    "stage": 3, "offload_param": {place!r}}}}}, weights={str(self.folder)!r})
with torch.no_grad():
    print(engine(torch.ones(1, 2048)).double().sum().item())
done.set()
watcher.join()
print(most - before, sum(size for tier, _, size in engine.ledger() if tier != "nvme") / 2**20)
"""
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        self.assertEqual(0, done.returncode, done.stderr)
        result, taken, planned = map(float, done.stdout.split())
        # Twelve weights of the sixteen: what allocators keep for later has been eight of them, on a busy machine.
        self.assertLess(taken, planned + 192)
        x = torch.ones(1, 2048)
        with safetensors.safe_open(self.folder / "model.safetensors", "pt") as file:
            for i in range(16):
                x = x @ file.get_tensor(f"{i}.weight").t()
        self.assertAlmostEqual(x.double().sum().item(), result, delta=1e-2)


class Mistakes(Case):
    def test_SavingAnEngineOrLoadingIntoItsModelNamesTheWay(self):
        made = self.engine(model())
        for thing in (made, made.module, made.module.layers[0]):
            self.assert_error(r"its weights are Spillway's and cannot be saved with it; torch.save\(\) takes its "
                              r"state_dict\(\), engine.export", torch.save, thing, io.BytesIO())
        for module in (made.module, made.module.layers, made.module.layers[0].up):
            self.assert_error("load_state_dict: would write .*, whose values are Spillway's; call it before the engine",
                              module.load_state_dict, module.state_dict())
        self.assert_error("config: is a NoneType; give the path of a ds_config.json", spillway.Engine, model(), None)


@unittest.skipIf(transformers is None, "no transformers and accelerate in this Python")
class OfTransformers(Case):
    def check(self, kind, configuration, whole=FIVE):
        """A model that is nowhere is what from_pretrained() would have made of its files. `whole`: buffers, too."""
        torch.manual_seed(1)
        wanted = kind(configuration).eval()
        place = self.folder / kind.__name__
        wanted.save_pretrained(place, max_shard_size="20KB")
        self.assertTrue((place / "model.safetensors.index.json").exists())
        for nowhere in [accelerate.init_empty_weights] + [lambda: torch.device("meta")] * whole:
            with nowhere():
                empty = kind(type(configuration).from_pretrained(place)).eval()
            with self.engine(empty, on_existing="replace", weights=place) as engine, torch.no_grad():
                ids = torch.arange(12).view(2, 6)
                self.assertTrue(torch.equal(wanted(ids).logits, engine(ids, use_cache=False).logits))

    def test_Llama(self):
        self.check(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE))

    def test_TiedHead(self):
        self.check(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True))

    def test_MixtralsExpertsWhichTransformers5Fuses(self):
        self.check(transformers.MixtralForCausalLM, transformers.MixtralConfig(**SHAPE, num_local_experts=3))

    @unittest.skipUnless(FIVE, "transformers before 5 has it as its files have it")
    def test_Qwen3MoEs(self):
        self.check(transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
            **SHAPE, num_experts=11, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8))

    @unittest.skipUnless(FIVE, "transformers before 5 has it as its files have it")
    def test_AnExpertThatIsMissingIsNamed(self):
        configuration = transformers.MixtralConfig(**SHAPE, num_local_experts=3)
        transformers.MixtralForCausalLM(configuration).save_pretrained(self.folder / "whole")
        path = self.folder / "whole" / "model.safetensors"
        tensors = safetensors.torch.load_file(path)
        del tensors[next(name for name in tensors if "layers.1" in name and "experts.1.w2" in name)]
        safetensors.torch.save_file(tensors, path)
        with accelerate.init_empty_weights():
            empty = transformers.MixtralForCausalLM(configuration)
        self.assert_error(r"layers\.1\.mlp\.experts\.down_proj is \(2, 32, 48\) in the files and \(3, 32, 48\) in the "
                          "model", self.engine, empty, weights=self.folder / "whole")

    def test_FilesOfABodyFitAHead(self):
        """As GPT-2's on the hub, which have no `transformer.` in front, and old buffers."""
        configuration = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        wanted = transformers.GPT2LMHeadModel(configuration).eval()
        tensors = {name: value.clone() for name, value in wanted.transformer.state_dict().items()}
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        safetensors.torch.save_file(tensors, self.folder / "model.safetensors")
        with accelerate.init_empty_weights():
            empty = transformers.GPT2LMHeadModel(configuration).eval()
        ids = torch.arange(12).view(2, 6)
        with self.engine(empty, weights=self.folder) as engine, torch.no_grad():
            self.assertTrue(torch.equal(wanted(ids).logits, engine(ids, use_cache=False).logits))

    def test_ATrainerTakesADirectory(self):
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(self.folder / "whole")
        losses = []
        for weights in (None, str(self.folder / "whole")):
            network = transformers.LlamaForCausalLM.from_pretrained(self.folder / "whole")
            if weights:
                with accelerate.init_empty_weights():
                    network = transformers.LlamaForCausalLM(network.config)
            data = [{"input_ids": row, "labels": row} for row in torch.arange(64).view(8, 8)]
            arguments = transformers.TrainingArguments(
                str(self.folder / "out"), max_steps=3, logging_steps=1, use_cpu=True, report_to=[],
                save_strategy="no", disable_tqdm=True)
            trainer = spillway.Trainer(model=network, args=arguments, train_dataset=data, weights=weights,
                                       on_existing="replace", spillway={"optimizer": {"type": "AdamW"}})
            trainer.train()
            trainer.engine.close()
            losses.append([line["loss"] for line in trainer.state.log_history if "loss" in line])
        self.assertEqual(*losses)


if __name__ == "__main__":
    main()
