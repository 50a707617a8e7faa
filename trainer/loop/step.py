"""One optimizer step on the groups taken for it: make the batch, train, measure the log-prob gap, write the step's row."""

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from pipeline.telemetry import span
from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.batching.logprob_gap import Gap
from trainer.learner.config import NotFinite, StepMetrics
from trainer.loop.state import RunState
from trainer.recipe import Recipe
from trainer.records.journal import Fate, SkippedBatchRow, StepRow
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import Ledger, SinceStep

log = logging.getLogger("swerve.trainer")


class SteppingLearner(Protocol):
    async def step(self, batch: Batch) -> StepMetrics | NotFinite: ...

    async def measure_gap(self, batch: Batch) -> Gap: ...


class Stepper:
    """Takes the optimizer steps of one run."""

    def __init__(
        self,
        recipe: Recipe,
        state: RunState,
        ledger: Ledger,
        learner: SteppingLearner,
        *,
        record: Callable[[StepRow | SkippedBatchRow], None],
        say: Callable[[str], None],
    ) -> None:
        self._recipe = recipe
        self._state = state
        self._ledger = ledger
        self._learner = learner
        self._record = record
        self._say = say
        self._has_skipped = False  # the last batch was not finite

    async def take(self, groups: list[Group], *, wait_s: float) -> bool:
        """Train on `groups`, which took `wait_s` to arrive, and settle them. False if they changed nothing."""
        state = self._state
        batch, fates = self._make_batch(groups)
        if batch.num_trained_tokens == 0:
            self._say("a whole batch was withheld or empty; enqueuing other groups")
            self._close(groups, fates)
            return False
        state.begun_steps += 1
        if batch.lag_max > self._recipe.admission.max_lag_versions:
            log.warning("step %d trains trajectories up to %d versions late", batch.step, batch.lag_max)
        state.phase = "optimizer step"
        with self._spans(groups, batch, fates):
            metrics = await self._learner.step(batch)
        if isinstance(metrics, NotFinite):
            self._skip(groups, batch, metrics)
            return False
        self._has_skipped = False
        state.step = batch.step
        state.phase = "measuring the log-prob gap"
        gap = await self._learner.measure_gap(batch)
        self._record(self._row(groups, batch, metrics, gap, wait_s))
        self._ledger.since_step = SinceStep()
        self._close(groups, fates)
        return True

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
            withhold_beyond=recipe.admission.max_lag_versions if withheld else None,
        )

    def _spans(self, groups: list[Group], batch: Batch, fates: dict[str, Fate]) -> contextlib.ExitStack:
        """A span of the step in the trace of every rollout that it trains; the stack ends them."""
        with contextlib.ExitStack() as spans:
            for head in (member.head for group in groups for member in group.members.values()):
                if fates[head.request_id] == "trained":
                    spans.enter_context(
                        span(
                            "train",
                            traceparent=head.traceparent,
                            step=batch.step,
                            request=head.request_id,
                            version=self._state.version,
                        )
                    )
            return spans.pop_all()

    def _close(self, groups: list[Group], fates: dict[str, Fate]) -> None:
        for group in groups:
            members = group.members.items()
            self._ledger.close_group(group, {number: fates[m.head.request_id] for number, m in members})

    def _row(
        self, groups: list[Group], batch: Batch, metrics: StepMetrics, gap: Gap, wait_s: float
    ) -> StepRow:
        since = self._ledger.since_step
        rewards = [reward for group in groups for reward in group.rewards.values()]
        heads = {m.head.request_id: m.head for group in groups for m in group.members.values()}
        return StepRow(
            step=batch.step,
            version=self._state.version,
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
            groups_dropped_zero_variance=since.zero_variance,
            groups_dropped_invalid=since.invalid,
            members_refilled=since.refilled,
            members_withdrawn=since.withdrawn,
            lag_max=batch.lag_max,
            lag_mean=batch.lag_mean,
            logprob_gap_max=gap.max,
            logprob_gap_mean=gap.mean,
            num_gap_tokens=gap.num_tokens,
            entropy=metrics.entropy,
            ratio_mean=metrics.ratio_mean,
            ratio_max=metrics.ratio_max,
            ess_share=metrics.ess_share,
            masked_share=metrics.masked_share,
            vetoed_share=metrics.vetoed_share,
            wait_s=wait_s,
            train_s=metrics.train_s,
            at=time.time(),
        )
