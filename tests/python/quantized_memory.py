"""One step of LoRA in less memory than the quantized weights take, as the kernel counts it: a cgroup (v1) of its own.

    python tests/python/quantized_memory.py FORM [LAYERS]     FORM: nf4, int8, torchao or hqq; as root

The model is made twice from one seed: PyTorch alone makes its step first, in a process without a limit. In the other
the engine takes the weights, the limit is set below their size, which the kernel refuses where they are still there,
and the step is made. Loss and norm of the gradients are compared, and what the step read of NVMe with all inner
tensors, which come twice, but for those of the last layers, which backward finds in HBM.
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


def model(form, layers):
    import quantized_forms
    return quantized_forms.with_lora(quantized_forms.FORMS[form], num_hidden_layers=layers, **SHAPE)


def loss_of(network, torch):
    ids = torch.randint(0, 96, (1, 8), generator=torch.Generator().manual_seed(5))
    return network(input_ids=ids, labels=ids, use_cache=False).loss


def alone(form, layers):
    import torch
    network = model(form, layers)
    loss = loss_of(network, torch)
    loss.backward()
    squares = sum((p.grad ** 2).sum().item() for p in network.parameters() if p.requires_grad)
    print(json.dumps({"loss": loss.item(), "norm": squares ** 0.5}))


def limited(form, layers):
    import torch

    import spillway
    from toy_model import config
    (GROUP / "cgroup.procs").write_text(str(os.getpid()))
    with tempfile.TemporaryDirectory(dir=os.environ.get("SPILLWAY_SCRATCH")) as folder:
        network = model(form, layers)
        hbm = "72MiB" if form in ("nf4", "hqq") else "112MiB"
        engine = spillway.Engine(network, config(folder, clipping=0, spillway={
            "tile_elements": 4 << 20, "hbm_bytes": hbm, "host_bytes": "32MiB"}))
        packed = sum(each.nbytes for each in engine._layout.packed.values())
        limit = packed * 4 // 5
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        print(f"in use after the engine's making: {(GROUP / 'memory.usage_in_bytes').read_text().strip()} bytes, of "
              f"{packed} and what the program needs; the limit is {limit}", file=sys.stderr)
        (GROUP / "memory.limit_in_bytes").write_text(str(limit))
        (GROUP / "memory.max_usage_in_bytes").write_text("0")
        loss = loss_of(engine, torch)
        engine.backward(loss)
        report = engine.step()
        print(json.dumps({"loss": loss.item(), "norm": report.gradient_norm, "packed": packed, "limit": limit,
                          "read": report.nvme_read_bytes, "copied": report.h2d_bytes,
                          "most": int((GROUP / "memory.max_usage_in_bytes").read_text())}))
        engine.close()


def main():
    form = sys.argv[1]
    layers = int(sys.argv[2]) if len(sys.argv) > 2 else {"nf4": 44, "hqq": 44}.get(form, 28)
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
          f"{found['most']} in use; loss {found['loss']}, norm {found['norm']}, of PyTorch alone {wanted['loss']} and "
          f"{wanted['norm']}; a step read {found['read']} bytes of NVMe, {found['read'] / found['packed']:.4f} of the "
          f"inner tensors, and copied {found['copied']} to HBM, {found['copied'] / found['packed']:.4f} of them")
    assert found["loss"] == wanted["loss"] and abs(found["norm"] - wanted["norm"]) <= 1e-4 * wanted["norm"]
    return 0


if __name__ == "__main__":
    sys.exit(main())
