"""Bad input of spillway.AdamW and its kin: one clear error each, and nothing is lost."""
import copy
import os
import pickle

from case import main

import torch

import spillway
from optimizer_loops import Case, Network, groups_of, loop


class Making(Case):
    def refused(self, pattern, *arguments, code="invalid_argument", **options):
        error = self.assert_error(pattern, spillway.AdamW, *arguments, **options)
        self.assertEqual(code, error.code)

    def test_Places(self):
        weights = list(Network().parameters())
        self.refused('states: is "nvme" without a path; give nvme_path=', weights, states="nvme")
        self.refused("states: 'disk' is none of cpu, nvme", weights, states="disk")
        self.refused("on_existing: 'take' is none of refuse, resume, replace", weights, on_existing="take")
        self.refused('on_existing: is "resume", and without nvme_path=', weights, on_existing="resume")
        self.refused("host_bytes", weights, host_bytes="much")
        self.refused("host_bytes", weights, host_bytes="1KiB", code="does_not_fit")
        with self.assertRaisesRegex(TypeError, "nvme_paths"):
            spillway.AdamW(weights, nvme_paths=["x"])

    def test_Parameters(self):
        network = Network()
        with self.assertRaisesRegex(ValueError, "empty parameter list"):
            spillway.AdamW([])
        with self.assertRaisesRegex(ValueError, "non-leaf"):
            spillway.AdamW([network.last.weight * 2])
        with self.assertRaisesRegex(ValueError, "more than one parameter group"):
            spillway.AdamW([{"params": [network.last.weight]}, {"params": [network.last.weight]}])
        with self.assertWarns(UserWarning):
            self.refused(r"param_groups\.0\.1: is given twice", [network.last.weight, network.last.weight])
        shared = torch.nn.Parameter(network.last.weight.data)
        self.refused(r"param_groups\.0\.1: has the memory of param_groups\.0\.0; give shared weights once",
                     [network.last.weight, shared])
        network.last.bias.data = network.last.bias.data.double()
        self.refused(r"param_groups\.0\.0: is of torch.float64", [network.last.bias], code="unsupported")
        network.last.bias.data = network.last.bias.data.bfloat16()
        self.refused(r"param_groups\.0\.1: is of torch.bfloat16, and param_groups\.0\.0 of torch.float32; make one "
                     "optimizer for each type", [network.last.weight, network.last.bias], code="unsupported")
        away = torch.nn.Parameter(torch.empty(3, device="meta"))
        self.refused("is on device meta, without values", [away])
        self.refused("has elements", [torch.nn.Parameter(torch.empty(0))])
        self.refused("is no parameter of model=", [torch.nn.Parameter(torch.ones(3))], model=network)

    def test_WhatIsNotThere(self):
        weights = list(Network().parameters())
        for name in ("amsgrad", "maximize", "differentiable"):
            self.refused(f"{name}: is not there in an optimizer whose states are elsewhere", weights,
                         code="unsupported", **{name: True})
            self.refused(rf"param_groups\[0\]: {name}", [{"params": weights, name: True}], code="unsupported")

    def test_AModelsNamesAreInMessages(self):
        network = Network()
        optimizer = self.optimizer(network, model=network)
        network.experts[1].bias.grad = torch.full((24,), float("nan"))
        self.assert_error(r"experts\.1\.bias: NaN or Inf in its gradient", optimizer.step)
        network.experts[1].bias.grad = None
        loop(network, optimizer, 1)

    def test_WeightsThatAreNotFinite(self):
        network = Network()
        optimizer = self.optimizer(network)
        with torch.no_grad():
            network.last.bias[0] = float("inf")
        network.last.weight.grad = torch.ones_like(network.last.weight)
        self.assert_error(r"param_groups\.0\.7", optimizer.step)
        with torch.no_grad():
            network.last.bias[0] = 0
        loop(network, optimizer, 1)


class Later(Case):
    def setUp(self):
        super().setUp()
        self.network, self.twin = Network(), Network()
        self.trained, self.twins = self.optimizer(self.network), self.optimizer(self.twin)
        for network, optimizer in ((self.network, self.trained), (self.twin, self.twins)):
            loop(network, optimizer, 2)

    def assert_nothing_is_lost(self):
        for network, optimizer in ((self.network, self.trained), (self.twin, self.twins)):
            loop(network, optimizer, 2, first=2)
        self.assert_same(self.twin.parameters(), self.network.parameters())

    def test_GroupsThatAreAddedLater(self):
        new = torch.nn.Parameter(torch.ones(3))
        self.assert_error("states are planned before the first step; give all groups", self.trained.add_param_group,
                          {"params": [new]})
        self.assertEqual(1, len(self.trained.param_groups))
        self.assert_nothing_is_lost()

    def test_GroupsThatAreAddedBeforeTheFirstStep(self):
        for options in ({}, {"stream_gradients": True}, self.on_nvme()):
            network, twin = Network(), Network()
            theirs = torch.optim.AdamW(groups_of(twin))
            first, second = groups_of(network)
            ours = self.optimizer(network, parameters=[first], **options)
            bad = {"params": [torch.nn.Parameter(torch.ones(2).half())]}
            self.assert_error("of torch.float16", ours.add_param_group, bad)
            ours.add_param_group(second)
            for trained, optimizer in ((twin, theirs), (network, ours)):
                loop(trained, optimizer, 3)
            self.assert_near(twin.parameters(), network.parameters(), 1e-5)
            self.assertEqual(len(theirs.state), len(ours.state))

    def test_AParameterOfAnotherShapeOrType(self):
        right = self.network.last.bias.data
        for wrong in (torch.ones(4), torch.ones(3, dtype=torch.bfloat16)):
            self.network.last.bias.grad = None
            self.network.last.bias.data = wrong
            self.assert_error(r"param_groups\.0\.7: is \(\d,\) of torch.\w+, and was \(3,\) of torch.float32 when its "
                              "states were planned", self.trained.step)
            self.network.last.bias.data = right
        self.assert_nothing_is_lost()

    def test_ASparseGradient(self):
        table = torch.nn.Embedding(10, 4, sparse=True)
        for stream in (False, True):
            optimizer = self.optimizer(table, stream_gradients=stream)
            loss = table(torch.tensor([1, 2])).sum()

            def both():
                loss.backward()  # noqa: B023
                optimizer.step()  # noqa: B023

            self.assert_error(r"param_groups\.0\.0: its gradient is sparse; give its module sparse=False", both)
            table.weight.grad = None

    def test_AStateDictOfAnotherModel(self):
        def state(parameters, kind="AdamW", **options):
            made = getattr(torch.optim, kind)(parameters, lr=1e-3, **options)
            for group in made.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones_like(parameter)
            made.step()
            return made.state_dict()

        network = Network()
        wider = [torch.nn.Parameter(torch.ones(*p.shape, 2)) for p in network.parameters()]
        for given, words in (
                (state(groups_of(network)), "has 2 parameter groups, and the optimizer 1"),
                (state(list(network.parameters())[1:]), r"param_groups\[0\] has 7 parameters, and the optimizer's 8"),
                (state(wider), r"exp_avg of param_groups\.0\.0 is \(24, 24, 2\), and the parameter \(24, 24\)"),
                (state(network.parameters(), "SGD", momentum=0.9),
                 r"has no exp_avg of param_groups\.0\.0 but momentum"),
                (state(network.parameters(), amsgrad=True), r"state_dict: param_groups\[0\]: amsgrad")):
            with self.subTest(words=words):
                groups = copy.deepcopy({k: v for k, v in self.trained.param_groups[0].items() if k != "params"})
                self.assert_error(words, self.trained.load_state_dict, given)
                self.assertEqual({**groups, "params": 0}, {**self.trained.param_groups[0], "params": 0})
        self.assert_nothing_is_lost()

    def test_ACopy(self):
        self.assert_error(r"cannot be copied with it; state_dict\(\) or save\(DIR\)", copy.deepcopy, self.trained)
        with self.assertLogs("spillway", "WARNING") as heard:  # a schedule may have it in its state_dict()
            text = pickle.dumps(self.trained)
        self.assertIn("AdamW: is pickled without its states", heard.output[0])
        self.assert_error("AdamW: was pickled without its states; make it anew", lambda: pickle.loads(text).step())
        self.assert_nothing_is_lost()

    def test_AClosedOneAndAFork(self):
        self.network.last.bias.grad = torch.ones(3)
        child = os.fork()
        if child == 0:  # where a backward pass of PyTorch may wait for its threads, which are the parent's
            try:
                self.trained.step()
            except spillway.Error as error:
                os._exit(7 if "of which this one is a fork" in str(error) else 8)
            os._exit(9)
        self.assertEqual(7, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        self.assert_nothing_is_lost()
        self.trained.close()
        self.trained.close()
        self.assert_error("optimizer: it is closed", loop, self.network, self.trained, 1)

    def test_ScalesThatAreNone(self):
        self.network.last.bias.grad = torch.ones(3)
        for name, value in (("loss_scale", 0.0), ("loss_scale", float("inf")), ("max_grad_norm", -1.0),
                            ("max_grad_norm", float("nan"))):
            kept = getattr(self.trained, name)
            setattr(self.trained, name, value)
            self.assert_error(f"{name}: is {value}; give a number above 0", self.trained.step)
            setattr(self.trained, name, kept)
        self.trained.max_grad_norm = 0  # as a Trainer says that nothing is clipped
        self.network.last.bias.grad = None
        self.assert_nothing_is_lost()

    def test_ABlobThatIsNone(self):
        self.trained.blob = {"position": 3}
        self.network.last.bias.grad = torch.ones(3)
        self.assert_error("blob: is a dict, not bytes", self.trained.step)
        self.trained.blob = b""
        self.network.last.bias.grad = None
        self.assert_nothing_is_lost()


if __name__ == "__main__":
    main()
