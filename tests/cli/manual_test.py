"""What the program says about itself: the manual page, the examples, the completion scripts, the version."""
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import spillway  # noqa: E402


def subcommands():
    listed = spillway("--help").out.partition("Subcommands:\n")[2].partition("\n\n")[0]
    return re.findall(r"^  ([a-z]+(?:-[a-z]+)*) ", listed, re.MULTILINE)


def options_of(command):
    lines = re.findall(r"^  (?:-\w,)?(--[a-z].*)$", spillway(command, "--help").out, re.MULTILINE)
    return {name for line in lines for name in re.findall(r"--[a-z][a-z0-9-]*", line.split()[0])}


class Manual(unittest.TestCase):
    PATHS = {"finetune": {"--config", "--aio", "--model", "--data", "--out", "--log", "--trace", "--save", "--load",
                          "--eval-data", "--best", "--adapter"},
             "generate": {"--model", "--with", "--config", "--prompt-file", "--tokenizer", "--store", "--log",
                          "--trace", "--adapter"},
             "init-model": {"--from"}, "sweep": {"--json", "--report"}, "report": {"--html"},
             "others": {"--config", "--aio", "--model", "--out", "--with", "--report", "--nvme"}}

    def test_EveryHelpShowsAnExampleWithOptionsThatThereAre(self):
        self.assertIn("finetune", subcommands())
        for command in subcommands():
            with self.subTest(command=command):
                shown = spillway(command, "--help")
                self.assertEqual((0, ""), (shown.status, shown.err))
                examples = re.findall(rf"^  (?:\S.*[ (])?spillway {command}\b(.*)$",
                                      shown.out.partition("Example:\n")[2], re.MULTILINE)
                self.assertTrue(examples)
                for example in examples:
                    named = {word for word in example.split() if word.startswith("--")}
                    self.assertLessEqual(named, options_of(command))

    def test_TheManualPageHasEverySubcommandAndOption(self):
        page = spillway("manual")
        self.assertEqual((0, ""), (page.status, page.err))
        plain = page.out.replace("\\-", "-")
        for command in subcommands():
            section = plain.partition(f".SS spillway {command}\n")[2].partition(".SS ")[0]
            for option in options_of(command) - {"--help"}:
                with self.subTest(command=command, option=option):
                    self.assertRegex(section, rf"\.TP\n\\fB{option}\\fR")
                    path = f"\\fB{option}\\fR \\fIPATH" in section
                    self.assertEqual(option in self.PATHS.get(command, self.PATHS["others"]), path)
        for status in ("130 ended by Ctrl-C", "143 by SIGTERM", "3 the doctor"):
            self.assertIn(status, plain)

    @unittest.skipUnless(shutil.which("groff"), "groff is not installed")
    def test_TheManualPageIsSetWithoutAWarning(self):
        done = subprocess.run(["groff", "-man", "-ww", "-Tutf8", "-z"], input=spillway("manual").out,
                              capture_output=True, text=True, check=False)
        self.assertEqual((0, ""), (done.returncode, done.stderr))

    def test_TheVersionSaysWhatTheBuildHas(self):
        version = spillway("--version")
        self.assertEqual((0, ""), (version.status, version.err))
        self.assertRegex(version.out, r"^spillway \d+\.\d+\.\d+\n")
        for fact in ("io_uring (liburing ", "devices    host; ", "oneTBB ", "built      by "):
            self.assertIn(fact, version.out)


class Completion(unittest.TestCase):
    CASES = ((("fin",), {"finetune"}), (("",), set(subcommands()) | {"--help", "--version"}),
             (("finetune", "--da"), {"--data"}), (("export", "a", "b", "--dtype", ""), {"fp32", "bf16", "fp16"}),
             (("export", "--dtype", "b"), {"bf16"}), (("finetune", "--steps", ""), set()),
             (("finetune", "--resume", "--fr"), {"--fresh"}), (("completion", "z"), {"zsh"}),
             (("store", "/"), set()), (("plan", "--no-p"), {"--no-probe"}),
             (("plan", "--device", ""), {"host", "cuda"}), (("plan", "--params", ""), set()))

    def test_BashOffersSubcommandsOptionsAndValues(self):
        script = spillway("completion", "bash").out
        for words, wanted in self.CASES:
            line = " ".join(shlex.quote(word) for word in ("spillway", *words))
            # compopt is for a shell that is completing.
            asked = (f"compopt() {{ :; }}\n{script}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words)}\n_spillway\n"
                     'printf "%s\\n" "${COMPREPLY[@]}"\n')
            with self.subTest(words=words):
                done = subprocess.run(["bash", "--norc", "-c", asked], capture_output=True, text=True, check=True)
                self.assertEqual(("", wanted), (done.stderr, set(done.stdout.split())))

    @unittest.skipUnless(shutil.which("fish"), "fish is not installed")
    def test_FishOffersThem(self):
        script = spillway("completion", "fish").out
        for words, wanted in self.CASES:
            if not words[-1] or wanted == set():
                continue  # fish adds files, and what else it knows
            line = shlex.quote(" ".join(("spillway", *words)))
            with self.subTest(words=words):
                done = subprocess.run(["fish", "--no-config", "-c", f"{script}\ncomplete -C {line}"],
                                      capture_output=True, text=True, check=True)
                self.assertEqual(("", wanted), (done.stderr, {row.split("\t")[0] for row in done.stdout.splitlines()}))

    @unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
    def test_ZshReadsItsScript(self):
        done = subprocess.run(["zsh", "-n"], input=spillway("completion", "zsh").out, capture_output=True, text=True,
                              check=False)
        self.assertEqual((0, ""), (done.returncode, done.stderr))

    def test_AnotherShellIsRefused(self):
        refused = spillway("completion", "csh")
        self.assertEqual((1, ""), (refused.status, refused.out))
        self.assertIn("bash", refused.err)


if __name__ == "__main__":
    main()
