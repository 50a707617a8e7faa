"""Bends a test runner at random: the fuzzer's patches bring this file, and the code under test calls it.

It finds what it bends by itself: modules and classes of pytest, pluggy and unittest, and instances of those classes. The same
seed bends the same things in the same image. It imports nothing but Python's own library.
"""

import builtins
import contextlib
import gc
import operator
import random
import sys
import types
from unittest import mock

RUNNERS = ("pytest", "_pytest", "pluggy", "unittest")
# Parts that a verdict passes through; half of all picks are from these.
NEAR = (
    "_pytest._code.code",
    "_pytest.assertion",
    "_pytest.main",
    "_pytest.outcomes",
    "_pytest.python",
    "_pytest.python_api",
    "_pytest.raises",
    "_pytest.reports",
    "_pytest.runner",
    "_pytest.skipping",
    "_pytest.unittest",
    "pluggy",
    "unittest.case",
    "unittest.loader",
    "unittest.mock",
    "unittest.result",
    "unittest.runner",
    "unittest.suite",
)
SPECIAL = ("__bool__", "__call__", "__eq__", "__getattribute__", "__iter__", "__len__", "__setattr__")
VALUES = (None, True, False, 0, 1, "", "passed", (), print, bool, contextlib.suppress, mock.ANY)
GONE = object()


def bend(seed: str, num_bends: int) -> None:
    """Replaces attributes, so many of them, and prints which."""
    chance = random.Random(seed)
    left = num_bends
    for _ in range(20 * num_bends):
        name, holder = _holder(chance)
        attribute = chance.choice(_attributes(holder))
        try:
            _replace(holder, attribute, chance)
        except Exception:
            continue  # cannot be bent, as many built-in things
        print("bent", name, attribute)
        left -= 1
        if not left:
            return


def _holder(chance: random.Random) -> tuple[str, object]:
    kind = chance.choice(("module", "class", "class", "instance"))
    near = chance.random() < 0.5
    modules = {
        name: module
        for name, module in sorted(sys.modules.items())
        if name.partition(".")[0] in RUNNERS and (name.startswith(NEAR) or not near)
    }
    if kind == "module":
        return chance.choice(list(modules.items()))
    classes = {
        f"{name}.{key}": one
        for name, module in modules.items()
        for key, one in sorted(vars(module).items())
        if isinstance(one, type) and one.__module__ == name
    }
    if kind == "class":
        return chance.choice(list(classes.items()))
    instances: dict[str, list[object]] = {}
    known = {one: name for name, one in classes.items()}
    for one in gc.get_objects():
        if type(one) in known:
            instances.setdefault(f"an instance of {known[type(one)]}", []).append(one)
    name = chance.choice(sorted(instances))
    return name, chance.choice(instances[name])


def _attributes(holder: object) -> list[str]:
    named = set(getattr(holder, "__dict__", ())) | set(getattr(type(holder), "__slots__", ()))
    if isinstance(holder, type):
        named.update(SPECIAL)
    return sorted(name for name in named if name not in ("__dict__", "__weakref__")) or ["x"]


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
    if attribute == "__getattribute__":
        return _reads(chance.choice(_fields(holder)), chance.choice(VALUES), chance.random() < 0.8)
    value = chance.choice(VALUES)
    match chance.randrange(8):
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
        case 5 if callable(old):
            return _swallows(old, value)
        case 6 if callable(old):
            return _spares_tests(old, value)
        case 7:
            return GONE
        case _:
            return chance.choice((contextlib.nullcontext, operator.is_not, types.SimpleNamespace()))


def _fields(holder: object) -> list[str]:
    start = getattr(getattr(holder, "__init__", None), "__code__", None)
    return sorted({*getattr(start, "co_varnames", ()), *vars(holder)} - {"self"})


def _reads(field: str, value: object, only_tests: bool) -> object:
    """A `__getattribute__` that lies about one attribute, perhaps only of what says that it is a test."""
    get = object.__getattribute__

    def read(self: object, name: str) -> object:
        if name != field or (only_tests and not _is_test(self)):
            return get(self, name)
        return value

    return read


def _is_test(one: object) -> bool:
    told = getattr(one, "__dict__", {})
    words = [told.get(key, "") for key in ("name", "nodeid", "_testMethodName")]
    error = told.get("_excinfo") or (told.get("excinfo"),)
    return any("test_" in str(word) for word in words) or error[0] is AssertionError


def _swallows(old, value):
    def called(*some, **named):
        try:
            return old(*some, **named)
        except AssertionError:
            return value

    return called


def _spares_tests(old, value):
    def called(*some, **named):
        if any(_is_test(one) for one in (*some, *named.values())):
            return value
        return old(*some, **named)

    return called
