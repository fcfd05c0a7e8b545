"""Named tensors in HBM, host memory and on NVMe (spillway.io): what comes back is what was put, to the bit."""
import contextlib
import io
import json
import os
import pathlib
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock

import numpy
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
from report import main  # noqa: E402
import spillway  # noqa: E402
from spillway.io import TensorStore, spilled_activations  # noqa: E402

MIB = 1 << 20
HOST = {"nvme_bytes": 64 * MIB, "host_bytes": 4 * MIB}
CHILD = """
import sys, torch
from spillway.io import TensorStore
store = TensorStore(sys.argv[1], nvme_bytes=64 << 20, host_bytes=4 << 20, on_existing="resume")
version = int(store.get("version")) if "version" in store else 0
while True:
    version += 1
    store.put({f"t{i}": torch.full((300_000 + i,), version, dtype=torch.int32) for i in range(6)})
    store.put("version", torch.tensor(version))
    store.commit()
    print(version, flush=True)
"""


class TensorStoreTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        torch.manual_seed(1)

    def open(self, **options):
        store = TensorStore(self.folder, **{**HOST, "on_existing": "resume", **options})
        self.addCleanup(store.close)
        return store

    def refused(self, code, words, function, *arguments, **named):
        with self.assertRaises(spillway.Error) as caught:
            function(*arguments, **named)
        self.assertEqual(code, caught.exception.code, caught.exception)
        self.assertIn(words, str(caught.exception))


class Values(TensorStoreTest):
    def test_EveryTypeComesBackToTheBit(self):
        tensors = {"float": torch.randn(3, 5, 7), "half": torch.randn(1000).half(),
                   "bfloat": torch.randn(9).bfloat16(), "double": torch.randn(2, 2).double(),
                   "long": torch.arange(100), "bool": torch.rand(50) > 0.5,
                   "byte": torch.arange(256).byte(), "complex": torch.randn(6, dtype=torch.complex64),
                   "number": torch.tensor(3.5), "nothing": torch.empty(0, 4),
                   "odd": torch.tensor([float("nan"), float("inf"), -0.0])}
        with self.open() as store:
            store.put(tensors)
            store.commit()
        with self.open() as store:
            for name, wanted in tensors.items():
                got = store.get(name)
                self.assertEqual((wanted.dtype, wanted.shape), (got.dtype, got.shape), name)
                self.assertEqual(wanted.numpy().tobytes() if wanted.dtype != torch.bfloat16
                                 else wanted.view(torch.int16).numpy().tobytes(),
                                 got.numpy().tobytes() if got.dtype != torch.bfloat16
                                 else got.view(torch.int16).numpy().tobytes(), name)

    def test_FiveTimesItsHostMemoryInAnyOrder(self):
        store = self.open()
        tensors = {f"t{i}": torch.randn(100_000 + i) for i in range(50)}
        store.put(tensors)
        self.assertGreater(store.stats().evictions, 30)
        for name in torch.randperm(50).tolist():
            self.assertTrue(torch.equal(tensors[f"t{name}"], store.get(f"t{name}")))
        names = list(tensors)
        for name, got in zip(names, store.get(names), strict=True):
            self.assertTrue(torch.equal(tensors[name], got))
        self.assertLessEqual(store.stats().host_bytes, store.stats().host_capacity)

    def test_ArraysAndTensorsAreTheSameThing(self):
        store = self.open(into="numpy")
        array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)
        store.put("a", array)
        self.assertIsInstance(store.get("a"), numpy.ndarray)
        numpy.testing.assert_array_equal(array, store.get("a"))
        out = torch.empty(3, 4)
        self.assertIs(out, store.get("a", out=out))
        self.assertTrue(torch.equal(torch.from_numpy(array), out))
        store.put("a", torch.ones(3, 4))
        self.assertEqual(12, store.get("a").sum())

    def test_RowsOfATable(self):
        table = torch.randn(5000, 250)
        with self.open() as store:
            store.put("table", table, block_bytes=4096)
            store.commit()
        store = self.open()
        rows = torch.randint(0, 5000, (700,))
        self.assertTrue(torch.equal(table[rows], store.rows("table", rows)))
        self.assertLess(store.stats().read_bytes, 700 * 8192 + 1)
        self.assertTrue(torch.equal(table[[-1, 0]], store.rows("table", [-1, 0])))
        self.assertEqual((0, 250), tuple(store.rows("table", []).shape))
        self.refused("invalid_argument", "table: has 5000 rows, and no row 5000", store.rows, "table", [5000])

    def test_ThreadsHaveItAtOneTime(self):
        store, failures = self.open(), []

        def work(number):
            try:
                for step in range(30):
                    name = f"{number}.{step % 4}"
                    value = torch.full((200_000,), number * 1000 + step, dtype=torch.int32)
                    store.put(name, value)
                    if step % 7 == 0:
                        store.commit()
                    if not torch.equal(value, store.get(name)):
                        failures.append(name)
            except spillway.Error as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], failures)

    def test_WhatIsKnownOfThem(self):
        store = self.open()
        store.put("b", torch.zeros(2, 3))
        store.put("a", torch.zeros(5, dtype=torch.int8))
        self.assertEqual(["a", "b"], [info.name for info in store.list()])
        info = store.info("b")
        self.assertEqual(("float32", (2, 3), 24, True, False, False), tuple(info)[1:7])
        store.pin("b")
        store.commit()
        self.assertTrue(store.info("b").committed and store.info("b").pinned and store.info("b").on_nvme)
        self.assertEqual(2, len(store))
        store.delete("a")
        self.assertNotIn("a", store)
        self.assertIn("b", store)
        self.assertEqual(1, store.prefetch(["b"]))


class Hbm(TensorStoreTest):
    """With RAM in place of a GPU's memory."""

    def open(self, **options):
        return super().open(**{"hbm_bytes": 4 * MIB, "device": "host", **options})

    def test_TensorsComeBackFromEveryTier(self):
        store = self.open()
        self.assertEqual("host", store.device)
        tensors = {f"t{i}": torch.randn(200_000 + i) for i in range(30)}
        store.put(tensors, to="hbm")
        stats = store.stats()
        self.assertGreater(stats.hbm_evictions, 20)
        self.assertGreater(stats.evictions, 10)
        self.assertLessEqual(stats.hbm_bytes, stats.hbm_capacity)
        self.assertEqual(4 * MIB, stats.hbm_capacity)
        self.assertTrue(store.info("t29").in_hbm)
        for name in torch.randperm(30).tolist():
            self.assertTrue(torch.equal(tensors[f"t{name}"], store.get(f"t{name}")))
        store.put("low", torch.ones(10))
        self.assertEqual((True, False), (store.info("low").in_host, store.info("low").in_hbm))
        store.commit()
        store.close()
        store = self.open()
        self.assertEqual(2, store.prefetch(["t3", "t4"], to="hbm"))
        for name in ("t3", "t4"):
            self.assertTrue(torch.equal(tensors[name], store.get(name)))

    def test_WhatIsPinnedIsSeenInItsPlace(self):
        store = self.open()
        tensors = {"float": torch.randn(300, 7), "bfloat": torch.randn(9).bfloat16(), "bool": torch.rand(50) > 0.5,
                   "complex": torch.randn(6, dtype=torch.complex64), "number": torch.tensor(3.5),
                   "nothing": torch.empty(0, 4)}
        store.put(tensors)
        for name, wanted in tensors.items():
            with store.pinned(name) as tensor:
                self.assertEqual((wanted.dtype, wanted.shape), (tensor.dtype, tensor.shape))
                self.assertTrue(torch.equal(wanted, tensor))
                self.assertTrue(store.info(name).pinned_in_hbm and store.info(name).in_hbm)
        with store.pinned("float") as tensor:
            for i in range(20):
                store.put(f"t{i}", torch.randn(200_000), to="hbm")
            self.assertTrue(torch.equal(tensors["float"], tensor))
            self.refused("invalid_argument", "float: is pinned in HBM", store.put, "float", tensors["float"])
            self.refused("invalid_argument", "float: is pinned in HBM", store.delete, "float")
            self.refused("busy", "1 of its tensors are in use", store.close)
        store.delete("float")
        store.pin("bool", to="hbm")
        self.assertTrue(store.info("bool").pinned_in_hbm)
        store.unpin("bool", to="hbm")
        store.close()
        with TensorStore(host_bytes=4 * MIB, hbm_bytes=MIB, device="host", into="numpy") as store:
            store.put("a", numpy.arange(12.0).reshape(3, 4))
            with store.pinned("a") as array:
                numpy.testing.assert_array_equal(numpy.arange(12.0).reshape(3, 4), array)
                self.assertFalse(array.flags.writeable)

    def test_MemoryOfTheGpuGoesThereAndComesFromThere(self):
        store = self.open()
        stream = mock.Mock(cuda_stream=None)
        with mock.patch.object(store, "tier_of", lambda device: "hbm"), \
                mock.patch.object(torch.cuda, "current_stream", lambda device: stream):  # as if the CPU were the GPU
            tensor = torch.randn(1000)
            store.put("a", tensor)
            self.assertTrue(store.info("a").in_hbm)
            self.assertFalse(store.info("a").in_host)
            self.assertTrue(torch.equal(tensor, store.get("a", device="cpu")))
            out = torch.empty(1000)
            self.assertIs(out, store.get("a", out=out))
            self.assertTrue(torch.equal(tensor, out))
            self.assertEqual(2, store.stats().hbm_hits)

    def test_WithoutOneThatIsSaid(self):
        store = self.open(hbm_bytes=0)
        self.assertIsNone(store.device)
        store.put("a", torch.zeros(10))
        for ask in (lambda: store.prefetch(["a"], to="hbm"), lambda: store.pin("a", to="hbm"),
                    lambda: store.pinned("a").__enter__(), lambda: store.put("b", torch.zeros(10), to="hbm")):
            self.refused("unsupported", "has no HBM; give hbm_bytes when it is opened", ask)
        self.assertNotIn("b", store)
        self.refused("invalid_argument", "tier: 'nvme'; give hbm or host", store.prefetch, ["a"], to="nvme")
        self.refused("invalid_argument", "device: 'gpu'", TensorStore, host_bytes=4 * MIB, device="gpu")
        self.assertEqual("cpu", store.get("a", device="cpu").device.type)
        self.refused("invalid_argument", "leave it out with `out`", store.get, "a", out=torch.zeros(10), device="cpu")


class Refusals(TensorStoreTest):
    def test_WhatCannotBeMeantIsNamed(self):
        store = self.open()
        whole = torch.randn(40, 50)
        store.put("a", whole)
        self.refused("not_found", "nobody: is not in the store", store.get, "nobody")
        self.refused("invalid_argument", "t: is a view that is not contiguous", store.put, "t", whole.t())
        self.refused("invalid_argument", "t: is a view that is not contiguous", store.put, "t", whole.numpy()[:, 1:])
        self.refused("invalid_argument", "a: is float32 [40, 50]", store.put, "a", torch.randn(50, 40))
        self.refused("invalid_argument", "a: is float32 [40, 50]", store.put, "a", whole.double())
        self.refused("invalid_argument", "a: is float32 [40, 50], and `out` is float64", store.get, "a",
                     torch.empty(40, 50).double())
        self.refused("invalid_argument", "must not be written to", store.get, "a",
                     numpy.frombuffer(bytes(8000), dtype=numpy.float32).reshape(40, 50))
        self.refused("invalid_argument", "x: is a list", store.put, "x", [1.0])
        self.refused("invalid_argument", "x: is an array of Python objects", store.put, "x", numpy.array([object()]))
        self.refused("unsupported", "x: is on the device meta", store.put, "x", torch.empty(3, device="meta"))
        self.refused("not_found", "nobody", store.delete, ["a", "nobody"])
        self.refused("invalid_argument", "is named twice", store.delete, ["a", "a"])
        self.refused("invalid_argument", "names: 'a' is no list", store.prefetch, "a")
        self.refused("busy", "spillway.store", TensorStore, self.folder, **HOST, on_existing="resume")
        self.refused("exists", "a store exists", TensorStore, self.folder, **HOST)
        self.refused("invalid_argument", "host_bytes", TensorStore, host_bytes=1000)
        self.assertTrue(torch.equal(whole, store.get("a")))
        store.close()
        self.refused("invalid_argument", "is no handle that lives", store.get, "a")

    def test_NumbersAndNamesAreNotBent(self):
        store = self.open()
        store.put("a", torch.randn(40, 50))
        for ask in (lambda: store.put("a\0b", torch.zeros(3)), lambda: store.get("a\0b"), lambda: store.pin("a\0b"),
                    lambda: store.prefetch(["a", "a\0b"]), lambda: store.delete(["a\0b"])):
            self.refused("invalid_argument", r"name: 'a\x00b' has a zero character", ask)
        self.assertEqual(["a"], [info.name for info in store.list()])
        for row, said in ((True, "True"), (1.0, "1.0"), (numpy.bool_(1), "True"), ("1", "'1'"), (None, "None")):
            self.refused("invalid_argument", f"a: {said} is no row's number; give", store.rows, "a", [row])
        for rows in (torch.ones(40, dtype=torch.bool), numpy.zeros(3), torch.zeros(3)):
            self.refused("invalid_argument", " is no row's number; give whole numbers", store.rows, "a", rows)
        wanted = store.rows("a", [3, 4])
        for rows in (numpy.array([3, 4], dtype="int16"), [numpy.int64(3), torch.tensor(4)], torch.tensor([3, -36])):
            self.assertTrue(torch.equal(wanted, store.rows("a", rows)))
        for when in (-1, 2**64 - 1, 2**64):
            self.refused("invalid_argument", f"a: {when} is no next use; give a number from 0 to", store.set_next_use,
                         "a", when)
        for when in (0, numpy.int64(7), 2**64 - 2, None):
            store.set_next_use("a", when)
        for nbytes in (-1, 2**64 + 4 * MIB):
            self.refused("invalid_argument", f"host_bytes: is {nbytes}; give", TensorStore, host_bytes=nbytes)
            self.refused("invalid_argument", f"block_bytes: is {nbytes}; give", store.put, "b", torch.zeros(3),
                         block_bytes=nbytes)
        self.refused("invalid_argument", f"path: '{self.folder}\\x00b' has a zero character", TensorStore,
                     f"{self.folder}\0b", **HOST)

    def test_AFullTierIsNamed(self):
        store = TensorStore(host_bytes=4 * MIB)
        self.addCleanup(store.close)
        store.put("a", torch.zeros(700_000))
        self.refused("does_not_fit", "b: takes", store.put, "b", torch.zeros(700_000))
        self.refused("unsupported", "in host memory alone", store.commit)
        store.delete("a")
        store.put("b", torch.zeros(700_000))

    def test_AForkIsRefused(self):
        store = self.open()
        store.put("a", torch.zeros(10))
        child = os.fork()
        if child == 0:
            try:
                store.get("a")
            except spillway.Error as error:
                os._exit(7 if "which forked this one" in str(error) else 1)
            os._exit(0)
        self.assertEqual(7, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        store.commit()


class Crashes(TensorStoreTest):
    def test_AKillLeavesTheNewestCommit(self):
        known = 0
        for kill in range(int(os.environ.get("SPILLWAY_KILLS", "10"))):
            child = subprocess.Popen([sys.executable, "-c", CHILD, self.folder], stdout=subprocess.PIPE, text=True,
                                     env={**os.environ, "PYTHONPATH": str(ROOT / "python")})
            first = child.stdout.readline()
            self.assertTrue(first, "it ended by itself")
            time.sleep(0.02 * (kill % 5))
            child.send_signal(signal.SIGKILL)
            for line in [first, *child.stdout]:
                known = int(line) if line.endswith("\n") else known
            child.wait()
            child.stdout.close()
            with self.open() as store:
                version = int(store.get("version"))
                self.assertIn(version, (known, known + 1))
                for i in range(6):
                    self.assertTrue((store.get(f"t{i}") == version).all())
        self.assertGreater(known, 0)


class Program(TensorStoreTest):
    """`spillway store` over them."""

    def show(self, *options, status=0):
        done = subprocess.run([os.environ["SPILLWAY_BINARY"], "store", self.folder, *options], capture_output=True,
                              text=True, check=False)
        self.assertEqual(status, done.returncode, done.stdout + done.stderr)
        return done.stdout if status == 0 else done.stdout + done.stderr

    def test_ItShowsThemAndFindsDamage(self):
        with self.open() as store:
            store.put({"layer 0 keys": torch.randn(300, 500), "größe": torch.arange(10)})
            store.commit()
            self.assertTrue(json.loads(self.show("--json"))["in_use"])
        shown = self.show("--verify")
        self.assertRegex(shown, r"(?m)^tensors   2, of commit 2$")
        self.assertRegex(shown, r"(?m)^  layer 0 keys +585\.9 KiB  float32 \[300, 500\]$")
        self.assertIn("every byte is whole", shown)
        about = json.loads(self.show("--json", "--verify"))
        self.assertEqual([("größe", [10]), ("layer 0 keys", [300, 500])],
                         [(tensor["name"], tensor["shape"]) for tensor in about["tensors"]])
        self.assertEqual([], about["bad"])
        self.assertIn("there is none before it", self.show("--rollback", status=1))
        file = self.folder / "spillway.store"
        with self.open() as store:
            wanted = store.get("layer 0 keys").numpy().tobytes()
        at = file.read_bytes().index(wanted[200_000:200_050])
        with open(file, "r+b") as opened:
            opened.seek(at)
            opened.write(bytes([wanted[200_000] ^ 4]))
        self.assertIn("layer 0 keys: 65536 bytes from 196608 on are not those that were put",
                      self.show("--verify", status=2))
        self.assertIn("1 block is damaged", self.show("--verify", status=2))


class SavedTensors(TensorStoreTest):
    def test_GradientsAreThoseOfPlainPyTorch(self):
        pairs = ((torch.nn.Linear(256, 256), torch.nn.GELU()) for _ in range(6))
        model = torch.nn.Sequential(*(layer for pair in pairs for layer in pair))
        data = torch.randn(512, 256)

        def gradients(loss):
            model.zero_grad()
            loss().backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        wanted = gradients(lambda: model(data).square().mean())
        store = self.open()

        def spilled():
            with spilled_activations(store, least_bytes=100_000):
                loss = model(data).square().mean()
            self.assertGreater(len(store), 5)
            return loss

        for _ in range(2):
            for one, other in zip(wanted, gradients(spilled), strict=True):
                self.assertTrue(torch.equal(one, other))
            self.assertEqual(0, len(store), "what backward has read leaves")
        self.assertGreater(store.stats().write_bytes, 0, "host memory is smaller than what was saved")

    def test_WhatTheStoreDoesNotTakeStays(self):
        store = self.open()
        values = torch.randn(1000, dtype=torch.complex64, requires_grad=True)
        sparse, dense = torch.eye(100).to_sparse(), torch.randn(100, 100, requires_grad=True)

        def loss():
            return (values.conj() * values.conj()).abs().sum() + torch.sparse.mm(sparse, dense * 2).square().sum()

        wanted = torch.autograd.grad(loss(), (values, dense))
        with spilled_activations(store, least_bytes=100):
            spilled = loss()
        self.assertGreater(len(store), 0)
        for one, other in zip(wanted, torch.autograd.grad(spilled, (values, dense)), strict=True):
            self.assertTrue(torch.equal(one, other))
        arrays = TensorStore(host_bytes=4 * MIB, into="numpy")
        self.addCleanup(arrays.close)
        self.refused("invalid_argument", 'spilled_activations: its store makes arrays (into="numpy")',
                     spilled_activations(arrays).__enter__)

    def test_FrozenParametersStay(self):
        store, data = self.open(), torch.randn(300, requires_grad=True)
        frozen = torch.nn.Parameter(torch.randn(300), requires_grad=False)
        with spilled_activations(store, least_bytes=100):
            loss = (data * frozen).sum() + (data * frozen.view(30, 10).view(300)).sum()
            self.assertEqual(0, len(store))
        loss.backward()
        self.assertTrue(torch.equal(frozen + frozen, data.grad))


class Page(TensorStoreTest):
    def setUp(self):
        super().setUp()
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)

    def test_ItsProgramsRun(self):
        programs = re.findall(r"(?<=\n```python\n).*?(?=^```$)", (ROOT / "docs/tensors.md").read_text(),
                              re.DOTALL | re.MULTILINE)
        for program, words in zip(programs, ("TensorStoreStats(", "tensor(102"), strict=True):
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(program, "tensors.md", "exec"), {})
            self.assertIn(words, said.getvalue())

    def run_example(self, name):
        """As examples/README.md has it, in this process; returns what each of its commands prints."""
        said = []
        for line in (ROOT / "examples/README.md").read_text().splitlines():
            if line.startswith(f"python examples/{name}.py "):
                with mock.patch.object(sys, "argv", line.split()[1:]), \
                        contextlib.redirect_stdout(io.StringIO()) as output:
                    runpy.run_path(str(ROOT / f"examples/{name}.py"), run_name="__main__")
                said.append(output.getvalue())
        return said

    def test_ACacheIsTenTimesItsHostMemory(self):
        said, = self.run_example("kv_cache")
        cache, memory, read = re.search(r"^cache (\d+) MiB, host memory ([\d.]+) MiB: (\d+) MiB read", said).groups()
        self.assertGreaterEqual(int(cache), 10 * float(memory))
        self.assertGreater(int(read), 0)
        self.assertIn("the same bits as with room for all of it: True", said)

    def test_ATableIsReadByRows(self):
        said, = self.run_example("embedding_rows")
        table, read, mean = re.search(r"^table (\d+) MiB, .*, (\d+) MiB read, .* ([-\d.]+)$", said.strip()).groups()
        self.assertLess(int(read), int(table))
        parts = [torch.randn(min(16384, 20_000 - first), 256, generator=torch.Generator().manual_seed(first))
                 for first in (0, 16384)]
        ids = torch.randint(0, 20_000, (8, 64), generator=torch.Generator().manual_seed(4))
        self.assertAlmostEqual(torch.cat(parts)[ids].mean().item(), float(mean), delta=1e-5)

    def test_StatesOfAnOwnOptimizerAreAdams(self):
        losses = [re.findall(r"step (\d+)  loss ([\d.]+)", said) for said in self.run_example("adam_states")]
        self.assertEqual([*map(str, range(1, 13))], [step for run in losses for step, _ in run])  # it went on
        torch.manual_seed(1)
        layers = [torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 256), torch.nn.GELU(),
                  torch.nn.Linear(256, 64)]
        model = torch.nn.Sequential(*layers)
        adam = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step, (_, said) in enumerate(sum(losses, []), 1):
            rows = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
            loss = (model(rows) - rows.roll(1, dims=1)).square().mean()
            self.assertAlmostEqual(loss.item(), float(said), delta=1e-3)  # another order of Adam's roundings
            adam.zero_grad()
            loss.backward()
            adam.step()

    def test_ActivationsWaitOnNvme(self):
        said, = self.run_example("spilled_activations")
        self.assertGreater(int(re.search(r"to NVMe went (\d+) MiB; the same gradients as without: True", said)[1]), 0)


if __name__ == "__main__":
    main()
