"""Ctrl-C at any line of the package that a step runs: what is documented of an exception holds after it."""
from case import Case as Folder
from case import main

import os
import sys

import torch

import spillway
from spillway.engine import away
from toy_model import DEVICE, config

PACKAGE = os.path.dirname(spillway.__file__)
FILES = {os.path.join(PACKAGE, f"{name}.py") for name in (
    "library", "memory", *(f"engine/{name}" for name in (
        "away", "engine", "gradients", "leases", "lent", "optimizer", "uses", "visits")))}
# Every so many lines; SPILLWAY_CASES set: fewer. SPILLWAY_EVERY_LINE=1 strikes each of them.
EACH = 1 if os.environ.get("SPILLWAY_EVERY_LINE") else 3 if os.environ.get("SPILLWAY_CASES") is None else 9
X = torch.linspace(-1, 1, 16).view(2, 8).to(DEVICE)


class Interrupt:
    """Raises KeyboardInterrupt before the line that is the `after`th to be run; a line after a call of the library is
    what Python's own handler of SIGINT strikes most."""

    def __init__(self, after):
        self.left, self.place = after, None

    def __enter__(self):
        sys.settrace(lambda frame, event, _: self.look(frame, event) if frame.f_code.co_filename in FILES else None)

    def __exit__(self, kind, error, _):
        sys.settrace(None)  # PyTorch before 2.0 makes another kind of what comes in a hook of its own
        return kind is KeyboardInterrupt or str(error).startswith("KeyboardInterrupt")

    def look(self, frame, event, _=None):
        if event == "line" and frame.f_code.co_name != "__del__":  # where Python itself drops it
            self.left -= 1
            if self.left < 0:
                self.place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self.look


def network(lends=False):
    torch.manual_seed(3)
    made = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))
    made.forward = lambda x: made[1](made[0](x)).pow(2).mean()  # the last one gets no gradient
    if lends:  # but its weight, of a use outside of it
        made.forward = lambda x: torch.nn.functional.linear(made[1](made[0](x)), made[2].weight).pow(2).mean()
    return made


class Interrupts(Folder):
    def everywhere(self, engine, run, behind, each=EACH):
        """behind(place) for each line of run(engine), interrupted there. `each`: or every second, third, …."""
        for after in range(0, 10000, each):
            interrupt = Interrupt(after)
            with interrupt:
                run(engine)
            if interrupt.place is None:
                self.assertGreater(after, 100)
                return
            with self.subTest(place=interrupt.place, after=after):
                behind(interrupt.place)

    def assert_trains(self, engine):
        before = engine.current_step
        for _ in range(2):
            engine.backward(engine(X))
        self.assertEqual(before + 1, engine.step().step)
        self.assertIsInstance(engine.module[0].weight, away.AwayParameter)

    def assert_goes_on(self, run, device, discards, lends=False, each=EACH):
        engine = self.engine(network(lends), config(self.folder, device=device, accumulation=2), on_existing="replace")
        self.assert_trains(engine)

        def behind(place):
            if discards:
                engine.discard_step()
            engine.master_weights({"0.weight"})  # as save() and export(), which take longer
            self.assert_trains(engine)

        self.everywhere(engine, run, behind, each)
        engine.save(self.folder / f"saved-{device}", replace=True)
        engine.close()

    def test_InForward(self):
        def forward(engine):
            engine(X)

        for device in ("cpu", "nvme"):
            self.assert_goes_on(forward, device, True)
        self.assert_goes_on(forward, "cpu", False)  # nothing has come of it that is to be discarded

    def test_InBackwardAndStep(self):
        def step(engine):
            for _ in range(2):
                engine.backward(engine(X))
            engine.step()

        for device in ("cpu", "nvme"):
            self.assert_goes_on(step, device, True)
        self.assert_goes_on(step, "cpu", True, lends=True, each=37)  # a weight outside of its block

    def test_InAStepItIsMadeOrDiscarded(self):
        engine = self.engine(network(), config(self.folder, device="cpu"))
        engine.backward(engine(X))
        made = 0

        def behind(_):
            nonlocal made
            if engine.step_is_due:  # it had not begun
                self.assertEqual((made, made + 1), (engine.current_step, engine.step().step))
            self.assertIn(engine.current_step - made, (0, 1))
            made = engine.current_step
            engine.backward(engine(X))

        self.everywhere(engine, lambda engine: engine.step(), behind)
        self.assertGreater(made, 10 // EACH)

    def test_CloseWorksBehindIt(self):
        for after in range(0, 400, 25):
            engine = self.engine(network(), config(self.folder, device="cpu"))
            with Interrupt(after):
                engine.backward(engine(X))
            engine.close()


if __name__ == "__main__":
    main()
