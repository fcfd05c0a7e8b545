"""The rules of the house that a program can check: who may include whom, and what a file may be called and contain.

violations(root) looks at the source alone and returns lines `path:line: what`, sorted; an empty list is a clean tree.
"""
import os
import pathlib
import re

# Which rooms a room may include, besides itself. The order is the one of the floors; nothing points up.
BELOW = {
    "include": set(),
    "aio": {"include"},
    "kernels": {"include"},
    "swap": {"include", "aio", "kernels"},
    "src": {"include", "aio", "kernels", "swap"},
    "tools": {"include", "aio", "kernels", "swap", "src"},
    "bench": {"include", "aio", "kernels", "swap", "src", "tools"},
    "examples": {"include"},  # programs of others
    "python": {"include", "aio", "kernels", "swap", "src"},
    "tests": {"include", "aio", "kernels", "swap", "src", "tools", "bench", "python"},
}
# The same within src.
FLOORS_OF_SRC = ["formats", "comm", "plan", "config", "checkpoint", "engine", "optimizer", "c"]
# The same within the Python package; what lies beside these folders is below all of them.
FLOORS_OF_PACKAGE = ["prepare", "engine", "optimizers", "deepspeed", "trainer", "lightning", "integrations"]
# The programs show what an embedding program needs: the public headers, and nothing of the library's rooms; besides
# these, what all tools share towards who types their commands. Not so the doctor and the planner, which ask the
# library's own means.
PUBLIC_ONLY = {("tools", name) for name in ("drive", "finetune", "generate", "models", "report", "store", "sweep",
                                             "terminal")}
TERMINAL = ("tools", "terminal")
ALSO = {("tools", "sweep"): {("tools", "drive")},  # the sweep loads drives
        ("tools", "finetune"): {("tools", "models")},
        ("tools", "generate"): {("tools", "models")}}
LIBRARY = {"include", "aio", "kernels", "swap", "src"}
# Stands for libraries of a vendor's where there is no GPU: a part of the tests that lies beside what it emulates for.
EMULATOR = ("kernels", "cuda", "emulator")

# Whose files are pure: no thread, file, clock or device, nor whatever header of the rooms they include, directly or
# through others. Public headers are what callers see of these things, and are not looked into.
PURE = (("src", "plan"), ("swap", "policy"))
RUNS = {"atomic", "chrono", "condition_variable", "fstream", "future", "mutex", "shared_mutex", "thread",
        "kernels/device.h"}

RELATIVE_IMPORT = re.compile(r"^\s*from (\.+)([a-z_.]*) import ")
STANDARD_HEADERS = set("""
algorithm any array atomic barrier bit bitset cassert cctype cerrno cfenv cfloat charconv chrono cinttypes climits
clocale cmath codecvt compare complex concepts condition_variable coroutine csetjmp csignal cstdarg cstddef cstdint
cstdio cstdlib cstring ctime cuchar cwchar cwctype deque exception execution filesystem format forward_list fstream
functional future initializer_list iomanip ios iosfwd iostream istream iterator latch limits list locale map memory
memory_resource mutex new numbers numeric optional ostream queue random ranges ratio regex scoped_allocator semaphore
set shared_mutex source_location span sstream stack stdexcept stop_token streambuf string string_view strstream
syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map unordered_set utility valarray
variant vector version
""".split()) | {"stddef.h", "stdint.h"}  # the last two for C

CODE = {".h", ".c", ".cc", ".cu"}
TEXT = CODE | {".py", ".sh"}
MAX_LINES = 500
MAX_WIDTH = 120
VAGUE = {"util", "utils", "utility", "utilities", "common", "helper", "helpers", "misc"}
DEEPSPEEDS = "python/spillway/deepspeed/names"  # its modules' names, which import statements of scripts have

# Whose libraries are built with several files in one (Meson's unity), but for those that Highway compiles.
UNITY, HIGHWAY = {"aio", "kernels", "swap", "src", "tools"}, "hwy/foreach_target.h"
LIBRARY_FILES = re.compile(r"static_library\((.*?)\)", re.DOTALL)
# So many files in one, as tools/test.sh says it to Meson, which misses an object of an archive that has a multiple.
UNITY_SIZE, ARCHIVES = 9, ("aio/meson.build", "kernels/meson.build", "swap/meson.build", "src/meson.build")
CONSTANT = re.compile(r"[ *&](k[A-Z]\w*)(?:\[[^\]]*\])? ?(?:=(?!=)|\{)")
TYPE = re.compile(r"(?:struct|class|enum class) (\w+)(?: final)?(?: :.*| \{.*)?$")
ALIAS = re.compile(r"using (\w+) = (.*)")
FUNCTION = re.compile(r"(?:\[\[.*?\]\] )?[\w:<>,&* ]+?[ &*](\w+)\((.*)")
BLOCK_END = re.compile(r"\}(?:[;,)]|$)")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
# Diagnostics of last resort may use stderr: the default log sink and the failed check.
STDERR_FILES = {"include/spillway/log.h", "include/spillway/error.h"}
PRINT = re.compile(r"(?<![\w.>])(?:std::)?(?:printf|vprintf|puts|putchar|fprintf|fputs)\s*\("
                   r"|\bstd::(?:cout|cerr|clog)\b|\bfmt::print\b")
# A raw interface, the room it is at home in, and what a file there that may use it has in its name.
RAW = ((re.compile(r"\b(?:io_uring_\w+|IORING_\w+)"), ("aio",), "uring", "io_uring"),
       (re.compile(r"\b(?:hwloc_\w+|HWLOC_\w+)"), ("kernels",), "topology", "hwloc"),
       (re.compile(r"\b(?:MPI_[A-Z]\w+|OMPI_\w+)"), ("src",), "mpi", "MPI"),
       (re.compile(r"\bnccl[A-Z]\w*\s*\("), ("src",), "nccl", "NCCL"),
       (re.compile(r"\b(?:cuda[A-Z]\w*|cu[A-Z]\w*)\s*\("), ("kernels", "src", "tools", "bench"), "cuda", "CUDA"))


def source_files(root):
    for folder, folders, files in os.walk(root):
        top = pathlib.Path(folder) == root
        folders[:] = sorted(f for f in folders if f not in {".git", "__pycache__"} and not f.endswith(".p")
                            and not (top and (f.startswith("build") or f.startswith(".venv"))))
        for name in sorted(files):
            yield (pathlib.Path(folder) / name).relative_to(root)


def without_comments(text):
    """Blanks comments and string contents, keeping every line where it is."""
    def blank(match):
        token = match.group(0)
        if token.startswith("/"):
            return re.sub(r"[^\n]", " ", token)
        return token[0] + " " * (len(token) - 2) + token[-1]

    token = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9A-Fa-f])\'(?:\\.|[^\'\\\n])\''
    return re.sub(token, blank, text, flags=re.DOTALL)


def is_emulator(path):
    return pathlib.PurePosixPath(path).parts[:len(EMULATOR)] == EMULATOR


def floor_of_src(path):
    return FLOORS_OF_SRC.index(path.parts[1]) if path.parts[1] in FLOORS_OF_SRC else len(FLOORS_OF_SRC)


def include_violation(path, bracket, target):
    room, first = path.parts[0], pathlib.PurePosixPath(target).parts[0]
    points_at = "include" if first == "spillway" else first
    if is_emulator(target) and not is_emulator(path) and room not in ("tests", "bench"):
        return f"includes {target}; the emulator is for tests"
    if room == "include":
        if points_at != "include" and (bracket == '"' or target not in STANDARD_HEADERS):
            return f"includes {target}; public headers include only the standard library and each other"
        return None
    if room == points_at == "src" and floor_of_src(path) < floor_of_src(pathlib.PurePosixPath(target)):
        return f"includes {target}; within src nothing points up: {', '.join(FLOORS_OF_SRC)}"
    tool = path.parts[:2]
    if points_at not in BELOW or points_at == room and tool not in PUBLIC_ONLY:
        return None
    if tool in PUBLIC_ONLY:
        seen = {tool, TERMINAL} | ALSO.get(tool, set())
        if points_at != "include" and pathlib.PurePosixPath(target).parts[:2] not in seen:
            return f"includes {target}; {'/'.join(tool)} includes public headers only"
        return None
    if points_at not in BELOW[room]:
        return f"includes {target}; {room} may include {', '.join(sorted(BELOW[room]))} and itself"
    return None


def check_code(path, text):
    room = path.parts[0]
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if match and room in BELOW:
            what = include_violation(path, *match.groups())
            if what:
                yield number, what
    if is_emulator(path):
        room = "tests"
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if INCLUDE.match(line):
            continue
        printed = PRINT.search(line)
        if room in LIBRARY and printed and not (path.as_posix() in STDERR_FILES and "std::fprintf(stderr" in line):
            yield number, f"{printed.group(0).strip()}: the library does not print; messages go through spillway/log.h"
        for pattern, home, word, name in RAW:
            at_home = room in home and (word in path.name or word in path.parts)
            if pattern.search(line) and room != "tests" and not at_home:
                yield number, f"uses {name} directly; only {home[0]}/*{word}* does"


def floor_of_package(name):
    return FLOORS_OF_PACKAGE.index(name) if name in FLOORS_OF_PACKAGE else -1


def check_package(path, text):
    """Of a module of the package: which floor its relative imports reach. Names found by a string point anywhere."""
    if path.parts[:2] != ("python", "spillway") or path.suffix != ".py":
        return
    here = path.parts[2:-1]
    for number, line in enumerate(text.splitlines(), 1):
        match = RELATIVE_IMPORT.match(line)
        if match:
            place = [*here[:len(here) + 1 - len(match[1])], *filter(None, match[2].split(".")), ""]
            if floor_of_package(place[0]) > floor_of_package(here[0] if here else ""):
                yield number, f"imports {place[0]}; within it nothing points up: {', '.join(FLOORS_OF_PACKAGE)}"


def check_text(path, text):
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        yield MAX_LINES + 1, f"has {len(lines)} lines; {MAX_LINES} is the most"
    for number, line in enumerate(lines, 1):
        if len(line) > MAX_WIDTH:
            yield number, f"is {len(line)} columns wide; {MAX_WIDTH} is the most"


def check_named(root, files):
    """Every translation unit and every Python test is named by a meson.build."""
    named = set()
    for path in files:
        if path.name == "meson.build":
            text = re.sub(r"#[^\n]*", "", (root / path).read_text())
            named |= {os.path.normpath(path.parent / name) for name in re.findall(r"'([^'\n]*)'", text)}
    for path in files:
        if path.suffix not in {".cc", ".cu"} and not (path.parts[0] == "tests" and path.name.endswith("_test.py")):
            continue
        # A foreach over stems names 'adam' and adds '.cc' or '_test.cc' to each.
        stem = path.with_suffix("").as_posix()
        if not {path.as_posix(), stem, stem.removesuffix("_test")} & named:
            yield path, 1, "is named by no meson.build"


def check_included(root, files):
    """A room's header that nobody includes, nor Meson as a precompiled one, is dead; public headers are for others."""
    included = set()
    for path in files:
        if path.name == "meson.build":
            precompiled = re.findall(r"cpp_pch: '([^']+)'", (root / path).read_text())
            included |= {os.path.normpath(path.parent / header) for header in precompiled}
        if path.suffix in CODE:
            for line in (root / path).read_text().splitlines():
                match = INCLUDE.match(line)
                if match:
                    included |= {match.group(2), (path.parent / match.group(2)).as_posix()}
    for path in files:
        if path.suffix == ".h" and path.parts[0] != "include" and path.as_posix() not in included:
            yield path, 1, "is included by no file"


def check_pure(root, files):
    """Nothing that runs is included, through however many headers, where everything is pure."""
    files, reached = {path.as_posix() for path in files}, {}

    def runs(name):
        """What runs among the headers that the file includes: (line, chain of names), or None."""
        if name in reached:
            return reached[name]
        reached[name] = None  # while it is looked into, and if nothing is found
        for number, line in enumerate((root / name).read_text().splitlines(), 1):
            match = INCLUDE.match(line)
            target = match and match.group(2)
            if not match or target.startswith("spillway/"):
                continue
            further = runs(target) if target in files else None
            if target in RUNS or target.startswith("aio/") or further:
                reached[name] = number, [target, *(further[1] if further else [])]
                break
        return reached[name]

    for path in files:
        if pathlib.PurePath(path).parts[:2] in PURE and pathlib.PurePath(path).suffix in CODE and runs(path):
            number, chain = runs(path)
            yield pathlib.PurePath(path), number, f"is pure, and includes {', which includes '.join(chain)}"


def check_names(files):
    vague = {}
    for path in files:
        if path.as_posix().startswith(DEEPSPEEDS + "/"):
            continue
        for place in (path, *path.parents):
            if place.name and set(re.split(r"[_.\-]", place.name.lower())) & VAGUE:
                vague[place] = f"'{place.name}' says nothing about what is inside"
    for place, what in vague.items():
        yield place, 1, what


def unnamed(text):
    """What stands in a file's unnamed namespaces, at their outermost level: (line, name, alias). A function's name has
    its arguments, as others of the name may have other ones; an alias is what it stands for, and else empty."""
    found, inside = [], False
    for number, line in enumerate(without_comments(text).splitlines(), 1):
        if line == "namespace {":
            inside = True
        elif line.startswith("}") and inside and not BLOCK_END.match(line):
            inside = False
        if not inside or not line or not line[0].isalpha() or line.startswith("namespace"):
            continue
        if line.startswith(("constexpr ", "const ", "inline constexpr ", "static ")):
            found += [(number, name, "") for name in CONSTANT.findall(line)]
        kind, alias, function = TYPE.match(line), ALIAS.match(line), FUNCTION.match(line)
        if kind:
            found.append((number, kind[1], ""))
        elif alias:
            found.append((number, alias[1], alias[2]))
        elif function and found[-1:] != [(number, function[1], "")]:
            found.append((number, function[1] + "(" + function[2].split(" {")[0], ""))
    return found


def check_unity(root):
    """Builds with sanitizers take the files of a library together: a name stands for one thing in all of them."""
    root = pathlib.Path(root)
    for build in sorted(root.glob("*/meson.build")) + sorted(root.glob("*/*/meson.build")):
        if build.relative_to(root).parts[0] not in UNITY:
            continue
        for library in LIBRARY_FILES.findall(build.read_text()):
            where = {}
            names = re.findall(r"'([\w/]+\.cc)'", library)
            if names and len(names) % UNITY_SIZE == 0 and build.relative_to(root).as_posix() in ARCHIVES:
                yield (build.relative_to(root), 1, f"a library has {len(names)} files, a multiple of {UNITY_SIZE}, of "
                       "which Meson 1.0 misses an object; divide or merge one")
            for file in (build.parent / name for name in names):
                path = file.relative_to(root).as_posix()
                text = file.read_text() if file.exists() else ""
                for number, name, alias in unnamed(text) if HIGHWAY not in text else []:
                    other, same = where.setdefault(name, (path, alias))
                    if other != path and not (alias and alias == same):
                        what = f"{name.split('(')[0]} is in an unnamed namespace of {other}, too"
                        yield pathlib.PurePath(path), number, what


def violations(root):
    root = pathlib.Path(root)
    files = list(source_files(root))
    found = [*check_named(root, files), *check_included(root, files), *check_pure(root, files), *check_names(files),
             *check_unity(root)]
    for path in files:
        if path.suffix not in TEXT and path.name != "meson.build":
            continue
        text = (root / path).read_text()
        found += [(path, *hit) for hit in (*check_text(path, text), *check_package(path, text))]
        if path.suffix in CODE:
            found += [(path, *hit) for hit in check_code(path, text)]
    return [f"{path.as_posix()}:{line}: {what}" for path, line, what in sorted(found)]
