"""A trained model as a directory that from_pretrained() takes: Engine.export()."""
import os

from . import buffers
from .library import Error


def adapters(engine, dtype):
    """The trained tensors of a model of peft's, all of which are in memory for it."""
    names = {name for name, parameter in engine.module.named_parameters() if parameter.requires_grad}
    return {name: value.to(dtype) for name, value in engine.master_weights(names).items()}


def export(engine, directory, dtype, replace):
    """Where there is a model already, and it is not to be replaced, the export goes to a directory beside it before the
    error is raised: the end of a script is no place to lose the training."""
    write = _adapters if hasattr(engine.module, "peft_config") else _model
    try:
        write(engine, directory, dtype, replace)
    except Error as error:
        if error.code != "exists":
            raise
        beside, number = os.fspath(directory).rstrip("/"), 2
        while os.path.exists(f"{beside}-{number}"):
            number += 1
        write(engine, f"{beside}-{number}", dtype, False)
        raise Error(error.code, f"{error}; this time it was exported to {beside}-{number}") from None


def _model(engine, directory, dtype, replace):
    buffers.check(engine.module)
    engine.export_weights(directory, dtype, replace)
    buffers.save(engine.module, directory)


def _adapters(engine, directory, dtype, replace):
    if not replace and os.path.isdir(directory) and any(n.startswith("adapter_") for n in os.listdir(directory)):
        raise Error("exists", f"{os.fspath(directory)}: holds an adapter; name another directory, or say replace=True")
    engine.module.save_pretrained(os.fspath(directory), state_dict=adapters(engine, dtype))
