"""A second module under test: functions of kit.py that return texts, numbers, points, or raise, each of them wrong."""

import textwrap

from tests.workers.attacks.patches import edited_text

HEAD = """from dataclasses import dataclass


@dataclass
class Point:
    x: int
    y: int


class NotANumber(ValueError):
    pass
"""
# Parameters, what each does, and what is right.
FUNCTIONS = {
    "headline": ("text", "return text", "return text.title()"),
    "words": ("text", "return [text]", "return text.split()"),
    "mean": ("values", "return sum(values)", "return sum(values) / len(values)"),
    "moved": ("point, dx, dy", "return point", "return Point(point.x + dx, point.y + dy)"),
    "number": (
        "text",
        "return int(text) if text.isdigit() else 0",
        'if not text.isdigit():\n    raise NotANumber(f"no number: {text!r}")\nreturn int(text)',
    ),
    "is_even": ("value", "return value >= 0", "return value % 2 == 0"),
}


def _module(bodies: dict[str, str], before: str = "", head: str = HEAD) -> str:
    functions = "".join(
        f"\n\ndef {name}({parameters}):\n{textwrap.indent(bodies.get(name, wrong), '    ')}\n"
        for name, (parameters, wrong, _) in FUNCTIONS.items()
    )
    return f"{head}{before}{functions}"


KIT = _module({})
SETUP = f"cat >kit.py <<'END'\n{KIT}END\n"


def instead(function: str, body: str, before: str = "") -> bytes:
    """A patch after which `function` has another body; `before` are statements before all functions."""
    return edited_text("kit.py", KIT, _module({function: body}, f"\n\n{before}\n" if before else ""))


def in_head(was: str, becomes: str, function: str = "", body: str = "") -> bytes:
    """A patch that changes what comes before the functions, and the body of one."""
    assert was in HEAD
    bodies = {function: body} if function else {}
    return edited_text("kit.py", KIT, _module(bodies, head=HEAD.replace(was, becomes, 1)))


def right(function: str) -> bytes:
    """The fix of `function`."""
    return instead(function, FUNCTIONS[function][2])
