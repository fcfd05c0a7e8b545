"""Files and queues in Python (spillway.io): what is written is what is read, without a copy, and nothing is lost."""
import gc
import os
import pathlib
import random
import re
import resource
import sys
import tempfile
import threading
import unittest

import numpy
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
from report import main  # noqa: E402
import spillway  # noqa: E402
from spillway.io import File, Queue, empty, places  # noqa: E402
from spillway.io.tensor_store import ENGINES  # noqa: E402

MIB = 1 << 20


class IoTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="spillway-io-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        torch.manual_seed(1)

    def file(self, name="file", **options):
        made = File(self.folder / name, **{"create": True, **options})
        self.addCleanup(made.close)
        return made

    def queue(self, **options):
        made = Queue(**options)
        self.addCleanup(made._cancel)
        return made

    def refused(self, code, words, function, *arguments, **named):
        with self.assertRaises(spillway.Error) as caught:
            function(*arguments, **named)
        self.assertEqual(code, caught.exception.code, caught.exception)
        self.assertRegex(str(caught.exception), words)

    def content(self, name="file"):
        return (self.folder / name).read_bytes()


class Transfers(IoTest):
    def test_EveryEngineMovesTensorsArraysAndBuffers(self):
        for engine in ENGINES:
            for direct in (True, False):
                with self.subTest(engine=engine, direct=direct):
                    file = self.file(f"{engine} {direct}", direct=direct)
                    queue = self.queue_of(engine)
                    if engine == "libaio" and not file.direct:
                        self.refused("unsupported", "has no direct I/O, so a request would block; choose the threads",
                                     queue.write, file, 0, empty(4096, torch.uint8))
                    else:
                        self.moves_all(file, queue)

    def queue_of(self, engine):
        """Skips where the machine has no such engine."""
        try:
            return self.queue(engine=engine)
        except spillway.Error as error:
            if engine not in ("io_uring", "libaio"):
                raise
            self.skipTest(str(error))

    def moves_all(self, file, queue):
        tensor, array = empty((256, 64), torch.bfloat16), empty((3, 4096), "float64")
        tensor.copy_(torch.randn(256, 64))
        array[:] = numpy.random.default_rng(1).random(array.shape)
        queue.write(file, 0, tensor)
        queue.write(file, 64 << 10, array)
        queue.wait_all()
        queue.sync(file).wait()
        content = pathlib.Path(file.path).read_bytes()
        self.assertEqual(tensor.view(torch.int16).numpy().tobytes(), content[:tensor.numel() * 2])
        self.assertEqual(array.tobytes(), content[64 << 10:])
        again = empty(tensor.shape, tensor.dtype) if file.direct else torch.empty_like(tensor)
        other = empty(array.shape, array.dtype)
        self.assertIs(again, queue.read(file, 0, again).wait())
        self.assertTrue(torch.equal(tensor, again))
        self.assertIs(other, queue.read(file, 64 << 10, other, urgent=True).wait())
        numpy.testing.assert_array_equal(array, other)

    def test_BuffersOfPythonsOwn(self):
        file, queue = self.file(direct=False), self.queue()
        queue.write(file, 3, b"some bytes").wait()
        into = bytearray(13)
        transfer = queue.read(file, 0, into)
        self.assertIs(into, transfer.wait())
        self.assertEqual(b"\0\0\0some bytes", into)
        into.extend(b"more")  # its memory is free again
        self.assertEqual(10, queue.read(file, 3, memoryview(into)[:10]).nbytes)
        queue.wait_all()

    def test_ItReadsIntoAPartOfATensor(self):
        file, queue = self.file(), self.queue()
        whole, ones = empty((8, 1024), torch.float32), empty(1024, torch.float32).fill_(1)
        queue.write(file, 0, ones).wait()
        queue.read(file, 0, whole[3]).wait()
        self.assertEqual([0, 0, 0, 1024, 0, 0, 0, 0], whole.sum(1).tolist())

    def test_OfMemoryOfItsOwnWholePagesMove(self):
        file, queue = self.file(), self.queue()
        for shape in ((1000, 3), (1,), (4096,), ()):
            written, read = empty(shape, torch.float32), empty(shape, torch.float32)
            written += torch.randn(shape)
            queue.write(file, 0, written).wait()
            self.assertTrue(torch.equal(written, queue.read(file, 0, read).wait()))
        rows = empty((10, 1000), torch.float32)  # 4,000 bytes each
        if file.alignment > 32:
            self.refused("invalid_argument", r"file: the address is \d+, no multiple|4000 bytes are no multiple of",
                         queue.write, file, 0, rows[3])
            self.refused("invalid_argument", "4000 bytes are no multiple of", queue.write, file, 0, rows[0])
        self.assertEqual(0, queue.write(file, 0, rows[:0]).wait().numel())

    def test_AutogradIsToldThatWeightsHaveChanged(self):
        file, queue = self.file(), self.queue()
        weight = empty(1024, torch.float32).requires_grad_()
        queue.write(file, 0, weight.detach()).wait()
        loss = (weight * weight).sum()
        queue.read(file, 0, weight).wait()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_AFullQueueWaitsAndAnyThreadMaySubmit(self):
        file, queue = self.file(), self.queue(max_requests=4, depth=2, block_bytes=4096)
        failures = []

        def work(number):
            try:
                made, draw = [], random.Random(number)
                for part in range(40):
                    values = empty(1024, torch.int32).fill_(number * 1000 + part)
                    made.append((part, queue.write(file, (number * 40 + part) * 4096, values)))
                    if draw.random() < 0.3:
                        made.pop(draw.randrange(len(made)))[1].wait()
                for _, transfer in made:
                    transfer.wait()
                for part in range(40):
                    read = queue.read(file, (number * 40 + part) * 4096, empty(1024, torch.int32)).wait(60)
                    assert (read == number * 1000 + part).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([], failures)
        self.assertEqual((6 * 40 * 4096, 0), (queue.stats().write_bytes, queue.stats().pending))
        queue.close()

    def test_WhatIsUnderWayIsKept(self):
        file, queue = self.file(), self.queue()
        for number in range(200):  # nobody else has these
            queue.write(file, number * 65536, empty(16384, torch.int32).fill_(number))
            queue.write(file, number * 65536, torch.empty(0))
        gc.collect()
        queue.wait_all()
        found = empty((200, 16384), torch.int32)
        queue.read(file, 0, found).wait()
        self.assertTrue((found == torch.arange(200)[:, None]).all())
        ended = len(places._ends)
        del found
        self.assertEqual(ended - 1, len(places._ends))

    def test_RegionsStayUntilTheyAreTakenBack(self):
        file, queue = self.file(), self.queue(max_regions=1)
        memory = empty(MIB, torch.uint8)
        self.assertIn(queue.register(memory), (True, False))
        self.refused("invalid_argument", "overlaps a region|no place for it", queue.register, memory[4096:])
        queue.write(file, 0, memory[:8192]).wait()
        queue.unregister(memory)
        self.refused("invalid_argument", "is none of the I/O queue's", queue.unregister, memory)
        queue.register(memory)
        del memory
        queue.close()

    def test_WhatIsElsewhereGoesThroughHostMemory(self):
        """As a GPU's: here the CPU's stands for it."""
        here, places.is_elsewhere = places.is_elsewhere, torch.is_tensor
        self.addCleanup(setattr, places, "is_elsewhere", here)
        file, queue = self.file(), self.queue()
        values, into = torch.randn(1000), [torch.zeros(1000) for _ in range(2)]
        queue.write(file, 0, values).wait()
        self.assertEqual(values.numpy().tobytes(), self.content()[:4000])
        transfer = queue.read(file, 0, into[0])
        while not transfer.done():
            pass
        self.assertEqual(0, into[0].abs().sum())  # the copy belongs to who waits
        transfer.wait()
        queue.read(file, 0, into[1])
        queue.wait_all()
        for each in into:
            self.assertTrue(torch.equal(values, each))
        self.refused("invalid_argument", "has no host memory of its own", queue.register, values)


class Refusals(IoTest):
    def test_WhatCannotBeMovedIsNamed(self):
        file, queue = self.file(), self.queue()
        good = empty((2, 4096), torch.float32)
        frozen = empty(4096, "float32")
        frozen.flags.writeable = False
        for words, value in (("contiguous", good.t()), ("contiguous", good[:, 0]),
                             ("int", 3), ("str", "text"), ("must not be written to", frozen),
                             ("bytes has no such memory", b"0" * 4096), ("device meta", torch.empty(4, device="meta")),
                             ("contiguous", empty((2, 4096), "float32").T), ("objects", numpy.array([None, {}])),
                             ("plain memory", torch.eye(3).to_sparse())):
            with self.subTest(words):
                code = "unsupported" if words in ("device meta", "plain memory") else "invalid_argument"
                self.refused(code, words, queue.read, file, 0, value)
        self.refused("invalid_argument", "offset is -1", queue.read, file, -1, good)
        self.refused("invalid_argument", "offset is 9223372036854775808", queue.read, file, 1 << 63, good)
        self.refused("invalid_argument", "the file is a str; give a spillway.io.File", queue.read, "file", 0, good)
        with self.assertRaises(TypeError):
            queue.read(file, 1.5, good)
        self.refused("invalid_argument", "engine: 'fast'; give one of auto", Queue, engine="fast")
        self.refused("invalid_argument", "shape: is \\(-1,\\)", empty, -1)
        queue.write(file, 0, frozen).wait()
        if file.direct:
            self.refused("invalid_argument", "offset is 7, no multiple of .*direct=False", queue.read, file, 7, good)
            odd = empty(8192 + 4096, torch.uint8)[1:8193]
            self.refused("invalid_argument", "the address is .*spillway.io.empty", queue.read, file, 0, odd)
            self.refused("invalid_argument", "12 bytes are no multiple of .*direct=False", queue.read, file, 0,
                         good[0, :3])
        only_read = File(file.path)
        self.refused("invalid_argument", "is open to be read; open it with writable=True", queue.write, only_read, 0,
                     good)
        only_read.close()
        self.assertEqual(0, queue.stats().pending)

    def test_TheEndOfAFileAndAFullOneAreNamed(self):
        file, queue = self.file(), self.queue()
        queue.write(file, 0, empty(8192, torch.uint8)).wait()
        late = queue.read(file, 4096, empty(8192, torch.uint8))
        self.refused("io", "/file: ends inside the read of 8192 bytes at offset 4096; ", late.wait)
        self.refused("io", "/file: ends inside", late.wait)  # as often as it is asked
        queue.wait_all()  # that is known
        queue.read(file, 4096, empty(8192, torch.uint8))
        queue.read(file, 0, empty(8192, torch.uint8)).wait()
        self.refused("io", "/file: ends inside", queue.wait_all)
        small = resource.getrlimit(resource.RLIMIT_FSIZE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_FSIZE, small)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, small[1]))  # as of a drive that is full
        queue, values = self.queue(engine="threads"), empty(4096, torch.uint8)
        self.refused("io", "/file: write of 4096 bytes at offset 1048576 failed .File too large.; check the drive",
                     queue.write(file, MIB, values).wait)
        queue.write(file, MIB, values)
        while queue._under_way:
            queue._take(lambda: False, 0.01)
        self.refused("io", "File too large", queue.close)  # what nobody has asked for is not lost
        self.refused("invalid_argument", "queue: it is closed", queue.read, file, 0, values)

    def test_AQueueWithWorkUnderWayIsNotClosed(self):
        file, queue = self.file(), self.queue()
        values = torch.arange(1 << 20, dtype=torch.int32)
        queue._take = lambda over, timeout: over()  # nobody takes completions
        transfers = [queue.write(file, 0, empty(1 << 20, torch.int32).copy_(values))]
        self.refused("busy", "queue: 1 transfers are under way; call wait_all", queue.close)
        with self.assertRaisesRegex(TimeoutError, "/file: write of 4194304 bytes at offset 0 is not over after 0.01 s"):
            transfers[0].wait(0.01)
        self.assertFalse(transfers[0].done())
        del queue._take
        transfers[0].wait()
        self.assertTrue(transfers[0].done())
        queue.close()
        queue.close()
        self.assertEqual(values.numpy().tobytes(), self.content())
        slow = self.queue(depth=1, block_bytes=4096, engine="threads")
        memory = empty(64 * MIB, torch.uint8)
        slow.write(file, 0, memory)
        self.refused("busy", "/file: requests of the I/O queue are under way on it", file.close)
        slow.wait_all()
        file.close()
        self.refused("invalid_argument", "/file: it is closed; open it again", slow.write, file, 0, memory)

    def test_AnExceptionEndsWhatHasNotStarted(self):
        file, transfers = self.file(), []
        with self.assertRaisesRegex(ValueError, "mine"):
            with Queue(depth=1, block_bytes=4096, engine="threads") as queue:
                memory = empty((256, MIB), torch.uint8)
                transfers += [queue.write(file, row * MIB, memory[row]) for row in range(256)]
                raise ValueError("mine")
        errors = [transfer.error for transfer in transfers]
        self.assertTrue(all(transfer.done() for transfer in transfers))
        self.refused("io", "write of 1048576 bytes at offset 267386880 failed .*the queue was closed before",
                     transfers[-1].wait)
        self.assertGreater(len([error for error in errors if error]), 32)

    def test_AQueueThatNobodyHasEndsAndSaysWhatItDropped(self):
        file, memory = self.file(), empty(64 * MIB, torch.uint8)
        gc.freeze()  # so that a collection takes much less time than the write
        self.addCleanup(gc.unfreeze)
        queue = Queue(depth=1, block_bytes=4096, engine="threads")
        queue.write(file, 0, memory)
        with self.assertLogs("spillway", "WARNING") as said:
            del queue, memory
            gc.collect()
        self.assertRegex(said.output[0], "1 requests failed, and nobody took .*write of .* .Operation canceled.")
        file.close()

    def test_CtrlCKeepsWhatItInterrupts(self):
        file, queue = self.file(), self.queue()
        plain = queue._library

        class Interrupted:
            def __getattr__(self, name):
                return getattr(plain, name)

            def io_queue_wait(self, *arguments):
                queue._library = plain
                plain.io_queue_wait(*arguments)
                raise KeyboardInterrupt

        queue._library = Interrupted()
        transfer = queue.write(file, 0, empty(4096, torch.uint8).fill_(7))
        with self.assertRaises(KeyboardInterrupt):
            transfer.wait()
        transfer.wait(60)
        self.assertEqual(b"\7" * 4096, self.content())

    def test_AForkedProcessIsRefused(self):
        file, queue = self.file(direct=False), self.queue()
        queue.write(file, 0, b"before").wait()
        child = os.fork()
        if child == 0:
            said = []
            for call in (lambda: queue.read(file, 0, bytearray(6)), queue.wait_all, queue.stats, queue.close):
                try:
                    call()
                except spillway.Error as error:
                    said.append(error.code == "unsupported" and "of which this one is a fork" in str(error))
            with Queue() as own, File(file.path, direct=False) as again:
                said.append(own.read(again, 0, bytearray(6)).wait() == b"before")
            os._exit(7 if said == [True] * 5 else 1)
        self.assertEqual(7, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        queue.write(file, 0, b"behind").wait()
        self.assertEqual(b"behind", self.content())


class Files(IoTest):
    def test_FilesAreMadeFilledAndFound(self):
        file = self.file("one")
        self.refused("exists", "/one: ", File, self.folder / "one", create=True)
        self.refused("not_found", "/other: ", File, self.folder / "other")
        for ask in (lambda: File(f"{self.folder}/a\0b", create=True), lambda: file.rename(f"{self.folder}/a\0b")):
            self.refused("invalid_argument", r"path: '.*/a\\x00b' has a zero character; name", ask)
        os.symlink("one", self.folder / "link")
        with self.assertRaisesRegex(spillway.Error, "/link: "):
            File(self.folder / "link")
        File(self.folder / "link", follow_links=True).close()
        self.assertEqual(0o600, os.stat(file.path).st_mode & 0o777)
        file.preallocate(MIB)
        self.assertEqual(MIB, file.size)
        file.sync()
        file.rename(self.folder / "two")
        self.assertEqual(["link", "two"], sorted(os.listdir(self.folder)))
        self.assertEqual(str(self.folder / "two"), file.path)
        file.lock()
        with File(self.folder / "two", writable=True) as other:
            self.refused("busy", "/two: is in use by another", other.lock)
        self.refused("invalid_argument", "/two: it is closed", lambda: other.size)
        with Queue() as queue:
            queue.write(file, 0, empty(4096, torch.uint8)).wait()
            self.refused("busy", "/two: is in an I/O queue", file.rename, self.folder / "three")
            file.close()  # of which nothing is under way
        file.close()

    def test_MemoryIsZeroAlignedAndOfTheTypeThatIsAsked(self):
        for dtype, kind in ((None, torch.Tensor), (torch.int8, torch.Tensor), ("int16", numpy.ndarray),
                            (numpy.float64, numpy.ndarray)):
            made = empty((3, 5), dtype)
            self.assertIsInstance(made, kind)
            self.assertEqual(((3, 5), 0), (tuple(made.shape), made.sum()))
            address = made.data_ptr() if kind is torch.Tensor else made.ctypes.data
            self.assertEqual(0, address % 4096)
        self.assertEqual(torch.get_default_dtype(), empty(1).dtype)
        self.assertEqual((0, 3), tuple(empty((0, 3), torch.int8).shape))
        self.assertEqual((0, 3), empty((0, 3), "int8").shape)
        self.refused("does_not_fit", "1125899906842624", empty, 1 << 50, torch.uint8)

    def test_ItIsThePackagesWhereDeepSpeedHasAnother(self):
        self.assertIs(sys.modules["spillway.io"], spillway.__getattr__("io"))  # what `import spillway` leads to
        with self.assertRaisesRegex(ImportError, "io.FastFileWriter: is DeepSpeed's, and not here; io.Queue writes"):
            from spillway.io import FastFileWriter  # noqa: F401
        with self.assertRaisesRegex(AttributeError, "io.Files: is not here; .*; nearest is File"):
            spillway.io.Files

    def test_ThePagesProgramRuns(self):
        program, = re.findall(r"(?<=\n```python\n).*?(?=^```$)", (ROOT / "docs/io_python.md").read_text(),
                              re.DOTALL | re.MULTILINE)
        self.addCleanup(os.chdir, os.getcwd())
        os.chdir(self.folder)
        exec(compile(program, "io_python.md", "exec"), {})
        self.assertEqual(64 * MIB, len(self.content("rows.bin")))


if __name__ == "__main__":
    main()
