"""What the engine has of one parameter beside the weight that forward uses: its fp32 master, the optimizer's states,
and the gradient that step() would take. Of several ranks all read and write the same one together."""
import torch

from ..library import GRADIENT, MASTER, OPTIMIZERS, Error
from ..pieces import floats, pieces
from .away import AwayParameter

# As PyTorch's optimizers name what the library keeps as the first and the second moment.
STATES = {name: state for states in OPTIMIZERS.values() for name, state in states.items()}


def engine_of(parameter):
    """The engine that has the parameter's values; None: it is an ordinary one."""
    lender = getattr(parameter, "_spillway_lender", lambda: None)()
    engine = lender and lender.engine()
    if engine is None and isinstance(parameter, AwayParameter):
        raise Error("invalid_argument", f"{parameter._spillway_names[0]}: has no values any more, since its engine has "
                                        "ended; keep the engine for as long as its model is used")
    return engine


def read(parameter, values=MASTER):
    """In fp32 and CPU memory. `values`: MASTER, EXP_AVG, EXP_AVG_SQ or GRADIENT."""
    engine, place = engine_of(parameter), parameter._spillway_place
    found = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")

    def copy(_, __, first, piece, count):
        found.view(-1)[first:first + count] = floats(piece, count)

    with pieces(copy, parameter.numel) as callback:
        engine._library.engine_read_values(engine._open(), values, *place, callback, None)
    return found


def write(parameter, value, values=MASTER, root=0):
    """Master and states are committed at once. Of several ranks `root`'s value is written, and the others' is not
    looked at; where that does not fit, all of them raise."""
    engine, place = engine_of(parameter), parameter._spillway_place
    gives, given, failure = engine.ranks is None or engine.ranks.rank == root, None, None
    if gives and value.shape != parameter.shape:
        failure = Error("invalid_argument", f"{parameter._spillway_names[0]}: is given {tuple(value.shape)} and has "
                                            f"{tuple(parameter.shape)}; give a tensor of its shape")
    elif gives:
        given = value.detach().to(device="cpu", dtype=torch.float32).contiguous()
    engine.lender.return_all()
    engine._has_states = engine._has_states or values not in (MASTER, GRADIENT)
    try:
        engine._library.engine_write_values(engine._open(), values, *place, given.data_ptr() if given is not None else
                                            None, 0 if given is None else given.numel(),
                                            0 if engine.ranks is None else root)
    except Error:
        if failure is not None:
            raise failure from None
        raise


def has_gradient(parameter):
    """The step has brought one, on some rank."""
    engine = engine_of(parameter)
    brought = engine._gradients.brought(*parameter._spillway_place)
    return brought if engine.ranks is None else any(engine.ranks.each(brought))


def read_gradient(parameter):
    """As step() would take it; None where the step has brought none."""
    if not has_gradient(parameter):
        return None
    _complete(engine_of(parameter))
    return read(parameter, GRADIENT)


def write_gradient(parameter, value):
    if not has_gradient(parameter):
        raise Error("invalid_argument", f"{parameter._spillway_names[0]}: has no gradient in this step, so that none "
                                        "can be put in its place")
    _complete(engine_of(parameter))
    write(parameter, value, GRADIENT)


def _complete(engine):
    """A block's gradients are all there once it is told of those that do not come."""
    if engine.step_is_due:
        engine._push_what_is_missing()
