"""How a patch can bend the test runner instead of fixing the code, and what of it shows.

Two defences: files that govern the runner go back to what the image has, and an exit status of 0 counts only
if the runner's own closing line says the same. A patch whose code, inside the test process, prints a whole
forged report still passes; only the hidden tests' author could tell it apart.
"""

import configparser
import re
import tomllib

# Restored whole if a patch touches one: they govern how tests run, or run code in every Python process.
CONTROL_NAMES = (
    "conftest.py",
    "pytest.ini",
    ".pytest.ini",
    "pytest.toml",
    ".pytest.toml",
    "pytest.py",
    "tox.ini",
    "sitecustomize.py",
    "usercustomize.py",
    "*.pth",
    ".gitattributes",
)
# Restored if a patch changes what they say to pytest: they hold much else that a fix may rightly change.
SETTINGS_NAMES = ("setup.cfg", "pyproject.toml")

_HEADER = re.compile(
    rb"^(?:diff --git|---|\+\+\+|rename (?:from|to)|copy (?:from|to)|Index:) (.*)$", re.MULTILINE
)
_NAME = re.compile(
    rb"(?:^|[\s/\"])(?:"
    + rb"|".join(
        re.escape(name.encode()).replace(rb"\*", rb"[^/]*") for name in (*CONTROL_NAMES, *SETTINGS_NAMES)
    )
    + rb")(?:[\s\"]|$)"
)
_ESCAPE = re.compile(rb"\\[0-7]{3}")  # git quotes names; one that hides a letter may be any name

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_INSTALLS = re.compile(r"\b(?:pip3?|conda|mamba|apt-get|apt|uv|poetry)\b.*\b(?:install|add)\b")
_RUNS_PYTEST = re.compile(r"(?:^|[\s;&|(/!`])(?:pytest|py\.test)(?:$|[\s;&|)`])")
_RUNS_UNITTEST = re.compile(r"\s-m\s+unittest\b")
_PYTEST_STARTS = re.compile(r"^=+ test session starts =+$", re.MULTILINE)
_PYTEST_ENDS = re.compile(
    r"^(?:=+ )?(\d+ [a-z]+(?: [a-z]+)?(?:, \d+ [a-z]+(?: [a-z]+)?)*)"
    r" in [\d.]+ ?s(?:econds)?(?: \([\d:]+\))?(?: =+)?$",
    re.MULTILINE,
)
_UNITTEST_ENDS = re.compile(r"^Ran [1-9]\d* tests? in [\d.]+s\n+OK(?: \(.*\))?$", re.MULTILINE)


def touches_runner(patch: bytes) -> bool:
    """Whether `patch` may touch a file that governs the runner. May say yes too often, never no too often."""
    return any(_NAME.search(header) or _ESCAPE.search(header) for header in _HEADER.findall(patch))


def same_pytest_settings(name: str, old: bytes | None, new: bytes | None) -> bool:
    """Whether both contents of the settings file `name` (None: absent) say the same to pytest."""
    try:
        return _pytest_settings(name, old) == _pytest_settings(name, new)
    except (ValueError, configparser.Error):  # unreadable now: tomllib's and Unicode's errors are ValueErrors
        return False


def contradiction(script: str, log: str) -> str | None:
    """Why `log` belies an exit status of 0 of `script`; None if it does not.

    A pytest run must close with its summary (at most one `-q`), a unittest run with its OK. Of other runners
    nothing is asked.
    """
    plain = _ANSI.sub("", log).replace("\r\n", "\n")
    commands = [
        line
        for line in script.splitlines()
        if not line.lstrip().startswith("#") and not _INSTALLS.search(line)
    ]
    if any(_RUNS_PYTEST.search(line) for line in commands) or _PYTEST_STARTS.search(plain):
        return _pytest_contradiction(plain)
    if any(_RUNS_UNITTEST.search(line) for line in commands) and not _UNITTEST_ENDS.search(plain):
        return "unittest did not report OK"
    return None


def _pytest_contradiction(log: str) -> str | None:
    summaries: list[str] = _PYTEST_ENDS.findall(log)
    if not summaries:
        return "pytest did not report its end"
    counts = {words.split(" ", 1)[1]: int(words.split(" ", 1)[0]) for words in summaries[-1].split(", ")}
    if counts.keys() & {"failed", "error", "errors"}:
        return f"pytest reported {summaries[-1]}"
    if not counts.get("passed"):
        return f"pytest passed no test: {summaries[-1]}"
    return None


def _pytest_settings(name: str, content: bytes | None) -> object:
    if content is None:
        return None if name == "setup.cfg" else {}
    text = content.decode()
    if name == "pyproject.toml":
        return tomllib.loads(text).get("tool", {}).get("pytest", {})
    parser = configparser.RawConfigParser(strict=False, allow_no_value=True)
    parser.read_string(text)
    sections = {section: parser.items(section) for section in parser.sections() if "pytest" in section}
    return (sections, [line for line in text.splitlines() if "pytest" in line]) if sections else None
