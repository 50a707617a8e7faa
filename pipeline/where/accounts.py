"""Accounts of time for each role, whose parts add up to their wall time, and the lives of trained rollouts by what they waited for.

The trainer's account covers the time from its first start to its last row, by what the loop did or waited for. The slots' account contains
the parts of each claim, and the reasons for slots without a claim; the same samples show why the trainer had to wait. The engines' account
has generation for training or evaluation, pauses for weights, and idle time. A rollout's life lasts from its request to the step that
trained it.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from pipeline.journal.rows import (
    ClosedBy,
    EndRow,
    EnginePause,
    EpisodeRow,
    FleetRow,
    RankUse,
    StartRow,
    StepRow,
)
from pipeline.trajectory import EpisodeSeconds, Trajectory

Role = str
"""The owner of the time: "trainer", "slots", "engines"."""


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of one role by their use."""

    role: Role
    wall_s: float  # sum over all slots, or all engines
    parts_s: dict[str, float]  # their sum is `wall_s`
    unknown: tuple[str, ...] = ()  # one sentence for each thing that the records do not tell

    def share(self, *parts: str) -> float:
        """The share of these parts in the wall; 0 in an empty account."""
        return sum(self.parts_s.get(part, 0.0) for part in parts) / self.wall_s if self.wall_s else 0.0


def account(role: Role, parts_s: Mapping[str, float], *unknown: str) -> Account:
    """The account whose wall is the sum of its parts."""
    return Account(role=role, wall_s=sum(parts_s.values()), parts_s=dict(parts_s), unknown=unknown)


START, WAIT, NOT_KEPT = "start", "waiting for groups", "not in the journal"
LEARNER = ("forward", "backward", "optimizer")
REST = ("audit", "export", "engines", "checkpoint", "evaluation", "other")
NO_STEPS = "No step says where its time went: the journal is older than that, or no step was taken yet."
NO_START = (
    "Nothing is known of the time before the first step and after the last: the journal is older than that."
)


@dataclass(frozen=True, slots=True)
class TrainerWindow:
    """The interval in which the trainer's time is known (Unix seconds)."""

    began_at: float
    ended_at: float


def window_of(
    starts: Sequence[StartRow], steps: Sequence[StepRow], endings: Sequence[EndRow]
) -> TrainerWindow | None:
    """The window of the trainer; None if nothing is known."""
    told = [row for row in steps if row.wall_s]
    began = [row.at - sum(row.seconds.values()) for row in starts] + [row.at - row.wall_s for row in told]
    ended = [row.at for row in (*told, *starts)] + [row.at for row in endings if row.seconds]
    return TrainerWindow(min(began), max(ended)) if began else None


def trainer_account(
    starts: Sequence[StartRow], steps: Sequence[StepRow], endings: Sequence[EndRow]
) -> Account:
    """The trainer's account.

    Time that no row accounts for, such as steps that a resume discarded, or hours without a trainer, is a separate part.
    """
    told = [row for row in steps if row.wall_s]
    window = window_of(starts, told, endings)
    if window is None:
        return account("trainer", {}, NO_STEPS)
    parts = {START: sum(sum(row.seconds.values()) for row in starts), WAIT: sum(row.wait_s for row in told)}
    for part in (*LEARNER, *REST):
        parts[part] = sum(getattr(row, f"{part}_s") for row in told)
    for row in endings:
        for name, seconds in row.seconds.items():
            parts[_part_of(name, parts)] += seconds
    elapsed_s = window.ended_at - window.began_at
    parts[NOT_KEPT] = max(0.0, elapsed_s - sum(parts.values()))
    unknown = () if starts else (NO_START,)
    return account("trainer", parts, *unknown)


def _part_of(name: str, parts: Mapping[str, float]) -> str:
    """The account's part for a part of `StepTimes` after the last step, where no step divides the learner's time."""
    return WAIT if name == "wait" else name if name in parts else "other"


AT_WORK: dict[str, str] = {
    "open_s": "container open",
    "engine_wait_s": "waiting for the engine",
    "generate_s": "generate",
    "command_s": "command",
    "close_s": "container close",
    "grade_s": "grade",
    "other_s": "other",
}
"""The parts of a claim, by the fields of `EpisodeSeconds`."""

PAUSED = "idle: the worker is paused"
IDLE: dict[ClosedBy, str] = {
    "": "idle: between claims",
    "lag": "idle: admission is closed by the lag",
    "weights": "idle: engines load the newest weights",
    "evaluation": "idle: an evaluation keeps the newest weights from the engines",
    "end": "idle: the run's last groups are enqueued",
    "judge": "idle: no judge works",
    "redis": "idle: Redis is full of trajectories",
    "memory": "idle: the trainer's memory is full of trajectories",
    "failures": "idle: a pause after failed groups",
}
UNSETTLED = "claims without a row here"
"""Claims of other runs, or tried again, or not settled yet."""

NO_SAMPLES = "Slots without a claim are unknown: the journal has no samples of the fleet (fleet.jsonl)."
NO_SECONDS = "What claims did is unknown: the journal is older than that."


def at_work(rows: Iterable[EpisodeRow]) -> dict[str, float]:
    """The seconds of these rows' claims by their use; nothing if no row has the data."""
    told = [row.seconds for row in rows if row.seconds is not None]
    return {name: sum(getattr(one, field) for one in told) for field, name in AT_WORK.items()} if told else {}


def seconds_of(seconds: EpisodeSeconds) -> float:
    """The sum of all fields."""
    return sum(msgspec.structs.astuple(seconds))


def idle_of(samples: Iterable[FleetRow]) -> dict[str, float]:
    """Slot-seconds without a claim, by reason."""
    found = dict.fromkeys((PAUSED, *IDLE.values()), 0.0)
    for row in samples:
        found[PAUSED] += row.span_s * row.paused
        found[IDLE[row.closed_by]] += row.span_s * (row.slots - row.running - row.paused)
    return found


def slots_account(rows: Sequence[EpisodeRow], samples: Sequence[FleetRow]) -> Account:
    """The slots' account.

    Its wall time comes from the samples, and the time of claims from their rows, which is exact; samples divide the rest.
    """
    work, idle = at_work(rows), idle_of(samples)
    unknown = [text for text, is_known in ((NO_SAMPLES, samples), (NO_SECONDS, work)) if not is_known]
    if not samples:
        return account("slots", work, *unknown)
    rest_s = max(0.0, sum(row.span_s * row.slots for row in samples) - sum(work.values()))
    idle_s = sum(idle.values())
    scale = min(1.0, rest_s / idle_s) if idle_s else 0.0
    scaled = {name: seconds * scale for name, seconds in idle.items()}
    return account("slots", {**work, UNSETTLED: rest_s - sum(scaled.values()), **scaled}, *unknown)


BUSY, NO_WORKER = "slots have claims", "no worker is alive"
BUSY_PROCESSORS = 0.9
"""The share of busy processors from which on further processes on the same machine speed nothing up."""


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """The time that the trainer waited for groups, divided by the use of slots in that time."""

    parts_s: dict[str, float]  # their sum is the time that the trainer waited
    # Share of the machine's CPU time used in this time; None if workers run elsewhere, or nothing is known.
    cpu_share: float | None

    @property
    def are_processors_busy(self) -> bool:
        return self.cpu_share is not None and self.cpu_share >= BUSY_PROCESSORS


def waiting_of(wait_s: float, samples: Sequence[FleetRow]) -> Waiting | None:
    """The waiting time, which samples taken while the trainer waited divide; None without such samples."""
    taken = [row for row in samples if row.is_waiting and row.span_s > 0]
    if not taken:
        return None
    weights = {BUSY: 0.0, NO_WORKER: 0.0}
    for row in taken:
        shares = {NO_WORKER: 1.0} if row.slots == 0 else {BUSY: row.running / row.slots}
        shares |= {
            name: seconds / row.slots / row.span_s for name, seconds in idle_of([row]).items() if seconds
        }
        for name, share in shares.items():
            weights[name] = weights.get(name, 0.0) + share * row.span_s
    whole = sum(weights.values())
    known = [(row.cpu_share, row.span_s) for row in taken if row.cpu_share is not None]
    return Waiting(
        parts_s={name: wait_s * weight / whole for name, weight in weights.items()},
        cpu_share=sum(share * s for share, s in known) / sum(s for _, s in known) if known else None,
    )


Work = Literal["paused", "training", "evaluation"]
PAUSED_FOR_WEIGHTS, TRAINING, EVALUATION, ENGINE_IDLE = (
    "paused for weights",
    "generating for training",
    "generating for evaluation",
    "idle",
)
PRECEDENCE: tuple[tuple[Work, str], ...] = (
    ("paused", PAUSED_FOR_WEIGHTS),
    ("training", TRAINING),
    ("evaluation", EVALUATION),
)
"""If an engine does several of these at the same moment, the moment is charged to the first."""

NO_ROLLOUTS = "What engines generated is unknown: the run keeps no rollouts that say when (rollouts.keep)."
NOT_READ = "What engines generated is not counted here, because the rollouts would have to be read: `swerve where` does."


@dataclass(frozen=True, slots=True)
class Span:
    """An activity of an engine from `began_at` to `ended_at` (Unix seconds)."""

    engine: str
    work: Work
    began_at: float
    ended_at: float


def spans_of(trajectory: Trajectory) -> Iterator[Span]:
    """Yields a span for each reply with known times: from the moment when an engine began to work on it until it was complete."""
    work: Work = "evaluation" if trajectory.claim.request.purpose == "eval" else "training"
    for turn in trajectory.turns:
        if turn.asked_at:
            yield Span(turn.engine, work, turn.asked_at + turn.engine_wait_s, turn.asked_at + turn.generate_s)


def pause_spans(pauses: Iterable[EnginePause]) -> Iterator[Span]:
    for pause in pauses:
        yield Span(pause.engine, "paused", pause.began_at, pause.ended_at)


def engines_account(
    spans: Iterable[Span], engines: Iterable[str], window: TrainerWindow | None, unknown: str = NO_ROLLOUTS
) -> Account:
    """The account of the engines that are known by name or by their spans, over the trainer's time. `unknown` says why there are no spans
    of what they generated, if there are none.
    """
    if window is None:
        return account("engines", {}, unknown)
    by_engine: dict[str, list[Span]] = defaultdict(list, {name: [] for name in engines})
    has_generated = False
    for span in spans:
        by_engine[span.engine].append(span)
        has_generated |= span.work != "paused"
    parts: dict[str, float] = dict.fromkeys((TRAINING, EVALUATION, PAUSED_FOR_WEIGHTS, ENGINE_IDLE), 0.0)
    for own in by_engine.values():
        for part, seconds in _swept(own, window):
            parts[part] += seconds
    if has_generated:
        return account("engines", parts)
    paused_s = parts[PAUSED_FOR_WEIGHTS]
    return account(
        "engines", {PAUSED_FOR_WEIGHTS: paused_s, "not known": sum(parts.values()) - paused_s}, unknown
    )


def _swept(spans: Iterable[Span], window: TrainerWindow) -> Iterator[tuple[str, float]]:
    """The window of one engine, divided wherever a span begins or ends."""
    edges: list[tuple[float, Work, int]] = []
    for span in spans:
        began_at, ended_at = max(span.began_at, window.began_at), min(span.ended_at, window.ended_at)
        if began_at < ended_at:
            edges.append((began_at, span.work, 1))
            edges.append((ended_at, span.work, -1))
    under_way: Counter[str] = Counter()
    now = window.began_at
    for at, work, change in sorted(edges):
        yield _engine_part(under_way), at - now
        now = at
        under_way[work] += change
    yield ENGINE_IDLE, window.ended_at - now


def _engine_part(under_way: Counter[str]) -> str:
    return next((part for work, part in PRECEDENCE if under_way[work] > 0), ENGINE_IDLE)


QUEUE, DELIVERY, GROUP, JUDGE, TURN, STEP = (
    "queue",
    "delivery",
    "waiting for the group",
    "waiting for judgements",
    "waiting for the step",
    "step",
)
ON_WORKER, UNTIL_SETTLED = "on its worker", "until it was settled"
OLD = "What rollouts waited for on their workers and in their groups is unknown: the journal is older than that."


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the rollouts' lives."""

    p50_s: float
    p90_s: float
    share: float  # share of the time of all lives together


class RolloutWaits(msgspec.Struct, frozen=True, kw_only=True):
    """The waits of all trained rollouts."""

    num_rollouts: int
    life_p50_s: float
    life_p90_s: float
    waits: dict[str, Wait]  # waits in the order of a rollout's life; the shares add up to 1
    unknown: tuple[str, ...] = ()


def parts_of(row: EpisodeRow, taken_at: float) -> dict[str, float]:
    """The parts of one life, of a rollout that a step took at `taken_at`; 0: unknown. The machines' clocks may differ, so a part
    that would be negative is 0. The parts add up to the life's length.
    """
    queue = {QUEUE: row.claimed_at - row.enqueued_at}
    if row.seconds is None or not taken_at:
        later = {ON_WORKER: row.finished_at - row.claimed_at, UNTIL_SETTLED: row.at - row.finished_at}
        return _positive(queue | later)
    work = {name: getattr(row.seconds, field) for field, name in AT_WORK.items()}
    stamps = row.stamps
    released_at = stamps.released_at or taken_at
    later = {
        DELIVERY: stamps.joined_at - row.claimed_at - seconds_of(row.seconds),
        GROUP: stamps.closed_at - stamps.joined_at,
        JUDGE: released_at - stamps.closed_at,
        TURN: taken_at - released_at,
        STEP: row.at - taken_at,
    }
    return _positive(queue | work | later)


def rollout_waits(rows: Iterable[EpisodeRow], steps: Iterable[StepRow]) -> RolloutWaits:
    """The waits of the trained rollouts. Rows with more data are not mixed with those of an older journal."""
    taken_at = {request_id: row.began_at for row in steps for request_id in row.request_ids}
    trained = [row for row in rows if row.fate == "trained" and row.claimed_at]
    told = [row for row in trained if row.seconds is not None and taken_at.get(row.request_id)]
    lives = [parts_of(row, taken_at.get(row.request_id, 0.0)) for row in told or trained]
    lengths = [sum(life.values()) for life in lives]
    whole_s = sum(lengths)
    names = lives[0] if lives else ()
    return RolloutWaits(
        num_rollouts=len(lives),
        life_p50_s=percentile(lengths, 0.5),
        life_p90_s=percentile(lengths, 0.9),
        waits={name: _wait([life[name] for life in lives], whole_s) for name in names},
        unknown=() if told or not trained else (OLD,),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that is not exceeded by at least this share of the values; 0 without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0


def _wait(values: Sequence[float], whole_s: float) -> Wait:
    share = sum(values) / whole_s if whole_s else 0.0
    return Wait(p50_s=percentile(values, 0.5), p90_s=percentile(values, 0.9), share=share)


def _positive(parts: dict[str, float]) -> dict[str, float]:
    return {name: max(0.0, seconds) for name, seconds in parts.items()}


def gpu_use(steps: Iterable[StepRow]) -> tuple[RankUse, ...]:
    """The samples of each rank in all of these steps."""
    num_samples: dict[int, Counter[str]] = defaultdict(Counter)
    busy: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for one in (use for step in steps for use in step.gpu_use):
        num_samples[one.rank].update(one.num_samples)
        for doing, share in one.busy.items():
            busy[one.rank][doing] += share
    return tuple(
        RankUse(rank=rank, num_samples=dict(samples), busy=dict(busy[rank]))
        for rank, samples in sorted(num_samples.items())
    )
