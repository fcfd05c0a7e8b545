"""Files of records: where each is, of which kind it is, and what it says."""
import collections
import glob
import json
import os
import re

from .failing import failed, needed, unreadable, wrong

# place: for messages, `<file>: line 3` or `<file>: record 3`.
Record = collections.namedtuple("Record", "place kind values")

KINDS = {"messages": ("messages",), "conversations": ("conversations",),
         "prompt and completion": ("prompt", "completion"), "text": ("text",)}
SHOWN_KINDS = '{"messages"}, {"conversations"}, {"prompt", "completion"} or {"text"}'
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
         "system": "system", "tool": "tool"}
BLANK = re.compile(r"\s*\Z")
SUFFIXES = (".jsonl", ".json", ".txt", ".parquet", ".arrow")


def files_of(patterns):
    """The files that names and globs stand for: in the order of the patterns, each glob's sorted."""
    found = []
    for pattern in patterns:
        names = [pattern] if os.path.lexists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not names:
            raise failed("not_found", pattern, "there is no such file",
                         "check the name; a glob in quotes is expanded here")
        found += names
    seen = {}
    for name in found:
        if os.path.isdir(name):
            raise wrong(name, "is a directory", f"name its files, as '{os.path.join(name, '*.jsonl')}'")
        if not name.endswith(SUFFIXES):
            raise wrong(name, "has a name that does not say what is in it",
                        f"name it {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
        real = os.path.realpath(name)
        if real in seen:
            raise wrong(name, f"is {seen[real]} once more", "name each file once")
        seen[real] = name
    return found


def records_of(path, paragraphs=False):
    """The Records of a file, one after the other."""
    if path.endswith(".txt"):
        for place, text in _texts_of(path, paragraphs):
            yield Record(place, "text", {"text": text})
        return
    read = {".jsonl": _lines_of, ".json": _elements_of}.get(os.path.splitext(path)[1], _rows_of)
    first = None
    for place, values in read(path):
        kind = _kind_of(place, values)
        first = first or (place, kind)
        if kind != first[1]:
            raise wrong(place, f"has {kind}, and {first[0]} has {first[1]}",
                        "put records of one kind into a file")
        yield _checked(place, kind, values)


def _decoded(place, line):
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise wrong(place, f"is no UTF-8 at its byte {error.start}", "save the file as UTF-8") from None


def _numbered_lines(path):
    """(place, text with its line end) of each line."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                place = f"{path}: line {number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                yield place, _decoded(place, line)
    except OSError as error:
        raise unreadable(path, error) from None


def _lines_of(path):
    for place, line in _numbered_lines(path):
        if BLANK.match(line):
            continue
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise wrong(place, f"is no JSON ({_words_of(error)})",
                        "put one JSON object on each line; a JSON array is a .json file") from None


def _words_of(error):
    return f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else error


def _elements_of(path):
    """The whole file is in memory: a JSON array has no lines to stop at."""
    try:
        with open(path, "rb") as file:
            text = _decoded(path, file.read().removeprefix(b"\xef\xbb\xbf"))
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        line = f"line {error.lineno}, " if isinstance(error, json.JSONDecodeError) else ""
        raise wrong(path, f"is no JSON ({line}{_words_of(error)})",
                    "repair it; a file of one object a line is a .jsonl file") from None
    if not isinstance(values, list):
        raise wrong(path, "is no JSON array", "put the records into [ and ], or one on each line of "
                    "a .jsonl file")
    for number, value in enumerate(values, 1):
        yield f"{path}: record {number}", value


def _rows_of(path):
    """Parquet and Arrow. A column without a value in a row counts as missing there."""
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise unreadable(path, error) from None
    datasets = needed("datasets", f"{os.path.splitext(path)[1]} files")
    try:
        if path.endswith(".arrow"):
            rows = datasets.Dataset.from_file(path)
        else:
            rows = datasets.load_dataset("parquet", data_files={"train": [os.path.abspath(path)]},
                                         split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield f"{path}: row {number}", {key: v for key, v in row.items() if v is not None}
    except Exception as error:  # of many kinds, which pyarrow and datasets make
        raise wrong(path, f"cannot be read by datasets ({type(error).__name__}: {error})",
                    "check that it is what its name says") from error


def _texts_of(path, paragraphs):
    if not paragraphs:
        try:
            with open(path, "rb") as file:
                yield path, _decoded(path, file.read().removeprefix(b"\xef\xbb\xbf"))
        except OSError as error:
            raise unreadable(path, error) from None
        return
    begun, lines = None, []
    for place, line in _numbered_lines(path):
        if not BLANK.match(line):
            begun = begun or place
            lines.append(line)
        elif lines:
            yield begun, "".join(lines).rstrip("\r\n")
            begun, lines = None, []
    if lines:
        yield begun, "".join(lines).rstrip("\r\n")


def _kind_of(place, values):
    if not isinstance(values, dict):
        raise wrong(place, "is no JSON object", f"a record is {SHOWN_KINDS}")
    kinds = [kind for kind, keys in KINDS.items() if all(key in values for key in keys)]
    if not kinds:
        keys = ", ".join(f'"{key}"' for key in list(values)[:8]) or "no keys"
        raise wrong(place, f"is a record of no kind that is known: it has {keys}",
                    f"a record is {SHOWN_KINDS}")
    if len(kinds) > 1:
        raise wrong(place, f"has {' and also '.join(kinds)}", "leave one of them in each record")
    return kinds[0]


def _checked(place, kind, values):
    """The Record; of ShareGPT's form as messages, which it is from here on."""
    tools = values.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise wrong(place, f'"tools" is a string that is no JSON ({_words_of(error)})',
                        "make it a list of JSON schemas") from None
    if not isinstance(tools, (list, type(None))):
        raise wrong(place, '"tools" is no list', "make it a list of JSON schemas")
    if kind == "conversations":
        values = {"messages": _from_sharegpt(place, values)}
        kind = "messages"
    if kind == "messages":
        return Record(place, kind, {"messages": _messages(place, kind, values["messages"]),
                                    "tools": tools})
    if kind == "text":
        return Record(place, kind, {"text": _string(place, "text", values["text"])})
    both = [values[key] for key in KINDS[kind]]
    if all(isinstance(part, list) for part in both):
        made = {key: _messages(place, key, values[key]) for key in KINDS[kind]}
        return Record(place, "prompt and completion of messages", {**made, "tools": tools})
    made = {key: _string(place, key, values[key], "; or both a list of messages")
            for key in KINDS[kind]}
    return Record(place, kind, made)


def _string(place, key, value, otherwise=""):
    if not isinstance(value, str):
        raise wrong(place, f'"{key}" is no string', f"make it one{otherwise}")
    if re.search("[\ud800-\udfff]", value):
        raise wrong(place, f'"{key}" has half of a surrogate pair (\\ud800 to \\udfff)',
                    "write both halves, or neither")
    return value


def _messages(place, key, messages):
    if not isinstance(messages, list):
        raise wrong(place, f'"{key}" is no list', 'make it a list of {"role", "content"}')
    if not messages:
        raise wrong(place, f'"{key}" is empty: an empty document', "leave the record out")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong(place, f'message {number} of "{key}" has no "role"',
                        'a message is {"role": "user", "content": "…"}')
        if message.get("content") is None and not message.get("tool_calls"):
            raise wrong(place, f'message {number} of "{key}" has no "content"',
                        'a message is {"role": "user", "content": "…"}')
        if isinstance(message.get("content"), str):
            _string(place, "content", message["content"])
    # A table of a Parquet file has each key in every message.
    return [{name: value for name, value in message.items() if value is not None or name == "content"}
            for message in messages]


def _from_sharegpt(place, values):
    turns, made = values["conversations"], []
    if not isinstance(turns, list):
        raise wrong(place, '"conversations" is no list', 'make it a list of {"from", "value"}')
    if isinstance(values.get("system"), str) and values["system"]:
        made.append({"role": "system", "content": values["system"]})
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "role" in turn and "from" not in turn:
            made.append(turn)
            continue
        role = ROLES.get(turn.get("from")) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise wrong(place, f'turn {number} of "conversations" is not understood',
                        f'a turn is {{"from", "value"}}, from {", ".join(ROLES)}')
        made.append({"role": role, "content": turn["value"]})
    return made
