"""Where the witness did not report, an exit status of 0 counts only if the runner's own closing line agrees."""

import re

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INSTALLS = re.compile(r"\b(?:pip3?|conda|mamba|apt-get|apt|uv|poetry)\b.*\b(?:install|add)\b")
RUNS_PYTEST = re.compile(r"(?:^|[\s;&|(/!`])(?:pytest|py\.test)(?:$|[\s;&|)`])")
RUNS_UNITTEST = re.compile(r"\s-m\s+unittest\b")
_ENDS_AT_FAILURE = re.compile(r"^\s*set\s+-\w*e", re.MULTILINE)
_TOLERATES_FAILURE = re.compile(
    r"[|&!`]|\$\(|\(\)|<<|\b(?:if|while|until|case|trap|eval|function)\b|\bset\s+\+\w*e"
)
_PYTEST_STARTS = re.compile(r"^=+ test session starts =+$", re.MULTILINE)
_PYTEST_ENDS = re.compile(
    r"^(?:=+ )?(\d+ [a-z]+(?: [a-z]+)?(?:, \d+ [a-z]+(?: [a-z]+)?)*)"
    r" in [\d.]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?$",
    re.MULTILINE,
)
_UNITTEST_ENDS = re.compile(r"^Ran [1-9]\d* tests? in [\d.]+s\n+OK(?: \(.*\))?$", re.MULTILINE)


def closing_line_fault(script: str, log: str) -> str | None:
    """Why `log` is at odds with an exit status of 0 of `script`; None if it is not.

    A pytest run must close with its summary (at most one `-q`), a unittest run with its OK. Other runners are not checked.
    """
    plain = _plain(log)
    commands = [
        line
        for line in script.splitlines()
        if not line.lstrip().startswith("#") and not _INSTALLS.search(line)
    ]
    if any(RUNS_PYTEST.search(line) for line in commands) or _PYTEST_STARTS.search(plain):
        return _pytest_fault(plain)
    if any(RUNS_UNITTEST.search(line) for line in commands) and not _UNITTEST_ENDS.search(plain):
        return "unittest did not report OK"
    return None


def each_must_pass(script: str, num_runs: int) -> bool:
    """Whether `script`, in which `num_runs` test runs were seen, would have failed if any of them had. False if in doubt."""
    lines = [line for line in script.splitlines() if not line.lstrip().startswith("#")]
    runs = [line for line in lines if RUNS_PYTEST.search(line) or RUNS_UNITTEST.search(line)]
    plain = not any(_TOLERATES_FAILURE.search(line) for line in lines)
    return plain and len(runs) == num_runs and any(_ENDS_AT_FAILURE.search(line) for line in lines)


def _plain(log: str) -> str:
    return _ANSI.sub("", log).replace("\r\n", "\n")


def _pytest_fault(log: str) -> str | None:
    summaries: list[str] = _PYTEST_ENDS.findall(log)
    if not summaries:
        return "pytest did not report its end"
    counts = {words.split(" ", 1)[1]: int(words.split(" ", 1)[0]) for words in summaries[-1].split(", ")}
    if counts.keys() & {"failed", "error", "errors"}:
        return f"pytest reported {summaries[-1]}"
    if not counts.get("passed"):
        return f"pytest passed no test: {summaries[-1]}"
    return None
