"""Files as torch.save() writes them, and DeepSpeed checkpoints made of them, with Python's standard library alone.

The pickles have the opcodes of the real ones: protocol 2, globals of modules that need not be there, storages as
persistent ids. tools/check_deepspeed_import.py compares the import with what DeepSpeed itself writes and reads.
"""
import array
import collections
import io
import json
import pathlib
import pickle
import struct
import zipfile

class Named:
    """Stands for a global in a pickle: two names, of a module that need not be there."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __reduce__(self):
        return self.name  # to save_global()

    def __call__(self, *arguments):
        raise TypeError("only names are pickled")


NAMES = {name: Named(module, name) for module, names in {
    "builtins": ["getattr"],
    "torch": ["FloatStorage", "BFloat16Storage", "HalfStorage", "LongStorage", "Size", "Tensor"],
    "torch._utils": ["_rebuild_tensor_v2", "_rebuild_parameter"],
    "torch._tensor": ["_rebuild_from_type_v2"],
    "deepspeed.runtime.zero.config": ["ZeroStageEnum"],
    "deepspeed.runtime.fp16.loss_scaler": ["LossScaler", "DynamicLossScaler"],
}.items() for name in names}


class Call:
    """Something that unpickling would make by calling `function`."""

    def __init__(self, function, *arguments, state=None):
        self.function, self.arguments, self.state = function, arguments, state

    def __reduce__(self):
        parts = (self.function, self.arguments)
        return parts if self.state is None else (*parts, self.state)


def size(*extents):
    return Call(NAMES["Size"], tuple(extents))


class Storage:
    KINDS = {"f": ("FloatStorage", 4), "bf16": ("BFloat16Storage", 2), "half": ("HalfStorage", 2),
             "q": ("LongStorage", 8)}

    def __init__(self, data, kind="f"):
        self.data, self.kind, (self.name, self.size) = bytes(data), kind, self.KINDS[kind]


class Tensor:
    def __init__(self, storage, shape, *, first=0, strides=None, attributes=None, parameter=False):
        self.storage, self.shape, self.first, self.attributes = storage, tuple(shape), first, attributes
        self.parameter = parameter
        if strides is None:
            strides, stride = [], 1
            for extent in reversed(self.shape):
                strides.insert(0, stride)
                stride *= extent
        self.strides = tuple(strides)

    def __reduce__(self):
        arguments = (self.storage, self.first, self.shape, self.strides, False, collections.OrderedDict())
        if self.parameter:
            return NAMES["_rebuild_parameter"], (Call(NAMES["_rebuild_tensor_v2"], *arguments), True,
                                                 collections.OrderedDict())
        if self.attributes:
            return NAMES["_rebuild_from_type_v2"], (NAMES["_rebuild_tensor_v2"], NAMES["Tensor"], arguments,
                                                    self.attributes)
        return NAMES["_rebuild_tensor_v2"], arguments


def floats(values, **options):
    """A flat fp32 tensor."""
    values = array.array("f", values)
    return Tensor(Storage(values.tobytes()), (len(values),), **options)


class _Pickler(pickle._Pickler):  # pylint: disable=protected-access
    def __init__(self, file, storages):
        super().__init__(file, protocol=2)
        self.storages = storages

    def save_global(self, obj, name=None):
        if not isinstance(obj, Named):
            return super().save_global(obj, name)
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        return self.memoize(obj)

    def persistent_id(self, obj):
        if not isinstance(obj, Storage):
            return None
        if obj not in self.storages:
            self.storages.append(obj)
        key = str(self.storages.index(obj))
        return "storage", NAMES[obj.name], key, "cpu", len(obj.data) // obj.size


def dumps(value):
    """The pickle, and its storages in order."""
    storages, file = [], io.BytesIO()
    _Pickler(file, storages).dump(value)
    return file.getvalue(), storages


def write_zip(path, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in entries:
            # As torch does for large entries: sizes of 64 bits in the local header.
            with file.open(zipfile.ZipInfo(name), "w", force_zip64=True) as entry:
                entry.write(data)
            file.getinfo(name).compress_type = compression


def spoil_checksums(path):
    """Every CRC-32 of a zip becomes a wrong one, as torch.serialization.set_crc32_options(False) leaves them."""
    data = bytearray(pathlib.Path(path).read_bytes())
    with zipfile.ZipFile(path) as file:
        at = file.start_dir
        for entry in file.infolist():
            for place in (entry.header_offset + 14, at + 16):
                data[place:place + 4] = struct.pack("<I", entry.CRC ^ 1)
            lengths = struct.unpack("<3H", data[at + 28:at + 34])  # name, extra field, comment
            at += 46 + sum(lengths)
    pathlib.Path(path).write_bytes(data)


def entries_of(value, name="archive", byteorder="little"):
    data, storages = dumps(value)
    stored = [(f"{name}/data/{i}", storage.data) for i, storage in enumerate(storages)]
    return [(f"{name}/data.pkl", data), (f"{name}/byteorder", byteorder.encode()), *stored,
            (f"{name}/version", b"3\n")]


def save(value, path, **options):
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_zip(path, entries_of(value, path.stem, **options))


def read_safetensors(file):
    """Name -> (shape, bytes)."""
    data = pathlib.Path(file).read_bytes()
    length, = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length])
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: (tensor["shape"], data[start + tensor["data_offsets"][0]:start + tensor["data_offsets"][1]])
            for name, tensor in header.items()}


class Checkpoint:
    """A ZeRO checkpoint of given states: parameters = {name: (shape, master, exp_avg, exp_avg_sq)}, each fp32 bytes.

    Attributes may be changed before write(); `model` and `states` hook into what each file gets.
    """
    ARRAYS = ("master", "exp_avg", "exp_avg_sq")

    def __init__(self, parameters, *, ranks=1, stage=3, group_elements=1 << 62, step=7, swapped=False, bf16=True,
                 alignment=1):
        self.parameters, self.ranks, self.stage, self.step, self.swapped = parameters, ranks, stage, step, swapped
        self.alignment = alignment  # of where a parameter begins, in elements, in stages 1 and 2
        self.prefix, self.tag, self.shared, self.bf16 = "", f"global_step{step}", {}, bf16
        self.groups = [[]]
        for name in parameters:
            if sum(self.elements(other) for other in self.groups[-1]) >= group_elements:
                self.groups.append([])
            self.groups[-1].append(name)
        self.config = {"bf16": {"enabled": bf16}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
        self.scheduler = {"last_batch_iteration": step - 1}
        self.more = {}  # client state
        self.settings = [{"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}]
        self.step_value = step
        self.scaler = Call(NAMES["LossScaler"], state={"cur_scale": 1.0, "dynamic": False})

    def train_in_fp16(self, scale, iterations, overflow, hysteresis, skipped):
        """`overflow`: iteration of the last one; -1: there was none."""
        self.bf16, self.config["bf16"], self.config["fp16"] = False, {"enabled": False}, {"enabled": True}
        self.more = {**self.more, "skipped_steps": skipped}
        self.scaler = Call(NAMES["DynamicLossScaler"], state={
            "cur_scale": scale, "dynamic": True, "cur_iter": iterations, "last_overflow_iter": overflow,
            "scale_factor": 2.0, "scale_window": 2, "min_scale": 1, "delayed_shift": 2, "cur_hysteresis": hysteresis,
            "consecutive_hysteresis": False, "raise_error_at_min_scale": True})

    def elements(self, name):
        return len(self.parameters[name][1]) // 4

    def paddings(self, group):
        """Elements after each parameter; none after the last."""
        paddings, end = [], 0
        for name in group[:-1]:
            end += self.elements(name)
            paddings.append(-end % self.alignment)
            end += paddings[-1]
        return [*paddings, 0]

    def flat(self, group, which):
        """The flat tensor of every rank, as bytes."""
        values = [self.parameters[name][1 + which] for name in group]
        if self.stage == 3:
            ranks = [b""] * self.ranks
            for data in values:
                part = -(-len(data) // 4 // self.ranks) * 4
                data = data.ljust(part * self.ranks, b"\xff")
                ranks = [rank + data[r * part:(r + 1) * part] for r, rank in enumerate(ranks)]
            return ranks
        data = b"".join(value + padding * b"\xff\xff\xff\xff" for value, padding in zip(values, self.paddings(group)))
        unit = 2 * self.ranks * 4
        part = -(-len(data) // unit) * unit // self.ranks
        parts = [data[r * part:(r + 1) * part] for r in range(self.ranks)]
        return parts if which == 0 else [piece.ljust(part, b"\xff") for piece in parts]  # weights drop their padding

    def tensor(self, folder, rank, group, which, data):
        if not self.swapped:
            return Tensor(Storage(data), (len(data) // 4,), attributes={"ds_id": f"g{group}"} if which == 0 else None)
        name = f"g{group}" if which == 0 else f"{self.ARRAYS[which]}-g{group}"
        swap = folder / "offloaded_tensors" / f"rank{rank:02}" / f"{name}.tensor.swp"
        swap.parent.mkdir(parents=True, exist_ok=True)
        swap.write_bytes(data.ljust(-(-len(data) // 1024) * 1024, b"\xee"))
        return Tensor(Storage(b""), (0,), attributes={"ds_id": name})

    def model_state(self):
        shapes = [collections.OrderedDict((self.prefix + name, size(*self.parameters[name][0])) for name in group)
                  for group in self.groups]
        return {"module": collections.OrderedDict(), "buffer_names": [], "optimizer": None, "param_shapes": shapes,
                "frozen_param_shapes": None, "shared_params": self.shared, "frozen_param_fragments": None,
                "lr_scheduler": self.scheduler, "data_sampler": None, "random_ltd": None,
                "sparse_tensor_module_names": set(), "skipped_steps": 0, "global_steps": self.step,
                "global_samples": 2 * self.step, "dp_world_size": self.ranks, "mp_world_size": 1,
                "ds_config": self.config, "ds_version": "0.19.8", **self.more}

    def optimizer_state(self, folder, rank):
        flats = [[self.flat(group, which)[rank] for which in range(3)] for group in self.groups]
        tensors = [[self.tensor(folder, rank, g, which, data) for which, data in enumerate(arrays)]
                   for g, arrays in enumerate(flats)]
        state = {g: {"step": self.step_value, "exp_avg": arrays[1], "exp_avg_sq": arrays[2]}
                 for g, arrays in enumerate(tensors)}
        base = {"state": state, "param_groups": [{**group, "params": list(range(len(tensors)))}
                                                 for group in self.settings]}
        masters = [arrays[0] for arrays in tensors]
        zero = {"zero_stage": Call(NAMES["ZeroStageEnum"], self.stage), "partition_count": self.ranks,
                "loss_scaler": self.scaler}
        if self.stage == 3:
            zero |= {"optimizer_state_dict": base, "fp32_flat_groups": masters}
        else:
            zero |= {"base_optimizer_state": base, "single_partition_of_fp32_groups": masters,
                     "param_alignment_paddings": [self.paddings(group) for group in self.groups],
                     "partition_count": [self.ranks] * len(masters)}
        return {"optimizer_state_dict": zero, "ds_config": self.config, "ds_version": "0.19.8"}

    def write(self, directory):
        """Returns the directory."""
        directory = pathlib.Path(directory)
        folder = directory / self.tag
        folder.mkdir(parents=True)
        for rank in range(self.ranks):
            start = f"zero_pp_rank_{rank}_mp_rank_00"
            if self.stage == 3 or rank == 0:
                save(self.model_state(), folder / f"{start if self.stage == 3 else 'mp_rank_00'}_model_states.pt")
            save(self.optimizer_state(folder, rank), folder / f"{'bf16_' if self.bf16 else ''}{start}_optim_states.pt")
        (directory / "latest").write_text(self.tag)
        return directory
