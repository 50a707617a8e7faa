"""Computes one advantage per token from the rewards and step scores of a group's members, with pure functions.

First rewards become one advantage per member. A `Baseline` sees the rewards of all valid members of a group. A member whose
rollout failed has no reward and is not among them, so it changes no other member's advantage.

| kind             | advantage of member i                                  | as in                                   |
|------------------|--------------------------------------------------------|-----------------------------------------|
| `leave_one_out`  | R_i - mean of the other members' rewards               | RLOO, Ahmadian et al. 2024              |
| `group_mean`     | R_i - mean of all rewards                              | Dr. GRPO (no divisor), Liu et al. 2025  |
| `group_mean_std` | (R_i - mean of all rewards) / (population std + 1e-6)  | GRPO, Shao et al. 2024                  |

Groups of several sizes may be in one batch, because each baseline knows its own group alone. `leave_one_out` is unbiased for each member,
whatever the size; that of `group_mean` is smaller by the factor (n - 1) / n in a group of n. The loss counts tokens or trajectories, not
groups (`learner.loss.aggregation`), so a group has the weight of its members: one of 8 twice that of one of 4.

Then the scores that a judge gave single turns move the advantages of their tokens; `CreditMeter` measures how far. R_i is the
reward of member i, A_i its advantage by the baseline, s_ik the judge's score of its turn k in
-1..1, and c the coefficient. The scores of one turn number in all members of a group are a bucket. None of these functions
alters a reward, and none treats a missing score as a 0:

| method               | advantage of the tokens of turn k of member i                                                     |
|----------------------|---------------------------------------------------------------------------------------------------|
| `outcome`            | A_i                                                                                               |
| `outcome_plus_mean`  | the baseline of R_i + c/2 * (mean of the scores of i)                                             |
| `step_wise`          | (R_i + c/2 * s_ik - mean over the bucket) / (population deviation over the bucket + 1e-6)         |
| `outcome_then_steps` | A_i + c * (d_ik - mean of d_i over the tokens of i that have one), with d_ik = s_ik - mean over the bucket |
| `potential`          | A_i - c/2 * d_i(k-1): the score of a turn is the value of the state that it leads to              |

Where the formula has nothing to compare, the tokens get A_i: a turn without a score, and for the three methods with buckets a turn
that has a score in one member only. For `potential` this is a matter of the turn before. A member without any score has R_i
alone. In `step_wise` a bucket whose members are all equal gives 0.

The first two methods with scores are known with the outcome o_i = 2 R_i - 1 and o_i + c * s. Here they are divided by 2, which
changes no sign and no ratio, so that a coefficient of 0 leaves the advantages of `outcome`, and not twice as much.

Or a teacher gave the log-prob of every token, and distillation makes advantages of these, token by token. x_t is token t of member i,
after everything before it; both log-probs are in nats and at temperature 1, and log p is what the engine reported when it sampled x_t:

| method                 | advantage of token t of member i                             |
|------------------------|--------------------------------------------------------------|
| `distill`              | c * (log p_teacher(x_t) - log p(x_t)): rewards are not read  |
| `outcome_plus_distill` | A_i + c * (log p_teacher(x_t) - log p(x_t))                  |

The difference is minus the estimate of the reverse KL divergence of the policy from the teacher in this context, from the one token that
was sampled. On-policy distillation minimises such divergences on the student's own samples, without a gradient through the sampling (GKD,
Agarwal et al., arXiv 2306.13649); MiniLLM (Gu et al., arXiv 2306.08543) minimises the reverse one of whole sequences by policy gradient.
Here each token is rewarded with its own difference alone, as with a discount of 0 (Lu and Thinking Machines Lab, "On-Policy
Distillation", 2025), so no token is credited with what follows it. A member without log-probs has no advantage of this kind, and
`make_batch` does not train it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev

import numpy as np
import numpy.typing as npt

from pipeline.intervals import clustered_mean
from pipeline.judge import Judgement
from trainer.batching.batch import CreditMeasures, Sample
from trainer.recipe import AdvantageKind, CreditMethod, CreditRecipe

SAME = 1e-9
"""Rewards closer than this count as equal."""

Baseline = Callable[[Mapping[int, float]], dict[int, float]]
"""Computes advantages from rewards, both by member."""


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether any two rewards differ; otherwise every advantage would be zero."""
    return max(rewards) - min(rewards) > SAME


def leave_one_out(rewards: Mapping[int, float]) -> dict[int, float]:
    """Returns each reward minus the mean reward of the other members."""
    mean, others = fmean(rewards.values()), len(rewards) - 1
    return {member: reward - (mean * len(rewards) - reward) / others for member, reward in rewards.items()}


def group_mean(rewards: Mapping[int, float]) -> dict[int, float]:
    """Returns each reward minus the mean reward of all members."""
    mean = fmean(rewards.values())
    return {member: reward - mean for member, reward in rewards.items()}


def group_mean_std(rewards: Mapping[int, float]) -> dict[int, float]:
    """Returns each reward's difference from the mean of all rewards, in standard deviations."""
    spread = pstdev(rewards.values()) + 1e-6
    return {member: distance / spread for member, distance in group_mean(rewards).items()}


BASELINES: dict[AdvantageKind, Baseline] = {
    "leave_one_out": leave_one_out,
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
}


@dataclass(frozen=True, slots=True)
class GradedMember:
    """A valid member of a group, with the inputs of its credit."""

    reward: float
    samples: tuple[Sample, ...]
    scores: Mapping[int, float] | None = None  # the judge's scores by turn; None: there is no judgement
    # A teacher's log-prob of each sampled token, in nats, by turn; None: there is no judgement of a teacher.
    logprobs: Mapping[int, npt.NDArray[np.float32]] | None = None


@dataclass(frozen=True, slots=True)
class Credit:
    """The advantage of one member: `whole` on all of its tokens, except for the turns in `by_turn`, whose tokens have one number or one
    each.
    """

    whole: float
    by_turn: Mapping[int, float | npt.NDArray[np.float32]] = field(
        default_factory=dict[int, float | npt.NDArray[np.float32]]
    )


Members = Mapping[int, GradedMember]

TokenAdvantages = tuple[npt.NDArray[np.float32], ...]
"""One array of T per sample of a member, 0 where a token is not trained."""

CreditFunction = Callable[[Members, Baseline, float], dict[int, Credit]]
"""The credit of each member, from all valid members of the group, the baseline and the coefficient."""


def token_advantages(
    members: Members, kind: AdvantageKind, credit: CreditRecipe
) -> dict[int, TokenAdvantages]:
    """The advantages of each member, by the key that it has in `members`. All methods but `distill` need two members or more."""
    assert len(members) >= 2 or credit.method == "distill", "a baseline needs two members"
    method = CREDITS[credit.method] if credit.coefficient else outcome
    credits = method(members, BASELINES[kind], credit.coefficient)
    return {
        key: tuple(_over_tokens(sample, credits[key]) for sample in member.samples)
        for key, member in members.items()
    }


def outcome(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Every token of a member gets the advantage of its reward."""
    del coefficient
    return {key: Credit(advantage) for key, advantage in baseline(_rewards(members)).items()}


def outcome_plus_mean(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """The baseline is computed from each outcome plus the weighted mean of its scores."""
    values = {
        key: member.reward + coefficient / 2 * fmean(member.scores.values())
        if member.scores
        else member.reward
        for key, member in members.items()
    }
    return {key: Credit(advantage) for key, advantage in baseline(values).items()}


def step_wise(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Each turn is normalised among the members' turns of the same number."""
    by_turn: dict[int, dict[int, float | npt.NDArray[np.float32]]] = {key: {} for key in members}
    for turn, scores in _buckets(members).items():
        values = {key: members[key].reward + coefficient / 2 * score for key, score in scores.items()}
        is_constant = not has_signal([*values.values()])
        for key, advantage in group_mean_std(values).items():
            by_turn[key][turn] = 0.0 if is_constant else advantage
    return {key: Credit(advantage, by_turn[key]) for key, advantage in baseline(_rewards(members)).items()}


def outcome_then_steps(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """Scores move credit between the turns of a member; summed over its tokens, they add nothing."""
    deviations = _deviations(members)
    credits: dict[int, Credit] = {}
    for key, advantage in baseline(_rewards(members)).items():
        mean = _mean_over_tokens(deviations[key], members[key].samples)
        credits[key] = Credit(
            advantage,
            {
                turn: advantage + coefficient * (deviation - mean)
                for turn, deviation in deviations[key].items()
            },
        )
    return credits


def potential(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """The score of a turn, times c/2, is the potential of the state in which the next turn begins.

    Shaping by differences of potentials leaves the optimal policies as they are (Ng, Harada and Russell, "Policy invariance under
    reward transformations", 1999). With a potential of 0 at the start and at the end, the shaping rewards from turn k on add up to
    minus the potential of the state in which turn k begins. That number is known before turn k is sampled, so it changes the variance
    of the on-policy gradient and not its mean, whatever the judge says. The conditions are that

    - a score, and whether there is one, depends on nothing that happens after its turn;
    - neither groups nor members are selected by what happens later, as by their rewards or their lengths;
    - the loss is linear in the advantages and is not divided by a number that later turns decide, as aggregation = "trajectory" does.
    """
    deviations = _deviations(members)
    return {
        key: Credit(
            advantage,
            {
                turn + 1: advantage - coefficient / 2 * deviation
                for turn, deviation in deviations[key].items()
            },
        )
        for key, advantage in baseline(_rewards(members)).items()
    }


def distill(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """The advantage of a token is how much likelier it is for the teacher than it was for the policy."""
    del baseline
    return {key: Credit(0.0, _log_ratios(member, coefficient)) for key, member in members.items()}


def outcome_plus_distill(members: Members, baseline: Baseline, coefficient: float) -> dict[int, Credit]:
    """The advantage of the outcome plus that of `distill`."""
    return {
        key: Credit(
            advantage,
            {
                turn: np.float32(advantage) + ratios
                for turn, ratios in _log_ratios(members[key], coefficient).items()
            },
        )
        for key, advantage in baseline(_rewards(members)).items()
    }


CREDITS: dict[CreditMethod, CreditFunction] = {
    "outcome": outcome,
    "outcome_plus_mean": outcome_plus_mean,
    "step_wise": step_wise,
    "outcome_then_steps": outcome_then_steps,
    "potential": potential,
    "distill": distill,
    "outcome_plus_distill": outcome_plus_distill,
}


def _log_ratios(member: GradedMember, coefficient: float = 1.0) -> dict[int, npt.NDArray[np.float32]]:
    """c * (log p_teacher - log p) of the tokens of each turn, in nats; empty for a member without log-probs."""
    if member.logprobs is None:
        return {}
    return {
        reply.turn: np.float32(coefficient)
        * (member.logprobs[reply.turn] - sample.behaviour_logprobs_T[reply.start : reply.end])
        for sample in member.samples
        for reply in sample.replies
    }


def logprobs_of(judgement: Judgement) -> dict[int, npt.NDArray[np.float32]]:
    """A teacher's log-probs by turn, unchecked; a turn whose bytes are no float32 numbers has none."""
    return {
        step.turn: np.frombuffer(step.logprobs, "<f4")
        for step in judgement.steps
        if step.logprobs and len(step.logprobs) % 4 == 0
    }


def reverse_kl(member: GradedMember) -> tuple[float, int]:
    """The sum over a member's tokens of log p - log p_teacher, in nats, and their number; without log-probs 0 and 0. Their quotient
    estimates the reverse KL divergence of the policy from the teacher per token.
    """
    ratios = _log_ratios(member).values()
    return -sum(float(one.sum(dtype=np.float64)) for one in ratios), sum(len(one) for one in ratios)


def _rewards(members: Members) -> dict[int, float]:
    return {key: member.reward for key, member in members.items()}


def _buckets(members: Members) -> dict[int, dict[int, float]]:
    """Scores by turn, of the members that have one in that turn. Turns that only one member has are left out."""
    buckets: dict[int, dict[int, float]] = {}
    for key, member in members.items():
        for turn, score in (member.scores or {}).items():
            buckets.setdefault(turn, {})[key] = score
    return {turn: scores for turn, scores in buckets.items() if len(scores) > 1}


def _deviations(members: Members) -> dict[int, dict[int, float]]:
    """Each member's scores by turn, less the mean of their buckets."""
    deviations: dict[int, dict[int, float]] = {key: {} for key in members}
    for turn, scores in _buckets(members).items():
        mean = fmean(scores.values())
        for key, score in scores.items():
            deviations[key][turn] = score - mean
    return deviations


def _mean_over_tokens(values: Mapping[int, float], samples: Sequence[Sample]) -> float:
    """The mean of values by turn, weighted with the tokens that were sampled in each turn; 0 if there are none."""
    weights = {
        reply.turn: reply.end - reply.start
        for sample in samples
        for reply in sample.replies
        if reply.turn in values
    }
    total = sum(weights.values())
    return sum(values[turn] * weight for turn, weight in weights.items()) / total if total else 0.0


def _over_tokens(sample: Sample, credit: Credit) -> npt.NDArray[np.float32]:
    advantages_T = np.where(sample.trained_T, np.float32(credit.whole), np.float32(0))
    for reply in sample.replies:
        if reply.turn in credit.by_turn:
            advantages_T[reply.start : reply.end] = credit.by_turn[reply.turn]
    return advantages_T


@dataclass(slots=True)
class CreditMeter:
    """Accumulates statistics of a judge's scores or a teacher's log-probs in a batch, and of their effect on the advantages of its trained
    members.
    """

    _num_judged: int = 0
    _num_scored_replies: int = 0
    _score_means: list[float] = field(default_factory=list[float])
    _num_tokens: int = 0
    _outcome_sum: float = 0.0
    _process_sum: float = 0.0
    # The sum of log p - log p_teacher and the number of tokens of each trained member with log-probs, by group
    _taught: dict[str, list[tuple[float, int]]] = field(default_factory=dict[str, list[tuple[float, int]]])

    def add(self, member: GradedMember, advantages: TokenAdvantages, outcomes: TokenAdvantages) -> None:
        """`advantages` are the trained ones, `outcomes` those that the member would have without any score."""
        scores = member.scores or {}
        self._num_judged += member.scores is not None
        if scores:
            self._score_means.append(fmean(scores.values()))
        if member.logprobs is not None and member.samples:
            self._taught.setdefault(member.samples[0].group_id, []).append(reverse_kl(member))
        for sample, advantages_T, outcomes_T in zip(member.samples, advantages, outcomes, strict=True):
            self._num_scored_replies += sum(reply.turn in scores for reply in sample.replies)
            self._num_tokens += sample.num_trained_tokens
            self._outcome_sum += float(np.abs(outcomes_T).sum(dtype=np.float64))
            self._process_sum += float(np.abs(advantages_T - outcomes_T).sum(dtype=np.float64))

    @property
    def measures(self) -> CreditMeasures:
        num_tokens = self._num_tokens or 1
        return CreditMeasures(
            num_judged=self._num_judged,
            num_scored=len(self._score_means),
            num_scored_replies=self._num_scored_replies,
            score_mean=fmean(self._score_means) if self._score_means else None,
            outcome_size=self._outcome_sum / num_tokens,
            process_size=self._process_sum / num_tokens,
            num_taught=sum(map(len, self._taught.values())),
            num_taught_tokens=sum(count for found in self._taught.values() for _, count in found),
            reverse_kl=clustered_mean(_summed(found) for found in self._taught.values()),
        )


def _summed(found: Sequence[tuple[float, int]]) -> tuple[float, int]:
    return sum(total for total, _ in found), sum(count for _, count in found)
