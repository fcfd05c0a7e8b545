"""`spillway report`: what it says of logs that finetune wrote and of logs made for this, and what it refuses."""
import html.parser
import json
import os
import re
import stat
import sys
import pathlib

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report import main  # noqa: E402
from runs import CliTest, spillway  # noqa: E402

CAUSES = ("read", "write", "copy", "gradient", "update", "commit", "save", "other", "network")
DAY = 86400


def step(number, **more):
    """A line as finetune writes it, in its order of magnitude."""
    return {"step": number, "loss": 4 - 0.1 * number, "grad_norm": 2.5, "lr": 1e-4, "seconds": 0.5, "tokens": 256,
            "nvme_read_bytes": 3 << 20, "nvme_write_bytes": 2 << 20, "h2d_bytes": 1 << 20, "d2h_bytes": 1 << 19,
            "link": "nvme", "link_percent": 80, "stall_seconds": 0.1,
            "stalls": {**dict.fromkeys(CAUSES, 0), "read": 0.08, "commit": 0.02}, **more}


def rows_of(text):
    """label: the cells of the runs."""
    return {line[:24].strip(): re.split(r"\s{2,}", line[24:].strip()) for line in text.splitlines()[1:]
            if not line.startswith("note: ")}


class Page(html.parser.HTMLParser):
    """Its tags are closed as they were opened, and nothing in it is fetched or run."""

    VOID = {"meta"}

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.points = [], [], []
        self.feed(text)
        assert self.open == [], self.open

    def handle_starttag(self, tag, attrs):
        assert tag not in ("script", "link", "img", "iframe"), tag
        values = dict(attrs)
        assert not {"src", "href"} & set(values) and not any(name.startswith("on") for name in values), attrs
        self.points += [values["points"]] if "points" in values else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        self.texts.append(data.strip())


class ReportTest(CliTest):
    def log(self, name, lines, end="\n"):
        file = self.place.folder / name
        file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + end)
        return file

    def report(self, *arguments):
        run = spillway("report", *arguments, cwd=self.place.folder)
        self.assertEqual((0, ""), (run.status, run.err), run.out)
        return run.out

    def refused(self, *arguments, words):
        self.assert_refused(spillway("report", *arguments, cwd=self.place.folder), *words)


class Reports(ReportTest):
    def test_ALogOfFinetuneIsReported(self):
        model, log = self.place.init_model(), self.place.log
        self.assert_done(self.place.finetune(self.place.config(), model, steps=6, log=log))
        rows, steps = rows_of(self.report(log)), self.place.steps()
        self.assertEqual(["1 to 6"], rows["steps"])
        self.assertEqual([f"{steps[0]['loss']:.4f}"], rows["loss, first"])
        lowest = min(steps, key=lambda each: each["loss"])
        self.assertEqual([f"{lowest['loss']:.4f} at {lowest['step']}"], rows["loss, lowest"])
        self.assertTrue(rows["written in all"][0].endswith("iB"))

    def test_FiguresAreThoseOfTheLines(self):
        slow = step(11, seconds=8.0, stall_seconds=0, stalls={})  # a median does not see it, a rate does
        rows = rows_of(self.report(self.log("a.jsonl", [*map(step, range(1, 11)), slow]), "--drive-life", "1TiB"))
        seconds = 10 * 0.5 + 8
        written = 11 * (2 << 20)
        for label, cell in {
                "steps": "1 to 11", "loss, first": "3.9000", "loss, last tenth": "2.9000",
                "loss, lowest": "2.9000 at 11", "gradient norm": "2.500", "seconds a step": "0.500",
                "tokens a second": f"{10 * 256 / (seconds - 0.5):.0f}", "slowest link": "nvme at 80 %",
                "in so many steps": "100 %", "stalled": f"{100 * 0.9 / (seconds - 0.5):.1f} %",
                "for read": f"{100 * 0.72 / (seconds - 0.5):.1f} %", "read a step": "3.0 MiB",
                "written a step": "2.0 MiB", "to the device": "1.0 MiB", "from the device": "512.0 KiB",
                "written in all": "22.0 MiB", "a day, at this pace": f"{written / seconds * DAY / 1e12:.3g} TB",
                "of the drive's life": "< 0.01 %",
                "it lasts, at this pace": f"{(1 << 40) / (written / seconds * DAY):.0f} days"}.items():
            with self.subTest(label=label):
                self.assertEqual([cell], rows.get(label))

    def test_EvaluationsAreNoSteps(self):
        lines = [{"step": 0, "eval_loss": 0.5}, step(1), step(2), {"step": 2, "eval_loss": 3.25}, step(3), step(4),
                 {"step": 4, "eval_loss": 3.5}, {"step": 4, "eval_loss": None}]
        page = self.place.folder / "page.html"
        rows = rows_of(self.report(self.log("a.jsonl", lines[:-1]), "--html", page))
        self.assertEqual((["1 to 4"], ["3.2500 at 2"]), (rows["steps"], rows["of held-out rows"]))
        self.assertIn("Loss of held-out rows", Page(page.read_text()).texts)
        self.assertEqual(["3.2500 at 2"], rows_of(self.report(self.log("b.jsonl", lines)))["of held-out rows"])

    def test_SeveralRunsStandBesideEachOther(self):
        first = self.log("first.jsonl", map(step, range(1, 5)))
        second = self.log("second.jsonl", [step(n, seconds=1.0, nvme_write_bytes=0) for n in range(1, 5)])
        rows = rows_of(self.report(first, second))
        self.assertEqual(["0.500", "1.000"], rows["seconds a step"])
        self.assertEqual(["× 1.00", "× 2.00"], rows["beside the first"])
        self.assertEqual(["8.0 MiB"], rows["written in all"])  # nothing of the second

    def test_StepsThatWereMadeAgainCountOnceAndWearTwice(self):
        lines = [*map(step, (1, 2, 3)), *(step(n, loss=9) for n in (2, 3, 4))]
        text = self.report(self.log("a.jsonl", lines))
        rows = rows_of(text)
        self.assertEqual((["1 to 4"], ["2"], ["12.0 MiB"]), (rows["steps"], rows["made again"], rows["written in all"]))
        self.assertEqual(["9.0000"], rows["loss, last tenth"])
        self.assertIn("note: ", text)

    def test_ALineThatAKilledRunDidNotFinishIsLeftOutAndSaid(self):
        file = self.log("a.jsonl", [step(1), step(2), json.dumps(step(3))[:70]], end="")
        text = self.report(file)
        self.assertEqual(["1 to 2"], rows_of(text)["steps"])
        self.assertRegex(text, r"note: .*a\.jsonl: ends in the middle of a line")
        whole = self.log("b.jsonl", [step(1), step(2)], end="")
        self.assertEqual(["1 to 2"], rows_of(self.report(whole))["steps"])

    def test_WhatALoopInPythonLogsIsTakenToo(self):
        lines = [{"step": n, "seconds": 1.0, "gradient_norm": 3.0, "learning_rate": 1e-3, "stalls": {"read": 0.25},
                  "stall_seconds": 0.25, "skipped": False} for n in (1, 2)]
        rows = rows_of(self.report(self.log("a.jsonl", lines)))
        self.assertEqual((["3.000"], ["25.0 %"]), (rows["gradient norm"], rows["for read"]))
        self.assertNotIn("loss, first", rows)
        self.assertNotIn("written in all", rows)

    def test_ALossThatIsNotFiniteLeavesAGap(self):
        lines = [step(1), step(2, loss=None, grad_norm=None, skipped=True), step(3)]
        file = self.log("a.jsonl", lines)
        self.assertEqual(["1"], rows_of(self.report(file, "--html"))["skipped"])
        self.assertEqual(2, len(Page((self.place.folder / "report.html").read_text()).points[0].split()))


class Pages(ReportTest):
    def test_APageNeedsNothingElse(self):
        first, second = self.log("a.jsonl", map(step, range(1, 9))), self.log("b.jsonl", map(step, range(1, 5)))
        self.report(first, "--html", "one.html")
        self.report(first, second, "--html", "two.html", "--drive-life", "600TB")
        one, two = (Page((self.place.folder / name).read_text()) for name in ("one.html", "two.html"))
        for title in ("Loss", "Time of a step", "Written to the drive in all", "stalled, by cause"):
            for page in (one, two):
                self.assertTrue(any(title in text for text in page.texts), title)
        self.assertEqual(2 * len([text for text in one.texts if "by cause" in text]),
                         len([text for text in two.texts if "by cause" in text]))
        self.assertIn("it lasts, at this pace", two.texts)
        self.assertNotIn("nan", " ".join(one.points + two.points))

    def test_ALongRunIsDrawnInAsManyPointsAsCanBeSeen(self):
        self.report(self.log("a.jsonl", map(step, range(1, 3001))), "--html")
        for points in Page((self.place.folder / "report.html").read_text()).points:
            self.assertLessEqual(len(points.split()), 400)

    def test_NamesAreText(self):
        name = "<b>&'\".jsonl"
        self.report(self.log(name, [step(1), step(2)]), "--html", "page.html")
        page = Page((self.place.folder / "page.html").read_text())
        self.assertTrue(any(name in text for text in page.texts))

    def test_ADashIsStandardOutputAndAPageMayBeWrittenAgain(self):
        file = self.log("a.jsonl", [step(1), step(2)])
        self.assertTrue(self.report(file, "--html", "-").startswith("<!doctype html>"))
        self.report(file, "--html", "page.html")
        self.report(file, "--html", "page.html")

    def test_NothingButAPageIsWrittenOver(self):
        file = self.log("a.jsonl", [step(1), step(2)])
        before = file.read_text()
        self.refused(file, "--html", file, words=["a.jsonl: exists and is no page", "name another file"])
        self.assertIn("1 to 2", self.report("--html", file))  # a log, and the page has its usual name
        self.assertTrue((self.place.folder / "report.html").exists())
        self.assertEqual(before, file.read_text())
        self.refused(file, "--html", "none/page.html", words=["the output of --html cannot be written"])
        self.refused(file, "--html", ".", words=["the output of --html cannot be written (Is a directory)"])


class BadInput(ReportTest):
    def test_AFileThatIsNoLogIsRefusedWithItsLine(self):
        good = json.dumps(step(1))
        for line, words in {
                "{": ["not valid JSON at byte 1"], "[1]": ["is no JSON object"], "null": ["is no JSON object"],
                "text": ["not valid JSON at byte"], "{}": ['has no "step"'], '{"step": 1}': ['has no "seconds"'],
                '{"step": 1} {"step": 2}': ["not valid JSON at byte 12"],
                '{"step": "1", "seconds": 1}': ['"step" is no whole number'],
                '{"step": -1, "seconds": 1}': ['"step" is no whole number'],
                '{"step": 1.5, "seconds": 1}': ['"step" is no whole number'],
                '{"step": 1, "seconds": -1}': ['"seconds" is negative'],
                '{"step": 1, "seconds": 1e999}': ["not valid JSON"],
                '{"step": 1, "seconds": 1, "loss": "low"}': ['"loss" is no number'],
                '{"step": 1, "seconds": 1, "link": 3}': ['"link" is no text'],
                '{"step": 1, "seconds": 1, "skipped": 1}': ['"skipped" is neither true nor false'],
                '{"step": 1, "seconds": 1, "stalls": [1]}': ['"stalls" is no object'],
                '{"step": 1, "seconds": 1, "stalls": {"read": -1}}': ['"stalls": "read" is no number of seconds'],
                '{"step": 1, "seconds": 1, "tokens": 18446744073709551616}': ['"tokens" is no whole number'],
                '{"step": 1, "seconds": 1, "link": "\x1b[31m"}': ["not valid JSON"],
                "[" * 60000: ["not valid JSON"]}.items():
            with self.subTest(line=line[:60]):
                file = self.log("bad.jsonl", [good, line, good])
                self.refused(file, words=["bad.jsonl:2: ", *words, "name what `spillway finetune --log` wrote"])

    def test_AFirstLineIsNoLastOne(self):
        self.refused(self.log("a.jsonl", ['{"step": 1'], end=""), words=["a.jsonl:1: not valid JSON"])

    def test_WhatHasNoStepsIsRefused(self):
        empty = self.log("empty.jsonl", [], end="")
        blank = self.log("blank.jsonl", ["", "  "])
        for file in (empty, blank):
            self.refused(file, words=[file.name, "has no step in it"])
        self.refused("none.jsonl", words=["none.jsonl: cannot be read (No such file or directory)"])
        self.refused(self.place.nvme, words=["cannot be read (Is a directory)"])
        self.refused(words=["files", "required"])

    def test_ABinaryOrEndlessFileIsRefusedAtOnce(self):
        binary = self.place.folder / "binary"
        binary.write_bytes(bytes(range(256)) * 1000)
        self.refused(binary, words=["binary:1: not valid JSON"])
        zeros = self.place.folder / "zeros"
        with open(zeros, "wb") as opened:
            opened.truncate(1 << 33)
        self.refused(zeros, words=["zeros: has a line of more than 64 KiB"])

    def test_AFileThatMayNotBeReadIsRefused(self):
        file = self.log("a.jsonl", [step(1)])
        file.chmod(0)
        self.addCleanup(file.chmod, stat.S_IRUSR | stat.S_IWUSR)
        if os.access(file, os.R_OK):
            self.skipTest("root may read everything")
        self.refused(file, words=["a.jsonl: cannot be read (Permission denied)"])

    def test_MoreRunsThanColoursAndWrongSizesAreRefused(self):
        file = self.log("a.jsonl", [step(1), step(2)])
        self.refused(*[file] * 9, words=["report: 9 runs are more than can be told apart", "at most 8"])
        self.report(*[file] * 8)
        self.refused(file, "--drive-life", "much", words=["--drive-life", "is not a size"])


if __name__ == "__main__":
    main()
