"""One optimizer step on the groups that were taken for it: batch, step, log-prob gap, and a row that says it all."""

import contextlib
import logging
import time

from pipeline.telemetry import span
from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.batching.logprob_gap import Gap, measure_gap
from trainer.learner.config import NotFinite, StepMetrics
from trainer.loop.parts import Parts
from trainer.loop.state import Standing
from trainer.recipe import Recipe
from trainer.records.journal import Fate, SkippedBatchRow, StepRow
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import SinceStep

log = logging.getLogger("swerve.trainer")


class Stepper:
    """Of one run."""

    def __init__(self, recipe: Recipe, parts: Parts, standing: Standing) -> None:
        self._recipe = recipe
        self._parts = parts
        self._standing = standing
        self._has_skipped = False  # the last batch was not finite

    async def take(self, groups: list[Group], *, wait_s: float) -> bool:
        """Train on `groups`, which took `wait_s` to come; False if they changed nothing. Settles them."""
        parts, standing = self._parts, self._standing
        batch, fates = self._make_batch(groups)
        if batch.num_trained_tokens == 0:
            parts.progress.say("a whole batch was withheld or empty; asking for others")
            self._close(groups, fates)
            return False
        standing.begun_steps += 1
        if batch.lag_max > self._recipe.admission.max_lag_versions:
            log.warning("step %d trains trajectories up to %d versions late", batch.step, batch.lag_max)
        standing.phase = "optimizer step"
        with self._spans(groups, batch, fates):
            metrics = await parts.learner(parts.feed.step, batch)
        if isinstance(metrics, NotFinite):
            self._skip(groups, batch, metrics)
            return False
        self._has_skipped = False
        standing.step = batch.step
        standing.phase = "measuring the log-prob gap"
        gap = await parts.learner(
            measure_gap, batch, parts.feed.learner.versions_held, parts.feed.logprobs_under
        )
        self._record(groups, batch, metrics, gap, wait_s)
        self._close(groups, fates)
        return True

    def _skip(self, groups: list[Group], batch: Batch, found: NotFinite) -> None:
        """Settle a batch that changed nothing. Raises FloatingPointError if the batch before it was skipped too."""
        standing, ids = self._standing, batch.request_ids
        standing.begun_steps -= 1
        self._parts.journal.append(
            SkippedBatchRow(step=batch.step, version=standing.version, what=found.what, request_ids=ids)
        )
        for group in groups:
            self._parts.ledger.drop_group(group, "not_finite")
        fact = f"step {batch.step}: the {found.what} of a batch of {len(ids)} trajectories is not finite"
        if self._has_skipped:
            raise FloatingPointError(f"{fact}, and so was the batch before it; see skipped_batches.jsonl")
        self._has_skipped = True
        self._parts.progress.say(
            f"{fact}: skipped it, the weights are unchanged; a second in a row ends the run"
        )

    def _make_batch(self, groups: list[Group]) -> tuple[Batch, dict[str, Fate]]:
        recipe = self._recipe
        withheld = recipe.admission.stragglers == "withhold"
        return make_batch(
            groups,
            step=self._standing.step + 1,
            lag_of=self._standing.timeline.lag,
            temperature=recipe.rollout.sampling.temperature,
            kind=recipe.batch.advantage,
            withhold_beyond=recipe.admission.max_lag_versions if withheld else None,
        )

    def _spans(self, groups: list[Group], batch: Batch, fates: dict[str, Fate]) -> contextlib.ExitStack:
        """The step in the trace of every rollout that it trains, until the stack is left."""
        with contextlib.ExitStack() as spans:
            for head in (member.head for group in groups for member in group.members.values()):
                if fates[head.request_id] == "trained":
                    spans.enter_context(
                        span(
                            "train",
                            traceparent=head.traceparent,
                            step=batch.step,
                            request=head.request_id,
                            version=self._standing.version,
                        )
                    )
            return spans.pop_all()

    def _close(self, groups: list[Group], fates: dict[str, Fate]) -> None:
        for group in groups:
            members = group.members.items()
            self._parts.ledger.close_group(group, {number: fates[m.head.request_id] for number, m in members})

    def _record(
        self, groups: list[Group], batch: Batch, metrics: StepMetrics, gap: Gap, wait_s: float
    ) -> None:
        since = self._parts.ledger.since_step
        rewards = [reward for group in groups for reward in group.rewards.values()]
        heads = {m.head.request_id: m.head for group in groups for m in group.members.values()}
        row = StepRow(
            step=batch.step,
            version=self._standing.version,
            num_groups=len(groups),
            loss=metrics.loss,
            grad_norm=metrics.grad_norm,
            lr=metrics.lr,
            reward_mean=(since.reward_sum + sum(rewards)) / (since.num_rewards + len(rewards)),
            num_trajectories=batch.num_trajectories,
            request_ids=batch.request_ids,
            num_trained_tokens=metrics.num_trained_tokens,
            num_unique_sampled_tokens=sum(heads[one].sampled_tokens for one in batch.request_ids),
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
        self._parts.ledger.since_step = SinceStep()
        self._parts.records.append(row)
