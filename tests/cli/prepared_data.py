"""Directories as `python -m spillway.prepare` makes them, written as docs/data.md says."""
import hashlib
import json
import random

LENGTH, VOCABULARY = 40, 300


def bits(flags):
    packed = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        packed[i // 8] |= flag << i % 8
    return bytes(packed)


def write_prepared(folder, rows, *, length=LENGTH, **header):
    """`rows`: each some documents, lists of (token, whether it is learned)."""
    folder.mkdir()
    tokens, starts, targets, learned = b"", b"", b"", 0
    for documents in rows:
        ids, begins, wanted = [], [], []
        for document in documents:
            begins += [True] + [False] * (len(document) - 1)
            wanted += [learns for _, learns in document[1:]] + [False]
            ids += [token for token, _ in document]
        padding = length - len(ids)
        learned += sum(wanted)
        begins += [True] * bool(padding) + [False] * max(0, padding - 1)
        ids, wanted = ids + [0] * padding, wanted + [False] * padding
        tokens += b"".join(token.to_bytes(2, "little") for token in ids)
        starts, targets = starts + bits(begins), targets + bits(wanted)
    files = {"tokens": tokens, "starts": starts, "targets": targets}
    for name, data in files.items():
        (folder / f"{name}.bin").write_bytes(data)
    values = {"format": "spillway-prepared", "version": 1, "rows": len(rows), "tokens_per_row": length,
              "documents": sum(map(len, rows)), "pieces": sum(map(len, rows)), "targets": learned, "dtype": "uint16",
              "largest_token": VOCABULARY - 1,
              **{f"{name}_sha256": hashlib.sha256(data).hexdigest() for name, data in files.items()}, **header}
    (folder / "header.json").write_text(json.dumps(values))
    return folder


def documents(seed):
    """Twelve that fill four rows or less, of which parts are learned."""
    chance = random.Random(seed)
    return [[(chance.randrange(VOCABULARY), chance.random() < 0.7 or i == 1) for i in range(chance.randrange(5, 13))]
            for _ in range(12)]
