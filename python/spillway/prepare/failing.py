"""Errors in the house's form, and packages that are imported when they are needed."""
import importlib

from ..library import Error


def failed(code, happened_to, happened, hint):
    """An Error: `<object>: <what happened>; <what to do>`."""
    happened = " ".join(happened.splitlines())  # other packages' words have several
    return Error(code, f"{happened_to}: {happened}; {hint}")


def wrong(happened_to, happened, hint):
    return failed("invalid_argument", happened_to, happened, hint)


def unreadable(path, error, hint="check its name and its permissions"):
    """Of an OSError. `path`: what was read."""
    code = "not_found" if isinstance(error, FileNotFoundError) else "io"
    return failed(code, path, f"cannot be read ({error.strerror or error})", hint)


def needed(package, what_for):
    """The package, imported."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        # Another package that it does not find, too: its message has the name.
        raise failed("not_found", package, f"is needed for {what_for} and cannot be imported "
                     f"({error})", f"`pip install {package}`") from None
