"""An account of one role's time: parts that sum up to its wall."""

from collections.abc import Mapping

import msgspec

Role = str
"""Whose time: "trainer", "slots", "engines"."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one role by what they were spent on."""

    role: Role
    wall_s: float  # of all slots, or all engines, together
    parts_s: dict[str, float]  # their sum is `wall_s`
    unknown: tuple[str, ...] = ()  # what the records do not tell, each as a sentence

    def share(self, *parts: str) -> float:
        """Of the wall; 0 of an empty account."""
        return sum(self.parts_s.get(part, 0.0) for part in parts) / self.wall_s if self.wall_s else 0.0


def account(role: Role, parts_s: Mapping[str, float], *unknown: str) -> Account:
    """With the wall that its parts make."""
    return Account(role=role, wall_s=sum(parts_s.values()), parts_s=dict(parts_s), unknown=unknown)
