"""deepspeed.utils' leaf modules, which ZeRO-3 gathers as a whole: for Spillway blocks=, if it is called before
initialize(). A block keeps working where a batch leaves some of its modules out, which is why scripts call it."""

from ..engine.blocks import default_blocks

FLAG = "_z3_leaf"


def _found(modules, names, raise_if_not_found):
    if not modules and raise_if_not_found:
        raise ValueError(f"No modules of type {names} found in model")
    return modules


def _kind(module, kind):
    if isinstance(kind, str):
        own = type(module)
        return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, kind)


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """`leaf_module_classes`: classes, or their names."""
    modules = [each for each in model.modules() if any(_kind(each, kind) for kind in leaf_module_classes)]
    for module in _found(modules, leaf_module_classes, raise_if_not_found):
        set_z3_leaf_module(module, True)
    return modules


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    modules = [each for each in model.modules() if any(_kind(each, kind) for kind in leaf_module_classes)]
    for module in _found(modules, leaf_module_classes, raise_if_not_found):
        set_z3_leaf_module(module, False)
    return modules


def _by(model, names, matches, flag, raise_if_not_found):
    named = dict(model.named_modules())
    modules, missing = [], []
    for wanted in names:
        found = [module for name, module in named.items() if matches(name, wanted)]
        modules += [module for module in found if module not in modules]
        missing += [] if found else [wanted]
    for module in modules:
        set_z3_leaf_module(module, flag)
    if missing and raise_if_not_found:
        raise ValueError(f"No modules named {missing} found in model")
    return modules, missing


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    return _by(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    return _by(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def set_z3_leaf_module(model, flag):
    setattr(model, FLAG, flag)


def z3_leaf_module(model):
    return getattr(model, FLAG, False)


def z3_leaf_parameter(parameter):
    """A parameter knows no module here, and so is of none."""
    return False


def get_z3_leaf_modules(model):
    return [module for module in model.modules() if z3_leaf_module(module)]


def blocks_of(model):
    """For Engine's blocks=: leaves that are marked and in none of the blocks that there would be anyway; None: there
    are no such. A model that is a leaf itself is one block."""
    leaves = get_z3_leaf_modules(model)
    if model in leaves:
        return [model]
    held = {id(each) for block in (default_blocks(model) if leaves else ()) for each in block[1].modules()}
    return [leaf for leaf in leaves if id(leaf) not in held] or None
