"""Runs a file's unittest cases and writes the XML report that GoogleTest programs write, so that Python tests are
counted case by case like the others: `from report import main`, then `main()` at the end of the file.

Meson passes `--gtest_output=xml:FILE`. Without it the file runs as a plain unittest program.
"""
import os
import re
import sys
import time
import unittest
import xml.etree.ElementTree as ElementTree

OPTION = "--gtest_output=xml:"
NOT_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")  # a program's colours: Meson ends with a report that has them


class _Result(unittest.TextTestResult):
    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.cases = ElementTree.Element("testsuite", name="python")
        self._started = time.monotonic()

    def startTest(self, test):
        self._started = time.monotonic()
        super().startTest(test)

    # What comes next may be no test: that a class or module could not be set up takes as long as that.
    def stopTest(self, test):
        super().stopTest(test)
        self._started = time.monotonic()

    def _add(self, test, kind=None, message=""):
        # A failed setUpClass arrives as an _ErrorHolder, which knows nothing but its description.
        owner, _, name = test.id().rpartition(".")
        case = ElementTree.SubElement(self.cases, "testcase", name=name, classname=owner.replace("__main__.", ""),
                                      status="run", time=f"{time.monotonic() - self._started:.3f}")
        if kind:
            ElementTree.SubElement(case, kind, message=NOT_XML.sub("", message))

    def addSuccess(self, test):
        super().addSuccess(test)
        self._add(test)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._add(test, "failure", str(err[1]))

    def addError(self, test, err):
        super().addError(test, err)
        self._add(test, "failure", f"{err[0].__name__}: {err[1]}")

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self._add(test, "skipped", reason)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._add(test, "failure", f"{subtest}: {err[1]}")


class _Part(unittest.TestLoader):
    """Of a whole file, the cases that GoogleTest's variables for shards leave to this run."""

    def loadTestsFromModule(self, *arguments, **keywords):
        cases = [case for suite in super().loadTestsFromModule(*arguments, **keywords) for case in suite]
        own, all_ = int(os.environ.get("GTEST_SHARD_INDEX", 0)), int(os.environ.get("GTEST_TOTAL_SHARDS", 1))
        return self.suiteClass(cases[own::all_])


def main():
    report = next((a[len(OPTION):] for a in sys.argv if a.startswith(OPTION)), None)
    arguments = [a for a in sys.argv if not a.startswith(OPTION)]
    runner = unittest.TextTestRunner(resultclass=_Result, verbosity=2)
    program = unittest.main(module="__main__", argv=arguments, testRunner=runner, testLoader=_Part(), exit=False)
    if report:
        root = ElementTree.Element("testsuites")
        root.append(program.result.cases)
        ElementTree.ElementTree(root).write(report, encoding="utf-8", xml_declaration=True)
    sys.exit(0 if program.result.wasSuccessful() else 1)
