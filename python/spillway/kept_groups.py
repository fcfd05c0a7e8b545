"""What a commit keeps of param_groups beside the caller's blob: rates as schedulers have left them, betas, what they
begin with. As load_state_dict() restores them in torch.optim."""
import json
import re
import zlib

import torch

MARK = re.compile(rb"spillway\.groups (\d+)\n")
OTHERS = ("params", "param_names")  # that are not values


def _plain(value):
    if torch.is_tensor(value) and value.numel() == 1:
        return value.item()
    raise TypeError


def pack(groups, blob):
    values = []
    for group in groups:
        found = {}
        for key, value in group.items():
            if key in OTHERS:
                continue
            try:
                found[key] = json.loads(json.dumps(value, default=_plain))
            except (TypeError, ValueError):
                pass  # a caller's own, which stays what the constructor was given
        values.append(found)
    text = zlib.compress(json.dumps(values).encode())
    return b"spillway.groups %d\n" % len(text) + text + blob


def unpack(kept):
    """(values by group or None, the caller's blob)."""
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
