"""The time of the engines: generating for training or evaluation, paused for weights, or idle."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from pipeline.trajectory import Trajectory
from trainer.records.time_rows import EnginePause
from trainer.where.account import Account, account
from trainer.where.trainer_time import TrainerWindow

Work = Literal["paused", "training", "evaluation"]
PAUSED, TRAINING, EVALUATION, IDLE = (
    "paused for weights",
    "generating for training",
    "generating for evaluation",
    "idle",
)
PRECEDENCE: tuple[tuple[Work, str], ...] = (
    ("paused", PAUSED),
    ("training", TRAINING),
    ("evaluation", EVALUATION),
)
"""A moment in which an engine does several of these is charged to the first."""

NO_ROLLOUTS = "What engines generated is unknown: the run keeps no rollouts that say when (rollouts.keep)."


@dataclass(frozen=True, slots=True)
class Span:
    """An engine did this from `began_at` to `ended_at` (Unix s)."""

    engine: str
    work: Work
    began_at: float
    ended_at: float


def spans_of(trajectory: Trajectory) -> Iterator[Span]:
    """What engines did for its replies. An engine works at the end of the time that the policy was asked."""
    work: Work = "evaluation" if trajectory.claim.request.purpose == "eval" else "training"
    for turn in trajectory.turns:
        if turn.asked_at:
            yield Span(turn.engine, work, turn.asked_at + turn.engine_wait_s, turn.asked_at + turn.generate_s)


def pause_spans(pauses: Iterable[EnginePause]) -> Iterator[Span]:
    for pause in pauses:
        yield Span(pause.engine, "paused", pause.began_at, pause.ended_at)


def engines_account(spans: Iterable[Span], engines: Iterable[str], window: TrainerWindow | None) -> Account:
    """Of the engines that are known by name or by what they did, over the trainer's time."""
    if window is None:
        return account("engines", {}, NO_ROLLOUTS)
    by_engine: dict[str, list[Span]] = defaultdict(list, {name: [] for name in engines})
    has_generated = False
    for span in spans:
        by_engine[span.engine].append(span)
        has_generated |= span.work != "paused"
    parts: dict[str, float] = dict.fromkeys((TRAINING, EVALUATION, PAUSED, IDLE), 0.0)
    for own in by_engine.values():
        for part, seconds in _swept(own, window):
            parts[part] += seconds
    if has_generated:
        return account("engines", parts)
    paused_s = parts[PAUSED]
    return account("engines", {PAUSED: paused_s, "not known": sum(parts.values()) - paused_s}, NO_ROLLOUTS)


def _swept(spans: Iterable[Span], window: TrainerWindow) -> Iterator[tuple[str, float]]:
    """The window of one engine, cut wherever something begins or ends."""
    edges: list[tuple[float, Work, int]] = []
    for span in spans:
        began_at, ended_at = max(span.began_at, window.began_at), min(span.ended_at, window.ended_at)
        if began_at < ended_at:
            edges.append((began_at, span.work, 1))
            edges.append((ended_at, span.work, -1))
    under_way: Counter[str] = Counter()
    now = window.began_at
    for at, work, change in sorted(edges):
        yield _part(under_way), at - now
        now = at
        under_way[work] += change
    yield IDLE, window.ended_at - now


def _part(under_way: Counter[str]) -> str:
    return next((part for work, part in PRECEDENCE if under_way[work] > 0), IDLE)
