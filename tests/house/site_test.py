"""The site of docs/: every page is in mkdocs.yml's navigation and in docs/README.md, links between documents lead to
files and headings that there are, lists look in a site as they do on GitHub, and every public name of the Python
package is on its page. Nothing is needed for that. Where tools/docs.sh --install was run, the site is built, too.
"""
import ast
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
from rules import source_files  # noqa: E402

DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
API = DOCS / "python_api.md"
PACKAGE = ROOT / "python/spillway"
MKDOCS = ROOT / "build-docs/venv/bin/mkdocs"
FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]*))?\)")
# Public to the package's own modules, and nothing that a loop calls.
OF_THE_PACKAGE = {"Engine": {"push", "without_weights"},
                  "Contents": {"agree", "export_weights", "on_first", "stream_out"}}


def prose_of(document):
    return FENCED.sub("", document.read_text())


def headings_of(document):
    """The anchors of a document's headings, as GitHub and Python-Markdown both make them of plain words."""
    anchors = set()
    for title in re.findall(r"^#+ +(.*?) *$", prose_of(document), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        anchors.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower()))
    return anchors


def public_names():
    """Of the package, without importing it: its __all__, and what __getattr__ finds when it is asked for."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(getattr(target, "id", None) in ("__all__", "_PLACES") for target in targets):
                names |= set(ast.literal_eval(node.value))
    return names


class Site(unittest.TestCase):
    def setUp(self):
        self.pages = sorted(DOCS.glob("*.md"))
        self.configuration = (ROOT / "mkdocs.yml").read_text()

    def test_EveryPageIsInTheNavigationOnce(self):
        navigation = re.search(r"^nav:\n((?:  .*\n)+)", self.configuration, re.MULTILINE)[1]
        listed = re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)
        self.assertEqual(sorted(page.name for page in self.pages), sorted(listed))

    def test_EveryPageIsInTheIndexOnce(self):
        listed = [target for target, _ in LINK.findall(prose_of(INDEX)) if target.endswith(".md") and "/" not in target]
        self.assertEqual(sorted(page.name for page in self.pages if page != INDEX), sorted(listed))

    def test_LinksLeadToHeadingsThatThereAre(self):
        found = 0
        for document in (ROOT / f for f in source_files(ROOT) if f.suffix == ".md"):
            for target, anchor in LINK.findall(prose_of(document)):
                place = (document.parent / target).resolve() if target else document
                with self.subTest(document=str(document.relative_to(ROOT)), target=target, anchor=anchor):
                    self.assertTrue(place.is_relative_to(ROOT), "leads out of the repository")
                    self.assertTrue(place.exists())
                    if anchor:
                        found += 1
                        self.assertIn(anchor, headings_of(place))
        self.assertGreater(found, 5)

    def test_PicturesAreThere(self):
        for document in self.pages:
            for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", prose_of(document)):
                with self.subTest(document=document.name, target=target):
                    self.assertTrue((DOCS / target).is_file())

    # GitHub lets a list follow a line of text; Python-Markdown takes it for more of the text.
    def test_AnEmptyLineIsBeforeEveryListAndTable(self):
        for document in (*self.pages, ROOT / "README.md", ROOT / "python/README.md"):
            lines = prose_of(document).splitlines()
            for number, (before, line) in enumerate(zip(["", *lines], lines), 1):
                begins = re.match(r"(?:[*-]|\d+\.) |\|", line)
                if begins and before.strip() and not re.match(r"(?:[*-]|\d+\.|  +|\|) ?", before):
                    with self.subTest(document=document.name, line=line):
                        self.fail("no empty line before it")

    def test_TheSiteIsBuiltWithoutAWarning(self):
        if not MKDOCS.exists():
            self.skipTest(f"{MKDOCS.relative_to(ROOT)} is missing; tools/docs.sh --install brings it")
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run([MKDOCS, "build", "--strict", "--site-dir", folder], cwd=ROOT, capture_output=True,
                                  text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=False)
            self.assertEqual(0, done.returncode, done.stderr)
            for page in self.pages:
                made = pathlib.Path(folder, "index.html" if page == INDEX else f"{page.stem}.html").read_text()
                with self.subTest(page=page.name):
                    self.assertNotRegex(made, r'(?:src|href)="(?:https?:)?//[^"]*\.(?:js|css|woff2?)"',
                                        "is fetched from elsewhere")
                    for target in re.findall(r'href="([^":#?]+\.html)', made):
                        self.assertTrue(pathlib.Path(folder, target).exists(), target)
            api = pathlib.Path(folder, "python_api.html").read_text()
            for name in ("Engine", "step", "load_checkpoint", "import_deepspeed"):
                self.assertIn(f'{name}"', api)

    def test_EveryPublicNameIsOnItsPage(self):
        text = API.read_text()
        shown = set(re.findall(r"`spillway\.(\w+)`|^::: spillway(?:\.\w+)*\.(\w+)$", text, re.MULTILINE))
        names = {name for pair in shown for name in pair if name}
        missing = public_names() - names
        self.assertGreater(len(public_names()), 8)
        self.assertEqual(set(), missing, f"{API.name} does not have these")

    def test_WhatThePageNamesHasADocstring(self):
        text, found = API.read_text(), 0
        entry = re.compile(r"^::: (spillway[\w.]+)\n(?:    options:\n((?:      .*\n)+))?", re.MULTILINE)
        for path, options in entry.findall(text):
            module, _, name = path.removeprefix("spillway.").rpartition(".")
            with self.subTest(path=path):
                place = PACKAGE / module.replace(".", "/")
                source = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
                self.assertTrue(source.is_file(), f"{source.name} is missing")
                nodes = [n for n in ast.parse(source.read_text()).body if getattr(n, "name", None) == name]
                self.assertEqual(1, len(nodes))
                self.assertTrue(ast.get_docstring(nodes[0]))
                found += 1
                members = re.search(r"members: \[([^]]*)\]", options or "")
                if members:
                    self.assert_members(nodes[0], set(re.split(r",\s*", members[1])))
        self.assertGreater(found, 5)

    def assert_members(self, node, listed):
        there = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
        self.assertEqual(set(), listed - set(there))
        for name in sorted(listed):
            with self.subTest(member=name):
                self.assertTrue(ast.get_docstring(there[name]), "it has no docstring")
        if node.name in OF_THE_PACKAGE:
            public = {name for name in there if not name.startswith("_")}
            self.assertEqual(public - OF_THE_PACKAGE[node.name], listed)


if __name__ == "__main__":
    main()
