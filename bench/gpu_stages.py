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
from gpu_session import ROOT, Failed, Skip

sys.path.insert(0, str(ROOT / "tests/cli"))
import runs  # noqa: E402

WANTED_COPY, WANTED_ADAM, WANTED_READ = 0.95, 0.9, 0.95  # of the limit
WANTED_FLOPS, WANTED_PEER, WANTED_STEP = 0.45, 1.0, 1.1  # of a product's rate; times PyTorch; times the slowest link
# Relative, as tests/cli/reference_test.py has it: in bf16 PyTorch rounds in an order of its own.
LOSS_LIMITS = {"fp32": 1e-5, "bf16": 1e-2}
# PyTorch beside it: eager, AdamW's fused kernel, all in the GPU's memory.
PEERS = {"PyTorch": [], "PyTorch, checkpointing": ["--checkpointing"],
         "PyTorch without masters": ["--no-masters"]}
EXACT_PEERS = ("PyTorch", "PyTorch, checkpointing")  # that do the same arithmetic
MIB, GIB = 1 << 20, 1 << 30


class Shape:
    def __init__(self, layers, width, heads, vocab=50257, seq=1024, batch=8):
        self.layers, self.width, self.heads, self.vocab, self.seq, self.batch = layers, width, heads, vocab, seq, batch
        self.parameters = 12 * layers * width**2 + 13 * layers * width + (vocab + seq + 2) * width
        self.operations = 6 * self.parameters + 12 * layers * width * seq  # of a token

    def arguments(self):
        return ["--layers", self.layers, "--width", self.width, "--heads", self.heads, "--vocab", self.vocab,
                "--context", self.seq, "--seed", 1]


TINY, TINY_DEEP = Shape(2, 64, 2, 256, 64, 2), Shape(4, 64, 2, 256, 64, 2)
XL, BIG = Shape(48, 1600, 25), Shape(32, 2816, 44)


# Limits of the GPU.

def bench_lines(s, name):
    done = s.run([s.find(name), *(["--tiny"] if s.tiny else [])])
    if done.status != 0:
        raise Failed(f"{name}: exit status {done.status}: {done.last_line()}", done.out)
    for line in done.lines():
        s.say(**line)
    return done.lines()


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


def product_lines(s):
    """TFLOP/s of the large product, now, and the lines of cuda_product_bench."""
    lines = bench_lines(s, "cuda_product_bench")
    return next(line["tflops"] for line in lines if line["product"] == "large"), lines


def product_rates(s):
    """As a list, which is empty where it cannot be measured: what it is held against is worth its time without."""
    try:
        return [product_lines(s)[0]]
    except (Skip, Failed) as reason:
        s.say(product=None, reason=str(reason))
        return []


def copies(s):
    lines, memcpy = copy_lines(s), memcpy_rates(s)
    for line in lines:
        if line["bench"] == "cuda_chunks":
            s.figure(f"{line['way']} in chunks of {line['chunk']}", f"{line['gb_s']:.1f} GB/s",
                     f"{memcpy[line['way']]:.1f} GB/s, one large copy", line["of_limit"], at_least=WANTED_COPY)
    copy = next(line["gb_s"] for line in lines if line["bench"] == "cuda_copy")
    for dtype in ("bf16", "fp16", "fp32"):
        line = next((line for line in lines if line["bench"] == "cuda_adam" and line["type"] == dtype), None)
        s.figure(f"Adam, {dtype}", line and f"{line['gb_s']:.0f} GB/s", f"{copy:.0f} GB/s, a copy within HBM",
                 line and line["of_limit"], at_least=WANTED_ADAM)
    for line in lines:
        if line["bench"] in ("cuda_norm", "cuda_cast"):
            s.figure(f"{line['bench'][5:]} {line.get('elements', '')}".strip(), f"{line['of_limit'] * copy:.0f} GB/s",
                     f"{copy:.0f} GB/s, a copy within HBM", line["of_limit"])
    large, products = product_lines(s)
    for line in products[1:]:
        s.figure(f"product, {line['product']}", f"{line['tflops']:.4g} TFLOP/s", f"{large:.4g} TFLOP/s, the large one",
                 line["of_limit"])
    if s.emulated:
        s.figure("attention", None, "not on an emulated GPU")
        return
    for line in bench_lines(s, "cuda_attention_bench"):
        s.figure(f"attention {line['operation']}, {line['type']}, {line['batch']} x {line['sequence']}, heads of "
                 f"{line['head_width']}", f"{line['tflops']:.4g} TFLOP/s", f"{large:.4g} TFLOP/s, the large product",
                 line["tflops"] / large)


# Fine-tunes.

def model_of(s, shape, dtype):
    """A new model; one that an earlier run has made is taken."""
    arguments = [*map(str, shape.arguments()), "--dtype", dtype]
    folder = s.work / ("model-" + "-".join(value.lstrip("-") for value in arguments))
    if not folder.is_dir():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        room(s, shape.parameters * (4 if dtype == "fp32" else 2), "a model")
        s.checked([s.find("spillway"), "init-model", part, *arguments])
        part.rename(folder)
    return folder


def room(s, needed, what):
    free = shutil.disk_usage(s.work).free
    if free < 1.02 * needed + GIB / 4:
        raise Skip(f"{s.work}: {what} takes {needed / GIB:.1f} GiB, {free / GIB:.1f} are free; name another --work")


def text_of(s):
    """The same on every machine; longer than a row."""
    file = s.work / "text"
    if not file.exists():
        file.write_bytes((ROOT / "LICENSE").read_bytes() * 8)
    return file


class Run:
    """A fine-tune by Spillway: the lines of its log, what it printed, its trace's place."""

    def __init__(self, s, name, model, steps, seq, *options, seconds=None, traced=False, data=None, **config):
        self.trace, log, file = s.work / f"{name}.trace", s.work / f"{name}.jsonl", s.work / f"{name}.json"
        log.unlink(missing_ok=True)
        config.setdefault("device", "cuda")
        fine.write_config(file, **config)
        command = [s.find("spillway"), "finetune", "--config", file, "--model", model, "--data", data or text_of(s),
                   "--seq", seq, "--steps", steps, "--log", log, *options]
        done = s.run([*command, *(["--trace", self.trace] if traced else [])], seconds=seconds, ask=True)
        self.out = done.out
        self.lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        # 130: it was asked to end, and did so after a step.
        self.good = done.status == 0 or done.status == 130 and len(self.lines) > 3
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
    if done.status == 0:
        return [line for line in done.lines() if "step" in line], ""
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
        ours = Run(s, f"reference-{dtype}", model, steps, shape.seq, **how).checked().lines
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
            worst = max(abs(own["loss"] / other["loss"] - 1) for own, other in zip(ours, wanted, strict=True))
            if not s.figure(f"losses, {dtype}", f"{worst:.2g} apart, {steps} steps", name, worst, at_most=limit):
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
    if s.limits.get("product") is None:
        s.limits["product"] = fine.median(product_rates(s))
    reached, limit = rate * shape.operations / 1e12, s.limits.get("product")
    s.figure(name, f"{reached:.4g} TFLOP/s",
             f"{limit:.4g} TFLOP/s, the large product" if limit else "no product was measured",
             reached / limit if limit else None, at_least=wanted, operations_per_token=shape.operations, **more)


def resident(s):
    shape = TINY if s.tiny else XL
    steps, rounds = (4, 1) if s.tiny else (20, 3)
    model = model_of(s, shape, "bf16")
    python, why = s.peer()
    hbm = "64MiB" if s.emulated else f"{int(s.gpu()['memory.free']) - 2048}MiB"
    how = {"micro": shape.batch, "hbm": hbm}
    products, ours, peers, longest = [], [], {name: [] for name in PEERS}, {}
    absent = {name: why for name in PEERS if not python}
    for turn in range(rounds):
        if turn and s.left() < 2 * run.seconds + 30:
            break
        products += product_rates(s)
        run = Run(s, f"resident-{turn}", model, steps, shape.seq, **how).checked()
        ours.append(run.tokens_per_second())
        for name, options in PEERS.items():
            # What is begun must end, and the next round's run of ours be possible.
            if name in absent or turn and s.left() < 1.2 * longest[name] + 2 * run.seconds:
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
    rate, limit = fine.median(ours), fine.median(products)  # None: not measured
    kept = re.search(r"insides of (\d+ of \d+) blocks are kept", run.out)
    s.figure("gpt2-xl in HBM" if not s.tiny else "tiny in HBM", f"{rate:.0f} tokens/s",
             f"insides of {kept.group(1)} blocks kept" if kept else "", rounds=ours)
    s.limits["product"] = limit
    judge_flops(s, "model flops", rate, shape, WANTED_FLOPS, products=products)
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
    if s.tiny or s.left() > 2 * run.seconds:
        traced = Run(s, "resident-traced", model, 4, shape.seq, traced=True, **how)
        s.keep(traced.trace, "trace-resident")


# More than fits.

def smallest_budgets(s, model, shape, **how):
    """By doing what each refusal says."""
    budgets = {"hbm": "64KiB", "host": "64KiB"}
    for _ in range(6):
        run = Run(s, "smallest", model, 1, shape.seq, "--fresh", **how, **budgets)
        if run.good:
            return budgets
        refusal = next((line for line in run.out.splitlines() if "_bytes" in line and ";" in line), "")
        hint = runs.hinted_budget(refusal)
        if not hint:
            break
        budgets[hint[0].partition("_")[0]] = f"{hint[1]}B"
    raise Failed(f"no smallest budgets: {run.last_line}", run.out)


def drive_rates(s, folder):
    """Of reading, writing and both, in bytes per second; None where nothing can measure them."""
    try:
        found = links.probe_drive(folder, 16 * MIB if s.tiny else 2 * GIB, s.find("aio_bench"))
    except (Skip, links.Unable) as reason:
        s.say(drive=None, reason=str(reason))
        return None
    s.say(drive=found)
    return found


def judge_step(s, name, run, drive, shape):
    """The step over its slowest link: by the run's own probe of its links, and by what was measured around it."""
    seconds = run.median("seconds")
    link = fine.median([line["link"] for line in run.settled()])
    percent = fine.median([line["link_percent"] for line in run.settled() if line["link"] == link])
    s.figure(name, f"{seconds:.3g} s, {run.tokens_per_second():.0f} tokens/s", f"{link}, by the run's own probe",
             100 / percent, at_most=WANTED_STEP, link_percent=percent)
    memcpy = memcpy_rates(s)
    found = {"compute": seconds - run.median("stall_seconds")}
    found |= {way: run.median(f"{way}_bytes") / memcpy[way] / 1e9 for way in ("h2d", "d2h") if way in memcpy}
    moved = run.median("nvme_read_bytes") + run.median("nvme_write_bytes")
    if drive:
        found["nvme"] = moved / drive["mixed"]
    slowest = max(found, key=found.get)
    beside = f"{found[slowest]:.3g} s, {slowest}, measured around it" if drive or not moved else None
    s.figure(f"{name}: own measurement", beside and f"{seconds:.3g} s", beside or "nothing measured the drive",
             seconds / found[slowest] if beside else None, at_most=WANTED_STEP, links=found)
    judge_flops(s, f"{name}: model flops", run.tokens_per_second(), shape)


def first_forward(trace):
    """Bytes of weights that were read from NVMe in the forward pass of a trace's first step, other bytes, and the
    seconds from its begin to the last of these reads."""
    spans = [span for span in json.loads(trace.read_text())["traceEvents"] if span["ph"] == "X"]
    begin = min(span["ts"] for span in spans if re.fullmatch(r"step \d+", span["name"]))
    end = min(span["ts"] for span in spans if span["name"].startswith("backward ") and span["ts"] > begin)
    reads = [span for span in spans if span["pid"] == 2 and begin <= span["ts"] and span["ts"] + span["dur"] <= end]
    weights = [span for span in reads if span["name"].startswith("weights ")]
    last = max((span["ts"] + span["dur"] for span in weights), default=end)
    total, all_of_it = (sum(span["args"]["bytes"] for span in some) for some in (weights, reads))
    return total, all_of_it - total, (last - begin) / 1e6


def stores(s, shape, name):
    """Where a store goes, and commit_every: 0 where the drive has no room for two slots a tile."""
    folder = s.work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    room(s, 12 * shape.parameters, "a store without commits")
    free = shutil.disk_usage(s.work).free
    return folder, None if free > 1.02 * 24 * shape.parameters + GIB else 0


def tiers(s):
    shape, steps = (TINY_DEEP, 5) if s.tiny else (XL, 7)
    model = model_of(s, shape, "bf16")
    nvme, commit_every = stores(s, shape, "store-tiers")
    how = {"nvme": nvme, "micro": shape.batch, "commit_every": commit_every}
    if s.tiny:
        how["tile_elements"] = 16384
    how |= smallest_budgets(s, model, shape, **how) if s.tiny else {"hbm": "4GiB", "host": "4GiB"}
    drives = [drive_rates(s, s.work)]
    run = Run(s, "tiers", model, steps, shape.seq, "--fresh", seconds=0.6 * s.left(), **how).checked()
    # A pass with little to compute, when nothing is in memory yet: what a read brings goes on to HBM.
    resume = ["--resume"] if commit_every is None else ["--fresh"]
    last = 1 + (run.lines[-1]["step"] if commit_every is None else 0)
    reading = Run(s, "tiers-read", model, last, shape.seq, *resume, traced=True, **{**how, "micro": 1}).checked()
    drives.append(drive_rates(s, s.work))
    drive = links.mean_of_drive([found for found in drives if found]) if any(drives) else None
    judge_step(s, "gpt2-xl over three tiers" if not s.tiny else "tiny over three tiers", run, drive, shape)
    probed = re.search(r"nvme link: ([\d.]+) GB/s read", reading.out)
    rates = {"drive": drive["read"] / 1e9 if drive else float(probed.group(1)) if probed else None,
             "h2d": memcpy_rates(s).get("h2d")}
    rates = {link: rate for link, rate in rates.items() if rate}
    weights, others, seconds = first_forward(reading.trace)
    s.say(first_forward_weight_bytes=weights, other_bytes=others, forward_seconds=seconds, rates=rates)
    s.keep(reading.trace, "trace-tiers")
    if "drive" not in rates or weights == 0:
        s.figure("NVMe to HBM", None, "nothing was read" if weights == 0 else "the drive's rate is not known",
                 at_least=WANTED_READ)
        return
    slower = min(rates, key=rates.get)
    s.figure("NVMe to HBM", f"{weights / seconds / 1e9:.2f} GB/s", f"{rates[slower]:.2f} GB/s, {slower} alone",
             weights / seconds / 1e9 / rates[slower], at_least=WANTED_READ)


def big(s):
    shape, steps = (TINY_DEEP, 4) if s.tiny else (BIG, 40)
    model = model_of(s, shape, "bf16")
    nvme, commit_every = stores(s, shape, "store-big")
    budgets = {"hbm": "64MiB", "host": "64MiB"} if s.tiny else {"hbm": "10GiB", "host": "32GiB"}
    drive = drive_rates(s, s.work)
    run = Run(s, "big", model, steps, shape.seq, "--fresh", seconds=max(1, s.left() - 90), traced=True, nvme=nvme,
              micro=shape.batch, commit_every=commit_every, **budgets).checked()
    s.keep(run.trace, "trace-big")
    s.say(commit_every=commit_every, parameters=shape.parameters)
    judge_step(s, f"{shape.parameters / 1e9:.2g} B parameters over three tiers", run, drive, shape)
