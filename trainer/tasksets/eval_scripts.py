"""Makes eval scripts end with the exit status of their tests where they end with something else's."""

import re
from dataclasses import dataclass

STATUS = "SWERVE_TESTS_STATUS"
NOTE = f"# ${STATUS}: of the tests, kept because what follows them would end the script with a status of its own."

_HEREDOC = re.compile(r"(?<!<)<<(?!<)(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
_RUNS_TESTS = re.compile(
    r"(?:^|[\s/])(?:pytest|py\.test|tox|nox|unittest|nosetests|runtests\.py|ctest|rspec|phpunit|jest|vitest|mocha)"
    r"(?=\s|$)"
    r"|\b(?:make|npm|yarn|pnpm|go|cargo|mvn|gradle|\./gradlew|bundle exec rake|python3? manage\.py)\s+(?:run\s+)?test"
)
_NO_TESTS = re.compile(
    r"(?:pip3?|python3? -m pip|uv|conda|apt-get|(?:npm|yarn|pnpm) install|git|echo|which|export|\[)(?:\s|$)"
)
_PARTS = re.compile(r"&&|\|\||;")
_CONTROL = re.compile(r"^(?:(?:if|for|while|until|case|select|function)\b|\w+\s*\(\)|\{|\(|!)|\bthen$|\bdo$")
_STOPS = re.compile(r"^set\s.*(?:([-+])[a-zA-Z]*e|([-+])o\s+errexit\b)")
_IGNORED = re.compile(r"\s*(?:\|\||;)\s*(?:true|:)\s*$")
_EXIT = re.compile(r"^exit\b\s*(.*)$")


@dataclass(frozen=True, slots=True)
class _Command:
    """One command of a script, with its continued lines and here-documents: lines `first` to `last`."""

    text: str  # its own first line, continuations joined
    first: int
    last: int


def with_status_of_tests(script: str) -> str:
    """`script`, changed only if it could end with another status than its tests do.

    That is so if a command follows the tests, if it runs tests more than once, or if it ignores how they end. Raises
    ValueError if no tests are found in it, or if they are in a construct that is not understood.
    """
    commands = _commands(script)
    tests = [command for command in commands if _runs_tests(command)]
    if not tests:
        raise ValueError("runs no tests that could be recognised; mark their output as swebench does")
    exits = [_EXIT.match(command.text) for command in commands if command.first > tests[-1].first]
    if any(exit_ and exit_[1] not in ("", "0") for exit_ in exits):
        return script  # it minds their status itself
    if not _stays(commands, tests):
        if any(_CONTROL.search(command.text) for command in commands):
            raise ValueError(
                "runs its tests in an if, a loop, a function or the like: whose status it ends with is unclear"
            )
        script = _keeping_status(script, commands, tests)
    return _piped_status(script, tests)


def _runs_tests(command: _Command) -> bool:
    parts = (part.strip() for part in _PARTS.split(command.text))
    return any(_RUNS_TESTS.search(part) and not _NO_TESTS.match(part) for part in parts)


def _stays(commands: list[_Command], tests: list[_Command]) -> bool:
    """Whether the script ends with the status of its tests: they are its last command, or it stops where a command fails."""
    if any(_IGNORED.search(test.text) or _CONTROL.search(test.text) for test in tests):
        return False
    if len(tests) == 1 and commands[-1] is tests[0]:
        return True
    # In a subshell or a branch, errexit ends that alone.
    opens = next((command.first for command in commands if _CONTROL.search(command.text)), tests[0].first)
    stops = False
    for command in commands:
        setting = _STOPS.match(command.text) if command.first < tests[0].first else None
        sign = setting and (setting[1] or setting[2])
        if sign == "+" or (sign == "-" and command.first < opens):
            stops = sign == "-"
    return stops


def _keeping_status(script: str, commands: list[_Command], tests: list[_Command]) -> str:
    lines = script.rstrip("\n").split("\n")
    last_exit = commands[-1] if _EXIT.match(commands[-1].text) else None
    ends = {test.last for test in tests}
    kept: list[str] = []
    for number, line in enumerate(lines):
        if last_exit is not None and number == last_exit.first:
            continue
        kept.append(_IGNORED.sub("", line) if number in ends else line)
        if number in ends:
            kept += [NOTE, f"{STATUS}=$(( ${{{STATUS}:-0}} || $? ))"]
    return "\n".join([*kept, f'exit "${STATUS}"']) + "\n"


def _piped_status(script: str, tests: list[_Command]) -> str:
    """With `pipefail` where the output of tests goes through a pipe, whose status would be that of its last command."""
    piped = any(re.search(r"[^|]\|[^|]", test.text) for test in tests)
    if not piped or "pipefail" in script:
        return script
    head, _, rest = script.partition("\n") if script.startswith("#!") else ("#!/bin/bash", "", script)
    return f"{head}\nset -o pipefail\n{rest}"


def _commands(script: str) -> list[_Command]:
    """The commands, without comments and blank lines."""
    lines = script.split("\n")
    commands: list[_Command] = []
    number = 0
    while number < len(lines):
        first, text = number, lines[number].strip()
        while text.endswith("\\") and number + 1 < len(lines):
            number += 1
            text = f"{text[:-1].rstrip()} {lines[number].strip()}"
        if not text.startswith("#"):
            number = _end_of_heredocs(text, lines, number)
        if text and not text.startswith("#"):
            commands.append(_Command(text, first, number))
        number += 1
    return commands


def _end_of_heredocs(text: str, lines: list[str], number: int) -> int:
    """The last line of the here-documents that `text`, which ends on line `number`, begins."""
    for tabs, _, word in _HEREDOC.findall(text):
        number += 1
        while number < len(lines) and (lines[number].lstrip("\t") if tabs else lines[number]) != word:
            number += 1
    return min(number, len(lines) - 1)
