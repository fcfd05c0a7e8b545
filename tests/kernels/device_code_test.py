"""What ptxas made of all device code in the plugins: for every GPU asked for, and all of it in registers, but for what
EXCEPTIONS names. No GPU looks at the code here, so cuobjdump does; it comes from PyPI as nvidia-cuda-cuobjdump.

SPILLWAY_PLUGINS: the files, with colons between them. SPILLWAY_GPU_ARCH: 80,86,…, as in -Dgpu_arch; the last one has
PTX as well. tools/wheel.sh --cuda runs this over the code for all GPUs.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402

# Kernels, by their mangled names, that keep something in local memory: the most bytes a thread, and why.
EXCEPTIONS = {
    r"attention_backward_cu_.*backward_kernelI\w+(Li128E\w+SideE0ELb0E|Li(64|96)E\w+SideE1ELb0E)":
        (32, "two sums of a warp's rows and both products take all 255 registers; ptxas gives up single addresses, and "
             "none of six ways to write it down was better on every GPU"),
    r"attention_backward_cu_.*backward_kernelI\w+Li(64|96|128)E\w+SideE[01]ELb1E":
        (40, "likewise where rules say what a query sees, which takes a few addresses more"),
    r"attention_simt_cu_.*backward_kernelI\w+Li64E\w+SideE1E":
        (32, "the same without tensor cores, for fp32 and odd head widths, in the code for sm_90 and newer"),
    r"layer_norm_cu_.*block_backwardI\w+Lj[48]ELj4ELj1024E":
        (392, "rows of more than 1,024 vectors, 8,192 elements of 16 bits: 1,024 threads have 64 registers each, and "
              "keep four vectors"),
}
ALL = 6  # kinds of GPU that -Dgpu_arch has by default: with all of them, every exception must still be one


def find_cuobjdump():
    told = os.environ.get("SPILLWAY_CUOBJDUMP")
    places = [told] if told else [shutil.which("cuobjdump"), "/usr/local/cuda/bin/cuobjdump",
                                  f"{sysconfig.get_paths()['purelib']}/nvidia/cu13/bin/cuobjdump"]
    return next((place for place in places if place and os.access(place, os.X_OK)), told)


def usage(cuobjdump, plugin):
    """{kind of code and GPU: [(kernel, bytes of a thread in local memory)]}, as ("elf", "80")."""
    text = subprocess.run([cuobjdump, "--dump-resource-usage", plugin], capture_output=True, text=True,
                          check=True).stdout
    found, kernels, kind, name = {}, None, None, None
    for line in text.splitlines():
        if match := re.match(r"Fatbin (elf|ptx) code:", line):
            kind = match[1]
        elif match := re.match(r"arch = sm_(\w+)", line):
            kernels = found.setdefault((kind, match[1]), [])
        elif match := re.match(r" Function (\S+):", line):
            name = match[1]
        elif match := re.match(r"  REG:\d+ STACK:(\d+) SHARED:\d+ LOCAL:(\d+) ", line):
            kernels.append((name, int(match[1]) + int(match[2])))
    return found


class DeviceCode(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        plugins = os.environ.get("SPILLWAY_PLUGINS")
        if not plugins:
            raise unittest.SkipTest("SPILLWAY_PLUGINS is not set")
        cuobjdump = find_cuobjdump()
        if cuobjdump is None:
            raise unittest.SkipTest("there is no cuobjdump; pip install nvidia-cuda-cuobjdump brings it")
        cls.archs = os.environ["SPILLWAY_GPU_ARCH"].split(",")
        cls.plugins = {pathlib.Path(plugin).name: usage(cuobjdump, plugin) for plugin in plugins.split(":")}

    def test_EveryGpuHasAllKernels(self):
        for plugin, found in self.plugins.items():
            with self.subTest(plugin=plugin):
                wanted = {("elf", arch) for arch in self.archs} | {("ptx", self.archs[-1])}
                self.assertEqual(wanted, set(found))
                kernels = {arch: sorted(name for name, _ in found["elf", arch]) for arch in self.archs}
                self.assertGreater(len(kernels[self.archs[0]]), 10)
                for arch in self.archs:
                    self.assertEqual(kernels[self.archs[0]], kernels[arch], f"sm_{arch}")

    def test_EverythingIsInRegisters(self):
        needed = set()
        for plugin, found in self.plugins.items():
            for (kind, arch), kernels in sorted(found.items()):
                for name, in_memory in kernels if kind == "elf" else []:
                    if in_memory == 0:
                        continue
                    exception = next((known for known in EXCEPTIONS if re.search(known, name)), None)
                    needed.add(exception)
                    with self.subTest(plugin=plugin, arch=arch, kernel=name):
                        self.assertLessEqual(in_memory, EXCEPTIONS.get(exception, (0, ""))[0], "bytes in local memory")
        if len(self.archs) >= ALL:
            self.assertEqual(set(), set(EXCEPTIONS) - needed, "no exceptions any more")


if __name__ == "__main__":
    main()
