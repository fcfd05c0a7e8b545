"""A run that is stopped, gently or not, goes on with `--resume` and ends with the bits of a run that never stopped."""
import fcntl
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
import runs  # noqa: E402
from runs import BINARY, CRASH, CliTest, Workplace, sha256_of_model  # noqa: E402
from seed import test_seed  # noqa: E402

STEPS = 12


def heeds_hangup():
    """What a shell starts does, whatever started this test."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def read_until_logged(terminal, log):
    """Reads what a run writes to its terminal until it has logged a step."""
    while not log.exists() or not log.read_text():
        os.read(terminal, 1 << 16)


class Stop(CliTest):
    def setUp(self):
        super().setUp()
        self.model = self.place.init_model()
        self.config = self.place.config()
        whole = Workplace(self.place.folder / "whole")
        self.assert_done(whole.finetune(whole.config(), self.model, steps=STEPS, out=whole.folder / "out"))
        self.wanted = sha256_of_model(whole.folder / "out")

    def logged(self):
        return len(self.place.log.read_text().splitlines()) if self.place.log.exists() else 0

    def start(self, steps, **how):
        command = [BINARY, *Workplace.arguments(self.config, self.model, steps=steps, log=self.place.log, **how)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                preexec_fn=heeds_hangup)

    def wait_for_lines(self, run, lines):
        deadline = time.monotonic() + 60
        while True:
            ended = run.poll() is not None  # before the look at the log, which it may complete as it ends
            if self.logged() >= lines:
                return
            if ended:
                self.fail(f"the run ended before it was stopped:\n{run.communicate()[1]}")
            self.assertLess(time.monotonic(), deadline, f"no {lines} steps within a minute")
            time.sleep(0.002)

    def assert_ends_with_the_same_bits(self):
        out = self.place.folder / "out"
        self.assert_done(self.place.finetune(self.config, self.model, steps=STEPS, out=out, resume=True))
        self.assertEqual(self.wanted, sha256_of_model(out))

    def test_CtrlCEndsAfterTheStepAndResumeGivesTheSameBits(self):
        self.check_ends_after_the_step(signal.SIGINT, 130)

    def test_SigtermEndsAfterTheStepAndResumeGivesTheSameBits(self):
        self.check_ends_after_the_step(signal.SIGTERM, 143)

    def test_SighupEndsAfterTheStepAndResumeGivesTheSameBits(self):
        self.check_ends_after_the_step(signal.SIGHUP, 129)

    def test_AClosedTerminalEndsARunThatKeepsItsModel(self):
        out = self.place.folder / "out"
        for store in (False, True):
            with self.subTest(store=store):
                self.place.log.unlink(missing_ok=True)
                self.config = self.place.config() if store else self.place.config(parameters="none", states="none")
                terminal, end = os.openpty()
                command = Workplace.arguments(self.config, self.model, steps=1_000_000, log=self.place.log,
                                              out=None if store else out)

                def take_terminal(end=end):
                    heeds_hangup()
                    fcntl.ioctl(end, termios.TIOCSCTTY, 0)

                with subprocess.Popen([BINARY, *command], stdin=end, stdout=end, stderr=end, start_new_session=True,
                                      preexec_fn=take_terminal) as run:
                    os.close(end)
                    # A terminal that nobody reads takes only so much.
                    reader = threading.Thread(target=read_until_logged, args=(terminal, self.place.log), daemon=True)
                    reader.start()
                    self.wait_for_lines(run, 1)
                    reader.join()
                    os.close(terminal)
                    run.wait(timeout=60)
                self.assertEqual(129, run.returncode)
                done = self.place.steps()[-1]["step"]
                if store:
                    resumed = self.place.folder / "resumed.jsonl"
                    self.assert_done(self.place.finetune(self.config, self.model, steps=done + 1, resume=True,
                                                         log=resumed))
                    self.assertEqual([done + 1], [step["step"] for step in self.place.steps(resumed)])
                else:
                    wanted = self.place.folder / "wanted"
                    self.assert_done(self.place.finetune(self.config, self.model, steps=done, out=wanted))
                    self.assertEqual(sha256_of_model(wanted), sha256_of_model(out))

    def test_HangupMayComeAgainAndMayBeIgnored(self):
        # The shell and the kernel both send one when a terminal is closed.
        out = self.place.folder / "out"
        with self.start(steps=1_000_000, out=out) as run:
            self.wait_for_lines(run, 1)
            for _ in range(20):
                run.send_signal(signal.SIGHUP)
                time.sleep(0.001)
            printed, err = run.communicate(timeout=60)
        self.assertEqual(129, run.returncode, err)
        self.assertIn("stopped after step", printed)
        command = ["nohup", BINARY, *Workplace.arguments(self.config, self.model, steps=STEPS, log=self.place.log,
                                                         fresh=True)]
        self.place.log.unlink()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                              text=True) as run:
            self.wait_for_lines(run, 1)
            run.send_signal(signal.SIGHUP)
            printed, err = run.communicate(timeout=60)
        self.assertEqual((0, STEPS), (run.returncode, self.logged()), err)

    def test_AReaderThatHasGoneEndsARunThatKeepsItsModel(self):
        # Ctrl-C at `spillway finetune … | tee log` ends tee at once.
        out = self.place.folder / "out"
        for first, code in ((None, 141), (signal.SIGINT, 130)):
            with self.subTest(first=first):
                self.place.log.unlink(missing_ok=True)
                self.config = self.place.config(parameters="none", states="none")
                with self.start(steps=1_000_000, out=out) as run:
                    self.wait_for_lines(run, 1)
                    err = ""
                    if first:
                        run.send_signal(first)
                        while "ending after this step" not in err:  # it has seen the signal
                            err += run.stderr.readline() or self.fail(err)
                    run.stdout.close()
                    err += run.stderr.read()
                    run.wait(timeout=60)
                self.assertEqual(code, run.returncode, err)
                done = self.place.steps()[-1]["step"]
                wanted = self.place.folder / f"wanted-{code}"
                self.assert_done(self.place.finetune(self.config, self.model, steps=done, out=wanted))
                self.assertEqual(sha256_of_model(wanted), sha256_of_model(out))

    def test_OtherDataThanBeforeIsSaid(self):
        data = self.place.folder / "data.txt"
        data.write_bytes(runs.TEXT.read_bytes())
        saved = self.place.folder / "saved"
        self.assert_done(self.place.finetune(self.config, self.model, data=data, steps=1, save=saved, every=1))
        same = self.place.finetune(self.config, self.model, data=data, steps=2, resume=True)
        self.assert_done(same)
        self.assertNotIn("is other data", same.err)
        data.write_bytes(runs.TEXT.read_bytes()[:-1])
        mark = r"\d+ bytes, [0-9a-f]{16}"
        said = rf"spillway: {data}: is other data than before \({mark}; it was {mark}\)"
        for how in ({"load": saved, "fresh": True}, {"resume": True}):
            steps = 2 if "load" in how else 3
            other = self.place.finetune(self.config, self.model, data=data, steps=steps, **how)
            self.assert_done(other)
            self.assertEqual("load" in how, re.search(said, other.err) is not None, other.err)

    def stop(self, how, code, **options):
        """The last step that was done, and what the run said it left."""
        self.place.log.unlink(missing_ok=True)
        # Far more steps than the run will get to: it ends because of the signal or not at all.
        with self.start(steps=1_000_000, **options) as run:
            self.wait_for_lines(run, 1)
            run.send_signal(how)
            out, err = run.communicate(timeout=60)
        self.assertEqual(code, run.returncode, err)
        self.assertIsNone(CRASH.search(out + err), err)
        done = self.place.steps()[-1]["step"]
        self.assertIn(f"stopped after step {done}; ", out)
        return done, out.splitlines()[-1].partition("; ")[2]

    def test_WithoutAStoreItKeepsWhatItWasAskedToKeep(self):
        saved, out = self.place.folder / "saved", self.place.folder / "out"
        for store in (False, True):
            with self.subTest(store=store):
                self.config = self.place.config(spillway_section={"commit_every": 0}) if store else \
                    self.place.config(parameters="none", states="none")
                more = {"fresh": True}
                done, kept = self.stop(signal.SIGINT, 130, save=saved, every=1_000_000, out=out, **more)
                snapshot = saved / f"step-{done:06}"
                self.assertEqual(f"--load {snapshot} continues", kept)
                self.assertFalse(out.exists())
                resumed = self.place.folder / f"resumed-{store}.jsonl"
                self.assert_done(self.place.finetune(self.config, self.model, steps=done + 1, load=snapshot,
                                                     log=resumed, **more))
                self.assertEqual([done + 1], [step["step"] for step in self.place.steps(resumed)])

                done, kept = self.stop(signal.SIGTERM, 143, out=out, **more)
                self.assertEqual(f"its model is in {out}", kept)
                wanted = self.place.folder / "wanted"
                self.assert_done(self.place.finetune(self.config, self.model, steps=done, out=wanted, **more))
                self.assertEqual(sha256_of_model(wanted), sha256_of_model(out))

                _, kept = self.stop(signal.SIGINT, 130, **more)
                self.assertRegex(kept, "^nothing is kept, for (there is no store|the store keeps no step)")
                for folder in (saved, out, wanted):
                    shutil.rmtree(folder)

    def test_AModelThatIsBeingMadeIsNotLeftHalfDone(self):
        folder = self.place.folder / "large"
        # Large enough to be stopped, and no larger: its files are reserved before the first value is written.
        with subprocess.Popen([BINARY, "init-model", folder, "--preset", "gpt2-medium"], stderr=subprocess.PIPE) as run:
            deadline = time.monotonic() + 60
            while not (folder.exists() and any(folder.iterdir())):
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.01)
            run.send_signal(signal.SIGINT)
            err = run.communicate(timeout=60)[1]
        self.assertIn(b"ending without a model", err)
        self.assertEqual(130, run.returncode, err)
        self.assertEqual([], list(folder.iterdir()) if folder.exists() else [])

    def test_AStoreThatIsRemovedMeanwhileIsNoPlaceForAModel(self):
        out = self.place.folder / "out"
        for more, kept in (({"out": out}, f"its model is in {out}"),
                           ({}, "nothing is kept, for the store was removed, moved or cut short")):
            self.place.log.unlink(missing_ok=True)
            with self.start(steps=1_000_000, fresh=True, **more) as run:
                self.wait_for_lines(run, 1)
                (self.place.nvme / "spillway.store").unlink()
                self.wait_for_lines(run, self.logged() + 3)
                run.send_signal(signal.SIGINT)
                printed, err = run.communicate(timeout=60)
            self.assertEqual(130, run.returncode, err)
            self.assertIn("was removed, moved or cut short while its run goes on, so no step is kept", err)
            self.assertIn(f"; {kept}\n", printed)
            self.assertEqual([], self.place.stored_files())
        self.assertTrue((out / "model.safetensors").exists())

    def test_AModelWithoutAPlaceIsAnError(self):
        with self.start(steps=600) as run:
            self.wait_for_lines(run, 1)
            (self.place.nvme / "spillway.store").unlink()
            printed, err = run.communicate(timeout=120)
        self.assertEqual(1, run.returncode, err)
        self.assertIn("the trained model is not kept: the store was removed, moved or cut short while the run", err)
        self.assertNotIn("trained model: in the store", printed)

    def check_ends_after_the_step(self, how, code):
        done, kept = self.stop(how, code)
        self.assertEqual("--resume continues", kept)
        if done >= STEPS:
            self.skipTest(f"this machine did {done} steps before the signal arrived")
        resumed = self.place.folder / "resumed.jsonl"
        self.assert_done(self.place.finetune(self.config, self.model, steps=done + 1, resume=True, log=resumed))
        self.assertEqual([done + 1], [step["step"] for step in self.place.steps(resumed)])
        self.assert_ends_with_the_same_bits()

    def test_KilledAtAnyMomentResumesAtTheLastCommitWithTheSameBits(self):
        moments = random.Random(test_seed())
        how = {}
        for _ in range(5):
            before = self.place.steps()[-1]["step"] if self.logged() else 0
            if before >= STEPS - 2:
                break
            lines = self.logged()
            with self.start(steps=STEPS - 1, **how) as run:
                self.wait_for_lines(run, lines + 1)
                time.sleep(moments.uniform(0, 0.02))  # anywhere in the step, its writes and its commit
                run.kill()
                run.communicate(timeout=60)
            self.assertIn(run.returncode, (-signal.SIGKILL, 0))
            first = self.place.steps()[lines]["step"]
            # A step is committed while the next one runs, so the last one logged may have to be done again.
            self.assertIn(first, (before, before + 1))
            how = {"resume": True}
        self.assert_ends_with_the_same_bits()


if __name__ == "__main__":
    main()
