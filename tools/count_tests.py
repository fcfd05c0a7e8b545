#!/usr/bin/env python3
"""Counts what Meson build directories' test runs reported: `N passed, N failed, N skipped`.

usage: count_tests.py BUILD_DIR...

A program of protocol gtest writes one XML report (<testcase> with <failure> or <skipped>); its cases are counted.
What the report cannot say is added: a program that wrote none (it crashed, or was killed) is one failure, and so is
one that reported success and still ended with an error (a sanitizer's finding at exit). Any other program counts as
one test by its exit status (77: skipped). Before the count, which is the last line, come the skips, those of a program
for one reason in one line, and after them every failure with its reason.
Exit status 0 only when nothing failed and every directory ran something.
"""
import json
import os
import pathlib
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field


@dataclass
class Count:
    passed: int = 0
    failed: list = field(default_factory=list)   # (name, reason)
    skipped: list = field(default_factory=list)  # (name, reason)


def first_line(text):
    """The first line that says something; gtest puts `file:line` on a line of its own before the message."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].rpartition(":")[2].isdigit():
        lines = lines[1:]
    return lines[0] if lines else "no reason given"


def count_report(program, report, count):
    """Adds one XML report's cases; returns how many of them failed."""
    failures = 0
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{program}: {case.get('classname')}.{case.get('name')}"
        failure = case.find("failure")
        skip = case.find("skipped")
        if failure is not None:
            failures += 1
            count.failed.append((name, first_line(failure.get("message"))))
        elif skip is not None:
            count.skipped.append((name, first_line(skip.get("message") or skip.text)))
        elif case.get("status") == "notrun":
            count.skipped.append((name, "disabled in the source"))
        else:
            count.passed += 1
    return failures


def count_program(entry, reporting, build_dir, count):
    """Adds one line of Meson's testlog.json; `reporting` holds the names of the tests that write a report."""
    name = entry["name"].rpartition(" / ")[2]  # Meson puts the suites before the name
    result, status = entry["result"], entry.get("returncode")
    if name not in reporting:
        if result in ("OK", "EXPECTEDFAIL"):
            count.passed += 1
        elif result == "SKIP":
            output = (entry.get("stdout") or "").strip().splitlines()
            count.skipped.append((name, output[-1] if output else "no reason given"))
        else:
            count.failed.append((name, f"{result}, exit status {status}"))
        return
    report = build_dir / f"{name}.xml"
    # One second of slack: file systems round times.
    if not report.exists() or report.stat().st_mtime < entry["starttime"] - 1:
        count.failed.append((name, f"wrote no report: {result}, exit status {status}"))
        return
    try:
        failures = count_report(name, report, count)
    except ElementTree.ParseError as error:
        count.failed.append((name, f"its report is not XML: {error}"))
        return
    if failures == 0 and (result != "OK" or status != 0):
        count.failed.append((name, f"all cases passed, but the program ended with {result}, exit status {status}"))


def count_build(build_dir, count):
    log = build_dir / "meson-logs" / "testlog.json"
    entries = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if not entries:
        count.failed.append((str(build_dir), "no test ran; the build failed, or no test is registered"))
        return
    known = json.loads((build_dir / "meson-info" / "intro-tests.json").read_text())
    names = [test["name"] for test in known if test["protocol"] == "gtest"]
    # Meson names a report after the test alone, so two tests of one name would overwrite each other's.
    for name in sorted({name for name in names if names.count(name) > 1}):
        count.failed.append((name, "two tests have this name, so one report is lost; rename one"))
    for entry in entries:
        count_program(entry, set(names), build_dir, count)


def print_skips(skipped):
    """One line for the cases of a program that were skipped for one reason, so that failures stay in sight."""
    together = {}
    for test, reason in skipped:
        build, program, *_ = test.split(": ")
        together.setdefault((build, program, reason), []).append(test)
    for (_, _, reason), tests in together.items():
        others = f" and {len(tests) - 1} more" if len(tests) > 1 else ""
        print(f"skipped: {tests[0]}{others}: {reason}")


def main(arguments):
    if not arguments:
        print(__doc__, file=sys.stderr)
        return 2
    total = Count()
    for name in arguments:
        part = Count()
        count_build(pathlib.Path(name), part)
        where = os.path.basename(os.path.normpath(name))
        total.passed += part.passed
        total.failed += [(f"{where}: {test}", reason) for test, reason in part.failed]
        total.skipped += [(f"{where}: {test}", reason) for test, reason in part.skipped]
    print_skips(total.skipped)
    for test, reason in total.failed:
        print(f"failed: {test}: {reason}")
    print(f"{total.passed} passed, {len(total.failed)} failed, {len(total.skipped)} skipped")
    return 1 if total.failed or total.passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
