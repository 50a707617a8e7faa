"""The optimizer steps of a run, each from its groups to the weights that the engines get.

wait         until enough groups are ready; with `batch.streaming`, accumulate the gradient of ready groups while waiting
batch        make the samples of the groups into one batch, with their advantages
train        change the weights: `trainer/learner/megatron.py` contains the work of every rank
publish      export and announce the new weights; engines load them during the next parts
audit        recompute log-probs of some tokens under the weights that sampled them, and measure the gap to the engine's
settle       write the step's row, and the fate of each trajectory
follow up    begin a checkpoint that is due, and an evaluation that is due
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from tokenizers import Tokenizer

from pipeline.journal.rows import (
    AuditRow,
    EndReason,
    Fate,
    RankUse,
    SkippedBatchRow,
    StepDistillation,
    StepJudging,
    StepRow,
)
from pipeline.tokenizer import TokenizerBundle
from trainer.batching.audit import drawn, drift_by_kind, drift_by_position, drift_by_version
from trainer.batching.batch import Batch
from trainer.batching.collate import Overlong, make_batch
from trainer.batching.samples import Decode
from trainer.learner.config import NotFinite, StepMetrics
from trainer.loop.checkpoints import DueCheckpoints
from trainer.loop.evaluations import Evaluations
from trainer.loop.learner_thread import LearnerThread
from trainer.loop.publications import Publications
from trainer.loop.run import Run
from trainer.loop.status import WAITING
from trainer.rollouts.curriculum import context_limits
from trainer.rollouts.groups import Group
from trainer.rollouts.ledger import SinceStep

log = logging.getLogger("swerve.trainer")


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step that has changed the weights, and whose groups are not settled yet."""

    groups: list[Group]
    batch: Batch
    fates: dict[str, Fate]
    metrics: StepMetrics
    version: int  # version of the weights that it started from
    began_at: float  # Unix seconds, like `trained_at`
    trained_at: float  # when it had changed the weights
    gpu_use: tuple[RankUse, ...]  # since the step before


class Steps:
    """The optimizer steps of one run, which the loop's coroutine takes one after the other."""

    def __init__(
        self, run: Run, publications: Publications, checkpoints: DueCheckpoints, evaluations: Evaluations
    ) -> None:
        self._run = run
        self._publications = publications
        self._checkpoints = checkpoints
        self._evaluations = evaluations
        self._overlong = Overlong(run.recipe.overlong, context_limits(run.recipe))
        self._decode = decoder(run.books.inputs.tokenizer)
        self._has_skipped = False  # whether the last batch was not finite
        self._num_untaught_groups = 0  # groups in a row of which no member has a teacher's log-probs

    async def train(self) -> EndReason:
        """Takes all steps that the recipe asks for. Returns why there are no more."""
        run, times = self._run, self._run.times
        while run.state.step < run.recipe.num_steps:
            with times.spent("wait"):
                groups = await self._next_groups()
            if isinstance(groups, str):
                return groups
            # The first evaluation begins together with the first step's groups, so the step does not wait for it.
            self._evaluations.begin_before()
            taken = await self._take(groups)
            if taken is None:
                continue
            await self._publications.publish()
            run.state.phase = "auditing log-probs"
            with times.spent("audit"):
                audit = await audited(
                    taken.batch,
                    run.learner,
                    share=run.recipe.audit.share,
                    seed=run.recipe.seed,
                    decode=self._decode,
                )
            self._settle(taken, audit)
            if not await self._follow_up():
                return "stopped"
        return "finished"

    # The groups of a step

    async def _next_groups(self) -> list[Group] | EndReason:
        """The groups of the next step or, if there will be none, the end of the run."""
        run, groups = self._run, self._run.books.groups
        if not run.recipe.batch.streaming:
            return await self._wait(lambda: groups.take(run.state.timeline.lag))
        gathered: list[Group] = []
        while (number := len(gathered)) < run.recipe.batch.groups_per_step:
            some = await self._wait(
                lambda num_taken=number: groups.take_some(run.state.timeline.lag, num_taken=num_taken)
            )
            if isinstance(some, str):
                groups.put_back(gathered)
                run.state.gathered_groups = 0
                return some
            gathered += some
            run.state.gathered_groups = len(gathered)
            await self._accumulate(some)
        return gathered

    async def _wait(self, take: Callable[[], list[Group] | None]) -> list[Group] | EndReason:
        state = self._run.state
        while not (end := self._end()):
            state.phase = WAITING
            state.changed.clear()
            # Dropped trajectories may occupy memory in Redis that the next step's groups need.
            has_tended = await self._checkpoints.tend()
            groups = take()
            if groups is not None:
                return groups
            if not has_tended:
                await state.changed.wait()
        return end

    def _end(self) -> EndReason | None:
        """The reason why no step will get its groups; None while one still may."""
        limits, books = self._run.recipe.batch, self._run.books
        if self._run.state.is_stopping:
            return "stopped"
        if max(books.ledger.brake.failed_groups, self._num_untaught_groups) >= limits.max_failed_groups:
            return "failing"
        if books.ledger.groups_without_signal >= limits.max_groups_without_signal:
            return "nothing to learn"
        if books.dispatcher.is_exhausted:
            self._run.say("every training task is in quarantine")
            return "nothing to learn"
        return None

    # From groups to new weights

    def _make_batch(self, groups: list[Group]) -> tuple[Batch, dict[str, Fate]]:
        recipe, state = self._run.recipe, self._run.state
        withheld = recipe.admission.stragglers == "withhold"
        return make_batch(
            groups,
            step=state.step + 1,
            lag_of=state.timeline.lag,
            temperature=recipe.rollout.sampling.temperature,
            kind=recipe.batch.advantage,
            credit=recipe.credit,
            overlong=self._overlong,
            withhold_beyond=recipe.admission.max_lag_versions if withheld else None,
        )

    async def _accumulate(self, groups: list[Group]) -> None:
        """Computes the gradient of these groups of the next step while it waits for the others."""
        batch, _ = self._make_batch(groups)
        if batch.num_trained_tokens:
            self._run.state.phase = "accumulating gradients"
            with self._run.times.spent("train"):
                await self._run.learner.call("accumulate", batch)

    async def _take(self, groups: list[Group]) -> TakenStep | None:
        """Trains on `groups`, which were accumulated before if the recipe asks for that.

        Returns None if they changed nothing; they are then settled.
        """
        run, state, learner = self._run, self._run.state, self._run.learner
        state.gathered_groups, began_at = 0, time.time()
        batch, fates = self._make_batch(groups)
        if batch.num_trained_tokens == 0:
            run.say("a whole batch was withheld or empty; enqueuing other groups")
            self._num_untaught_groups += len(groups) if "unjudged" in fates.values() else 0
            self._close(groups, fates)
            return None
        self._num_untaught_groups = 0
        state.begun_steps += 1
        if batch.lag_max > run.recipe.admission.max_lag_versions:
            log.warning("step %d trains trajectories up to %d versions late", batch.step, batch.lag_max)
        state.phase = "optimizer step"
        metrics: StepMetrics | NotFinite
        with run.times.spent("train"):
            if run.recipe.batch.streaming:
                metrics = await learner.call("apply", batch.step)
            else:
                metrics = await learner.call("step", batch)
        if isinstance(metrics, NotFinite):
            self._skip(groups, batch, metrics)
            return None
        self._has_skipped = False
        state.step = batch.step
        run.recorder.record_trained(batch, learner.here.take_tokens(), version=state.version)
        trained_at = time.time()
        use = await learner.call("take_gpu_use") if learner.here.gpu_use.is_sampled else ()
        return TakenStep(groups, batch, fates, metrics, state.version, began_at, trained_at, use)

    def _skip(self, groups: list[Group], batch: Batch, found: NotFinite) -> None:
        """Settle a batch that changed nothing. Raises FloatingPointError if the batch before it was skipped too."""
        state, ids = self._run.state, batch.request_ids
        state.begun_steps -= 1
        self._run.record(
            SkippedBatchRow(step=batch.step, version=state.version, what=found.what, request_ids=ids)
        )
        for group in groups:
            self._run.books.ledger.drop_group(group, "not_finite")
        fact = f"step {batch.step}: the {found.what} of a batch of {len(ids)} trajectories is not finite"
        if self._has_skipped:
            raise FloatingPointError(f"{fact}, and so was the batch before it; see skipped_batches.jsonl")
        self._has_skipped = True
        self._run.say(f"{fact}: skipped it, the weights are unchanged; a second in a row ends the run")

    # After the weights are on their way

    def _settle(self, taken: TakenStep, audit: AuditRow) -> None:
        """Write the step's row and settle its groups. No checkpoint may be begun between `_take` and here."""
        run = self._run
        run.record(audit)
        run.record(self._row(taken, audit))
        run.books.ledger.since_step = SinceStep()
        self._close(taken.groups, taken.fates)
        change = run.staleness.observe(taken.batch.step, taken.metrics.by_lag)
        if change is not None:
            run.record(change)
            run.say(
                f"admission may run {change.ahead_versions} versions ahead, no longer {change.before}: {change.reason}"
            )

    def _close(self, groups: list[Group], fates: dict[str, Fate]) -> None:
        for group in groups:
            members = group.members.items()
            self._run.books.ledger.close_group(
                group, {number: fates[m.head.request_id] for number, m in members}
            )

    async def _follow_up(self) -> bool:
        """Begins the checkpoint and the evaluation that are due after a settled step. Returns False if a stop comes in the meantime."""
        run, evaluations, step = self._run, self._evaluations, self._run.state.step
        await self._checkpoints.after_step(step, may_begin=evaluations.may_checkpoint)
        if step < run.recipe.num_steps and evaluations.is_due:
            with run.times.spent("evaluation"):
                if not await evaluations.finished():
                    return False
            await self._checkpoints.after_step(step, may_begin=True)
            evaluations.begin_between()
        return True

    def _row(self, taken: TakenStep, audit: AuditRow) -> StepRow:
        groups, batch, metrics = taken.groups, taken.batch, taken.metrics
        is_taught = self._run.recipe.credit.distills
        since = self._run.books.ledger.since_step
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
            num_unique_sampled_tokens=sum(
                heads[one].sampled_tokens - heads[one].aside_tokens for one in batch.request_ids
            ),
            num_aside_tokens=sum(heads[one].aside_tokens for one in batch.request_ids),
            num_not_taken=sum(heads[one].num_not_taken for one in batch.request_ids),
            num_samples=len(batch.samples),
            num_sample_tokens=sum(sample.num_tokens for sample in batch.samples),
            num_unique_tokens=sum(heads[one].num_tokens for one in batch.request_ids),
            num_proved_replies=batch.num_replies,
            baseline_ids=batch.baseline_ids,
            judging=_judging(batch) if self._run.recipe.judge.is_on and not is_taught else None,
            distillation=_distillation(taken) if is_taught else None,
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
            signal=metrics.signal,
            ahead_versions=self._run.staleness.ahead_versions,
            began_at=taken.began_at,
            trained_at=taken.trained_at,
            gpu_use=taken.gpu_use,
            **self._seconds(metrics, sum(sample.num_tokens for sample in batch.samples)),
        )

    def _seconds(self, metrics: StepMetrics, num_tokens: int) -> dict[str, float]:
        """The parts of the time since the last row. The learner's work outside of its three parts belongs to the rest."""
        spent = self._run.times.lap()
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


async def audited(
    batch: Batch, learner: LearnerThread, *, share: float, seed: int, decode: Decode
) -> AuditRow:
    """The log-prob gap of a share of a step's trained tokens. Each of these tokens costs another forward pass for each weight version
    in its sample. The audit changes no weights, so it may run whenever the learner is free.
    """
    began = time.monotonic()
    part = drawn(batch, share, seed=seed)
    gap = await learner.measure_gap(part)
    return AuditRow(
        step=batch.step,
        num_tokens=gap.num_tokens,
        num_batch_tokens=batch.num_trained_tokens,
        num_unmeasured=gap.num_unmeasured,
        num_samples=len(part.samples),
        num_positions=gap.num_positions,
        gap_max=gap.max,
        gap_mean=gap.mean,
        audit_s=time.monotonic() - began,
        by_version=drift_by_version(gap),
        by_position=drift_by_position(gap),
        by_kind=drift_by_kind(gap, part, decode),
    )


def decoder(bundle: TokenizerBundle) -> Decode:
    """Sampled tokens as text, control tokens included, as workers decode them."""
    tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False)

    return decode


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


def _distillation(taken: TakenStep) -> StepDistillation:
    measures = taken.batch.credit
    found = measures.reverse_kl
    low, high = (found.low, found.high) if found is not None and isfinite(found.low) else (None, None)
    return StepDistillation(
        num_taught=measures.num_taught,
        num_left_out=sum(fate == "unjudged" for fate in taken.fates.values()),
        num_tokens=measures.num_taught_tokens,
        reverse_kl=None if found is None else found.value,
        reverse_kl_low=low,
        reverse_kl_high=high,
    )
