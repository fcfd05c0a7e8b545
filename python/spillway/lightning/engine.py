"""The engine of a LightningModule, which a Trainer's next run may begin anew."""
import contextlib
import json
import os
import tempfile

import torch

from .. import log
from ..engine import buffers
from ..engine.engine import DTYPES, Engine
from ..engine.optimizer import EngineOptimizer
from ..library import Error, library, parse_config, settings_of

STORE = "spillway.store"


class LightningEngine(Engine):
    """Its module keeps it, and so has its weights for as long as it lives: after fit(), too."""

    fitted = False  # a run has trained with it

    def __init__(self, module, configuration, **options):
        super().__init__(module, configuration, **options)
        module.__dict__["_spillway_engine"] = self

    def begin_again(self, configuration, aio, room, existing, snapshot=None, weights=None):
        """With that configuration, and a snapshot, or weights by name and no states: without both
        its own, exactly. The store that it has made is replaced; another one if `existing` is
        "replace". `room`: a directory where its own weights may be in between."""
        self.agree(lambda: self._check(configuration, aio, existing))
        self.discard_step()
        self.agree(self._refuse_held)
        if snapshot is not None or weights is not None:
            self._replace(configuration, aio, snapshot, weights)
            return
        with contextlib.ExitStack() as stack:
            made = []
            self.agree(lambda: made.append(stack.enter_context(folder_in(room))))
            written, read = os.path.join(made[0], "weights"), []
            written = self.ranks.same(written) if self.ranks else written
            self.export_weights(written, torch.float32, False)
            if self.ranks:
                written = self.ranks.same_files(written, made[0])
            self.agree(lambda: read.append(stack.enter_context(weights_in(written))))
            self._replace(configuration, aio, None, read[0])
            if self.ranks:
                self.ranks.same()  # no other one reads in the folder any more

    def _check(self, configuration, aio, existing):
        """What would be found when the weights are gone already."""
        with log.silent():  # the configuration is read once more
            parsed = parse_config(configuration, aio, self._processes)
        try:
            dtype, settings = DTYPES[library().config_weights(parsed)], settings_of(parsed)
        finally:
            library().config_destroy(parsed)
        if dtype != self.dtype or settings["spillway.device"] != self.settings["spillway.device"]:
            raise Error("invalid_argument", f"module: its weights are {self.dtype} on "
                                            f"{self.device.type}, as its first run had them; make "
                                            "module and Trainer anew for another type or device")
        own = self.settings.get("spillway.nvme_paths", [])
        for path in settings.get("spillway.nvme_paths", []):
            place = os.path.join(path, f"rank{self.ranks.rank}") if self.ranks else path
            there = path not in own and os.path.exists(os.path.join(place, STORE))
            if there and existing != "replace":
                raise Error("exists", f"{path}: a store exists, of another run; name another "
                                      "nvme_path, or start over "
                                      'with on_existing="replace"')

    def _replace(self, configuration, aio, snapshot, weights):
        of_own, self._own_ranks = self._own_ranks, False  # which stay
        self._end()
        self._own_ranks = of_own
        try:
            self._read_config(configuration, aio)
            self._layout.accumulate(self._accumulation)
            self._create("replace", snapshot)
            if snapshot is None:
                self._import(weights)
        except BaseException as error:
            self._end()
            if isinstance(error, Error):
                raise Error(error.code, f"{error}; the engine has ended: make module and Trainer "
                                        "anew", error.remedy) from None
            raise
        self.fitted = False
        EngineOptimizer(self.module).attach(self)
        self._begin_step()


@contextlib.contextmanager
def folder_in(room):
    os.makedirs(room, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".spillway-", dir=room) as folder:
        yield folder


@contextlib.contextmanager
def weights_in(folder):
    """A function from names to values, of what export() wrote."""
    safetensors = buffers.safetensors_of("weights: are read")
    index = os.path.join(folder, buffers.INDEX)
    if os.path.exists(index):
        with open(index, encoding="utf-8") as file:
            places = json.load(file)["weight_map"]
    else:
        with safetensors.safe_open(os.path.join(folder, buffers.WEIGHTS), "pt") as file:
            places = dict.fromkeys(file.keys(), buffers.WEIGHTS)
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(safetensors.safe_open(os.path.join(folder, name), "pt"))
                 for name in set(places.values())}

        def weights(name):
            if name not in places:
                raise Error("invalid_argument", f"{folder}: has no {name}; it is of another model")
            return files[places[name]].get_tensor(name)

        yield weights
