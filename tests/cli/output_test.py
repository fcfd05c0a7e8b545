"""What commands say, and how they end: output that cannot be written, and too little memory, are no crash."""
import json
import os
import pathlib
import resource
import shutil
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from imports import Small  # noqa: E402
from manual_test import subcommands  # noqa: E402
from runs import BINARY, LIMIT_SECONDS, CliTest, Workplace, sha256_of_model, spillway  # noqa: E402


class Terminal(CliTest):
    def test_WhatAPathHoldsCommandsNoTerminal(self):
        model = self.place.folder / "m\x1b[2J\x9b\x7f"
        made = spillway("init-model", model, "--layers", 1, "--width", 8, "--heads", 2, "--vocab", 16)
        self.assert_done(made)
        self.assertIn("m?[2J??: a new GPT-2", made.out)
        self.assertIn("m?[2J??", self.assert_refused(spillway("init-model", model, "--layers", 1)))
        config = json.loads((model / "config.json").read_text())
        config["model_type"] = "\x1b]0;title\x07"
        (model / "config.json").write_text(json.dumps(config))
        run = self.place.finetune(self.place.config(), model)
        self.assert_refused(run)
        for text in (made.out, made.err, run.out, run.err):
            self.assertNotRegex(text, "[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LittleMemory(CliTest):
    def test_NoLimitOfAddressSpaceCrashesACommand(self):
        model, config, folder = self.place.init_model(), self.place.config(), self.place.folder
        run = Workplace.arguments(config, model)
        self.assert_done(spillway(*run))
        commands = ([*run, "--fresh"], ["init-model", folder / "new", "--layers", 1, "--width", 8, "--heads", 2,
                                        "--vocab", 16],
                    ["plan", "--config", config, "--model", model, "--seq", 32, "--no-probe"],
                    ["doctor", "--config", config, "--model", model, "--seq", 32, "--no-probe"],
                    ["store", self.place.nvme, "--verify"], ["export", self.place.nvme, folder / "exported"])
        least = next((mib for mib in range(16, 1024, 2) if self.limited(mib, "--version") == 0), None)
        if least is None:
            self.skipTest("this build needs more addresses: a sanitizer's")
        for command in commands:
            for mib in range(least, least + 60, 2):
                shutil.rmtree(folder / "new", ignore_errors=True)
                shutil.rmtree(folder / "exported", ignore_errors=True)
                with self.subTest(command=command[0], mib=mib):
                    self.assertIn(self.limited(mib, *command), (0, 1, 3, 4))

    @staticmethod
    def limited(mib, *command):
        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (mib << 20, mib << 20))

        return subprocess.run([BINARY, *map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                              preexec_fn=limit, timeout=LIMIT_SECONDS, check=False).returncode


class Unwritable(Small):
    """Every command, right and wrong."""

    def setUp(self):
        super().setUp()
        self.checkpoint = self.write(self.checkpoint())
        self.trained = self.place.init_model("trained")
        self.config = self.place.config()

    def commands(self):
        """What is typed, and what it would end with if its output were read."""
        folder, run = self.place.folder, Workplace.arguments(self.config, self.trained)
        return [(["--help"], 0), (["--version"], 0), (["no-command"], 1), (["finetune", "--help"], 0),
                (["finetune"], 1), (["manual"], 0), (["completion", "zsh"], 0),
                (["init-model", folder / "new", "--layers", 1, "--width", 8, "--heads", 2, "--vocab", 16], 0),
                (["init-model", folder / "odd", "--width", 10, "--heads", 3], 1),
                (run, 0), (run, 1), ([*run, "--fresh", "--out", folder / "out", "--log", folder / "steps.jsonl"], 0),
                (["report", folder / "steps.jsonl"], 0), (["report", folder / "none"], 1),
                (["store", self.place.nvme], 0), (["store", self.place.nvme, "--verify"], 0),
                (["store", self.place.nvme, "--json"], 0), (["store", folder / "none"], 1),
                (["export", self.place.nvme, folder / "exported"], 0), (["export", folder / "none", folder / "e"], 1),
                (["import", self.checkpoint, "--model", self.model, "--out", folder / "imported"], 0),
                (["import", folder / "none", "--model", self.model, "--out", folder / "i"], 1),
                (["config", self.config], 0), (["config", "--schema"], 0), (["config", folder / "none"], 1),
                (["plan", "--params", "1B", "--config", self.config, "--no-probe"], None),
                (["plan", "--params", "none"], 1),
                (["doctor", "--no-probe", self.place.nvme], None), (["doctor", "--config", folder / "none"], 1),
                (["generate", "--model", self.trained, "--ids", "--prompt", "1 2", "--tokens", 2], 0),
                (["generate", "--model", folder / "none", "--prompt", "x"], 1),
                (["sweep", folder, "--seconds", 1, "--size", "16MiB", "--allow-buffered"], 0),
                (["sweep", folder / "none"], 1)]

    def check(self, **streams):
        typed = {str(words[0]) for words, _ in self.commands()}
        self.assertLessEqual(set(subcommands()), typed, "a command without its place in this test")
        for words, status in self.commands():
            with self.subTest(words=words):
                done = subprocess.run([BINARY, *map(str, words)], timeout=LIMIT_SECONDS, check=False, **streams)
                # Success that nobody was told of is none; the doctor's other codes stay.
                wanted = (1, 3, 4) if status is None else (1,)
                self.assertIn(done.returncode, wanted)
        self.assertTrue((self.place.folder / "out" / "model.safetensors").exists())
        exported = self.place.folder / "again"
        self.assertEqual(0, spillway("export", self.place.nvme, exported).status)
        self.assertEqual(sha256_of_model(self.place.folder / "out"), sha256_of_model(exported))
        self.assertEqual([], [p.name for p in self.place.folder.rglob("*.partial*")])

    def test_AFullDiskUnderBothStreamsIsNoCrash(self):
        with open("/dev/full", "w", encoding="utf-8") as full:
            self.check(stdout=full, stderr=full)

    def test_ClosedStreamsAreNoCrashAndNoFileTakesTheirPlace(self):
        def close_all():
            for number in range(3):
                os.close(number)

        self.check(preexec_fn=close_all)


if __name__ == "__main__":
    main()
