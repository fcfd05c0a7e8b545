"""Every command that the documents show is run, in a small workplace, so that a document cannot show one that fails.

A line of a code block without a language that begins with `spillway` is a command, with the lines that continue it.
Blocks marked `sh` run one after the other in one directory, as a reader would. What stands for something of the
reader's own (DIR, FILE, /mnt/nvme0) is replaced through one table, PLACEHOLDERS; what cannot be run is in NOT_RUN, with
the reason. A command with a name that neither knows fails.
"""
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from loud_model import make_adapter  # noqa: E402
from prepared_data import write_prepared  # noqa: E402
from report import main  # noqa: E402
from runs import BINARY, CRASH, LIMIT_SECONDS, ROOT, TEXT, Workplace, spillway  # noqa: E402

DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# Replaced in this order, in every command. The names on the right are what Documents.setUpClass makes.
PLACEHOLDERS = [
    (r"/mnt/nvme(\d)(?:/\w+)?", r"drive\1"),
    (r"/usr/share/common-licenses/\S+", shlex.quote(str(TEXT))),
    (r"--model DIR\b", "--model gpt2"),
    (r"--data FILE\b", "--data data"),
    (r"export STORE DIR\b", "export store exported"),
    (r"export SNAPSHOTS/step-\d+ DIR\b", "export snapshots/step-000002 exported"),
    (r"generate --model STORE\b", "generate --model store"),
    (r"--adapter adapter --prompt '[^']+'", "--adapter left --ids --prompt '1 2'"),  # it has no tokenizer
    (r" --tokenizer (?:DIR|gpt2|Llama-3\.2-1B)", ""),  # these models have none
    (r"--load SNAPSHOTS?\b", "--load snapshots"),
    (r"--save SNAPSHOTS\b", "--save saved"),
    # Fewer steps and shorter measurements, of the same kind.
    (r"--steps (?:\d{3,})\b", "--steps 4"),
    (r"--save-every \d{3,}\b", "--save-every 2"),
    (r"--probe-seconds \d+\b", "--probe-seconds 0.2"),
    (r"^(spillway doctor\b(?!.*--(?:no-probe|probe-seconds))(?=.*(?:drive\d|--config)).*)$",
     r"\1 --probe-seconds 0.2"),
    # Its exit code is about this machine: 3 and 4 say that something is slower or broken.
    (r"^(spillway doctor\b.*)$", r"{ \1 || test $? = 3 -o $? = 4; }"),
    (r"--sustained \d+\b", "--sustained 0.05"),
    (r"^spillway sweep\b", "spillway sweep --seconds 2 --size 64MiB --allow-buffered"),
    (r"\| man -l -", "| cat"),
]

# What cannot be run, as a document and what the command begins with. Its options must be there all the same.
SYNOPSIS = "shows what may be left out"
NOT_RUN = {
    ("docs/command_line.md", "spillway init-model DIR"): SYNOPSIS,
    ("docs/command_line.md", "spillway doctor [DIR...]"): SYNOPSIS,
    ("docs/command_line.md", "spillway sweep DIR..."): SYNOPSIS,
    ("docs/command_line.md", "spillway finetune --config ds_config.json [--aio aio.json]"): SYNOPSIS,
    ("docs/command_line.md", "spillway plan --model DIR | --params 7B"): SYNOPSIS,
    ("docs/command_line.md", "spillway export STORE DIR [--with"): SYNOPSIS,
    ("docs/command_line.md", "spillway import DEEPSPEED_CHECKPOINT"): SYNOPSIS,
    ("docs/command_line.md", "spillway store DIR..."): SYNOPSIS,
    ("docs/command_line.md", "spillway config [ds_config.json"): SYNOPSIS,
    ("docs/command_line.md", "spillway generate --model DIR|STORE"): SYNOPSIS,
    ("docs/command_line.md", "spillway report steps.jsonl [MORE...]"): SYNOPSIS,
    ("docs/checkpoints.md", "spillway import CHECKPOINTS"): SYNOPSIS,
    ("docs/native_example.md", "spillway init-model"): "tests/python/native_example_test.py follows the page",
    ("docs/native_example.md", "spillway finetune"): "tests/python/native_example_test.py follows the page",
    ("docs/native_example.md", "spillway generate"): "tests/python/native_example_test.py follows the page",
    ("docs/checkpoints.md", "spillway finetune --config ds_config.json --model DIR --data FILE --steps 2000 --load "
                            "SNAPSHOT\n"): "needs what an import of a DeepSpeed checkpoint made; import_test.py does",
}

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
SCRIPT = re.compile(r"(?<![\w/.])(?:tools|bench|tests)/[\w/]+\.(?:sh|py)\b")


def without_comment(line):
    return re.sub(r"\s+# .*$", "", line).rstrip()


def commands_in(block):
    """The commands of a code block, each in one line: a line that is indented more than the command continues it."""
    found = []
    for line in block.splitlines():
        if line.startswith("spillway "):
            found.append(without_comment(line))
        elif found and re.match(r"\s+(?:--|\[)", line):
            found[-1] = found[-1].removesuffix("\\") + " " + without_comment(line.strip())
    return found


def name_of(document):
    return document.relative_to(ROOT).as_posix()


def replaced(command):
    for pattern, value in PLACEHOLDERS:
        command = re.sub(pattern, value, command, flags=re.MULTILINE)
    return command


def reason_not_to_run(document, command):
    return next((key for key in NOT_RUN if key[0] == name_of(document) and f"{command}\n".startswith(key[1])), None)


def help_of(cache, subcommand):
    if subcommand not in cache:
        cache[subcommand] = spillway(*([subcommand] if subcommand else []), "--help")
    return cache[subcommand]


class Documents(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.helps = {}
        folder = tempfile.mkdtemp(prefix="spillway-documents-")
        cls.addClassCleanup(shutil.rmtree, folder, ignore_errors=True)
        cls.folder = pathlib.Path(folder)
        cls.prepared = cls.folder / "prepared"
        place = Workplace(cls.prepared)
        place.init_model("gpt2", layers=2, width=32, context=256)
        # Named as the documents name them; paths are relative, so that a copy is a workplace of its own.
        config = place.config(nvme="store", spillway_section={"host_bytes": "48MiB"})
        shutil.copy(config, cls.prepared / "other.json")
        lora = json.loads(config.read_text().replace('"store"', '"adapters"'))
        lora["spillway"]["lora"] = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}
        (cls.prepared / "lora.json").write_text(json.dumps(lora))
        shutil.copy(TEXT, cls.prepared / "text.txt")
        llama = cls.prepared / "Llama-3-8B"
        llama.mkdir()
        (llama / "config.json").write_text(json.dumps(
            {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}))
        # A small one under a large one's name, and data for it.
        small = json.loads((ROOT / "tests/references/families/llama.json").read_text())
        (cls.prepared / "small.json").write_text(json.dumps({**small, "max_position_embeddings": 4096}))
        done = spillway("init-model", cls.prepared / "Llama-3.2-1B", "--from", cls.prepared / "small.json")
        assert done.status == 0, done.err
        make_adapter(cls.prepared / "Llama-3.2-1B", cls.prepared / "left", rank=4, alpha=8, targets=["q_proj"], seed=1)
        shutil.copy(cls.prepared / "small.json", cls.prepared / "config.json")
        write_prepared(cls.prepared / "data", [[[(token, True) for token in range(30)]]] * 4, largest_token=29)
        write_prepared(cls.prepared / "data/eval", [[[(token, True) for token in range(20)]]], largest_token=29)
        (cls.prepared / "aio.json").write_text('{"aio": {"block_size": 262144, "queue_depth": 8}}\n')
        place.nvme.rmdir()
        for drive in ("drive0", "drive1", "adapters"):
            (cls.prepared / drive).mkdir()
        done = subprocess.run([BINARY, *place.arguments("ds_config.json", "gpt2", data="data", steps=2, seq=40,
                                                        save="snapshots", every=2, log="steps.jsonl")],
                              cwd=cls.prepared, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        shutil.copy(cls.prepared / "steps.jsonl", cls.prepared / "more.jsonl")
        # The program under its name, and nothing else of the build.
        (cls.folder / "bin").mkdir()
        (cls.folder / "bin" / "spillway").symlink_to(pathlib.Path(BINARY).resolve())

    def workplace(self, name):
        place = self.folder / name
        shutil.copytree(self.prepared, place)
        self.addCleanup(shutil.rmtree, place, ignore_errors=True)
        return place

    def run_shell(self, script, place):
        environment = {**os.environ, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=place, env=environment, errors="replace",
                              capture_output=True, timeout=LIMIT_SECONDS, check=False)
        said = f"{script}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        self.assertEqual(0, done.returncode, said)
        self.assertIsNone(CRASH.search(done.stdout + done.stderr), said)

    def assert_options_are_there(self, command):
        words = shlex.split(command.replace("[", " ").replace("]", " "), comments=True)
        subcommand = next((word for word in words[1:] if not word.startswith("-")), "")
        shown = help_of(self.helps, subcommand)
        self.assertEqual(0, shown.status, f"there is no subcommand {subcommand}: {command}")
        there = set(OPTION.findall(shown.out))
        self.assertLessEqual(set(OPTION.findall(command)), there, command)

    def each_command(self):
        """(document, command) of every command in blocks without a language; those marked `sh` run as a whole."""
        for document in DOCUMENTS:
            for language, block in FENCE.findall(document.read_text()):
                for command in () if language else commands_in(block):
                    yield document, command

    def test_EveryCommandRuns(self):
        ran = 0
        for number, (document, command) in enumerate(self.each_command()):
            if reason_not_to_run(document, command):
                continue
            with self.subTest(document=name_of(document), command=command):
                script = replaced(command)
                unknown = re.findall(r"(?<![\w./-])[A-Z][A-Z_]+\b|[…\[\]]", script)
                self.assertEqual([], unknown, f"PLACEHOLDERS says nothing of these in: {command}")
                place = self.workplace(f"command{number}")
                if " finetune " in script and "--resume" not in script:
                    shutil.rmtree(place / "store")
                self.run_shell(script, place)
                ran += 1
        self.assertGreater(ran, 10, "the documents' commands were not found")

    def test_EveryPlaceholderIsUsed(self):
        shown = "".join(document.read_text() for document in DOCUMENTS)
        for pattern, _ in PLACEHOLDERS:
            with self.subTest(pattern=pattern):
                self.assertRegex(shown, re.compile(pattern, re.MULTILINE))

    def test_BlocksForAShellRunAsTheyStand(self):
        ran = 0
        for document in DOCUMENTS:
            text = document.read_text()
            blocks = [block for language, block in FENCE.findall(text) if language == "sh"]
            if not blocks:
                continue
            with self.subTest(document=name_of(document)):
                place = self.folder / f"shell{ran}"
                place.mkdir()
                configuration = re.search(r"^```json\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
                if configuration:
                    (place / "ds_config.json").write_text(configuration.group(1))
                self.run_shell(replaced("".join(blocks)), place)
                ran += 1
        self.assertGreater(ran, 0)

    def test_WhatIsNotRunIsThereAndHasOptionsThatThereAre(self):
        used = set()
        for document, command in self.each_command():
            key = reason_not_to_run(document, command)
            if key:
                used.add(key)
                with self.subTest(document=name_of(document), command=command):
                    self.assert_options_are_there(command)
        self.assertEqual(set(), set(NOT_RUN) - used, "no document shows these any more")

    def test_CommandsInTheTextHaveOptionsThatThereAre(self):
        found = 0
        for document in DOCUMENTS:
            for command in re.findall(r"`(spillway [^`]+)`", FENCE.sub("", document.read_text())):
                if command.startswith("spillway: ") or "|" in command:
                    continue
                with self.subTest(document=name_of(document), command=command):
                    self.assert_options_are_there(command.replace("\n", " "))
                    found += 1
        self.assertGreater(found, 5)

    def test_ScriptsAreThereAndCanBeRead(self):
        found = set()
        for document in DOCUMENTS:
            text = document.read_text()
            shown = {line.split()[0] for _, block in FENCE.findall(text) for line in block.splitlines() if line.split()}
            for script in set(SCRIPT.findall(text)):
                found.add(script)
                with self.subTest(document=name_of(document), script=script):
                    file = ROOT / script
                    self.assertTrue(file.is_file())
                    if script in shown:
                        self.assertTrue(os.access(file, os.X_OK), "it is shown as a command")
                    if file.suffix == ".py":
                        compile(file.read_text(), script, "exec")
                    else:
                        done = subprocess.run(["sh", "-n", file], capture_output=True, text=True, check=False)
                        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertIn("tools/quickstart.sh", found)


if __name__ == "__main__":
    main()
