"""state_dict(): torch.optim loads ours and we load its, nothing is read before somebody looks, and save() is exact."""
import copy
import gc
import os
import pathlib
import subprocess
import sys
import unittest.mock

from case import ROOT, main

import torch

import spillway
from optimizer_loops import Case, Network, groups_of, loop
from spillway.optimizers.states import PREFIX, StateTensor


def move_to_device(state, device):
    """As accelerate.optimizer has it."""
    if isinstance(state, (list, tuple)):
        return type(state)(move_to_device(one, device) for one in state)
    if isinstance(state, dict):
        return type(state)({key: move_to_device(value, device) for key, value in state.items()})
    return state.to(device) if isinstance(state, torch.Tensor) else state


class Interchange(Case):
    def saved(self, optimizer):
        torch.save(optimizer.state_dict(), self.folder / "optimizer.pt")
        return torch.load(self.folder / "optimizer.pt")

    def test_TorchOptimGoesOnWithOurs(self):
        for kind, options in (("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("Adagrad", {}),
                              ("SGD", {"lr": 0.1, "momentum": 0.9})):
            for where in ({}, self.on_nvme(kind)):
                with self.subTest(kind=kind, **where):
                    expected, network = Network(), Network()
                    theirs = getattr(torch.optim, kind)(expected.parameters(), **options)
                    loop(expected, theirs, 6)
                    ours = self.optimizer(network, kind, **options, **where)
                    loop(network, ours, 3)
                    state = self.saved(ours)
                    self.assertEqual({torch.Tensor}, {type(v) for s in state["state"].values() for v in s.values()})
                    theirs = getattr(torch.optim, kind)(network.parameters(), lr=1.0)
                    theirs.load_state_dict(state)
                    loop(network, theirs, 3, first=3)
                    self.assert_near(expected.parameters(), network.parameters(), 1e-5)

    def test_WeGoOnWithTorchOptims(self):
        for kind, options in (("AdamW", {}), ("Adam", {"weight_decay": 0.1}), ("Adagrad", {"lr_decay": 0.1}),
                              ("SGD", {"lr": 0.1, "momentum": 0.9}), ("SGD", {"lr": 0.1})):
            for where in ({}, self.on_nvme(f"{kind}{len(options)}")):
                with self.subTest(kind=kind, **where):
                    expected, network = Network(), Network()
                    theirs = getattr(torch.optim, kind)(expected.parameters(), **options)
                    loop(expected, theirs, 3)
                    network.load_state_dict(expected.state_dict())
                    ours = self.optimizer(network, kind, **where)
                    ours.load_state_dict(self.saved(theirs))
                    for optimizer, trained in ((theirs, expected), (ours, network)):
                        loop(trained, optimizer, 3, first=3)
                    self.assert_near(expected.parameters(), network.parameters(), 1e-5)
                    self.assertEqual({**theirs.param_groups[0], "params": 0}, {**ours.param_groups[0], "params": 0})

    def test_TwoOfOursExchangeStates(self):
        networks = Network(), Network()
        first, second = self.optimizer(networks[0], **self.on_nvme()), self.optimizer(networks[1])
        loop(networks[0], first, 3)
        networks[1].load_state_dict(networks[0].state_dict())
        second.load_state_dict(first.state_dict())
        for network, optimizer in zip(networks, (first, second)):
            loop(network, optimizer, 2, first=3)
        self.assert_same(networks[0].parameters(), networks[1].parameters())  # fp32 weights have nothing finer

    def test_StatesBeginWhereTorchOptimsDo(self):
        for kind, options in (("AdamW", {}), ("SGD", {"lr": 0.1, "momentum": 0.9}),
                              ("Adagrad", {"initial_accumulator_value": 0.5})):
            theirs = getattr(torch.optim, kind)(Network().parameters(), **options).state_dict()
            found = self.optimizer(Network(), kind, **options).state_dict()
            self.assertEqual(list(theirs["state"]), list(found["state"]))
            for place, state in theirs["state"].items():
                self.assertEqual(list(state), list(found["state"][place]))
                self.assert_same(state.values(), found["state"][place].values())

    def test_RoundingIsSaid(self):
        network = Network(torch.bfloat16)
        optimizer = self.optimizer(network)
        loop(network, optimizer, 2)
        with self.assertLogs("spillway", "INFO") as heard:
            state = optimizer.state_dict()
            optimizer.state_dict()
        self.assertEqual(1, len(heard.output))
        self.assertIn("rounds to torch.bfloat16", heard.output[0])
        self.assertEqual(torch.float32, state["state"][0]["exp_avg"].dtype)


class Looking(Case):
    """Values are read when somebody looks."""

    def setUp(self):
        super().setUp()
        self.network = Network()
        self.trained = self.optimizer(self.network, **self.on_nvme())
        loop(self.network, self.trained, 3)

    def nothing_is_read(self):
        return unittest.mock.patch.object(self.trained._states, "export_state", side_effect=AssertionError("was read"))

    def test_WhatWouldChangeACopyAloneIsRefused(self):
        parameter = next(self.network.parameters())
        shown = self.trained.state[parameter]["exp_avg"]
        mask = torch.ones(shown.shape)
        for call, name in ((shown.zero_, "zero_"), (lambda: shown.mul_(mask), "mul_"),
                           (lambda: torch.mul(mask, mask, out=shown), "mul"),
                           (lambda: torch._foreach_mul_([shown], 2), "_foreach_mul_"),
                           (lambda: self.trained.state[parameter]["step"].fill_(7), "fill_")):
            self.assert_error(f"^{name}: would change a copy of an optimizer's state in place", call)
        self.assertTrue(torch.equal(shown.clone(), mask.copy_(shown)))
        self.assertTrue(shown.clone().zero_().eq(0).all())
        state = self.trained.state_dict()
        state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].clone().zero_()
        self.trained.load_state_dict(state)
        self.assertTrue(self.trained.state[parameter]["exp_avg"].eq(0).all())

    def test_AcceleratesRoundTripMovesNothing(self):
        before = self.trained.current_step
        with self.nothing_is_read(), unittest.mock.patch.object(self.trained._states, "import_state",
                                                               side_effect=AssertionError("was written")):
            for device in ("cpu", "meta"):  # the latter for any that is not here
                moved = move_to_device(self.trained.state_dict(), torch.device(device))
                self.assertEqual(device, moved["state"][0]["exp_avg"].device.type)
                self.trained.load_state_dict(moved)
        self.assertEqual(before, self.trained.current_step)
        loop(self.network, self.trained, 1, first=3)

    def test_UntilThenTheyAreTheLastSteps(self):
        state = self.trained.state_dict()["state"][0]
        loop(self.network, self.trained, 1, first=3)
        self.assertEqual(4, state["step"])
        seen = state["exp_avg"].clone()
        loop(self.network, self.trained, 1, first=4)
        self.assertTrue(torch.equal(seen, state["exp_avg"]))  # and from then on what they were
        self.assertEqual(4, state["step"])
        self.assertFalse(torch.equal(seen, self.trained.state_dict()["state"][0]["exp_avg"]))
        self.assert_error("read in part .* call state_dict", state["exp_avg_sq"].sum)

    def test_TheyAreTensors(self):
        value = self.trained.state_dict()["state"][0]["exp_avg_sq"]
        self.assertIsInstance(value, StateTensor)
        plain = copy.deepcopy(value)
        self.assertIs(torch.Tensor, type(plain))
        self.assertEqual((value.shape, value.dtype, value.device), (plain.shape, plain.dtype, plain.device))
        for found in (value + 0, value.numpy(), value.tolist(), value.half().float(), value.reshape(-1).view(24, 24)):
            self.assertLess((torch.as_tensor(found) - plain).abs().max().item(), 1e-3)
        self.assertEqual(repr(plain), repr(value))
        self.assertEqual(plain.sum().item(), float(value.sum()))

    def test_FilesLeaveNoNames(self):
        value = self.trained.state_dict()["state"][0]["exp_avg"] + 0
        mapped = [line for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if PREFIX in line]
        self.assertTrue(mapped and all(line.endswith("(deleted)") for line in mapped))
        self.assertEqual([], list((self.folder / "store").glob(PREFIX + "*")))
        loop(self.network, self.trained, 1, first=3)
        gc.collect()
        self.assertNotIn(PREFIX, pathlib.Path("/proc/self/maps").read_text())
        del value

    def test_WhatAKilledProcessLeftIsRemoved(self):
        (self.folder / "store" / (PREFIX + "left")).mkdir()
        self.trained.close()
        self.optimizer(self.network, **self.on_nvme(), on_existing="resume")
        self.assertEqual([], list((self.folder / "store").glob(PREFIX + "*")))

    def test_NothingIsChangedWhereADiskIsFull(self):
        state = self.trained.state_dict()
        with unittest.mock.patch("os.pwrite", side_effect=OSError(28, "No space left on device")), \
                self.assertRaisesRegex(OSError, "No space"):
            torch.save(state, self.folder / "optimizer.pt")
        self.assertEqual([], list((self.folder / "store").glob(PREFIX + "*")))
        torch.save(state, self.folder / "optimizer.pt")


class Exact(Case):
    """save() and load()."""

    def check(self, dtype, **where):
        network = Network(dtype)
        optimizer = self.optimizer(network, parameters=groups_of(network), **where)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        optimizer.blob = b"position 3"
        loop(network, optimizer, 3, schedule=schedule)
        optimizer.save(self.folder / "saved")
        self.assert_error("saved", optimizer.save, self.folder / "saved")
        optimizer.save(self.folder / "saved", replace=True)
        rates = [group["lr"] for group in optimizer.param_groups]
        loop(network, optimizer, 2, first=3)
        expected = [p.clone() for p in network.parameters()]
        loop(network, optimizer, 2, first=5)

        optimizer.load(self.folder / "saved")
        self.assertEqual((3, b"position 3"), (optimizer.current_step, optimizer.blob))
        self.assertEqual([rate * 2 for rate in rates], [group["lr"] for group in optimizer.param_groups])  # of step 3
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5, last_epoch=optimizer.current_step - 1)
        self.assertEqual(rates, schedule.get_last_lr())
        loop(network, optimizer, 2, first=3)
        self.assert_same(expected, network.parameters())

    def test_GoesOnWithTheSameBits(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for place, where in (("cpu", {}), ("nvme", self.on_nvme(str(dtype)))):
                with self.subTest(dtype=dtype, place=place):
                    self.check(dtype, **where)
                    subprocess.run(["rm", "-r", self.folder / "saved"], check=True)

    def test_AnotherModelsIsRefusedAndNothingIsLost(self):
        other = torch.nn.Linear(3, 3)
        stranger = self.optimizer(other)
        stranger.save(self.folder / "saved")
        for where in ({}, self.on_nvme()):
            network, twin = Network(), Network()
            optimizer, twins = self.optimizer(network, **where), self.optimizer(twin)
            for one, trained in ((optimizer, network), (twins, twin)):
                loop(trained, one, 2)
            self.assert_error("saved", optimizer.load, self.folder / "saved")
            for one, trained in ((optimizer, network), (twins, twin)):
                loop(trained, one, 2, first=2)
            self.assert_same(twin.parameters(), network.parameters())


class Memory(Case):
    def test_SavingTakesLessMemoryThanTheStates(self):
        """In a cgroup in which they do not fit."""
        sys.path.insert(0, str(ROOT / "tests/cli"))
        from runs import memory_cgroup
        script = pathlib.Path(__file__).with_name("optimizer_saving.py")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, script, self.folder]
        idle = int(subprocess.run([*command, "idle"], env=environment, check=True, stdout=subprocess.PIPE).stdout)
        states, host = 2 * 4 * (64 << 20), 64 << 20
        with memory_cgroup(self, idle + host + (64 << 20)) as enter:
            done = subprocess.run([*command, "save", str(host)], env=environment, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, preexec_fn=enter, check=False)
        self.assertEqual(0, done.returncode, done.stderr[-3000:])
        self.assertGreater((self.folder / "optimizer.pt").stat().st_size, states)


if __name__ == "__main__":
    main()
