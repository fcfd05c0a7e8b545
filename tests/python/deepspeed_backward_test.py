"""DeepSpeed's behaviours of backward passes that a script makes: as the tables of docs/deepspeed_calls.md say,
they hold, or are refused."""
from case import main

import torch

from spillway.utils import safe_get_full_grad, safe_set_full_grad
from behaviours import WIDTH, Behaviours, data, simple, table


class Backward(Behaviours):
    def gradients(self, loss_of, *networks):
        """Norms of PyTorch's, all by themselves."""
        for network in networks:
            network.to(data()[0][0].device)
        loss_of(*networks)
        return [torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0).item() for network in networks]

    def assert_norms(self, wanted, *engines):
        for norm, engine in zip(wanted, engines):
            engine.step()
            self.assertAlmostEqual(norm, engine.get_global_grad_norm(), delta=1e-5)

    def holds(self, name):
        return table()[name] == "holds"

    def test_UserLossBackward(self):
        engine = self.engine_of()
        if not self.holds("user loss backward"):
            return self.assert_refused(engine(*data()[0]).backward)
        engine(*data()[0]).backward()
        return self.assert_norms(self.gradients(lambda network: network(*data()[0]).backward(), simple()), engine)

    def test_MultipleBackwardsOneStep(self):
        engine, batches = self.engine_of(), data(2)
        engine.backward(engine(*batches[0]))
        if not self.holds("multiple backwards one step"):
            return self.assert_refused(engine.backward, engine(*batches[1]))
        engine.backward(engine(*batches[1]))
        return self.assert_norms(self.gradients(
            lambda network: [network(*batch).backward() for batch in batches], simple()), engine)

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
        self.assert_norms(self.gradients(lambda other: sum(other(*data()[0])).backward(), reference), engine)

    def test_MultipleEnginesOneLoss(self):
        one, other = self.engine_of(), self.engine_of(simple(layers=3))
        loss = one(*data()[0]) + other(*data()[0])
        if not self.holds("multiple engines one loss"):
            return self.assert_refused(one.backward, loss)
        loss.backward()
        return self.assert_norms(self.gradients(
            lambda *networks: sum(network(*data()[0]) for network in networks).backward(), simple(),
            simple(layers=3)), one, other)

    def test_RetainGraph(self):
        engine = self.engine_of()
        loss = engine(*data()[0])
        if not self.holds("retain graph"):
            return self.assert_refused(engine.backward, loss, retain_graph=True)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        return self.assert_norms(self.gradients(
            lambda network: (2 * network(*data()[0])).backward(), simple()), engine)

    def test_GradientsAreReadAndWrittenAfterPassesOfAnyNumber(self):
        def spare():  # has parameters that no pass brings a gradient
            network = simple()
            network.spare = torch.nn.Linear(WIDTH, 3)
            return network

        for drive in (lambda engine, loss: loss.backward(),
                      lambda engine, loss: engine.backward(loss, retain_graph=True)):
            ends = []
            for looks in (True, False):
                engine = self.engine_of(spare())
                for x, y in data(2):
                    drive(engine, engine(x, y))
                    for parameter in [*engine.module.parameters()] * 2 if looks else ():
                        gradient = safe_get_full_grad(parameter)
                        if gradient is not None:
                            safe_set_full_grad(parameter, gradient)
                            self.assertTrue(torch.equal(gradient, safe_get_full_grad(parameter)))
                    engine.step()
                ends.append(engine.master_weights())
                engine.close()
            for name, value in ends[0].items():
                self.assertTrue(torch.equal(value, ends[1][name]), name)


if __name__ == "__main__":
    main()
