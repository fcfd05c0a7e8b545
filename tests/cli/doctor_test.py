"""`spillway doctor` as a user runs it, on a machine with each thing taken away in turn: what it says, what it offers to
repair it, its exit code; and nothing stays on the drive in any case.

The environment variable SPILLWAY_FAKE_CUDA names a directory with a libcuda.so.1 that the tests control.
"""
import ctypes
import fcntl
import json
import os
import pathlib
import re
import resource
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import BINARY, CRASH, UNITS, CliTest, Run, memory_cgroup, mounted, spillway  # noqa: E402

MIB = 1 << 20
NOBODY = 65534
CODES = {"ok": 0, "slower": 3, "broken": 4}
LINE = re.compile(r"^(ok|skipped|slower|broken) +\S.*$|^ {26}repair: \S.*$|^/.*$|^\d+ ok, \d+ slower, \d+ broken, "
                  r"\d+ skipped$|^$")
IO_URING_SETUP = 425  # the same on every architecture that was there when it came
QUICK = ["--probe-seconds", "0.3"]


def refuse_io_uring():
    """What Docker does, for this process and its children: seccomp(2) answers io_uring_setup with EPERM."""
    def instruction(code, jump_true, jump_false, value):
        return struct.pack("HBBI", code, jump_true, jump_false, value)

    program = b"".join([
        instruction(0x20, 0, 0, 0),                    # load the number of the system call
        instruction(0x15, 0, 1, IO_URING_SETUP),       # if it is this one,
        instruction(0x06, 0, 0, 0x00050000 | 1),       # return SECCOMP_RET_ERRNO | EPERM
        instruction(0x06, 0, 0, 0x7fff0000)])          # else SECCOMP_RET_ALLOW
    buffer = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, filters, 0, 0):
        raise OSError(ctypes.get_errno(), "no seccomp filter is taken here")


def become_nobody():
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


class Doctor(CliTest):
    def setUp(self):
        super().setUp()
        os.chmod(self.place.folder, 0o755)  # also for nobody

    def doctor(self, *arguments, preexec_fn=None, env=None):
        """The findings, after a look at the exit code and at what was left on the paths."""
        try:
            run = spillway("doctor", *arguments, "--json", preexec_fn=preexec_fn, env=env)
        except PermissionError:  # nobody, below a home directory
            self.skipTest(f"another user may not run {BINARY}")
        everything = f"stdout:\n{run.out}\nstderr:\n{run.err}"
        self.assertIsNone(CRASH.search(run.out + run.err), everything)
        self.assertEqual("", run.err)
        self.answer = json.loads(run.out)
        self.assertEqual(CODES[self.answer["status"]], run.status, everything)
        self.assertEqual(run.status, self.answer["exit_code"])
        worst = max(self.answer["findings"], key=lambda f: CODES.get(f["status"], 0))
        self.assertEqual(CODES[self.answer["status"]], CODES.get(worst["status"], 0))
        for finding in self.answer["findings"]:
            self.assertTrue(finding["seen"], finding)
            self.assertEqual(finding["status"] == "slower", "slower_by" in finding, finding)
            self.assertEqual(finding["status"] in ("slower", "broken"), "repair" in finding, finding)
        return self.answer["findings"]

    def one(self, findings, check, path=None):
        found = [f for f in findings if f["check"] == check and f.get("path") == (str(path) if path else None)]
        self.assertEqual(1, len(found), f"one finding of {check} on {path} among {json.dumps(findings, indent=1)}")
        return found[0]

    def assert_says(self, finding, status, seen, **more):
        self.assertEqual(status, finding["status"], finding)
        self.assertRegex(finding["seen"], seen)
        for key, pattern in more.items():
            self.assertRegex(finding[key], pattern)

    def assert_empty(self, folder):
        self.assertEqual([], [p for p in folder.iterdir() if p.name != "lost+found"])

    def test_AHealthyDriveIsFine(self):
        with mounted(self, "ext4", 320 * MIB) as folder:
            findings = self.doctor(folder, *QUICK)
            self.assert_says(self.one(findings, "file system", folder), "ok", "^ext4 from /dev/")
            self.assert_says(self.one(findings, "writing", folder), "ok", "read back")
            self.assert_says(self.one(findings, "direct I/O", folder), "ok", "multiples of 512$")
            self.assert_says(self.one(findings, "space", folder), "ok", "free of")
            probe = self.one(findings, "probe", folder)
            self.assertIn(probe["status"], ("ok", "slower"))
            self.assertRegex(probe["seen"], r"written at \d+\.\d+ GB/s, then read at \d+\.\d+ GB/s")
            self.assert_empty(folder)

    def test_SectorsOf4KiBAreSeen(self):
        with mounted(self, "ext4", 64 * MIB, sector_bytes=4096) as folder:
            findings = self.doctor(folder, "--no-probe")
            self.assert_says(self.one(findings, "direct I/O", folder), "ok", "multiples of 4096$")
            self.assert_says(self.one(findings, "writing", folder), "ok", "read back")
            self.assert_says(self.one(findings, "probe", folder), "skipped", "--no-probe")

    def test_AReadOnlyDriveIsBroken(self):
        with mounted(self, "ext4", 64 * MIB) as folder:
            subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
            findings = self.doctor(folder, *QUICK)
            remount = f"^sudo mount -o remount,rw {re.escape(str(folder))}"
            self.assert_says(self.one(findings, "file system", folder), "broken", "read-only", repair=remount)
            self.assert_says(self.one(findings, "writing", folder), "broken", "Read-only file system", repair=remount)
            self.assertEqual("skipped", self.one(findings, "probe", folder)["status"])
            # What it offers does repair it.
            subprocess.run(["mount", "-o", "remount,rw", folder], check=True)
            self.assertEqual("ok", self.one(self.doctor(folder, "--no-probe"), "writing", folder)["status"])

    def test_AFullDriveIsBroken(self):
        with mounted(self, "ext4", 64 * MIB) as folder:
            for size in (1 << 16, 1 << 12):
                with open(folder / f"full of {size}", "wb", buffering=0) as other:
                    try:
                        while True:
                            other.write(bytes(size))
                    except OSError:
                        pass
            findings = self.doctor(folder, *QUICK)
            self.assert_says(self.one(findings, "space", folder), "broken", "free of", repair="sudo du ")
            self.assertEqual("skipped", self.one(findings, "writing", folder)["status"])
            self.assertEqual("skipped", self.one(findings, "probe", folder)["status"])
            self.assertEqual({"full of 65536", "full of 4096", "lost+found"}, {p.name for p in folder.iterdir()})

    def test_MemoryIsNoDrive(self):
        with mounted(self, "tmpfs", 256 * MIB) as folder:
            findings = self.doctor(folder, *QUICK)
            self.assert_says(self.one(findings, "file system", folder), "broken", "tmpfs is memory")
            self.assert_says(self.one(findings, "probe", folder), "skipped", "memory would be measured")
            self.assert_empty(folder)

    def test_TwoPathsOnOneDriveAreNoFaster(self):
        with mounted(self, "ext4", 64 * MIB) as folder:
            for name in ("a", "b"):
                (folder / name).mkdir()
            findings = self.doctor(folder / "a", folder / "b", "--no-probe")
            self.assert_says(self.one(findings, "paths"), "slower", "on the same drive, loop")

    def test_APathThatARunMakesIsJudgedByWhereItMakesIt(self):
        with mounted(self, "ext4", 320 * MIB) as folder:
            missing = folder / "a" / "b"
            findings = self.doctor(missing, *QUICK)
            self.assert_says(self.one(findings, "path", missing), "ok", f"^a run makes it in {folder},")
            self.assert_says(self.one(findings, "file system", missing), "ok", "^ext4 from /dev/loop")
            self.assert_says(self.one(findings, "writing", missing), "ok", "read back")
            self.assertRegex(self.one(findings, "probe", missing)["seen"], r"written at \d")
            self.assert_empty(folder)
            if os.geteuid() == 0:
                findings = self.doctor(missing, "--no-probe", preexec_fn=become_nobody)
                self.assert_says(self.one(findings, "writing", missing), "broken", "Permission denied",
                                 repair=f"^sudo mkdir -p {missing} && sudo chown .USER {missing}$")
            # It is as it says.
            config, model = self.place.config(nvme=missing), self.place.init_model()
            self.assert_done(spillway(*self.place.arguments(config, model, steps=1)))
            self.assertTrue(missing.is_dir())

    def test_APathThatNoRunCanMakeIsBroken(self):
        nowhere, file = self.place.folder / "it's nowhere", self.place.folder / "file"
        nowhere.symlink_to("absent")
        file.write_text("")
        quoted = re.escape(str(self.place.folder / "it'\\''s nowhere"))
        for path, seen, repair in ((nowhere, rf"^{nowhere} is not there \(No such file", f"mkdir -p '{quoted}'$"),
                                   (file / "below", f"^{file} is not a directory$", "mkdir -p")):
            findings = self.doctor(path)
            self.assert_says(self.one(findings, "path", path), "broken", seen, repair=repair)

    def test_AnOthersDirectoryIsBroken(self):
        if os.geteuid() != 0:
            self.skipTest("giving up root needs it first")
        findings = self.doctor(self.place.nvme, "--no-probe", preexec_fn=become_nobody)
        self.assert_says(self.one(findings, "writing", self.place.nvme), "broken", "Permission denied",
                         repair=r"^sudo chown \$USER ")

    def test_ASeccompFilterIsNamedWithItsPrice(self):
        findings = self.doctor(preexec_fn=refuse_io_uring)
        self.assert_says(self.one(findings, "io_uring"), "slower", r"EPERM.*seccomp",
                         slower_by="^using libaio, about 50 % more CPU$", repair="seccomp|io_uring_setup")

    def test_TheSysctlIsNamedWithItsCommand(self):
        switch = pathlib.Path("/proc/sys/kernel/io_uring_disabled")
        if os.geteuid() != 0 or not switch.exists():
            self.skipTest("needs root, and Linux 6.6 or newer")
        lock = switch.open(encoding="utf-8")
        self.addCleanup(lock.close)
        fcntl.flock(lock, fcntl.LOCK_EX)  # others that write to it wait
        before = switch.read_text()
        if before.strip() != "0":
            self.skipTest(f"kernel.io_uring_disabled is {before.strip()} already")
        try:
            switch.write_text("1")  # still allows it to root, so that nobody else here is disturbed
        except OSError as error:
            self.skipTest(f"kernel.io_uring_disabled cannot be set here: {error}")
        try:
            findings = self.doctor(preexec_fn=become_nobody)
        finally:
            switch.write_text(before)
        self.assert_says(self.one(findings, "io_uring"), "slower", "kernel.io_uring_disabled is 1",
                         repair="^sudo sysctl -w kernel.io_uring_disabled=0$")

    def under_memlock(self, limit):
        """The findings of one who may pin so many bytes, and no root."""
        def enter():
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
            become_nobody()

        return self.doctor(preexec_fn=enter)

    def test_AMemlockLimitCostsRegisteredBuffers(self):
        findings = self.under_memlock(64 << 10)
        if self.one(findings, "io_uring")["status"] != "ok":
            self.skipTest("there is no io_uring here, not under this limit")
        self.assert_says(self.one(findings, "memlock"), "slower", "allows 64 KiB of pinned memory",
                         slower_by="about 75 % more CPU", repair="memlock")

    def test_AMemlockLimitOfNothingIsNamed(self):
        # Some kernels count the ring itself, others only its buffers.
        findings = self.under_memlock(0)
        ring = self.one(findings, "io_uring")
        if ring["status"] == "ok":
            self.assert_says(self.one(findings, "memlock"), "slower", "allows 0 B", repair="memlock")
        elif "ENOMEM" not in ring["seen"]:
            self.skipTest(f"there is no io_uring here: {ring['seen']}")
        else:
            self.assert_says(ring, "slower", "ulimit -l", slower_by="using libaio", repair="memlock")

    def test_ALimitOfFilesIsTheProbesToo(self):
        with mounted(self, "ext4", 320 * MIB) as folder:
            for limit, seen, status in ((48 * MIB, r"written at \d", ("ok", "slower")),
                                        (8 * MIB, "^ulimit -f allows too small a file$", ("skipped",))):
                findings = self.doctor(folder, *QUICK, preexec_fn=lambda size=limit: resource.setrlimit(
                    resource.RLIMIT_FSIZE, (size, size)))
                probe = self.one(findings, "probe", folder)
                self.assertIn(probe["status"], status, probe)
                self.assertRegex(probe["seen"], seen)
                self.assertEqual("ok", self.one(findings, "file size")["status"])

    def test_TooFewFilesAreBroken(self):
        findings = self.doctor(preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60)))
        self.assert_says(self.one(findings, "open files"), "broken", "ulimit -n is 60", repair="ulimit -n")

    def budgets(self, hbm, host, **more):
        return self.place.config(spillway_section={"hbm_bytes": hbm, "host_bytes": host, **more})

    def test_ACgroupBelowTheBudgetsIsBroken(self):
        config = self.budgets("1GiB", "1GiB")
        with memory_cgroup(self, 1024 * MIB) as enter:
            findings = self.doctor("--config", config, "--no-probe", preexec_fn=enter)
        self.assert_says(self.one(findings, "memory"), "broken",
                         "cgroup allows 1 GiB and leaves [0-9.]+ MiB; the arenas take 2 GiB",
                         repair="--memory")

    def test_MemoryThatARunStartsInIsNotBroken(self):
        config, model = self.place.config(), self.place.init_model()
        with memory_cgroup(self, 150 * MIB) as enter:
            findings = self.doctor("--config", config, "--model", model, "--seq", 32, "--no-probe", preexec_fn=enter)
            self.assert_done(spillway(*self.place.arguments(config, model, steps=1), preexec_fn=enter))
        self.assert_says(self.one(findings, "memory"), "slower", "cgroup allows 150 MiB", repair="--memory")

    def test_HbmIsMemoryOnlyWhereTheCpuComputes(self):
        model = self.place.init_model()
        for options in ([], ["--model", model, "--seq", 32]):
            seen = {}
            for device in ("host", "cuda"):
                config = self.budgets("1GiB", "1GiB", device=device)
                findings = self.doctor("--config", config, "--no-probe", *options)
                seen[device] = re.search("the arenas take (.*) and", self.one(findings, "memory")["seen"]).group(1)
            if not options:
                self.assertEqual({"host": "2 GiB", "cuda": "1 GiB"}, seen)
            self.assertNotEqual(seen["host"], seen["cuda"], options)

    def test_AStoreThatDoesNotFitIsBrokenAndAModelSaysHowLargeItIs(self):
        model = self.place.init_model(layers=4, width=256, heads=4)
        with mounted(self, "ext4", 48 * MIB) as folder:
            config = self.place.config(nvme=folder)
            findings = self.doctor("--config", config, "--model", model, "--seq", 32, "--no-probe")
            self.assert_says(self.one(findings, "space", folder), "broken", r"the store takes \d+(\.\d+)? MiB")
            self.assert_empty(folder)
        # The same with room for it, which is what finetune takes.
        findings = self.doctor("--config", self.place.config(), "--model", model, "--seq", 32, "--no-probe")
        self.assertEqual("ok", self.one(findings, "space", self.place.nvme)["status"])
        self.assertEqual("ok", self.one(findings, "memory")["status"])

    def test_ABudgetThatIsTooSmallIsBrokenWithWhatFits(self):
        model = self.place.init_model()
        config = self.budgets("64KiB", "64KiB")
        findings = self.doctor("--config", config, "--model", model, "--seq", 32, "--no-probe")
        plan = self.one(findings, "plan")
        self.assert_says(plan, "broken", "needs|takes", repair="(hbm|host)_bytes")
        # In the words of the run.
        refused = spillway(*self.place.arguments(config, model, steps=1))
        self.assertEqual(f"spillway: {plan['seen']}; {plan['repair']}\n", refused.err)
        plan = self.one(self.doctor("--config", config, "--model", model, "--seq", 65, "--no-probe"), "plan")
        self.assert_says(plan, "broken", "--seq: 65 tokens are more than the model's 64 positions")
        refused = spillway(*self.place.arguments(config, model, steps=1, seq=65))
        self.assertEqual(f"spillway: {plan['seen']}; {plan['repair']}\n", refused.err)

    def test_AdaptersAreJudgedAsARunTrainsThem(self):
        model = self.place.init_model(layers=4, width=256, heads=4)
        lora = {"rank": 4, "alpha": 8, "targets": ["all-linear"]}
        config = self.place.config(parameters="cpu", states="cpu",
                                   spillway_section={"lora": lora, "host_bytes": "24MiB"})
        findings = self.doctor("--config", config, "--model", model, "--seq", 32, "--no-probe")
        self.assertEqual([], [f for f in findings if f["check"] == "plan"])
        self.assert_done(spillway(*self.place.arguments(config, model, steps=1)))

    def test_TheDriversLibraryIsAsked(self):
        directory = os.environ.get("SPILLWAY_FAKE_CUDA", "")
        if not directory:
            self.skipTest("SPILLWAY_FAKE_CUDA is not set")
        environment = {**os.environ, "LD_LIBRARY_PATH": directory}
        cuda = self.one(self.doctor(env=environment), "cuda")
        # Of a driver that shows GPUs; this build has no plugin, or one of a newer CUDA.
        self.assert_says(cuda, "broken", "^Fake GPU, 24 GiB; driver .*, for CUDA 12.4; Spillway cannot use it: the "
                         "(plugin of the cuda device was not opened|driver serves CUDA 12.4 and this was built with )",
                         repair="a driver as new as that|`tools/wheel.sh --cuda` brings it")
        findings = self.doctor(env={**environment, "SPILLWAY_FAKE_CUDA_INIT": "803"})
        self.assert_says(self.one(findings, "cuda"), "broken", r"^cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH \(803\)",
                         repair="reboot")

    def test_CtrlCEndsTheProbeAndLeavesNothing(self):
        with mounted(self, "ext4", 320 * MIB) as folder:
            free = os.statvfs(folder).f_bfree
            command = [BINARY, "doctor", str(folder), "--probe-seconds", "600"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
                deadline = time.monotonic() + 60
                while os.statvfs(folder).f_bfree > free - 32 * MIB // os.statvfs(folder).f_frsize:
                    self.assertIsNone(run.poll())
                    self.assertLess(time.monotonic(), deadline, "the probe took no space within a minute")
                    time.sleep(0.01)
                run.send_signal(signal.SIGINT)
                out, err = run.communicate(timeout=60)
            self.assertEqual((130, ""), (run.returncode, out), err)
            self.assertIn("nothing is left on the drive", err)
            self.assert_empty(folder)

    def test_TextSaysTheSameAndHasNoColoursInAPipe(self):
        run = spillway("doctor", self.place.nvme, "--no-probe")
        self.assertEqual("", run.err)
        for line in run.out.splitlines():
            self.assertRegex(line, LINE)
        shown = re.findall(r"^(ok|skipped|slower|broken)", run.out, re.MULTILINE)
        findings = self.doctor(self.place.nvme, "--no-probe")
        self.assertEqual([f["status"] for f in findings], shown)
        self.assertEqual(self.answer["exit_code"], run.status)

    def test_WithoutAPathNoDriveIsTouched(self):
        run = subprocess.run([BINARY, "doctor"], capture_output=True, text=True, check=False, cwd=self.place.nvme)
        self.assertIn("paths", run.stdout)
        self.assertRegex(run.stdout, "(?m)^skipped +paths +none was given")
        config = self.place.config(parameters="none", states="none")
        self.assertIn("the configuration has none", self.one(self.doctor("--config", config), "paths")["seen"])
        self.assertNotIn(str(self.place.nvme), run.stdout)

    def test_AModelThatFinetuneDoesNotTrainIsJudgedByItsBudgets(self):
        model = self.place.folder / "t5"
        model.mkdir()
        (model / "config.json").write_text('{"model_type": "t5", "d_model": 64}')
        config = self.place.config(spillway_section={"host_bytes": "64MiB", "hbm_bytes": "64MiB"})
        findings = self.doctor("--config", config, "--model", model, "--no-probe")
        self.assert_says(self.one(findings, "plan"), "skipped", "t5, which finetune does not train; spillway plan")
        self.assertIn("the arenas take 128 MiB", self.one(findings, "memory")["seen"])

    def test_ADecoderOfAKindThatFinetuneDoesNotTrainIsJudgedByItsBudgets(self):
        model = self.place.init_family("llama")
        about = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**about, "lm_head_bias": True}))
        findings = self.doctor("--config", self.place.config(), "--model", model, "--no-probe")
        self.assert_says(self.one(findings, "plan"), "skipped", '"lm_head_bias".*; spillway plan says')

    def test_WhatARunOfADecoderRefusesIsRefused(self):
        model = self.place.init_family("llama")
        for section in ({"slice_tokens": 64}, {"parameter_groups": [{"parameters": ["nothing.*"], "lr": 1e-4}]}):
            with self.subTest(section=section):
                config = self.place.config(spillway_section=section)
                refused = spillway(*self.place.arguments(config, model, steps=1))
                self.assert_refused(refused, f"spillway.{next(iter(section))}")
                run = spillway("doctor", "--config", config, "--model", model, "--seq", 32, "--no-probe")
                self.assertEqual((1, "", refused.err), (run.status, run.out, run.err))

    def test_RanksThatTrainTogetherAreJudgedTogether(self):
        model, config = self.place.init_model(), self.place.config(accumulation=1, train_batch_size=4)
        run = ["--config", config, "--model", model, "--seq", 32, "--no-probe"]
        refused = spillway("doctor", *run)
        self.assert_refused(refused, "--ranks: was taken as 1; say --ranks N")
        self.assertIn("train_batch_size: 4 is not 1 (micro batch) × 1 (accumulation) × 1 (rank)", refused.err)
        findings = self.doctor(*run, "--ranks", 4)
        self.assert_says(self.one(findings, "space", self.place.nvme), "ok", "; the stores of 4 ranks take ")
        self.assert_says(self.one(findings, "memory"), "ok", "; the arenas of 4 ranks take ")
        planned = spillway("plan", "--loop", "finetune", *run, "--ranks", 4, "--json")
        size, unit = re.search(r" take ([0-9.]+) (\w+)$", self.one(findings, "space", self.place.nvme)["seen"]).groups()
        self.assertAlmostEqual(1, float(size) * UNITS[unit] / json.loads(planned.out)["ranks"]["nvme"]["host_bytes"],
                               delta=0.02)
        # A wrong file is no question of ranks.
        config = self.place.config(accumulation=1, train_batch_size=4, gradient_clipping=-1)
        self.assertNotIn("--ranks", spillway("doctor", "--config", config).err)

    def test_WrongInputIsAnErrorOfItsOwn(self):
        config = self.place.config()
        for arguments, words in ((["--probe-seconds", "0"], ["--probe-seconds"]),
                                 (["--ranks", "0", "--config", config], ["--ranks", "from 1 to 65536"]),
                                 (["--ranks", "--config", config], ["--ranks: has no number"]),
                                 (["--ranks", "2"], ["--ranks: 2 of them train by a configuration"]),
                                 (["--model", "x"], ["--model"]),
                                 (["--config", "/does/not/exist.json"], ["/does/not/exist.json"])):
            with self.subTest(arguments=arguments):
                run = spillway("doctor", *arguments)
                self.assertEqual("", run.out)
                self.assert_refused(Run(run.status, run.out, run.err), *words)


if __name__ == "__main__":
    main()
