"""The loops that python/README.md shows, as they stand there and twice each, with the configuration of README.md."""
import contextlib
import json
import os
import re

from case import ROOT, Case, main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import torch  # noqa: E402

from toy_model import DEVICE  # noqa: E402
from trainer_test import VOCABULARY, examples, model  # noqa: E402

TEXT = (ROOT / "python/README.md").read_text()


def block(begin):
    """The one that has this in it."""
    found, = (text for text in re.findall(r"(?<=\n```python\n).*?(?=^```$)", TEXT, re.DOTALL | re.MULTILINE)
              if begin in text)
    return found


class Readme(Case):
    def setUp(self):
        super().setUp()
        shown = re.search(r"(?<=\n```json\n).*?(?=^```$)", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
        configuration = json.loads(shown.group(0))
        for place in ("offload_param", "offload_optimizer"):
            configuration["zero_optimization"][place]["nvme_path"] = str(self.folder / "store")
        (self.folder / "ds_config.json").write_text(json.dumps(configuration))
        model().save_pretrained(self.folder / "my-model")
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)

    def run_block(self, begin, close, **names):
        """Returns what it has named. `close`: an expression for the engine, which ends with a script."""
        exec(compile(block(begin), f"README.md: {begin}", "exec"), names)
        eval(close, names).close()
        return names

    def test_ALoopRunsAndRunsAgain(self):
        generator = torch.Generator().manual_seed(1)
        batches = []
        for _ in range(8):
            ids = torch.randint(1, VOCABULARY, (2, 16), generator=generator).to(DEVICE)
            batches.append({"input_ids": ids, "labels": ids})
        for _ in range(2):
            names = self.run_block("engine.export(", "engine", batches=batches)
            self.assertEqual(2, names["report"].step)
            type(names["model"]).from_pretrained("trained")
        self.assertEqual(["ds_config.json", "my-model", "store", "trained"], sorted(os.listdir()))

    def test_ADeepSpeedLoopRunsAndRunsAgain(self):
        for run in range(2):
            names = {"spillway": __import__("spillway"), "LambdaLR": torch.optim.lr_scheduler.LambdaLR,
                     "warm_up": lambda step: min(1, (1 + step) / 10), "model": model(), "data": examples(8)}
            names = self.run_block("spillway.initialize(", "engine", **names)
            self.assertEqual({"epoch": 1} if run else None, names["state"])

    def test_ATrainerRunsAndRunsAgain(self):
        for _ in range(2):
            with contextlib.redirect_stdout(None):
                names = self.run_block("spillway.Trainer(", "trainer.engine", spillway=__import__("spillway"),
                                       model=model(), data=examples(8))
            self.assertEqual(3, names["trainer"].state.global_step)
            type(names["model"]).from_pretrained("trained")


if __name__ == "__main__":
    main()
