"""DeepSpeed's behaviours on several ranks: gradients, steps and precisions. several_ranks.py runs them."""
import torch

from behaviours import WIDTH, simple
from several_ranks import COUNT, RANK, Several, batches, everyones, mine


class Weighted(torch.nn.Module):
    """Whose gradient is its input. Another parameter gives each rank something to own."""

    def __init__(self, width=WIDTH, other=4096):
        super().__init__()
        self.weight, self.other = torch.nn.Parameter(torch.zeros(width)), torch.nn.Parameter(torch.zeros(other))

    def forward(self, x):
        return (self.weight * x).sum()


class Reduction(Several):
    def sgd(self, network, **settings):
        return self.engine_of(network, optimizer={"type": "SGD", "params": {"lr": 1.0}}, gradient_clipping=0,
                              **settings)

    def test_GradientsAreTheMeanOverRanks(self):
        for stage in range(4):
            for keys in ({}, {"prescale_gradients": True}, {"gradient_predivide_factor": 2.0},
                         {"gradient_allreduce_op": "mean"}):
                engine = self.sgd(Weighted(2), stage=stage, **keys)
                engine.backward(engine(torch.tensor([1.0, 2.0]) + 4 * RANK))
                engine.step()
                mean = torch.tensor([1.0, 2.0]) + 4 * sum(range(COUNT)) / COUNT
                self.assertTrue(torch.equal(engine.master_weights()["weight"], -mean), (stage, keys))
                engine.close()

    def test_GradientAllreduceSum(self):
        self.assert_refused_by_all(self.sgd, Weighted(2), gradient_allreduce_op="sum")

    def test_LastMicroBatchIsReducedToo(self):
        engine = self.sgd(Weighted(4), accumulation=2, bf16={"enabled": True}, stage=1,
                          data_types={"grad_accum_dtype": "fp32"})
        for first in (1.0, 11.0):
            engine.backward(engine(torch.tensor([first, first + 2, first + 4, first + 6]).bfloat16() + 18 * RANK))
            engine.step()
        mean = torch.tensor([6.0, 8, 10, 12]) + 18 * sum(range(COUNT)) / COUNT
        self.assertTrue(torch.equal(engine.master_weights()["weight"], -mean))

    def test_ClippingByTheNormOfAllRanks(self):
        engine = self.assert_trains_as_one(gradient_clipping=0.01, clip=0.01)
        norm = engine.get_global_grad_norm()
        self.assertEqual([norm] * COUNT, everyones(norm))
        self.assertGreater(norm, 0.01)

    def test_NoClippingWhenItIsOff(self):
        self.assert_trains_as_one(gradient_clipping=0, clip=1e9)

    def test_CommunicationInHalfTheBytes(self):
        self.assert_trains_as_one(communication_data_type="bf16", within=2e-2)

    def test_GradientAccumulation(self):
        whole = batches(4)
        engine = self.engine_of(accumulation=2)
        network = simple()
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2, weight_decay=0.01)
        for number, (x, y) in enumerate(whole):
            engine.backward(engine(*mine((x, y))))
            engine.step()
            self.assertEqual(number % 2 == 1, engine.was_step_applied())
            (network(x, y) / 2).backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        self.assert_same_weights(engine, network)
        self.assertEqual((2, 4, 16 * COUNT), (engine.global_steps, engine.micro_steps, engine.global_samples))

    def test_LossesWeightedByTheScript(self):
        """scale_wrt_gas=False: the same step as with the division."""
        ends = []
        for divided in (True, False):
            engine = self.engine_of(accumulation=2)
            for batch in batches(2):
                loss = engine(*mine(batch))
                engine.backward(loss if divided else loss / 2, scale_wrt_gas=divided)
                engine.step()
            ends.append(engine.master_weights())
        for name, value in ends[0].items():
            self.assertTrue(torch.allclose(value, ends[1][name], rtol=0, atol=1e-6), name)

    def test_BoundariesByHand(self):
        ends = []
        for by_hand in (False, True):
            engine = self.engine_of(accumulation=3)
            for number, batch in enumerate(batches(3)):
                if by_hand:
                    engine.set_gradient_accumulation_boundary(number == 2)
                engine.backward(engine(*mine(batch)))
                engine.step()
            ends.append(engine.master_weights())
        for name, value in ends[0].items():
            self.assertTrue(torch.equal(value, ends[1][name]), name)

    def test_UnmanagedGradientAccumulation(self):
        self.assert_refused_by_all(self.engine_of, managed_gradient_accumulation=False)

    def test_CoalescedGradientReduction(self):
        self.assert_refused_by_all(lambda: self.engine_of().coalesce_grad_reduction())

    def test_NoSync(self):
        """Micro-batches in it are of the step that ends after it, and step() in it is refused on every rank."""
        engine = self.engine_of(accumulation=2)
        first, second = batches(2)
        with engine.no_sync():
            engine.backward(engine(*mine(first)))
            self.assert_error("inside of no_sync", engine.step)
        engine.backward(engine(*mine(second)))
        engine.step()
        other = self.engine_of(accumulation=2)
        self.train_mine(other, [first, second])
        for name, value in other.master_weights().items():
            self.assertTrue(torch.equal(value, engine.master_weights()[name]), name)

    def test_EmptyPartitions(self):
        """Of a parameter of one element no second rank has a part; of a whole model each must have one."""
        engine = self.sgd(Weighted(1))
        engine.backward(engine(torch.tensor([1.0 + RANK])))
        engine.step()
        self.assertEqual([-(1.0 + sum(range(COUNT)) / COUNT)] * COUNT,
                         everyones(engine.master_weights()["weight"].item()))
        self.assert_error("is too small for 2 ranks: rank 1 would own nothing of it; start fewer", self.sgd,
                          torch.nn.Linear(4, 1, bias=False))

    def test_TheLossOfEachRankIsOfItsRows(self):
        engine, (batch,) = self.engine_of(), batches()
        self.assertAlmostEqual(simple()(*mine(batch)).item(), engine(*mine(batch)).item(), delta=1e-6)
        engine.discard_step()


class UserBackward(Several):
    def trained(self, loss_of, steps=2, network=None, **settings):
        """An engine whose loss.backward() the script calls, and the network of one process, on all rows."""
        engine, reference = self.engine_of(network and network(), **settings), (network or simple)()
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)
        for batch in batches(steps):
            loss_of(engine, *mine(batch)).backward()
            engine.step()
            loss_of(reference, *batch).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.assert_same_weights(engine, reference)
        self.assert_alike(engine)

    def test_LossBackward(self):
        for stage in range(4):
            self.trained(lambda network, x, y: network(x, y), stage=stage)

    def test_SeparateLossFunction(self):
        self.trained(lambda network, x, y: torch.nn.functional.cross_entropy(network(x), y),
                     network=lambda: torch.nn.Sequential(*simple().linears))

    def test_NonScalarBackward(self):
        network = torch.nn.Sequential(*simple().linears)
        reference = torch.nn.Sequential(*simple().linears)
        engine, ((x, _),) = self.engine_of(network), batches()
        out = engine(mine((x,))[0])
        out.backward(torch.ones_like(out))
        engine.step()
        out = reference(x)
        out.backward(torch.ones_like(out) / COUNT)
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
        self.assertAlmostEqual(norm, engine.get_global_grad_norm(), delta=1e-4 * norm)

    def test_SeveralEnginesInOneLoss(self):
        networks = [simple(), simple(layers=3)]
        engines, (batch,) = [self.engine_of(each) for each in networks], batches()
        sum(each(*mine(batch)) for each in engines).backward()
        references = [simple(), simple(layers=3)]
        sum(each(*batch) for each in references).backward()
        for engine, reference in zip(engines, references):
            engine.step()
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
            self.assertAlmostEqual(norm, engine.get_global_grad_norm(), delta=1e-5)

    def test_ScaleThenBackward(self):
        ends = []
        for scaled in (False, True):
            engine = self.engine_of(bf16={"enabled": True})
            x, y = mine(batches()[0])
            loss = engine(x.bfloat16(), y)
            engine.scale(loss).backward() if scaled else engine.backward(loss)
            engine.step()
            ends.append(engine.master_weights())
        for name, value in ends[0].items():
            self.assertTrue(torch.equal(value, ends[1][name]), name)


class Precision(Several):
    def half(self, **fp16):
        class Widened(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = torch.nn.Parameter(torch.eye(64))

            def forward(self, x):
                return x @ self.weight.float()

        return self.engine_of(torch.nn.Sequential(Widened(), Widened()),
                              fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1, **fp16})

    def half_step(self, engine, factor):
        engine.backward(engine(torch.ones(4, 64)).pow(2).mean() * factor)
        return engine.step()

    def test_OverflowOnOneRankSkipsAll(self):
        engine = self.half()
        before = engine.master_weights()
        self.assertTrue(self.half_step(engine, 1e30 if RANK == 1 else 1.0).skipped)
        self.assertEqual((8, 1), (engine.optimizer.cur_scale, engine.skipped_steps))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(value, before[name]), name)
        self.assertFalse(self.half_step(engine, 1.0).skipped)
        self.assert_alike(engine)

    def test_BackwardWithoutTheLossScale(self):
        self.half_engine = self.half()
        self.assert_refused_by_all(self.half_engine(torch.ones(4, 64)).pow(2).mean().backward)

    def test_NanOnOneRankSkipsAllInBf16(self):
        engine = self.engine_of(bf16={"enabled": True})
        before = engine.master_weights()
        x, y = mine(batches()[0])
        engine.backward(engine(x.bfloat16() * (float("nan") if RANK == 1 else 1.0), y))
        engine.step()
        self.assertEqual((1, 1, False), (engine.skipped_steps, engine.global_steps, engine.was_step_applied()))
        for name, value in engine.master_weights().items():
            self.assertTrue(torch.equal(before[name], value), name)
        self.train(engine, [mine(batches()[0])])
        self.assertEqual([True] * COUNT, everyones(engine.was_step_applied()))

    def test_NanOnOneRankIsAnErrorOnAllInFp32(self):
        engine = self.engine_of()
        x, y = mine(batches()[0])
        engine.backward(engine(x * (float("nan") if RANK == 1 else 1.0), y))
        self.assertEqual("non_finite", self.assert_error("NaN", engine.step).code)
        self.train(engine, [mine(batches()[0])])
        self.assertEqual(1, engine.global_steps)
        self.assert_alike(engine)

    def test_Bf16Training(self):
        self.assert_trains_as_one(bf16={"enabled": True}, within=3e-2)

    def test_Autocast(self):
        self.assert_refused_by_all(self.engine_of, torch_autocast={"enabled": True, "dtype": "bfloat16"})

    def test_OptimizersOfOneBit(self):
        self.assert_refused_by_all(self.engine_of, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}})

    def test_Lamb(self):
        self.assert_refused_by_all(self.engine_of, optimizer={"type": "Lamb", "params": {"lr": 1e-3}})
