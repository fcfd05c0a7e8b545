"""What to do about an error travels as a code: every client has its own words for each, and none takes the library's
words apart."""
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402
sys.path.insert(0, str(ROOT / "tests/house"))
from rules import source_files  # noqa: E402
sys.path.insert(0, str(ROOT / "python/spillway"))
import remedies  # noqa: E402

ROW = re.compile(r'\{Remedy::k(\w+), "((?:\\.|[^"\\])*)"\}')
# A path in a message that nobody else knows is called by its place: no remedy.
PATHS = {"engine/export.py": ["str(error).replace(partial, place)"],
         "deepspeed/checkpoints.py": ["text.replace(snapshot, checkpoint)", "re.sub(re.escape(beside)"]}


def read(name):
    """With every string in one piece."""
    return re.sub(r'"\s*\n\s*"', "", (ROOT / name).read_text())


def snake(name):
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def words(name):
    return {code: text.replace('\\"', '"') for code, text in ROW.findall(re.sub(r",\s+\"", ', "', read(name)))}


class Remedies(unittest.TestCase):
    def setUp(self):
        header = read("include/spillway/remedy.h")
        self.codes = re.findall(r"^  k(\w+),", header[:header.index("struct RemedyWords")], re.MULTILINE)
        self.library = words("include/spillway/remedy.h")
        self.program = words("tools/terminal/remedies.cc")

    def test_EveryCodeHasWordsInEveryClient(self):
        self.assertGreater(len(self.codes), 20)
        self.assertEqual("None", self.codes[0])
        for table in (self.library, self.program):
            self.assertEqual(self.codes, list(table))
        names = [snake(code) for code in self.codes[1:]]
        self.assertEqual(names, list(remedies.WORDS))
        self.assertEqual([f"SPILLWAY_REMEDY_{snake(code).upper()}" for code in self.codes],
                         re.findall(r"^  (SPILLWAY_REMEDY_\w+)", read("include/spillway/c_base.h"), re.MULTILINE))
        for code in self.codes[1:]:
            with self.subTest(code=code):
                values = self.library[code].count("{}")
                self.assertEqual(values, self.program[code].count("{}"))
                self.assertEqual(values, remedies.WORDS[snake(code)].count("{}"))
                for table in (self.library[code], self.program[code], remedies.WORDS[snake(code)]):
                    self.assertGreater(len(table), 10)

    def test_EachSpeaksOfWhatItsUsersHave(self):
        for code in self.codes[1:]:
            with self.subTest(code=code):
                flags = r"(?<!store \{\} )--\w+"  # another program is named with its flag
                self.assertNotRegex(self.library[code], flags + "|tag=|verify=")
                self.assertNotRegex(self.program[code], "on_existing|tag=|verify=")
                self.assertNotRegex(remedies.WORDS[snake(code)], flags + r"|on_existing (resume|replace)")

    def test_TheLibrarySpeaksOfThemNowhereElse(self):
        for name in source_files(ROOT):
            if name.parts[0] not in {"aio", "kernels", "swap", "src"} or name.suffix not in {".h", ".cc"}:
                continue
            for text in re.findall(r'"((?:\\.|[^"\\\n])*)"', read(name)):
                with self.subTest(file=str(name), text=text):
                    self.assertNotRegex(text, r"on_existing (resume|replace)|with --\w|write the model at the end")

    def test_NoClientRewritesAMessage(self):
        rewriting = re.compile(r"[\w.()]*(?:error|message|text|what\w*)(?:\(\w*\))?\)?\.replace\([^\n]*"
                               r"|re\.sub\([^\n]*")
        for file in sorted((ROOT / "python/spillway").rglob("*.py")):
            allowed = PATHS.get(f"{file.parent.name}/{file.name}", [])
            for found in rewriting.findall(file.read_text()):
                with self.subTest(file=file.name, found=found):
                    self.assertTrue(any(found.startswith(one) for one in allowed))
        for name in source_files(ROOT):
            if name.parts[0] != "tools" or name.suffix != ".cc":
                continue
            with self.subTest(file=str(name)):
                self.assertNotRegex(read(name), r"\w+\.replace\(\w+, |hint\.find\(|refused\.find\(|what\(\)\)?\.find\(")


if __name__ == "__main__":
    main()
