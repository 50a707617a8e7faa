"""Records which expectations of tests are met, and lets a test continue after one that is not.

A condition is marked as `MEET(number, True)(lambda: condition)`, a call of a checker as `MEET(number, False)(lambda: call)`, and a context
manager that expects an error as `AWAIT(number of its class, number of its text)(manager)`.
"""
# pyright: basic, reportArgumentType=false, reportCallIssue=false

import builtins
import re

from workers.verify.recorder.recording import quietly, say

MEET = "_swerve_meet"  # functions that are available in every module
AWAIT = "_swerve_await"
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
