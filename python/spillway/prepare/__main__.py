"""`python -m spillway.prepare`: docs/data.md."""
import argparse
import os
import signal
import sys

from ..library import Error
from .preparing import prepare


def _row(text):
    value = int(text)
    if not 2 <= value <= 1 << 24:
        raise argparse.ArgumentTypeError("a row has from 2 to 16777216 tokens")
    return value


def _holdout(text):
    try:
        value = int(text) if text.isdigit() else float(text)
    except ValueError:
        value = 0
    if (isinstance(value, int) and value >= 1) or (isinstance(value, float) and 0 < value < 1):
        return value
    raise argparse.ArgumentTypeError(f"{text!r} is neither a number of documents nor a share between 0 and 1")


def parser():
    made = argparse.ArgumentParser(
        prog="python -m spillway.prepare", allow_abbrev=False,
        description="Makes texts and conversations rows of tokens for `spillway finetune`. Nothing is downloaded.")
    made.add_argument("files", nargs="+", metavar="FILE",
                      help="JSON lines, .json arrays, .txt, .parquet, .arrow; globs in quotes, too")
    made.add_argument("--out", required=True, metavar="DIR", help="the directory to make")
    made.add_argument("--seq", required=True, type=_row, metavar="T", help="tokens of a row")
    made.add_argument("--model", metavar="DIR", help="of its tokenizer, and of the vocabulary")
    made.add_argument("--tokenizer", metavar="DIR|FILE", help="another tokenizer: a directory, or a tokenizer.json")
    made.add_argument("--chat-template", metavar="FILE", help="in the place of the tokenizer's own")
    made.add_argument("--eos-token", metavar="TOKEN",
                      help="what ends a text or a completion; the tokenizer's own; '' for nothing")
    made.add_argument("--assistant-only", action="store_true",
                      help="conversations: only what an assistant says is learned")
    made.add_argument("--loss", choices=("completion", "all"), default="completion",
                      help="prompt and completion: what is learned (completion)")
    made.add_argument("--long", choices=("refuse", "truncate", "split"), default="refuse",
                      help="documents longer than a row (refuse)")
    made.add_argument("--no-packing", action="store_true", help="a document a row")
    made.add_argument("--paragraphs", action="store_true", help=".txt: blank lines end a document, not only the file")
    made.add_argument("--skip-useless", action="store_true",
                      help="leave out, and count, documents that are empty or have nothing to learn")
    made.add_argument("--holdout", type=_holdout, metavar="N",
                      help="documents for evaluation, in DIR/eval: a share (0.01) or a number (200)")
    made.add_argument("--shuffle", action="store_true", help="rows in an order drawn by --seed")
    made.add_argument("--seed", type=int, default=0, help="of --holdout and --shuffle (0)")
    return made


def said_of(header):
    places = header["rows"] * header["tokens_per_row"]
    return (f"{header['part']}: {header['rows']} rows of {header['tokens_per_row']} tokens, "
            f"{header['documents']} documents, {header['document_tokens']} tokens, {header['targets']} of them "
            f"learned; packed to {100 * header['document_tokens'] / places:.2f} %")


def main(arguments=None):
    # Nothing is looked up anywhere else; these names are read when the packages are imported.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it has advice about models
    made = parser()
    options = made.parse_args(arguments)
    if not options.model and not options.tokenizer:
        made.error("--model or --tokenizer is needed: whose tokens these are")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was begun is removed
    try:
        train, held_out = prepare(options)
    except Error as error:
        sys.exit(f"spillway: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for header in filter(None, (train, held_out)):
        print(said_of(header))
    left = train["left_out"]
    counts = {"left out, empty": left["empty"], "left out, with nothing to learn": left["without_targets"],
              "truncated": train["truncated"]}
    for what, count in counts.items():
        if count:
            print(f"{what}: {count} documents")
    if pieces := sum(header["pieces_left_out"] for header in filter(None, (train, held_out))):
        print(f"left out, with nothing to learn: {pieces} pieces of documents that were split")


if __name__ == "__main__":
    main()
