"""`spillway import`: a DeepSpeed checkpoint becomes a snapshot with the same bits, or is refused with the reason."""
import json
import pathlib
import shutil
import struct
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
import torch_files  # noqa: E402
from imports import STATES, ImportTest, Small  # noqa: E402
from runs import TEXT, Workplace, spillway  # noqa: E402
from torch_files import NAMES, Call, Checkpoint, Named, Storage, Tensor, floats  # noqa: E402

STEPS = 3
# The first step overflows, and uses up the hysteresis.
SCALE = {"initial_scale_power": 15, "loss_scale_window": 1, "hysteresis": 2}


def state_of(snapshot):
    """The loss scale in a snapshot's record: scale, steps without an overflow, steps skipped, hysteresis."""
    blob = bytes.fromhex(json.loads((snapshot / "spillway.json").read_text())["blob"])
    *state, form = struct.unpack("<dQQII", blob[:32])
    assert form == 1
    return tuple(state)


class ARunGoesOn(ImportTest):
    """A snapshot of Spillway's own, cut up as DeepSpeed would have saved it, must come back bit for bit."""

    def config_of(self, place):
        return place.config(dtype=self.dtype, fp16=SCALE if self.dtype == "fp16" else None)

    def train(self, dtype="bf16"):
        self.dtype = dtype
        self.model = self.place.init_model(dtype="fp32")
        # Two rows: every step sees all of the data, so that its place in them does not matter.
        self.data = self.place.folder / "data.txt"
        self.data.write_bytes(TEXT.read_bytes()[:65])
        saved = self.place.folder / "saved"
        self.assert_done(self.place.finetune(self.config_of(self.place), self.model, data=self.data, steps=STEPS,
                                             save=saved, every=STEPS, log=self.place.log))
        self.snapshot = saved / f"step-{STEPS:06}"

    def parameters(self):
        """Name -> (shape, master, exp_avg, exp_avg_sq), in the order in which PyTorch would register them."""
        arrays = {stem: torch_files.read_safetensors(self.snapshot / f"{stem}.safetensors") for stem in STATES}

        def registered(name):
            part = name.split(".")[1:]
            return (["wte", "wpe", "h", "ln_f"].index(part[0]), int(part[1]) if part[0] == "h" else 0, name)

        return {name: (shape, data, *(arrays[stem][f"{name}.{stem}"][1] for stem in STATES[1:]))
                for name, (shape, data) in sorted(arrays["model"].items(), key=lambda item: registered(item[0]))}

    def assert_same_files(self, name):
        for stem in STATES:
            wanted, found = self.snapshot / f"{stem}.safetensors", self.out / f"{stem}.safetensors"
            self.assertTrue(wanted.read_bytes() == found.read_bytes(), f"{name}: {stem}")

    def go_on(self, place, snapshot):
        """What two more steps from a snapshot leave."""
        saved = place.folder / "saved"
        run = place.finetune(self.config_of(place), self.model, data=self.data, steps=STEPS + 2, load=snapshot,
                             save=saved, every=2)
        self.assert_done(run)
        self.assertIn(f"begun with {snapshot}, step {STEPS}", run.out)
        return [path.read_bytes() for path in sorted((saved / f"step-{STEPS + 1:06}").glob("*.safetensors"))]

    def check(self, dtype, cases):
        self.train(dtype)
        parameters = self.parameters()
        wanted = self.go_on(Workplace(self.place.folder / "own"), self.snapshot)
        for name, options, changes in cases:
            with self.subTest(name):
                checkpoint = Checkpoint(parameters, step=STEPS, bf16=dtype == "bf16", **options)
                for key, value in changes.items():
                    setattr(checkpoint, key, value)
                shutil.rmtree(self.out, ignore_errors=True)
                run = self.imported(checkpoint.write(self.place.folder / name))
                self.assert_done(run)
                self.assertIn(f"step {STEPS} of", run.out)
                self.assert_same_files(name)
        self.assertTrue(self.go_on(Workplace(self.place.folder / "went-on"), self.out) == wanted)

    def test_Bf16AsStage3OfOneToThreeRanks(self):
        self.check("bf16", [
            ("one", {}, {}),
            ("groups", {"group_elements": 20000}, {}),
            ("three", {"ranks": 3, "group_elements": 20000}, {}),
            ("module", {"ranks": 2}, {"prefix": "module."}),
            ("swapped", {"ranks": 2, "group_elements": 20000, "swapped": True}, {})])

    def test_Bf16AsStages1And2(self):
        self.check("bf16", [("stage2", {"stage": 2}, {}), ("stage1", {"stage": 1, "ranks": 3}, {}),
                            ("groups", {"stage": 2, "ranks": 2, "group_elements": 50000}, {})])

    def test_Fp32(self):
        self.check("fp32", [("two", {"ranks": 2}, {})])

    def test_Fp16WithItsLossScale(self):
        self.train("fp16")
        parameters, own = self.parameters(), state_of(self.snapshot)
        scale, clean, skipped, hysteresis = own
        self.assertTrue(0 < skipped < STEPS and clean > 0 and hysteresis == 1, own)
        for name, options in (("three", {"ranks": 3}), ("stage2", {"stage": 2, "ranks": 2})):
            with self.subTest(name):
                checkpoint = Checkpoint(parameters, step=STEPS, **options)
                checkpoint.step_value = STEPS - skipped
                checkpoint.train_in_fp16(scale, 40 + clean, 39, hysteresis, skipped)
                shutil.rmtree(self.out, ignore_errors=True)
                run = self.imported(checkpoint.write(self.place.folder / name))
                self.assert_done(run)
                self.assertIn(f"step {STEPS} of", run.out)
                self.assertIn(f"Adam's step, {STEPS - skipped}; the loss scale, {scale:g}, and {skipped} skipped step",
                              run.out)
                self.assertNotIn("not carried: the engine's own count", run.out)
                self.assert_same_files(name)
                self.assertEqual(own, state_of(self.out))
        places = [Workplace(self.place.folder / name) for name in ("own", "went-on")]
        wanted, found = (self.go_on(place, snapshot) for place, snapshot in zip(places, (self.snapshot, self.out)))
        self.assertTrue(wanted == found)
        stores = [json.loads(spillway("store", place.nvme, "--json").out) for place in places]
        self.assertEqual(*([store[key] for key in ("step", "loss_scale", "skipped_steps")] for store in stores))

    def test_ARunInMemoryGoesOnFromItAsWell(self):
        self.train()
        checkpoint = Checkpoint(self.parameters(), ranks=2, step=STEPS)
        self.assert_done(self.imported(checkpoint.write(self.place.folder / "deepspeed")))
        other = Workplace(self.place.folder / "memory")
        run = other.finetune(other.config(parameters="none", states="none"), self.model, data=self.data,
                             steps=STEPS + 1, load=self.out, log=other.log)
        self.assert_done(run)
        self.assertEqual([STEPS + 1], [step["step"] for step in other.steps()])


class WhatIsSaid(Small):
    def test_WhatIsCarriedAndWhatIsNot(self):
        checkpoint = self.checkpoint(ranks=2, step=7)
        checkpoint.more = {"epoch": 3, "rng": Call(Named("numpy.random._pickle", "__generator_ctor"), "MT19937")}
        run = self.imported(self.write(checkpoint))
        self.assert_done(run)
        for words in ("step 7 of", "DeepSpeed 0.19.8, ZeRO stage 3, 2 ranks, 1 flat group",
                      "carried: fp32 master weights, exp_avg, exp_avg_sq, and Adam's step", "7 steps made; the same",
                      "lr 0.001, beta1 0.9, beta2 0.999, eps 1e-08, weight_decay 0.01", "14 rows on", "epoch, rng",
                      f"finetune --load {self.out} goes on with step 8"):
            self.assertIn(words, run.out)

    def test_JsonSaysTheSame(self):
        checkpoint = self.checkpoint(step=7)
        checkpoint.scheduler = None
        checkpoint.more = {"epoch": 3}
        run = self.imported(self.write(checkpoint), "--json", "--dtype", "fp32")
        self.assert_done(run)
        said = json.loads(run.out)
        self.assertEqual(
            {"snapshot": str(self.out), "step": 7, "tag": "global_step7", "deepspeed": "0.19.8", "stage": 3, "ranks": 1,
             "groups": 1, "swapped": 0, "parameters": len(self.parameters),
             "elements": sum(len(value[1]) // 4 for value in self.parameters.values()), "trained_in": "bf16",
             "dtype": "fp32", "optimizer_steps": 7, "global_steps": 7, "skipped_steps": 0, "samples": 14,
             "settings": [{"lr": 0.001, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}],
             "client_state": ["epoch"]}, said)
        self.change_states(checkpoint, lambda state: state["optimizer_state_dict"]["optimizer_state_dict"]
                           ["param_groups"][0].update(lr=float("nan")))
        folder = self.write(checkpoint)
        shutil.rmtree(self.out)
        run = self.imported(folder, "--json", "--dtype", "fp32")
        self.assertEqual({"beta1", "beta2", "eps", "weight_decay"}, set(json.loads(run.out)["settings"][0]))
        record = json.loads((self.out / "spillway.json").read_text())
        self.assertEqual(("fp32", 7), (record["weights"], record["step"]))

    def test_AStageIsKnownByItsNameAsPython311PicklesIt(self):
        for stage, name in ((1, "optimizer_states"), (2, "gradients"), (3, "weights")):
            checkpoint = self.checkpoint(stage=stage)
            by_name = Call(NAMES["getattr"], NAMES["ZeroStageEnum"], name)
            self.change_states(checkpoint, lambda s, it=by_name: s["optimizer_state_dict"].update(zero_stage=it))
            folder = self.write(checkpoint)
            shutil.rmtree(self.out, ignore_errors=True)
            run = self.imported(folder, "--json")
            self.assert_done(run)
            self.assertEqual(stage, json.loads(run.out)["stage"])

    def test_ATagIsTheOneThatIsAskedForOrTheLatestOrTheDirectory(self):
        folder = self.write(self.checkpoint(step=7))
        Checkpoint(self.parameters, step=9).write(self.place.folder / "other")
        shutil.move(self.place.folder / "other" / "global_step9", folder / "global_step9")
        for place, options, step in ((folder, (), 7), (folder, ("--tag", "global_step9"), 9),
                                     (folder / "global_step9", (), 9)):
            shutil.rmtree(self.out, ignore_errors=True)
            run = self.imported(place, *options)
            self.assert_done(run)
            self.assertIn(f"step {step} of", run.out)
        shutil.rmtree(self.out)
        self.refused(folder, "global_step8", "is not there", options=("--tag", "global_step8"))
        (folder / "latest").write_text("../../etc")
        self.refused(folder, "latest", "no directory beside it")
        (folder / "latest").unlink()
        self.refused(folder, "no file `latest`")

    def test_AScheduleThatIsElsewhereIsSaid(self):
        checkpoint = self.checkpoint(step=7)
        checkpoint.scheduler = {"last_batch_iteration": 4}
        run = self.imported(self.write(checkpoint))
        self.assert_done(run)
        self.assertIn("5 steps made there, but 7 by Adam", run.out)

    def test_Fp16GoesOnInAnotherType(self):
        checkpoint = self.checkpoint(step=7)
        checkpoint.train_in_fp16(1024, 9, -1, 1, 2)
        checkpoint.step_value = 5
        run = self.imported(self.write(checkpoint), "--dtype", "bf16")
        self.assert_done(run)
        for words in ("step 5 of", "not carried: loss scale 1024", "own count, 7 steps with 2 skipped"):
            self.assertIn(words, run.out)
        self.assertEqual("", json.loads((self.out / "spillway.json").read_text())["blob"])

    def test_Fp16NeedsALossScale(self):
        checkpoint = self.checkpoint()
        self.refused(self.write(checkpoint), "no loss scale to go on with; choose bf16 or fp32",
                     options=("--dtype", "fp16"))
        checkpoint.train_in_fp16(1024, 9, -1, 1, 2)
        whole = dict(checkpoint.scaler.state)
        for wrong in ({"cur_scale": 0}, {"cur_scale": float("inf")}, {"cur_scale": "1"}, {"cur_iter": -1},
                      {"cur_iter": 1 << 60}, {"last_overflow_iter": 9}, {"last_overflow_iter": -2},
                      {"last_overflow_iter": None}, {"cur_hysteresis": 0}, {"cur_hysteresis": 1 << 32}):
            with self.subTest(wrong):
                checkpoint.scaler.state = {**whole, **wrong}
                self.refused(self.write(checkpoint), "no loss scale to go on with; choose bf16 or fp32")
        for missing in whole.keys() & {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}:
            checkpoint.scaler.state = {key: value for key, value in whole.items() if key != missing}
            self.refused(self.write(checkpoint), "no loss scale to go on with; choose bf16 or fp32")
        # A static one has no history.
        checkpoint.scaler = Call(NAMES["LossScaler"], state={"cur_scale": 128.0, "dynamic": False})
        self.assert_done(self.imported(self.write(checkpoint)))
        self.assertEqual((128, 0, 2, 1), state_of(self.out))

    def test_Fp16HoldsTheWeightsOrSaysWhichItDoesNot(self):
        checkpoint = self.checkpoint()
        checkpoint.train_in_fp16(1024, 9, -1, 1, 2)
        shape, master, *states = self.parameters["transformer.ln_f.bias"]
        checkpoint.parameters["transformer.ln_f.bias"] = (shape, master[:-4] + struct.pack("<f", -70000.0), *states)
        self.refused(self.write(checkpoint), "ln_f.bias: holds -70000, and fp16 ends at 65,504; train it in bf16")

    def test_AWeightThatIsNotFiniteIsNamed(self):
        checkpoint = self.checkpoint()
        shape, master, *states = self.parameters["transformer.ln_f.bias"]
        nan = struct.pack("<f", float("nan"))
        checkpoint.parameters["transformer.ln_f.bias"] = (shape, master[:4] + nan + master[8:], *states)
        self.refused(self.write(checkpoint), "ln_f.bias: holds NaN at index 1, before any training")

    def test_CountsOfStepsThatCannotBeAreRefused(self):
        for more in ({"global_steps": 1 << 60}, {"skipped_steps": 1 << 60}):
            checkpoint = self.checkpoint()
            checkpoint.more = more
            self.refused(self.write(checkpoint), f"{1 << 60}", "copy the checkpoint again")
        checkpoint = self.checkpoint()
        checkpoint.step_value = 1 << 60
        self.refused(self.write(checkpoint), "does not say how many steps Adam has made")

    def set_steps(self, checkpoint, steps):
        """`steps`: by group, what its state says, on every rank; a list of them has one for each rank."""
        make = checkpoint.optimizer_state

        def changed(folder, rank):
            made = make(folder, rank)
            states = made["optimizer_state_dict"]["optimizer_state_dict"]["state"]
            for group, step in steps.items():
                states[group]["step"] = step[rank] if isinstance(step, list) else step
            return made

        checkpoint.optimizer_state = changed

    def test_AGroupOfFewerStepsIsASnapshotWithTheCountsOfItsParameters(self):
        checkpoint = self.checkpoint(ranks=2, group_elements=200)
        self.assertGreater(len(checkpoint.groups), 3)
        self.set_steps(checkpoint, {0: 6, 1: 2})
        run = self.imported(self.write(checkpoint))
        self.assert_done(run)
        record = json.loads((self.out / "spillway.json").read_text())
        fewer = {name: steps for group, steps in ((0, 6), (1, 2)) for name in checkpoint.groups[group]}
        self.assertEqual({name: fewer.get(name, 7) for name in self.parameters}, record["update_counts"])
        self.assertEqual((3, 7), (record["format"], record["step"]))
        self.assertIn("step 7 of", run.out)

    def test_WhereAllGroupsHaveMadeAllStepsNoCountsAreKept(self):
        self.assert_done(self.imported(self.write(self.checkpoint(ranks=2, group_elements=200))))
        record = json.loads((self.out / "spillway.json").read_text())
        self.assertEqual((2, None), (record["format"], record.get("update_counts")))

    def test_RanksThatHaveMadeOtherStepsAreRefused(self):
        checkpoint = self.checkpoint(ranks=2, group_elements=200)
        self.set_steps(checkpoint, {1: [7, 5]})
        self.refused(self.write(checkpoint), "group 1: has made 5 steps, and 7 on rank 0",
                     "copy the files of all ranks, and of no other run")

    def test_AParameterMayBeKnownByTheNameItShares(self):
        checkpoint = self.checkpoint()
        name = "transformer.wte.weight"
        checkpoint.parameters = {"lm_head.weight" if n == name else n: value for n, value in self.parameters.items()}
        checkpoint.groups = [list(checkpoint.parameters)]
        checkpoint.shared = {name: "lm_head.weight"}
        self.assert_done(self.imported(self.write(checkpoint)))
        self.assertEqual(self.parameters[name][1],
                         torch_files.read_safetensors(self.out / "model.safetensors")[name][1])

    def test_ParametersOfStages1And2MayLieApart(self):
        for stage, ranks in ((2, 1), (2, 3), (1, 2)):
            checkpoint = self.checkpoint(stage=stage, ranks=ranks, alignment=7)
            self.assertTrue(any(checkpoint.paddings(checkpoint.groups[0])))
            shutil.rmtree(self.out, ignore_errors=True)
            self.assert_done(self.imported(self.write(checkpoint)))
            for at, stem in enumerate(STATES):
                ending = "" if stem == "model" else f".{stem}"
                found = torch_files.read_safetensors(self.out / f"{stem}.safetensors")
                for name, (_, *arrays) in self.parameters.items():
                    self.assertEqual(arrays[at], found[name + ending][1], f"stage {stage} of {ranks}: {name} {stem}")
        shutil.rmtree(self.out)
        for wrong in ([], [[0]], [["1"] * len(self.parameters)], [[-1] * len(self.parameters)], 5):
            checkpoint = self.checkpoint(stage=2)
            self.change_states(checkpoint, lambda s, it=wrong: s["optimizer_state_dict"].update(
                param_alignment_paddings=it))
            with self.subTest(wrong):
                self.refused(self.write(checkpoint), "does not say how far apart")

    def test_StepsMayBeTensors(self):
        checkpoint = self.checkpoint()
        checkpoint.step_value = Tensor(Storage(struct.pack("<f", 7)), ())
        run = self.imported(self.write(checkpoint))
        self.assert_done(run)
        self.assertIn("step 7 of", run.out)

    def test_TiesOfBf16WeightsAreRoundedAsTheRunDoes(self):
        checkpoint = self.checkpoint()
        bits = [0x3f808000, 0x3f818000, 0xbf808000, 0x3f807fff]
        shape, master, *states = self.parameters["transformer.ln_f.bias"]
        master = struct.pack("<4I", *bits) + master[16:]
        checkpoint.parameters["transformer.ln_f.bias"] = (shape, master, *states)
        self.assert_done(self.imported(self.write(checkpoint)))
        used = self.place.folder / "used"
        self.assert_done(spillway("export", self.out, used, "--dtype", "bf16"))
        weights = torch_files.read_safetensors(used / "model.safetensors")["transformer.ln_f.bias"][1]
        self.assertEqual([(b + 0x8000) >> 16 for b in bits], list(struct.unpack("<4H", weights[:8])))


class WhatIsRefused(Small):
    def test_AnotherModel(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        self.model = self.place.init_model("wide", layers=1, width=16, heads=2, vocab=16, context=8)
        self.refused(folder, "has shape", "the model asks for")
        self.model = self.place.init_model("deep", layers=2, width=8, heads=2, vocab=16, context=8)
        self.refused(folder, "has no parameter", "h.1")
        self.model = self.place.init_model("small", layers=1, width=8, heads=2, vocab=16, context=8)
        checkpoint.parameters["transformer.extra"] = ((4,), *([bytes(16)] * 3))
        checkpoint.groups[0].append("transformer.extra")
        self.refused(self.write(checkpoint), "transformer.extra", "is no part of the model")

    def test_MissingRanksAndThoseOfAnotherRun(self):
        checkpoint = self.checkpoint(ranks=3)
        folder = self.write(checkpoint)
        self.file(checkpoint, "1_mp_rank_00_optim_states.pt").unlink()
        self.refused(folder, "has a file of rank 2, but none of rank 1")
        self.file(checkpoint, "2_mp_rank_00_optim_states.pt").unlink()
        self.refused(folder, "model states of 3 ranks and optimizer states of 1, none of rank 1 (…_optim_states.pt)")
        for rank in (1, 2):
            self.file(checkpoint, f"{rank}_mp_rank_00_model_states.pt").unlink()
        self.refused(folder, "is of a run of 3 ranks, and the files of 1")

    def test_KindsThatAreNotTaken(self):
        for name, words in (("zero_pp_rank_0_mp_rank_01_model_states.pt", "tensor-parallel"),
                            ("layer_00-model_states.pt", "pipeline-parallel"),
                            ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts")):
            checkpoint = self.checkpoint()
            folder = self.write(checkpoint)
            (folder / checkpoint.tag / name).write_bytes(b"")
            self.refused(folder, name, words)

        def states(state):
            return state["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]

        for changed, words in ((lambda s: states(s).update(max_exp_avg_sq=floats([1])), "max_exp_avg_sq"),
                               (lambda s: states(s).pop("exp_avg_sq"), "has no exp_avg_sq"),
                               (lambda s: states(s).pop("step"), "how many steps"),
                               (lambda s: states(s).update(exp_avg=floats([1])), "the parameters' shapes ask for"),
                               (lambda s: states(s).update(exp_avg=5), "is no tensor"),
                               (lambda s: s["optimizer_state_dict"].pop("zero_stage"), "no ZeRO stage"),
                               (lambda s: s["optimizer_state_dict"].pop("fp32_flat_groups"), "fp32_flat_groups"),
                               (lambda s: s["optimizer_state_dict"].pop("optimizer_state_dict"), "no states of the"),
                               (lambda s: s["optimizer_state_dict"]["optimizer_state_dict"].update(state={}),
                                "no step was made"),
                               (lambda s: s.pop("optimizer_state_dict"), "optimizer_state_dict")):
            checkpoint = self.checkpoint()
            self.change_states(checkpoint, changed)
            with self.subTest(words):
                self.refused(self.write(checkpoint), words)
        for key, value, words in (("mp_world_size", 2, "tensor-parallel"), ("ds_autoep_layers", [], "experts"),
                                  ("ds_config", {"optimizer": {"type": "Lion"}}, "optimizer Lion"),
                                  ("ds_config", "ds_config.json", "choose bf16 or fp32")):
            checkpoint = self.checkpoint(bf16=False)
            checkpoint.more = {key: value}
            with self.subTest(words):
                self.refused(self.write(checkpoint), words)

    def test_FrozenParametersThatTheModelTrains(self):
        checkpoint = self.checkpoint(ranks=2)
        name = "transformer.ln_f.bias"
        shape, master, *_ = checkpoint.parameters[name]
        checkpoint.groups = [[n for n in self.parameters if n != name]]
        checkpoint.more = {"frozen_param_shapes": {name: torch_files.size(*shape)},
                           "frozen_param_fragments": {name: floats([0.5] * (len(master) // 8))}}
        self.refused(self.write(checkpoint), name, "is frozen there, and trained here")

    def test_SwapFilesThatAreMissingOrShort(self):
        checkpoint = self.checkpoint(swapped=True)
        folder = self.write(checkpoint)
        swap = folder / checkpoint.tag / "offloaded_tensors" / "rank00" / "exp_avg-g0.tensor.swp"
        data = swap.read_bytes()
        swap.write_bytes(data[:-1024])
        self.refused(folder, swap, "bytes, not the")
        swap.unlink()
        self.refused(folder, swap, "is not there", "kept on NVMe")
        checkpoint.tensor = lambda *_: Tensor(Storage(b""), (0,), attributes={"ds_id": "../../../etc/passwd"})
        self.refused(self.write(checkpoint), "does not say where")

    def test_AFlippedBitIsFound(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        file = self.file(checkpoint)
        data = bytearray(file.read_bytes())
        at = data.find(self.parameters["transformer.wpe.weight"][2])
        self.assertGreater(at, 0)
        data[at + 5] ^= 4
        file.write_bytes(data)
        self.refused(folder, file, "/data/0 does not match its CRC-32")
        self.assert_done(self.imported(folder, "--no-verify"))

    def test_FilesSavedWithoutChecksumsAreTakenWhenAskedFor(self):
        checkpoint = self.checkpoint()
        folder = self.write(checkpoint)
        for file in (folder / checkpoint.tag).glob("*.pt"):
            torch_files.spoil_checksums(file)
        self.refused(folder, "does not match its CRC-32", "without verifying")
        self.assert_done(self.imported(folder, "--no-verify"))

    def test_AnExistingDirectoryIsLeftAlone(self):
        folder = self.write(self.checkpoint())
        self.out.mkdir()
        (self.out / "work").write_text("of years\n")
        self.assert_refused(self.imported(folder), self.out, "is there already")
        self.assertEqual(["work"], [p.name for p in self.out.iterdir()])


if __name__ == "__main__":
    main()
