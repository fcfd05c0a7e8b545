"""LoRA over a frozen base: the losses and norms of peft, the same bits wherever tensors live, a base that keeps its
bits, and adapters that come and go as peft saves them. The values were made by tools/compare_pytorch.sh --write, which
also loads what was exported with peft; tests/references/README.md."""
import json
import math
import os
import pathlib
import re
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import DEVICE, ROOT, TEXT, CliTest, sha256_of_model, spillway  # noqa: E402

STEPS = int(os.environ.get("SPILLWAY_STEPS", "20"))  # of the 20 that there are
REFERENCES = ROOT / "tests/references/lora"
LOSS = {"fp32": 1e-5, "bf16": 1e-2}
NORM = {"fp32": 1e-4, "bf16": math.inf}
LORA = {"rank": 4, "alpha": 8, "targets": ["all-linear"]}
UPPER = {**LORA, "targets": ["layers.2.self_attn.q_proj", "2.mlp.down_proj"]}  # of three layers
SCRATCH = 32 if DEVICE == "cuda" else 0  # MiB that cuBLASLt works in
LEDGER = re.compile(r"^  (?:hbm|host|nvme) .*$", re.MULTILINE)
# What a target matches in each family.
NAMES = {"llama": "q_proj", "phi3": "qkv_proj", "gpt2": "c_fc"}


def tensors_of(file):
    """By name: type, shape and bytes of a safetensors file."""
    data = file.read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    return {name: (about["dtype"], about["shape"], data[8 + length + about["data_offsets"][0]:
                                                        8 + length + about["data_offsets"][1]])
            for name, about in header.items()}


class Lora(CliTest):
    def model_of(self, family):
        if family == "gpt2":
            return self.place.init_model("gpt2", layers=3, width=64, context=64)
        return self.place.init_family(family)

    def config(self, lora=None, **more):
        section = {"lora": LORA if lora is None else lora, **more.pop("spillway_section", {})}
        return self.place.config(spillway_section=section, **more)

    def trained(self, config, model, *, out=None, **more):
        """What it leaves in --out."""
        out = out or self.place.folder / "out"
        self.assert_done(self.place.finetune(config, model, seq=48, out=out, **more))
        return out


class AsPeft(Lora):
    def check(self, family, dtype, **section):
        lines = (REFERENCES / f"{family}_{dtype}.jsonl").read_text().splitlines()
        about, *wanted = [json.loads(line) for line in lines]
        self.assertEqual(20, len(wanted), about)
        model = self.place.folder / f"{family}-{dtype}"
        self.assert_done(spillway("init-model", model, *about["init_model"].split(), cwd=ROOT))
        config = self.config(about["lora"], dtype=dtype, micro=about["batch"], accumulation=1, clip=1.0,
                             lr=about["lr"], spillway_section=section)
        self.place.log.unlink(missing_ok=True)
        self.assert_done(self.place.finetune(config, model, steps=STEPS, seq=about["seq"], log=self.place.log,
                                             fresh=True))
        for got, reference in zip(self.place.steps(), wanted[:STEPS], strict=True):
            with self.subTest(step=reference["step"], dtype=dtype):
                self.assertLessEqual(abs(got["loss"] / reference["loss"] - 1), LOSS[dtype])
                self.assertLessEqual(abs(got["grad_norm"] / reference["grad_norm"] - 1), NORM[dtype])


    def test_SlicesTrainLikePeft(self):
        for family in (*NAMES, "qwen3_upper"):
            self.check(family, "fp32", slice_tokens=128)

    def test_UpperLayersAloneTrainLikePeft(self):
        """Nothing goes back through the layers below them."""
        for dtype in ("fp32", "bf16"):
            self.check("qwen3_upper", dtype)


def trains_like_peft(family):
    def test(self):
        for dtype in ("fp32", "bf16"):
            self.check(family, dtype)
    return test


class SameBits(Lora):
    def hash_of(self, model, *, resume_at=None, lora=None, **config):
        path = self.config(lora, micro=2, accumulation=2, **config)
        fresh = config.get("states") == "nvme"
        if resume_at:
            self.assert_done(self.place.finetune(path, model, steps=resume_at, seq=48, fresh=True))
        return sha256_of_model(self.trained(path, model, steps=4, resume=bool(resume_at),
                                            fresh=fresh and not resume_at))

    def check(self, family, lora=None):
        model = self.model_of(family)
        everything = {"parameters": "none", "states": "none", "lora": lora}
        wanted = self.hash_of(model, **everything)
        self.assertEqual(wanted, self.hash_of(model, **everything, spillway_section={"threads": 1}))
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="none", states="cpu"))
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="cpu", states="cpu"))
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="nvme", states="cpu"))
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="nvme", states="nvme"))
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="nvme", states="nvme", resume_at=2))
        # All of the base has places in HBM, and is read once.
        self.assertEqual(wanted, self.hash_of(model, lora=lora, parameters="nvme", states="nvme",
                                              spillway_section={"hbm_bytes": f"{SCRATCH + 64}MiB"}))

    def test_UpperLayersAloneHaveTheSameBitsInEveryTier(self):
        self.check("qwen3", UPPER)


class Stores(Lora):
    def test_TheBaseKeepsItsBits(self):
        for family in NAMES:
            with self.subTest(family=family):
                model = self.model_of(family)
                base = tensors_of(model / "model.safetensors")
                config = self.config(dtype="fp32", micro=2, accumulation=1)
                self.assert_done(self.place.finetune(config, model, seq=48, steps=3, fresh=True))
                saved = self.place.folder / f"saved-{family}"
                self.assert_done(self.place.finetune(config, model, seq=48, steps=6, resume=True, save=saved, every=6))
                kept = tensors_of(saved / "step-000006/model.safetensors")
                self.assertEqual(base, {name: kept[name] for name in kept if not name.startswith("base_model.")})
                adapters = [name for name in kept if name.startswith("base_model.")]
                self.assertTrue(adapters)
                for name in adapters:  # B began as zeros
                    self.assertTrue(any(kept[name][2]), name)

    def test_AStoreAndASnapshotExportTheAdapterThatARunLeaves(self):
        model = self.model_of("llama")
        saved, exported = self.place.folder / "saved", self.place.folder / "exported"
        out = self.trained(self.config(), model, steps=4, save=saved, every=4)
        self.assertEqual({"adapter_config.json", "adapter_model.safetensors"}, set(os.listdir(out)))
        for source in (self.place.nvme, saved):
            with self.subTest(source=source.name):
                run = spillway("export", source, exported / source.name)
                self.assert_done(run)
                self.assertIn("the adapter of step 4", run.out)
                self.assertEqual({"adapter_config.json", "adapter_model.safetensors"},
                                 set(os.listdir(exported / source.name)))
                self.assertEqual(tensors_of(out / "adapter_model.safetensors"),
                                 tensors_of(exported / source.name / "adapter_model.safetensors"))

    def test_AnExportNamesTheBaseThatItIsTold(self):
        model = self.model_of("llama")
        self.trained(self.config(), model, steps=1)
        for base in (None, str(model), 'a "quoted"\\path'):
            with self.subTest(base=base):
                out = self.place.folder / f"exported-{len(base or '')}"
                run = spillway("export", self.place.nvme, out, *(["--base", base] if base else []))
                self.assert_done(run)
                about = json.loads((out / "adapter_config.json").read_text())
                self.assertEqual(base, about["base_model_name_or_path"])
                loads = "AutoPeftModelForCausalLM.from_pretrained(" if base else "PeftModel.from_pretrained(BASE, "
                self.assertIn(f'  {loads}"{out}")', run.out)

    def test_ABaseIsRefusedWhereThereIsNoAdapter(self):
        model, saved = self.model_of("llama"), self.place.folder / "saved"
        self.assert_done(self.place.finetune(self.place.config(), model, seq=48, steps=1, save=saved, every=1))
        for source in (self.place.nvme, saved / "step-000001"):
            with self.subTest(source=source.name):
                out = self.place.folder / "exported"
                self.assert_refused(spillway("export", source, out, "--base", model),
                                    f"--base: is of an adapter, and {source} has none; leave it out")
                self.assertFalse(out.exists())
                self.assert_done(spillway("export", source, self.place.folder / f"whole-{source.name}"))

    def test_TheAdapterHasPeftsNamesAndConfiguration(self):
        model = self.model_of("gpt2")
        out = self.trained(self.config({"rank": 3, "alpha": 6, "targets": ["c_attn", "h.1.mlp.c_proj"]}), model)
        about = json.loads((out / "adapter_config.json").read_text())
        wanted = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6, "fan_in_fan_out": True,
                  "target_modules": ["c_attn", "h.1.mlp.c_proj"], "base_model_name_or_path": str(model)}
        self.assertEqual(wanted, {key: about[key] for key in wanted})
        shapes = {name: (dtype, shape) for name, (dtype, shape, _) in
                  tensors_of(out / "adapter_model.safetensors").items()}
        prefix = "base_model.model.transformer.h"
        self.assertEqual({**{f"{prefix}.{layer}.attn.c_attn.lora_A.weight": ("F32", [3, 64]) for layer in range(3)},
                          **{f"{prefix}.{layer}.attn.c_attn.lora_B.weight": ("F32", [192, 3]) for layer in range(3)},
                          f"{prefix}.1.mlp.c_proj.lora_A.weight": ("F32", [3, 256]),
                          f"{prefix}.1.mlp.c_proj.lora_B.weight": ("F32", [64, 3])}, shapes)

    def test_ARunBeginsWithAnAdapter(self):
        """As it was: a rate of 0 leaves it, and the next run goes on from it."""
        model = self.model_of("phi3")
        first = self.trained(self.config(), model, steps=3, out=self.place.folder / "first")
        same = self.trained(self.config(lr=0), model, steps=1, adapter=first, fresh=True)
        self.assertEqual(sha256_of_model(first), sha256_of_model(same))

    def test_ASnapshotGoesOnInAnyTier(self):
        model = self.model_of("llama")
        wanted = sha256_of_model(self.trained(self.config(), model, steps=4))
        saved = self.place.folder / "saved"
        self.assert_done(self.place.finetune(self.config(), model, seq=48, steps=2, fresh=True, save=saved, every=2))
        config = self.config(parameters="none", states="none")
        self.assertEqual(wanted, sha256_of_model(self.trained(config, model, steps=4, load=saved)))

    def test_EvaluationsChangeNoBitAndKeepTheBestAdapter(self):
        held_out = self.place.folder / "held-out.txt"
        held_out.write_bytes(TEXT.read_bytes()[-2000:])
        for family in NAMES:
            with self.subTest(family=family):
                model, log, best = self.model_of(family), self.place.log, self.place.folder / f"best-{family}"
                wanted = sha256_of_model(self.trained(self.config(), model, steps=6, fresh=True))
                found = []
                for place, section in ((("nvme", "nvme"), {"hbm_bytes": "8MiB"}), (("cpu", "cpu"), {}),
                                       (("none", "none"), {})):
                    log.unlink(missing_ok=True)
                    shutil.rmtree(best, ignore_errors=True)
                    config = self.config(parameters=place[0], states=place[1], spillway_section=section)
                    out = self.trained(config, model, steps=6, evaluate=2, held_out=held_out, best=best, log=log,
                                       fresh=True)
                    self.assertEqual(wanted, sha256_of_model(out))
                    found.append(([line["eval_loss"] for line in self.place.evaluations()], sha256_of_model(best)))
                self.assertEqual(found[0], found[1])
                self.assertEqual(found[0], found[2])
                self.assertEqual(4, len(found[0][0]))
                self.assertLess(found[0][0][-1], found[0][0][0])
                self.assertEqual({"adapter_config.json", "adapter_model.safetensors"}, set(os.listdir(best)))

    def test_TheLedgerIsThatOfThePlan(self):
        for family, lora in (*((family, LORA) for family in NAMES), ("qwen3", UPPER)):
            model = self.model_of(family)
            for parameters, states, section in (("nvme", "nvme", {"hbm_bytes": f"{SCRATCH + 4}MiB"}),
                                                ("cpu", "cpu", {}), ("nvme", "cpu", {}), ("none", "none", {})):
                with self.subTest(family=family, parameters=parameters, states=states):
                    config = self.config(lora, parameters=parameters, states=states, spillway_section=section)
                    run = self.place.finetune(config, model, seq=48, steps=1, fresh=True)
                    self.assert_done(run)
                    planned = spillway("plan", "--config", config, "--model", model, "--seq", 48, "--loop", "finetune",
                                       "--device", DEVICE, "--no-probe")
                    self.assert_done(planned)
                    memory = planned.out[planned.out.index("memory, reserved"):planned.out.index("\nstep\n")]
                    self.assertEqual(LEDGER.findall(run.out), LEDGER.findall(memory))
                    self.assertGreater(len(LEDGER.findall(memory)), 3)

    def bytes_of_a_step(self, model, lora=None):
        """Of each link, as the plan has them too."""
        config = self.config(lora, micro=1, accumulation=1, spillway_section={"hbm_bytes": f"{SCRATCH + 2}MiB"})
        self.place.log.unlink(missing_ok=True)
        self.assert_done(self.place.finetune(config, model, seq=16, steps=12, log=self.place.log, fresh=True))
        lines = self.place.steps()[2:]
        planned = spillway("plan", "--config", config, "--model", model, "--seq", 16, "--loop", "finetune", "--device",
                           DEVICE, "--no-probe", "--json")
        self.assert_done(planned)
        answer = json.loads(planned.out)["step"]
        of_a_step = {}
        for key in ("nvme_read_bytes", "nvme_write_bytes", "h2d_bytes", "d2h_bytes"):
            with self.subTest(key=key):
                of_a_step[key] = sum(line[key] for line in lines) / len(lines)
                self.assertGreater(of_a_step[key], 0)
                self.assertAlmostEqual(of_a_step[key] / answer[key], 1, delta=0.02)
        return of_a_step

    def test_TheBytesAreThoseOfThePlan(self):
        """The base is fetched twice a step where HBM has no room for it, and never written."""
        model = self.place.init_model(layers=6, width=96, context=64)
        moved = self.bytes_of_a_step(model)
        base = (model / "model.safetensors").stat().st_size // 2  # in bf16
        self.assertGreater(moved["h2d_bytes"], 1.2 * base)
        self.assertLess(moved["nvme_write_bytes"], base)

    def test_LayersBelowTheLowestAdapterAreFetchedOnce(self):
        model = self.place.init_model(layers=6, width=96, context=64)
        all_layers = self.bytes_of_a_step(model, {**LORA, "targets": ["c_proj"]})
        last = self.bytes_of_a_step(model, {**LORA, "targets": ["h.5.attn.c_proj", "h.5.mlp.c_proj"]})
        layer = 2 * 12 * 96 * 96  # weights of its matrices in bf16
        self.assertLess(last["h2d_bytes"], all_layers["h2d_bytes"] - layer)


class BadInput(Lora):
    def test_ATargetThatMatchesNothing(self):
        for family, name in NAMES.items():
            model = self.model_of(family)
            run = self.place.finetune(self.config({"targets": [name, "q_projj"]}), model)
            self.assert_refused(run, "spillway.lora.targets", "\"q_projj\" matches no product of a layer", name)
        self.assertEqual([], self.place.stored_files())

    def test_KeysThatSayNothingOrTooMuch(self):
        model = self.model_of("llama")
        for lora, *words in (({"rank": 4}, "spillway.lora", "names no targets"),
                             ({"targets": []}, "spillway.lora", "names no targets"),
                             ({"targets": "q_proj"}, "spillway.lora.targets"),
                             ({"targets": ["q_proj"], "rank": 0}, "spillway.lora.rank"),
                             ({"targets": ["q_proj"], "alpha": 0}, "spillway.lora.alpha"),
                             ({"targets": ["q_proj"], "dropout": 0.1}, "spillway.lora.dropout"),
                             ({"targets": ["q_proj"], "r": 8}, "spillway.lora.r")):
            with self.subTest(lora=lora):
                run = self.place.finetune(self.config(lora), model)
                self.assertEqual(1, run.status, run.err)
                for word in words:
                    self.assertIn(word, run.err)
        self.assert_done(self.place.finetune(self.config({"targets": ["q_proj"], "dropout": 0.0}), model, steps=1))

    def test_AdaptersOfAnotherBase(self):
        llama, phi3 = self.model_of("llama"), self.model_of("phi3")
        adapter = self.trained(self.config(), llama, steps=1, out=self.place.folder / "adapter")
        for model, lora, *words in (
                (phi3, LORA, "adapter_model.safetensors", "qkv_proj.lora_A.weight is missing",
                 "the base that it is of"),
                (llama, {**LORA, "rank": 8}, "adapter_config.json", "\"r\" is 4, and spillway.lora.rank is 8"),
                (llama, {**LORA, "alpha": 4}, "adapter_config.json", "\"lora_alpha\" is 8"),
                (llama, {**LORA, "targets": ["q_proj"]}, "is of no adapter that spillway.lora.targets asks for")):
            with self.subTest(words=words):
                run = self.place.finetune(self.config(lora), model, adapter=adapter, fresh=True)
                self.assert_refused(run, *words)
        run = self.place.finetune(self.config(), llama, adapter=llama, fresh=True)
        self.assert_refused(run, "adapter_config.json", "peft's save_pretrained()")
        run = self.place.finetune(self.place.config(), llama, adapter=adapter, fresh=True)
        self.assert_refused(run, "--adapter", "no spillway.lora")

    def test_AStoreOfOtherAdapters(self):
        model = self.model_of("llama")
        self.assert_done(self.place.finetune(self.config(), model, steps=1))
        for lora, *words in (({**LORA, "alpha": 4}, "lora_alpha"), ({**LORA, "rank": 8}, "LoRA of rank 8"),
                             ({**LORA, "targets": ["q_proj"]}, "adapters"), (False, "spillway.lora", "is not set")):
            with self.subTest(lora=lora):
                config = self.config(lora) if lora else self.place.config()
                self.assert_refused(self.place.finetune(config, model, resume=True), *words)
        self.assert_done(self.place.finetune(self.place.config(), model, steps=1, fresh=True))
        self.assert_refused(self.place.finetune(self.config(), model, resume=True), "spillway.lora", "is set")

    def test_APlanOfATargetThatMatchesNothing(self):
        model = self.model_of("llama")
        run = spillway("plan", "--config", self.config({"targets": ["c_attn"]}), "--model", model, "--loop", "finetune",
                       "--no-probe")
        self.assert_refused(run, "spillway.lora.targets", "\"c_attn\" matches no product of a layer")
        run = spillway("plan", "--config", self.config(), "--model", model, "--loop", "pytorch", "--no-probe")
        self.assert_refused(run, "spillway.lora", "finetune")


for name in NAMES:
    title = name.capitalize()
    setattr(AsPeft, f"test_{title}TrainsLikePeft", trains_like_peft(name))
    setattr(SameBits, f"test_{title}HasTheSameBitsInEveryTier", lambda self, family=name: self.check(family))


if __name__ == "__main__":
    main()
