"""DeepSpeed's names: its modules under import statements, what is not there and what is said then, and the tables of
docs/deepspeed_calls.md, which these tests hold to."""
import ast
import contextlib
import io
import os
import unittest
import unittest.mock

from case import ROOT, main

import torch

import spillway as deepspeed
from spillway.accelerator import get_accelerator
from spillway.ops.adam import DeepSpeedCPUAdam, FusedAdam
from spillway.runtime.activation_checkpointing import checkpointing
from spillway.runtime.engine import DeepSpeedEngine
from spillway.runtime.zero.stage3 import (estimate_zero3_model_states_mem_needs_all_cold,
                                          estimate_zero3_model_states_mem_needs_all_live)
from spillway.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs_all_live
from spillway.utils import RepeatingLoader, get_z3_leaf_modules, set_z3_leaf_modules, z3_leaf_module
from behaviours import Behaviours, data, simple, table

SUITES = ("deepspeed_behaviours", "deepspeed_values", "deepspeed_names", "deepspeed_backward")


def statement(text):
    """An import statement of its own, as a script has it."""
    exec(compile(text, "script", "exec"), {})  # noqa: S102


class Names(Behaviours):
    def test_ActivationCheckpointingApi(self):
        self.assertFalse(deepspeed.checkpointing.is_configured() and False)
        deepspeed.checkpointing.configure(None, deepspeed_config=self.settings())
        self.assertTrue(checkpointing.is_configured())
        layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
        deepspeed.checkpointing.checkpoint(layer, x).sum().backward()
        self.assertTrue(torch.equal(layer.weight.sum(0), x.grad[0]))

    def test_CheckpointingAroundABlockChangesNothing(self):
        class Checkpointed(type(simple())):
            def forward(self, x, y):
                for linear in self.linears:
                    x = deepspeed.checkpointing.checkpoint(linear, x)
                return torch.nn.functional.cross_entropy(x.float(), y)

        torch.manual_seed(1)
        engine, batches = self.engine_of(Checkpointed()), data(2)
        self.train(engine, batches)
        self.assert_same_weights(engine, self.pytorch(batches)[0])

    def test_UnwrapModelForGeneration(self):
        from spillway.runtime.zero.stage3 import unwrap_model_for_generation
        engine = self.engine_of()
        with unwrap_model_for_generation(engine) as unwrapped:
            self.assertEqual((), unwrapped(*data()[0]).shape)

    def test_CpuAdamClass(self):
        for kind, options in ((DeepSpeedCPUAdam, {"adamw_mode": False}), (FusedAdam, {"adam_w_mode": True})):
            network, batches = simple(), data(2)
            optimizer = kind(network.parameters(), lr=1e-2, weight_decay=0.1, **options)
            self.assert_error("says hyper-parameters to initialize", optimizer.step)
            engine = self.start(network, {"optimizer": optimizer})[0]
            self.train(engine, batches)
            plain = torch.optim.Adam if kind is DeepSpeedCPUAdam else torch.optim.AdamW
            self.assert_same_weights(engine, self.pytorch(batches, optimizer=lambda p, k=plain: k(
                p, lr=1e-2, weight_decay=0.1))[0])

    def test_AioHandle(self):
        self.assert_refused(statement, "from spillway.ops.aio import AsyncIOBuilder")
        self.assert_refused(statement, "import spillway.ops.aio")
        self.assert_refused(lambda: deepspeed.ops.aio)

    def test_Estimators(self):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            estimate_zero3_model_states_mem_needs_all_live(simple(), num_gpus_per_node=1, num_nodes=1)
            estimate_zero3_model_states_mem_needs_all_cold(total_params=2**30, largest_layer_params=2**20)
            estimate_zero2_model_states_mem_needs_all_live(simple())
        self.assertIn("14.00GiB |     0.00GiB | offload_param=cpu , offload_optimizer=cpu", said.getvalue())
        self.assertEqual(2, said.getvalue().count("(stage 3)"))

    def test_AcceleratorApi(self):
        found = deepspeed.get_accelerator()
        self.assertIs(found, get_accelerator())
        name = "cuda" if torch.cuda.is_available() else "cpu"
        self.assertEqual((name, True), (found.device_name(), found.is_available()))
        self.assertEqual(name, torch.device(found.current_device_name()).type)
        found.synchronize()
        found.empty_cache()
        self.assertGreaterEqual(found.memory_allocated(), 0)
        with self.assertRaisesRegex(AttributeError, "accelerator.warp: is not here"):
            found.warp()

    def test_CommApi(self):
        comm = deepspeed.comm
        comm.init_distributed("nccl")
        value, found = torch.ones(2), [torch.zeros(2)]
        comm.all_reduce(value, async_op=True).wait()
        comm.broadcast(value, 0)
        comm.barrier()
        comm.all_gather(found, value)
        self.assertTrue(torch.equal(value, found[0]))
        self.assertEqual((0, 1, 0, True), (comm.get_rank(), comm.get_world_size(), comm.get_local_rank(),
                                           comm.is_initialized()))
        self.assert_error("broadcast: names rank 1", comm.broadcast, value, 1)
        self.assert_error("init_distributed: WORLD_SIZE 2", comm.init_distributed, world_size=2)

    def test_CommOfSeveralProcessesNeedsTheirGroup(self):
        comm = deepspeed.comm
        with unittest.mock.patch.dict(os.environ, {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}):
            for call in (comm.get_rank, comm.get_world_size, comm.barrier, comm.get_global_rank, comm.get_world_group,
                         comm.new_group, lambda: comm.all_reduce(torch.ones(2))):
                self.assert_error(r"WORLD_SIZE is 2, and torch\.distributed has no process group; "
                                  r"call init_distributed\(\) first", call)
            self.assertFalse(comm.is_initialized())
            self.assertEqual(comm.get_local_rank(), 1)
        self.assertEqual((comm.get_rank(), comm.get_global_rank(None, 0)), (0, 0))

    def test_CommOfSeveralProcessesIsOverNcclForWhatLiesOnAGpu(self):
        made = []
        self.addCleanup(deepspeed.comm.destroy_process_group)
        self.addCleanup(deepspeed.comm.init_distributed)  # of this process alone
        variables = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        with unittest.mock.patch.dict(os.environ, variables), unittest.mock.patch.object(
                torch.distributed, "init_process_group", lambda backend, **_: made.append(backend)), \
                unittest.mock.patch.object(torch.distributed.distributed_c10d, "BackendConfig", None, create=True):
            for gpus in (False, True):
                with unittest.mock.patch.object(torch.cuda, "is_available", lambda now=gpus: now):
                    for asked in (None, "nccl"):
                        deepspeed.comm.init_distributed(asked)
        self.assertEqual(["gloo", "gloo", "cpu:gloo,cuda:nccl", "nccl"], made)

    def test_LeafModules(self):
        network = torch.nn.Sequential(simple(), torch.nn.Linear(2, 2))
        network[0].forward = network[0].linears[0].forward
        found = set_z3_leaf_modules(network, [type(network[0])])
        self.assertEqual([network[0]], found)
        self.assertTrue(z3_leaf_module(network[0]) and get_z3_leaf_modules(network) == found)
        self.assertRaises(ValueError, set_z3_leaf_modules, network, [torch.nn.Conv2d])
        wrapped = torch.nn.Module()
        wrapped.inner = simple()
        wrapped.forward = wrapped.inner.forward
        set_z3_leaf_modules(wrapped, ["SimpleModel"])
        engine = self.engine_of(wrapped)
        self.assertEqual(["inner"], [block.name for block in engine._blocks])
        self.train(engine, data(1))

    def test_InitInference(self):
        self.assert_refused(lambda: deepspeed.init_inference)
        self.assert_refused(statement, "from spillway import init_inference")

    def test_MultipleEnginesSeparate(self):
        one, other = self.engine_of(), self.engine_of()
        self.train(one, data(2))
        self.train(other, data(2))
        self.assertEqual(2, other.global_steps)

    def test_EnginesAreOfDeepSpeedsClass(self):
        self.assertIsInstance(self.engine_of(), DeepSpeedEngine)
        self.assertIs(DeepSpeedEngine, deepspeed.DeepSpeedEngine)

    def test_ALoaderRepeats(self):
        loader = RepeatingLoader([1, 2])
        self.assertEqual([1, 2, 1], [next(loader) for _ in range(3)])

    def test_EveryModuleIsImported(self):
        """Each of those below deepspeed/names, by a statement of its own and as an attribute."""
        folder = ROOT / "python/spillway/deepspeed/names"
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__init__")
            if not name:
                continue
            statement(f"import spillway.{name}")
            found = deepspeed
            for part in name.split("."):
                found = getattr(found, part)
            self.assertEqual(f"spillway.{name}", found.__name__)

    def test_WhatIsNotThereNamesTheNearest(self):
        for text, words in (
                ("from spillway.utils import safe_get_full_fp32_params", "nearest is safe_get_full_fp32_param"),
                ("from spillway.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3", "deepspeed_calls.md lists"),
                ("from spillway.runtime.pipe.topology import PipeDataParallelTopology", "all layers, on one GPU"),
                ("import spillway.moe.layer", "a model's own experts train"),
                ("from spillway.ops.lamb import FusedLamb", "AdamW, Adam, Adagrad, Lion and SGD are computed"),
                ("from spillway import PipelineModule", "all layers, on one GPU"),
                ("from spillway.pipe import PipelineModule", "all layers, on one GPU")):
            with self.assertRaisesRegex(ImportError, words):
                statement(text)
        self.assertFalse(hasattr(deepspeed.utils, "groups"))
        with self.assertRaisesRegex(AttributeError, "zero.TiledLinear: is not here"):
            deepspeed.zero.TiledLinear
        with self.assertRaisesRegex(AttributeError, "has no attribute 'Motor'"):
            deepspeed.Motor
        with self.assertRaisesRegex(ImportError, "No module named 'spillway.motor'"):
            statement("import spillway.motor")


class Table(unittest.TestCase):
    """docs/deepspeed_calls.md says what these suites see."""

    def behaviours(self):
        """Tests by the name of their behaviour, and whether they see a refusal."""
        found = {}
        for suite in SUITES:
            path = ROOT / f"tests/python/{suite}_test.py"
            if not path.exists():
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                    found[node.name[5:].lower()] = "assert_refused" in ast.unparse(node)
        return found

    def test_EveryRowHasItsTest(self):
        rows, tests = table(), self.behaviours()
        self.assertEqual([], [name for name in rows if name.replace(" ", "") not in tests])
        for name, said in rows.items():
            if said != "holds":
                self.assertTrue(tests[name.replace(" ", "")], name)

    def test_NearlyAllHold(self):
        rows = table()
        self.assertEqual(96, len(rows))
        self.assertLessEqual(85, sum(said == "holds" for said in rows.values()))
        text = (ROOT / "docs/deepspeed_calls.md").read_text()
        self.assertIn(f"{sum(said == 'holds' for said in rows.values())} of the {len(rows)} hold", text)


if __name__ == "__main__":
    main()
