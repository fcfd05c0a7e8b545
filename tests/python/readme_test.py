"""The loops that README.md and the pages for PyTorch show, as they stand there, with the configuration of
docs/pytorch.md. Those that may be run twice are run twice.
"""
import contextlib
import json
import os
import re
import subprocess

from case import ROOT, Case, main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402

import spillway  # noqa: E402
from toy_model import DEVICE  # noqa: E402
from trainer_test import VOCABULARY, examples, model  # noqa: E402

PAGES = [ROOT / "docs/pytorch.md", ROOT / "docs/trainer.md"]


def block(begin, pages=PAGES):
    """The one that has this in it."""
    found, = (text for page in pages
              for text in re.findall(r"(?<=\n```python\n).*?(?=^```$)", page.read_text(), re.DOTALL | re.MULTILINE)
              if begin in text)
    return found


def batches_of(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        ids = torch.randint(1, VOCABULARY, (2, 16), generator=generator).to(DEVICE)
        yield {"input_ids": ids, "labels": ids}


class Readme(Case):
    def setUp(self):
        super().setUp()
        shown = re.search(r"(?<=\n```json\n).*?(?=^```$)", PAGES[0].read_text(), re.DOTALL | re.MULTILINE)
        configuration = json.loads(shown.group(0))
        for place in ("offload_param", "offload_optimizer"):
            configuration["zero_optimization"][place]["nvme_path"] = str(self.folder / "store")
        (self.folder / "ds_config.json").write_text(json.dumps(configuration))
        model().save_pretrained(self.folder / "my-model")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)

    def run_block(self, begin, close, **names):
        """Returns what it has named. `close`: an expression for the engine, which ends with a script."""
        text = block(begin)
        if DEVICE == "cpu":
            text = text.replace("bf16=True", "bf16=True, use_cpu=True")
        exec(compile(text, begin, "exec"), names)
        eval(close, names).close()
        return names

    def test_ALoopRunsAndRunsAgain(self):
        for _ in range(2):
            names = self.run_block("engine.export(", "engine", batches=batches_of(8))
            self.assertEqual(2, names["report"].step)
            type(names["model"]).from_pretrained("trained")
        self.assertEqual(["ds_config.json", "my-model", "store", "trained"], sorted(os.listdir()))

    def test_ADeepSpeedLoopRunsAndRunsAgain(self):
        for run in range(2):
            names = {"warm_up": lambda step: min(1, (1 + step) / 10), "model": model(), "data": examples(8)}
            names = self.run_block("spillway.initialize(", "engine", **names)
            self.assertEqual({"epoch": 1} if run else None, names["state"])

    def test_ATrainerRunsAndRunsAgain(self):
        for _ in range(2):
            with contextlib.redirect_stdout(None):
                names = self.run_block("spillway.Trainer(", "trainer.engine", model=model(), data=examples(8))
            self.assertEqual(3, names["trainer"].state.global_step)
            type(names["model"]).from_pretrained("trained")

    def test_TheStartWithAnEngineTrains(self):
        names = {"model": model(), "batches": batches_of(8)}
        exec(compile(block("spillway.Engine(", [ROOT / "README.md"]), "README.md", "exec"), names)
        self.addCleanup(names["engine"].close)
        self.assertEqual(2, names["engine"].current_step)

    def test_ALoopLogsWhatTheReportTakes(self):
        engine = spillway.Engine(model(), "ds_config.json")
        self.addCleanup(engine.close)
        names = {"engine": engine, "batches": batches_of(8), "json": json, "tokens": 128}
        exec(compile(block("_asdict()", [ROOT / "docs/report.md"]), "report.md", "exec"), names)
        lines = [json.loads(line) for line in open("steps.jsonl")]
        self.assertEqual([1, 2], [line["step"] for line in lines])
        binary = os.environ.get("SPILLWAY_BINARY")
        if binary:
            done = subprocess.run([binary, "report", "steps.jsonl"], capture_output=True, text=True, check=False)
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            self.assertRegex(done.stdout, rf"loss, first +{lines[0]['loss']:.4f}\n")
            self.assertRegex(done.stdout, r"tokens a second +\d")

    def test_TheStartWithAnOptimizerTrains(self):
        if not hasattr(spillway, "AdamW"):
            self.skipTest("this package has no spillway.AdamW")
        text = block("spillway.AdamW(", [ROOT / "README.md"]).replace("/mnt/nvme/run1", str(self.folder / "run1"))
        trained = model()
        before = {name: value.detach().clone() for name, value in trained.named_parameters()}
        exec(compile(text, "README.md", "exec"), {"model": trained, "batches": batches_of(2)})
        for name, value in trained.named_parameters():
            self.assertFalse(torch.equal(before[name], value), name)


if __name__ == "__main__":
    main()
