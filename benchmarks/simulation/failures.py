"""Which episodes fail by infrastructure: chosen after they were played, so that what failed is known."""

import random
from collections.abc import Sequence
from typing import Literal, get_args

Failures = Literal["none", "random", "by_length", "as_zero"]
"""How a share of the episodes fails, and what becomes of them.

random: every episode alike; it has no reward and is not trained, as here. by_length: likewise, but in proportion to its turns.
as_zero: every episode alike, and it is trained with reward 0, as where a failure is not distinguished from a wrong patch.
"""

FAILURES: tuple[Failures, ...] = get_args(Failures)


def failed(failures: Failures, share: float, num_turns: Sequence[int], rng: random.Random) -> list[bool]:
    """Which of the episodes fail; `share` of them on average."""
    mean = sum(num_turns) / len(num_turns)
    factors = [turns / mean if failures == "by_length" else 1.0 for turns in num_turns]
    return [failures != "none" and rng.random() < share * factor for factor in factors]
