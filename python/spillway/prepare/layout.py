"""Documents as they wait on the disk, and rows as they lie there in the end: docs/data.md."""
import array
import hashlib
import json
import os

FORMAT, VERSION = "spillway-prepared", 1
LEARNED = 1 << 31  # in the spool: the token is to be predicted
BATCH_BYTES = 8 << 20
DTYPES = {"<u2": "uint16", "<u4": "uint32"}


class Spool:
    """Documents one after the other in a file: their tokens as uint32, with what is to be learned in the
    highest bit. Memory holds 8 bytes a document."""

    def __init__(self, path, np):
        self.path, self.np, self.tokens = path, np, 0
        self.lengths = array.array("Q")
        self._file = open(path, "xb")

    def append(self, ids, loss):
        np = self.np
        self._file.write((ids | np.where(loss, np.uint32(LEARNED), np.uint32(0))).astype("<u4").tobytes())
        self.lengths.append(len(ids))
        self.tokens += len(ids)

    def finished(self):
        """(all of it, mapped; where each document begins; its length)."""
        self._file.close()
        lengths = self.np.frombuffer(self.lengths, self.np.uint64).astype(self.np.int64)
        return self.np.memmap(self.path, "<u4", "r"), self.np.cumsum(lengths) - lengths, lengths

    def close(self):
        self._file.close()


class Summed:
    """A file, and the sha256 of what went into it."""

    def __init__(self, path):
        self._file, self._digest = open(path, "xb"), hashlib.sha256()

    def write(self, data):
        self._file.write(data)
        self._digest.update(data)

    def finish(self):
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()


def pieces_of(begins, lengths, room, np):
    """(begins, lengths) of pieces of at most `room` tokens, in the order of the documents."""
    counts = -(-lengths // room)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    return begins[document] + number * room, np.minimum(room, lengths[document] - number * room)


def learned(spool, begins, lengths, np):
    """Which of these pieces have something to learn. A piece's first token is not predicted."""
    return np.fromiter((bool((spool[begin + 1:begin + length] >= LEARNED).any())
                        for begin, length in zip(begins.tolist(), lengths.tolist())), bool, len(begins))


def write_rows(folder, spool, pieces, rows, room, pad, dtype, np):
    """Writes the three files. `pieces`: (begin in the spool, length, row) of each, as arrays.

    Returns what the header says of them.
    """
    begins, lengths, row_of = pieces
    order = np.argsort(row_of, kind="stable")
    begins, lengths, row_of = begins[order], lengths[order], row_of[order]
    files = {name: Summed(os.path.join(folder, f"{name}.bin")) for name in ("tokens", "starts", "targets")}
    batch = max(1, BATCH_BYTES // (8 * room))
    targets_in_all, largest = 0, 0
    ends = np.searchsorted(row_of, np.arange(rows), "right")
    piece = 0
    for first in range(0, rows, batch):
        count = min(batch, rows - first)
        tokens = np.full((count, room), pad, np.uint32)
        starts, targets = np.zeros((count, room), bool), np.zeros((count, room), bool)
        for row in range(count):
            at = 0
            for piece in range(piece, int(ends[first + row])):
                begin, length = int(begins[piece]), int(lengths[piece])
                values = spool[begin:begin + length]
                tokens[row, at:at + length] = values & (LEARNED - 1)
                targets[row, at:at + length - 1] = values[1:] >= LEARNED
                starts[row, at] = True
                at += length
            piece = int(ends[first + row])
            if at < room:
                starts[row, at] = True  # padding is a document of its own, of which nothing is learned
        largest = max(largest, int(tokens.max()))
        targets_in_all += int(targets.sum())
        files["tokens"].write(tokens.astype(dtype).tobytes())
        files["starts"].write(np.packbits(starts, axis=1, bitorder="little").tobytes())
        files["targets"].write(np.packbits(targets, axis=1, bitorder="little").tobytes())
    sums = {f"{name}_sha256": file.finish() for name, file in files.items()}
    return {"rows": rows, "tokens_per_row": room, "dtype": DTYPES[dtype],
            "document_tokens": int(lengths.sum()),
            "targets": targets_in_all, "largest_token": largest, **sums}


def write_header(folder, values):
    with open(os.path.join(folder, "header.json"), "x", encoding="utf-8") as file:
        json.dump({"format": FORMAT, "version": VERSION, **values}, file, indent=1, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
