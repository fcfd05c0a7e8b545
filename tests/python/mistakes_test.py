"""What a first try gets wrong is an error in words, with what to do instead."""
import copy
import io
import pickle

from case import Case, main

import torch

import spillway
from toy_model import batches, config, model, train


class Mistakes(Case):
    def test_NoConfigurationOrModel(self):
        for given in (None, 7, []):
            self.assert_error(rf"^config: is a {type(given).__name__}; give the path of a ds_config\.json, or a dict",
                              spillway.Engine, model(), given)
        for given in ("gpt2", None):
            self.assert_error(rf"^model: is a {type(given).__name__}; give a torch\.nn\.Module", spillway.Engine, given,
                              config(self.folder))

    def test_SavingTheModelItself(self):
        engine = self.engine(model())
        for whole in (engine.module, engine.module.layers[0]):
            for save in (lambda: torch.save(whole, io.BytesIO()), lambda: pickle.dumps(whole),  # noqa: B023
                         lambda: torch.save({"model": whole}, io.BytesIO())):  # noqa: B023
                self.assert_error(r"model: its weights are Spillway's and cannot be saved with it; torch\.save\(\) "
                                  r"takes its state_dict\(\), engine\.export\(DIR\)", save)
        self.assert_error("cannot be copied with it", copy.deepcopy, engine.module)
        torch.save(engine.module.state_dict(), io.BytesIO())

    def test_LoadingAStateIntoIt(self):
        network = model()
        network.register_buffer("count", torch.zeros(2))
        state = {name: value.clone() for name, value in network.state_dict().items()}
        engine = self.engine(network)
        of_block = {name[len("layers.0."):]: value for name, value in state.items() if name.startswith("layers.0.")}
        for module, values in ((network, state), (network.layers[0], of_block)):
            for strict in (True, False):
                self.assert_error(r"^load_state_dict: would write \S+weight, whose values are Spillway's; "
                                  r"call it before the engine is made, or give weights=", module.load_state_dict,
                                  values, strict)
        network.load_state_dict({"count": torch.ones(2)}, strict=False)  # no weight
        self.assertEqual([1, 1], network.count.tolist())
        before = engine.current_step
        train(engine, 1)
        self.assertEqual((before + 1, 4), (engine.current_step, len(batches(1)[0])))


if __name__ == "__main__":
    main()
