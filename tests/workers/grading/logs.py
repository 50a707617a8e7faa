"""Logs that are meant to hold up whoever parses them, and the parsers of swebench as calls."""

from pipeline.task import SwebenchLog
from workers.grading.swebench_rules import UnreadableLog, parsed

NUM_CHARS = 200_000


def _filled(text: str) -> str:
    return text * (NUM_CHARS // len(text))


LOGS = {
    "one line": _filled("a"),
    "one line of spaces": f"PASSED {_filled(' ')}x",
    "line ends": _filled("\n"),
    "brackets": f"PASSED {_filled('[')}",
    "braces": _filled('{"a":['),
    "passed": _filled("PASSED "),
    "passed lines": _filled("PASSED a::b - c\nFAILED [1] d\n"),
    "dots": _filled("test_a (b.C) ... "),
    "dots on lines": _filled("test_a (b.C) ...\n"),
    "ok": _filled("a ... ok\nok 1 - b # skip\n--- PASS: c (0.1s)\n"),
    "colours": _filled("\x1b[31m✓ a (1 ms)\x1b[0m\n"),
    "digits": f"({_filled('1')} ms)",
    "words and spaces": f"✓ {_filled('a ')}(",
    "tests of cargo": _filled("test a ... "),
    "percent": _filled("a.py::b PASSED [ 1%]"),
    "colons": _filled("a::"),
    "xml": _filled('<testcase name="a">'),
    "maven": _filled("[INFO] Running a\n[ERROR] Tests run: 1, Failures: "),
    "phpunit": f"There was 1 failure:\n{_filled('1) a' + chr(10))}",
}


def statuses(parser: str, log: str) -> dict[str, str]:
    """What the parser makes of `log`; nothing if it breaks off."""
    verdict = SwebenchLog(eval_script="", log_parser=parser, fail_to_pass=("a",), pass_to_pass=())
    try:
        return parsed(verdict, "", log)
    except UnreadableLog as error:
        return {"": str(error)}
