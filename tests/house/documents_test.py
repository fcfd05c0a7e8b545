"""What the documents promise: the examples are files that the tests compile and run, relative links lead somewhere, and
documents stay short. And the files of the tree that scripts name are there.

The configurations that are shown whole are given to the `spillway` binary that SPILLWAY_BINARY names, if it names one.
`documents_test.py --write` copies the examples into their documents.
"""
import json
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
sys.path.insert(0, str(ROOT / "tests/house"))
from rules import CODE, source_files  # noqa: E402

REFERENCE = ROOT / "docs/configuration.md"
SHOWS_EXAMPLE = ROOT / "docs/embedding_example.md"
EXAMPLES = {SHOWS_EXAMPLE: ROOT / "tests/src/embedding_example.cc",
            ROOT / "docs/ranks_example.md": ROOT / "tests/src/comm/mpi_example.cc"}
SHOW_CONFIGURATION = [ROOT / "docs/pytorch.md", ROOT / "docs/choosing.md", SHOWS_EXAMPLE]
BLOCK = re.compile(r"(?<=\n```cpp\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


def alternatives(name):
    """`stream.{h,cc}`: stream.h and stream.cc."""
    braces = re.search(r"{([^}]*)}", name)
    return [name.replace(braces.group(0), one) for one in braces.group(1).split(",")] if braces else [name]


def literals(rooms):
    """The source of rooms, with every string in one piece."""
    files = (ROOT / f for f in source_files(ROOT) if f.suffix in (".h", ".cc") and f.parts[0] in rooms)
    return "".join(re.sub(r'"\s*\n\s*"', "", file.read_text()).replace('\\"', '"') for file in files)


class Documents(unittest.TestCase):
    def setUp(self):
        self.documents = [ROOT / f for f in source_files(ROOT) if f.suffix == ".md"]

    def test_ExamplesThatAreShownAreTested(self):
        for document, example in EXAMPLES.items():
            with self.subTest(document=document.name):
                shown = BLOCK.search(document.read_text())
                self.assertIsNotNone(shown, "there is no ```cpp block")
                self.assertEqual(example.read_text(), shown.group(0), "run tests/house/documents_test.py --write")

    def test_ConfigurationsThatAreShownAreAccepted(self):
        binary = os.environ.get("SPILLWAY_BINARY")
        if not binary:
            self.skipTest("SPILLWAY_BINARY names no program to ask")
        for document in SHOW_CONFIGURATION:
            with self.subTest(document=document.name):
                shown = re.search(r"(?<=\n```json\n).*?(?=^```$)", document.read_text(), re.DOTALL | re.MULTILINE)
                self.assertIsNotNone(shown, "there is no ```json block")
                self.assert_accepted(binary, json.loads(shown.group(0)))

    def assert_accepted(self, binary, values):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder, "ds_config.json")

            def refusal():
                config.write_text(json.dumps(values))
                # The configuration is read first, so an accepted one leads to the model that is not there.
                done = subprocess.run([binary, "finetune", "--config", config, "--model", f"{folder}/none", "--data",
                                       f"{folder}/none.bin", "--steps", "1"],
                                      capture_output=True, text=True, check=False)
                self.assertEqual(1, done.returncode, done.stderr)
                return done.stderr

            self.assertIn(f"{folder}/none", refusal())
            self.assertNotIn("ds_config.json", refusal())
            values["no_such_key"] = 1
            self.assertIn("ds_config.json", refusal())

    def test_EveryZeroKeyThatDecidesSomethingIsInItsDocument(self):
        document = (ROOT / "docs/deepspeed.md").read_text()
        section = (ROOT / "src/config/sections/zero_optimization.cc").read_text()
        keys = set(re.findall(r'"zero_optimization\.([\w.]+)"', section))
        self.assertGreater(len(keys), 20)
        for key in keys:
            leaf = key.rpartition(".")[2]
            with self.subTest(key=key):
                self.assertTrue(f"`{leaf}`" in document or f"`stage3_{leaf}`" in document)

    def test_MessagesAreThoseOfTheSource(self):
        source = literals({"aio", "kernels", "swap", "src", "tools"})
        system = {os.strerror(number) for number in range(1, 134)}
        messages = re.findall(r"^\| `([^`]+)`", (ROOT / "docs/messages.md").read_text(), re.MULTILINE)
        self.assertGreater(len(messages), 30)
        for message in messages:
            for part in re.split(r"…|; |: |, | \(|\)|ENOMEM|EPERM|libaio", message):
                if len(part.strip()) > 3 and part not in system:
                    with self.subTest(message=message):
                        self.assertIn(part.strip(" ,\""), source)

    def test_LinksLeadSomewhere(self):
        for document in self.documents:
            prose = re.sub(r"^```.*?^```", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
                if not re.match(r"[a-z]+:", target):
                    with self.subTest(document=document.name, target=target):
                        self.assertTrue((document.parent / target).exists())

    def test_FilesThatScriptsNameAreThere(self):
        made_up = {ROOT / "tests/house" / name for name in ("headers_test.py", "layering_test.py")}
        scripts = {ROOT / f for f in source_files(ROOT) if f.suffix in (".py", ".sh")} - made_up
        named = {(script, name) for script in scripts
                 for name in re.findall(r'"((?:[a-z]+/)+\w+\.(?:h|cc|cu|md|jsonl))"', script.read_text())
                 if (ROOT / name.partition("/")[0]).is_dir()}
        self.assertGreater(len(named), 10)
        for script, name in named:
            with self.subTest(script=str(script.relative_to(ROOT)), name=name):
                self.assertTrue((ROOT / name).exists())

    def test_PiecesAreTheFilesOfTheirRoom(self):
        rooms, sources = 0, {ROOT / f for f in source_files(ROOT) if f.suffix in CODE | {".py"}}
        for document in self.documents:
            _, heading, table = document.read_text().partition("\n## Pieces\n")
            rooms += bool(heading)
            named = set()
            for cell in re.findall(r"^\| (`[^|]*)\|", table, re.MULTILINE):
                for stem in (s for name in re.findall(r"`([^`]+)`", cell) for s in alternatives(name)):
                    found = {f for end in ("", ".*") for f in document.parent.rglob(stem + end)}
                    with self.subTest(document=str(document.relative_to(ROOT)), stem=stem):
                        self.assertTrue(found)
                    named |= found
            for file in sorted(f for f in sources - named if heading and document.parent in f.parents):
                with self.subTest(document=str(document.relative_to(ROOT))):
                    self.fail(f"{file.name} is in no row of its table of pieces")
        self.assertGreater(rooms, 5)

    def test_DocumentsAreShort(self):
        for document in self.documents:
            if document == REFERENCE:
                continue  # made of the table of keys, to look things up
            with self.subTest(document=str(document.relative_to(ROOT))):
                most = 200 if document.parent == ROOT else 120
                self.assertLessEqual(len(document.read_text().splitlines()), most)


if __name__ == "__main__":
    if "--write" in sys.argv:
        for shows, shown_file in EXAMPLES.items():
            shows.write_text(BLOCK.sub(lambda _: shown_file.read_text(), shows.read_text(), count=1))
    else:
        main()
