"""The rows of a run's journal: the fate of every episode, the work of every step, the end of the run.

The trainer appends them as JSON lines, one file for each kind of row (`FILES`); all readers use
`pipeline.journal.reading`. A new field goes at the end with a default, so that a journal of an earlier release stays readable; its
default then says that the journal is older than the field.
"""

from typing import Literal

import msgspec

from pipeline.intervals import Estimate, clustered_mean, share
from pipeline.judge import JudgedStep, Unscored
from pipeline.message import UnixSeconds
from pipeline.request import Purpose
from pipeline.trajectory import EpisodeSeconds

Fate = Literal[
    "trained",
    "zero_variance",
    "too_few_valid",
    "quarantined",
    "late",
    "overlong",
    "refused",
    "altered",
    "unjudged",
    "failed",
    "evaluated",
    "not_finite",
    "withdrawn",
]

FATES: dict[str, str] = {
    "trained": "trained",
    "zero_variance": "not trained: all members of its group had the same reward, so there was nothing to learn",
    "too_few_valid": "not trained: too many members of its group failed",
    "quarantined": "not trained: its task is in quarantine, because its grader cannot be trusted",
    "late": "not trained: it arrived after its group had closed, or its weights were too old",
    "overlong": "not trained: it ran into a limit that the recipe filters; its reward counts in the baseline of its group",
    "refused": "not trained: rejected, invalid samples; the trajectory is kept in Redis",
    "altered": "not trained: rejected, it is not what the engine sampled; the trajectory is kept in Redis",
    "unjudged": "not trained: distillation needs the teacher's log-probs of its tokens, and its judgement failed or did not come",
    "failed": "not trained: it has no reward, because the infrastructure failed",
    "evaluated": "not for training: it counted in a held-out evaluation",
    "not_finite": "not trained: the loss or gradient of its batch was not finite, so the batch was skipped",
    "withdrawn": "not trained: it was withdrawn, because its group closed without it or the run ended",
}
"""The meaning of each fate of an episode."""

JudgementFate = Literal["joined", "late", "failed", "unneeded"]

JUDGEMENT_FATES: dict[str, str] = {
    "joined": "joined its rollout before a step took the group",
    "late": "not used: a step took its group without it",
    "failed": "not used: the judge failed for good, so its rollout has no scores or log-probs",
    "unneeded": "not used: its group was not trained, or the run ended first",
}
"""The meaning of each fate of a judgement."""

EndReason = Literal[
    "finished",  # every step was taken
    "nothing to learn",  # no group had a signal for too long, or every task is in quarantine
    "failing",  # too many groups in a row failed; a resume continues the run
    "stopped",  # a signal stopped it; a resume continues the run
    "error",  # an exception ended the trainer; a resume continues from the newest checkpoint
]

COMPLETE: tuple[EndReason, ...] = ("finished", "nothing to learn")
"""Ends of a run after which every request of the run has an episode row."""

ClosedBy = Literal["", "lag", "weights", "evaluation", "end", "judge", "redis", "memory", "failures"]
"""The reason why no group may be enqueued: the bound of `max_lag_versions`; the same bound while engines load the newest weights, or while
an evaluation delays these; every group of the run is enqueued; no judge works; the bounds of bytes in Redis and in the trainer's memory; a
pause after failed groups. "": another group may be enqueued.
"""


class Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=False):
    """The base of all rows in the journal."""


class EpisodeStamps(msgspec.Struct, frozen=True, kw_only=True):
    """The times when a trajectory passed each stage of the trainer: Unix seconds on the trainer's clock, but for `published_at`, which is
    Redis's. 0.0: it did not reach the stage, or the journal is older than these fields.
    """

    published_at: UnixSeconds = 0.0  # its entry was put on the stream
    read_at: UnixSeconds = 0.0  # the trainer read the entry; again after a resume
    joined_at: UnixSeconds = 0.0  # its samples were made, and it joined its group or its evaluation
    closed_at: UnixSeconds = 0.0  # its group closed, for whatever reason
    # Time when its group stopped waiting for judgements; 0.0 also if a step took the group before that.
    released_at: UnixSeconds = 0.0


NO_STAMPS = EpisodeStamps()
"""The stamps of a request that reached no stage."""


class EpisodeFacts(Row, frozen=True, kw_only=True):
    """The facts about one request and its fate that lists of rollouts show."""

    request_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    member: int
    group_size: int
    fate: Fate | Literal[""]  # "": it is not settled yet
    evaluation: str = ""  # name of the evaluation it belongs to
    attempt: int = 0
    worker: str = ""
    outcome: str = ""  # outcome as in the head; empty if withdrawn
    reward: float | None = None
    num_turns: int = 0
    sampled_tokens: int = 0
    version_at_enqueue: int = 0
    version_first: int | None = None
    version_last: int | None = None
    enqueued_at: UnixSeconds = 0.0
    claimed_at: UnixSeconds = 0.0
    finished_at: UnixSeconds = 0.0
    at: UnixSeconds = 0.0  # when the row was made
    patch: str = ""  # fingerprint of the patch that was graded, as in the head
    control: str = ""  # what the control run said of a pass, as in the head
    num_cuts: int = 0  # turns before which something was taken out of the context
    num_tokens: int = 0  # tokens given and sampled, each counted once; 0 in journals older than this field
    engines: tuple[str, ...] = ()  # URLs of the engines that sampled it; empty in journals older than this field
    num_failed_commands: int = 0  # as in the head; 0 in journals older than this field


class EpisodeRow(EpisodeFacts, frozen=True, kw_only=True):
    """One request and its fate; written when its trajectory is settled.

    Ids are unique, unless somebody requeued a dead letter.
    """

    fate: Fate
    cursor: int = -1  # position of the group in the run's task order; -1 for evaluations
    repeated_tokens: int = 0  # tokens that engines computed again because of cuts
    stamps: EpisodeStamps = NO_STAMPS
    seconds: EpisodeSeconds | None = None  # times on its worker; None in journals older than this field
    # Name of the source of its task; empty for evaluations and where the recipe has no [[sources]].
    source: str = ""


class JudgedTurn(msgspec.Struct, frozen=True, array_like=True):
    """The judge's result for one turn; in the journal an array of these four."""

    turn: int  # its number in the trajectory, from 0
    score: float | None = None  # None: the judge abstained
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
    # The rollout's turns, in order; empty where no judgement arrived or the judge failed.
    turns: tuple[JudgedTurn, ...] = ()
    # Oldest weight version in the rollout; None: nothing was sampled, or the rollout was settled by an earlier process.
    version_first: int | None = None
    num_turns: int = 0  # number of turns in the rollout; 0 where it is not known
    judge: str = ""  # model and weights that judged, or the rule; empty where no judgement arrived
    error: str = ""  # why the judge failed
    # Seconds from the enqueueing of the judge request until the judgement arrived or the request was withdrawn.
    waited_s: float = 0.0
    at: UnixSeconds = 0.0  # when the row was made
    # Sum over the rollout's trained tokens of log p - log p_teacher, in nats, and the number of these tokens, if log-probs of a teacher
    # joined it.
    reverse_kl_sum: float = 0.0
    num_taught_tokens: int = 0

    @property
    def scores(self) -> dict[int, float]:
        """The scores by turn, without the turns that have none."""
        return {one.turn: one.score for one in self.turns if one.score is not None}


class SignalMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one step on its tokens, each counted by its signal instead of once. The signal of a token is |A| (1 - pi): the size of
    its advantage times how uncertain the policy is of it (`trainer.learner.objectives.loss`). Tokens that the policy is certain of are most
    of an episode and have hardly any gradient, so they hide in plain means what happens to the few that decide.
    """

    total: float  # sum of the signals, once per pass
    num_tokens: float  # effective number of tokens with a signal: (sum of signals)^2 / sum of their squares
    ess_share: float  # effective sample size of the weights, as a share; 1: all are the same
    masked_share: float  # share of the signal that is masked
    vetoed_share: float
    behaviour_kl: float  # nats, mean over the signal


class RankUse(msgspec.Struct, frozen=True, kw_only=True):
    """How busy the GPU of one rank of the learner was, by what the rank did: "training", "export", "waiting" and so on."""

    rank: int
    num_samples: dict[str, int]  # a sample a second
    busy: dict[str, float]  # sum over the samples of the share of the time in which a kernel ran

    def share(self, doing: str) -> float | None:
        """The mean of the samples; None without any."""
        num_samples = self.num_samples.get(doing, 0)
        return self.busy.get(doing, 0.0) / num_samples if num_samples else None


class LagMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of one step on the tokens of one lag. The shares are as in StepMetrics, of these tokens alone."""

    lag: int  # versions between the weights that sampled the tokens and those that the step started from
    num_tokens: int  # tokens in all updates of the step, so a token counts once per pass
    ess_share: float
    masked_share: float
    vetoed_share: float
    behaviour_kl: float
    # The same numbers, in which each token counts by its signal. None: no token has a signal, or the journal is older than this field.
    signal: SignalMetrics | None = None


class StepJudging(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of judging on one step, or on all steps of a run. Rewards and scores are separate: no score is part of a reward."""

    num_judged: int  # trajectories trained with a judgement
    num_scored: int  # judged trajectories that have a score
    # Trajectories trained without a judgement, because it came too late or the judge failed
    num_unjudged: int
    num_scored_replies: int  # trained replies of turns that have a score
    num_replies: int  # trained replies
    num_tokens: int  # trained tokens
    # Mean over the trained trajectories with scores of each one's mean score; None: no trajectory has scores.
    score_mean: float | None
    # Mean absolute advantage over trained tokens by rewards alone, and mean absolute change that scores make to it.
    outcome_size: float
    process_size: float

    @property
    def sentence(self) -> str:
        total = self.num_judged + self.num_unjudged
        share = self.num_scored_replies / self.num_replies if self.num_replies else 0.0
        mean = "" if self.score_mean is None else f", mean score {self.score_mean:+.3f}"
        return (
            f"{self.num_judged:,} of {total:,} trajectories trained with a judgement, {share:.0%} of their replies with a score{mean}; "
            f"advantages of {self.outcome_size:.3f} by rewards, moved by {self.process_size:.3f}"
        )


class StepDistillation(msgspec.Struct, frozen=True, kw_only=True):
    """The distance of the policy from its teacher in one step: the mean over taught tokens of log p - log p_teacher, in nats. The policy's
    log-probs are those with which its tokens were sampled, so the tokens of older weights count with these.
    """

    num_taught: int  # trajectories trained with the teacher's log-probs
    num_left_out: int  # valid trajectories that were not trained, because they have none
    num_tokens: int  # trained tokens with a log-prob of the teacher
    reverse_kl: float | None  # None: nothing was taught
    # Ends of its 95 % interval, with groups as draws; None where there is one group.
    reverse_kl_low: float | None = None
    reverse_kl_high: float | None = None

    @property
    def sentence(self) -> str:
        total, known = self.num_taught + self.num_left_out, "not known"
        if self.reverse_kl is not None:
            known = f"{self.reverse_kl:.4f} nats a token"
        if self.reverse_kl_low is not None and self.reverse_kl_high is not None:
            known += f" ({self.reverse_kl_low:.4f} to {self.reverse_kl_high:.4f}, 95 %)"
        return (
            f"reverse KL to the teacher {known}; {self.num_taught:,} of {total:,} trajectories have its log-probs, of "
            f"{self.num_tokens:,} tokens"
        )


class StepRow(Row, frozen=True, kw_only=True):
    """One optimizer step. Shares are of trained tokens, log-probs natural, lags in weight versions."""

    step: int
    version: int  # weight version that the step started from
    loss: float
    grad_norm: float
    lr: float
    reward_mean: float  # mean over all episodes graded since the step before, groups without signal included
    num_trajectories: int
    request_ids: tuple[str, ...]
    num_trained_tokens: int
    num_unique_sampled_tokens: (
        int  # tokens that the policy sampled in those trajectories but for asides, each counted once
    )
    groups_dropped_zero_variance: int = 0  # this and the next count what happened since the step before
    groups_dropped_invalid: int = 0
    lag_max: int = 0
    lag_mean: float = 0.0
    # The gap is the difference between engine and learner under the same weights; None where it was not measured.
    logprob_gap_max: float | None = None
    logprob_gap_mean: float | None = None
    entropy: float = 0.0
    ratio_mean: float = 1.0
    ratio_max: float = 1.0
    ess_share: float = 1.0
    masked_share: float = 0.0
    vetoed_share: float = 0.0
    wait_s: float = 0.0  # seconds that the trainer waited for trajectories
    train_s: float = 0.0
    at: UnixSeconds = 0.0
    num_gap_tokens: int = 0  # tokens on which the log-prob gap was measured
    # Number of members enqueued again after an infrastructure failure, since the step before
    members_refilled: int = 0
    # Number of members that had not arrived when their group had to close, since the step before
    members_withdrawn: int = 0
    num_aside_tokens: int = 0  # tokens sampled in asides of those trajectories, and not trained
    num_groups: int | None = None  # groups that the step trained; None in journals older than this field
    num_samples: int = 0  # samples that the trajectories are trained as; 0 in journals older than this field
    num_sample_tokens: int = 0  # tokens in all samples; a token that several samples share counts in each
    num_unique_tokens: int = 0  # tokens given and sampled in the trajectories, each counted once
    # Ids of trajectories whose rewards count in the baselines of their groups, though the step did not train them.
    baseline_ids: tuple[str, ...] = ()
    # Trained replies whose digest matches; 0 in journals older than this field.
    num_proved_replies: int = 0
    # Parts of the time since the row before. `wall_s` is the sum of `wait_s` and of the fields from `forward_s` to `other_s`;
    # 0 in journals older than these fields.
    wall_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    audit_s: float = 0.0  # measuring the log-prob gap
    export_s: float = 0.0  # making the weights ready for the engines
    engines_s: float = 0.0  # announcing the weights; engines load them beside the next steps
    checkpoint_s: float = 0.0  # training waited for a checkpoint
    evaluation_s: float = 0.0  # training waited for an evaluation, because the next one had to begin
    other_s: float = 0.0
    tokens_per_s: float = 0.0  # tokens of all samples over `train_s`
    # Floating-point operations that the model needed, divided by what all devices can do in `train_s`; None where their peak is not known.
    utilisation: float | None = None
    # Effects of the objective on the tokens of each lag, in order; empty in journals older than this field.
    by_lag: tuple[LagMetrics, ...] = ()
    # The number of versions that admission could run ahead when the step was taken; None in journals older than this field.
    ahead_versions: int | None = None
    judging: StepJudging | None = None  # effect of a judge's scores on the step; None: the run has no judge
    # When work on its batch began and when the weights had changed (Unix seconds); 0.0 in journals older than these fields.
    began_at: UnixSeconds = 0.0
    trained_at: UnixSeconds = 0.0
    num_not_taken: int = 0  # replies that programs of those trajectories never took, which are not turns
    # The shares by signal. None: no token has a signal, or the journal is older than this field.
    signal: SignalMetrics | None = None
    # The distance from the teacher; None: the run has no teacher.
    distillation: StepDistillation | None = None
    # How busy the GPU of each rank was since the row before; empty without GPUs, and where NVML cannot be asked.
    gpu_use: tuple[RankUse, ...] = ()

    @property
    def signal_numbers(self) -> dict[str, float]:
        """The shares by signal under the names that sinks and pages show: `signal_ess_share`."""
        numbers = msgspec.structs.asdict(self.signal) if self.signal else {}
        return {f"signal_{name}": value for name, value in numbers.items()}

    @property
    def is_gap_measured(self) -> bool:
        """Whether the gap was measured. Older journals contain 0.0 where it was not, and the oldest do not count the tokens."""
        return self.logprob_gap_max is not None and bool(self.num_gap_tokens or self.logprob_gap_max)


PARTS = (
    "wait_s",
    "forward_s",
    "backward_s",
    "optimizer_s",
    "audit_s",
    "export_s",
    "engines_s",
    "checkpoint_s",
    "evaluation_s",
    "other_s",
)
"""The fields of a step's row that sum up to its `wall_s`."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """Differences between learner and engine over some tokens, in nats."""

    num_tokens: int
    mean: float  # mean absolute difference
    max: float  # largest absolute difference
    bias: float  # mean of learner minus engine


class AuditRow(Row, frozen=True, kw_only=True):
    """The log-prob gap between engine and learner under the same weights, on a share of a step's trained tokens."""

    step: int
    num_tokens: int  # measured tokens
    num_batch_tokens: int  # tokens trained by the step
    num_unmeasured: int  # drawn tokens that were sampled by weights no longer held
    num_samples: int  # drawn samples
    num_positions: int  # positions that the learner computed for the audit
    gap_max: float | None  # largest absolute difference in nats; None where nothing was measured
    gap_mean: float | None
    audit_s: float
    # Drift by the weight version that sampled the token, by the number of tokens before it in its sample, and by the part of the reply.
    by_version: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])
    by_position: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])
    by_kind: dict[str, Drift] = msgspec.field(default_factory=dict[str, Drift])
    at: UnixSeconds = 0.0


class EvaluationRow(Row, frozen=True, kw_only=True):
    """One held-out evaluation of one weight version, sampled or greedy."""

    name: str  # "heldout_before", "heldout_after", "heldout_step_40"
    version: int
    greedy: bool
    success: float  # mean reward of the episodes that have one
    num_episodes: int
    num_failed: int  # episodes without a reward, which are not in `success`
    step: int = 0
    at: UnixSeconds = 0.0
    tasks: str = ""  # name of the held-out set, from tasks.heldout_sets; "": tasks.heldout
    mean_turns: float = 0.0  # this and the next are means over the episodes with a reward
    mean_sampled_tokens: float = 0.0
    # Number of episodes by outcome, see `pipeline.trajectory.outcome_tag`.
    outcomes: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    # pass@k by k, for k up to the episodes of a task, over the tasks with at least k rewards.
    pass_at: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    # 95 % interval of `success`, with tasks as the draws; 0 to 1 where nothing is known of it
    success_low: float = 0.0
    success_high: float = 1.0
    # Rewards of each task by its id, in the order of its episodes; empty in older journals
    rewards: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict[str, tuple[float, ...]])

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.success, self.success_low, self.success_high, len(self.rewards))


class ImitationStepRow(Row, frozen=True, kw_only=True):
    """One optimizer step of supervised fine-tuning."""

    step: int
    num_steps: int  # steps of the whole run
    epoch: int  # epoch of the step's last row, from 0
    loss: float  # nats per trained token; with another learner.loss.aggregation, the sum over its divisor
    grad_norm: float
    lr: float
    entropy: float  # nats per trained token
    rows: tuple[int, ...]  # trained rows, by their position in data.train without those left out, from 0
    num_trained_tokens: int
    num_samples: int
    num_sample_tokens: int  # tokens of all samples, trained or not
    # Parts of the time since the row before; `wall_s` is the sum of the fields from `forward_s` to `other_s`.
    wall_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    checkpoint_s: float
    evaluation_s: float
    other_s: float
    train_s: float  # seconds of the learner's step
    tokens_per_s: float  # tokens of all samples over `train_s`
    utilisation: float | None = None  # as in StepRow
    at: UnixSeconds = 0.0


class HeldoutLossRow(Row, frozen=True, kw_only=True):
    """One measurement of the loss on held-out rows. The lists have an entry for each of them, in order."""

    name: str  # "before", "step_40", "after"
    step: int
    loss: float  # nats per trained token
    likeliest_share: float  # share of the trained tokens that greedy decoding gives
    num_tokens: int  # trained tokens of all rows
    row_losses: tuple[float, ...]  # nats, summed over the row's trained tokens
    row_likeliest: tuple[int, ...]  # number of the row's trained tokens that greedy decoding gives
    row_tokens: tuple[int, ...]  # number of the row's trained tokens
    at: UnixSeconds = 0.0

    @property
    def loss_estimate(self) -> Estimate:
        """The loss with its interval; rows are the draws."""
        found = clustered_mean(zip(self.row_losses, self.row_tokens, strict=True))
        assert found is not None, "a measurement has rows"
        return found

    @property
    def share_estimate(self) -> Estimate:
        """The share with its interval; rows are the draws."""
        shares = [part / size for part, size in zip(self.row_likeliest, self.row_tokens, strict=True)]
        found = share(shares, self.num_tokens, self.row_tokens)
        assert found is not None, "a measurement has rows"
        return found

    @property
    def sentence(self) -> str:
        return (
            f"held out, {self.name.replace('_', ' ')}: {self.loss_estimate.plain()} nats per token, greedy decoding gives "
            f"{self.share_estimate.percent()} of {self.num_tokens:,} tokens in {len(self.row_tokens):,} rows"
        )


class PublicationRow(Row, frozen=True, kw_only=True):
    """One weight version, ready for the engines and announced to them."""

    version: int
    step: int
    num_bytes: int
    at: UnixSeconds = 0.0
    began_at: UnixSeconds = 0.0  # when its preparation began; 0.0 in journals older than this field


class EnginePause(msgspec.Struct, frozen=True, kw_only=True):
    """An engine was paused to load a weight version."""

    engine: str  # URL
    began_at: UnixSeconds
    ended_at: UnixSeconds


class DeliveryRow(Row, frozen=True, kw_only=True):
    """All engines that get requests serve this version from here on. A version that a newer one overtook has no such row."""

    version: int
    step: int
    engines: tuple[str, ...]  # engines that confirmed it and get requests
    quarantined: tuple[str, ...]  # engines that are out of routing until they confirm it
    update_s: float  # seconds since the version was announced
    at: UnixSeconds = 0.0
    pauses: tuple[EnginePause, ...] = ()  # pauses of engines since the row before


class StalenessRow(Row, frozen=True, kw_only=True):
    """Admission may run `ahead_versions` ahead from here on; `trainer.rollouts.admission` decided this."""

    step: int  # the step after which it was decided
    before: int  # versions that admission could run ahead until then
    ahead_versions: int
    reason: str
    at: UnixSeconds = 0.0


class QuarantineRow(Row, frozen=True, kw_only=True):
    """A training task for which no requests are made any more."""

    task_id: str
    reason: str
    request_id: str  # the trajectory that decided it
    at: UnixSeconds = 0.0


class SkippedRow(Row, frozen=True, kw_only=True):
    """A position in the task order that was skipped because its task is in quarantine."""

    cursor: int
    task_id: str
    at: UnixSeconds = 0.0


class SkippedBatchRow(Row, frozen=True, kw_only=True):
    """A batch whose loss or gradient was not finite: weights and optimizer stayed as they were, its trajectories are settled."""

    step: int  # the number that its step would have had
    version: int  # weight version that the step started from
    what: Literal["loss", "gradient"]  # the value that was not finite
    request_ids: tuple[str, ...]
    at: UnixSeconds = 0.0


class EndRow(Row, frozen=True, kw_only=True):
    """The end of a trainer process. A trainer that was killed leaves no such row.

    The row of a run that can go on is written after the last checkpoint, so a resume cuts it off again.
    """

    step: int
    version: int
    reason: str  # an EndReason
    at: UnixSeconds = 0.0
    detail: str = ""  # one sentence for display, e.g. "stopped by a signal at step 7"
    # Seconds since the last step's row, by part of the loop; empty in journals older than this field.
    seconds: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    # Requests that stay in Redis for a resume, judges' ones included. None: the run is complete, or Redis did not answer.
    num_open: int | None = None

    @property
    def is_complete(self) -> bool:
        """Whether every request of the run has an episode row; otherwise the missing requests are still open."""
        return self.reason in COMPLETE


class AlarmRow(Row, frozen=True, kw_only=True):
    """The condition of an alarm holds from here on, or holds no longer."""

    step: int  # the newest optimizer step at that moment
    kind: str  # an AlarmKind
    text: str  # the numbers that decided it
    # Subject of the alarm, for kinds that can be about several things: "training", "held out"
    subject: str = ""
    is_over: bool = False
    at: UnixSeconds = 0.0

    @property
    def sentence(self) -> str:
        return f"{'alarm is over' if self.is_over else 'ALARM'}: {self.kind}: {self.text}"


class StartRow(Row, frozen=True, kw_only=True):
    """A process takes steps from here on."""

    step: int
    # Seconds since the process began to build the run, by part (`trainer.loop.state`).
    seconds: dict[str, float]
    at: UnixSeconds = 0.0
    # Threads of each learner process on its CPU: sums depend on how they are divided. 0: a journal older than this field.
    num_threads: int = 0


class FleetRow(Row, frozen=True, kw_only=True):
    """The state of the workers' slots at one moment, from heartbeats."""

    span_s: float  # seconds since the sample before, or since sampling began
    num_workers: int
    slots: int
    running: int  # slots with a claim of any run
    # Slots without a claim, on workers that claim nothing because a service that they need is out
    paused: int
    closed_by: ClosedBy
    is_waiting: bool  # the trainer waits for trajectories
    at: UnixSeconds = 0.0
    # Share of the processors' time that was used since the sample before; None if workers run on other machines than the trainer.
    cpu_share: float | None = None


FILES: dict[type[Row], str] = {
    EpisodeRow: "episodes.jsonl",
    JudgementRow: "judgements.jsonl",
    StepRow: "steps.jsonl",
    AuditRow: "audits.jsonl",
    EvaluationRow: "evaluations.jsonl",
    PublicationRow: "publications.jsonl",
    DeliveryRow: "deliveries.jsonl",
    StalenessRow: "staleness.jsonl",
    QuarantineRow: "quarantines.jsonl",
    AlarmRow: "alarms.jsonl",
    SkippedRow: "skipped.jsonl",
    SkippedBatchRow: "skipped_batches.jsonl",
    EndRow: "endings.jsonl",
    StartRow: "starts.jsonl",
    FleetRow: "fleet.jsonl",
    ImitationStepRow: "imitation_steps.jsonl",
    HeldoutLossRow: "heldout_losses.jsonl",
}
