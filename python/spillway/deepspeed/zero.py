"""deepspeed.zero, for scripts that make their model in its Init."""
import logging

from .. import log

ELSEWHERE = {
    "GatheredParameters": "engine.weights_of(module), with a block or its name, lends its weights to be read; other "
                          "values are given before initialize(), or by its weights=",
    "register_external_parameter": "leave it away, and name the module that reads another's weights in blocks=",
}


class Init:
    """A context in which a model is made as without it, whole and in memory, which is said once."""

    _said = False

    def __init__(self, *_, enabled=True, **__):
        self._enabled = enabled

    def __enter__(self):
        if self._enabled and not Init._said:
            Init._said = True
            log.say(logging.WARNING, "zero.Init: has no effect, and the model is made whole in host memory; make one "
                                     "that does not fit there on device meta, by accelerate's init_empty_weights(), "
                                     "and give initialize() its weights=")
        return self

    def __exit__(self, *_):
        return False


def __getattr__(name):
    words = f": is DeepSpeed's, and not here; {ELSEWHERE[name]}" if name in ELSEWHERE else ": is not here"
    raise AttributeError(f"zero.{name}{words}")
