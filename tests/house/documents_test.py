"""What the documents promise: README's embedding example is the file that the tests compile and run, relative links
lead somewhere, and documents stay short.

`documents_test.py --write` copies the example into README.md.
"""
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402
sys.path.insert(0, str(ROOT / "tests/house"))
from rules import source_files  # noqa: E402

README = ROOT / "README.md"
EXAMPLE = ROOT / "tests/src/embedding_example.cc"
BLOCK = re.compile(r"(?<=\n```cpp\n).*?(?=^```$)", re.DOTALL | re.MULTILINE)


class Documents(unittest.TestCase):
    def setUp(self):
        self.documents = [ROOT / f for f in source_files(ROOT) if f.suffix == ".md"]

    def test_ReadmeShowsTheExampleThatIsTested(self):
        shown = BLOCK.search(README.read_text())
        self.assertIsNotNone(shown, "README.md has no ```cpp block")
        self.assertTrue(EXAMPLE.exists(), f"{EXAMPLE} is missing")
        self.assertEqual(EXAMPLE.read_text(), shown.group(0), "run tests/house/documents_test.py --write")

    def test_LinksLeadSomewhere(self):
        for document in self.documents:
            prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose):
                if not re.match(r"[a-z]+:", target):
                    with self.subTest(document=document.name, target=target):
                        self.assertTrue((document.parent / target).exists())

    def test_DocumentsAreShort(self):
        for document in self.documents:
            with self.subTest(document=str(document.relative_to(ROOT))):
                most = 200 if document == README else 120
                self.assertLessEqual(len(document.read_text().splitlines()), most)


if __name__ == "__main__":
    if "--write" in sys.argv:
        README.write_text(BLOCK.sub(lambda _: EXAMPLE.read_text(), README.read_text(), count=1))
    else:
        main()
