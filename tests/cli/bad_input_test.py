"""Wrong input of every kind: exit code 1, one clear line, nothing lost."""
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import (BINARY, TEXT, CliTest, Run, Workplace, hinted_budget, mounted, sha256_of_model,  # noqa: E402
                  spillway)

STORE = "spillway.store"


class Configuration(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def refused(self, config, *words, **options):
        line = self.assert_refused(self.place.finetune(config, self.model, **options), *words)
        self.assertEqual([], self.place.stored_files(), "a refused run must not leave a store")
        return line

    def test_MisspelledKeyIsNamedWithItsPlaceAndTheRightOne(self):
        config = self.place.config()
        config.write_text(config.read_text().replace('"gradient_clipping"', '"gradient_cliping"'))
        line = next(n for n, text in enumerate(config.read_text().splitlines(), 1) if "cliping" in text)
        self.refused(config, f"{config}:{line}:", "gradient_cliping", "gradient_clipping")

    def test_MisspelledKeyOfTheSpillwaySectionIsNamed(self):
        self.refused(self.place.config(spillway_section={"hbm_byte": 1 << 30}), "hbm_byte", "hbm_bytes")

    def test_WrongTypeIsNamed(self):
        self.refused(self.place.config(gradient_clipping="much"), "gradient_clipping")

    def test_ConfigThatIsNotJsonIsRefusedWithItsPlace(self):
        config = self.place.config()
        config.write_text('{\n  "bf16": {"enabled": tru}\n}\n')
        self.refused(config, f"{config}:2:")

    def test_APluginThatCannotBeOpenedIsNamedWithTheReason(self):
        program = self.place.folder / "spillway"
        shutil.copy(BINARY, program)
        plugin = self.place.folder / "libspillway_cuda.so"
        plugin.write_text("no library")
        config = self.place.config(spillway_section={"device": "cuda"})
        done = subprocess.run([program, *self.place.arguments(config, self.model)], capture_output=True, text=True,
                              check=False)
        self.assertEqual(1, done.returncode, done.stderr)
        self.assertRegex(done.stderr, rf"spillway\.device: .*{plugin}: ")

    def test_MissingConfigIsRefused(self):
        self.refused(self.place.folder / "absent.json", "absent.json", "No such file")

    def test_BudgetTooSmallNamesTheOneThatFits(self):
        for key in ("hbm_bytes", "host_bytes"):
            with self.subTest(key=key):
                line = self.refused(self.place.config(spillway_section={key: 65536}), key)
                self.assertIsNotNone(hinted_budget(line), line)

    def test_NvmeBudgetTooSmallNamesTheOneThatFits(self):
        line = self.refused(self.place.config(spillway_section={"nvme_bytes": 1 << 20}), "nvme_bytes")
        key, value = hinted_budget(line)
        self.assertEqual("nvme_bytes", key)
        self.assert_done(self.place.finetune(self.place.config(spillway_section={"nvme_bytes": value}), self.model))


class Arguments(CliTest):
    def refused(self, *arguments, words):
        run = spillway(*arguments)
        self.assert_refused(run, *words)
        self.assertEqual(1, len(run.err.splitlines()), run.err)

    def test_WrongArgumentsAreNamedInOneLine(self):
        self.refused(words=["subcommand"])
        self.refused("finetun", "--config", "c", words=["finetun: is no subcommand", "the closest is finetune"])
        self.refused("xyzzy", words=["xyzzy: is no subcommand; --help lists all of them"])
        self.refused("finetune", words=["--config", "required"])
        config = ["finetune", "--config", "c", "--model", "m", "--data", "d", "--steps"]
        self.refused(*config, "3", "--resume", "--fresh", words=["--resume", "--fresh"])
        self.refused(*config, "0", words=["--steps", "0"])
        self.refused("finetune", "--config", "", *config[3:], "3", words=['"": cannot be opened (No such file'])
        self.refused(*config, "many", words=["--steps", "many"])
        self.refused("init-model", self.place.folder / "odd", "--width", "70", "--heads", "4", words=["--width"])
        self.refused("doctor", "--probe-seconds", "nan", words=["--probe-seconds: nan is not a number from 0.1 to"])
        for option, value in (("seed", "-1"), ("seed", str(1 << 64)), ("seed", "9" * 23), ("layers", "0x2"),
                              ("layers", "1.5"), ("layers", str(1 << 32 | 1))):
            self.refused("init-model", self.place.folder / "odd", f"--{option}", value,
                         words=[f"--{option}: {value} is not a whole number from"])

    def test_ZerosInFrontOfANumberAreNoOctalOnes(self):
        made = spillway("init-model", self.place.folder / "ten", "--layers", "010", "--width", "8", "--heads", "1",
                        "--vocab", "10", "--context", "8", "--seed", str((1 << 64) - 1))
        self.assert_done(made)
        self.assertIn("10 layers of width 8", made.out)

    def test_OutputThatCannotBeWrittenIsNoSuccess(self):
        for arguments in (["--help"], ["manual"], ["plan", "--help"]):
            with open("/dev/full", "w", encoding="utf-8") as full:
                run = subprocess.run([BINARY, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            self.assertEqual((1, "spillway: standard output: not all of it could be written (No space left on device); "
                              "send it elsewhere\n"), (run.returncode, run.stderr), arguments)


class Inputs(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.config = self.place.config()

    def refused(self, *words, **options):
        line = self.assert_refused(self.place.finetune(self.config, self.model, **options), *words)
        self.assertEqual([], self.place.stored_files(), "a refused run must not leave a store")
        return line

    def data(self, name, content):
        path = self.place.folder / name
        path.write_bytes(content)
        return path

    def test_AnotherArchitectureIsRefused(self):
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "t5",
                                    "architectures": ["T5ForConditionalGeneration"]}))
        self.refused("config.json", "t5")

    def test_EmptyDataIsRefused(self):
        self.refused("empty.txt", data=self.data("empty.txt", b""))

    def test_DataShorterThanARowIsRefused(self):
        self.refused("short.txt", data=self.data("short.txt", b"x" * 32))

    def test_MissingDataIsRefused(self):
        self.refused("absent.txt", "No such file", data=self.place.folder / "absent.txt")

    def test_TokenBeyondTheVocabularyIsNamedWithItsOffset(self):
        tokens = [7] * 400
        tokens[37] = 256
        self.refused("tokens.bin", "256", "74", data=self.data("tokens.bin", struct.pack("<400H", *tokens)))

    def test_SequenceLongerThanTheContextIsRefused(self):
        self.refused("seq", seq=65)

    def test_TruncatedWeightsAreNamed(self):
        weights = self.model / "model.safetensors"
        os.truncate(weights, weights.stat().st_size - 4)
        self.refused("model.safetensors")

    def test_MissingTensorIsNamed(self):
        self.edit_header(lambda header: header.__setitem__(
            "h.0.mlp.c_fc.bias_", header.pop(next(n for n in header if n.endswith("h.0.mlp.c_fc.bias")))))
        self.refused("model.safetensors", "h.0.mlp.c_fc.bias")

    def test_WronglyShapedTensorIsNamed(self):
        def change(header):
            name = next(n for n in header if n.endswith("h.1.attn.c_attn.weight"))
            header[name]["shape"].reverse()
        self.edit_header(change)
        self.refused("model.safetensors", "h.1.attn.c_attn.weight")

    def test_AWeightThatIsNotFiniteIsNamedBeforeTheStoreThatIsThere(self):
        weights, config = self.model / "model.safetensors", self.place.config()
        self.assert_done(self.place.finetune(config, self.model, steps=1))
        content = bytearray(weights.read_bytes())
        length = struct.unpack_from("<Q", content)[0]
        header = json.loads(content[8:8 + length])
        name = next(n for n in header if n.endswith("h.1.mlp.c_fc.bias"))
        struct.pack_into("<f", content, 8 + length + header[name]["data_offsets"][0] + 4 * 3, float("nan"))
        weights.write_bytes(content)
        for dtype in ("fp32", "bf16", "fp16"):
            self.assert_refused(self.place.finetune(self.place.config(dtype=dtype), self.model, fresh=True),
                                f"{weights}: tensor {name} holds NaN at index 3, before any training")
        self.assertIn("step      1, with", spillway("store", self.place.nvme).out)

    def test_HugeHeaderIsRefused(self):
        with open(self.model / "model.safetensors", "r+b") as file:
            file.write(struct.pack("<Q", 1 << 62))
        self.refused("model.safetensors")

    def edit_header(self, change):
        """Rewrites the JSON header of model.safetensors: 8 bytes of length, the header, the tensors."""
        path = self.model / "model.safetensors"
        content = path.read_bytes()
        length = struct.unpack_from("<Q", content)[0]
        header = json.loads(content[8:8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length:])


class Stores(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()

    def start(self, config=None, **options):
        self.assert_done(self.place.finetune(config or self.place.config(), self.model, **options))

    def assert_resumes(self, config=None, steps=5):
        """The store of a run to step 3 still holds it, bit for bit: the run continues like one never disturbed."""
        config = config or self.place.config()
        out = self.place.folder / "resumed"
        self.assert_done(self.place.finetune(config, self.model, steps=steps, out=out, resume=True))
        other = Workplace(self.place.folder / "undisturbed")
        self.assert_done(other.finetune(other.config(), self.model, steps=steps, out=other.folder / "out"))
        self.assertEqual(sha256_of_model(other.folder / "out"), sha256_of_model(out))

    def test_ExistingStoreIsRefusedWithoutResumeOrFresh(self):
        self.start()
        line = self.assert_refused(self.place.finetune(self.place.config(), self.model, steps=5), self.place.nvme)
        self.assertIn("a store exists; go on with --resume, or start over with --fresh", line)
        self.assert_resumes()

    def test_ResumeWithoutAStoreIsRefused(self):
        self.assert_refused(self.place.finetune(self.place.config(), self.model, resume=True), self.place.nvme)

    def test_StoreOfAnotherModelIsRefused(self):
        self.start()
        other = self.place.init_model("other", width=80)
        self.assert_refused(self.place.finetune(self.place.config(), other, resume=True, steps=5), self.place.nvme)
        self.assert_resumes()

    def test_AModelThatComputesOtherThingsWithTheSameTensorsIsRefused(self):
        self.start(save=self.place.folder / "saved", every=3)
        for key, value in (("n_head", 2), ("layer_norm_epsilon", 0.5)):
            other = self.place.folder / f"other-{key}"
            shutil.copytree(self.model, other)
            described = json.loads((other / "config.json").read_text())
            self.assertNotEqual(value, described[key])
            (other / "config.json").write_text(json.dumps({**described, key: value}))
            for how in ({"resume": True}, {"load": self.place.folder / "saved", "fresh": True}):
                self.assert_refused(self.place.finetune(self.place.config(), other, steps=5, **how),
                                    f"--model: has {key} {value}, that in ", f"has {described[key]}")
        self.assert_resumes()

    def test_StoreInUseIsRefused(self):
        config = self.place.config()
        command = [BINARY, *Workplace.arguments(config, self.model, steps=1_000_000, log=self.place.log)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as holder:
            try:
                self.wait_for_step(holder, 1)
                # Stopped it holds the store as well, and does not make thousands of steps meanwhile, which
                # assert_resumes would repeat. Each of the others waits for some seconds, in case it has just died.
                holder.send_signal(signal.SIGSTOP)
                hows = ("resume", "fresh")
                with concurrent.futures.ThreadPoolExecutor() as pool:
                    runs = list(pool.map(lambda how: self.place.finetune(config, self.model, steps=2_000_000,
                                                                         **{how: True}), hows))
                for how, refused in zip(hows, runs):
                    with self.subTest(how=how):
                        self.assert_refused(refused, self.place.nvme, "use", "wait for it to end")
                done = self.logged()
                holder.send_signal(signal.SIGCONT)
                self.wait_for_step(holder, done + 1)
            finally:
                holder.send_signal(signal.SIGCONT)
                holder.send_signal(signal.SIGINT)
            self.assertEqual(130, holder.wait(60))
        last = self.place.steps()[-1]["step"]
        self.assert_resumes(config, steps=last + 2)

    def logged(self):
        return self.place.log.read_text().count("\n") if self.place.log.exists() else 0

    def wait_for_step(self, holder, step):
        deadline = time.monotonic() + 60
        while self.logged() < step:
            self.assertIsNone(holder.poll(), "the run that holds the store ended")
            self.assertLess(time.monotonic(), deadline, f"step {step} was not logged within a minute")
            time.sleep(0.05)

    def test_UnwritablePathIsRefused(self):
        if os.geteuid() == 0:  # root writes anywhere but where nobody can
            with mounted(self, "tmpfs", 64 << 20) as folder:
                subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
                refused = self.place.finetune(self.place.config(nvme=folder), self.model)
                self.assert_refused(refused, folder, "Read-only file system")
        else:
            self.place.nvme.chmod(0o500)
            refused = self.place.finetune(self.place.config(), self.model)
            self.assert_refused(refused, self.place.nvme, "Permission denied")

    def test_DirectoryOfAnotherUserIsRefused(self):
        if os.geteuid() != 0:
            self.skipTest("root is needed to become another user")
        with mounted(self, "tmpfs", 256 << 20) as folder:  # not every user reaches the build, nor is it small
            binary, data = shutil.copy(BINARY, folder), shutil.copy(TEXT, folder)
            model = shutil.copytree(self.model, folder / "model")
            config = shutil.copy(self.place.config(nvme=folder), folder)
            folder.chmod(0o755)
            command = [binary, *Workplace.arguments(config, model, data=data)]
            done = subprocess.run(command, user="nobody", capture_output=True, text=True, check=False, timeout=60)
            line = self.assert_refused(Run(done.returncode, done.stdout, done.stderr), folder, "Permission denied")
            self.assertIn("permissions", line)
            self.assertFalse((folder / STORE).exists())
            # What one may not look into may hold a store and snapshots.
            private = folder / "private"
            private.mkdir(0o700)
            config, store = shutil.copy(self.place.config(parameters="cpu", states="cpu"), folder / "no_store"), \
                shutil.copy(self.place.config(nvme=private), folder)
            for arguments in (["store", private], ["export", private, folder / "exported"],
                              Workplace.arguments(store, model, data=data, resume=True),
                              Workplace.arguments(config, model, data=data, load=private)):
                done = subprocess.run([binary, *arguments], user="nobody", capture_output=True, text=True, check=False)
                self.assert_refused(Run(done.returncode, done.stdout, done.stderr),
                                    f"{private}: cannot be looked into (Permission denied)")

    def test_SymbolicLinkInPlaceOfAStoreIsNotFollowed(self):
        target = self.place.folder / "precious"
        target.write_text("not a store\n")
        (self.place.nvme / STORE).symlink_to(target)
        for how in ({}, {"resume": True}, {"fresh": True}):
            with self.subTest(**how):
                refused = self.place.finetune(self.place.config(), self.model, **how)
                words = ["a symbolic link, which is not followed here"] if how else []
                self.assert_refused(refused, self.place.nvme / STORE, *words)
        self.assertEqual("not a store\n", target.read_text())

    def test_StoreThatWasCutShortIsRefused(self):
        self.start()
        os.truncate(self.place.nvme / STORE, 1_000_000)
        self.assert_refused(self.place.finetune(self.place.config(), self.model, resume=True, steps=5),
                            self.place.nvme / STORE, "cut short", "1000000 bytes")

    def test_ResumeWithAnotherRowLengthIsRefused(self):
        self.start()
        self.assert_refused(self.place.finetune(self.place.config(), self.model, resume=True, steps=5, seq=16), "--seq")
        self.assert_resumes()

    def test_StepsBelowTheStoresOwnChangeNothing(self):
        self.start()
        run = self.place.finetune(self.place.config(), self.model, resume=True, steps=2)
        self.assert_done(run)
        self.assertIn("step 3 is done already", run.out)
        self.assert_resumes()

    def test_OutThatCannotBeMadeIsRefusedBeforeTheFirstStep(self):
        path = self.place.folder / "file"
        path.write_text("in the way\n")
        run = self.place.finetune(self.place.config(), self.model, out=path / "out", log=self.place.log)
        self.assert_refused(run, path / "out", "Not a directory")
        link = self.place.folder / "link"
        link.symlink_to("nowhere")
        for out in (link, f"{link}/"):
            run = self.place.finetune(self.place.config(), self.model, out=out, log=self.place.log)
            self.assert_refused(run, "--out: is a link to what is not there; make that directory")
        name_max = os.pathconf(self.place.folder, "PC_NAME_MAX")
        out = self.place.folder / ("x" * (name_max - len("..partial") + 1))  # which it is written under
        run = self.place.finetune(self.place.config(), self.model, out=out, log=self.place.log)
        self.assert_refused(run, out, "cannot take the trained model (File name too long)")
        self.assertEqual([], self.place.stored_files())
        out = self.place.folder / out.name[1:]
        self.assert_done(self.place.finetune(self.place.config(), self.model, out=out))
        self.assertTrue((out / "model.safetensors").exists())

    def test_TraceThatCannotBeWrittenIsRefusedBeforeThereIsAStore(self):
        for path, why in ((self.place.folder / "none" / "trace.json", "No such file or directory"),
                          (self.place.folder, "Is a directory")):
            with self.subTest(why):
                refused = self.place.finetune(self.place.config(), self.model, trace=path)
                self.assert_refused(refused, f"{path}: cannot be opened for the trace", why)
                self.assertEqual([], self.place.stored_files())

    def test_ATraceOrALogReplacesNothingElse(self):
        config, new = self.place.config(), self.place.folder / "new"
        for file in (self.model / "config.json", config):
            for option in ("trace", "log"):
                with self.subTest(file=file.name, option=option):
                    before = file.read_bytes()
                    run = self.place.finetune(config, self.model, **{option: file})
                    self.assert_refused(run, file, f"no {option}")
                    self.assertEqual(before, file.read_bytes())
        self.assert_refused(self.place.finetune(config, self.model, log=new, trace=new), "--trace", "--log")
        self.assertFalse(new.exists())
        self.assertEqual([], self.place.stored_files())
        for _ in range(2):  # what an earlier run wrote gets more, or is replaced
            self.assert_done(self.place.finetune(config, self.model, log=self.place.log, trace=new, fresh=True))
        self.assertEqual(6, len(self.place.steps()))

    def test_TraceThatFindsNoRoomCostsNoStep(self):
        with mounted(self, "tmpfs", 16 << 10) as folder:
            trace, out = folder / "trace.json", self.place.folder / "out"
            run = self.place.finetune(self.place.config(), self.model, trace=trace, out=out)
            self.assert_done(run)
            self.assertRegex(run.err, f"{trace}: the trace cannot be written.*No space left on device")
        self.assert_resumes()

    def test_PathThatIsAFileIsRefused(self):
        path = self.place.folder / "file"
        path.write_text("not a directory\n")
        self.assert_refused(self.place.finetune(self.place.config(nvme=path), self.model), path)
        self.assertEqual("not a directory\n", path.read_text())

    def check_full_file_system(self, kind):
        # The model's store takes 24 B × 215 Ki parameters, about 5 MB and what it rounds up to.
        with mounted(self, kind, 4 << 20) as folder:
            config = self.place.config(nvme=folder)
            before = {p.name for p in folder.iterdir()}
            self.assert_refused(self.place.finetune(config, self.model), folder, "No space left on device")
            self.assertEqual(before, {p.name for p in folder.iterdir()}, "a failed create leaves nothing to clean")

    def test_FullTmpfsIsRefusedBeforeTheRun(self):
        self.check_full_file_system("tmpfs")

    def test_FullExt4IsRefusedBeforeTheRun(self):
        if not shutil.which("mkfs.ext4"):
            self.skipTest("mkfs.ext4 is not installed")
        self.check_full_file_system("ext4")

    def test_OutOnAFullFileSystemIsRefusedBeforeTheRunAndLosesNothing(self):
        self.start()
        with mounted(self, "tmpfs", 256 << 10) as folder:
            out = folder / "out"
            refused = self.place.finetune(self.place.config(), self.model, steps=4, out=out, resume=True)
            self.assert_refused(refused, out, "No space left on device")
            self.assertNotIn("step 4", refused.out)
            self.assertEqual([], list(folder.iterdir()))
        self.assert_resumes()

    def test_ExportOfAStoreEqualsTheRunsOwn(self):
        out, exported = self.place.folder / "out", self.place.folder / "exported"
        self.start(out=out)
        self.assert_done(spillway("export", self.place.nvme, exported))
        self.assertEqual(sha256_of_model(out), sha256_of_model(exported))

    def test_ExportOfNoStoreIsRefused(self):
        self.assert_refused(spillway("export", self.place.nvme, self.place.folder / "exported"), self.place.nvme)


if __name__ == "__main__":
    main()
