"""The stages of bench/gpu.py that test: right or wrong on a GPU, and no figure that is held against another one."""
import concurrent.futures
import os
import re
import shutil
import sys

from gpu_session import ROOT, Failed, Skip

sys.path.insert(0, str(ROOT / "tools"))
import count_tests  # noqa: E402

SUITES = ("cuda_device_test", "cuda_tensor_store_test", "tools_cuda_ops_test", "tools_cuda_attention_test")
SHARDS = 24  # of a suite, under a sanitizer
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": [], "initcheck": []}
FIRST_SANITIZERS = 2
# Tests that hold a stream back behind a gate which the host opens later: where a launch or a fill waits for the stream,
# they never end.
GATED = "*IsDoneWhen*:*WorkAfter*:*Waits*:*AWait*:*Idle*:*Stopwatch*:*IsWaitedFor*"
# To load a kernel when it is first launched may wait for the stream as well. (Not where cuBLASLt is: it is large.)
EAGER = {"cuda_device_test": {"CUDA_MODULE_LOADING": "EAGER"}}
LEFT_OUT = f"-*DeathTest*:{GATED}"  # under a sanitizer


def count_cases(s, name, command, env=None, seconds=None):
    """A GoogleTest program's cases, or those of a Python test that reports as one."""
    report = s.work / f"{name}.xml"
    report.unlink(missing_ok=True)
    done = s.run([*command, f"--gtest_output=xml:{report}"], env=env, seconds=seconds)
    count = count_tests.Count()
    if report.exists():
        failures = count_tests.count_report(name, report, count)
        if failures == 0 and done.status != 0:
            count.failed.append((name, f"all cases passed, but the program ended with {done.status}"))
        report.unlink()
    else:
        # What passed until then is said by the program itself, GoogleTest's or unittest's.
        count.passed += len(re.findall(r"^\[       OK \]|\.\.\. ok$", done.out, re.MULTILINE))
        failed = re.findall(r"^\[  FAILED  \] (\S+) \(\d+ ms\)", done.out, re.MULTILINE)
        count.failed += [(name, case) for case in failed]
        how = f"killed after {done.seconds:.0f} s" if done.status is None else f"exit status {done.status}"
        count.failed.append((name, f"wrote no report: {how}: {done.last_line()}"))
    return count, done


def judge(s, name, count, out, seconds):
    s.say(program=name, passed=count.passed, failed=count.failed, skipped=count.skipped, seconds=seconds)
    s.figure(name, f"{count.passed} passed, {len(count.failed)} failed, {len(count.skipped)} skipped")
    if count.failed:
        return Failed(f"{name}: {': '.join(count.failed[0])}", out)
    # Without a GPU a few cases still pass: those that look at arguments.
    return Failed(f"{name}: most was skipped: {count.skipped[:1]}", out) if count.passed <= len(count.skipped) else None


def suites(s):
    # A tiny run takes one of twelve parts of each.
    part = {"GTEST_TOTAL_SHARDS": "12", "GTEST_SHARD_INDEX": "1"} if s.tiny else {}
    failures = []
    for i, name in enumerate(SUITES):
        env = part | EAGER.get(name, {})
        # One that hangs leaves the others their time.
        count, done = count_cases(s, name, [s.find(name)], env, s.left() / 2 if i + 1 < len(SUITES) else None)
        failures.append(judge(s, name, count, done.out, done.seconds))
    for failure in filter(None, failures):
        raise failure


def same_bits(s):
    """Each case is a process of its own, several at a time: most of the time goes into starting programs."""
    file = ROOT / "tests/cli/same_bits_test.py"
    cases = re.findall(r"^    def (test_\w+)", file.read_text(), re.MULTILINE)
    if s.tiny:
        cases = [case for case in cases if "AnotherSeed" in case]
    env = {"SPILLWAY_STEPS": "3" if s.tiny else "12"}
    with concurrent.futures.ThreadPoolExecutor(max(1, min(5, os.cpu_count() // 3))) as pool:
        done = list(pool.map(lambda case: count_cases(s, case, [sys.executable, file, f"SameBits.{case}"], env), cases))
    total = count_tests.Count()
    for count, _ in done:
        total.passed += count.passed
        total.failed += count.failed
        total.skipped += count.skipped
    out = next((run.out for count, run in done if count.failed), "")
    failure = judge(s, "same bits", total, out, max(run.seconds for _, run in done))
    if failure:
        raise failure


def pytorch(s):
    """The package for PyTorch loops: its tests, and a loop through Spillway beside PyTorch alone."""
    peer, why = s.peer()
    if peer is None or s.emulated:
        raise Skip(why or "PyTorch does not know the emulated GPU")
    places = [s.bin / "../lib/libspillway.so.0", s.bin / "src/libspillway.so.0"]
    library = next((place.resolve() for place in places if place.is_file()), None)
    if library is None:
        raise Skip(f"libspillway.so.0 is not with {s.bin}; build it")
    env = {"SPILLWAY_LIBRARY": str(library)}
    failures = []
    for name in ("blocks", "engine"):
        count, done = count_cases(s, name, [peer[0], ROOT / f"tests/python/{name}_test.py"], env, 0.3 * s.left())
        failures.append(judge(s, name, count, done.out, done.seconds))
    done = s.run([peer[0], ROOT / "bench/pytorch_bench.py", "--device", "cuda", "--work", s.work, "--dtype", "bf16",
                  "--rounds", 1, *(["--tiny"] if s.tiny else
                                   ["--layers", 24, "--width", 1024, "--sequence", 1024, "--batch", 8])], env=env)
    # Each variant says its own when it is done, so that one that takes too long leaves the others'.
    steps = {}
    for line in done.lines():
        s.say(**line)
        if "variant" in line:
            steps[line["variant"]] = line["step_seconds"]
    for variant, place in (("none", "hbm"), ("nvme", "nvme")):
        known = variant in steps and "pytorch" in steps
        s.figure(f"a PyTorch loop, all in {place}", f"{steps[variant]:.3f} s a step" if known else None,
                 f"{steps['pytorch']:.3f} s, PyTorch alone" if known else done.last_line(),
                 steps[variant] / steps["pytorch"] if known else None)
    if done.status != 0:
        how = f"killed after {done.seconds:.0f} s" if done.status is None else f"exit status {done.status}"
        failures.append(Failed(f"pytorch_bench.py: {how}: {done.last_line()}", done.out))
    for failure in filter(None, failures):
        raise failure


def sanitizer(s):
    """Every suite in parts under one tool after the other, as many parts as its share of the time allows; the tools but
    the first two have what those leave."""
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if not tool:
        raise Skip("compute-sanitizer is not installed")
    todo = [(kind, name) for kind in SANITIZERS for name in SUITES]
    failures = []
    for i, (kind, name) in enumerate(todo):
        ahead = FIRST_SANITIZERS * len(SUITES)
        share = s.left() / ((ahead if i < ahead else len(todo)) - i)
        end = s.left() - share
        begun = shards = tests = errors = foreign = 0
        while begun < SHARDS and s.left() > max(end, 1):
            shard = {"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": str(begun)} | EAGER.get(name, {})
            # A part that hangs leaves the others most of the time.
            done = s.run([tool, "--tool", kind, "--error-exitcode", 86, *SANITIZERS[kind], s.find(name),
                          f"--gtest_filter={LEFT_OUT}"], env=shard, seconds=min(s.left() - end, max(30, share / 3)))
            begun += 1
            if "Device not supported" in done.out:
                raise Skip("compute-sanitizer does not support this device, as on machines that only seem to have one")
            if done.status is None:
                continue
            shards += 1
            ran = re.search(r"(\d+) tests? from \d+ test suites? ran", done.out)
            tests += int(ran.group(1)) if ran else 0
            # Kernels of cuBLASLt's pass data in ways of their own: races that racecheck sees inside them are not ours.
            racing = re.findall(r"access at (\S+?)\+0x", done.out) if kind == "racecheck" else []
            if racing and not any("spillway" in kernel for kernel in racing) and "[  PASSED  ]" in done.out:
                foreign += 1
            elif done.status != 0:
                errors += 1
                found = re.findall(r"^=+ (.*(?:SUMMARY|Error|hazard|Invalid|Race).*)$", done.out, re.MULTILINE)
                failures.append(Failed(f"{kind} of {name}, part {begun}: exit status {done.status}: "
                                       f"{found[0] if found else done.last_line()}", done.out))
        s.say(tool=kind, program=name, parts=shards, of=SHARDS, tests=tests, bad_parts=errors, foreign=foreign,
              unfinished=begun - shards, left_out=LEFT_OUT)
        bad = f"{errors} of {shards} parts with errors" + (
            f", {foreign} with races inside cuBLASLt's kernels" if foreign else "")
        ran = f"{shards} of {SHARDS} parts in the time" if shards < SHARDS else "all of it"
        s.figure(f"{kind}, {name}", f"{tests} tests, {bad}" if shards else None,
                 f"{ran}; left out: {LEFT_OUT[1:]}")
    for failure in failures:
        raise failure
