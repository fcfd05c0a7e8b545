"""spillway.AdamW and its kin in loops as users have them: the same training as torch.optim, whatever else is in it."""
import itertools

from case import main

import unittest.mock
import warnings

import torch

import spillway
from optimizer_loops import Case, Network, groups_of, loop

try:
    CpuScaler = torch.amp.GradScaler
except AttributeError:
    CpuScaler = None  # before 2.3 a GradScaler is for GPUs alone, and does nothing without


def scaler():
    return CpuScaler("cpu", init_scale=64.0, growth_interval=3)


def cycle(optimizer, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an older PyTorch says much of schedules
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[3e-2, 6e-2], total_steps=10, **options)


SCHEDULES = {  # all of PyTorch's, but OneCycleLR, which the grid has; arguments after the optimizer
    "LambdaLR": (lambda epoch: 0.9 ** epoch,), "MultiplicativeLR": (lambda _: 0.9,), "StepLR": (2,),
    "MultiStepLR": ([1, 3],), "ConstantLR": (), "LinearLR": (), "ExponentialLR": (0.9,), "CosineAnnealingLR": (5,),
    "PolynomialLR": (), "CosineAnnealingWarmRestarts": (2,), "CyclicLR": (1e-4, 1e-2, 2, None, "triangular", 1.0, None,
                                                                        "cycle", False),
    "ReduceLROnPlateau": ("min", 0.1, 0)}


class Grid(Case):
    """Every combination of what a loop may have."""

    def check(self, accumulation, clip, scaled, closure, **where):
        trained = []
        for make in (torch.optim.AdamW, spillway.AdamW):
            network = Network()
            options = where if make is spillway.AdamW else {}
            optimizer = make(groups_of(network), lr=1e-2, **options)
            losses = loop(network, optimizer, 6, schedule=cycle(optimizer), accumulation=accumulation, clip=clip,
                          scaler=scaler() if scaled else None, closure=closure, bad=(1,) if scaled else ())
            states = {name: state["step"].item() for name, state in optimizer.state_dict()["state"].items()}
            trained.append((losses, list(network.parameters()), optimizer.param_groups, states))
            if make is spillway.AdamW:
                optimizer.close()
        (losses, expected, groups, states), (found_losses, found, found_groups, found_states) = trained
        self.assertEqual(losses[:accumulation], found_losses[:accumulation])  # before the first update
        self.assert_near(expected, found, 1e-5)
        for group, found_group in zip(groups, found_groups):
            self.assertEqual({**group, "params": 0}, {**found_group, "params": 0})
        self.assertEqual(states, found_states)

    def test_TrainsAsPyTorchDoes(self):
        for accumulation, clip, closure in itertools.product((1, 3), (None, 0.1), (False, True)):
            with self.subTest(accumulation=accumulation, clip=clip, closure=closure):
                self.check(accumulation, clip, False, closure)

    def test_TrainsAsPyTorchDoesWithAGradScaler(self):
        """Also where it finds an overflow, and leaves the step out."""
        if CpuScaler is None:
            self.skipTest("this PyTorch's GradScaler does nothing on a CPU; 2.3 and newer have one that does")
        for accumulation, clip in itertools.product((1, 3), (None, 0.1)):
            with self.subTest(accumulation=accumulation, clip=clip):
                self.check(accumulation, clip, True, False)

    def test_TrainsAsPyTorchDoesOnNvme(self):
        self.check(3, 0.1, False, False, **self.on_nvme())


class Kinds(Case):
    def test_EachIsPyTorchs(self):
        for kind, options in (
                ("AdamW", {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6}), ("Adam", {"weight_decay": 0.1}),
                ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.5}), ("Adagrad", {"weight_decay": 0.1}),
                ("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01}),
                ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("SGD", {"lr": 0.1, "dampening": 0.5})):
            with self.subTest(kind=kind, **options):
                networks = Network(), Network()
                theirs = getattr(torch.optim, kind)(networks[0].parameters(), **options)
                ours = self.optimizer(networks[1], kind, **options)
                self.assertEqual(theirs.defaults, ours.defaults)
                for network, optimizer in zip(networks, (theirs, ours)):
                    loop(network, optimizer, 6)
                self.assert_near(networks[0].parameters(), networks[1].parameters(), 1e-5)

    def test_LionIsThePapers(self):
        network, expected = Network(), Network()
        ours = self.optimizer(network, "Lion", lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        theirs = torch.optim.SGD(expected.parameters(), 1.0)  # which subtracts what it is given
        moments = [torch.zeros_like(p) for p in expected.parameters()]

        def update(_self):
            for weight, moment in zip(expected.parameters(), moments):
                if weight.grad is not None:
                    gradient, update = weight.grad, 0.9 * moment + 0.1 * weight.grad
                    moment.mul_(0.95).add_(gradient, alpha=0.05)
                    with torch.no_grad():
                        weight.sub_(1e-4 * weight).sub_(1e-3 * update.sign())

        loop(network, ours, 5)
        with unittest.mock.patch.object(torch.optim.SGD, "step", update):
            loop(expected, theirs, 5)
        # A sign is another where an average of gradients is an ulp from zero.
        self.assert_near(expected.parameters(), network.parameters(), 3e-3)
        same = [(a - b).abs() < 1e-6 for a, b in zip(expected.parameters(), network.parameters())]
        self.assertGreater(torch.cat([one.reshape(-1) for one in same]).float().mean().item(), 0.99)
        with self.assertRaisesRegex(ValueError, "beta parameter at index 1"):
            spillway.Lion(network.parameters(), betas=(0.9, 1.0))

    def test_AdamWithDecoupledDecayIsAdamW(self):
        """Also where PyTorch's Adam has no such word yet."""
        networks = Network(), Network()
        for network, kind, options in zip(networks, ("AdamW", "Adam"), ({}, {"decoupled_weight_decay": True})):
            loop(network, self.optimizer(network, kind, weight_decay=0.1, **options), 4)
        self.assert_same(networks[0].parameters(), networks[1].parameters())

    def test_BadValuesArePyTorchsErrors(self):
        for options, words in (({"lr": -1}, "learning rate"), ({"betas": (1, 0)}, "beta parameter at index 0"),
                               ({"eps": -1}, "epsilon"), ({"weight_decay": -1}, "weight_decay")):
            with self.assertRaisesRegex(ValueError, words):
                spillway.AdamW(Network().parameters(), **options)

    def test_PyTorchsOwnKernelsAreNotChosen(self):
        network = Network()
        optimizer = self.optimizer(network, fused=True, foreach=True, capturable=True)
        loop(network, optimizer, 1)
        self.assertTrue(optimizer.param_groups[0]["foreach"])


class Values(Case):
    """What is read in each step."""

    def pair(self, kind="AdamW", **options):
        networks = Network(), Network()
        return networks, (getattr(torch.optim, kind)(networks[0].parameters(), **options),
                          self.optimizer(networks[1], kind, **options))

    def test_SchedulesThatWriteBetasAndMomentum(self):
        for kind, options in (("AdamW", {}), ("SGD", {"lr": 1e-2, "momentum": 0.9})):
            networks, optimizers = self.pair(kind, **options)
            for network, optimizer in zip(networks, optimizers):
                schedule = torch.optim.lr_scheduler.CyclicLR(optimizer, 1e-3, 2e-2, step_size_up=2,
                                                             cycle_momentum=kind == "SGD")
                loop(network, optimizer, 3, schedule=schedule)
                schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=6)
                loop(network, optimizer, 3, first=3, schedule=schedule)
            self.assert_near(networks[0].parameters(), networks[1].parameters(), 1e-5)
            self.assertNotEqual(0.9, optimizers[1].param_groups[0].get("momentum", 0))

    def test_EveryScheduleIsFollowed(self):
        for name, arguments in SCHEDULES.items():
            trained = []
            for make in (torch.optim.AdamW, spillway.AdamW):
                network = Network()
                optimizer = make(network.parameters(), lr=1e-3)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, *arguments)
                rates = []
                for step in range(5):
                    loop(network, optimizer, 1, first=step)
                    schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
                    rates.append(optimizer.param_groups[0]["lr"])
                trained.append((rates, list(network.parameters())))
                if make is spillway.AdamW:
                    optimizer.close()
            with self.subTest(name=name):
                self.assertEqual(trained[0][0], trained[1][0])
                self.assertGreater(len(set(rates)), 1)
                self.assert_near(trained[0][1], trained[1][1], 1e-5)

    def test_TheLoopsOwnChanges(self):
        networks, optimizers = self.pair()
        for network, optimizer in zip(networks, optimizers):
            loop(network, optimizer, 2)
            optimizer.param_groups[0].update(lr=torch.tensor(2e-2), betas=(0.7, 0.8), eps=1e-3, weight_decay=0.3)
            with torch.no_grad():
                network.last.weight.mul_(0.5)  # counts
            network.first.weight.requires_grad_(False)
            network.first.weight.grad = None
            loop(network, optimizer, 2, first=4)
        self.assert_near(networks[0].parameters(), networks[1].parameters(), 1e-5)

    def test_AParameterCountsItsOwnSteps(self):
        network = Network()
        optimizer = self.optimizer(network)
        loop(network, optimizer, 5)  # expert 1 idles in two
        counts = [optimizer.state[p]["step"].item() for p in network.parameters()]
        self.assertEqual([5] * 4 + [3] * 2 + [5] * 2, counts)
        self.assertEqual((5, 5), (optimizer.current_step, optimizer.report.step))
        optimizer.zero_grad(set_to_none=True)
        optimizer.step()  # with no gradient at all there is none
        self.assertEqual(5, optimizer.current_step)

    def test_PyTorchIsToldThatWeightsChanged(self):
        network = Network()
        optimizer = self.optimizer(network)
        loss = network(torch.ones(2, 24))
        loss.backward(retain_graph=True)
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_GradientsAndWeightsOfOtherForms(self):
        networks = [torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
        networks[1].load_state_dict(networks[0].state_dict())
        optimizers = torch.optim.AdamW(networks[0].parameters(), 1e-2), self.optimizer(networks[1], lr=1e-2)
        x = torch.randn(2, 3, 8, 8)
        for network, optimizer in zip(networks, optimizers):
            self.assertFalse(network.weight.is_contiguous())
            for _ in range(3):
                optimizer.zero_grad()
                network(x).square().sum().backward()
                optimizer.step()
            self.assertFalse(network.weight.is_contiguous())
        self.assert_near(networks[0].parameters(), networks[1].parameters(), 1e-5)

    def test_NamedParameters(self):
        network = Network()
        try:
            torch.optim.AdamW(network.named_parameters())
        except TypeError:
            self.skipTest("this PyTorch's optimizers take no names; those of 2.6 do")
        optimizer = self.optimizer(network, parameters=network.named_parameters())
        network.last.bias.grad = torch.full((3,), float("nan"))
        self.assert_error(r"last\.bias: NaN or Inf", optimizer.step)
        network.last.bias.grad = None
        loop(network, optimizer, 2)
        theirs = torch.optim.AdamW(network.named_parameters())
        theirs.load_state_dict(optimizer.state_dict())
        optimizer.load_state_dict(theirs.state_dict())
        self.assertEqual("last.bias", optimizer.param_groups[0]["param_names"][-1])

    def test_A16BitWeightIsFinerThanItsBits(self):
        """Steps that each are less than half an ulp of a weight move it all the same, unlike with PyTorch alone."""
        for dtype in (torch.bfloat16, torch.float16):
            network = torch.nn.Linear(4, 4, bias=False).to(dtype)
            with torch.no_grad():
                network.weight.fill_(1.0)
            optimizer = self.optimizer(network, lr=1e-4, weight_decay=0)
            for _ in range(100):
                network.weight.grad = torch.ones_like(network.weight)
                optimizer.step()
            self.assertLess(network.weight.max().item(), 0.995)
            self.assertEqual(torch.float32, optimizer.state[network.weight]["exp_avg"].dtype)


if __name__ == "__main__":
    main()
