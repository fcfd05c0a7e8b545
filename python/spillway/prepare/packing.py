"""Which documents go into which row: best fit, longest first. Pure."""
import bisect
import hashlib


def order_of(seed, purpose, count, np):
    """A permutation of 0 … count - 1 by a seed: the same with every version of numpy."""
    keys = np.empty(count, np.uint64)
    for number in range(count):
        digest = hashlib.blake2b(f"{seed} {purpose} {number}".encode(), digest_size=8).digest()
        keys[number] = int.from_bytes(digest, "little")
    return np.argsort(keys, kind="stable")


def packed(lengths, room, np):
    """(row of each piece, how many rows). Lengths are from 1 to `room`.

    Each piece, the longest first, goes into the row with the least space that takes it, else into a
    new one: best fit decreasing, which takes at most 11/9 of the fewest rows possible, and a few
    (Johnson 1974). Rows are numbered by their first piece, so they keep the order of the data as far
    as they can.
    """
    rows = np.empty(len(lengths), np.int64)
    by_space, spaces, opened = {}, [], 0  # rows by what is left in them; which spaces there are, sorted
    for piece in np.argsort(-lengths.astype(np.int64), kind="stable"):
        length = int(lengths[piece])
        at = bisect.bisect_left(spaces, length)
        if at == len(spaces):
            row, space = opened, room
            opened += 1
        else:
            space = spaces[at]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        rows[piece] = row
        left = space - length
        if left > 0:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    return in_order(rows, opened, np), opened


def in_order(rows, count, np):
    """The same rows, numbered by their first piece."""
    first = np.full(count, len(rows), np.int64)
    np.minimum.at(first, rows, np.arange(len(rows)))
    number = np.empty(count, np.int64)
    number[np.argsort(first, kind="stable")] = np.arange(count)
    return number[rows]
