"""The rules of the house hold in this tree; and the checker catches each violation in a tree made for it."""
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report import main  # noqa: E402
sys.path.insert(0, str(ROOT / "tests/house"))
from rules import violations  # noqa: E402

CLEAN = {
    "include/spillway/error.h": '#pragma once\n#include <string>\ninline void f() { std::fprintf(stderr, "x"); }\n',
    "include/spillway/engine.h": '#pragma once\n#include <vector>\n\n#include "spillway/error.h"\n',
    "aio/meson.build": "static_library('aio', 'queue.cc', 'uring_engine.cc')\n",
    "aio/queue.h": '#pragma once\n#include "spillway/error.h"\n',
    "aio/queue.cc": '#include "aio/queue.h"\n#include <fmt/format.h>\n// printf("no"); io_uring_setup()\n',
    "aio/uring_engine.cc": '#include "aio/queue.h"\n#include <liburing.h>\nvoid f() { io_uring_submit(nullptr); }\n',
    "kernels/meson.build": "foreach name : ['adam']\n  sources += name + '.cc'\nendforeach\n",
    "kernels/adam.h": "#pragma once\n",
    "kernels/cuda/emulator/meson.build": "shared_library('emulated', 'nccl.cc')\n",
    "kernels/cuda/emulator/nccl.cc": 'int ncclCommAbort(int) { return printf("x"); }\n',
    "kernels/adam.cc": '#include "kernels/adam.h"\n#include "hwy/highway.h"\nconst char* s = "std::cout";\n',
    "swap/meson.build": "static_library('swap', files('store.cc'))\n",
    "swap/store.cc": '#include "aio/queue.h"\n#include "kernels/adam.h"\nint n = snprintf(nullptr, 0, "a");\n',
    "src/meson.build": "static_library('src', 'engine.cc')\n",
    "src/engine.cc": '#include "spillway/engine.h"\n#include "swap/store.h"\n',
    "swap/store.h": "#pragma once\n",
    "tools/meson.build": "executable('spillway', 'main.cc', 'finetune/commands.cc')\n",
    "tools/main.cc": '#include "tools/models/ops.h"\n#include "tools/terminal/progress.h"\n',
    "tools/terminal/progress.h": "#pragma once\n",
    "tools/finetune/commands.cc": '#include "tools/models/ops.h"\n#include "tools/terminal/progress.h"\n'
                                  'int n = puts("x");\n',
    "tools/models/ops.h": '#pragma once\n#include "spillway/engine.h"\n',
    "tests/meson.build": "subdir('aio')\n",
    "tests/precompiled.h": "#pragma once\n",
    "tests/aio/meson.build": "test('queue', executable('queue', 'queue_test.cc', cpp_pch: '../precompiled.h'))\n",
    "tests/aio/queue_test.cc": '#include "aio/queue.h"\n#include "tools/models/ops.h"\nvoid f() { printf("x"); }\n',
    "tools/run.sh": "echo run\n",
    "README.md": "word " * 100 + "\n",
}

# name of the test -> (files written over the clean tree, what the checker must say)
VIOLATIONS = {
    "AioDoesNotSeeKernels": (
        {"aio/queue.cc": '#include "kernels/adam.h"\n'},
        "aio/queue.cc:1: includes kernels/adam.h"),
    "KernelsDoNotSeeAio": (
        {"kernels/adam.cc": '\n#include "aio/queue.h"\n'},
        "kernels/adam.cc:2: includes aio/queue.h"),
    "SwapDoesNotPointUp": ({"swap/store.cc": '#include <src/plan.h>\n'}, "swap/store.cc:1: includes src/plan.h"),
    "AnArchiveHasNoMultipleOfUnitysFiles": (
        {"aio/meson.build": "static_library('aio', " + ", ".join(f"'file_{i}.cc'" for i in range(18)) + ")\n"},
        "aio/meson.build:1: a library has 18 files"),
    "WithinSrcNothingPointsUp": (
        {"src/formats/index.cc": '#include "src/formats/tree.h"\n#include "src/config/table.h"\n',
         "src/formats/tree.h": "#pragma once\n", "src/config/table.h": '#pragma once\n#include "src/formats/tree.h"\n',
         "src/meson.build": "static_library('src', 'engine.cc', 'formats/index.cc')\n"},
        "src/formats/index.cc:2: includes src/config/table.h"),
    "TheEngineIsAboveTheRestOfSrc": (
        {"src/plan/plan.h": '#pragma once\n#include "src/engine/gear.h"\n', "src/engine/gear.h": "#pragma once\n",
         "src/engine.cc": '#include "src/plan/plan.h"\n'},
        "src/plan/plan.h:2: includes src/engine/gear.h"),
    "APlanIsPure": (
        {"src/plan/plan.h": '#pragma once\n#include <vector>\n\n#include "swap/shape.h"\n',
         "swap/shape.h": '#pragma once\n#include "swap/thread.h"\n',
         "swap/thread.h": "#pragma once\n#include <mutex>\n",
         "src/engine.cc": '#include "src/plan/plan.h"\n'},
        "src/plan/plan.h:4: is pure, and includes swap/shape.h, which includes swap/thread.h, which includes mutex"),
    "APolicyIsPure": (
        {"swap/policy/turns.h": '#pragma once\n#include "kernels/device.h"\n', "kernels/device.h": "#pragma once\n",
         "swap/store.cc": '#include "swap/policy/turns.h"\n'},
        "swap/policy/turns.h:2: is pure, and includes kernels/device.h"),
    "LibraryDoesNotSeeTools": (
        {"src/engine.cc": '#include "tools/models/ops.h"\n'}, "src/engine.cc:1: includes tools/"),
    "PublicHeaderSeesNoRoom": (
        {"include/spillway/engine.h": '#include "src/plan.h"\n'},
        "engine.h:1: includes src/plan.h"),
    "PublicHeaderSeesNoLibrary": (
        {"include/spillway/engine.h": "#include <fmt/format.h>\n"},
        "engine.h:1: includes fmt/"),
    "PublicHeaderSeesNoPosix": (
        {"include/spillway/engine.h": "#include <unistd.h>\n"},
        "engine.h:1: includes unistd.h"),
    "TrainerSeesPublicHeadersOnly": (
        {"tools/finetune/commands.cc": '#include "swap/store.h"\n'},
        "commands.cc:1: includes swap/store.h"),
    "SweepSeesNoRoom": ({"tools/sweep/pace.h": '#include "aio/queue.h"\n'}, "pace.h:1: includes aio/queue.h"),
    "DriveDoesNotPointUp": (
        {"tools/drive/load.h": '#include "tools/sweep/sweep_setup.h"\n',
         "tools/sweep/sweep_setup.h": '#pragma once\n#include "tools/drive/load.h"\n'},
        "drive/load.h:1: includes tools/sweep/sweep_setup.h"),
    "TerminalSeesNoTool": (
        {"tools/terminal/progress.h": '#include "tools/models/ops.h"\n'},
        "progress.h:1: includes tools/models/ops.h"),
    "ExamplesSeePublicHeadersOnly": (
        {"examples/c/tied.c": '#include "spillway/c_api.h"\n#include "src/engine.h"\n'},
        "tied.c:2: includes src/engine.h"),
    "TrainerSeesNoOtherTool": (
        {"tools/finetune/commands.cc": '#include "tools/other.h"\n'},
        "commands.cc:1: includes tools/other.h"),
    "PackageDoesNotPointUp": (
        {"python/spillway/engine/engine.py": "from ..trainer.config import read\n"},
        "engine.py:1: imports trainer"),
    "PackageBelowItsFolders": ({"python/spillway/log.py": "from .engine import away\n"}, "log.py:1: imports engine"),
    "SourceIsNamedByMeson": ({"aio/orphan.cc": "\n"}, "aio/orphan.cc:1: is named by no meson.build"),
    "CommentInMesonNamesNothing": ({"aio/meson.build": "# 'queue.cc'\n"}, "aio/queue.cc:1: is named by no meson.build"),
    "PythonTestIsNamedByMeson": (
        {"tests/aio/lost_test.py": "\n"},
        "tests/aio/lost_test.py:1: is named by no meson.build"),
    "HeaderIsIncluded": ({"aio/dead.h": "#pragma once\n"}, "aio/dead.h:1: is included by no file"),
    "FileIsShort": ({"swap/store.h": "//\n" * 501}, "swap/store.h:501: has 501 lines"),
    "LineIsNarrow": ({"tools/run.sh": "#" * 121 + "\n"}, "tools/run.sh:1: is 121 columns wide"),
    "FileNameSaysSomething": ({"src/engine_utils.h": "#pragma once\n"}, "src/engine_utils.h:1: 'engine_utils.h' says"),
    "FolderNameSaysSomething": ({"src/common/plan.h": "#pragma once\n"}, "src/common:1: 'common' says nothing"),
    "LibraryDoesNotUsePrintf": ({"src/engine.cc": '\nvoid f() { printf("x"); }\n'}, "src/engine.cc:2: printf("),
    "LibraryDoesNotUseCout": ({"aio/queue.cc": "void f() { std::cout << 1; }\n"}, "aio/queue.cc:1: std::cout"),
    "LibraryDoesNotWriteStderr": (
        {"src/engine.cc": 'void f() { std::fprintf(stderr, "x"); }\n'},
        "engine.cc:1: std::fprintf("),
    "IoUringStaysInItsFile": ({"aio/queue.cc": "void f() { io_uring_submit(0); }\n"}, "aio/queue.cc:1: uses io_uring"),
    "IoUringStaysInAio": ({"swap/uring.h": "int n = IORING_OP_READ;\n"}, "swap/uring.h:1: uses io_uring directly"),
    "HwlocStaysInItsFile": (
        {"kernels/adam.cc": "void f() { hwloc_topology_init(0); }\n"},
        "kernels/adam.cc:1: uses hwloc"),
    "UnnamedConstantIsOne": (
        {"aio/queue.cc": '#include "aio/queue.h"\nnamespace {\nconstexpr int kMost = 1;\n}  // namespace\n',
         "aio/uring_engine.cc": "namespace {\n\nconstexpr int kLeast = 0, kMost = 2;\n}  // namespace\n"},
        "aio/uring_engine.cc:3: kMost is in an unnamed namespace of aio/queue.cc, too"),
    "UnnamedTypeIsOne": (
        {"aio/queue.cc": '#include "aio/queue.h"\nnamespace {\nstruct Part {\n};\n}  // namespace\n',
         "aio/uring_engine.cc": "namespace {\nusing Part = int;\n}  // namespace\n"},
        "aio/uring_engine.cc:2: Part is in an unnamed namespace of aio/queue.cc, too"),
    "NcclStaysInItsFile": (
        {"src/engine.cc": "void f() { ncclCommAbort(0); }\n"}, "src/engine.cc:1: uses NCCL directly"),
    "MpiStaysInItsFile": ({"src/engine.cc": "void f() { MPI_Barrier(0); }\n"}, "src/engine.cc:1: uses MPI directly"),
    "TheEmulatorIsForTests": (
        {"kernels/adam.cc": '#include "kernels/cuda/emulator/runtime.h"\n',
         "kernels/cuda/emulator/runtime.h": "#pragma once\n"},
        "kernels/adam.cc:1: includes kernels/cuda/emulator/runtime.h"),
    "CudaStaysInItsFile": ({"kernels/adam.cc": "void f() { cudaMalloc(0, 0); }\n"}, "kernels/adam.cc:1: uses CUDA"),
}


def write_tree(root, files):
    for name, text in files.items():
        path = pathlib.Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class ThisTree(unittest.TestCase):
    def test_KeepsTheRules(self):
        self.assertEqual([], violations(ROOT), "the rules are in tests/house/rules.py")


class TheChecker(unittest.TestCase):
    def found(self, files):
        with tempfile.TemporaryDirectory() as root:
            write_tree(root, {**CLEAN, **files})
            return violations(root)

    def test_PassesACleanTree(self):
        self.assertEqual([], self.found({}))

    def test_PassesOverloadsAndEqualAliasesInUnnamedNamespaces(self):
        self.assertEqual([], self.found({
            "aio/queue.cc": '#include "aio/queue.h"\nnamespace {\nusing A = int;\nvoid f(int) {}\n}  // namespace\n',
            "aio/uring_engine.cc": "namespace {\nusing A = int;\nvoid f(A, A) {\n}\n}  // namespace\n"}))

    def test_PassesDeepSpeedsOwnNames(self):
        self.assertEqual([], self.found({"python/spillway/deepspeed/names/utils/__init__.py": '"""Its."""\n'}))

    def test_LooksAtNoBuildDirectory(self):
        self.assertEqual([], self.found({"build-test/common/orphan.cc": "int main() {}\n"}))


def catches(files, expected):
    def test(self):
        found = self.found(files)
        self.assertTrue(any(expected in line for line in found), f"expected '{expected}' among {found}")
    return test


for name, (files, expected) in VIOLATIONS.items():
    setattr(TheChecker, f"test_Catches{name}", catches(files, expected))


if __name__ == "__main__":
    main()
