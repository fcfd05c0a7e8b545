"""Architectures of transformers', each made small: they train and generate on an engine as they do without, unhinted.

An engine is given a model and a configuration, all of it on NVMe, and nothing else: no blocks=, no example=.
"""
import logging
import unittest
import warnings

from case import Case, main, need

need("transformers", "no transformers in this Python; `pip install transformers accelerate` brings it")
import numpy  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from architectures import Lstm, ROWS_OF, causal  # noqa: E402
from toy_model import DEVICE, config  # noqa: E402

STEPS = 3
NEW = hasattr(torch, "compile")
CACHES = ("Mamba", "Gemma2")  # of which transformers 4.44 generates with newer PyTorch alone
transformers.logging.set_verbosity_error()
logging.getLogger("spillway").setLevel(logging.WARNING)


def moved(batch):
    return {name: value.to(DEVICE) if torch.is_tensor(value) else value for name, value in batch.items()}


def seed(step):
    torch.manual_seed(step)
    numpy.random.seed(step)  # wav2vec2 masks by it


def losses(network, batch, backward, step):
    found = []
    for index in range(STEPS):
        seed(index)
        loss = network(**moved(batch(10 + index)))["loss"]
        backward(loss)
        step()
        found.append(loss.item())
    return found


class Architectures(Case):
    def check(self, make, batch, question):
        seed(1)
        plain = make().to(DEVICE).train()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.01)

        def step():
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        wanted = losses(plain, batch, torch.Tensor.backward, step)
        seed(1)
        engine = self.engine(make().train(), config(self.folder))
        found = losses(engine, batch, engine.backward, engine.step)
        self.assertEqual(wanted[0], found[0])
        for one, other in zip(wanted, found):
            self.assertAlmostEqual(one, other, delta=1e-5 * abs(one))
        self.assertNotEqual(found[0], found[-1])
        if question is not None:
            plain.load_state_dict(engine.state_dict())
            texts = []
            for network in (plain, engine):
                network.eval()
                seed(2)
                texts.append(network.generate(**moved(question(20)), max_new_tokens=4, do_sample=False))
            self.assertEqual(*(text.tolist() for text in texts))
        engine.close()

    def test_AnLstm(self):
        self.check(Lstm, causal, None)


def test_of(configuration, kind, small, batch, question):
    def test(self):
        if missing := [name for name in (configuration, kind) if not hasattr(transformers, name)]:
            self.skipTest(f"transformers {transformers.__version__} has no {missing[0]}")
        # Through oneDNN, Debian's PyTorch 1.13 gives other gradients of a convolution each time, up to infinite ones.
        with warnings.catch_warnings(), torch.backends.mkldnn.flags(enabled=NEW):
            warnings.simplefilter("ignore")
            self.check(lambda: getattr(transformers, kind)(getattr(transformers, configuration)(**small)), batch,
                       None if kind.startswith(CACHES) and not NEW else question)
    return test


for title, row in ROWS_OF.items():
    name = "test_" + "".join(letter for letter in title if letter.isalnum())
    setattr(Architectures, name, test_of(*row))

if __name__ == "__main__":
    main()
