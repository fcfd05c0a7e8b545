"""What the library has to say, as records of Python's logger "spillway"."""
import contextlib
import logging
import sys
import threading

logger = logging.getLogger("spillway")
_now = threading.local()
rank = 0  # of several processes that train a model together


def say(level, message):
    """Where nobody has configured logging, a line on stderr, whatever its level: as the library alone would. Of other
    ranks than the first these are warnings, and say whose they are."""
    if logger.hasHandlers():
        logger.log(level, "%s", message)
    elif (not logger.level or level >= logger.level) and (not rank or level >= logging.WARNING):
        print(f"spillway: {f'rank {rank}: ' if rank else ''}{message}", file=sys.stderr)


@contextlib.contextmanager
def silent():
    """For calls that are made once more, and say the same: messages in the caller's thread are left out."""
    _now.silent = True
    try:
        yield
    finally:
        _now.silent = False


def sink(_, warning, message):
    """Of the library, which calls it from any of its threads, one call at a time."""
    if getattr(_now, "silent", False):
        return
    with called_back():
        say(logging.WARNING if warning else logging.INFO, message.decode(errors="replace"))


@contextlib.contextmanager
def called_back():
    """Around Python that the library's threads run, or that they wait for: the garbage collector may come by in it."""
    before, _now.saying = saying(), True
    try:
        yield
    finally:
        _now.saying = before


def saying():
    """Whether the caller runs where the library calls back, which cannot wait for the library."""
    return getattr(_now, "saying", False)
