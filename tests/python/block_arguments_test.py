"""What a block may do with its arguments and buffers, of which its second run must see what the first one saw."""
from case import main

import torch

from line_blocks import DEVICE, X, Case, Line, lines


class Arguments(Case):
    def test_WhatRunsTwiceMustNotChangeAnything(self):
        class Writes(Line):
            def forward(self, x, context):
                context["aux"] = context["aux"] + x.sum()
                return self.linear(x)

        engine = self.engine(torch.nn.Sequential(Writes()))
        self.assert_error("0: changes an argument or a buffer", engine.module[0], X, {"aux": torch.zeros(())})
        engine.close()

        class Doubles(Line):
            def forward(self, x, seen=None):
                if seen is None:
                    x.mul_(2)
                else:
                    seen.append(x)
                return self.linear(x)

        engine = self.engine(torch.nn.Sequential(Doubles()))
        self.assert_error("0: changes an argument or a buffer", engine, X.clone())
        self.assert_error("0: changes an argument or a buffer", engine.module[0], X, seen=[])

    def test_ACacheInABufferMayGrow(self):
        def grows(self, x):
            if self.count < 1:
                self.count = torch.ones((), device=DEVICE)
            return x + self.count

        engine = self.engine(lines(grows))
        for step in (1, 2):
            engine.backward(engine(X).sum())
            self.assertEqual(step, engine.step().step)
        engine.close()

    def test_ABufferMustNotChangeBeforeBackward(self):
        def adds(self, x):
            return x + self.count

        def write(block):
            block.count += 1

        def replace(block):
            block.count = block.count + 1

        for change in (write, replace):
            engine = self.engine(lines(adds))
            loss = engine(X).sum()
            change(engine.module[0])
            self.assert_error("0: has a buffer that was changed between forward and backward", engine.backward, loss)
            engine.backward(engine(X).sum())
            change(engine.module[0])
            self.assertEqual(1, engine.step().step)
            engine.close()

    def test_CachesAreRefused(self):
        class DynamicCache:
            pass

        engine = self.engine(lines(None))
        block = engine.module[0]
        self.assert_error("0: is given a cache of keys and values", block, X, DynamicCache())
        self.assert_error("0: is given a cache of keys and values", block, X, past_key_values=())
        with torch.no_grad():
            block(X, DynamicCache())

    def test_ATensorFromAsideIsRefused(self):
        for other in (lambda x: x, lambda x: torch.ones(8, device=DEVICE, requires_grad=True)):
            aside = []
            engine = self.engine(lines(None, lambda _, x: x + aside[0] if aside else x))
            engine.backward(engine(X).sum())  # without it
            engine.step()
            engine.module[0].register_forward_hook(lambda _, __, x: aside.append(other(x)))
            self.assert_error("1: computes with a tensor that wants a gradient and is neither an argument nor",
                              lambda: engine.backward(engine(X).sum()))
            engine.close()


if __name__ == "__main__":
    main()
