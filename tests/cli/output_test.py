"""Output that cannot be written: no command dies of it, and its exit code tells."""
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from imports import Small  # noqa: E402
from manual_test import subcommands  # noqa: E402
from runs import BINARY, LIMIT_SECONDS, Workplace, sha256_of_model, spillway  # noqa: E402


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
                (run, 0), (run, 1), ([*run, "--fresh", "--out", folder / "out"], 0),
                (["store", self.place.nvme], 0), (["store", self.place.nvme, "--verify"], 0),
                (["store", self.place.nvme, "--json"], 0), (["store", folder / "none"], 1),
                (["export", self.place.nvme, folder / "exported"], 0), (["export", folder / "none", folder / "e"], 1),
                (["import", self.checkpoint, "--model", self.model, "--out", folder / "imported"], 0),
                (["import", folder / "none", "--model", self.model, "--out", folder / "i"], 1),
                (["config", self.config], 0), (["config", "--schema"], 0), (["config", folder / "none"], 1),
                (["plan", "--params", "1B", "--config", self.config, "--no-probe"], None),
                (["plan", "--params", "none"], 1),
                (["doctor", "--no-probe", self.place.nvme], None), (["doctor", "--config", folder / "none"], 1),
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
