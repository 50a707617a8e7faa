"""Judgement rows: what became of each request to judge a rollout, and what the judge said of each turn."""

from typing import Literal

import msgspec

from pipeline.judge import JudgedStep, Unscored
from trainer.records.row import Row

JudgementFate = Literal[
    "joined",  # its member had it before a step took the group
    "late",  # a step took the group without it; it changed nothing, whether it arrived afterwards or was withdrawn
    "failed",  # the judge failed for good, so its member has no scores
    "unneeded",  # its group was not trained, or the run ended before it arrived
]


class JudgedTurn(msgspec.Struct, frozen=True, array_like=True):
    """What the judge said of one turn; in the journal an array of these four."""

    turn: int  # of the trajectory, from 0
    score: float | None  # None: the judge abstained
    votes: tuple[float | None, ...] = ()  # None: the vote abstained or failed
    unscored: Unscored | None = None  # why there is no score

    @classmethod
    def of(cls, step: JudgedStep) -> "JudgedTurn":
        return cls(step.turn, step.score, tuple(vote.value for vote in step.votes), step.unscored)


class JudgementRow(Row, frozen=True, kw_only=True):
    """One request to judge a rollout; written when its group is settled, or when it is known that nobody needs it.

    The rollout's reward and fate are in the episode row of the same id. The text of votes is in the run's store of rollouts.
    """

    rollout_id: str
    group_id: str
    task_id: str
    cursor: int
    fate: JudgementFate
    # Of the rollout, in order; empty where no judgement arrived or the judge failed.
    turns: tuple[JudgedTurn, ...] = ()
    # Oldest weight version in the rollout; None: nothing was sampled, or the rollout was settled by an earlier process.
    version_first: int | None = None
    num_turns: int = 0  # of the rollout; 0 where it is not known
    judge: str = ""  # model and weights that judged, or the rule; empty where no judgement arrived
    error: str = ""  # why the judge failed
    waited_s: float = 0.0  # from its enqueueing until the judgement arrived or the request was withdrawn
    at: float = 0.0  # when the row was made

    @property
    def scores(self) -> dict[int, float]:
        """By turn, of the turns that have one."""
        return {one.turn: one.score for one in self.turns if one.score is not None}
