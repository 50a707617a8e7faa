"""How long groups wait for judgements, and whether any judge works.

A group that is ready waits until each of its members is judged, at most for the time that the recipe gives. It does not wait
while no judge has worked for a while: nobody would answer in time. With `required` it waits whatever happens, and admission is
closed while no judge works.
"""

import time
from collections.abc import Callable

from arq.connections import ArqRedis

from pipeline import census
from pipeline.kinds import JUDGE
from trainer.recipe import JudgeRecipe
from trainer.rollouts.groups import Group, GroupBook

LOOK_S = 5.0  # between two looks at the judges' heartbeats
OUTAGE_S = 60.0  # without a judge that works; judges that are redeployed are back before


class JudgePresence:
    """Whether a judge works, as far as heartbeats tell."""

    def __init__(self, redis: ArqRedis, recipe: JudgeRecipe, *, say: Callable[[str], None]) -> None:
        self._redis = redis
        self._recipe = recipe
        self._say = say
        self._looked_at = float("-inf")
        self._seen_at = time.monotonic()  # when a judge worked, or this began
        self._is_out = False
        self.trouble = ""  # why no judge works at the moment; empty if one does

    async def look(self) -> None:
        """Read the heartbeats, unless that was a moment ago."""
        now = time.monotonic()
        if not self._recipe.is_on or now < self._looked_at + LOOK_S:
            return
        alive, _ = await census.workers(self._redis)
        self._looked_at = now
        judges = [status for status in alive if status.kind == JUDGE.name]
        paused = [status.paused for status in judges if status.paused]
        self.trouble = ""
        if not judges:
            self.trouble = "no judge is alive; start `python -m workers.judge`"
        elif len(paused) == len(judges):
            self.trouble = f"every judge is paused: {paused[0]}"
        else:
            self._seen_at = now
        self._note(is_out=bool(self.trouble) and now >= self._seen_at + OUTAGE_S)

    @property
    def is_out(self) -> bool:
        """Whether no judge has worked for OUTAGE_S."""
        return self._is_out

    @property
    def closed_because(self) -> str:
        """Why no group may be enqueued; empty if the judges are no reason."""
        return f"judge.required, and {self.trouble}" if self._recipe.required and self.trouble else ""

    def _note(self, *, is_out: bool) -> None:
        if is_out and not self._is_out and not self._recipe.required:
            self._say(f"{self.trouble}; groups are trained without judgements until one works")
        if self._is_out and not is_out:
            self._say("a judge works again")
        self._is_out = is_out


class JudgementWaits:
    """The groups of one book that are ready but for their judgements."""

    def __init__(
        self, book: GroupBook, presence: JudgePresence, recipe: JudgeRecipe, *, say: Callable[[str], None]
    ) -> None:
        self._book = book
        self._presence = presence
        self._recipe = recipe
        self._say = say
        self._since: dict[int, float] = {}  # when each held group became ready, on the monotonic clock

    def hold(self, group: Group) -> None:
        """A group has become ready: hold it back while one of its members awaits its judgement."""
        if _num_awaited(group):
            self._book.hold_back(group.cursor)
            group.released_at = 0.0
            self._since[group.cursor] = time.monotonic()

    def release(self, now: float) -> None:
        """Release the groups that are judged, or have waited long enough at `now`, on the monotonic clock."""
        held = self._book.unjudged
        for group in held:
            num_awaited = _num_awaited(group)
            waited_s = now - self._since[group.cursor]
            if not num_awaited:
                self._release(group)
            elif not self._recipe.required and (self._presence.is_out or waited_s >= self._recipe.wait_s):
                self._release(group)
                if not self._presence.is_out:
                    self._say(
                        f"group {group.cursor} ({group.task_id}) waited {waited_s:.0f} s for its judgements and goes on "
                        f"without {num_awaited} of {len(group.rewards)}"
                    )
        cursors = {group.cursor for group in held}
        self._since = {cursor: since for cursor, since in self._since.items() if cursor in cursors}

    def _release(self, group: Group) -> None:
        group.released_at = time.time()
        self._book.release(group.cursor)


def _num_awaited(group: Group) -> int:
    """Members whose judgements have not arrived."""
    return sum(member.awaits_judgement for member in group.members.values())
