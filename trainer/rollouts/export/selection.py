"""Which rollouts are exported."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from pipeline.request import Purpose
from pipeline.rollout_store.record import StoredHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """An inclusive range of weight versions; None: open on that side."""

    first: int | None = None
    last: int | None = None

    @staticmethod
    def parse(text: str) -> "Versions":
        """Of "3", "3..5", "3.." or "..5". Raises ValueError."""
        first, dots, last = text.partition("..")
        if not dots:
            last = first
        if not (first or last) or not all(one.isdecimal() for one in (first, last) if one):
            raise ValueError(f"{text!r}: give a version or a range, as in 3, 3..5, 3.. or ..5")
        found = Versions(first=int(first) if first else None, last=int(last) if last else None)
        if found.first is not None and found.last is not None and found.first > found.last:
            raise ValueError(f"{text!r}: the first version is above the last")
        return found

    def contains(self, first: int, last: int) -> bool:
        return (self.first is None or self.first <= first) and (self.last is None or last <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a command line chooses by. The default is every rollout."""

    rewards: tuple[float | None, ...] = ()  # one of these; None: without a reward; empty: any
    tasks: tuple[str, ...] = ()  # patterns of the shell, one of which the task id matches; empty: any
    versions: Versions | None = None  # all its tokens were sampled by weights of these versions
    purpose: Purpose | None = None
    outcome: str = ""  # a pattern of the shell

    def matches(self, stored: StoredHead) -> bool:
        head = stored.head
        if self.purpose is not None and head.purpose != self.purpose:
            return False
        if self.rewards and head.reward not in self.rewards:
            return False
        if self.tasks and not any(fnmatchcase(head.task_id, pattern) for pattern in self.tasks):
            return False
        if self.outcome and not fnmatchcase(head.outcome, self.outcome):
            return False
        if self.versions is None:
            return True
        first, last = head.version_first, head.version_last
        return first is not None and last is not None and self.versions.contains(first, last)
