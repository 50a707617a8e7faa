"""A stand-in for the sandbox that knows only the teacher's own commands, so that a lesson is made in milliseconds.

Its output for those commands is exactly what bash prints; a test compares the two.
"""

import re
import traceback

from trainer.demo.family import replace_line

SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMIT = f"echo {SENTINEL} && git add -A && git diff --cached"

_FIND = re.compile(r"grep -rn '(def \w+\()' \.")
_READ = re.compile(r"(git checkout -q \. && )?cat -n (\S+)")
_EDIT = re.compile(r"sed -i '(\d+)s\|\.\*\|([^|&\\]*)\|' (\S+)")
_TEST = re.compile(r'python3 -c "from ([\w.]+) import (\w+); print\((.*)\)" 2>&1 \| tail -n 1')


def find(function: str) -> str:
    """The command that finds a function."""
    return f"grep -rn 'def {function}(' ."


def read(path: str, *, reset: bool = False) -> str:
    """The command that shows a file with line numbers; `reset` undoes every edit first."""
    return f"{'git checkout -q . && ' if reset else ''}cat -n {path}"


def edit(path: str, line: int, content: str) -> str:
    """The command that replaces one line."""
    return f"sed -i '{line}s|.*|{content}|' {path}"


def check(module: str, function: str, expression: str) -> str:
    """The command that prints whether an expression about a function holds."""
    return f'python3 -c "from {module} import {function}; print({expression})" 2>&1 | tail -n 1'


class Rehearsal:
    """A checked-out repository as a dictionary of texts."""

    def __init__(self, files: dict[str, str]) -> None:
        self._committed = dict(files)
        self.files = dict(files)

    def run(self, command: str) -> str:
        """The output of one of the teacher's commands, all of which exit with 0.

        Raises ValueError for any other command.
        """
        if found := _FIND.fullmatch(command):
            return self._find(found[1])
        if found := _READ.fullmatch(command):
            if found[1]:
                self.files = dict(self._committed)
            lines = self.files[found[2]].splitlines()
            return "".join(f"{number:6d}\t{line}\n" for number, line in enumerate(lines, 1))
        if found := _EDIT.fullmatch(command):
            self.files[found[3]] = replace_line(self.files[found[3]], int(found[1]), found[2])
            return ""
        if found := _TEST.fullmatch(command):
            return self._test(self.files[found[1].replace(".", "/") + ".py"], found[3])
        raise ValueError(f"command: {command!r} is not one the teacher uses")

    def _find(self, text: str) -> str:
        return "".join(
            f"./{path}:{number}:{line}\n"
            for path, source in self.files.items()
            for number, line in enumerate(source.splitlines(), 1)
            if text in line
        )

    @staticmethod
    def _test(source: str, expression: str) -> str:
        """Run the module's text, which is the family's own source and edited by the teacher only."""
        namespace: dict[str, object] = {}
        try:
            exec(source, namespace)
            return f"{eval(expression, namespace)}\n"
        except (ArithmeticError, LookupError, NameError, SyntaxError, TypeError, ValueError) as error:
            return traceback.format_exception_only(error)[-1]
