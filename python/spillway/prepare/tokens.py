"""A tokenizer for `spillway generate`, which starts this as a process: lines of JSON in, and one out for each.

    {"prompt": "…", "chat": false}   ->  {"tokens": [1, 2]}
    {"token": 3}                     ->  {"text": "…"}      whole characters, perhaps none yet
    {"end": true}                    ->  {"text": "…"}      what is left

What is wrong is answered by {"error": {"object": …, "happened": …, "hint": …}}, which is the last line.
"""
import json
import os
import sys

from ..library import Error
from .failing import needed, wrong
from .tokenizing import Tokenizer

CONTEXT = 6  # tokens before a new one that its text may depend on: whether it begins with a space, say


class Speaker:
    """Text as its tokens come."""

    def __init__(self, place):
        self.place, self.tokenizer = place, Tokenizer(tokenizer=place)
        # Text up to `shown` has been shown; `context` is where its decoding begins.
        self.ids, self.context, self.shown = [], 0, 0

    def prompt(self, text, chat):
        inner = self.tokenizer.inner
        if chat:
            needed("jinja2", "chat templates")
            if not inner.chat_template:
                raise wrong(self.place, "has no chat template", "leave --chat out, or take the model's own tokenizer")
            try:
                ids = inner.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                tokenize=True, return_dict=True)["input_ids"]
            except Exception as error:  # jinja2's, and what a template's expressions raise
                raise wrong(self.place, f"its chat template does not take the prompt ({type(error).__name__}: "
                            f"{error})", "leave --chat out") from error
        else:
            ids = inner(text, add_special_tokens=True)["input_ids"]
        self.ids = [int(token) for token in ids]
        self.context, self.shown = max(0, len(self.ids) - CONTEXT), len(self.ids)
        return self.ids

    def _decoded(self, ids):
        return self.tokenizer.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def add(self, token):
        """The text that is complete with it; "" while it ends inside a character."""
        self.ids.append(token)
        return self._new(whole=True)

    def rest(self):
        return self._new(whole=False)

    def _new(self, whole):
        before = self._decoded(self.ids[self.context:self.shown])
        now = self._decoded(self.ids[self.context:])
        if len(now) <= len(before) or (whole and now.endswith("\ufffd")):
            return ""
        self.context, self.shown = self.shown, len(self.ids)
        return now[len(before):]


def answer(speaker, request):
    if "prompt" in request:
        return {"tokens": speaker.prompt(request["prompt"], request.get("chat", False))}
    return {"text": speaker.add(request["token"]) if "token" in request else speaker.rest()}


def error_of(error):
    """`<object>: <what happened>; <what to do>`, taken apart again."""
    happened_to, _, rest = str(error).partition(": ")
    happened, _, hint = rest.rpartition("; ")
    return {"object": happened_to, "happened": happened or rest, "hint": hint}


def main():
    # What others print goes to standard error, so that answers are alone.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    speaker = None
    for line in sys.stdin.buffer:
        try:
            if speaker is None:
                speaker = Speaker(sys.argv[1])
            reply = answer(speaker, json.loads(line))
        except Error as error:
            reply = {"error": error_of(error)}
        print(json.dumps(reply), file=answers, flush=True)
        if "error" in reply:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
