"""DeepSpeed's behaviours on several ranks: models, blocks and settings. several_ranks.py runs them."""
import torch
import torch.utils.checkpoint

import spillway as deepspeed
from behaviours import WIDTH, SimpleModel, simple
from several_ranks import COUNT, RANK, Several, batches, everyones, mine
from spillway.utils import set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module


def made(kind, *arguments, **options):
    torch.manual_seed(1)
    return kind(*arguments, **options)


class Chooses(torch.nn.Module):
    """Runs one of two layers: another one in each step, or on each rank."""

    def __init__(self, by_rank=False):
        super().__init__()
        self.linears = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.counter = RANK if by_rank else 0
        self.adds = 0 if by_rank else 1

    def forward(self, x, y):
        x = self.linears[self.counter % 2](x)
        self.counter += self.adds
        return torch.nn.functional.cross_entropy(x.relu(), y)


class Routed(torch.nn.Module):
    """A block that gives two results, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(WIDTH, 4)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        return sum(share[:, i:i + 1] * expert(x) for i, expert in enumerate(self.experts)), share


class MixtureOfExperts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.routed = torch.nn.Linear(WIDTH, WIDTH), Routed()

    def forward(self, x, y):
        x, share = self.routed(self.first(x))
        return torch.nn.functional.cross_entropy(x, y) + share.pow(2).mean()


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.body = torch.nn.Linear(WIDTH, WIDTH, bias=False), torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.head(self.body(self.table(x)).relu()), y)


class Checkpointed(torch.nn.Module):
    """`adapters`: what is trained; the layers themselves are frozen then, as with LoRA."""

    def __init__(self, reentrant, adapters=False):
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.linears = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.adapters = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2)) if adapters else None
        self.reentrant = reentrant
        if adapters:
            self.linears.requires_grad_(False)

    def layer(self, number, x):
        return self.linears[number](x) + (self.adapters[number](x) if self.adapters else 0)

    def forward(self, x, y):
        x = self.first(x)
        for number in range(2):
            x = torch.utils.checkpoint.checkpoint(self.layer, number, x, use_reentrant=self.reentrant)
        return torch.nn.functional.cross_entropy(x, y)


class Spare(SimpleModel):
    """Of which a layer is not used; or by rank 0 alone."""

    def __init__(self, by_first=False):
        super().__init__()
        self.spare, self.by_first = torch.nn.Linear(WIDTH, WIDTH), by_first

    def forward(self, x, y):
        return super().forward(self.spare(x) if self.by_first and RANK == 0 else x, y)


class Odd(torch.nn.Module):
    """Parameters of sizes that no number of ranks divides."""

    def __init__(self, sizes=((3, WIDTH), (7, 3), (WIDTH, 7))):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(size) / 3) for size in sizes)

    def forward(self, x, y):
        for weight in self.weights:
            x = torch.nn.functional.linear(x, weight)
        return torch.nn.functional.cross_entropy(x, y)


class Models(Several):
    def as_one(self, kind, *arguments, **options):
        return self.assert_trains_as_one(made(kind, *arguments), made(kind, *arguments), **options)

    def test_FrozenWeights(self):
        def frozen():
            network = simple(layers=3)
            network.linears[1].requires_grad_(False)
            return network

        for stage in (1, 2, 3):
            self.assert_trains_as_one(frozen(), frozen(), stage=stage)

    def test_TiedWeights(self):
        self.as_one(Tied)

    def test_OddSizes(self):
        for keys in ({}, {"use_all_reduce_for_fetch_params": True}):
            self.as_one(Odd, zero=keys)

    def test_OneLargeParameter(self):
        self.as_one(Odd, ((200, WIDTH), (WIDTH, 200)), zero={"stage3_max_live_parameters": 100})

    def test_ManyParameters(self):
        self.as_one(Odd, ((4, WIDTH), *((4, 4),) * 40, (WIDTH, 4)), zero={"stage3_prefetch_bucket_size": 300})

    def test_UnusedParameters(self):
        engine = self.as_one(Spare)
        self.assertTrue(torch.equal(made(Spare).spare.weight, engine.master_weights()["spare.weight"]))

    def test_UnusedParametersAreAnErrorWhenAsked(self):
        engine = self.engine_of(made(Spare), zero={"ignore_unused_parameters": False})
        self.assert_error("spare.weight: has got no gradient in this step", self.train_mine, engine, batches())

    def test_ALayerThatOneRankUsesAlone(self):
        """DeepSpeed's ZeRO-3 waits for ever."""
        engine = self.engine_of(made(Spare, True))
        self.assert_refused_by_all(self.train, engine, [mine(batches()[0])])
        self.assert_error("the ranks do not agree", engine.close)  # nothing can be gone on with

    def test_GradientsOfOtherParametersInEachStep(self):
        """requires_grad is switched from step to step, as adversarial training does: what is off is left out."""
        def steps(network, one, rows):
            for number, batch in enumerate(batches(4)):
                for index, parameter in enumerate(network.parameters()):
                    parameter.requires_grad_(index % 2 == number % 2)
                one(rows(batch))

        engine, reference = self.engine_of(simple()), simple()
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)

        def one(batch):
            reference(*batch).backward()
            torch.nn.utils.clip_grad_norm_([p for p in reference.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        steps(engine.module, lambda batch: self.train(engine, [batch]), mine)
        steps(reference, one, lambda batch: batch)
        self.assert_same_weights(engine, reference)
        self.assert_alike(engine)

    def test_ActivationCheckpointing(self):
        for reentrant in (True, False):
            self.as_one(Checkpointed, reentrant)

    def test_FrozenLayersUnderCheckpointing(self):
        for reentrant in (True, False):
            self.as_one(Checkpointed, reentrant, True)

    def test_TrainingAndEvaluationInTurns(self):
        for share in (0, 0.5, 1):
            elements = int(sum(each.numel() for each in simple().parameters()) * share)
            engine = self.engine_of(simple(), zero={"stage3_prefetch_bucket_size": elements})
            for batch in batches(2):
                engine.train()
                self.train_mine(engine, [batch])
                engine.eval()
                with torch.no_grad():
                    self.assertGreater(engine(*mine(batch)).item(), 0)
            self.assert_alike(engine)

    def test_AnAttributeCalledIdStays(self):
        network = simple()
        network.id = 3
        self.assertEqual(3, self.engine_of(network).id)

    def test_ForwardHooks(self):
        seen = []
        network = simple()
        network.linears[0].register_forward_hook(lambda *_: seen.append(1))
        self.train_mine(self.engine_of(network), batches(2))
        self.assertGreaterEqual(len(seen), 2)

    def test_OrderThatChangesBetweenSteps(self):
        class Turns(SimpleModel):
            backward_order = False

            def forward(self, x, y):
                for linear in reversed(self.linears) if self.backward_order else self.linears:
                    x = linear(x)
                return torch.nn.functional.cross_entropy(x, y)

        def steps(network, step, rows):
            for number, batch in enumerate(batches(3)):
                getattr(network, "module", network).backward_order = number == 1
                step(network, rows(batch))

        network, reference = made(Turns, 3), made(Turns, 3)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.01)

        def one(network, batch):
            network(*batch).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        engine = self.engine_of(network)
        steps(engine, lambda made, batch: self.train(made, [batch]), mine)
        steps(reference, one, lambda batch: batch)
        self.assert_same_weights(engine, reference)


class Leaves(Several):
    def leaf(self, network, *kinds):
        set_z3_leaf_modules(network, kinds)
        return network

    def test_LeafModuleThatChoosesByStep(self):
        self.assert_trains_as_one(self.leaf(made(Chooses), Chooses), made(Chooses))

    def test_LeafModuleThatChoosesByRank(self):
        network = self.leaf(made(Chooses, True), Chooses)
        self.assertTrue(z3_leaf_module(network))
        engine = self.engine_of(network)
        self.train_mine(engine, batches(2))
        self.assert_alike(engine)

    def test_LeafModuleOfSeveralResults(self):
        self.assert_trains_as_one(self.leaf(made(MixtureOfExperts), Routed), made(MixtureOfExperts))

    def test_NoLeafOfSeveralResults(self):
        self.assert_trains_as_one(made(MixtureOfExperts), made(MixtureOfExperts))

    def test_LeafModulesAreTakenBack(self):
        network = made(MixtureOfExperts)
        self.leaf(network, Routed)
        unset_z3_leaf_modules(network, [Routed])
        self.assertFalse(any(z3_leaf_module(each) for each in network.modules()))
        self.assertRaises(ValueError, set_z3_leaf_modules, network, [torch.nn.Conv1d])

    def test_LeafModulesByConfiguration(self):
        self.assert_trains_as_one(made(MixtureOfExperts), made(MixtureOfExperts),
                                  zero={"leaf_module": {"classes": ["Routed"]}})

    def test_ModuleGranularityThreshold(self):
        self.assert_trains_as_one(zero={"stage3_module_granularity_threshold": 10 ** 12})


class Settings(Several):
    def test_Stages(self):
        for stage in range(4):
            self.assert_trains_as_one(stage=stage)

    def test_EverythingOnNvme(self):
        self.assert_trains_as_one(device="nvme")

    def test_SettingsChangeNoBit(self):
        """What only says how partitions travel."""
        def ends(**zero):
            engine = self.engine_of(zero=zero)
            self.train_mine(engine, batches(2))
            weights = engine.master_weights()
            engine.close()
            return weights

        plain = ends()
        for zero in ({"stage3_param_persistence_threshold": 0}, {"stage3_param_persistence_threshold": 1000},
                     {"contiguous_gradients": False}, {"reduce_scatter": False}, {"overlap_comm": True},
                     {"stage3_prefetch_bucket_size": 0}, {"stage3_max_reuse_distance": 0},
                     {"allgather_bucket_size": 100, "reduce_bucket_size": 100}, {"round_robin_gradients": True}):
            for name, value in ends(**zero).items():
                self.assertTrue(torch.equal(plain[name], value), (zero, name))

    def test_OffloadOfAPart(self):
        self.assert_trains_as_one(zero={"offload_optimizer": {"device": "cpu", "ratio": 0.3}})

    def test_HierarchicalPartitions(self):
        self.assert_trains_as_one(zero={"zero_hpz_partition_size": COUNT})

    def test_QuantizedWeights(self):
        """Which travel in exact values all the same."""
        self.assert_trains_as_one(zero={"zero_quantized_weights": True})

    def test_QuantizedGradients(self):
        """Which travel in exact values all the same."""
        self.assert_trains_as_one(zero={"zero_quantized_gradients": True})

    def test_Mics(self):
        self.assert_trains_as_one(zero={"mics_shard_size": COUNT})

    def test_ModelParallelUnits(self):
        self.assert_refused_by_all(self.start, simple(), {"mpu": object()})

    def test_ExpertParallel(self):
        self.assert_refused_by_all(lambda: deepspeed.moe)

    def test_ModelMadeInZeroInit(self):
        class Inherits(SimpleModel):
            def __init__(self):
                super().__init__()
                self.bias = torch.nn.Parameter(torch.zeros(WIDTH))
                torch.nn.init.ones_(self.linears[0].weight)  # of a parent, before the model is whole

            def forward(self, x, y):
                return super().forward(x + self.bias, y)

        with deepspeed.zero.Init(config_dict_or_path=self.settings()):
            network = made(Inherits)
        self.assertTrue(network.linears[0].weight.eq(1).all())
        self.assert_trains_as_one(network, made(Inherits))

    def test_SkippedInitialization(self):
        with deepspeed.zero.Init():
            network = simple()
            network.linears[1] = torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH)
        torch.nn.init.normal_(network.linears[1].weight, mean=RANK)
        torch.nn.init.zeros_(network.linears[1].bias)
        engine = self.engine_of(network)
        self.assert_alike(engine)  # rank 0's, whatever lay in the others' memory
        self.train_mine(engine, batches(1))
        self.assert_alike(engine)

    def test_TwoGroupsOfParameters(self):
        def groups(network):
            return [{"params": [each.weight for each in network.linears], "weight_decay": 0.1},
                    {"params": [each.bias for each in network.linears], "weight_decay": 0.0, "lr": 1e-3}]

        network, reference = simple(), simple()
        engine = self.start(network, {"model_parameters": groups(network)})[0]
        optimizer = torch.optim.AdamW(groups(reference), lr=1e-2)
        for batch in batches(2):
            self.train(engine, [mine(batch)])
            reference(*batch).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.assert_same_weights(engine, reference)

    def test_EachRankHasItsPartOfTheData(self):
        rows = [(torch.full((WIDTH,), float(number)), number % WIDTH) for number in range(16)]
        loader = self.start(initialize={"training_data": rows})[2]
        seen = [int(value) for x, _ in loader for value in x[:, 0]]
        everybody = everyones(seen)
        self.assertEqual(list(range(16)), sorted(sum(everybody, [])))

    def test_BatchSizes(self):
        engine = self.engine_of(accumulation=2)
        self.assertEqual((4, 2, 8 * COUNT), (engine.train_micro_batch_size_per_gpu(),
                                             engine.gradient_accumulation_steps(), engine.train_batch_size()))
        self.assert_error("train_batch_size", self.engine_of, train_batch_size=6)
        engine.set_train_batch_size(4 * COUNT)
        self.assertEqual(1, engine.gradient_accumulation_steps())
