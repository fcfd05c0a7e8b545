"""Lets one fuzzer, which SPILLWAY_FUZZER names, look for a finding for SPILLWAY_FUZZ_SECONDS (20).

It begins with the committed seeds and with what earlier runs in the same build directory came by, and a finding is kept
there as a file, which the failure names. What it covered is said in one line: `fuzz config: …`.
"""
import base64
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402

FUZZER = pathlib.Path(os.environ["SPILLWAY_FUZZER"])
TARGET = FUZZER.name.removeprefix("fuzz_")
SECONDS = int(os.environ.get("SPILLWAY_FUZZ_SECONDS", "20"))
PATIENCE_SECONDS = 120  # to load what it has, and to end

NAMES = ["include/spillway/dtype.h", "include/spillway/optimizer.h"]
# Whose string literals are words that the parser knows.
WORDS = {
    "config": [*sorted((ROOT / "src/config/sections").glob("*.cc")), "src/config/unused_keys.cc", "src/config/value.cc",
               "src/config/hint.cc", "include/spillway/io_queue.h", *NAMES],
    "decoder_config": ["tools/models/decoder/config.cc", "tools/models/decoder/rotary_config.cc"],
    "model_config": ["tools/models/config_json.cc", "tools/models/gpt2/model.cc"],
    "prepared": ["tools/finetune/prepared.cc"],
    "safetensors_header": ["src/formats/safetensors_header.cc"],
    "safetensors_index": ["src/formats/safetensors_header.cc"],
    "snapshot_record": ["src/checkpoint/snapshot_record.cc", *NAMES],
    "store_description": ["src/plan/description.cc", *NAMES],
}


def dictionary():
    words = set()
    for source in WORDS.get(TARGET, []):
        for literal in re.findall(r'"([\w.|]{2,60})"', (ROOT / source).read_text(), re.ASCII):
            words |= set(re.split(r"[.|]", literal))
    return "".join(f'"\\"{word}\\""\n' for word in sorted(words) if word)


def memory_file_system():
    """A directory for the files that some parsers want, in memory where there is such a place."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Fuzz(unittest.TestCase):
    def test_NothingIsFound(self):
        seeds = ROOT / "tests/fuzz/seeds" / TARGET
        corpus, findings = (FUZZER.parent / folder / TARGET for folder in ("corpus", "findings"))
        for folder in (corpus, findings):
            folder.mkdir(parents=True, exist_ok=True)
        options = [f"-max_total_time={SECONDS}", "-timeout=10", "-rss_limit_mb=2048", "-malloc_limit_mb=512",
                   "-print_final_stats=1", f"-artifact_prefix={findings}/"]
        if TARGET in WORDS:
            words = FUZZER.parent / f"{TARGET}.dict"
            words.write_text(dictionary())
            options.append(f"-dict={words}")
        with tempfile.TemporaryDirectory(dir=memory_file_system()) as scratch:
            done = subprocess.run(
                [FUZZER, *options, corpus, seeds], env={**os.environ, "TMPDIR": scratch}, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True, errors="replace", timeout=SECONDS + PATIENCE_SECONDS, check=False)
        if done.returncode != 0:
            sys.stderr.write(done.stdout[-20_000:])
            written = re.search(r"Test unit written to (\S+)", done.stdout)
            if written and pathlib.Path(written[1]).stat().st_size <= 4096:  # a log outlives the machine that found it
                sys.stderr.write(f"in base64: {base64.b64encode(pathlib.Path(written[1]).read_bytes()).decode()}\n")
            said = re.findall(r"^(?:SUMMARY|.*check failed|.*runtime error|terminate called).*", done.stdout, re.M)
            self.fail("; ".join([written[1] if written else "no input was written", *said[:2],
                                 f"exit status {done.returncode}"]))
        inputs = int(re.search(r"stat::number_of_executed_units: (\d+)", done.stdout)[1])
        edges, features, kept = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", done.stdout)[-1]
        print(f"fuzz {TARGET}: {inputs} inputs in {SECONDS} s, {edges} edges and {features} features covered, "
              f"{kept} inputs kept", flush=True)
        self.assertGreater(inputs, len(list(seeds.iterdir())), "it did nothing but run the seeds")


if __name__ == "__main__":
    main()
