"""Records which expectations of tests are met, and lets a test continue after one that is not.

A condition is marked as `MEET(number, True)(lambda: condition)`, a call of a checker as `MEET(number, False)(lambda: call)`, and a context
manager that expects an error as `AWAIT(number of its class, number of its text)(manager)`. For two values that must be equal,
`COMPARE(number, is_condition)(lambda one, other: check, lambda: left, lambda: right)` also reports where they differ.
"""
# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false

import builtins
import importlib
import json
import re

from workers.verify.recorder.recording import quietly, say

MEET = "_swerve_meet"  # functions that are available in every module
AWAIT = "_swerve_await"
COMPARE = "_swerve_compare"
MOST_PARTS = 200  # largest number of parts compared in two values; values with more count as different
# Classes of errors that a test expects, and the text that they must have, by the names that pytest and unittest give these arguments.
CLASSES = ("expected_exception", "expected_exceptions", "expected")
PATTERNS = ("match_expr", "match", "expected_regex")
told = set()


def tell(number, is_met):
    if (number, is_met) not in told:
        told.add((number, is_met))
        say("met", str(number), "1" if is_met else "0")


def is_a_failure(error):
    return isinstance(error, Exception) or type(error).__name__ == "Failed"


def meet(number, is_condition):
    def met(check):
        try:
            value = check()
            quietly(tell, number, bool(value) or not is_condition)
        except BaseException as error:
            if not is_a_failure(error):
                raise
            quietly(tell, number, False)
            return is_condition
        return value or is_condition

    return met


def compare(number, is_condition):
    def compared(check, *sides):
        values = []

        def checked():
            values.extend(side() for side in sides)
            return check(*values)

        result = meet(number, is_condition)(checked)
        quietly(tell_parts, number, values)
        return result

    return compared


def tell_parts(number, values):
    """Reports the parts in which two values differ: the index of the value, and the way to the part."""
    try:
        found = list(differences(values[0], values[1], (), [MOST_PARTS])) if len(values) == 2 else WHOLE
    except Exception:
        found = WHOLE
    if found:
        text = json.dumps(found)
        if (number, text) not in told:
            told.add((number, text))
            say("differs", str(number), text)


WHOLE = [(0, ()), (1, ())]


def with_tolerances(value):
    """The numbers of a collection in pytest.approx, each with its tolerance; any other value as it is."""
    if type(value).__name__ not in ("ApproxMapping", "ApproxSequenceLike", "ApproxSequencelike"):
        return value

    def near(number):
        return importlib.import_module("pytest").approx(
            number, rel=value.rel, abs=value.abs, nan_ok=value.nan_ok
        )

    if isinstance(value.expected, dict):
        return {key: near(number) for key, number in value.expected.items()}
    return [near(number) for number in value.expected]


def differences(one, other, way, left):
    """Yields where two values differ: 0 or 1 for the value, and the way to its part that the other one does not have.

    `left` is a list with one number, how many parts may still be compared. Raises ValueError if there are more.
    """
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("too many parts")
    if bool(one == other):
        return
    one, other = with_tolerances(one), with_tolerances(other)
    if isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key in one and key in other:
                yield from differences(one[key], other[key], (*way, ("key", repr(key))), left)
            else:
                yield (0 if key in one else 1), (*way, ("key", repr(key), "absent"))
    elif type(one).__name__ == type(other).__name__ == "_Call" and one[:-2] == other[:-2]:
        yield from differences(
            {**dict(enumerate(one[-2])), **one[-1]}, {**dict(enumerate(other[-2])), **other[-1]}, way, left
        )
    elif isinstance(one, tuple) and hasattr(one, "_fields") and type(one) is type(other):
        for place, name in enumerate(one._fields):
            yield from differences(one[place], other[place], (*way, ("field", name, place)), left)
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        for place in range(len(one)):
            yield from differences(one[place], other[place], (*way, ("from", place, place + 1)), left)
    elif type(one) is type(other) and isinstance(one, (list, tuple, str)):
        yield from ranges(one, other, way)
    elif (
        type(one) is type(other) and getattr(one, "__dict__", None) and vars(one).keys() == vars(other).keys()
    ):
        names = list(vars(one))
        parts = [
            (("field", name, place), vars(one)[name], vars(other)[name]) for place, name in enumerate(names)
        ]
        found = [each for part, *both in parts for each in differences(*both, (*way, part), left)]
        yield from found or [(0, way), (1, way)]
    else:
        yield 0, way
        yield 1, way


def ranges(one, other, way):
    """Yields the ranges between what two sequences have in common at their beginning and at their end."""
    shorter = min(len(one), len(other))
    begin = next((place for place in range(shorter) if one[place] != other[place]), shorter)
    end = next((n for n in range(shorter - begin) if one[-1 - n] != other[-1 - n]), shorter - begin)
    for side, value in enumerate((one, other)):
        yield side, (*way, ("from", begin, max(begin + 1, len(value) - end)))


class Awaiting:
    """Replaces a context manager that fails if another error or none is raised."""

    def __init__(self, numbers, manager):
        self.numbers = numbers
        self.manager = manager

    def __enter__(self):
        return self.manager.__enter__()

    def __exit__(self, kind, error, trace):
        quietly(self.look, error)
        try:
            self.manager.__exit__(kind, error, trace)
        except BaseException as failure:
            if not is_a_failure(failure):
                raise
        return error is None or is_a_failure(error)

    def look(self, error):
        classes = first_of(self.manager, CLASSES)
        pattern = first_of(self.manager, PATTERNS)
        if classes is not None:
            tell(self.numbers[0], isinstance(error, classes))
        if pattern is not None:
            tell(self.numbers[1], error is not None and re.search(pattern, str(error)) is not None)


def first_of(manager, names):
    found = [getattr(manager, name, None) for name in names]
    return next(
        (
            one
            for one in found
            if one is not None and (isinstance(one, (type, tuple, str)) or hasattr(one, "search"))
        ),
        None,
    )


def wait(*numbers):
    return lambda manager: Awaiting(numbers, manager)


def install_meeting():
    setattr(builtins, MEET, meet)
    setattr(builtins, AWAIT, wait)
    setattr(builtins, COMPARE, compare)
