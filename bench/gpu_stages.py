"""The stages of bench/gpu.py that measure: which figure is held against which limit of the same run.

Operations of a model, as in the papers on PaLM and Megatron: 6 N + 12 L d T for a token, with N parameters (the tied
embedding once), L layers of width d and rows of T tokens; what is computed once more in backward counts for nothing.
"""
import json
import re
import shutil
import sys

import finetune_bench as fine
import link_probes as links
from gpu_session import GIB, GRACE_SECONDS, ROOT, Failed, Skip

sys.path.insert(0, str(ROOT / "tests/cli"))
import runs  # noqa: E402

WANTED_COPY, WANTED_ADAM = 0.95, 0.9  # of the limit
WANTED_FLOPS, WANTED_PEER = 0.45, 1.0  # of a product's rate; times PyTorch
# Relative, as tests/cli/reference_test.py has it: in bf16 PyTorch rounds in an order of its own.
LOSS_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}
# PyTorch beside it: eager, AdamW's fused kernel, all in the GPU's memory.
PEERS = {"PyTorch": [], "PyTorch, checkpointing": ["--checkpointing"],
         "PyTorch without masters": ["--no-masters"]}
FUSIONS = ("none", "gelu", "all")  # of finetune --fuse
EXACT_PEERS = ("PyTorch", "PyTorch, checkpointing")  # that do the same arithmetic
LEAST_STEPS = 4  # of a run, for a median: the first two do not count
MIB = 1 << 20
PROBE_SECONDS = 20
# Bytes of a parameter with its states, bf16 and exact; and what a step moves of one that is at home on NVMe.
STORED_BYTES, MOVED_BYTES = 12, 26


class Shape:
    def __init__(self, layers, width, heads, vocab=50257, seq=1024, batch=8):
        self.layers, self.width, self.heads, self.vocab, self.seq, self.batch = layers, width, heads, vocab, seq, batch
        self.parameters = 12 * layers * width**2 + 13 * layers * width + (vocab + seq + 2) * width
        self.operations = 6 * self.parameters + 12 * layers * width * seq  # of a token

    def with_layers(self, layers):
        return Shape(layers, self.width, self.heads, self.vocab, self.seq, self.batch)

    def arguments(self):
        return ["--layers", self.layers, "--width", self.width, "--heads", self.heads, "--vocab", self.vocab,
                "--context", self.seq, "--seed", 1]


TINY, TINY_DEEP = Shape(2, 64, 2, 256, 64, 2), Shape(4, 64, 2, 256, 64, 2)
XL, BIG = Shape(48, 1600, 25), Shape(32, 2816, 44)


# Limits of the GPU.

def bench_run(s, name, *options):
    """A bench's lines, as many as there are, and why there are no more."""
    done = s.run([s.find(name), *(["--tiny"] if s.tiny else options)])
    for line in done.lines():
        s.say(**line)
    how = f"killed after {done.seconds:.0f} s" if done.status is None else f"exit status {done.status}"
    return done.lines(), Failed(f"{name}: {how}: {done.last_line()}", done.out) if done.status != 0 else None


def bench_lines(s, name, *options):
    lines, failure = bench_run(s, name, *options)
    if failure:
        raise failure
    return lines


def copy_lines(s):
    """The lines of cuda_bench; it runs once."""
    if "copies" not in s.limits:
        s.limits["copies"] = bench_lines(s, "cuda_bench")
    return s.limits["copies"]


def memcpy_rates(s):
    """GB/s of one large copy: h2d, d2h, and both at once; nothing where that cannot be measured."""
    try:
        lines = copy_lines(s)
    except (Skip, Failed) as reason:
        s.say(cuda_memcpy=None, reason=str(reason))
        return {}
    line = next(line for line in lines if line["bench"] == "cuda_memcpy")
    return {way: line[f"{way}_gb_s"] for way in ("h2d", "d2h", "both")}


def product_rates(s):
    """TFLOP/s of the large product, now: (by itself, sustained). As a list, which is empty where they cannot be
    measured: what is held against them is worth its time without."""
    try:
        lines = bench_lines(s, "cuda_product_bench", "--large")
    except (Skip, Failed) as reason:
        s.say(product=None, reason=str(reason))
        return []
    return [tuple(line["tflops"] for line in lines[:2])]


def middle_of(products):
    """Of what product_rates() found: (by itself, sustained), or nothing."""
    return tuple(fine.median(rates) for rates in zip(*products))


def drive_rates(s, folder):
    """Of reading, writing and both, in bytes per second; None where nothing can measure them."""
    try:
        found = links.probe_drive(folder, 16 * MIB if s.tiny else 2 * GIB, s.find("aio_bench"),
                                  max(1.0, min(PROBE_SECONDS, s.left() / 4)))
    except (Skip, links.Unable) as reason:
        s.say(drive=None, reason=str(reason))
        return None
    s.say(drive=found)
    return found


def step_seconds(drive, shape, share=1.0):
    """What the drive needs for a step of a model of which that share is at home on NVMe."""
    return share * MOVED_BYTES * shape.parameters / drive["mixed"]


def copies(s):
    drive = drive_rates(s, s.work)
    s.figure("drive", drive and "{read:.2f} GB/s read, {write:.2f} written, {mixed:.2f} both".format(
        **{way: drive[way] / 1e9 for way in ("read", "write", "mixed")}),
             f"{step_seconds(drive, XL):.0f} s for what a step of gpt2-xl moves" if drive else "nothing measured it")
    lines, memcpy = copy_lines(s), memcpy_rates(s)
    for line in lines:
        if line["bench"] == "cuda_chunks":
            name, value = f"{line['way']} in chunks of {line['chunk']}", f"{line['gb_s']:.1f} GB/s"
            s.figure(name, value, f"{memcpy[line['way']]:.1f} GB/s, one large copy", line["of_limit"],
                     at_least=WANTED_COPY if line["chunk"] != "1MiB" else None)
            s.figure(name, value, f"{line['bare_gb_s']:.1f} GB/s, CUDA's copies of that size", line["of_bare"],
                     at_least=WANTED_COPY)
    copy = next(line["gb_s"] for line in lines if line["bench"] == "cuda_copy")
    for dtype in ("bf16", "fp16", "fp32"):
        line = next((line for line in lines if line["bench"] == "cuda_adam" and line["type"] == dtype), None)
        s.figure(f"Adam, {dtype}", line and f"{line['gb_s']:.0f} GB/s", f"{copy:.0f} GB/s, a copy within HBM",
                 line and line["of_limit"], at_least=WANTED_ADAM)
    for line in lines:
        if line["bench"] in ("cuda_norm", "cuda_cast"):
            s.figure(f"{line['bench'][5:]} {line.get('elements', '')}".strip(), f"{line['of_limit'] * copy:.0f} GB/s",
                     f"{copy:.0f} GB/s, a copy within HBM", line["of_limit"])
    products, failure = bench_run(s, "cuda_product_bench")
    if not products:
        raise failure
    large = products[0]["tflops"]
    for line in products[1:]:
        if line["bench"] == "cuda_fusion":
            inside = line["inside_us"]
            s.figure(f"inside the product, {line['product']}", inside and f"{inside:.0f} us",
                     f"{line['apart_us']:.0f} us after it" if inside else line["why"], line.get("of_apart"))
        else:
            s.figure(f"product, {line['product']}", f"{line['tflops']:.4g} TFLOP/s",
                     f"{large:.4g} TFLOP/s, the large one", line["of_limit"])
    attention, failed = ([], None) if s.emulated else bench_run(s, "cuda_attention_bench")
    for line in attention:
        s.figure(f"attention {line['operation']}, {line['type']}, {line['batch']} x {line['sequence']}, heads of "
                 f"{line['head_width']}", f"{line['tflops']:.4g} TFLOP/s", f"{large:.4g} TFLOP/s, the large product",
                 line["tflops"] / large)
    if s.emulated:
        s.figure("attention", None, "not on an emulated GPU")
    for why in filter(None, (failure, failed)):
        raise why


# Fine-tunes.

def model_of(s, shape, dtype):
    """A new model; one that an earlier run has made is taken."""
    arguments = [*map(str, shape.arguments()), "--dtype", dtype]
    folder = s.work / ("model-" + "-".join(value.lstrip("-") for value in arguments))
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        room(s, shape.parameters * (4 if dtype == "fp32" else 2), "a model", keep=folder)
        s.checked([s.find("spillway"), "init-model", part, *arguments])
        part.rename(folder)
    return folder


def room(s, needed, what, keep):
    """Skips the stage where the drive has not that much; models but the one to keep go for it."""
    def is_short():
        return shutil.disk_usage(s.work).free < 1.02 * needed + GIB / 4

    for other in sorted(s.work.glob("model-*")):
        if is_short() and other != keep:
            shutil.rmtree(other)
    if is_short():
        free = shutil.disk_usage(s.work).free
        raise Skip(f"{s.work}: {what} takes {needed / GIB:.1f} GiB, {free / GIB:.1f} are free; name another --work")


def text_of(s):
    """The same on every machine; longer than a row."""
    file = s.work / "text"
    if not file.exists():
        file.write_bytes((ROOT / "LICENSE").read_bytes() * 8)
    return file


class Run:
    """A fine-tune by Spillway: the lines of its log, what it printed, its trace's place."""

    def __init__(self, s, name, model, steps, seq, *options, seconds=None, grace=GRACE_SECONDS, traced=False,
                 data=None, **config):
        self.trace, log, file = s.work / f"{name}.trace", s.work / f"{name}.jsonl", s.work / f"{name}.json"
        log.unlink(missing_ok=True)
        config.setdefault("device", "cuda")
        fine.write_config(file, **config)
        command = [s.find("spillway"), "finetune", "--config", file, "--model", model, "--data", data or text_of(s),
                   "--seq", seq, "--steps", steps, "--log", log, *options]
        done = s.run([*command, *(["--trace", self.trace] if traced else [])], seconds=seconds,
                     grace=grace)
        self.out = done.out
        self.lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        # 130: it was asked to end, and did so after a step; None: its step took too long for that.
        self.good = done.status == 0 or done.status in (130, None) and len(self.lines) >= LEAST_STEPS
        self.whole = done.status == 0
        self.status, self.seconds, self.last_line = done.status, done.seconds, done.last_line()
        s.say(run=name, config=json.loads(file.read_text()), exit_status=done.status, run_seconds=done.seconds,
              ledger=re.findall(r"^  (?:hbm|host|nvme) .*$", done.out, re.MULTILINE), steps=self.lines)

    def checked(self):
        if not self.good:
            raise Failed(f"finetune: exit status {self.status}: {self.last_line}", self.out)
        return self

    def settled(self):
        """The first two steps touch memory for the first time and have no update of the step before."""
        return self.lines[2:] or self.lines

    def median(self, key):
        return fine.median([line[key] for line in self.settled()])

    def tokens_per_second(self):
        return fine.median([line["tokens"] / line["seconds"] for line in self.settled()])


def torch_lines(s, python, device, model, shape, steps, *options, data=None, seconds=None):
    """PyTorch's steps, and what it says last; or None and why it has none."""
    done = s.run([python, ROOT / "bench/peers/finetune_torch.py", "--model", model, "--data", data or text_of(s),
                  "--seq", shape.seq, "--batch", shape.batch, "--steps", steps, "--device", device, *options],
                 env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, seconds=seconds)
    s.say(peer="finetune_torch.py", options=options, exit_status=done.status, run_seconds=done.seconds,
          lines=done.lines())
    lines = [line for line in done.lines() if "step" in line]
    if done.status == 0 or done.status is None and LEAST_STEPS <= len(lines):
        return lines, ""
    if done.status is None:
        return None, f"{len(lines)} steps in {done.seconds:.0f} s"
    short = re.search(r"OutOfMemoryError.*", done.out)
    return None, short.group(0) if short else done.last_line()


def reference(s):
    shape, steps, rate = TINY, 3, 3e-4
    if not s.tiny:
        shape, steps = Shape(4, 256, 4, seq=256, batch=4), 20
    text = ROOT / "LICENSE"
    optimizer = {"lr": rate, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
    python, why = s.peer()
    bad = None
    for dtype, limit in LOSS_LIMITS.items():
        model = model_of(s, shape, "fp32")
        how = {"micro": shape.batch, "dtype": dtype, "optimizer": optimizer, "data": text}
        run = Run(s, f"reference-{dtype}", model, steps, shape.seq, **how).checked()
        if not run.whole:
            raise Failed(f"{len(run.lines)} of {steps} steps in {run.seconds:.0f} s", run.out)
        ours = run.lines
        others = {}
        if s.tiny:
            others["the host device"] = Run(s, "host", model, steps, shape.seq, device="host", **how).checked().lines
        else:
            others["tests/references"] = kept_reference(dtype, shape, steps, rate)
        lines, said = torch_lines(s, *python, model, shape, steps, "--dtype", dtype, "--lr", rate,
                                  data=text) if python else (None, why)
        others["PyTorch, here"] = lines or said
        for name, wanted in others.items():
            if isinstance(wanted, str):
                s.figure(f"losses, {dtype}", None, f"{name}: {wanted}")
                continue
            if len(wanted) != steps:
                s.figure(f"losses, {dtype}", None, f"{name}: {len(wanted)} of {steps} steps in the time")
                continue
            apart = [abs(own["loss"] / other["loss"] - 1) for own, other in zip(ours, wanted, strict=True)]
            worst = max(apart)  # rounding grows from step to step, a mistake is there in the first
            if not s.figure(f"losses, {dtype}", f"{worst:.2g} apart, {steps} steps, {apart[0]:.2g} in the first", name,
                            worst, at_most=limit):
                bad = Failed(f"losses in {dtype} are {worst:.2g} away from those of {name}; {limit:g} is the most")
    if bad:
        raise bad


def kept_reference(dtype, shape, steps, rate):
    """The losses that the tests compare with, of the very same fine-tune."""
    file = ROOT / f"tests/references/gpt2_4x256_{dtype}.jsonl"
    about, *lines = map(json.loads, file.read_text().splitlines())
    ours = (" ".join(map(str, shape.arguments())), shape.seq, shape.batch, rate, steps)
    theirs = (about["init_model"], about["seq"], about["batch"], about["lr"], len(lines))
    if ours != theirs:
        raise Failed(f"{file.name} was made with {theirs}, not with {ours}")
    return lines


def judge_flops(s, name, rate, shape, wanted=None, **more):
    """Of so many tokens a second, beside the large product's rate, which is measured here if it was not before."""
    if not s.limits.get("product"):
        s.limits["product"] = middle_of(product_rates(s))
    reached = rate * shape.operations / 1e12
    if not s.limits["product"]:
        s.figure(name, f"{reached:.4g} TFLOP/s", "no product was measured", at_least=wanted, **more)
        return
    limit, sustained = s.limits["product"]
    s.figure(name, f"{reached:.4g} TFLOP/s", f"{limit:.4g} TFLOP/s, the large product", reached / limit,
             at_least=wanted, operations_per_token=shape.operations, **more)
    s.figure(f"{name}, sustained", f"{reached:.4g} TFLOP/s", f"{sustained:.4g} TFLOP/s, the large product for seconds",
             reached / sustained)


def resident(s):
    shape = TINY if s.tiny else XL
    steps, rounds = (4, 1) if s.tiny else (20, 3)
    model = model_of(s, shape, "bf16")
    python, why = s.peer()
    hbm = "64MiB" if s.emulated else f"{s.free_mib() - 2048}MiB"
    how = {"micro": shape.batch, "hbm": hbm}
    products, ours, fused = [], [], {choice: [] for choice in (FUSIONS[-1:] if s.tiny else FUSIONS)}
    peers, longest = {name: [] for name in PEERS}, {}
    absent = {name: why for name in PEERS if not python}
    for turn in range(rounds):
        if turn and s.left() < 2 * run.seconds + 30:
            break
        products += product_rates(s)
        again = Run(s, f"resident-{turn}", model, steps, shape.seq, **how)
        run = again.checked() if turn == 0 else again
        if not again.good:
            break  # what the rounds before have shown stays
        ours.append(run.tokens_per_second())
        for choice in fused if turn < 2 else ():
            if s.tiny or s.left() > 2 * run.seconds + 90:
                other = Run(s, f"resident-{choice}-{turn}", model, steps, shape.seq, "--fuse", choice, **how)
                fused[choice] += [(other.tokens_per_second(), ours[-1])] if other.good else []
        for name, options in PEERS.items():
            # What is begun must end, and the next round's run of ours be possible.
            if name in absent or turn and (name not in EXACT_PEERS or
                                           s.left() < 1.2 * longest[name] + 2 * run.seconds):
                continue
            begin = s.left()
            lines, reason = torch_lines(s, *python, model, shape, steps, "--dtype", "bf16", "--fused", "--no-exact",
                                        *options, seconds=max(1, s.left() - run.seconds - 30))
            longest[name] = begin - s.left()
            if lines:
                settled = lines[2:]
                peers[name].append(shape.batch * shape.seq / fine.median([line["seconds"] for line in settled]))
            else:
                absent[name] = reason
    products += product_rates(s)
    judge_resident(s, shape, run, ours, products, fused)
    judge_peers(s, fine.median(ours), peers, absent)
    if s.tiny or s.left() > 2 * run.seconds:
        traced = Run(s, "resident-traced", model, 4, shape.seq, traced=True, **how)
        s.keep(traced.trace, "trace-resident")


def judge_resident(s, shape, run, ours, products, fused):
    rate = fine.median(ours)
    kept = re.search(r"(\d+ of \d+) blocks keep their inner activations", run.out)
    s.figure("gpt2-xl in HBM" if not s.tiny else "tiny in HBM", f"{rate:.0f} tokens/s",
             f"{kept.group(1)} blocks keep their inner activations" if kept else "", rounds=ours)
    s.limits["product"] = middle_of(products)
    judge_flops(s, "model flops", rate, shape, WANTED_FLOPS, products=products)
    for choice, pairs in fused.items():  # each beside our own rate of the same round
        found = [fine.median(rates) for rates in zip(*pairs)]
        s.figure(f"--fuse {choice}", f"{found[0]:.0f} tokens/s" if pairs else None,
                 f"{found[1]:.0f} tokens/s by default, in the same rounds" if pairs else "no time",
                 fine.median([other / own for other, own in pairs]), rounds=pairs)


def judge_peers(s, rate, peers, absent):
    rates = {name: fine.median(found) for name, found in peers.items() if found}
    fastest = max((name for name in EXACT_PEERS if name in rates), key=rates.get, default=None)
    if not fastest:
        s.figure("beside PyTorch", None, "; ".join(sorted(set(absent.values()))), at_least=WANTED_PEER)
    for name in PEERS:
        if name in rates:
            s.figure(f"beside {name}", f"{rate:.0f} tokens/s", f"{rates[name]:.0f} tokens/s, {name}",
                     rate / rates[name], at_least=WANTED_PEER if name == fastest else None, rounds=peers[name])
        elif fastest:
            s.figure(f"beside {name}", None, absent.get(name, "no time"))
