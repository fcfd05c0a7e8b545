"""DeepSpeed's behaviours of backward passes that a script's own code makes."""
from case import main

import torch

from behaviours import WIDTH, Behaviours, data, simple


class Backward(Behaviours):
    def test_UserLossBackward(self):
        engine = self.engine_of()
        self.assert_refused(engine(*data()[0]).backward)

    def test_MultipleBackwardsOneStep(self):
        engine = self.engine_of()
        engine.backward(engine(*data()[0]))
        self.assert_refused(engine.backward, engine(*data()[0]))

    def test_MultiOutputModel(self):
        class Twice(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.l = torch.nn.Linear(WIDTH, WIDTH)

            def forward(self, x, y):
                return [torch.nn.functional.cross_entropy(self.l(x), y) for _ in range(2)]

        torch.manual_seed(1)
        network, reference = Twice(), Twice()
        reference.load_state_dict(network.state_dict())
        engine = self.engine_of(network)
        engine.backward(sum(engine(*data()[0])))
        sum(reference.to(engine.device)(*data()[0])).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0).item()
        self.assertAlmostEqual(norm, engine.step().gradient_norm, delta=1e-5)

    def test_MultipleEnginesOneLoss(self):
        one, other = self.engine_of(), self.engine_of(simple())
        self.assert_refused(one.backward, one(*data()[0]) + other(*data()[0]))

    def test_RetainGraph(self):
        engine = self.engine_of()
        self.assert_refused(engine.backward, engine(*data()[0]), retain_graph=True)


if __name__ == "__main__":
    main()
