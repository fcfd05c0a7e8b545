"""What the suites of spillway.prepare share: a small real tokenizer, the program, and a reader of what it wrote.

The reader is written from docs/data.md and has nothing of the package.
"""
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]

MISSING = [name for name in ("numpy", "tokenizers", "transformers", "jinja2") if importlib.util.find_spec(name) is None]
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
          "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
          "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_model(folder, template=CHATML, vocab_size=512):
    """A directory with a byte-level BPE of the repository's own documents, and a config.json."""
    import tokenizers
    import transformers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    bpe.train([str(path) for path in sorted((ROOT / "docs").glob("*.md"))[:8]], tokenizers.trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|endoftext|>", pad_token="<|pad|>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    (pathlib.Path(folder) / "config.json").write_text(json.dumps({"model_type": "gpt2", "vocab_size": vocab_size}))
    return pathlib.Path(folder)


class Prepared:
    """A directory of rows."""

    def __init__(self, folder):
        import numpy as np
        self.header = json.loads((folder / "header.json").read_text())
        rows, room = self.header["rows"], self.header["tokens_per_row"]
        self.bytes = {name: (folder / f"{name}.bin").read_bytes() for name in ("tokens", "starts", "targets")}
        dtype = {"uint16": "<u2", "uint32": "<u4"}[self.header["dtype"]]
        self.tokens = np.frombuffer(self.bytes["tokens"], dtype).reshape(rows, room).astype(int)

        def bits(name):
            packed = np.frombuffer(self.bytes[name], np.uint8).reshape(rows, (room + 7) // 8)
            return np.array([[packed[r][i // 8] >> i % 8 & 1 for i in range(room)] for r in range(rows)], bool)
        self.starts, self.targets = bits("starts"), bits("targets")

    def sums_are_right(self):
        return all(hashlib.sha256(data).hexdigest() == self.header[f"{name}_sha256"]
                   for name, data in self.bytes.items())

    def documents(self):
        """(tokens, which positions have a target) of each document of each row, padding included."""
        for row in range(len(self.tokens)):
            begins = [int(i) for i in self.starts[row].nonzero()[0]]
            for begin, end in zip(begins, [*begins[1:], len(self.tokens[row])]):
                yield tuple(self.tokens[row, begin:end].tolist()), tuple(self.targets[row, begin:end].tolist())


@unittest.skipIf(MISSING, f"this Python has no {', '.join(MISSING)}; `pip install transformers jinja2` brings them")
class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="spillway-prepare-model-")
        cls.addClassCleanup(folder.cleanup)
        cls.model = make_model(folder.name)
        import transformers
        cls.tokenizer = transformers.AutoTokenizer.from_pretrained(cls.model, local_files_only=True)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="spillway-prepare-")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def file(self, name, *records):
        """JSON lines of what is no string; strings as they are."""
        path = self.folder / name
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        path.write_text("\n".join(lines) + "\n")
        return path

    def options(self, *arguments, model=None, seq=32, out="out"):
        from spillway.prepare import __main__ as command
        return command.parser().parse_args([str(word) for word in (
            *arguments, "--out", self.folder / out, "--model", model or self.model, "--seq", seq)])

    def prepare(self, *arguments, **more):
        """The Prepared that comes of it."""
        from spillway.prepare.preparing import prepare
        options = self.options(*arguments, **more)
        prepare(options)
        return Prepared(pathlib.Path(options.out))

    def refused(self, pattern, *arguments, code="invalid_argument", **more):
        """It fails with that message, which says what to do, and leaves nothing behind."""
        import spillway
        with self.assertRaisesRegex(spillway.Error, pattern) as raised:
            self.prepare(*arguments, **more)
        self.assertEqual(code, raised.exception.code, raised.exception)
        self.assertRegex(str(raised.exception), r"(?s): .+; .+")
        out = more.get("out", "out")
        self.assertEqual([], [name for name in os.listdir(self.folder) if name.startswith(out + ".")])
        return str(raised.exception)

    def command(self, *arguments):
        """(status, stdout, stderr) of the program."""
        done = subprocess.run([sys.executable, "-m", "spillway.prepare", *map(str, arguments)], text=True, check=False,
                              capture_output=True, env=os.environ | {"PYTHONPATH": str(ROOT / "python")})
        return done.returncode, done.stdout, done.stderr
