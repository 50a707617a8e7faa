"""The generated family of tasks: the repository, issue and hidden tests that belong to a seed, the words of their names, and the kinds of
bug.

`make_task` is a pure function of (seed, split, number). A repository has two or three modules. One function has one wrong
line. The issue names the function, hints at the fault and gives one failing example. The hidden tests repeat the example and
add further calls.

A function is called ``verb_noun``. A hash of the whole name decides its split, so the warm start, training and the held-out set share
words but never a name.

Each kind of bug is a small function with one wrong line and the hint that an issue gives. The hint of a kind in `OPEN_KINDS` does not
spell the repair: "it leaves out the last step" may mean ``range(a + 1)`` or ``range(1, a)``. `Bug.others` are such repairs, all wrong. The
teacher of the lessons takes one of them or the right one, each with the same probability, so which is right can be learned from test
results only.

The bugs of `UNSEEN_KINDS` have structures that no lesson and no training task has; they are a held-out set of their own.
"""

import hashlib
import random
import re
from collections.abc import Callable
from typing import Literal, cast

import msgspec

OPERATORS = {"+": "add", "-": "subtract", "*": "multiply"}
ONE_LINE_SHARE = 0.3
OTHER_COMPARISONS = ("<", "<=", "==")
OTHER_SWAPS = ("{x} + {y}", "{x} * {y}", "{y} * {x}")


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A function with one wrong line.

    `lines` is the broken body, `index` the wrong line in it, `good` its repair. `mark` is a text that occurs in the wrong line and nowhere
    else in its file. `others` are wrong repairs that the hint does not exclude.
    """

    kind: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    index: int
    good: str
    hint: str
    mark: str
    calls: tuple[tuple[object, ...], ...]
    others: tuple[str, ...] = ()

    def body(self, repair: str) -> tuple[str, ...]:
        """The body's lines, with `repair` in the place of the wrong line."""
        return (*self.lines[: self.index], repair, *self.lines[self.index + 1 :])


def _numbers(rng: random.Random, count: int = 3) -> tuple[tuple[object, ...], ...]:
    return tuple((rng.randint(5, 9), rng.randint(2, 4)) for _ in range(count))


def _lists(rng: random.Random) -> tuple[tuple[object, ...], ...]:
    return tuple((rng.sample(range(1, 10), 3),) for _ in range(3))


def _names(rng: random.Random, words: tuple[str, ...]) -> list[str]:
    return rng.sample(words, 5)


def _prologue(rng: random.Random, target: str, source: str, banned: str) -> str:
    operator = rng.choice([o for o in OPERATORS if o != banned])
    return f"    {target} = {source} {operator} {rng.randint(2, 9)}"


def _expression(
    rng: random.Random,
    words: tuple[str, ...],
    *,
    kind: str,
    hint: str,
    banned: str,
    mark: str,
    bad: Callable[[str, str], str],
    good: Callable[[str, str], str],
    others: tuple[Callable[[str, str], str], ...] = (),
) -> Bug:
    """A bug in an expression of two variables: directly in ``return <expr>``, or inside a longer body."""
    a, b, v, w, _ = _names(rng, words)
    if rng.random() < ONE_LINE_SHARE:
        left, right, before = a, b, "    return"
        lines, index = [f"{before} {bad(left, right)}"], 0
    else:
        left, right = rng.choice([(v, b), (v, a), (b, v)])
        before = f"    {w} ="
        lines = [_prologue(rng, v, a, banned), f"{before} {bad(left, right)}", f"    return {w}"]
        index = 1
        if rng.random() < 0.4:
            lines.insert(0, f"    {b} = {b} + {rng.randint(2, 9)}" if banned != "+" else f"    {b} = {b} * 2")
            index = 2
    return Bug(
        kind=kind,
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=f"{before} {good(left, right)}",
        hint=hint,
        mark=mark,
        calls=_numbers(rng),
        others=tuple(f"{before} {other(left, right)}" for other in others),
    )


def _operator(rng: random.Random, words: tuple[str, ...]) -> Bug:
    good, bad = rng.sample(list(OPERATORS), 2)
    return _expression(
        rng,
        words,
        kind="operator",
        hint=f"it should {OPERATORS[good]}, not {OPERATORS[bad]}",
        banned=bad,
        mark=f" {bad} ",
        bad=lambda x, y: f"{x} {bad} {y}",
        good=lambda x, y: f"{x} {good} {y}",
    )


def _swap(rng: random.Random, words: tuple[str, ...]) -> Bug:
    return _expression(
        rng,
        words,
        kind="swap",
        hint="it should subtract the other way round",
        banned="-",
        mark=" - ",
        bad=lambda x, y: f"{y} - {x}",
        good=lambda x, y: f"{x} - {y}",
        others=tuple(lambda x, y, form=form: form.format(x=x, y=y) for form in OTHER_SWAPS),
    )


def _extreme(rng: random.Random, words: tuple[str, ...]) -> Bug:
    good, bad, which = rng.choice([("max", "min", "larger"), ("min", "max", "smaller")])
    return _expression(
        rng,
        words,
        kind="extreme",
        hint=f"it should take the {which} one",
        banned="",
        mark=f"{bad}(",
        bad=lambda x, y: f"{bad}({x}, {y})",
        good=lambda x, y: f"{good}({x}, {y})",
    )


def _constant(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, v, w, _ = _names(rng, words)
    good, bad = rng.sample(range(11, 60), 2)
    operator = rng.choice(list(OPERATORS))
    lines = [_prologue(rng, v, b, ""), f"    {w} = {a} {operator} {bad}", f"    return {w} + {v}"]
    index = 1
    if rng.random() < 0.5:
        lines[0], lines[1], index = lines[1], lines[0], 0
    return Bug(
        kind="constant",
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=lines[index].replace(str(bad), str(good)),
        hint=f"it uses {bad} where {good} is right",
        mark=f" {bad}",
        calls=_numbers(rng),
    )


def _start(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, _, total, item, extra = _names(rng, words)
    bad = rng.randint(1, 9)
    lines = [
        f"    {total} = {bad}",
        f"    for {item} in {a}:",
        f"        {total} += {item}",
        f"    return {total}",
    ]
    index = 0
    if rng.random() < 0.5:
        lines.insert(0, f"    {extra} = {a}[1]")
        lines[-1] = f"    return {total} + {extra}"
        index = 1
    return Bug(
        kind="start",
        parameters=(a,),
        lines=tuple(lines),
        index=index,
        good=f"    {total} = 0",
        hint="it should start counting at 0",
        mark=f"{total} = {bad}",
        calls=_lists(rng),
        others=tuple(f"    {total} = {number}" for number in rng.sample([-1, 1, 2, 10], 3)),
    )


def _range(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, total, step, _ = _names(rng, words)
    lines = [
        f"    {total} = {b}",
        f"    for {step} in range({a}):",
        f"        {total} += {step}",
        f"    return {total}",
    ]
    index = 1
    if rng.random() < 0.5:
        lines.insert(0, f"    {b} = {b} * {rng.randint(2, 9)}")
        index = 2
    return Bug(
        kind="range",
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=f"    for {step} in range({a} + 1):",
        hint="it leaves out the last step",
        mark="range(",
        calls=_numbers(rng),
        others=tuple(f"    for {step} in range({end}):" for end in (f"{a} - 1", f"{a} + 2", f"1, {a}")),
    )


def _index(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, _, v, w, _ = _names(rng, words)
    good, bad, which = rng.choice([("-1", "0", "last"), ("0", "-1", "first")])
    lines = [f"    {v} = {a}[1]", f"    {w} = {a}[{bad}]", f"    return {v} * {w}"]
    index = 1
    if rng.random() < 0.5:
        lines[0], lines[1], index = lines[1], lines[0], 0
    if rng.random() < ONE_LINE_SHARE:
        lines, index = [f"    return {a}[{bad}]"], 0
    return Bug(
        kind="index",
        parameters=(a,),
        lines=tuple(lines),
        index=index,
        good=lines[index].replace(f"[{bad}]", f"[{good}]"),
        hint=f"it should look at the {which} item",
        mark=f"[{bad}]",
        calls=_lists(rng),
    )


def _edge(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, v, _, _ = _names(rng, words)
    lines = [
        f"    {v} = {b} + {rng.randint(2, 5)}",
        f"    if {a} > {v}:",
        f"        return {a} + 1",
        f"    return {v} - 1",
    ]
    index = 1
    bound = int(lines[0].rsplit(" ", 1)[1])
    if rng.random() < 0.5:
        lines.insert(0, f"    {a} = {a} + 1")
        index = 2
    limits = rng.sample(range(2, 9), 3)
    calls = tuple((limit + bound - (index - 1), limit) for limit in limits)
    return Bug(
        kind="edge",
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=f"    if {a} >= {v}:",
        hint="the limit itself should pass",
        mark=" > ",
        calls=(*calls, (limits[0] + bound + 3, limits[0]), (1, limits[0])),
        others=tuple(f"    if {a} {sign} {v}:" for sign in OTHER_COMPARISONS),
    )


def _unused(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, v, w, _ = _names(rng, words)
    operator = rng.choice(["+", "*"])
    lines = [
        _prologue(rng, v, a, ""),
        f"    {w} = {v} {operator} {v}",
        f"    return {w} - {rng.randint(2, 9)}",
    ]
    index = 1
    if rng.random() < 0.4:
        lines.insert(0, f"    {a} = {a} + 1")
        index = 2
    return Bug(
        kind="unused",
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=f"    {w} = {v} {operator} {b}",
        hint=f"it makes no use of {b}",
        mark=f"{v} {operator} {v}",
        calls=_numbers(rng),
        others=tuple(f"    {w} = {x} {operator} {y}" for x, y in ((b, b), (v, a), (a, b))),
    )


def _edge_parameter(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, _, _, _ = _names(rng, words)
    limits = rng.sample(range(2, 9), 3)
    return Bug(
        kind="edge-parameter",
        parameters=(a, b),
        lines=(f"    if {a} > {b}:", f"        return {a} * {rng.randint(2, 9)}", f"    return {b} + 1"),
        index=0,
        good=f"    if {a} >= {b}:",
        hint="the limit itself should pass",
        mark=" > ",
        calls=(*((limit, limit) for limit in limits), (limits[0] + 3, limits[0]), (1, limits[0])),
    )


def _range_local(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, v, total, step = _names(rng, words)
    return Bug(
        kind="range-local",
        parameters=(a, b),
        lines=(
            f"    {v} = {a} + {rng.randint(2, 5)}",
            f"    {total} = {b}",
            f"    for {step} in range({v}):",
            f"        {total} += {step}",
            f"    return {total}",
        ),
        index=2,
        good=f"    for {step} in range({v} + 1):",
        hint="it leaves out the last step",
        mark="range(",
        calls=_numbers(rng),
    )


def _swap_return(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, v, _, _ = _names(rng, words)
    return Bug(
        kind="swap-return",
        parameters=(a, b),
        lines=(f"    {v} = {a} * {rng.randint(2, 9)}", f"    return {b} - {v}"),
        index=1,
        good=f"    return {v} - {b}",
        hint="it should subtract the other way round",
        mark=" - ",
        calls=_numbers(rng),
    )


def _operator_branch(rng: random.Random, words: tuple[str, ...]) -> Bug:
    a, b, _, _, _ = _names(rng, words)
    good, bad = rng.sample(list(OPERATORS), 2)
    return Bug(
        kind="operator-branch",
        parameters=(a, b),
        lines=(f"    if {a} > {b}:", f"        return {a} {bad} {b}", f"    return {a}"),
        index=1,
        good=f"        return {a} {good} {b}",
        hint=f"it should {OPERATORS[good]}, not {OPERATORS[bad]}",
        mark=f" {bad} ",
        calls=_numbers(rng),
    )


KINDS: dict[str, Callable[[random.Random, tuple[str, ...]], Bug]] = {
    "operator": _operator,
    "swap": _swap,
    "extreme": _extreme,
    "constant": _constant,
    "start": _start,
    "range": _range,
    "index": _index,
    "edge": _edge,
    "unused": _unused,
}
OPEN_KINDS = ("swap", "start", "range", "edge", "unused")  # the hint does not spell the repair
UNSEEN_KINDS: dict[str, Callable[[random.Random, tuple[str, ...]], Bug]] = {
    "edge-parameter": _edge_parameter,
    "range-local": _range_local,
    "swap-return": _swap_return,
    "operator-branch": _operator_branch,
}


Split = Literal["warmstart", "train", "heldout", "unseen"]

DIRECTORIES = ("src", "lib", "app", "core", "pkg", "base")
VERBS = (
    "make", "load", "scale", "count", "merge", "check", "apply", "build", "split", "clamp", "shift",
    "blend", "score", "rank", "price", "grade", "weigh", "trim", "pack", "group", "parse", "fetch",
    "round", "sort", "match", "audit", "plan", "route", "send", "spend",
)  # fmt: skip
NOUNS = (
    "tax", "order", "cart", "user", "stock", "bonus", "angle", "batch", "queue", "page", "tank", "seat",
    "fuel", "wage", "loan", "bill", "team", "slot", "grid", "cell", "node", "task", "item", "card",
    "coin", "ticket", "city", "road", "lamp", "wheel", "train", "plane", "piece", "color", "sound",
    "cloud", "river", "field", "tower", "bridge", "garden", "market", "letter", "number", "window",
    "sheet", "table", "paper", "frame", "panel",
)  # fmt: skip
LOCALS = (
    "rate", "fee", "limit", "total", "width", "depth", "level", "share", "extra", "step", "first",
    "second", "left", "right", "low", "high", "old", "new", "size", "gap", "mark", "cost", "gain",
    "weight", "speed", "budget", "target", "start", "part", "value",
)  # fmt: skip
_HASH_RANGES: dict[Split, range] = {
    "warmstart": range(5),
    "train": range(5, 7),
    "heldout": range(7, 9),
    "unseen": range(9, 10),
}


def split_of(name: str) -> Split:
    """The split of a function name, which depends on a hash of the name."""
    bucket = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10
    return next(split for split, buckets in _HASH_RANGES.items() if bucket in buckets)


def function_name(rng: random.Random, split: Split) -> str:
    """A random function name that belongs to `split`."""
    while True:
        name = f"{rng.choice(VERBS)}_{rng.choice(NOUNS)}"
        if split_of(name) == split:
            return name


def module_name(rng: random.Random) -> str:
    """A random module name."""
    return rng.choice(NOUNS)


HEADERS = ("import math", "import os", "import sys", "# small sums", "# kept simple", "")


class DemoTask(msgspec.Struct, frozen=True, kw_only=True):
    """One broken repository.

    `line` counts from 1 in `path`; `good` is its repair, and `others` are wrong ones; `checks` pairs a call with the text of its right
    value.
    """

    name: str
    split: Split
    kind: str
    files: dict[str, str]
    path: str
    function: str
    line: int
    good: str
    others: tuple[str, ...]
    issue: str
    checks: tuple[tuple[str, str], ...]

    @property
    def example(self) -> str:
        """The issue's example as a Python expression that becomes true with the fix."""
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


def kind_of(name: str) -> str:
    """The kind of bug of the task with this name. Raises ValueError if no task has it."""
    found = re.fullmatch(r"(warmstart|train|heldout|unseen)-s(\d+)-(\d+)", name)
    if found is None:
        raise ValueError(
            f"name: {name!r} is not a task of the demo; these have names such as heldout-s0-0007"
        )
    return make_task(int(found[2]), cast(Split, found[1]), int(found[3])).kind


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
    """One attempt; None if the checks do not tell its right repair from the others, or if another line of its file looks the same."""
    kinds = UNSEEN_KINDS if split == "unseen" else KINDS
    bug = rng.choice(list(kinds.values()))(rng, LOCALS)
    directory = rng.choice(DIRECTORIES)
    functions = _distinct(rng, split, 4)
    modules = list(dict.fromkeys(module_name(rng) for _ in range(3)))
    if len(modules) < 2:
        return None
    path = f"{directory}/{modules[0]}.py"
    source, line = _module(rng, functions, bug)
    files = {path: source}
    for module, function in zip(modules[1:], functions[2:], strict=False):
        files[f"{directory}/{module}.py"] = "\n".join([*_header(rng), *_sound_function(rng, function), ""])
    checks = _checks(functions[0], bug)
    if checks is None or source.count(bug.mark) != 1:
        return None
    (call, value), wrong = checks[0], _value(functions[0], bug, checks[0][0], bug.lines[bug.index])
    return DemoTask(
        name=name,
        split=split,
        kind=bug.kind,
        files=files,
        path=path,
        function=functions[0],
        line=line,
        good=bug.good,
        others=bug.others,
        checks=checks,
        issue=f"{functions[0]} is wrong: {bug.hint}. {call} should be {value}, not {wrong}.",
    )


def _distinct(rng: random.Random, split: Split, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names[function_name(rng, split)] = None
    return list(names)


def _header(rng: random.Random) -> list[str]:
    return [rng.choice(HEADERS) for _ in range(rng.randint(0, 3))]


def _function(name: str, bug: Bug, repair: str) -> list[str]:
    return [f"def {name}({', '.join(bug.parameters)}):", *bug.body(repair)]


def _sound_function(rng: random.Random, name: str) -> list[str]:
    """A function without a bug."""
    bug = rng.choice(list(KINDS.values()))(rng, LOCALS)
    return _function(name, bug, bug.good)


def _module(rng: random.Random, functions: list[str], bug: Bug) -> tuple[str, int]:
    """The broken module's text and the number of its wrong line."""
    broken = _function(functions[0], bug, bug.lines[bug.index])
    lines = _header(rng)
    place = rng.random()
    if place < 0.2:
        lines += [*_sound_function(rng, functions[1]), ""]
    line = len(lines) + 2 + bug.index
    lines += broken
    if place > 0.8:
        lines += ["", *_sound_function(rng, functions[1])]
    return "".join(f"{each}\n" for each in lines), line


def _value(name: str, bug: Bug, call: str, repair: str) -> str:
    """The text of a call's value. The source is generated by this module, so running it here is safe."""
    namespace: dict[str, object] = {}
    exec("\n".join(_function(name, bug, repair)), namespace)
    return repr(eval(call, namespace))


def _checks(name: str, bug: Bug) -> tuple[tuple[str, str], ...] | None:
    """The calls with their right values, one that fails before the repair first; None if any wrong line gives these values."""
    calls = [f"{name}({', '.join(map(repr, arguments))})" for arguments in bug.calls]
    right = {call: _value(name, bug, call, bug.good) for call in calls}
    failing = [call for call in right if _value(name, bug, call, bug.lines[bug.index]) != right[call]]
    if not failing or any(
        all(_value(name, bug, call, other) == right[call] for call in calls) for other in bug.others
    ):
        return None
    return tuple(sorted(right.items(), key=lambda check: check[0] != failing[0]))
