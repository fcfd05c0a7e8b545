"""The program `spillway`, which needs no PyTorch: the command that pip installs begins here and becomes the program."""
import os
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent


def program():
    """Where the program is that came with this package; None in a checkout, whose program is Meson's."""
    found = HERE / "bin/spillway"
    return found if found.exists() else None


def main():
    found = program()
    if found is None:
        sys.exit(f"spillway: {HERE / 'bin/spillway'} is not there, so this package was not installed; "
                 "`pip install .` in the checkout, or `meson install`, brings the program")
    os.environ.setdefault("SPILLWAY_PYTHON", sys.executable)  # what `spillway generate` starts for a tokenizer
    try:
        os.execv(found, ["spillway", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"spillway: {found} cannot be run ({error.strerror}); install the package again")
