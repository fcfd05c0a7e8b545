"""Where tensors live never changes the result: the same fine-tune in many layouts exports the same files."""
import os
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import EMULATED, CliTest, hinted_budget, sha256_of_model  # noqa: E402

STEPS = int(os.environ.get("SPILLWAY_STEPS", "12"))
# Far below what any plan needs, so that the first refusal names what is needed.
STARVED = {"hbm_bytes": 65536, "host_bytes": 65536}

IN_HBM = {"parameters": "none", "states": "none"}
IN_HOST = {"parameters": "cpu", "states": "cpu"}
MIXED = {"parameters": "cpu", "states": "nvme"}
ON_NVME = {"parameters": "nvme", "states": "nvme"}
# What one run differs in: placement, budgets (None: the smallest that are accepted), keys of the section "spillway".
LAYOUTS = (
    (IN_HBM, {}, {"threads": 2}),
    (IN_HBM, {}, {"threads": 1, "tile_elements": 8192}),
    (IN_HOST, {}, {"threads": 5}),
    (MIXED, {}, {"threads": 2, "io_engine": "io_uring"}),
    (MIXED, {}, {"threads": 1, "io_engine": "threads", "tile_elements": 8192}),
    (ON_NVME, {}, {"threads": 2, "io_engine": "threads"}),
    (ON_NVME, None, {"threads": 1, "io_engine": "io_uring"}),
    (ON_NVME, None, {"threads": 2, "io_engine": "threads", "tile_elements": 8192}),
    (ON_NVME, None, {"threads": 5, "io_engine": "io_uring", "tile_elements": 8192}),
)
# Tiles of the model that setUp makes: 3 layers and the embedding.
TILES = {16384: 3 * 5 + 2, 8192: 3 * 9 + 4}
# A scale that some of the first steps overflow at, and that grows soon.
FP16 = {"initial_scale_power": 18, "loss_scale_window": 1, "hysteresis": 1}
# Of a parameter: its weight, and its states.
BYTES = {"bf16": (2, 10), "fp16": (2, 12), "fp32": (4, 8)}
MICRO_BATCHES = 4  # of a step, where activations move
PARAMETERS = 3 * (12 * 72 * 72 + 13 * 72) + (256 + 64 + 2) * 72


class SameBits(CliTest):
    accumulation = 2

    def setUp(self):
        super().setUp()
        # Layers of 72 columns hold 72 Ki elements, padding included: 5 tiles of 16 Ki, the last half full, or 9 of
        # 8 Ki. The tied embedding (256 + 64 rows) holds 25 Ki: 2 or 4 tiles. See TILES.
        self.model = self.place.init_model()

    def smallest(self, **how):
        """Budgets found by doing what each refusal says; a hint that leads nowhere fails here."""
        budgets = dict(STARVED)
        for _ in range(6):
            how["spillway_section"] = {**how["spillway_section"], **budgets}
            done = self.place.finetune(self.place.config(**how), self.model, steps=1, fresh=True)
            if done.status == 0:
                return budgets
            line = self.assert_refused(done, "_bytes")
            key, value = hinted_budget(line) or self.fail(f"no budget is named in: {line}")
            self.assertGreater(value, budgets.get(key, 0), f"following the hint makes no progress: {line}")
            budgets[key] = value
        self.fail(f"six hints followed, and still refused: {line}")

    def run_layout(self, dtype, placement, budgets, section):
        how = {"dtype": dtype, "spillway_section": dict(section), "fp16": FP16, "accumulation": self.accumulation,
               **placement}
        if budgets is None:
            budgets = self.smallest(**how)
        how["spillway_section"] = {**section, **budgets}
        out = self.place.folder / "out"
        self.place.log.unlink(missing_ok=True)
        done = self.place.finetune(self.place.config(**how), self.model, steps=STEPS, out=out, log=self.place.log,
                                   **({} if placement in (IN_HBM, IN_HOST) else {"fresh": True}))
        self.assert_done(done)
        self.assertIn(f"; {TILES[section.get('tile_elements', 16384)]} tiles\n", done.out)
        steps = self.place.steps()
        self.assertEqual(list(range(1, STEPS + 1)), [s["step"] for s in steps])
        weights, states = (PARAMETERS * size for size in BYTES[dtype])
        updates = [not step.get("skipped") for step in steps]
        for step, updated in zip(steps[1:], updates) if placement is ON_NVME else []:
            # Blocks were evicted: more weights came up than there are. And no state stayed behind: every step, from the
            # second on, reads and writes them all, in the update of the step before, unless that one was skipped.
            self.assertGreater(step["h2d_bytes"], 1.3 * weights)
            if updated:
                self.assertGreater(step["nvme_write_bytes"], weights + states)
        if placement is ON_NVME:  # all steps together: what is read ahead may count in the step before
            self.assertGreater(sum(step["nvme_read_bytes"] for step in steps),
                               1.3 * weights * STEPS + sum(updates[:-1]) * states)
        if budgets:
            self.assertIn("blocks in HBM at a time: 1 of 4 ", done.out)
        return sha256_of_model(out), [tuple(s.get(key) for key in ("loss", "grad_norm", "loss_scale", "skipped"))
                                      for s in steps]

    def check(self, dtype, layouts=LAYOUTS, **keys):
        wanted = None
        for placement, budgets, section in layouts:
            got = self.run_layout(dtype, placement, budgets, {**section, **keys})
            wanted = wanted or got
            with self.subTest(placement=placement, budgets=budgets, **section):
                self.assertEqual(wanted, got)
        return wanted

    def test_SumsInPartsTrainTheSameBitsInEveryLayout(self):
        layouts = (LAYOUTS[0], LAYOUTS[2], LAYOUTS[6])
        self.accumulation = 4
        parts, whole = (self.check("bf16", some, sum_groups=groups)
                        for some, groups in ((layouts, 2), (layouts[:1], 1)))
        self.assertNotEqual(whole[0], parts[0], "it was one sum")
        for one, other in zip(whole[1], parts[1]):
            self.assertAlmostEqual(one[0], other[0], delta=1e-3 * one[0])
        config = self.place.config(spillway_section={"sum_groups": 2})
        self.assert_done(self.place.finetune(config, self.model, steps=1, fresh=True))
        refused = self.place.finetune(self.place.config(), self.model, steps=2, resume=True)
        self.assert_refused(refused, "made with sum_groups 2 (here: 1)")
        for accumulation, groups in ((2, 3), (3, 2), (2, 4)):
            config = self.place.config(accumulation=accumulation, spillway_section={"sum_groups": groups})
            self.assert_refused(self.place.finetune(config, self.model, steps=1), "spillway.sum_groups",
                                f"{groups} parts of {accumulation} micro-batches")

    def test_EveryLayoutTrainsTheSameBitsInBf16(self):
        self.check("bf16")

    def test_EveryLayoutTrainsTheSameBitsInFp32(self):
        self.check("fp32")

    def test_EveryLayoutTrainsTheSameBitsInFp16(self):
        self.check("fp16")
        steps = self.place.steps()
        self.assertTrue(steps[0]["skipped"])
        self.assertIsNone(steps[0]["grad_norm"])
        self.assertEqual(2 ** 18, steps[0]["loss_scale"])
        self.assertFalse(all(step["skipped"] for step in steps), steps)
        for before, after in zip(steps, steps[1:]):
            self.assertEqual(before["skipped"], after["loss_scale"] == before["loss_scale"] / 2)

    def check_activations(self, dtype):
        """Block inputs of 4 micro-batches in HBM, in host memory, on NVMe; insides of no, some and all layers kept."""
        if EMULATED:
            self.skipTest("so many tokens take an emulated GPU minutes")
        how = {"dtype": dtype, "micro": 32, "accumulation": MICRO_BATCHES, **ON_NVME,
               "spillway_section": {"threads": 2}}
        inputs = 4 * MICRO_BATCHES
        some = f"activations: 2 of {inputs} in hbm at a time"
        smallest = self.smallest(**how)
        hbm = {"hbm_bytes": smallest["hbm_bytes"]}
        layouts = (({}, rf"activations: {inputs} of \d+ MiB, all in hbm\n.*: backward recomputes 3 blocks"),
                   (hbm, rf"{some}; [1-9]\d* MiB at home in host memory, 0 MiB on nvme"),
                   (smallest, rf"{some}; .* [1-9]\d* MiB on nvme"),
                   ({"hbm_bytes": self.enough_for(1, **how)}, r"1 of 3 blocks keep .*: backward recomputes 2 blocks"),
                   ({"hbm_bytes": "256MiB"}, r"3 of 3 blocks keep .*: backward recomputes no block"))
        wanted = None
        for budgets, printed in layouts:
            out = self.place.folder / "out"
            how["spillway_section"] = {"threads": 2, **budgets}
            done = self.place.finetune(self.place.config(**how), self.model, steps=min(3, STEPS - 1), out=out,
                                       fresh=True)
            self.assert_done(done)
            self.assertRegex(done.out, printed)
            got = sha256_of_model(out)
            wanted = wanted or got
            self.assertEqual(wanted, got, budgets)

    def enough_for(self, insides, **how):
        """hbm_bytes that keep the insides of so many layers: what a run without a budget takes, and a little more."""
        done = self.place.finetune(self.place.config(**how), self.model, steps=1, fresh=True)
        self.assert_done(done)
        total = int(re.search(r"hbm +total +(\d+) bytes", done.out)[1])
        return total + insides * self.INSIDES_BYTES[how["dtype"]]

    # Of every token: 15 times 72 columns (norms, q, k, v, attention, both halves of the MLP), and 8 statistics in fp32,
    # 4 of which the cuda device alone has, one for each head.
    INSIDES_BYTES = {dtype: MICRO_BATCHES * 32 * 32 * (15 * 72 * size + 32) for dtype, (size, _) in BYTES.items()}

    def test_ActivationsAnywhereTrainTheSameBitsInBf16(self):
        self.check_activations("bf16")

    def test_ActivationsAnywhereTrainTheSameBitsInFp32(self):
        self.check_activations("fp32")

    def test_ActivationsAnywhereTrainTheSameBitsInFp16(self):
        self.check_activations("fp16")

    def test_AnotherSeedTrainsOtherBits(self):
        """The comparison above can tell two models apart."""
        self.model = self.place.init_model("other", seed=2)
        other = self.run_layout("bf16", IN_HBM, {}, {"threads": 2})
        self.model = self.place.folder / "model"
        self.assertNotEqual(other, self.run_layout("bf16", IN_HBM, {}, {"threads": 2}))

    def train(self, zero, **section):
        """Hash of what a run exports whose section zero_optimization is `zero`, and what it printed."""
        zero = {k: {**v, "nvme_path": str(self.place.nvme)} if isinstance(v, dict) and v["device"] == "nvme" else v
                for k, v in zero.items()}
        config = self.place.config(zero_optimization=zero, spillway_section=section)
        out = self.place.folder / "out"
        done = self.place.finetune(config, self.model, steps=STEPS, out=out, fresh="nvme" in str(zero))
        self.assert_done(done)
        return sha256_of_model(out), done.out + done.err

    def test_StagesBelow3TrainTheSameBitsWithWeightsOnTheDevice(self):
        wanted, _ = self.train({"stage": 3, "offload_optimizer": {"device": "nvme"},
                                "offload_param": {"device": "cpu"}})
        for zero in ({"stage": 2, "offload_optimizer": {"device": "cpu"}},
                     {"stage": 1, "offload_optimizer": {"device": "cpu"}},
                     {"stage": 2, "offload_optimizer": {"device": "nvme"}}, {"stage": 0}, {"stage": 2}):
            with self.subTest(**zero):
                got, said = self.train(zero)
                self.assertEqual(wanted, got)
                self.assertNotIn("blocks in HBM at a time", said)
        config = self.place.config(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
        self.assert_refused(self.place.finetune(config, self.model), "offload_param contradicts stage 2")

    def test_KnobsOfDeepSpeedNeverChangeABitAndSayWhatTheyDo(self):
        on_nvme = {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}
        wanted, said = self.train(on_nvme)
        self.assertNotIn("instead of", said)
        for knobs, line in (
                ({"stage3_max_live_parameters": 1000}, "places of weights in HBM 2 instead of 3"),
                ({"stage3_max_reuse_distance": 0}, "visits a step that fetch their block"),
                ({"stage3_prefetch_bucket_size": 0}, "parameters fetched ahead before the next waits 0 instead of"),
                ({"stage3_param_persistence_threshold": 1e5}, "blocks with a place of their own 4 instead of 0"),
                ({"overlap_comm": False}, "known, but without effect here: zero_optimization.overlap_comm"),
                ({"sub_group_size": 1e9}, "spillway.tile_elements decides"),
                ({"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9},
                 "no limit to this plan: stage3_max_live_parameters 1000000000, stage3_max_reuse_distance 1000000000")):
            with self.subTest(**knobs):
                got, said = self.train({**on_nvme, **knobs})
                self.assertEqual(wanted, got)
                self.assertIn(line, said)
        for device, knobs, line in (("offload_optimizer", {"pipeline_read": False}, "tile buffers 2 instead of 4"),
                                    ("offload_optimizer", {"pipeline_write": False}, "tile buffers 3 instead of 4"),
                                    ("offload_optimizer", {"buffer_count": 5}, "tile buffers 5 instead of 4"),
                                    ("offload_param", {"buffer_count": 1, "buffer_size": 1e6}, "KiB of weights in"),
                                    ("offload_param", {"max_in_cpu": 1e9}, "offload_param.max_in_cpu 1000000000")):
            with self.subTest(device=device, **knobs):
                got, said = self.train({**on_nvme, device: {**on_nvme[device], **knobs}})
                self.assertEqual(wanted, got)
                self.assertIn(line, said)

    def test_ResumedRunTrainsTheSameBits(self):
        config = self.place.config(**ON_NVME)
        whole, parts = self.place.folder / "whole", self.place.folder / "parts"
        self.assert_done(self.place.finetune(config, self.model, steps=7, out=whole))
        self.assert_done(self.place.finetune(config, self.model, steps=3, fresh=True))
        self.assert_done(self.place.finetune(config, self.model, steps=7, out=parts, resume=True, log=self.place.log))
        self.assertEqual([4, 5, 6, 7], [s["step"] for s in self.place.steps()])
        self.assertEqual(sha256_of_model(whole), sha256_of_model(parts))


if __name__ == "__main__":
    main()
