"""What each rank of ranks_behaviours_test.py does: DeepSpeed's behaviours of several processes, one test each, which
all ranks make in the same order. Started by torchrun as `several_ranks.py FOLDER [SUITE.CLASS.TEST…]`, it leaves
`rank<r>.json` there: what went wrong, by test; nothing where it holds."""
import json
import os
import pathlib
import sys
import traceback
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python"), str(ROOT / "tests/python")]

import torch  # noqa: E402
import torch.distributed as distributed  # noqa: E402

from behaviours import WIDTH, Behaviours, simple  # noqa: E402

SUITES = ("ranks_steps", "ranks_models", "ranks_values")
RANK, COUNT = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def batches(count=1, seed=5):
    """(x, y) of 4 rows a rank, all ranks' together."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4 * COUNT, WIDTH, generator=generator),
             torch.randint(0, WIDTH, (4 * COUNT,), generator=generator)) for _ in range(count)]


def mine(batch):
    """This rank's rows, a part of its own."""
    return tuple(each.chunk(COUNT)[RANK] for each in batch)


def everyones(value):
    """Of all ranks, in their order."""
    found = [None] * COUNT
    distributed.all_gather_object(found, value)
    return found


class Several(Behaviours):
    """A case on all ranks: its folder is one for all of them, and no rank begins before the others."""

    page = "docs/ranks_deepspeed.md"

    def setUp(self):
        self.folder = pathlib.Path(sys.argv[1], self._testMethodName)
        self.folder.mkdir(exist_ok=True)
        distributed.barrier()

    def train_mine(self, engine, whole):
        """Losses are the mean over ranks, as one process has them of all rows."""
        return [sum(everyones(loss)) / COUNT for loss in self.train(engine, [mine(each) for each in whole])]

    def assert_trains_as_one(self, network=None, reference=None, steps=3, clip=1.0, within=1e-5, **settings):
        """As PyTorch's one process does on all ranks' rows; all ranks end with the same bits. Returns the engine."""
        whole = batches(steps)
        expected, losses = self.pytorch(whole, reference or simple(), clip=clip)
        engine = self.engine_of(network, **settings)
        for here, there in zip(self.train_mine(engine, whole), losses):
            self.assertAlmostEqual(here, there, delta=within)
        self.assert_same_weights(engine, expected, within)
        self.assert_alike(engine)
        return engine

    def assert_alike(self, engine):
        weights = engine.master_weights()
        first, *_ = everyones(weights)
        self.assertEqual(first.keys(), weights.keys())
        for name, value in weights.items():
            self.assertTrue(torch.equal(first[name], value), name)

    def assert_refused_by_all(self, function, *arguments, **options):
        """On every rank, in the words that the page has for it."""
        self.assert_refused(function, *arguments, **options)
        distributed.barrier()


class _Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.said = {}

    def startTest(self, test):
        super().startTest(test)
        self.said[test._testMethodName] = ""

    def _add(self, test, error):
        self.said[getattr(test, "_testMethodName", str(test))] += "".join(traceback.format_exception(*error))

    def addError(self, test, err):
        self._add(test, err)

    def addFailure(self, test, err):
        self._add(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self._add(test, err)


def main():
    distributed.init_process_group("gloo")
    names = sys.argv[2:] or SUITES
    result = _Result()
    unittest.defaultTestLoader.loadTestsFromNames(names).run(result)
    pathlib.Path(sys.argv[1], f"rank{RANK}.json").write_text(json.dumps(result.said))
    distributed.destroy_process_group()


if __name__ == "__main__":
    sys.modules["several_ranks"] = sys.modules["__main__"]
    main()
