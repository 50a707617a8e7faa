"""One optimizer step on the groups taken for it: make the batch and train; then, with the weights on their way to the engines,
audit the log-probs, write the step's row and settle the groups.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.batching.overlong import Overlong
from trainer.batching.trained_tokens import SampleTokens
from trainer.learner.config import LagMetrics, NotFinite, StepMetrics
from trainer.loop.state import RunState
from trainer.loop.step_times import StepTimes
from trainer.recipe import Recipe
from trainer.records.journal import AuditRow, Fate, SkippedBatchRow, StalenessRow, StepRow
from trainer.records.step_judging import StepJudging
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import Ledger, SinceStep

log = logging.getLogger("swerve.trainer")


class SteppingLearner(Protocol):
    async def step(self, batch: Batch) -> StepMetrics | NotFinite: ...

    async def accumulate(self, batch: Batch) -> None:
        """Add the gradient of a part of the next step."""
        ...

    async def apply(self, step: int) -> StepMetrics | NotFinite:
        """Take the step whose parts were accumulated."""
        ...

    def take_tokens(self) -> tuple[SampleTokens, ...]:
        """What the last step did with each token; nothing if the run does not keep that."""
        ...


class StalenessObserver(Protocol):
    """Decides how far admission may run ahead."""

    @property
    def ahead_versions(self) -> int: ...

    def observe(self, step: int, by_lag: tuple[LagMetrics, ...]) -> StalenessRow | None:
        """Take a step's metrics into account. Returns what it changes, if anything."""
        ...


class TokenRecorder(Protocol):
    """Keeps what a step did with each token."""

    def record_trained(self, batch: Batch, tokens: Sequence[SampleTokens], *, version: int) -> None:
        """Returns at once. `version` is of the weights that the step started from."""
        ...


class StepAuditor(Protocol):
    async def audit(self, batch: Batch) -> AuditRow:
        """Measure the log-prob gap of what the step trained."""
        ...


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that has changed the weights, and whose groups are not settled yet."""

    groups: list[Group]
    batch: Batch
    fates: dict[str, Fate]
    metrics: StepMetrics
    version: int  # of the weights it started from
    began_at: float  # Unix seconds, as the next
    trained_at: float  # when it had changed the weights


class Stepper:
    """Takes the optimizer steps of one run."""

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        ledger: Ledger,
        learner: SteppingLearner,
        auditor: StepAuditor,
        times: StepTimes,
        staleness: StalenessObserver,
        tokens: TokenRecorder,
        *,
        record: Callable[[StepRow | SkippedBatchRow | StalenessRow], None],
        say: Callable[[str], None],
    ) -> None:
        self._recipe = recipe
        self._state = state
        self._ledger = ledger
        self._learner = learner
        self._auditor = auditor
        self._times = times
        self._staleness = staleness
        self._tokens = tokens
        self._record = record
        self._say = say
        self._has_skipped = False  # the last batch was not finite

    async def accumulate(self, groups: list[Group]) -> None:
        """Compute the gradient of these groups of the next step, while others are awaited."""
        batch, _ = self._make_batch(groups)
        if batch.num_trained_tokens:
            self._state.phase = "accumulating gradients"
            with self._times.spent("train"):
                await self._learner.accumulate(batch)

    async def take(self, groups: list[Group]) -> TakenStep | None:
        """Train on `groups`, which were accumulated before if the recipe says so. None if they changed nothing: then they are
        settled.
        """
        state = self._state
        state.gathered_groups, began_at = 0, time.time()
        batch, fates = self._make_batch(groups)
        if batch.num_trained_tokens == 0:
            self._say("a whole batch was withheld or empty; enqueuing other groups")
            self._close(groups, fates)
            return None
        state.begun_steps += 1
        if batch.lag_max > self._recipe.admission.max_lag_versions:
            log.warning("step %d trains trajectories up to %d versions late", batch.step, batch.lag_max)
        state.phase = "optimizer step"
        with self._times.spent("train"):
            if self._recipe.batch.streaming:
                metrics = await self._learner.apply(batch.step)
            else:
                metrics = await self._learner.step(batch)
        if isinstance(metrics, NotFinite):
            self._skip(groups, batch, metrics)
            return None
        self._has_skipped = False
        state.step = batch.step
        self._tokens.record_trained(batch, self._learner.take_tokens(), version=state.version)
        return TakenStep(groups, batch, fates, metrics, state.version, began_at, trained_at=time.time())

    async def settle(self, taken: TakenStep) -> None:
        """Audit the step, write its row and settle its groups. No checkpoint may be begun between `take` and here."""
        self._state.phase = "auditing log-probs"
        with self._times.spent("audit"):
            audit = await self._auditor.audit(taken.batch)
        self._record(self._row(taken, audit))
        self._ledger.since_step = SinceStep()
        self._close(taken.groups, taken.fates)
        change = self._staleness.observe(taken.batch.step, taken.metrics.by_lag)
        if change is not None:
            self._record(change)
            self._say(
                f"admission may run {change.ahead_versions} versions ahead, no longer {change.before}: {change.reason}"
            )

    def _skip(self, groups: list[Group], batch: Batch, found: NotFinite) -> None:
        """Settle a batch that changed nothing. Raises FloatingPointError if the batch before it was skipped too."""
        state, ids = self._state, batch.request_ids
        state.begun_steps -= 1
        self._record(
            SkippedBatchRow(step=batch.step, version=state.version, what=found.what, request_ids=ids)
        )
        for group in groups:
            self._ledger.drop_group(group, "not_finite")
        fact = f"step {batch.step}: the {found.what} of a batch of {len(ids)} trajectories is not finite"
        if self._has_skipped:
            raise FloatingPointError(f"{fact}, and so was the batch before it; see skipped_batches.jsonl")
        self._has_skipped = True
        self._say(f"{fact}: skipped it, the weights are unchanged; a second in a row ends the run")

    def _make_batch(self, groups: list[Group]) -> tuple[Batch, dict[str, Fate]]:
        recipe = self._recipe
        withheld = recipe.admission.stragglers == "withhold"
        return make_batch(
            groups,
            step=self._state.step + 1,
            lag_of=self._state.timeline.lag,
            temperature=recipe.rollout.sampling.temperature,
            kind=recipe.batch.advantage,
            credit=recipe.credit,
            overlong=Overlong(recipe.overlong, recipe.rollout.limits.context_tokens),
            withhold_beyond=recipe.admission.max_lag_versions if withheld else None,
        )

    def _close(self, groups: list[Group], fates: dict[str, Fate]) -> None:
        for group in groups:
            members = group.members.items()
            self._ledger.close_group(group, {number: fates[m.head.request_id] for number, m in members})

    def _row(self, taken: TakenStep, audit: AuditRow) -> StepRow:
        groups, batch, metrics = taken.groups, taken.batch, taken.metrics
        since = self._ledger.since_step
        rewards = [reward for group in groups for reward in group.rewards.values()]
        heads = {m.head.request_id: m.head for group in groups for m in group.members.values()}
        return StepRow(
            step=batch.step,
            version=taken.version,
            num_groups=len(groups),
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=metrics.lr,
            reward_mean=(since.reward_sum + sum(rewards)) / (since.num_rewards + len(rewards)),
            num_trajectories=batch.num_trajectories,
            request_ids=batch.request_ids,
            num_trained_tokens=metrics.num_trained_tokens,
            num_unique_sampled_tokens=sum(heads[one].sampled_tokens for one in batch.request_ids),
            num_samples=len(batch.samples),
            num_sample_tokens=sum(sample.num_tokens for sample in batch.samples),
            num_unique_tokens=sum(heads[one].num_tokens for one in batch.request_ids),
            num_proved_replies=batch.num_replies,
            baseline_ids=batch.baseline_ids,
            judging=_judging(batch) if self._recipe.judge.is_on else None,
            groups_dropped_zero_variance=since.zero_variance,
            groups_dropped_invalid=since.invalid,
            members_refilled=since.refilled,
            members_withdrawn=since.withdrawn,
            lag_max=batch.lag_max,
            lag_mean=batch.lag_mean,
            logprob_gap_max=audit.gap_max,
            logprob_gap_mean=audit.gap_mean,
            num_gap_tokens=audit.num_tokens,
            entropy=metrics.entropy,
            ratio_mean=metrics.ratio_mean,
            ratio_max=metrics.ratio_max,
            ess_share=metrics.ess_share,
            masked_share=metrics.masked_share,
            vetoed_share=metrics.vetoed_share,
            at=time.time(),
            utilisation=metrics.utilisation,
            by_lag=metrics.by_lag,
            ahead_versions=self._staleness.ahead_versions,
            began_at=taken.began_at,
            trained_at=taken.trained_at,
            **self._seconds(metrics, sum(sample.num_tokens for sample in batch.samples)),
        )

    def _seconds(self, metrics: StepMetrics, num_tokens: int) -> dict[str, float]:
        """Where the time since the row before went. What the learner does besides its three parts belongs to the rest."""
        spent = self._times.lap()
        inside_s = metrics.forward_s + metrics.backward_s + metrics.optimizer_s
        return {
            "wall_s": sum(spent.values()),
            "wait_s": spent["wait"],
            "train_s": metrics.train_s,
            "tokens_per_s": num_tokens / metrics.train_s if metrics.train_s else 0.0,
            "forward_s": metrics.forward_s,
            "backward_s": metrics.backward_s,
            "optimizer_s": metrics.optimizer_s,
            "audit_s": spent["audit"],
            "export_s": spent["export"],
            "engines_s": spent["engines"],
            "checkpoint_s": spent["checkpoint"],
            "evaluation_s": spent["evaluation"],
            "other_s": spent["other"] + spent["train"] - inside_s,
        }


def _judging(batch: Batch) -> StepJudging:
    measures = batch.credit
    return StepJudging(
        num_judged=measures.num_judged,
        num_scored=measures.num_scored,
        num_unjudged=batch.num_trajectories - measures.num_judged,
        num_scored_replies=measures.num_scored_replies,
        num_replies=batch.num_replies,
        num_tokens=batch.num_trained_tokens,
        score_mean=measures.score_mean,
        outcome_size=measures.outcome_size,
        process_size=measures.process_size,
    )
