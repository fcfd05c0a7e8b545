"""Weights in pieces: what goes wrong in a callback is raised, also where ctypes drops it."""
import collections
import ctypes
import functools
import operator
import unittest.mock

from case import Case, main

import spillway
from spillway.pieces import copying, pieces
from toy_model import model

import torch


class Pieces(Case):
    def setUp(self):
        super().setUp()
        self.out = (ctypes.c_float * 4)()

    def calls(self, function, *before, first=0, known=True):
        """A callback that is called after other functions, and no bytecode in between, as the library would."""
        with pieces(function, lambda: first + 4 if known else None) as callback:
            piece = functools.partial(callback, None, 0, 0, first, self.out, 4)
            collections.deque(map(operator.methodcaller("__call__"), [*before, piece]), 0)

    def test_ValuesAreCopiedAndCounted(self):
        self.calls(copying(lambda *_: torch.arange(4.0)))
        self.assertEqual([0, 1, 2, 3], list(self.out))
        with self.assertRaises(KeyboardInterrupt):  # a piece before this one is missing
            self.calls(copying(lambda *_: torch.arange(8.0)), first=4)

    def test_CtrlCThatCtypesDropsEndsTheCall(self):
        for known in (True, False):  # how many values were to come: of a rank's part that is not
            dropped = []
            with unittest.mock.patch("sys.unraisablehook", dropped.append), self.assertRaises(KeyboardInterrupt):
                self.calls(copying(lambda *_: torch.arange(4.0)), ctypes.pythonapi.PyErr_SetInterrupt, known=known)
            self.assertEqual(([KeyboardInterrupt], [0] * 4), ([each.exc_type for each in dropped], list(self.out)))
        self.calls(copying(lambda *_: torch.arange(4.0)), known=False)
        self.assertEqual([0, 1, 2, 3], list(self.out))

    def test_AnEngineHasEveryWeightOrIsNotMade(self):
        elements = sum(parameter.numel() for parameter in model().parameters())
        whole = self.engine(model())
        self.assertEqual(elements, sum(value.numel() for value in whole.master_weights().values()))
        whole.close()
        library = spillway.library.library()
        with unittest.mock.patch.object(library, "engine_import_weights"), self.assertRaises(KeyboardInterrupt):
            self.engine(model(), on_existing="replace")


if __name__ == "__main__":
    main()
