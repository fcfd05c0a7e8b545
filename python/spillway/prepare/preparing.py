"""From files of records to a directory of rows."""
import contextlib
import os
import shutil
import sys
import tempfile
import time

from .. import whole_files
from ..library import VERSION as LIBRARY_VERSION
from . import layout, packing
from .failing import failed, wrong
from .records import files_of, records_of
from .tokenizing import Tokenizer

SAY_EVERY_SECONDS = 10


def prepare(options):
    """Writes options.out; returns its header, and that of the evaluation part or None."""
    if os.path.lexists(options.out):
        raise failed("exists", options.out, "is there already", "name another --out, or remove it")
    files = files_of(options.files)
    tokenizer = Tokenizer(options.model, options.tokenizer, options.chat_template, options.eos_token, options.loss,
                          options.assistant_only)
    parent, name = os.path.split(os.path.abspath(options.out))
    try:
        folder = tempfile.mkdtemp(prefix=name + ".", suffix=".new", dir=parent)
    except OSError as error:
        raise failed("io", options.out, f"cannot be made ({error.strerror})", "name a directory in one that is there "
                     "and may be written to") from None
    try:
        headers = _Preparation(options, files, tokenizer, folder).run()
        whole_files.sync(folder)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(folder, 0o777 & ~mask)
        if os.path.lexists(options.out):  # a rename would replace an empty directory
            raise failed("exists", options.out, "was made meanwhile", "name another --out, or remove it")
        os.rename(folder, options.out)
        whole_files.sync(parent)
        return headers
    except OSError as error:
        raise failed("io", options.out, f"cannot be written ({error.strerror or error})",
                     "see that the disk has room for it") from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)


class _Preparation:
    def __init__(self, options, files, tokenizer, folder):
        self.options, self.files, self.tokenizer, self.folder = options, files, tokenizer, folder
        self.np = tokenizer.numpy
        self.left_out = {"empty": 0, "without_targets": 0}
        self.too_long, self.longest = [0, None], (0, None)  # how many, the first; the longest
        self.truncated = 0

    def run(self):
        path = os.path.join(self.folder, "spool")
        spool = layout.Spool(path, self.np)
        try:
            self._fill(spool)
            documents = len(spool.lengths)
            if documents == 0:
                left = sum(self.left_out.values())
                raise wrong(self.files[0] if len(self.files) == 1 else f"{len(self.files)} files",
                            f"there is nothing to learn: {left} documents were left out" if left
                            else "there is no document", "check what is in them")
            tokens, begins, lengths = spool.finished()
            held = self._held_out(documents)
            headers = [self._write(self.folder, "train", tokens, begins[~held], lengths[~held])]
            if held.any():
                place = os.path.join(self.folder, "eval")
                os.mkdir(place)
                headers.append(self._write(place, "eval", tokens, begins[held], lengths[held]))
                whole_files.sync(place)
            del tokens
            return (*headers, None)[:2]
        finally:
            spool.close()
            with contextlib.suppress(OSError):
                os.remove(path)

    def _fill(self, spool):
        said = time.monotonic()
        for file in self.files:
            for document in self.tokenizer.documents(records_of(file, self.options.paragraphs)):
                self._take(spool, document)
                if time.monotonic() - said > SAY_EVERY_SECONDS:
                    said = time.monotonic()
                    print(f"{document.place}: {len(spool.lengths)} documents, {spool.tokens} tokens",
                          file=sys.stderr)
        if self.too_long[0]:
            count, (place, length) = self.too_long
            more = "" if count == 1 else \
                f", and so are {count - 1} more, the longest of {self.longest[0]} tokens at {self.longest[1]}"
            raise wrong(place, f"a document of {length} tokens is longer than a row of {self.options.seq}{more}",
                        f"take --seq {self.longest[0]}, --long truncate or --long split")

    def _take(self, spool, document):
        place, ids, loss = document
        room = self.options.seq
        if len(ids) == 0:
            self._useless("empty", place, "an empty document", "leave it out")
            return
        cut = len(ids) > room and self.options.long == "truncate"
        if len(ids) > room and self.options.long == "refuse":
            self.too_long[0] += 1
            self.too_long[1] = self.too_long[1] or (place, len(ids))
            self.longest = max(self.longest, (len(ids), place), key=lambda pair: pair[0])
            return
        if cut:
            ids, loss = ids[:room], loss[:room]
        if not loss[1:].any():
            why = f"its first {room} tokens have" if cut else \
                "it has one token, and so" if len(ids) == 1 else "it has"
            self._useless("without_targets", place, f"{why} no target: nothing of it would be learned",
                          "take a larger --seq" if cut else "leave it out")
            return
        self.truncated += cut
        spool.append(ids, loss)

    def _useless(self, kind, place, happened, hint):
        if not self.options.skip_useless:
            raise wrong(place, happened, f"{hint}, or take --skip-useless")
        self.left_out[kind] += 1

    def _held_out(self, documents):
        """Which documents are for evaluation."""
        np, asked = self.np, self.options.holdout
        held = np.zeros(documents, bool)
        if asked is None:
            return held
        count = asked if isinstance(asked, int) else max(1, round(asked * documents))
        if count >= documents:
            raise wrong("--holdout", f"{count} of {documents} documents would be held out, and none is left to "
                        "train on", "hold fewer out")
        held[packing.order_of(self.options.seed, "holdout", documents, np)[:count]] = True
        return held

    def _write(self, folder, part, tokens, begins, lengths):
        np, options, room = self.np, self.options, self.options.seq
        documents = len(lengths)
        begins, lengths = layout.pieces_of(begins, lengths, room, np)
        pieces = len(lengths)
        if pieces > documents:
            useful = layout.learned(tokens, begins, lengths, np)
            begins, lengths = begins[useful], lengths[useful]
        if options.no_packing:
            row_of, rows = np.arange(len(lengths)), len(lengths)
        else:
            row_of, rows = packing.packed(lengths, room, np)
        if options.shuffle:
            row_of = packing.order_of(options.seed, "rows", rows, np)[row_of]
        tokenizer = self.tokenizer
        dtype = "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"
        written = layout.write_rows(folder, tokens, (begins, lengths, row_of), rows, room, tokenizer.pad, dtype, np)
        if written["targets"] == 0:
            raise wrong(f"the {part} part", "has no target: nothing would be learned",
                        "see --long and --seq, which cut documents")
        header = {
            "part": part, **written, "documents": documents, "pieces": len(lengths),
            "pieces_left_out": pieces - len(lengths),
            "vocab_size": tokenizer.vocabulary, "tokenizer_ids": tokenizer.ids,
            "pad_token_id": tokenizer.pad, "eos_token_id": tokenizer.eos,
            "tokenizer": {"name": os.path.basename(tokenizer.place), "sha256": tokenizer.files(),
                          "chat_template_sha256": tokenizer.chat_template_sha256},
            "files": self.files, "left_out": self.left_out, "truncated": self.truncated,
            "options": {name: getattr(options, name) for name in (
                "loss", "assistant_only", "long", "no_packing", "paragraphs", "shuffle", "skip_useless", "eos_token",
                "holdout", "seed")},
            "spillway": LIBRARY_VERSION}
        layout.write_header(folder, header)
        return header
