"""A model's tokenizer, and records as tokens with what is to be learned of them."""
import collections
import hashlib
import json
import os
import re

from .failing import failed, needed, unreadable, wrong

# ids: uint32, loss: bool; loss[i]: token i is to be predicted from those before it.
Document = collections.namedtuple("Document", "place ids loss")

# As transformers looks for it.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
HOW_TO_MARK = ("put {% generation %} before and {% endgeneration %} after what an assistant says, in a copy of "
               "the template, and name that by --chat-template; or leave --assistant-only out")
VOCABULARIES = re.compile(r"(tokenizer\.json|vocab\..*|.*\.model|.*\.tiktoken)\Z")
FILES = re.compile(r"(tokenizer.*|vocab\..*|.*\.model|.*\.tiktoken|merges\.txt|special_tokens_map\.json|"
                   r"added_tokens\.json|chat_template.*)\Z")
BATCH_RECORDS, BATCH_CHARACTERS = 256, 1 << 20
MOST_ID = 2**31 - 1  # the spool keeps what is to be learned in the highest bit


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def vocabulary_of(model):
    """"vocab_size" of a model's config.json; None where it has none."""
    path = os.path.join(model, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except OSError as error:
        raise unreadable(path, error, "--model wants the directory of a model") from None
    except ValueError as error:
        raise wrong(path, f"is no JSON ({error})", "take the file as the model came with it") from None
    if not isinstance(config, dict):
        raise wrong(path, "is no JSON object", "take the file as the model came with it")
    inner = config.get("text_config")
    size = config.get("vocab_size") or (inner.get("vocab_size") if isinstance(inner, dict) else None)
    if size is not None and (not isinstance(size, int) or size < 1):
        raise wrong(path, '"vocab_size" is no whole number', "take the file as the model came with it")
    return size


class Tokenizer:
    """`model`, `tokenizer`: directories, or a tokenizer.json; the latter counts where both are given.

    `vocabulary`: of the model, else how many ids the tokenizer has. `eos_token`: in the place of the
    tokenizer's own; "" for none."""

    def __init__(self, model=None, tokenizer=None, chat_template=None, eos_token=None, loss="completion",
                 assistant_only=False):
        self.loss_on_all, self.assistant_only = loss == "all", assistant_only
        self.numpy = needed("numpy", "tokens")
        place = tokenizer or model
        self.place = os.path.normpath(place)
        self.model_vocabulary = vocabulary_of(model) if model else None
        self.inner = self._opened(place)
        if not getattr(self.inner, "is_fast", False):
            raise failed("unsupported", place, "is a slow tokenizer, which does not say where its tokens lie in "
                         "a text", "save it as a tokenizer.json")
        self.inner.model_max_length = int(1e30)  # long documents are this program's to judge
        self.ids = max(self.inner.get_vocab().values(), default=-1) + 1
        if self.ids - 1 > MOST_ID:
            raise wrong(place, f"has an id of {self.ids - 1}", "ids are below 2^31")
        self.vocabulary = self.model_vocabulary or self.ids
        self.template = None
        if chat_template:
            try:
                with open(chat_template, encoding="utf-8") as file:
                    self.template = file.read()
            except OSError as error:
                raise unreadable(chat_template, error) from None
            except UnicodeDecodeError as error:
                raise wrong(chat_template, f"is no UTF-8 at its byte {error.start}", "save it as UTF-8") from None
        self.chat_template_sha256 = None  # of the one that was used
        self._templates = {}
        self.eos, self._eos_token = self._eos(eos_token), eos_token
        pad = self.inner.pad_token_id
        pad = pad if pad is not None else self.eos if self.eos is not None else 0
        self.pad = pad if 0 <= pad < self.vocabulary else 0

    def _opened(self, place):
        if not os.path.exists(place):
            raise failed("not_found", place, "there is no such directory or file",
                         "download the model first; nothing is downloaded here")
        transformers = needed("transformers", "a tokenizer")
        # transformers 5 makes an empty tokenizer of a directory without one.
        if os.path.isdir(place) and not any(map(VOCABULARIES.match, os.listdir(place))):
            raise failed("not_found", place, "holds no tokenizer: there is no tokenizer.json, nor another vocabulary",
                         "name the tokenizer's directory by --tokenizer")
        try:
            if os.path.isdir(place):
                return transformers.AutoTokenizer.from_pretrained(
                    place, local_files_only=True, trust_remote_code=False)  # None would ask on the terminal
            # The second is of decoding; some versions warn where it is left open.
            return transformers.PreTrainedTokenizerFast(tokenizer_file=place, clean_up_tokenization_spaces=False)
        except ImportError as error:
            raise failed("not_found", place, f"needs a package that is missing ({error})", "install it") from None
        except Exception as error:  # whatever the files make of it: OSError, ValueError, KeyError, tokenizers' own
            raise wrong(place, f"holds no tokenizer that transformers can open ({type(error).__name__}: {error})",
                        "take the files as the model came with them, and a transformers as new as they are") from error

    def _eos(self, token):
        if token == "":
            return None
        if token is None:
            return self.inner.eos_token_id
        found = self.inner.get_vocab().get(token)
        if found is None:
            raise wrong("--eos-token", f"{self.place} has no token {token!r}", "name one that it has")
        return found

    def files(self):
        """Name and sha256 of each."""
        if os.path.isfile(self.place):
            return {os.path.basename(self.place): sha256_of(self.place)}
        return {name: sha256_of(os.path.join(self.place, name)) for name in sorted(os.listdir(self.place))
                if FILES.match(name) and os.path.isfile(os.path.join(self.place, name))}

    def documents(self, records):
        """A Document of each Record. One without a token is there as well."""
        waiting, characters = [], 0
        for record in records:
            if record.kind == "text":
                waiting.append(record)
                characters += len(record.values["text"])
                if len(waiting) < BATCH_RECORDS and characters < BATCH_CHARACTERS:
                    continue
            yield from self._texts(waiting)
            waiting, characters = [], 0
            if record.kind == "messages":
                yield self._conversation(record)
            elif record.kind == "prompt and completion":
                yield self._completion(record)
            elif record.kind != "text":
                yield self._answered(record)
        yield from self._texts(waiting)

    def _made(self, place, ids, loss=None):
        np = self.numpy
        ids = np.asarray(ids, np.int64)
        if len(ids) and (ids.max() >= self.vocabulary or ids.min() < 0):
            at = int(np.argmax((ids >= self.vocabulary) | (ids < 0)))
            token = self.inner.convert_ids_to_tokens(int(ids[at]))
            raise wrong(place, f"token {ids[at]} ({token!r}), its number {at + 1}, is outside the vocabulary of "
                        f"{self.vocabulary}", "take the model's own tokenizer, or a model whose embedding was "
                        "resized for it")
        loss = np.ones(len(ids), bool) if loss is None else np.asarray(loss, bool)
        return Document(place, ids.astype(np.uint32), loss)

    def _ended(self, place, ids):
        if self._eos_token is None and self.eos is None:
            raise wrong(place, f"no token ends it: {self.place} has no end-of-sequence token",
                        "name one by --eos-token, or --eos-token '' for none")
        return [*ids, self.eos] if self.eos is not None and (not ids or ids[-1] != self.eos) else ids

    def _refuse_assistant_only(self, record):
        if self.assistant_only:
            raise wrong(record.place, f"is {record.kind}, which has no turns of an assistant",
                        "leave --assistant-only out, or prepare it for itself")

    def _texts(self, records):
        if not records:
            return
        self._refuse_assistant_only(records[0])
        encoded = self.inner([record.values["text"] for record in records], add_special_tokens=True)["input_ids"]
        for record, ids in zip(records, encoded):
            empty = not record.values["text"].strip()
            yield self._made(record.place, [] if empty else self._ended(record.place, ids))

    def _completion(self, record):
        self._refuse_assistant_only(record)
        prompt, completion = record.values["prompt"], record.values["completion"]
        if not completion.strip():
            return self._made(record.place, [])
        encoded = self.inner(prompt + completion, add_special_tokens=True, return_offsets_mapping=True)
        ids = self._ended(record.place, encoded["input_ids"])
        # A token that has part of both is learned, as transformers has it at the ends of an assistant's turns.
        loss = [end > max(start, len(prompt)) for start, end in encoded["offset_mapping"]]
        loss += [True] * (len(ids) - len(loss))
        if self.eos is not None and ids[-1] == self.eos:
            loss[-1] = True  # also where the tokenizer puts it there itself
        return self._made(record.place, ids, None if self.loss_on_all else loss)

    def _template_of(self, place, tools):
        """The text of the template. Which one it is may depend on whether there are tools."""
        if bool(tools) not in self._templates:
            needed("jinja2", "chat templates")
            try:
                text = self.inner.get_chat_template(self.template, tools)
            except Exception:  # ValueError; older ones have more kinds
                raise wrong(self.place, f"has no chat template, which {place} needs",
                            "name one by --chat-template") from None
            if self.assistant_only and not GENERATION.search(text):
                raise wrong(self.template and "--chat-template" or self.place,
                            "its chat template does not say what an assistant says: it has no {% generation %}",
                            HOW_TO_MARK)
            self._templates[bool(tools)] = text
            if self.chat_template_sha256 is None:
                self.chat_template_sha256 = hashlib.sha256(text.encode()).hexdigest()
        return self._templates[bool(tools)]

    def _rendered(self, record, messages, **options):
        template = self._template_of(record.place, record.values["tools"])
        try:
            return self.inner.apply_chat_template(
                messages, tools=record.values["tools"], chat_template=template, tokenize=True, return_dict=True,
                **options)
        except Exception as error:  # jinja2's, and what a template's expressions raise
            raise wrong(record.place, f"the chat template does not take it ({type(error).__name__}: {error})",
                        "repair the record, or name another template by --chat-template") from error

    def _conversation(self, record):
        made = self._rendered(record, record.values["messages"], return_assistant_tokens_mask=self.assistant_only)
        return self._made(record.place, made["input_ids"],
                          made["assistant_masks"] if self.assistant_only else None)

    def _answered(self, record):
        """A prompt and a completion of messages: one conversation, whose beginning is the prompt."""
        values = record.values
        whole = self._rendered(record, [*values["prompt"], *values["completion"]],
                               return_assistant_tokens_mask=self.assistant_only)
        ids = whole["input_ids"]
        loss = self.numpy.ones(len(ids), bool)
        if self.assistant_only:
            loss &= self.numpy.asarray(whole["assistant_masks"], bool)
        if not self.loss_on_all:
            for generating in (True, False):
                prompt = self._rendered(record, values["prompt"], add_generation_prompt=generating)["input_ids"]
                if list(ids[:len(prompt)]) == list(prompt):
                    break
            else:
                raise wrong(record.place, "the chat template renders its prompt alone otherwise than before its "
                            "completion", 'put both into "messages" and take --assistant-only, or --loss all')
            loss[:len(prompt)] = False
        return self._made(record.place, ids, loss)
