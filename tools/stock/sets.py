"""Data sets of a few rows, as the files that scripts read. Their words are those of models.py."""
import csv
import json
import pathlib
import random

from .models import WORDS

ROWS = 48


def _text(draw, words):
    return " ".join(draw.choices(WORDS, k=words))


def _lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def text(folder, draw):
    (folder / "train.txt").write_text("".join(_text(draw, draw.randint(8, 20)) + "\n" for _ in range(4 * ROWS)))


def words(folder, draw):
    (folder / "wikitext-2.txt").write_text("".join(_text(draw, 20) + "\n" for _ in range(8000)))


def language(folder, draw):
    _lines(folder / "train.jsonl", [{"text": _text(draw, draw.randint(8, 20))} for _ in range(ROWS)])


def preference(folder, draw):
    _lines(folder / "train.jsonl", [{"prompt": _text(draw, 6), "chosen": " " + _text(draw, draw.randint(4, 8)),
                                     "rejected": " " + _text(draw, draw.randint(4, 8))} for _ in range(ROWS)])


def labelled(folder, draw):
    _lines(folder / "train.jsonl", [{"prompt": _text(draw, 6), "completion": " " + _text(draw, draw.randint(4, 8)),
                                     "label": draw.random() < 0.5} for _ in range(ROWS)])


def prompts(folder, draw):
    _lines(folder / "train.jsonl", [{"prompt": _text(draw, draw.randint(4, 8))} for _ in range(ROWS)])


def instructions(folder, draw):
    _lines(folder / "train.jsonl", [{"instruction": _text(draw, 6), "input": _text(draw, 4), "output": _text(draw, 6)}
                                    for _ in range(ROWS)])


def pairs(folder, draw):
    for name in ("train", "validation"):
        _table(folder / f"{name}.csv", [{"sentence1": _text(draw, 6), "sentence2": _text(draw, 5),
                                         "label": draw.randint(0, 1)} for _ in range(ROWS)])


def sentences(folder, draw):
    for name in ("train", "validation"):
        _table(folder / f"{name}.csv", [{"sentence": _text(draw, 6), "label": draw.randint(0, 1)}
                                        for _ in range(ROWS)])


def translation(folder, draw):
    _lines(folder / "train.jsonl", [{"translation": {"en": _text(draw, 8), "de": _text(draw, 7)}}
                                    for _ in range(ROWS)])


def summaries(folder, draw):
    _table(folder / "train.csv", [{"text": _text(draw, 16), "summary": _text(draw, 4)} for _ in range(ROWS)])


def questions(folder, draw):
    rows = []
    for row in range(ROWS):
        words = draw.choices(WORDS, k=14)
        first = draw.randint(0, 12)
        rows.append({"id": str(row), "question": _text(draw, 4) + " ?", "context": " ".join(words), "answers": {
            "text": [words[first]], "answer_start": [len(" ".join(words[:first])) + (first > 0)]}})
    (folder / "train.json").write_text(json.dumps({"data": rows}))


def tags(folder, draw):
    rows = []
    for _ in range(ROWS):
        words = draw.choices(WORDS, k=8)
        rows.append({"tokens": words, "ner_tags": [draw.choice(["O", "B-PER", "B-LOC"]) for _ in words]})
    _lines(folder / "train.json", rows)


def endings(folder, draw):
    _table(folder / "train.csv", [{"sent1": _text(draw, 6), "sent2": _text(draw, 2), "label": draw.randint(0, 3)} | {
        f"ending{each}": _text(draw, 5) for each in range(4)} for _ in range(ROWS)])


def _picture(path, draw, size=32):
    from PIL import Image
    Image.frombytes("RGB", (size, size), draw.randbytes(3 * size * size)).save(path)


def pictures(folder, draw):
    for row in range(ROWS):
        path = folder / ("cat" if row % 2 else "dog") / f"{row}.png"
        path.parent.mkdir(exist_ok=True)
        _picture(path, draw)


def captions(folder, draw):
    rows = []
    for row in range(ROWS):
        path = folder / f"{row}.png"
        _picture(path, draw)
        rows.append({"image_path": str(path), "caption": _text(draw, 6)})
    _lines(folder / "train.json", rows)


def sounds(folder, draw):
    import wave
    for row in range(ROWS):
        path = folder / "train" / ("no" if row % 2 else "yes") / f"{row}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(draw.randbytes(2 * 1600))


def make(kind, folder):
    """The directory, which is made where it is not there."""
    path = pathlib.Path(folder, kind)
    if not path.exists():
        path.mkdir(parents=True)
        globals()[kind](path, random.Random(1))
    return path
