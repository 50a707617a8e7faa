"""Changes eval scripts so that they end with the exit status of their tests, if they do not."""

import re
from dataclasses import dataclass

from pipeline.runners import run_by

STATUS = "SWERVE_TESTS_STATUS"
NOTE = f"# ${STATUS}: of the tests, kept because what follows them would end the script with a status of its own."

_HEREDOC = re.compile(r"(?<!<)<<(?!<)(-?)\s*(['\"]?)([A-Za-z_]\w*)\2")
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
    """`script`, changed only if it could end with another status than its tests.

    That is the case if a command follows the tests, if it runs tests more than once, or if it ignores how they end. Raises
    ValueError if no tests are found in it, or if they are in a construct that is not understood.
    """
    commands = _commands(script)
    tests = [command for command in commands if any(run_by(command.text))]
    if not tests:
        raise ValueError("runs no tests that could be recognised; mark their output as swebench does")
    exits = [_EXIT.match(command.text) for command in commands if command.first > tests[-1].first]
    if any(exit_ and exit_[1] not in ("", "0") for exit_ in exits):
        return script  # the script already handles the exit status of its tests
    if not _stays(commands, tests):
        if any(_CONTROL.search(command.text) for command in commands):
            raise ValueError(
                "runs its tests in an if, a loop, a function or the like: whose status it ends with is unclear"
            )
        script = _keeping_status(script, commands, tests)
    return _piped_status(script, tests)


def _stays(commands: list[_Command], tests: list[_Command]) -> bool:
    """Whether the script ends with the status of its tests: they are its last command, or it stops where a command fails."""
    if any(_IGNORED.search(test.text) or _CONTROL.search(test.text) for test in tests):
        return False
    if len(tests) == 1 and commands[-1] is tests[0]:
        return True
    # errexit in a subshell or a branch ends only that subshell or branch.
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
    """The script with `pipefail` if the output of tests goes through a pipe, which would return the status of its last command."""
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
    """The last line of the here-documents of the command `text`, which ends on line `number`."""
    for tabs, _, word in _HEREDOC.findall(text):
        number += 1
        while number < len(lines) and (lines[number].lstrip("\t") if tabs else lines[number]) != word:
            number += 1
    return min(number, len(lines) - 1)
