"""The kinds of bug: for each, a small function with one wrong line, the hint that an issue gives, and a guess made without
reading the code.

For every kind but the one-line forms the file must be read: the wrong line's place, its variables or both appear neither in
the issue nor in the ``def`` line. `Bug.guess` is what someone writes who has read only these two.
"""

import random
from collections.abc import Callable

import msgspec

OPERATORS = {"+": "add", "-": "subtract", "*": "multiply"}
ONE_LINE_SHARE = 0.3


class Bug(msgspec.Struct, frozen=True, kw_only=True):
    """A function with one wrong line.

    `lines` is the broken body, `index` the wrong line in it, `good` its repair. `mark` is a text that is found in the wrong
    line and nowhere else in its file. `guess` is a pair (lines below the ``def``, text) written without reading the body.
    """

    kind: str
    parameters: tuple[str, ...]
    lines: tuple[str, ...]
    index: int
    good: str
    hint: str
    mark: str
    guess: tuple[int, str]
    calls: tuple[tuple[object, ...], ...]

    def body(self, *, fixed: bool) -> tuple[str, ...]:
        """The body's lines, with the wrong line or with its repair."""
        if not fixed:
            return self.lines
        return (*self.lines[: self.index], self.good, *self.lines[self.index + 1 :])


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
) -> Bug:
    """A bug in an expression of two variables: ``return <expr>`` at once, or inside a longer body."""
    a, b, v, w, _ = _names(rng, words)
    guess = (1, f"    return {good(a, b)}")
    if rng.random() < ONE_LINE_SHARE:
        lines, index, fixed = [f"    return {bad(a, b)}"], 0, guess[1]
    else:
        left, right = rng.choice([(v, b), (v, a), (b, v)])
        lines = [_prologue(rng, v, a, banned), f"    {w} = {bad(left, right)}", f"    return {w}"]
        index, fixed = 1, f"    {w} = {good(left, right)}"
        if rng.random() < 0.4:
            lines.insert(0, f"    {b} = {b} + {rng.randint(2, 9)}" if banned != "+" else f"    {b} = {b} * 2")
            index = 2
    return Bug(
        kind=kind,
        parameters=(a, b),
        lines=tuple(lines),
        index=index,
        good=fixed,
        hint=hint,
        mark=mark,
        guess=guess,
        calls=_numbers(rng),
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
        guess=(1, f"    return {a} * {good}"),
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
        guess=(1, "    total = 0"),
        calls=_lists(rng),
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
        guess=(2, f"    for step in range({a} + 1):"),
        calls=_numbers(rng),
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
        guess=(1, f"    return {a}[{good}]"),
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
        guess=(1, f"    if {a} >= {b}:"),
        calls=(*calls, (limits[0] + bound + 3, limits[0]), (1, limits[0])),
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
        guess=(1, f"    return {a} {operator} {b}"),
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


def make_bug(rng: random.Random, kind: str, words: tuple[str, ...]) -> Bug:
    """A random bug of one of `KINDS`, its variables drawn from `words` (at least five of them)."""
    return KINDS[kind](rng, words)
