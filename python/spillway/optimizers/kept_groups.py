"""What a commit keeps of param_groups beside the caller's blob: rates as schedulers have left them, betas, what they
begin with. As load_state_dict() restores them in torch.optim.

On several ranks a token comes before it, the same on all: drawn anew where a run begins, and where all of its states
become others. By it and the step ranks tell one commit from another: shared.py."""
import json
import re
import zlib

import torch

MARK = re.compile(rb"spillway\.groups (\d+)\n")
TOKEN = re.compile(rb"spillway\.token ([0-9a-f]+)\n")
MOST = 8000  # bytes; a commit has room for 16,384
OTHERS = ("params", "param_names")  # that are not values


def _plain(value):
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    raise TypeError


def _is_kept(value):
    """Numbers, and few of them: what a caller notes in a group, names say, is not a commit's."""
    parts = value if isinstance(value, list) else [value]
    return len(parts) <= 8 and all(part is None or isinstance(part, (bool, int, float)) for part in parts)


def pack(groups, blob):
    """What the commit keeps, and whether the groups are in it."""
    values = []
    for group in groups:
        found = {}
        for key, value in group.items():
            if key in OTHERS:
                continue
            try:
                plain = json.loads(json.dumps(value, default=_plain))
            except (TypeError, ValueError):
                continue  # a caller's own, which stays what the constructor was given
            if _is_kept(plain):
                found[key] = plain
        values.append(found)
    text = zlib.compress(json.dumps(values).encode())
    return (blob, False) if len(text) > MOST else (b"spillway.groups %d\n" % len(text) + text + blob, True)


def with_token(token, kept):
    """`token`: None on one rank, which has none."""
    return kept if token is None else b"spillway.token %s\n" % token.encode() + kept


def token_of(kept):
    """None: of one rank, or of a version that had none."""
    mark = TOKEN.match(kept)
    return mark[1].decode() if mark else None


def without_token(kept):
    mark = TOKEN.match(kept)
    return kept[mark.end():] if mark else kept


def unpack(kept):
    """(values by group or None, the caller's blob)."""
    kept = without_token(kept)
    mark = MARK.match(kept)
    if not mark:
        return None, kept
    end = mark.end() + int(mark[1])
    return json.loads(zlib.decompress(kept[mark.end():end])), kept[end:]


def restore(values, groups):
    if values is None or len(values) != len(groups):
        return
    for found, group in zip(values, groups):
        for key, value in found.items():
            if torch.is_tensor(group.get(key)):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
