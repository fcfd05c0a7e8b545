"""Files that are there as a whole or not at all, also after a power cut."""
import contextlib
import errno
import os


def write(path, put):
    """`put`: writes what is in it to a file."""
    path = os.fspath(path)
    try:
        with open(path + ".new", "wb") as file:
            put(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".new", path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(path + ".new")
        raise
    sync(os.path.dirname(path))


def sync(directory):
    """Which names are in it."""
    place = os.open(directory or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(place)
    except OSError as error:
        if error.errno != errno.EINVAL:  # nothing to sync there, as in tmpfs
            raise
    finally:
        os.close(place)
