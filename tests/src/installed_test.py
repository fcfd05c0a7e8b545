"""What `meson install` leaves is what a program needs: headers, libspillway.so and .a, libspillway_io.so and .a, and
what pkg-config and CMake's find_package find them by; for C++ and for C.

SPILLWAY_BUILD names the build directory; everything in it is built.
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

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/cli")]
from report import main  # noqa: E402
import torch_files  # noqa: E402

BUILD = os.environ["SPILLWAY_BUILD"]

# Hears what the library says of two configurations, the second time with a sink set anew, and a last word.
LISTENER = r"""
#include <cstdio>
#include <string>

#include "spillway/config.h"
#include "spillway/log.h"

using namespace spillway;

struct Last {
  ~Last() { log(LogLevel::kInfo, "goodbye"); }
} last;

int main() {
  const std::string before = "heard, with a sink that does not fit in place: ";
  for (int i = 0; i < 2; ++i) {
    set_log_sink([before](LogLevel, std::string_view message) {
      std::printf("%s%.*s\n", before.c_str(), static_cast<int>(message.size()), message.data());
    });
    config_from_json(R"({"train_batch_size": 1, "wall_clock_breakdown": true})", "example");
  }
}
"""


# Asks for the message of each library's last error while both are there.
BOTH = r"""
#include <stdio.h>
#include "spillway/c_api.h"
#include "spillway/c_io.h"

int main(void) {
  spillway_config* config = NULL;
  spillway_io_file* file = NULL;
  if (spillway_config_parse("{", "engine", &config) != SPILLWAY_INVALID_ARGUMENT) return 1;
  puts(spillway_error_message());
  if (spillway_io_file_open("/none/at/all", NULL, &file) != SPILLWAY_NOT_FOUND) return 2;
  puts(spillway_error_message());
  return 0;
}
"""

# A program in each language, one with the library and one with the archive; and the same of files and queues alone.
IO_CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(moves C CXX)
find_package(spillway CONFIG REQUIRED COMPONENTS %s)
add_executable(moves "${SOURCES}/queue_example.cc")
target_link_libraries(moves PRIVATE spillway::io)
add_executable(moves_c "${SOURCES}/c_io_example.c")
target_link_libraries(moves_c PRIVATE spillway::io_static)
"""
CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(train C CXX)
find_package(spillway %s CONFIG REQUIRED)
add_executable(train "${SOURCES}/embedding_example.cc")
target_link_libraries(train PRIVATE spillway::spillway)
add_executable(train_c "${SOURCES}/c_example.c")
target_link_libraries(train_c PRIVATE spillway::static)
"""
# Meson's would lead every program to the library of the build directory.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}


class Installed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="spillway-installed-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.root = cls.folder / "root"
        cls.run_ok("meson", "install", "-C", BUILD, "--no-rebuild", "--quiet", "--destdir", cls.root)
        cls.described = next(cls.root.rglob("spillway.pc"))
        cls.libraries = cls.described.parents[1]

    @classmethod
    def run_ok(cls, *command, **environment):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120,
                              env={**ENVIRONMENT, **environment})
        if done.returncode != 0:
            raise AssertionError(f"{shlex.join(map(str, command))}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def flags(self, *libraries):
        return self.run_ok("pkg-config", "--cflags", "--libs", *(libraries or ["spillway"]),
                           PKG_CONFIG_PATH=str(self.described.parent), PKG_CONFIG_SYSROOT_DIR=str(self.root)).split()

    def compiled(self, compiler, source, *options, libraries=()):
        program = self.folder / pathlib.Path(source).stem
        self.run_ok(*shlex.split(compiler), *options, "-Wall", "-Wextra", "-Wpedantic", "-Werror",
                    ROOT / "tests/src" / source, "-o", program, *self.flags(*libraries),
                    f"-Wl,-rpath,{self.libraries}")
        return program

    def assert_moves(self, program):
        self.assertIn("64 MiB written and read back", self.run_ok(program, self.folder / "moved.data"))

    def assert_needs_little(self, binary):
        """No library but those of I/O, and libspillway_io."""
        needed = re.findall(r"^\s*(\S+?)\.so", self.run_ok("ldd", binary, LD_PRELOAD=""), re.MULTILINE)
        needed = {pathlib.PurePath(name).name for name in needed}
        self.assertLessEqual({"liburing", "libaio"}, needed)
        known = {"liburing", "libaio", "libfmt", "libstdc++", "libm", "libgcc_s", "libc", "libpthread",
                 "libspillway_io", "linux-vdso", "ld-linux-x86-64", "ld-linux-aarch64"}
        self.assertEqual(set(), needed - known)

    def config(self, name):
        nvme = {"device": "nvme", "nvme_path": str(self.folder / name)}
        return {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
                "zero_optimization": {"stage": 3, "offload_param": nvme, "offload_optimizer": nvme}}

    def test_TheExampleIsBuiltAndTrains(self):
        program = self.compiled("c++ -std=c++20", "embedding_example.cc", "-Wno-missing-field-initializers")
        self.assert_trains(program, "cpp")
        self.assertTrue((self.folder / "cpp-out/model.safetensors").exists())

    def assert_trains(self, program, name):
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(self.config(name)))
        self.assertIn("step 20: gradient norm", self.run_ok(program, path, self.folder / f"{name}-out"))

    @unittest.skipUnless(shutil.which("cmake"), "cmake is not installed")
    def test_CMakeFindsItWhereverItIs(self):
        moved = self.folder / "moved"
        shutil.copytree(self.root, moved, symlinks=True)
        describes = next(moved.rglob("spillway-config.cmake")).parent
        prefix = next(moved.rglob("include/spillway")).parents[1]
        project, build = self.folder / "project", self.folder / "project-build"
        project.mkdir()

        def configure(version):
            (project / "CMakeLists.txt").write_text(CMAKE % version)
            shutil.rmtree(build, ignore_errors=True)
            return subprocess.run(["cmake", "-GNinja", "-S", project, "-B", build, f"-Dspillway_DIR={describes}",
                                   f"-DSOURCES={ROOT / 'tests/src'}"],
                                  capture_output=True, text=True, check=False, timeout=120)

        version = re.search(r"^Version: (.+)$", self.described.read_text(), re.MULTILINE)[1]
        for wrong in ("99.0", "0.0.1"):
            said = configure(wrong)
            self.assertNotEqual(0, said.returncode, wrong)
            self.assertIn(f"version: {version}", said.stderr)
        done = configure(version.rpartition(".")[0])
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.run_ok("cmake", "--build", build)
        self.assertIn(str(prefix), self.run_ok("ldd", build / "train"))
        self.assert_trains(build / "train", "cmake")
        self.assertNotIn("libspillway", self.run_ok("ldd", build / "train_c"))
        said = self.run_ok(build / "train_c", json.dumps(self.config("cmake-c")), self.folder / "cmake-c-out")
        self.assertIn("step 10, norm", said)

    def test_FilesAndQueuesAloneNeedNoneOfTheEnginesLibraries(self):
        self.assert_needs_little(self.libraries / "libspillway_io.so")
        for compiler, source, options in (("c++ -std=c++20", "queue_example.cc", ["-Wno-missing-field-initializers"]),
                                          ("cc -std=c11 -pthread", "c_io_example.c", [])):
            program = self.compiled(compiler, ROOT / "tests/aio" / source, *options, libraries=["spillway_io"])
            self.assertIn("libspillway_io.so.0", self.run_ok("ldd", program))
            self.assert_needs_little(program)
            self.assert_moves(program)

    @unittest.skipUnless(shutil.which("cmake"), "cmake is not installed")
    def test_CMakeHasAComponentOfFilesAndQueues(self):
        describes = next(self.root.rglob("spillway-config.cmake")).parent
        project, build = self.folder / "io-project", self.folder / "io-build"
        project.mkdir()

        def configure(component):
            (project / "CMakeLists.txt").write_text(IO_CMAKE % component)
            return subprocess.run(["cmake", "-GNinja", "-S", project, "-B", build, f"-Dspillway_DIR={describes}",
                                   f"-DSOURCES={ROOT / 'tests/aio'}"],
                                  capture_output=True, text=True, check=False, timeout=120)

        self.assertIn("spillway has no component training; there is io", configure("training").stderr)
        done = configure("io")
        self.assertEqual(0, done.returncode, done.stdout + done.stderr)
        self.run_ok("cmake", "--build", build)
        for program in ("moves", "moves_c"):
            self.assert_needs_little(build / program)
            self.assert_moves(build / program)
        self.assertNotIn("libspillway", self.run_ok("ldd", build / "moves_c"))

    def test_BothLibrariesInOneProgramShareTheThreadsError(self):
        source = self.folder / "both.c"
        source.write_text(BOTH)
        for order in (["spillway", "spillway_io"], ["spillway_io", "spillway"]):
            program = self.folder / "both"
            named = [f"-l{name}" for name in order]
            flags = [flag for flag in self.flags() if flag != "-lspillway"]
            self.run_ok("cc", "-std=c11", source, "-o", program, *flags, "-Wl,--no-as-needed", *named,
                        f"-Wl,-rpath,{self.libraries}")
            self.assertIn("libspillway_io.so.0", self.run_ok("ldd", program))
            engine, *_, io = self.run_ok(program).splitlines()
            self.assertRegex(engine, r"^engine:1:\d+: ", order)
            self.assertIn("/none/at/all: cannot be opened", io, order)

    @unittest.skipUnless(shutil.which("mpirun") and shutil.which("mpicxx"), "Open MPI is not installed")
    def test_TheExampleOfRanksIsBuiltAndFindsItsPlugin(self):
        if not (self.libraries / "libspillway_mpi.so").exists():
            self.skipTest("this build has no plugin of MPI")
        path = self.folder / "ranks.json"
        path.write_text(json.dumps({**self.config("ranks"), "zero_optimization": {"stage": 2}}))
        program = self.folder / "ranks"
        self.run_ok("mpicxx", "-std=c++20", "-O1", ROOT / "tests/src/comm/mpi_example.cc", "-o", program, *self.flags(),
                    f"-Wl,-rpath,{self.libraries}")
        said = self.run_ok("mpirun", "-n", "2", program, path, OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_rmaps_base_oversubscribe="1",
                           OMPI_MCA_btl="self,vader", OMPI_MCA_plm="isolated")
        self.assertEqual(2, said.count("step 10: gradient norm"), said)

    def test_TheArchiveNamesWhatItNeeds(self):
        program = self.folder / "with_archive"
        flags = self.run_ok("pkg-config", "--static", "--cflags", "--libs", "spillway",
                            PKG_CONFIG_PATH=str(self.described.parent), PKG_CONFIG_SYSROOT_DIR=str(self.root)).split()
        flags = ["-l:libspillway.a" if flag == "-lspillway" else flag for flag in flags]
        self.run_ok("c++", "-std=c++20", ROOT / "tests/src/embedding_example.cc", "-o", program, *flags)
        self.assertNotIn("libspillway", self.run_ok("ldd", program))
        self.assert_trains(program, "static")

    @unittest.skipUnless(shutil.which("meson"), "meson is not installed")
    def test_WithoutTheProgramItNeedsNeitherOneDnnNorCli11(self):
        build = self.folder / "library-alone"
        setup = ("meson", "setup", build, ROOT, "-Dtools=disabled", "-Dcuda=disabled")
        self.run_ok(*setup, "-Dtests=disabled")
        needed = json.loads(self.run_ok("meson", "introspect", build, "--dependencies"))
        needed = {one["name"].lower() for one in needed}
        self.assertIn("liburing", needed)
        self.assertEqual(set(), needed & {"cli11", "dnnl", "openmp"})
        made = {one["name"] for one in json.loads(self.run_ok("meson", "introspect", build, "--targets"))}
        self.assertIn("spillway_src", made)
        self.assertNotIn("spillway_models", made)
        shutil.rmtree(build)
        done = subprocess.run([*map(str, setup), "-Dtests=enabled"], capture_output=True, text=True, check=False)
        self.assertIn("the tests run the program; leave -Dtools=disabled out", done.stdout)

    def test_TheProgramsSinkHearsTheLibrary(self):
        source = self.folder / "listener.cc"
        source.write_text(LISTENER)
        for options in ("-O0", "-O2", "-O2 -fvisibility=hidden -fvisibility-inlines-hidden"):
            program = self.compiled(f"c++ -std=c++20 {options}", source, "-Wno-missing-field-initializers")
            done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=120)
            self.assertEqual((0, ""), (done.returncode, done.stderr), options)
            *lines, goodbye = done.stdout.splitlines()
            self.assertTrue(goodbye.endswith("goodbye"), goodbye)
            self.assertEqual(lines[:len(lines) // 2] * 2, lines)
            self.assertIn("heard, with a sink that does not fit in place: example: known, but without effect", lines[0])

    def test_TheExampleInC(self):
        program = self.compiled("cc -std=c11", "c_example.c")
        out = self.folder / "c-out"
        said = self.run_ok(program, json.dumps(self.config("c")), out)
        self.assertIn("device: host device", said)
        self.assertRegex(said, rf"given {2 * 512 * 300}, step 10, norm [\d.]+, link \w+, blob 4")
        # Adam's first steps move a weight by about the learning rate: 1 - 10 * 0.02.
        weights = [float(value) for value in re.search(r"^weights ([\d.]+) ([\d.]+)$", said, re.MULTILINE).groups()]
        self.assertTrue(all(0.78 < weight < 0.82 for weight in weights), weights)
        # In bf16, after a header.
        data = (out / "model.safetensors").read_bytes()
        self.assertEqual(2 * 512 * 300 * 2, len(data) - 8 - int.from_bytes(data[:8], "little"))

        def refused(text, status, message):
            done = subprocess.run([program, text, out], capture_output=True, text=True, check=False, timeout=120)
            self.assertEqual(status, done.returncode)
            self.assertRegex(done.stderr, message)

        refused("{", 1, r"1: argument:1:\d+: ")
        # The store may be replaced, the model not.
        refused(json.dumps(self.config("c")), 3, "3: .*c-out: a model is there")
        refused(json.dumps(self.config("c") | {"spillway": {"hbm_bytes": "4KiB"}}), 4, "4: .*hbm")

    def test_TheImportInC(self):
        program = self.compiled("cc -std=c11", "c_import_example.c")
        parameters = {name: (shape, *(bytes([i, 0, 0, 0x3d] * elements) for i in range(3)))
                      for name, shape, elements in (("weight", (5, 3), 15), ("bias", (3,), 3))}
        checkpoint = torch_files.Checkpoint(parameters, step=4, ranks=2, bf16=False)
        checkpoint.more = {"epoch": 1}
        saved, out = checkpoint.write(self.folder / "deepspeed"), self.folder / "snapshot"
        (saved / "latest").write_text("another")  # the tag that the program names counts
        config = json.dumps(self.config("imported") | {"bf16": {"enabled": True}})
        done = subprocess.run([program, config, saved, out], capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(0, done.returncode, done.stderr)
        self.assertRegex(done.stderr, r"(?m)^step 4$")
        facts = json.loads(done.stdout)
        self.assertEqual((4, 4, "fp32", ["epoch"], str(out)), tuple(
            facts[key] for key in ("step", "global_steps", "trained_in", "client_state", "snapshot")))
        for stem, value in zip(("model", "exp_avg", "exp_avg_sq"), parameters["weight"][1:]):
            found = torch_files.read_safetensors(out / f"{stem}.safetensors")
            self.assertEqual(([5, 3], value), found["weight" if stem == "model" else f"weight.{stem}"])
        done = subprocess.run([program, config, saved, out], capture_output=True, text=True, check=False, timeout=120)
        self.assertEqual(3, done.returncode)
        self.assertIn("snapshot: is there already", done.stderr)

    def shown(self, library):
        """The names that programs see of it, but for the one thing that the two libraries share."""
        names = re.findall(r"^\S* ?[TBDRVWu] (.+)$", self.run_ok("nm", "-DC", "--defined-only",
                                                                (self.libraries / library).resolve()), re.MULTILINE)
        self.assertTrue(any("internal::thread_error" in name for name in names))
        return [name for name in names if "internal::thread_error" not in name]

    def test_TheLibrariesShowWhatTheirHeadersDeclareAlone(self):
        names, of_io = self.shown("libspillway.so"), self.shown("libspillway_io.so")
        self.assertEqual(set(), set(of_io) - set(names))
        self.assertIn("spillway_io_queue_submit", of_io)
        self.assertTrue(any(name.startswith("spillway::SharedIoQueue::create(") for name in of_io))
        headers = {path.name: re.sub(r"//.*", "", path.read_text())
                   for path in next(self.root.rglob("include/spillway")).glob("*.h")}
        functions = {name: set(re.findall(r"\b(spillway_\w+)\(", headers.pop(name)))
                     for name in ("c_api.h", "c_base.h", "c_io.h", "c_ranks.h", "c_tensors.h")}
        self.assertEqual(functions["c_base.h"] | functions["c_io.h"],
                         {name for name in of_io if name.startswith("spillway_")})
        functions = set().union(*functions.values())
        self.assertIn("spillway_engine_create", functions)
        self.assertEqual(functions, {name for name in names if name.startswith("spillway_")})
        declared = set(re.findall(r"\b(?:class|struct) (\w+)|\b(\w+)\(", "".join(headers.values())))
        declared = {one or other for one, other in declared}
        own = re.compile(r"(?:(?:typeinfo|typeinfo name|vtable|guard variable) for )?spillway::(?:internal::)?(\w+)")

        def is_public(name):
            """Not of a class within a class, either."""
            found = own.match(name)
            return bool(found and found[1] in declared and not re.match(r"spillway::(\w+)::(?!\1\b)[A-Z]\w*::", name))

        rest = [name for name in names if not name.startswith("spillway_")]
        self.assertEqual([], [name for name in rest if not is_public(name)])
        for name in ("load_config", "Engine::create", "Lease::release", "export_store", "IoQueue::create"):
            self.assertTrue(any(each.startswith(f"spillway::{name}(") for each in rest), name)
        for name in ("std::vector<int>::push_back(int)", "spillway::StepEngine::step()", "spillway::c::tables()",
                     "spillway::SafetensorsWriter::Output::put(int)"):
            self.assertFalse(is_public(name), name)


if __name__ == "__main__":
    main()
