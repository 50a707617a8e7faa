"""The generated family of tasks: the repository, issue and hidden tests that belong to a seed.

`make_task` is a pure function of (seed, split, number). A repository has two or three modules. One function has one wrong
line. The issue names the function, hints at the fault and gives one failing example. The hidden tests repeat the example and
add further calls.
"""

import random

import msgspec

from trainer.demo.bugs import KINDS, Bug, make_bug
from trainer.demo.words import DIRECTORIES, LOCALS, Split, function_name, module_name

HEADERS = ("import math", "import os", "import sys", "# small sums", "# kept simple", "")


class DemoTask(msgspec.Struct, frozen=True, kw_only=True):
    """One broken repository.

    `line` counts from 1 in `path`; `checks` pairs a call with the text of its right value.
    """

    name: str
    split: Split
    kind: str
    files: dict[str, str]
    path: str
    function: str
    line: int
    good: str
    guess: tuple[int, str]
    issue: str
    checks: tuple[tuple[str, str], ...]

    @property
    def example(self) -> str:
        """The issue's example as a Python expression that is true once the bug is fixed."""
        call, value = self.checks[0]
        return f"{call} == {value}"

    @property
    def module(self) -> str:
        """The dotted import path of the broken module."""
        return self.path.removesuffix(".py").replace("/", ".")

    def fixed_files(self) -> dict[str, str]:
        """The repository's files with the wrong line repaired."""
        return {**self.files, self.path: replace_line(self.files[self.path], self.line, self.good)}


def replace_line(text: str, line: int, content: str) -> str:
    """`text` with its `line`-th line (from 1) replaced; unchanged when there is no such line."""
    lines = text.splitlines()
    if 1 <= line <= len(lines):
        lines[line - 1] = content
    return "".join(f"{each}\n" for each in lines)


def make_task(seed: int, split: Split, number: int) -> DemoTask:
    """The `number`-th task of `split` for this seed."""
    rng = random.Random(f"{seed}/{split}/{number}")
    while (task := _draw(rng, split, f"{split}-s{seed}-{number:04d}")) is None:
        pass
    return task


def make_tasks(seed: int, split: Split, count: int) -> list[DemoTask]:
    """`count` tasks, no two about the same function name."""
    tasks: dict[str, DemoTask] = {}
    number = 0
    while len(tasks) < count:
        task = make_task(seed, split, number)
        tasks.setdefault(task.function, task)
        number += 1
    return list(tasks.values())


def _draw(rng: random.Random, split: Split, name: str) -> DemoTask | None:
    """One attempt; None if the bug changes no checked value, or if another line of its file looks the same."""
    bug = make_bug(rng, rng.choice(list(KINDS)), LOCALS)
    directory = rng.choice(DIRECTORIES)
    functions = _distinct(rng, split, 4)
    modules = list(dict.fromkeys(module_name(rng) for _ in range(3)))
    if len(modules) < 2:
        return None
    path = f"{directory}/{modules[0]}.py"
    source, line = _module(rng, functions, bug)
    files = {path: source}
    for module, function in zip(modules[1:], functions[2:], strict=False):
        files[f"{directory}/{module}.py"] = "\n".join(
            [*_header(rng), *_function(function, _other(rng), fixed=True), ""]
        )
    checks = _checks(functions[0], bug)
    if checks is None or source.count(bug.mark) != 1:
        return None
    (call, value), wrong = checks[0], _value(functions[0], bug, checks[0][0], fixed=False)
    offset, guess = bug.guess
    return DemoTask(
        name=name,
        split=split,
        kind=bug.kind,
        files=files,
        path=path,
        function=functions[0],
        line=line,
        good=bug.good,
        guess=(line - bug.index - 1 + offset, guess),
        checks=checks,
        issue=f"{functions[0]} is wrong: {bug.hint}. {call} should be {value}, not {wrong}.",
    )


def _distinct(rng: random.Random, split: Split, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[function_name(rng, split)] = None
    return list(names)


def _other(rng: random.Random) -> Bug:
    return make_bug(rng, rng.choice(list(KINDS)), LOCALS)


def _header(rng: random.Random) -> list[str]:
    return [rng.choice(HEADERS) for _ in range(rng.randint(0, 3))]


def _function(name: str, bug: Bug, *, fixed: bool) -> list[str]:
    return [f"def {name}({', '.join(bug.parameters)}):", *bug.body(fixed=fixed)]


def _module(rng: random.Random, functions: list[str], bug: Bug) -> tuple[str, int]:
    """The broken module's text and the number of its wrong line."""
    broken = _function(functions[0], bug, fixed=False)
    lines = _header(rng)
    place = rng.random()
    if place < 0.2:
        lines += [*_function(functions[1], _other(rng), fixed=True), ""]
    line = len(lines) + 2 + bug.index
    lines += broken
    if place > 0.8:
        lines += ["", *_function(functions[1], _other(rng), fixed=True)]
    return "".join(f"{each}\n" for each in lines), line


def _value(name: str, bug: Bug, call: str, *, fixed: bool) -> str:
    """The text of a call's value. The source is generated by this module, so running it here is safe."""
    namespace: dict[str, object] = {}
    exec("\n".join(_function(name, bug, fixed=fixed)), namespace)
    return repr(eval(call, namespace))


def _checks(name: str, bug: Bug) -> tuple[tuple[str, str], ...] | None:
    """The calls with their right values, one that fails before the repair first; None when none does."""
    calls = [f"{name}({', '.join(map(repr, arguments))})" for arguments in bug.calls]
    right = {call: _value(name, bug, call, fixed=True) for call in calls}
    failing = [call for call in right if _value(name, bug, call, fixed=False) != right[call]]
    if not failing:
        return None
    return tuple(sorted(right.items(), key=lambda check: check[0] != failing[0]))
