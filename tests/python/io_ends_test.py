"""What of spillway.io ends while others use it: transfers that several threads wait for, views, collected objects."""
import gc
import logging
import pathlib
import sys
import tempfile
import threading
import unittest
from unittest import mock

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests")]
from report import main  # noqa: E402
import spillway  # noqa: E402
from spillway.io import File, Queue, TensorStore, empty, places, queues, saved_tensors, tensor_store  # noqa: E402

MIB = 1 << 20
PATIENCE = 60  # seconds


class Ends(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="spillway-io-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        torch.manual_seed(1)

    def store(self, name="store", **options):
        made = TensorStore(self.folder / name, nvme_bytes=16 * MIB, host_bytes=4 * MIB, **options)
        self.addCleanup(made.close)
        return made

    def refused(self, code, words, function, *arguments):
        with self.assertRaises(spillway.Error) as caught:
            function(*arguments)
        self.assertEqual(code, caught.exception.code, caught.exception)
        self.assertIn(words, str(caught.exception))

    def in_thread(self, function):
        """Which comes to its end."""
        thread = threading.Thread(target=function, daemon=True)
        thread.start()
        self.addCleanup(thread.join, PATIENCE)
        return thread


class Transfers(Ends):
    """Of a GPU's memory: here the CPU's stands for it."""

    def setUp(self):
        super().setUp()
        patched = mock.patch.object(places, "is_elsewhere", torch.is_tensor)
        patched.start()
        self.addCleanup(patched.stop)
        self.file = File(self.folder / "file", create=True)
        self.addCleanup(self.file.close)
        self.queue = Queue()
        self.addCleanup(self.queue._cancel)
        self.values, self.into = torch.randn(1000), torch.zeros(1000)
        self.queue.write(self.file, 0, self.values).wait()

    def test_NoneIsOverBeforeItsCopyIsKnownOf(self):
        found = []

        class NotSeen(dict):
            def __setitem__(_, key, transfer):  # noqa: N805
                if transfer._over:  # so another thread need not wait any more
                    transfer.wait()
                    found.append(torch.equal(self.values, self.into))
                dict.__setitem__(_, key, transfer)

        self.queue._not_seen = NotSeen()
        self.queue.read(self.file, 0, self.into).wait()
        self.assertNotIn(False, found)
        self.assertTrue(torch.equal(self.values, self.into))
        self.assertEqual({}, self.queue._not_seen)

    def test_NobodyGoesOnBeforeTheCopyIsUnderWay(self):
        arriving, may_arrive, order = threading.Event(), threading.Event(), []
        real = places.Place.arrive

        def arrive(place):
            arriving.set()
            may_arrive.wait(PATIENCE)
            real(place)
            order.append("arrived")

        def wait():
            transfer.wait()
            order.append("went on")

        with mock.patch.object(places.Place, "arrive", arrive):
            transfer = self.queue.read(self.file, 0, self.into)
            first = self.in_thread(wait)
            self.assertTrue(arriving.wait(PATIENCE))
            second = self.in_thread(wait)
            second.join(0.5)  # which is not over by itself
            may_arrive.set()
            first.join(PATIENCE)
            second.join(PATIENCE)
        self.assertEqual("arrived", order[0])
        self.assertEqual(2, order.count("went on"))

    def test_EveryStreamThatWaitsHasIt(self):
        transfer = self.queue.read(self.file, 0, self.into)
        streams = [mock.Mock(), mock.Mock(), mock.Mock()]
        with mock.patch.object(places, "stream_of", lambda tensor: streams[0]):
            for _ in range(3):
                transfer.wait()
                streams.append(streams.pop(0))
        copies, *others = streams
        copies.record_event.assert_called_once_with()
        for other in others:
            self.assertEqual([mock.call.wait_event(copies.record_event.return_value)], other.method_calls)
        self.assertTrue(torch.equal(self.values, self.into))


class Views(Ends):
    def open(self):
        store = self.store(hbm_bytes=4 * MIB, device="host")
        store.put("a", torch.ones(1000))
        return store

    def test_AGpuThatFailsLeavesNothingPinned(self):
        store, stream = self.open(), mock.Mock()
        stream.synchronize.side_effect = RuntimeError("the GPU has failed")
        with mock.patch.object(torch.cuda, "current_stream", lambda device: stream):
            with self.assertRaisesRegex(RuntimeError, "the GPU has failed"), store.pinned("a"):
                store._gpu = 0  # as if it had been one
        store._gpu = None
        self.assertFalse(store.info("a").pinned_in_hbm)
        store.delete("a")

    def test_AStoreThatClosesHasNone(self):
        store = self.open()
        with mock.patch.object(store, "_end", lambda: self.refused("invalid_argument", "it is closed; open it again",
                                                                   store.pinned("a").__enter__)):
            store.close()

    def test_ItIsOfWhatIsPinned(self):
        store = self.open()
        real = store._library

        class Library:
            """Another thread has replaced the tensor by the time that it is pinned."""

            def __getattr__(self, name):
                return getattr(real, name)

            def tensor_store_pin(self, *arguments):
                store.delete("a")
                store.put("a", torch.arange(3))
                real.tensor_store_pin(*arguments)

        store._library = Library()
        with store.pinned("a") as tensor:
            self.assertEqual([0, 1, 2], tensor.tolist())
        store._library = real


class Collecting(logging.Handler):
    """The garbage collector comes by whenever something is said."""

    def emit(self, record):
        gc.collect()


class Collected(Ends):
    """In a message, whose thread may have what it ends for itself: then another one ends it."""

    def setUp(self):
        super().setUp()
        logger, handler = logging.getLogger("spillway"), Collecting()
        logger.addHandler(handler)
        self.addCleanup(logger.removeHandler, handler)
        gc.collect()
        gc.disable()
        self.addCleanup(gc.enable)
        self.ended_by, self.ended = [], threading.Event()

    def ends_elsewhere(self, library, name, make):
        real = getattr(library, name)

        def end(*arguments):
            self.ended_by.append(threading.current_thread())
            real(*arguments)
            self.ended.set()

        with mock.patch.object(library, name, end):
            made = make()
            made.itself = made
            del made
            spillway.library.log.sink(None, 1, b"something")
            self.assertTrue(self.ended.wait(PATIENCE))
        self.assertIsNot(threading.main_thread(), self.ended_by[0])

    def test_AStore(self):
        self.ends_elsewhere(tensor_store.calls(), "tensor_store_close", lambda: TensorStore(host_bytes=4 * MIB))

    def test_AQueue(self):
        self.ends_elsewhere(queues.calls(), "io_queue_destroy", Queue)

    def test_ATensorOfAutograds(self):
        store = self.store()
        store.put("saved", torch.zeros(10))
        self.ends_elsewhere(store._library, "tensor_store_remove",
                            lambda: saved_tensors._Saved(store, "saved", torch.device("cpu")))
        self.assertNotIn("saved", store)

    def test_MemoryWhileOtherMemoryIsMade(self):
        ends = []

        class CollectingDict(dict):
            def __setitem__(self, key, value):
                gc.collect()
                super().__setitem__(key, value)

        def make():
            with mock.patch.object(places, "_ends", CollectingDict(places._ends)):
                first = empty(4096, torch.uint8)
                end = first.data_ptr() + 4096
                cycle = [first]
                cycle.append(cycle)
                del first, cycle
                empty(4096, "uint8")
                ends.append(end in places._ends)

        self.in_thread(make).join(PATIENCE)
        self.assertEqual([False], ends)


if __name__ == "__main__":
    main()
