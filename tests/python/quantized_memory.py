"""One step of LoRA in less memory than the quantized weights take, as the kernel counts it: a cgroup (v1) of its own.

    python tests/python/quantized_memory.py FORM [LAYERS]     FORM: nf4, int8, torchao or hqq; as root

The model is made twice from one seed: PyTorch alone makes its step first, in a process without a limit. In the other
the engine takes the weights, the limit is set below their size, which the kernel refuses where they are still there, and
the step is made. Losses before and behind it are compared, and what the step read of NVMe with all inner tensors.
"""
import ctypes
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests/python")]
GROUP = pathlib.Path("/sys/fs/cgroup/memory", f"spillway-quantized-{os.getppid()}")
SHAPE = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 16}
RATE = 1e-3


def model(form, layers):
    import quantized_forms
    return quantized_forms.with_lora(quantized_forms.FORMS[form], num_hidden_layers=layers, **SHAPE)


def losses(step, network, ids):
    first = network(input_ids=ids, labels=ids, use_cache=False).loss
    step(first)
    return [first.item(), network(input_ids=ids, labels=ids, use_cache=False).loss.item()]


def alone(form, layers):
    import torch
    network = model(form, layers)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=RATE, weight_decay=0.01)

    def step(loss):
        loss.backward()
        optimizer.step()

    print(json.dumps(losses(step, network, _ids(torch))))


def limited(form, layers):
    import torch

    import spillway
    from toy_model import config
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    with tempfile.TemporaryDirectory(dir=os.environ.get("SPILLWAY_SCRATCH")) as folder:
        network = model(form, layers)
        engine = spillway.Engine(network, config(folder, clipping=0, spillway={
            "tile_elements": 4 << 20, "hbm_bytes": "112MiB", "host_bytes": "48MiB"}))
        packed = sum(each.nbytes for each in engine._layout.packed.values())
        limit = packed * 4 // 5
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        print(f"in use behind the engine's making: {(GROUP / 'memory.usage_in_bytes').read_text().strip()} bytes, of "
              f"{packed} and what the program needs; the limit is {limit}", file=sys.stderr)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))
        (GROUP / "memory.max_usage_in_bytes").write_text("0")
        reports = []

        def step(loss):
            engine.backward(loss)
            reports.append(engine.step())

        found = losses(step, engine, _ids(torch))
        print(json.dumps({"losses": found, "packed": packed, "limit": limit, "read": reports[0].nvme_read_bytes,
                          "most": int((GROUP / "memory.max_usage_in_bytes").read_text())}))
        engine.close()


def _ids(torch):
    return torch.randint(0, 96, (1, 8), generator=torch.Generator().manual_seed(5))


def main():
    form = sys.argv[1]
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else {"nf4": 44, "hqq": 40}.get(form, 24)
    if len(sys.argv) > 3:
        return {"alone": alone, "limited": limited}[sys.argv[3]](form, layers)
    group = pathlib.Path("/sys/fs/cgroup/memory", f"spillway-quantized-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        print(f"quantized_memory.py: skipped, since there is no memory cgroup to make here ({error.strerror})")
        return 0

    def run(which):
        made = subprocess.run([sys.executable, __file__, form, str(layers), which], stdout=subprocess.PIPE, text=True,
                              check=True)
        return json.loads(made.stdout.splitlines()[-1])

    try:
        wanted, found = run("alone"), run("limited")
    finally:
        group.rmdir()
    print(f"{form}: {found['packed']} bytes of frozen weights under a limit of {found['limit']}, at most "
          f"{found['most']} in use; losses {found['losses']}, PyTorch alone's {wanted}; a step read {found['read']} "
          f"bytes of NVMe, {found['read'] / found['packed']:.4f} of the inner tensors")
    assert found["losses"][0] == wanted[0] and abs(found["losses"][1] - wanted[1]) <= 1e-5 * wanted[1]
    return 0


if __name__ == "__main__":
    sys.exit(main())
