"""The members of a group, each a trajectory that arrived, and what a judge said of its steps."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Sample
from trainer.records.judgement_row import JudgedTurn, JudgementFate, JudgementRow
from trainer.records.stamps import NO_STAMPS, EpisodeStamps


@dataclass(slots=True)
class MemberJudgement:
    """What became of the request to judge a member. It joins at most once, and never changes a member that a step has taken."""

    fate: JudgementFate
    turns: tuple[JudgedTurn, ...] = ()
    judge: str = ""  # model and weights that judged, or the rule
    error: str = ""  # why the judge failed
    waited_s: float = 0.0  # from its enqueueing until it arrived or was withdrawn
    # Its stream entries: none if the request was withdrawn, more than one only if it was delivered twice.
    entries: list[str] = field(default_factory=list[str])


@dataclass(slots=True)
class Member:
    """A trajectory in its group. `entries` are its stream entries: more than one only if it was delivered twice."""

    head: TrajectoryHead
    samples: tuple[Sample, ...]
    entries: list[str]
    fault: str = ""  # why its tokens must not reach the learner
    is_altered: bool = False  # the fault: they are not what the engine sampled
    judgement: MemberJudgement | None = None
    awaits_judgement: bool = False  # a request to judge it is outstanding
    stamps: EpisodeStamps = NO_STAMPS  # up to its joining

    @property
    def is_valid(self) -> bool:
        return self.head.reward is not None and not self.fault

    @property
    def scores(self) -> Mapping[int, float] | None:
        """By turn, of the turns that a judge scored in time; None without a judgement."""
        if self.judgement is None or self.judgement.fate != "joined":
            return None
        return {one.turn: one.score for one in self.judgement.turns if one.score is not None}

    @property
    def num_bytes(self) -> int:
        """Memory that its samples take."""
        return sum(sample.num_bytes for sample in self.samples)

    @property
    def lag_from(self) -> int:
        """The oldest weight version in it; without a sampled token, that of its request."""
        return self.head.version_at_enqueue if self.head.version_first is None else self.head.version_first


def judgement_row(head: TrajectoryHead, judgement: MemberJudgement, *, cursor: int) -> JudgementRow:
    """The row of a judgement of the rollout with this head."""
    return JudgementRow(
        rollout_id=head.request_id,
        group_id=head.group_id,
        task_id=head.task_id,
        cursor=cursor,
        fate=judgement.fate,
        turns=judgement.turns,
        version_first=head.version_first,
        num_turns=head.num_turns,
        judge=judgement.judge,
        error=judgement.error,
        waited_s=judgement.waited_s,
    )
