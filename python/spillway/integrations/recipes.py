"""What the programs have in common: a configuration that a YAML file names, and a trainer's class of
theirs with an engine below it."""
from ..library import Error
from ..trainer import Mixin
from ..trainer.config import found

VARIABLE = "SPILLWAY_CONFIG"


def configuration(named):
    """A dict. `named`: what the YAML file has under `deepspeed:`, a path or a mapping; None: the
    file that SPILLWAY_CONFIG names, else weights and states in host memory."""
    return found(named or None, (VARIABLE,))


def trainer_of(kind, chosen, on_existing, replacing):
    """`kind` with the Mixin before it. `replacing`: what the YAML file says to replace a store.

    Classes of these programs have a create_optimizer() of their own, which makes other optimizers
    where the YAML file says so, and nothing where it does not. The caller has refused the former.
    """
    class Trainer(Mixin, kind):
        own_optimizers_are_refused = False

        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, spillway=chosen, on_existing=on_existing, **keywords)

        def _make_engine(self, total_steps):
            try:
                super()._make_engine(total_steps)
            except Error as error:
                if "on_existing" not in str(error):
                    raise
                # Its words are a script's.
                raise Error(error.code, f"{error}; in the YAML file that is {replacing}", error.remedy) from None

    Trainer.__name__ = Trainer.__qualname__ = kind.__name__
    Trainer.__doc__ = kind.__doc__
    return Trainer


def refuse(program, found):
    """One error of all that a YAML file asks for and does not get. `found`: pairs of whether, what."""
    lines = [words for wrong, words in found if wrong]
    if lines:
        raise Error("unsupported", f"{program}: not with Spillway:\n  " + "\n  ".join(lines))
