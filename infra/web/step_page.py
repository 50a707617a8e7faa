"""The page of one optimizer step: its rollouts on the wall clock, what waited for what, and the effect of each rollout on the weights.

The first part needs the journal and the heads of rollouts alone. The effect of each rollout needs the tokens that a run with
`rollouts.tokens` keeps, and the bodies of the rollouts; it is a request of its own, because it reads more.
"""

import math
from collections.abc import Iterable, Sequence

from msgspec import structs

from infra.web.rollout_table import RolloutIndex, mean_reward, trajectory_of
from infra.web.run_journal import JsonRow, RolloutRow, marks, step_numbers
from infra.web.runs import OpenRun
from pipeline.journal.rows import StepRow
from pipeline.message import MalformedMessage, unpack_float32s
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.record import TrainedTokens, unpack_halves
from pipeline.trajectory import Trajectory


def step_page(run: OpenRun, number: int) -> JsonRow:
    """The step's numbers, and the rollouts of its groups. Hold the run's lock. Raises LookupError if the journal has no such step."""
    steps = run.journal.steps.rows
    place = next((place for place, row in enumerate(steps) if row.step == number), None)
    if place is None:
        known = f"it has steps {steps[0].step} to {steps[-1].step}" if steps else "it has none yet"
        raise LookupError(f"the journal of this run has no step {number}; {known}")
    step = steps[place]
    rows = _rows(run.rollouts, step)
    begins_at = min((row.enqueued_at for row in rows if row.enqueued_at), default=step.began_at or step.at)
    return {
        "step": step_numbers(step),
        "num_groups": len({row.group_id for row in rows}),
        "previous": steps[place - 1].step if place else None,
        "next": steps[place + 1].step if place + 1 < len(steps) else None,
        "begins_at": begins_at,
        "ends_at": max([step.at, *(row.finished_at for row in rows)]),
        "reward": mean_reward(rows),
        "waits": _waits(step, rows),
        "rollouts": [structs.asdict(row) | {"role": _role(step, row)} for row in rows],
        "marks": [mark for mark in marks(run.journal) if begins_at <= mark["at"] <= step.at],
    }


def _rows(index: RolloutIndex, step: StepRow) -> list[RolloutRow]:
    """The rollouts of all groups of which the step trained a member, group by group."""
    wanted = {*step.request_ids, *step.baseline_ids}
    groups = {index.rows[request_id].group_id for request_id in wanted if request_id in index.rows}
    found = [row for row in index.rows.values() if row.group_id in groups]
    return sorted(found, key=lambda row: (row.group_id, row.member, row.finished_at))


def _role(step: StepRow, row: RolloutRow) -> str:
    if row.request_id in step.request_ids:
        return "trained"
    return "baseline" if row.request_id in step.baseline_ids else "not trained"


def _waits(step: StepRow, rows: Sequence[RolloutRow]) -> JsonRow:
    """What waited for what: means over the trained rollouts in seconds, the rollout that arrived last, and the learner's wait. A time that
    the journal does not have is None.
    """
    trained = [row for row in rows if row.request_id in step.request_ids]
    last = max((row for row in trained if row.finished_at), key=lambda row: row.finished_at, default=None)

    def mean(pairs: Iterable[tuple[float, float]]) -> float | None:
        spans = [end - start for start, end in pairs if start and end and end >= start]
        return sum(spans) / len(spans) if spans else None

    return {
        "queued_s": mean((row.enqueued_at, row.claimed_at) for row in trained),
        "played_s": mean((row.claimed_at, row.finished_at) for row in trained),
        "waited_s": mean((row.finished_at, step.began_at) for row in trained),
        "learner_waited_s": step.wait_s,
        "last": None if last is None else last.request_id,
        "last_before_step_s": step.began_at - last.finished_at if last and step.began_at else None,
    }


def effects(run: OpenRun, number: int) -> JsonRow:
    """The effect of each trained rollout on the step, by request id; empty where the run keeps no tokens. It takes the
    run's lock itself. Raises LookupError as `step_page` does.
    """
    with run.lock:
        found = next((row for row in run.journal.steps.rows if row.step == number), None)
    if found is None:
        raise LookupError(f"the journal of this run has no step {number}")
    kept = RolloutStore(run.directory / DIRECTORY).trained(found.request_ids)
    told = {
        request_id: _effect(run, request_id, one) for request_id, one in kept.items() if one.step == number
    }
    return {"effects": {request_id: effect for request_id, effect in told.items() if effect is not None}}


def _effect(run: OpenRun, request_id: str, tokens: TrainedTokens) -> JsonRow | None:
    """Means over the trained tokens of a rollout; None if its record or its body cannot be read."""
    trajectory = trajectory_of(run.rollouts, request_id)
    if trajectory is None:
        return None
    try:
        pushes, advantages, ratios, num_masked = _by_token(tokens, trajectory)
    # A record from another release, or of other tokens
    except (MalformedMessage, IndexError, OverflowError, ValueError):
        return None
    num_tokens = len(advantages)
    return (
        {
            "num_tokens": num_tokens,
            "loss": -sum(pushes) / num_tokens,
            "advantage": sum(advantages) / num_tokens,
            "ratio_mean": sum(ratios) / num_tokens,
            "ratio_max": max(ratios),
            "masked_share": num_masked / num_tokens,
        }
        if num_tokens
        else None
    )


def _by_token(
    tokens: TrainedTokens, trajectory: Trajectory
) -> tuple[list[float], list[float], list[float], int]:
    """The products of weight and advantage (0 for a masked token), the advantages, the ratios of the learner's probability to the
    engine's, and the number of masked tokens.
    """
    pushes, advantages, ratios, num_masked = list[float](), list[float](), list[float](), 0
    for trained in tokens.turns:
        of_turn, weights = unpack_float32s(trained.advantages), unpack_halves(trained.weights)
        learned, sampled = (
            unpack_float32s(trained.logprobs),
            unpack_float32s(trajectory.turns[trained.turn].logprobs),
        )
        columns = zip(of_turn, weights, learned, sampled, trained.reasons, strict=True)
        for advantage, weight, ours, theirs, reason in columns:
            advantages.append(advantage)
            pushes.append(0.0 if reason else weight * advantage)
            ratios.append(math.exp(ours - theirs))
            num_masked += bool(reason)
    return pushes, advantages, ratios, num_masked
