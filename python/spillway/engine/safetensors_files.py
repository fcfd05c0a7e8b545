"""Safetensors files that are filled in any order, a piece at a time, as from_pretrained() looks for them."""
import json
import os
import struct

import torch

from .buffers import INDEX, WEIGHTS

MOST_BYTES = 50 * 10**9  # of a file's tensors, kMaxFileBytes of include/spillway/safetensors.h
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def _bytes_of(values):
    return values.contiguous().view(-1).view(torch.uint8).numpy() if values.numel() else b""


class SafetensorsFiles:
    """`tensors`: {name: (dtype, shape)}. All room is taken at once, so that a full drive is known before the first."""

    def __init__(self, folder, tensors):
        self._places, self._files = {}, []
        shards, used = [[]], 0
        for name, (dtype, shape) in tensors.items():
            size = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
            if used and used + size > MOST_BYTES:
                shards.append([])
                used = 0
            shards[-1].append((name, dtype, shape, used, size))
            used += size
        self.names = [WEIGHTS] if len(shards) == 1 else [
            f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
        try:
            for file, shard in zip(self.names, shards):
                self._begin(os.path.join(folder, file), shard)
            if len(shards) > 1:
                self.names.append(INDEX)
                index = {"metadata": {"total_size": sum(size for shard in shards for *_, size in shard)},
                         "weight_map": {name: file for file, shard in zip(self.names, shards) for name, *_ in shard}}
                with open(os.path.join(folder, INDEX), "x", encoding="utf-8") as file:
                    json.dump(index, file, indent=2, sort_keys=True)
                    file.flush()
                    os.fsync(file.fileno())
        except BaseException:
            self.close(sync=False)
            raise

    def _begin(self, path, shard):
        header = {"__metadata__": {"format": "pt"}}
        header.update({name: {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [first, first + size]}
                       for name, dtype, shape, first, size in shard})
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        file = open(path, "xb", buffering=0)
        self._files.append(file)
        file.write(struct.pack("<Q", len(text)) + text)
        begin = 8 + len(text)
        end = shard[-1][3] + shard[-1][4] if shard else 0
        if end:
            os.posix_fallocate(file.fileno(), 0, begin + end)
        for name, dtype, _, first, _ in shard:
            self._places[name] = (file.fileno(), begin + first, dtype)

    def put(self, name, values, first=0):
        """`values`: of any shape, those of the tensor from element `first` on."""
        file, begin, dtype = self._places[name]
        data = memoryview(_bytes_of(values.detach().cpu().to(dtype)))
        at = begin + first * torch.empty(0, dtype=dtype).element_size()
        while data:
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written

    def close(self, sync=True):
        for file in self._files:
            if sync:
                os.fsync(file.fileno())
            file.close()
