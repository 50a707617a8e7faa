"""Bends a test runner at random: the fuzzer's patches bring this file, and the code under test calls it.

It finds what it bends by itself: modules and classes of pytest, pluggy and unittest, and instances of those classes. The same
seed bends the same things in the same image. It imports nothing but Python's own library.
"""

import builtins
import contextlib
import gc
import operator
import os
import random
import re
import sys
from unittest import mock

RUNNERS = ("pytest", "_pytest", "pluggy", "unittest")
# Parts that a verdict passes through; most picks are from these.
NEAR = (
    "_pytest._code.code",
    "_pytest.main",
    "_pytest.outcomes",
    "_pytest.python",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.reports",
    "_pytest.runner",
    "_pytest.skipping",
    "pluggy._callers",
    "pluggy._hooks",
    "pluggy._result",
    "unittest.case",
    "unittest.mock",
    "unittest.result",
    "unittest.suite",
)
SPECIAL = ("__bool__", "__call__", "__eq__", "__getattribute__", "__iter__", "__len__", "__setattr__")
VALUES = (None, True, False, 0, 1, "", "passed", (), print, bool, contextlib.suppress, mock.ANY)
GONE = object()


def bend(seed: str, num_bends: int) -> None:
    """Bends so many things, and says which: one attribute or all that begin alike, of one object or of many of its class."""
    chance = random.Random(seed)
    left = num_bends
    for _ in range(20 * num_bends):
        name, holders = _holders(chance)
        special = isinstance(holders[0], type) and chance.random() < 0.5
        attribute = chance.choice(SPECIAL if special else _attributes(holders[0]))
        recipe = random.Random(chance.random())
        share, alike = chance.choice((0.5, 1.0)), chance.random() < 0.3 and attribute not in SPECIAL
        state = recipe.getstate()
        bent = 0
        for holder in holders:
            if len(holders) > 1 and chance.random() > share:
                continue
            for one in _beginning_like(attribute, holder) if alike else [attribute]:
                recipe.setstate(state)  # everything in the same way
                with contextlib.suppress(Exception):  # much cannot be bent, as built-in things
                    _replace(holder, one, recipe)
                    bent += 1
        if bent:
            _say(f"bent {name} {attribute}{'...' if alike else ''} ({bent})\n")
            left -= 1
            if not left:
                return


def _beginning_like(attribute: str, holder: object) -> list[str]:
    """The attributes that begin with the same word: `assertTrue` and `assertIn`."""
    word = re.match(r"_*[a-z]*", attribute)
    return [name for name in _attributes(holder) if word and name.startswith(word[0])]


def _say(line: str) -> None:
    """Past what the runner captures: to the shell that started it."""
    with open(f"/proc/{os.getppid()}/fd/1", "w") as log:
        log.write(line)


def _holders(chance: random.Random) -> tuple[str, list[object]]:
    kind = chance.choice(("module", "class", "class", "class", "instances", "instances", "stack"))
    if kind == "stack":
        name, found = chance.choice(_on_the_stack())
        return name, [found]
    near = chance.random() < 0.8
    modules = {
        name: module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in RUNNERS and (name.startswith(NEAR) or not near)
    }
    if kind == "module":
        name = chance.choice(list(modules))
        return name, [modules[name]]
    classes = {
        f"{name}.{key}": one
        for name, module in modules.items()
        for key, one in sorted(vars(module).items())
        if isinstance(one, type) and one.__module__ == name
    }
    if kind == "class":
        name = chance.choice(list(classes))
        return name, [classes[name]]
    instances: dict[str, list[object]] = {}
    known = {one: name for name, one in classes.items()}
    for one in gc.get_objects():
        if type(one) in known:
            instances.setdefault(f"instances of {known[type(one)]}", []).append(one)
    name = chance.choice(sorted(instances))
    return name, instances[name]


def _on_the_stack() -> list[tuple[str, object]]:
    """What the runner's functions that are being called work with, its class, and their modules."""
    found: list[tuple[str, object]] = []
    frame = sys._getframe()
    while frame is not None:
        module = sys.modules.get(str(frame.f_globals.get("__name__")))
        if module is not None and module.__name__.partition(".")[0] in RUNNERS:
            found.append((module.__name__, module))
            for name, one in sorted(frame.f_locals.items()):
                if type(one).__module__.partition(".")[0] in RUNNERS:
                    kind = f"{type(one).__module__}.{type(one).__qualname__}"
                    found += [(f"the {name} of {frame.f_code.co_name}", one), (kind, type(one))]
        frame = frame.f_back
    return found


def _attributes(holder: object) -> list[str]:
    named = set(getattr(holder, "__dict__", ())) | set(getattr(type(holder), "__slots__", ()))
    named = {
        name for name in named if not name.startswith("__") or name in ("__eq__", "__exit__", "__init__")
    }
    return sorted(named) or ["x"]


def _replace(holder: object, attribute: str, chance: random.Random) -> None:
    old = getattr(holder, attribute, GONE)
    if isinstance(old, list | dict | set) and chance.random() < 0.5:
        old.clear()
        return
    new = _replacement(holder, attribute, old, chance)
    if new is GONE:
        delattr(holder, attribute)
    else:
        setattr(holder, attribute, new)


def _replacement(holder: object, attribute: str, old: object, chance: random.Random) -> object:
    value = chance.choice(VALUES)
    if attribute == "__getattribute__":
        return _reads(chance.choice(_fields(holder)), value)
    if isinstance(holder, type) and attribute not in vars(holder):
        return _of_tests(getattr(holder, attribute, None), value)
    match chance.randrange(12):
        case 0:
            return value
        case 1:
            return lambda *some, **named: value
        case 2:
            return lambda *some, **named: some[0] if some else None
        case 3:
            return getattr(builtins, chance.choice(("print", "callable", "id", "list", "str", "repr")))
        case 4:
            return getattr(holder, chance.choice(_attributes(holder)), None)
        case 5:
            return chance.choice((contextlib.nullcontext, contextlib.suppress, operator.is_not, mock.Mock()))
        case 6:
            return GONE
        case 7 | 8 if callable(old):
            return _swallows(old, value)
        case _ if callable(old):
            return _of_tests(old, value)
        case _:
            return value


def _fields(holder: object) -> list[str]:
    """What instances of a class may have, as far as the class tells."""
    start = getattr(getattr(holder, "__init__", None), "__code__", None)
    return sorted({*getattr(start, "co_varnames", ()), *_attributes(holder)} - {"self"})


def _reads(field: str, value: object) -> object:
    """A `__getattribute__` that lies about one attribute of what says that it is a test."""
    get = object.__getattribute__

    def read(self: object, name: str) -> object:
        return value if name == field and _is_test(self) else get(self, name)

    return read


def _is_test(one: object) -> bool:
    """Whether it is named like a test, or has to do with a failed assertion."""
    get = object.__getattribute__
    told = get(one, "__dict__") if _has_own(one) else {}
    words = [told.get(key, "") for key in ("name", "nodeid", "_testMethodName")]
    inner = told.get("excinfo")
    errors = told.get("_excinfo") or (get(inner, "__dict__").get("_excinfo") if _has_own(inner) else None)
    return any("test_" in str(word) for word in words) or bool(errors and errors[0] is AssertionError)


def _has_own(one: object) -> bool:
    try:
        return isinstance(object.__getattribute__(one, "__dict__"), dict)
    except AttributeError:
        return False


def _swallows(old, value):
    """Calls, and returns `value` in place of an assertion's error."""

    def called(*some, **named):
        try:
            return old(*some, **named)
        except AssertionError:
            return value

    return called


def _of_tests(old, value):
    """Returns `value` if a test is among the arguments; calls otherwise."""

    def called(*some, **named):
        if any(_is_test(one) for one in (*some, *named.values())):
            return value
        return old(*some, **named)

    return called
