"""What mkdocs.yml asks for besides plugins: links from docs/ into the repository, and lists in docstrings.

Pages link to files of the repository, as they stand there and as GitHub shows them (`../aio/README.md`). The site has
a page for each of these, and for what they link to in turn, below repository/: a document as it is, a source file as
code, a folder without a README as the list of its files. So the site needs no other site.
"""
import pathlib
import posixpath
import re

import griffe
from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
PLACE = "repository/"
LANGUAGES = {".cc": "cpp", ".h": "cpp", ".cu": "cpp", ".cuh": "cpp", ".py": "python", ".sh": "sh", ".c": "c"}
FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!\\)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")
HIDDEN = "---\nsearch:\n  exclude: true\n---\n"  # code would be most of what a search finds
ARGUMENT = re.compile(r"^(`[\w.]+(?:`, `[\w.]+)*`:)", re.MULTILINE)


def path_in_repository(source, target):
    """Of what a link in a file of the repository leads to; both are paths below its root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def document_of(path):
    """The document that is shown for a path: for a folder its README, where it has one."""
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def page_of(path):
    """The site's page for a path of the repository, or its file for what is no text."""
    path = document_of(path)
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith((".svg", ".png", ".md")):
        return PLACE + path
    return f"{PLACE}{path}.md"


def source_of(uri):
    """The path of the repository that a page was made of; page_of() backwards."""
    if not uri.startswith(PLACE):
        return f"docs/{uri}"
    path = uri.removeprefix(PLACE)
    return path if (ROOT / path).exists() else path.removesuffix(".md")


def text_of(path):
    """The page for a path of the repository, in Markdown."""
    place = ROOT / path
    if place.is_dir():
        names = sorted(f.name for f in place.iterdir() if f.is_file())
        return f"# {path}\n\n" + "".join(f"* [{name}]({posixpath.basename(path)}/{name})\n" for name in names)
    text = place.read_text(errors="replace")
    if path.endswith(".md"):
        return text
    return f"{HIDDEN}# {path}\n\n````{LANGUAGES.get(place.suffix, 'text')}\n{text}\n````\n"


def links_of(text):
    """The targets of relative links outside of code."""
    return [match[1] for match in LINK.finditer(FENCED.sub("", text))]


def on_files(files, config):
    """Adds a page for everything that a page links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        if not source.endswith(".md"):
            continue  # code, and lists of files, lead no further
        for target in links_of((ROOT / source).read_text()):
            path = document_of(path_in_repository(source, target))
            if path in seen or path.startswith(("docs/", "../")) or not (ROOT / path).exists():
                continue
            seen.add(path)
            waiting.append(path)
            if path.endswith((".svg", ".png")):
                files.append(File.generated(config, page_of(path), content=(ROOT / path).read_bytes()))
            else:
                files.append(File.generated(config, page_of(path), content=text_of(path)))
    return files


def on_page_markdown(markdown, page, files, **_):
    """Turns links into the repository into links to the site's pages."""
    uri = page.file.src_uri
    source = source_of(uri)

    def turned(match):
        path = path_in_repository(source, match[1])
        target = page_of(path)
        if (ROOT / source).is_dir() and files.get_file_from_path(target) is None:
            return "]"  # a folder's list of files, of which most are linked nowhere else
        return f"]({posixpath.relpath(target, posixpath.dirname(uri))}{match[2] or ''})"

    pieces, end = [], 0
    for fence in FENCED.finditer(markdown):
        pieces += [LINK.sub(turned, markdown[end:fence.start()]), fence.group(0)]
        end = fence.end()
    return "".join(pieces) + LINK.sub(turned, markdown[end:])


class Lists(griffe.Extension):
    """Docstrings list arguments as "`name`: what it is", a line each; on a page these are the points of a list."""

    def on_object(self, *, obj, **_):
        if obj.docstring and ARGUMENT.search(obj.docstring.value):
            text = ARGUMENT.sub(r"* \1", obj.docstring.value)
            first = text.index("* `")
            obj.docstring.value = f"{text[:first].rstrip()}\n\n{text[first:]}"
