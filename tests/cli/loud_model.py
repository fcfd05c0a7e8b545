"""New models whose layers have something to say: with the small weights of a new one, the head of a tied model answers
each token with itself."""
import array
import json
import pathlib
import random
import struct

FACTOR = 8  # exact in every type


def make_loud(model):
    """Multiplies the matrices of the layers of a model of `spillway init-model` in fp32."""
    path = pathlib.Path(model) / "model.safetensors"
    data = bytearray(path.read_bytes())
    length = struct.unpack_from("<Q", data)[0]
    for name, tensor in json.loads(data[8:8 + length]).items():
        quiet = name == "__metadata__" or any(word in name for word in ("wte", "wpe", "embed", "lm_head"))
        if quiet or len(tensor["shape"]) != 2:
            continue
        begin, end = (8 + length + offset for offset in tensor["data_offsets"])
        values = array.array("f", bytes(data[begin:end]))
        data[begin:end] = array.array("f", (value * FACTOR for value in values)).tobytes()
    path.write_bytes(data)


def make_adapter(model, folder, *, rank, alpha, targets, seed):
    """Writes a LoRA adapter of a model as peft saves it, whose two matrices both have something to say, the same ones
    for a seed. `targets`: last parts of the names of products."""
    draw = random.Random(seed)
    tensors = {}
    for name, tensor in sorted(header_of(pathlib.Path(model) / "model.safetensors").items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in targets or not name.endswith(".weight"):
            continue
        rows, columns = tensor["shape"]
        into, out = (rows, columns) if is_gpt2(model) else (columns, rows)
        for matrix, shape in (("A", (rank, into)), ("B", (out, rank))):
            values = array.array("f", (draw.uniform(-0.5, 0.5) for _ in range(shape[0] * shape[1])))
            tensors[f"base_model.model.{module}.lora_{matrix}.weight"] = (shape, values.tobytes())
    write_adapter(folder, tensors, {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "target_modules": list(targets),
        "fan_in_fan_out": is_gpt2(model), "bias": "none", "inference_mode": True, "lora_dropout": 0.0,
        "base_model_name_or_path": str(model)})


def write_adapter(folder, tensors, config):
    """`tensors`: by name a shape, and bytes of fp32."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, (shape, data) in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (folder / "adapter_model.safetensors").write_bytes(
        struct.pack("<Q", len(text)) + text + b"".join(data for _, data in tensors.values()))
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def header_of(file):
    data = file.read_bytes()
    return json.loads(data[8:8 + struct.unpack_from("<Q", data)[0]])


def is_gpt2(model):
    """Whose matrices lie as [in][out]."""
    return json.loads((pathlib.Path(model) / "config.json").read_text())["model_type"] == "gpt2"
