"""What a pass's last block has run is kept for its backward, as long as nothing comes in between."""
import gc

from case import Case, main
import torch

from toy_model import batches, config, model


class Kept(Case):
    def setUp(self):
        super().setUp()
        self.network = model()
        self.trainer = self.engine(self.network, config(self.folder))
        self.batch, self.other = batches(2)
        self.runs = {"head": 0, "layers.0": 0}
        for block in self.trainer._blocks:
            if block.name in self.runs:
                self.count(block)
        self.trainer.backward(self.trainer(self.batch))  # the plan may be made once more in the first pass
        self.trainer.step()
        self.runs = dict.fromkeys(self.runs, 0)

    def count(self, block):
        run = block.run

        def counted(*arguments, **keywords):
            self.runs[block.name] += 1
            return run(*arguments, **keywords)

        block.run = counted

    def test_TheLastBlockRunsOnceAndOthersTwice(self):
        self.trainer.backward(self.trainer(self.batch))
        self.assertEqual(self.runs, {"head": 1, "layers.0": 2})

    def norms(self, between):
        """Of two engines of the same weights, the second with something in between."""
        found = []
        for number, each in enumerate((lambda engine: None, between)):
            engine = self.engine(model(), config(self.folder, device="none"))
            head, = (block for block in engine._blocks if block.name == "head")
            self.runs["head"] = 0
            self.count(head)
            for step in range(2):
                torch.manual_seed(3)
                loss = engine(self.batch)
                if step:
                    self.runs["head"] = 1
                    each(engine)
                engine.backward(loss)
                norm = engine.step().gradient_norm
            found.append((norm, self.runs["head"]))
        return found

    def test_WhateverComesInBetweenEndsIt(self):
        def evaluate(engine):
            with torch.no_grad():
                engine(self.other)

        def read(engine):
            with engine.weights_of("layers.1"):
                pass

        def read_head(engine):
            with torch.no_grad():
                engine.module.head.weight.sum().item()

        for between, runs in ((evaluate, 3), (read, 1), (read_head, 1), (lambda engine: gc.collect(), 1)):
            (usual, once), (norm, counted) = self.norms(between)
            self.assertEqual((usual, once, counted), (norm, 1, runs))

    def test_ResultsThatAreWrittenToEndIt(self):
        written = []

        engine = self.engine(model(), config(self.folder, device="none"))
        head, = (block for block in engine._blocks if block.name == "head")
        self.count(head)
        engine.module.head.register_forward_hook(lambda module, arguments, output: written.append(output))
        for write_to_it, runs in ((False, 1), (False, 1), (True, 2)):
            written.clear()
            loss = engine(self.batch)
            self.runs["head"] = 1
            if write_to_it:
                with torch.no_grad():
                    written.pop().mul_(1)
            engine.backward(loss)
            self.assertEqual(self.runs["head"], runs)
            engine.step()

    def test_ALossThatIsForgottenGivesTheWeightsBack(self):
        loss = self.trainer(self.batch)
        self.assertIsNotNone(self.trainer.lender._kept())
        del loss
        gc.collect()
        self.assertIsNone(self.trainer.lender._kept())
        self.trainer.backward(self.trainer(self.batch))
        self.trainer.step()
        loss = self.trainer(self.batch)
        self.trainer.discard_step()
        self.assertIsNone(self.trainer.lender._kept())
        loss = self.trainer(self.batch)
        self.trainer.close()
        del loss

    def test_ASecondBackwardRunsTheBlockAgain(self):
        for runs in (2, 1):  # of the first one the plan is made once more, and nothing stays
            self.runs["head"] = 0
            loss = self.trainer(self.batch)
            self.trainer.backward(loss, retain_graph=True)
            self.assertEqual(self.runs["head"], runs)
            self.trainer.backward(loss)
            self.assertEqual(self.runs["head"], runs + 1)
            self.trainer.step()


if __name__ == "__main__":
    main()
