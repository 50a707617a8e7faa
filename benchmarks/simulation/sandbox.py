"""A repository of the demo, and what bash would do there with the commands that the policy writes.

The teacher's commands, and the mistakes that the policy makes in them, behave as in the demo's container; a test compares the
two. Any other command fails, as a command that does not exist would. `num_unknown` counts these, so that it can be seen how
much of a run that concerns.
"""

import re
import shlex
from typing import NamedTuple

from benchmarks.simulation.interpreter import Interpreter
from trainer.demo.family import DemoTask, replace_line
from trainer.demo.lessons import SENTINEL, SUBMIT

TIMED_OUT = None

_FIND = re.compile(r"grep -rn '([^'\\*\[\]^$]*)' \.")
_READ = re.compile(r"(git checkout -q \. && )?cat -n ([\w./-]+)")
_EDIT = re.compile(r"sed -i '(\d+)s\|\.\*\|([^|'\\]*)\|' ([\w./-]+)")
_TEST = re.compile(r'python3 -c "from ([\w.]+) import (\w+); print\(([^"`$\\!]*)\)" 2>&1 \| tail -n 1')


class Ran(NamedTuple):
    """What came of a command. `returncode` is None for one that took too long and was stopped."""

    returncode: int | None
    output: str


class Repository:
    """A checked-out repository as a dictionary of texts."""

    def __init__(self, files: dict[str, str], interpreter: Interpreter) -> None:
        self._committed = files
        self._interpreter = interpreter
        self.files = dict(files)
        self.num_unknown = 0  # commands that are not simulated

    def run(self, command: str) -> Ran:
        """Run one command."""
        if command in (SUBMIT, f"echo {SENTINEL}"):
            return Ran(0, f"{SENTINEL}\n")
        if found := _FIND.fullmatch(command):
            return self._find(found[1])
        if found := _READ.fullmatch(command):
            return self._read(found[2], reset=bool(found[1]))
        if found := _EDIT.fullmatch(command):
            return self._edit(found[1], found[2], found[3])
        if found := _TEST.fullmatch(command):
            return self._test(found[1], found[2], found[3])
        self.num_unknown += 1
        return _failed(command)

    def _find(self, text: str) -> Ran:
        pattern = re.compile(re.escape(text).replace(r"\.", "."))
        lines = [
            f"./{path}:{number}:{line}\n"
            for path, source in self.files.items()
            for number, line in enumerate(source.splitlines(), 1)
            if pattern.search(line)
        ]
        return Ran(0 if lines else 1, "".join(lines))

    def _read(self, path: str, *, reset: bool) -> Ran:
        if reset:
            self.files = dict(self._committed)
        text = self._text(path)
        if text is None:
            return Ran(1, f"cat: {path}: {self._absence(path)}\n")
        lines = enumerate(text.splitlines(), 1)
        return Ran(0, "".join(f"{number:6d}\t{line}\n" for number, line in lines))

    def _edit(self, address: str, content: str, path: str) -> Ran:
        text = self._text(path)
        if text is None and self._absence(path) == "Is a directory":
            return Ran(4, f"sed: couldn't edit {path}: not a regular file\n")
        if text is None:
            return Ran(2, f"sed: can't read {path}: No such file or directory\n")
        if (line := int(address)) == 0:
            where = f"char {len(address) + 1}"
            return Ran(1, f"sed: -e expression #1, {where}: invalid usage of line address 0\n")
        lines = text.splitlines()
        before = lines[line - 1] if line <= len(lines) else ""
        self.files[_plain(path)] = replace_line(text, line, content.replace("&", before))
        return Ran(0, "")

    def _test(self, module: str, function: str, expression: str) -> Ran:
        source = self.files.get(module.replace(".", "/") + ".py")
        if source is None:
            missing = module if "." not in module or self._has_folder(module) else module.split(".")[0]
            return Ran(0, f"ModuleNotFoundError: No module named '{missing}'\n")
        absent = self._interpreter.evaluate(source, (function,))[0]
        if absent.error.startswith("NameError"):
            where = f"/workspace/{module.replace('.', '/')}.py"
            return Ran(0, f"ImportError: cannot import name '{function}' from '{module}' ({where})\n")
        done = self._interpreter.evaluate(source, (expression,))[0]
        if done.value is None and not done.error:
            return Ran(TIMED_OUT, "")
        return Ran(0, f"{done.error or done.value}\n")

    def _has_folder(self, module: str) -> bool:
        return any(path.startswith(module.split(".")[0] + "/") for path in self.files)

    def _text(self, path: str) -> str | None:
        return self.files.get(_plain(path))

    def _absence(self, path: str) -> str:
        folder = _plain(path).rstrip("/") + "/"
        known = any(one.startswith(folder) for one in self.files) or folder in ("./", "/")
        return "Is a directory" if known else "No such file or directory"


def _plain(path: str) -> str:
    return path.removeprefix("./")


def _failed(command: str) -> Ran:
    try:
        words = shlex.split(command)
    except ValueError:
        quote = '"' if command.count('"') % 2 else "'"
        return Ran(2, f"bash: -c: line 1: unexpected EOF while looking for matching `{quote}'\n")
    return Ran(127, f"bash: line 1: {words[0] if words else ''}: command not found\n")


def solves(task: DemoTask, files: dict[str, str], interpreter: Interpreter) -> bool:
    """Whether the hidden tests pass."""
    tests = tuple(f"({call}) == ({value})" for call, value in task.checks)
    found = interpreter.evaluate(files[task.path], tests)
    return all(one.value == "True" for one in found)
