"""The stages of bench/gpu.py that test: right or wrong on a GPU, and no figure that is held against another one."""
import concurrent.futures
import os
import re
import shutil
import sys

from gpu_session import ROOT, Failed, Skip

sys.path.insert(0, str(ROOT / "tools"))
import count_tests  # noqa: E402

SUITES = ("cuda_device_test", "tools_cuda_ops_test", "tools_cuda_attention_test")
SHARDS = 24  # of a suite, under a sanitizer
SANITIZERS = {"memcheck": ["--report-api-errors", "no"], "racecheck": [], "synccheck": [], "initcheck": []}
FIRST_SANITIZERS = 2


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
        count.failed.append((name, f"wrote no report: exit status {done.status}: {done.last_line()}"))
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
    env = {"GTEST_TOTAL_SHARDS": "12", "GTEST_SHARD_INDEX": "1"} if s.tiny else None
    failures = []
    for name in SUITES:
        count, done = count_cases(s, name, [s.find(name)], env)
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
        count, done = count_cases(s, name, [peer[0], ROOT / f"tests/python/{name}_test.py"], env)
        failures.append(judge(s, name, count, done.out, done.seconds))
    done = s.checked([peer[0], ROOT / "bench/pytorch_bench.py", "--device", "cuda", "--work", s.work, "--dtype", "bf16",
                      *(["--tiny"] if s.tiny else ["--layers", 24, "--width", 1024, "--sequence", 1024, "--batch", 8])],
                     env=env)
    for line in done.lines():
        s.say(**line)
    for variant, ratio in done.lines()[-1]["ratio_to_pytorch"].items():
        s.figure(f"a PyTorch loop, all in {variant if variant == 'nvme' else 'hbm'}", f"{ratio:.3f}",
                 "seconds of a step, over those of PyTorch alone", ratio)
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
        end = s.left() - s.left() / ((ahead if i < ahead else len(todo)) - i)
        shards = tests = errors = 0
        unfinished = False
        while shards < SHARDS and s.left() > end:
            shard = {"GTEST_TOTAL_SHARDS": str(SHARDS), "GTEST_SHARD_INDEX": str(shards)}
            done = s.run([tool, "--tool", kind, "--error-exitcode", 86, *SANITIZERS[kind], s.find(name),
                          "--gtest_filter=-*DeathTest*"], env=shard, seconds=s.left() - end)
            if done.status is None:
                unfinished = True
                break
            shards += 1
            ran = re.search(r"(\d+) tests? from \d+ test suites? ran", done.out)
            tests += int(ran.group(1)) if ran else 0
            if done.status != 0:
                errors += 1
                found = re.findall(r"^=+ (.*(?:SUMMARY|Error|hazard|Invalid|Race).*)$", done.out, re.MULTILINE)
                failures.append(Failed(f"{kind} of {name}, part {shards}: exit status {done.status}: "
                                       f"{found[0] if found else done.last_line()}", done.out))
        s.say(tool=kind, program=name, parts=shards, of=SHARDS, tests=tests, bad_parts=errors, unfinished=unfinished)
        s.figure(f"{kind}, {name}", f"{tests} tests, {errors} of {shards} parts with errors" if shards else None,
                 f"{shards} of {SHARDS} parts in the time" if shards < SHARDS else "all of it")
    for failure in failures:
        raise failure
