"""Where states are never changes a bit: host memory, NVMe, a process that was killed, and spillway.Engine itself."""
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time
import unittest.mock

from case import ROOT, main

import torch

import spillway
from optimizer_loops import Case, Network, groups_of, loop
from seed import test_seed
from spillway.optimizers.offloaded_states import OffloadedStates
from toy_model import batches as token_batches
from toy_model import config, model


def cycle(optimizer, **options):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 6e-2], total_steps=400, **options)


def resumed_loop(folder, steps, say=None):
    """What KILLED runs: it goes on where the store is."""
    network = Network(torch.bfloat16)
    known = (pathlib.Path(folder) / "store").exists()
    optimizer = spillway.AdamW(groups_of(network), lr=1e-2, states="nvme", nvme_path=f"{folder}/store",
                               on_existing="resume" if known else "refuse")
    schedule = cycle(optimizer, **({"last_epoch": optimizer.current_step - 1} if known else {}))
    for step in range(optimizer.current_step, steps):
        optimizer.blob = b"%d" % (step + 1)
        loop(network, optimizer, 1, first=step, schedule=schedule)
        if say is not None:
            say(optimizer.current_step, flush=True)
    return network, optimizer


KILLED = """
import sys
sys.path[:0] = {paths}
sys.argv = sys.argv[:1]
import case, optimizer_store_test
optimizer_store_test.resumed_loop({folder!r}, 400, print)
"""


class Places(Case):
    def trained(self, dtype, **where):
        network = Network(dtype)
        optimizer = self.optimizer(network, parameters=groups_of(network), **where)
        loop(network, optimizer, 5, accumulation=2, clip=None if dtype == torch.float16 else 0.1)
        moments = optimizer.state_dict()["state"].values()
        return list(network.parameters()) + [torch.clone(value) for state in moments for value in state.values()]

    def test_WhatARunBeginsWithIsOneCommit(self):
        """Adagrad's accumulators as well: who is killed after the first commit goes on with them."""
        network, whole = Network(), Network()

        def optimizer(of, **where):
            return self.optimizer(of, "Adagrad", initial_accumulator_value=0.5, **where)

        def ending(name):
            plain = getattr(OffloadedStates, name)

            def work(*arguments, **options):
                plain(*arguments, **options)
                raise KeyboardInterrupt

            return unittest.mock.patch.object(OffloadedStates, name, work)

        first = optimizer(network, **self.on_nvme())
        with ending("import_weights"), ending("import_state"), self.assertRaises(KeyboardInterrupt):
            loop(network, first, 1)
        first.close()
        again = optimizer(network, **self.on_nvme(), on_existing="resume")
        self.assertEqual(again.current_step, 0)
        loop(network, again, 2)
        loop(whole, optimizer(whole), 2)
        self.assert_same(whole.parameters(), network.parameters())

    def test_WhatIsLoadedIsCommittedWithItsParamGroups(self):
        network, other = Network(), Network()
        theirs = torch.optim.AdamW(other.parameters(), lr=0.5)
        loop(other, theirs, 2)
        optimizer = self.optimizer(network, **self.on_nvme(), lr=1e-2)
        optimizer.blob = b"mine"
        loop(network, optimizer, 1)
        optimizer.load_state_dict(theirs.state_dict())
        optimizer.close()
        again = self.optimizer(Network(), **self.on_nvme(), lr=1e-2, on_existing="resume")
        self.assertEqual((again.current_step, again.param_groups[0]["lr"], again.blob), (2, 0.5, b"mine"))

    def test_NvmeHasTheBitsOfHostMemory(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with self.subTest(dtype=dtype):
                expected = self.trained(dtype)
                self.assert_same(expected, self.trained(dtype, **self.on_nvme(f"{dtype}")))
                kept = {"nvme_path": str(self.folder / f"kept {dtype}")}  # in memory, and every step durable
                self.assert_same(expected, self.trained(dtype, **kept))

    def test_SeveralPaths(self):
        paths = [str(self.folder / name) for name in ("a", "b")]
        found = self.trained(torch.bfloat16, states="nvme", nvme_path=paths, host_bytes="64MiB")
        self.assert_same(self.trained(torch.bfloat16), found)
        self.assertTrue(all(any(pathlib.Path(path).iterdir()) for path in paths))


class Resuming(Case):
    def test_AKilledRunGoesOnWithTheSameBits(self):
        generator = random.Random(test_seed())
        paths = [str(ROOT / "tests/python"), str(ROOT / "tests"), str(ROOT / "python")]
        script = KILLED.format(paths=paths, folder=str(self.folder))
        reached = 0
        for _ in range(2):
            run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            for _ in range(generator.randrange(1, 15)):
                line = run.stdout.readline()
                if not line:
                    self.fail(run.stderr.read())
            time.sleep(generator.random() / 100)
            os.kill(run.pid, signal.SIGKILL)
            run.communicate()
            self.assertGreater(int(line), reached)
            reached = int(line)
        network, optimizer = resumed_loop(self.folder, reached + 5)
        self.made(optimizer)
        self.assertGreaterEqual(optimizer.current_step, reached)
        self.assertEqual(b"%d" % optimizer.current_step, optimizer.blob)
        expected = Network(torch.bfloat16)
        plain = self.optimizer(expected, parameters=groups_of(expected), lr=1e-2)
        loop(expected, plain, optimizer.current_step, schedule=cycle(plain))
        self.assert_same(expected.parameters(), network.parameters())

    def test_ALoadedCheckpointWinsAndThatIsSaid(self):
        network = Network()
        optimizer = self.optimizer(network, **self.on_nvme())
        loop(network, optimizer, 2)
        torch.save((network.state_dict(), optimizer.state_dict()), self.folder / "checkpoint.pt")
        loop(network, optimizer, 1, first=2)
        expected = [p.clone() for p in network.parameters()]
        loop(network, optimizer, 2, first=3)
        optimizer.close()

        network = Network()
        optimizer = self.optimizer(network, **self.on_nvme(), on_existing="resume")
        weights, state = torch.load(self.folder / "checkpoint.pt")
        network.load_state_dict(weights)
        with self.assertLogs("spillway", "WARNING") as heard:
            optimizer.load_state_dict(state)
        self.assertIn("step 2 of what is loaded takes the place of step 5 of the store", heard.output[0])
        self.assertEqual(2, optimizer.current_step)
        loop(network, optimizer, 1, first=2)
        self.assert_same(expected, network.parameters())
        optimizer.close()
        again = Network()
        self.assertEqual(3, self.optimizer(again, **self.on_nvme(), on_existing="resume").current_step)
        self.assert_same(expected, again.parameters())

    def test_ParamGroupsGoOn(self):
        """As far as they are numbers, and a commit has room for them."""
        network = Network()
        groups = [{"params": [p], "lr": torch.tensor(1e-3), "names": ["x"] * 9999} for p in network.parameters()]
        optimizer = self.optimizer(network, parameters=groups, **self.on_nvme())
        for index, group in enumerate(optimizer.param_groups):
            group.update(lr=group["lr"] * index if index else 0.5, betas=(0.8, 0.9), initial_lr=index)
        loop(network, optimizer, 1)
        optimizer.close()
        again = Network()
        groups = [{"params": [p], "lr": torch.tensor(0.0), "names": ["y"]} for p in again.parameters()]
        optimizer = self.optimizer(again, parameters=groups, **self.on_nvme(), on_existing="resume")
        self.assertEqual([0.5] + [1e-3 * i for i in range(1, 8)],
                         [round(group["lr"].item(), 7) for group in optimizer.param_groups])
        last = optimizer.param_groups[7]
        self.assertEqual(((0.8, 0.9), 7, ["y"]), (last["betas"], last["initial_lr"], last["names"]))
        with unittest.mock.patch("spillway.optimizers.kept_groups.MOST", 10), \
                self.assertLogs("spillway", "INFO") as heard:
            loop(again, optimizer, 2, first=1)
        self.assertEqual(["INFO:spillway:param_groups: are too many for a commit; a resumed run has those that it is "
                          "made with"], heard.output)
        self.assertEqual(b"", optimizer._states.blob())

    def test_OnExisting(self):
        network = Network()
        optimizer = self.optimizer(network, **self.on_nvme())
        self.assert_error("in use", spillway.AdamW, Network().parameters(), **self.on_nvme(), on_existing="replace")
        loop(network, optimizer, 1)
        optimizer.close()
        error = self.assert_error('on_existing="resume".*on_existing="replace"', spillway.AdamW,
                                  Network().parameters(), **self.on_nvme())
        self.assertEqual("exists", error.code)
        self.assert_error("store", spillway.AdamW, torch.nn.Linear(2, 2).parameters(), **self.on_nvme(),
                          on_existing="resume")
        again = Network()
        optimizer = self.optimizer(again, **self.on_nvme(), on_existing="resume")
        self.assert_same(network.parameters(), again.parameters())
        optimizer.close()
        self.assertEqual(0, self.optimizer(Network(), **self.on_nvme(), on_existing="replace").current_step)
        error = self.assert_error("none.*make the optimizer without", spillway.AdamW, Network().parameters(),
                                  **self.on_nvme("none"), on_existing="resume")
        self.assertEqual("not_found", error.code)

    def test_ANonFiniteGradientChangesNothing(self):
        for where in ({}, self.on_nvme()):
            network = Network()
            optimizer = self.optimizer(network, **where)
            loop(network, optimizer, 2)
            before = [p.clone() for p in network.parameters()]
            network.last.weight.grad[0, 0] = float("nan")
            for clip in (None, 1.0):
                optimizer.max_grad_norm = clip
                error = self.assert_error(r"param_groups\.0\.6", optimizer.step)
                self.assertEqual("non_finite", error.code)
            self.assert_same(before, network.parameters())
            self.assertEqual(2, optimizer.current_step)
            loop(network, optimizer, 1, first=2)


class Engines(Case):
    """The bits of spillway.Engine."""

    def test_AStepIsTheEngines(self):
        for dtype, precision in ((torch.float32, None), (torch.bfloat16, "bf16")):
            for clip in (0.0, 0.5):
                for stream in (False, True):
                    with self.subTest(dtype=dtype, clip=clip, stream=stream):
                        self.check(dtype, precision, clip, stream)

    def check(self, dtype, precision, clip, stream):
        values = json.loads(config(self.folder, "cpu", clipping=clip).read_text())
        values.update({precision: {"enabled": True}} if precision else {})
        networks = model(3).to(dtype).eval(), model(3).to(dtype).eval()
        engine = self.engine(networks[0], values)
        optimizer = self.optimizer(networks[1], lr=1e-3, weight_decay=0.01, model=networks[1],
                                   max_grad_norm=clip or None, stream_gradients=stream)
        for ids in token_batches(4):
            loss = engine(ids)
            engine.backward(loss)
            report = engine.step()
            optimizer.zero_grad(set_to_none=True)
            found = networks[1](ids)
            found.backward()
            optimizer.step()
            self.assertEqual(loss.item(), found.item())
            if clip:
                self.assertEqual(report.gradient_norm, optimizer.report.gradient_norm)
        expected = engine.module.state_dict()
        for name, value in networks[1].state_dict().items():
            self.assertTrue(torch.equal(expected[name], value), name)
        self.assertIn("embedding.weight", optimizer._layout.names)


if __name__ == "__main__":
    main()
