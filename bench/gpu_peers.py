"""The stage of bench/gpu.py that puts Spillway beside what a user would take instead: bench/peers/train.py's programs.

Each is a process of its own, with a share of the stage's time; what one leaves the others get. It begins with the
smallest number of tokens a step, so that sizes are what is cut where time is short.
"""
import json
import shutil
import statistics

from gpu_session import GIB, ROOT, Failed, Skip

# Shares of the time, in this order: what is held against what comes first, then the drive's, which take longest.
SHARES = {"pytorch": 40, "spillway-hbm": 60, "spillway-host": 75, "deepspeed-cpu": 65, "fsdp2": 50, "torchao": 50,
          "spillway-nvme": 75, "deepspeed-nvme": 100}
GRACE = 8  # seconds in which a step that was begun may end
PLACES = {"spillway-hbm": ("in HBM", ("pytorch",)), "spillway-host": ("states in memory", ("deepspeed-cpu", "fsdp2",
                                                                                          "torchao")),
          "spillway-nvme": ("states on NVMe", ("deepspeed-nvme",))}
NAMES = {"pytorch": "PyTorch", "deepspeed-cpu": "DeepSpeed ZeRO-3", "deepspeed-nvme": "DeepSpeed ZeRO-3",
         "fsdp2": "PyTorch FSDP2", "torchao": "torchao"}
KIB = 1 << 10
LOSSES_APART = 0.01  # relative, in bf16; they begin with the same weights and tokens


def peers(s):
    python, why = s.peer()
    if python is None:
        raise Skip(why)
    python, device = python
    places = [s.bin / "../lib/libspillway.so.0", s.bin / "src/libspillway.so.0"]
    library = next((place.resolve() for place in places if place.is_file()), None)
    if library is None:
        raise Skip(f"libspillway.so.0 is not with {s.bin}; build it")
    found = {}
    for i, name in enumerate(SHARES):
        rest = sum(list(SHARES.values())[i:])
        found[name] = one_peer(s, python, device, library, name, s.left() * SHARES[name] / rest)
    judge(s, found)
    for ours in PLACES:  # a peer that cannot says so, and that is all
        for line in found[ours][0]:
            if line.get("failed") and line["code"] != "does_not_fit":
                raise Failed(f"{ours}: {line['failed']}")


def one_peer(s, python, device, library, name, seconds):
    """(lines, why there are no more) of one program, which leaves a line as soon as it has one."""
    folder, file = s.work / f"store-peers-{name}", s.work / f"peers-{name}.jsonl"
    file.unlink(missing_ok=True)
    command = [python, ROOT / "bench/peers/train.py", "--variant", name, "--folder", folder, "--lines", file,
               "--seconds", int(max(1, seconds - GRACE)), *(["--tiny"] if s.tiny else ["--shape", s.a.peer_shape]),
               "--device", device]
    # The emulated GPU is none of PyTorch's: there the same is done on the CPU.
    done = s.run(command, seconds=seconds, env={"SPILLWAY_LIBRARY": str(library)})
    shutil.rmtree(folder, ignore_errors=True)
    lines = [json.loads(line) for line in (file.read_text() if file.exists() else "").splitlines()
             if line.endswith("}")]
    file.unlink(missing_ok=True)
    for line in lines:
        s.say(**line)
    why = next((line[word] for line in lines for word in ("failed", "unfinished") if word in line), "")
    if not why and done.status != 0:
        why = f"killed after {done.seconds:.0f} s" if done.status is None else (
            f"exit status {done.status}: {done.last_line()}")
    s.say(peer=name, seconds=done.seconds, share=seconds, why=why)
    return lines, why


def sizes_of(lines):
    """By tokens a step. A size of which the program was killed has its steps, and not the line that sums them up."""
    found = {line["size"]: line for line in lines if "size" in line}
    for line in lines:
        if "step" in line and "tokens_per_second" not in found.get(line["tokens"], {}):
            found.setdefault(line["tokens"], {"all": []})["all"].append(line["seconds"])
    for tokens, size in found.items():
        if "all" in size:
            settled = size["all"][1:] or size["all"]
            size |= {"tokens_per_second": tokens / statistics.median(settled), "first_counts": len(size["all"]) == 1}
    return found


def words(name, size):
    """Tokens a second, memory, and what a step moves on the drive, as far as it is known."""
    text = f"{size['tokens_per_second']:.0f} tokens/s{' in the first step' if size['first_counts'] else ''}"
    if "host_bytes" in size:
        text += f", {size['hbm_bytes'] / GIB:.1f} GiB HBM, {size['host_bytes'] / GIB:.1f} host"
        if size["read_bytes"] + size["written_bytes"] > 1 << 20:
            text += f", reads {size['read_bytes'] / 1e9:.1f} GB, writes {size['written_bytes'] / 1e9:.1f}"
    return f"{name}: {text}" if name else text


def judge(s, found):
    sizes = {name: sizes_of(lines) for name, (lines, _) in found.items()}
    for ours, (place, others) in PLACES.items():
        for other in others:
            tokens = sorted(set(sizes[ours]) | set(sizes[other]))
            for count in tokens:
                own, beside = sizes[ours].get(count), sizes[other].get(count)
                # What a first step leaves for the next one to do is in neither's figure.
                known = own and beside and not own["first_counts"] and not beside["first_counts"]
                missing = found[other if own else ours][1] or "no time"
                s.figure(f"{place}, {tokens_of(count)}, {NAMES[other]}", words("", own) if own else None,
                         words(NAMES[other], beside) if beside else f"{NAMES[other]}: {missing}" if own else missing,
                         own["tokens_per_second"] / beside["tokens_per_second"] if known else None)
            if not tokens:
                s.figure(f"{place}, {NAMES[other]}", None, f"{found[ours][1]}; {NAMES[other]}: {found[other][1]}")
    judge_losses(s, found)


def tokens_of(count):
    return f"{count // KIB} Ki" if count >= KIB else str(count)


def judge_losses(s, found):
    """Of the first step: who differs there trains something else."""
    first = {name: next((line["loss"] for line in lines if "loss" in line), None) for name, (lines, _) in found.items()}
    if first["pytorch"] is None:
        return
    apart = {name: abs(loss / first["pytorch"] - 1) for name, loss in first.items() if loss is not None}
    worst = max(apart, key=apart.get)
    s.figure("first losses", f"{apart[worst]:.2g} apart, {worst}", f"{len(apart)} programs, beside PyTorch's",
             apart[worst], at_most=LOSSES_APART, losses=first)
