"""`spillway plan` of a PyTorch loop: what it says of memory and bytes is what the package reserves and moves."""
import collections
import json
import os
import pathlib
import subprocess

from case import Case, main, need

need("transformers", "no transformers here; `pip install transformers` brings one")

import torch  # noqa: E402
import transformers  # noqa: E402

SPILLWAY = os.environ["SPILLWAY_BINARY"]


class Plan(Case):
    def check(self, hbm_bytes, **shape):
        described = transformers.LlamaConfig(hidden_size=256, intermediate_size=700, num_hidden_layers=6,
                                             num_attention_heads=4, num_key_value_heads=2, vocab_size=1000, **shape)
        pathlib.Path(self.folder, "config.json").write_text(described.to_json_string())
        config = pathlib.Path(self.folder, "ds_config.json")
        config.write_text(json.dumps({
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"},
                                  "offload_optimizer": {"device": "cpu"}},
            "spillway": {"device": "host", "hbm_bytes": hbm_bytes}}))
        command = [SPILLWAY, "plan", "--model", self.folder, "--config", config, "--seq", "32", "--no-probe", "--json"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertEqual("", said.stderr)
        plan = json.loads(said.stdout)
        self.assertEqual("pytorch", plan["model"]["loop"])

        engine = self.engine(transformers.LlamaForCausalLM(described), config)
        reserved = collections.Counter()
        for tier, _, size in engine.ledger():
            reserved[tier] += size
        for tier in reserved:  # the final norm is a block of its own there
            self.assertAlmostEqual(reserved[tier], plan["memory"][tier]["bytes"], delta=0.02 * reserved[tier], msg=tier)
        planned = {(tier, purpose) for tier in plan["memory"] for purpose in plan["memory"][tier]["purposes"]}
        self.assertEqual({entry[:2] for entry in engine.ledger()}, planned)
        ids = torch.zeros(1, 32, dtype=torch.long)
        for _ in range(9):
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            report = engine.step()
        self.assertEqual(0, report.unplanned_visits)
        for link in ("h2d_bytes", "d2h_bytes"):
            moved = getattr(report, link)
            self.assertAlmostEqual(moved, plan["step"][link], delta=0.01 * moved, msg=link)
        return plan

    def test_IsThatOfTheRun(self):
        self.check("96MiB")

    def test_IsThatOfTheRunWhereSumsOfGradientsMove(self):
        for tied in (False, True):
            with self.subTest(tied=tied):
                plan = self.check("14MiB", tie_word_embeddings=tied)
                self.assertIn("gradient accumulators (fp32)", plan["memory"]["host"]["purposes"])


if __name__ == "__main__":
    main()
