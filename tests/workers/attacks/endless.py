"""A right answer that, once it is described or compared wrongly, never comes to an end: so a control would come to no result."""

from tests.workers.attacks.patches import edited
from tests.workers.attacks.scenes import Attack
from tests.workers.attacks.telltales import FIRST, FIRST_UNIT

LOG = ("swebench_log",)
BODIES = "    return a - b\n\n\ndef sub(a, b):\n    return a - b\n"


def never(method: str, body: str, answer: str = "mock.ANY") -> bytes:
    """A patch whose `add` gives an answer that equals anything, and whose `sub` gives numbers with such a method."""
    return edited(
        "calc.py",
        BODIES,
        f"    from unittest import mock\n    return {answer}\n\n\nclass Right(int):\n    __hash__ = int.__hash__\n"
        f"    def {method}:\n{body}\n\n\ndef sub(a, b):\n    return Right(a - b)\n",
    )


ENDLESS = {
    "a right answer that spins once it is described": Attack(
        never("__repr__(self)", "        while True: pass"), FIRST, kinds=LOG
    ),
    "a right answer that spins once it is unequal": Attack(
        never("__eq__(self, other)", "        while int(self) != other: pass\n        return True"), FIRST
    ),
    "a right answer that waits once it is described": Attack(
        never("__repr__(self)", "        import time\n        time.sleep(9999)"), FIRST
    ),
    "a right answer that spins once it is described, in unittest": Attack(
        never("__repr__(self)", "        while True: pass"), FIRST_UNIT
    ),
}
