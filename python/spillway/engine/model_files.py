"""Weights by directory: what from_pretrained() would read, tensor by tensor.

A model's files are safetensors, one or several with an index, and their tensors are mapped: of a value that the engine
asks for nothing is in memory but what it is made of, and the pages of the files are the system's to drop. Where
transformers has other tensors in memory than in files (5 fuses Mixtral's experts), its own functions make them, a group
at a time. All names, shapes and types are compared before the first value is read.
"""
import copy
import json
import os
import re
import sys

import torch

from ..checkpoint_names import plain, unwrapped
from ..library import Error
from .buffers import INDEX, WEIGHTS, safetensors_of

TYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
SHOWN = 4  # names of a kind in an error
# What older versions of transformers saved and newer ones compute.
COMPUTED = r"rotary_emb\.inv_freq$|(^|\.)position_ids$|\.attn\.(masked_)?bias$"
OLD_NAMES = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def named_weights(model, weights):
    """Of Engine's `weights`: a function from names to values, or None. A directory fills persistent buffers as well."""
    if weights is None or callable(weights) or not isinstance(model, torch.nn.Module):
        return weights
    if not isinstance(weights, (str, os.PathLike)):
        raise Error("invalid_argument", f"weights: is a {type(weights).__name__}; give a directory with safetensors, "
                                        "or a function from names to values, `dict.get` say")
    model = unwrapped(model)
    if any(p.is_meta for p in model.parameters()) and hasattr(model, "tie_weights"):
        model.tie_weights()  # accelerate's init_empty_weights() makes two of them
    _compute_buffers(model)
    return Values(model, Files(weights)).of


class Files:
    """A directory's tensors, or one file's."""

    def __init__(self, place):
        self._open = safetensors_of("weights: are read").safe_open
        place = os.fspath(place)
        index, single = os.path.join(place, INDEX), os.path.join(place, WEIGHTS)
        self.place, self._files = place, {}
        if os.path.isfile(place):
            self._file_of = dict.fromkeys(self._file(place).keys(), place)
        elif os.path.isfile(index):
            try:
                with open(index, encoding="utf-8") as file:
                    names = json.load(file)["weight_map"]
                self._file_of = {name: os.path.join(place, part) for name, part in names.items()}
            except (ValueError, KeyError, TypeError, AttributeError):
                raise Error("corrupt", f"{index}: is no index of safetensors files; take the directory that "
                                       "save_pretrained() wrote") from None
        elif os.path.isfile(single):
            self._file_of = dict.fromkeys(self._file(single).keys(), single)
        else:
            raise self._nothing()

    def _nothing(self):
        if not os.path.isdir(self.place):
            return Error("not_found", f"{self.place}: is no directory of a model; download it first "
                                      "(huggingface_hub.snapshot_download() says where it is)")
        there = sorted(os.listdir(self.place))
        if any(name.endswith((".bin", ".pt", ".pth")) for name in there):
            return Error("unsupported", f"{self.place}: holds pickled weights, which cannot be read tensor by tensor; "
                                        "save_pretrained() of transformers makes safetensors of them")
        return Error("not_found", f"{self.place}: has neither {WEIGHTS} nor {INDEX}, but "
                                  f"{', '.join(there[:SHOWN]) or 'nothing'}; name the directory that has")

    def names(self):
        return self._file_of.keys()

    def _file(self, path):
        if path not in self._files:
            try:
                self._files[path] = self._open(path, "pt")
            except FileNotFoundError:
                raise Error("not_found", f"{path}: is not there, though the index names it; download the model "
                                         "again") from None
            except Exception as error:  # the package's own class, which older versions do not export
                raise Error("corrupt", f"{path}: cannot be read ({error}); check the file, or download "
                                       "the model again") from None
        return self._files[path]

    def tensor(self, name):
        try:
            return self._file(self._file_of[name]).get_tensor(name)
        except Error:
            raise
        except Exception as error:
            raise Error("corrupt", f"{self._file_of[name]}: {name} cannot be read ({error}); download the model "
                                   "again") from None

    def without_values(self, name):
        """The same on device meta; of integers where it is packed or quantized."""
        try:
            found = self._file(self._file_of[name]).get_slice(name)
        except Error:
            raise
        except Exception:
            raise Error("corrupt", f"{self._file_of[name]}: has no {name}, though the index says so; download the "
                                   "model again") from None
        return torch.empty(found.get_shape(), dtype=TYPES.get(found.get_dtype(), torch.int8), device="meta")


class _Same:
    """A tensor that is in memory as it is in files."""

    def __init__(self, target, name):
        self._target, self._name = target, name

    def make(self, read):
        return {self._target: read(self._name)}


class _Group:
    """Tensors that transformers makes of others, all at once."""

    def __init__(self, model, transform, first):
        self._model, self._transform, self._first, self._of = model, transform, first, []

    def add(self, *names):
        self._of.append(names)

    def make(self, read):
        transform = copy.deepcopy(self._transform)
        for target, name, pattern in self._of:
            transform.add_tensor(target, name, pattern, lambda name=name: read(name)[...])
        made = transform.convert(self._first, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def _state(model):
    """Parameters and persistent buffers by every name that they have."""
    found = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        kept = {name: buffer for name, buffer in module._buffers.items()
                if name not in module._non_persistent_buffers_set}
        for name, tensor in {**module._parameters, **kept}.items():
            if tensor is not None:
                found[f"{prefix}.{name}" if prefix else name] = tensor
    return found


def _prefixed(name, prefix, state):
    """Bodies are saved with and without the name that a head's model gives them."""
    if not prefix or name in state:
        return name
    within = name[len(prefix) + 1:] if name.startswith(f"{prefix}.") else f"{prefix}.{name}"
    return within if within in state else name


def _same_names(model, files, state):
    """([…], superfluous names) of a model whose files have the tensors in memory, maybe by older names."""
    sources, left = [], []
    mapping = getattr(model, "_checkpoint_conversion_mapping", None) or {}  # of transformers 4.5x
    by_plain = {plain(name): name for name in state}
    for name in files.names():
        target = name
        for pattern, put in (mapping.items() if target not in state else ()):
            target = re.compile(pattern).sub(put, target)
        for old, new in OLD_NAMES if target not in state else ():
            target = target.replace(old, new)
        target = by_plain.get(_prefixed(target, getattr(model, "base_model_prefix", ""), state))
        target = target or by_plain.get(name)
        if target is None:
            left.append(name)
        else:
            sources.append(_Same(target, name))
    return sources, left


def _renamed(model, files, state):
    """The same as transformers 5 says it (core_model_loading.py); None where it has no such thing."""
    loading = sys.modules.get("transformers.core_model_loading")
    if not hasattr(loading, "rename_source_key") or not isinstance(model, sys.modules["transformers"].PreTrainedModel):
        return None
    from transformers.conversion_mapping import get_model_conversion_mapping
    every = get_model_conversion_mapping(model)
    renamings = [entry for entry in every if isinstance(entry, loading.WeightRenaming)]
    converters = [entry for entry in every if isinstance(entry, loading.WeightConverter)]
    converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    sources, groups, left = [], {}, []
    for name in sorted(files.names(), key=loading.dot_natural_key):  # in which order experts are numbered
        target, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None
        if target not in state:
            left.append(name)
        elif pattern is None:
            sources.append(_Same(target, name))
        else:
            if target not in groups:
                groups[target] = _Group(model, converter_of[pattern], target)
                sources.append(groups[target])
            groups[target].add(target, name, pattern)
    return sources, left


class Values:
    """A model's weights, by name, of files that fit it."""

    def __init__(self, model, files):
        self._files, self._left = files, (None, {})  # of the group that was made last
        state = _state(model)
        sources, superfluous = _renamed(model, files, state) or _same_names(model, files, state)
        source_of, wrong = {}, []
        for source in sources:
            for name, value in self._without_values(source).items():
                if name in state:
                    source_of[name] = source
                    wrong += self._misfits(name, value, state[name])
        names = {}
        for name, tensor in state.items():
            names.setdefault(id(tensor), []).append(name)
        self._source_of, missing = {}, []  # by the first name: (source, the name that files have)
        for own in names.values():
            found = next((name for name in own if name in source_of), None)
            if found is None:
                missing.append(plain(own[0]))
            for name in own if found is not None else ():
                self._source_of[plain(name)] = source_of[found], found
        self._refuse(model, missing, superfluous, wrong)
        with torch.no_grad():
            for name, tensor in state.items():
                if not isinstance(tensor, torch.nn.Parameter):
                    tensor.copy_(self.of(plain(name)))

    def _without_values(self, source):
        try:
            return source.make(self._files.without_values)
        except Error:
            raise
        except Exception as error:  # of any kind, out of transformers: a tensor of a group is missing, say
            raise Error("corrupt", f"{self._files.place}: transformers cannot make the model's tensors of the files' "
                                   f"({error}); take files that it has saved") from error

    @staticmethod
    def _misfits(name, value, wanted):
        if isinstance(wanted, torch.nn.Parameter) and not value.is_floating_point():
            yield f"{name} is packed or quantized"
        elif value.shape != wanted.shape:
            yield f"{name} is {tuple(value.shape)} in the files and {tuple(wanted.shape)} in the model"

    def _refuse(self, model, missing, superfluous, wrong):
        ignored = "|".join(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        ignored = f"{COMPUTED}|{ignored}" if ignored else COMPUTED
        superfluous = [name for name in superfluous if not re.search(ignored, name)]
        found = [f"{what} {', '.join(names[:SHOWN])}" + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")
                 for what, names in (("the files lack", sorted(missing)),
                                     ("the model has no", sorted(superfluous)), ("of the wrong shape or type:", wrong))
                 if names]
        if found:
            raise Error("invalid_argument", f"{self._files.place}: is not of this {type(model).__name__}: "
                        f"{'; '.join(found)}; make the model by that directory's config.json, or give weights= a "
                        "function from names to values")

    def of(self, name):
        source, found = self._source_of[name]
        made, rest = self._left
        if made is not source or found not in rest:
            self._left = (None, {})  # before the next one is made
            rest = source.make(self._files.tensor)
            self._left = (source, rest)
        return rest.pop(found)


def _compute_buffers(model):
    """Those of a model that was made on device meta as a whole, where transformers computes them by itself: 5 does."""
    lost = {module for module in model.modules() for name, buffer in module._buffers.items()
            if buffer is not None and buffer.is_meta}
    loading = sys.modules.get("transformers.core_model_loading")
    if not lost or loading is None or not hasattr(model, "_init_weights"):
        return  # module.check() refuses them
    for module in lost:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                empty = torch.zeros(buffer.shape, dtype=buffer.dtype)
                module._buffers[name] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
    with torch.no_grad():
        for module in lost:
            model._init_weights(module)
    for name, buffer in model.named_buffers():
        persistent = name in _state(model)
        if not persistent and buffer.is_floating_point() and buffer.isnan().any():
            raise Error("unsupported", f"{name}: is a buffer on device meta, and transformers does not say how it is "
                                       "computed; make the model under accelerate's init_empty_weights(), which "
                                       "leaves buffers alone")
