"""The journal of a run as the pages read it, and rollouts as the pages know them without their bodies. Also the numbers of a run by step,
with its episodes, the states of rollouts and the use of the fleet over time; its evaluations, and marks for other events.
"""

import bisect
import contextlib
import itertools
import math
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import structs

from pipeline import intervals
from pipeline.journal.reading import RowFile, discarded
from pipeline.journal.rows import (
    FILES,
    AlarmRow,
    DeliveryRow,
    EndRow,
    EpisodeFacts,
    EpisodeRow,
    EvaluationRow,
    Fate,
    FleetRow,
    PublicationRow,
    QuarantineRow,
    Row,
    SkippedBatchRow,
    StalenessRow,
    StartRow,
    StepRow,
)
from pipeline.trajectory import TrajectoryHead

JsonRow = dict[str, Any]

OPEN = "open"
T = TypeVar("T")
_NOT_NUMBERS = ("request_ids", "baseline_ids", "judging", "distillation", "signal", "gpu_use")


class RolloutRow(EpisodeFacts, frozen=False, kw_only=True, gc=False):  # pyright: ignore[reportGeneralTypeIssues]
    """The facts about a rollout from journal and store. Unlike other rows, it is completed as more becomes known.

    A row of the episodes is decoded into one, and the table shows the same object: there may be hundreds of thousands.
    """

    fate: Fate | Literal[""] = ""  # "": the journal does not have it yet, and `at` is 0
    lag: int | None = None  # lag in weight versions; None: it was not trained
    step: int | None = None  # the step that trained it
    is_dead: bool = False
    is_stored: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "finished_at", self.finished_at or self.at)
        for name in _REPEATED:
            setattr(self, name, sys.intern(getattr(self, name)))
        msgspec.structs.force_setattr(self, "engines", tuple(map(sys.intern, self.engines)))


_REPEATED = ("task_id", "group_id", "worker", "purpose", "outcome", "fate", "evaluation", "control", "patch")
"""Texts that many rows share."""

COLUMNS = RolloutRow.__struct_fields__
_OF_HEADS = tuple(name for name in COLUMNS if name in set(TrajectoryHead.__struct_fields__))


def row_of_head(head: TrajectoryHead) -> RolloutRow:
    """The row of a rollout that the journal does not have."""
    told: dict[str, Any] = {name: getattr(head, name) for name in _OF_HEADS}
    return RolloutRow(**told)


class RunJournal:
    """The journal of one run, as far as the pages show it. One thread at a time may use it."""

    def __init__(self, directory: Path) -> None:
        def path(kind: type[Row]) -> Path:
            return directory / FILES[kind]

        self.steps = RowFile(path(StepRow), StepRow)
        self.evaluations = RowFile(path(EvaluationRow), EvaluationRow)
        self.publications = RowFile(path(PublicationRow), PublicationRow)
        self.deliveries = RowFile(path(DeliveryRow), DeliveryRow)
        self.staleness = RowFile(path(StalenessRow), StalenessRow)
        self.quarantines = RowFile(path(QuarantineRow), QuarantineRow)
        self.skipped_batches = RowFile(path(SkippedBatchRow), SkippedBatchRow)
        self.endings = RowFile(path(EndRow), EndRow)
        self.alarms = RowFile(path(AlarmRow), AlarmRow)
        self.starts = RowFile(path(StartRow), StartRow)
        self.fleet = RowFile(path(FleetRow), FleetRow)
        self.episodes = RowFile(path(EpisodeRow), RolloutRow)
        # The episodes are by far the longest, so they come last.
        self._files: list[RowFile[Any]] = [one for one in vars(self).values() if one is not self.episodes]
        self._files.append(self.episodes)

    def read(self, max_bytes: int) -> int:
        """Reads the new part of all files, the episodes last, and stops after `max_bytes`. Returns the number of bytes read."""
        num_bytes = 0
        for file in self._files:
            num_bytes += file.read(max_bytes - num_bytes)
        return num_bytes

    @property
    def state(self) -> object:
        """A value that differs after each change of what was read."""
        return [(file.generation, len(file.rows)) for file in self._files]

    @property
    def progress(self) -> tuple[int, int]:
        """The number of bytes read, and the total."""
        found = [file.progress for file in self._files]
        return sum(read for read, _ in found), sum(size for _, size in found)


_FILE_NAMES = [(Path(name).stem, name, discarded(Path(name)).name) for name in FILES.values()]


def sizes(directory: Path) -> dict[str, tuple[int, int]]:
    """The size of each file in a journal and of its discarded part, by the file's stem: every appended or discarded row changes one of
    them.
    """
    found: dict[str, int] = {}
    # One listing instead of a question for each file: of hundreds of runs this is asked each second.
    with contextlib.suppress(OSError), os.scandir(directory) as files:
        found = {file.name: file.stat().st_size for file in files}
    there = (names for names in _FILE_NAMES if not found.keys().isdisjoint(names))
    return {stem: (found.get(name, 0), found.get(rest, 0)) for stem, name, rest in there}


def series(journal: RunJournal, after: int = -1) -> JsonRow:
    """The data for the curves of a run; the part of it that belongs to later steps than `after`."""
    found: JsonRow = {
        "steps": list(_steps(journal, after)),
        "evaluations": [structs.replace(row, rewards={}) for row in journal.evaluations.rows],
        "publications": journal.publications.rows[:],
        "deliveries": journal.deliveries.rows[:],
        "marks": marks(journal),
    }
    return {name: [row for row in rows if _step(row) > after] for name, rows in found.items()}


def marks(journal: RunJournal) -> list[JsonRow]:
    """The events of the run, oldest first. A row without a step belongs to the last one before it."""
    found = sorted(_marks(journal), key=lambda mark: mark["at"])
    times = [row.at for row in journal.steps.rows]
    for mark in found:
        if mark["step"] is None:
            num_before = bisect.bisect_right(times, mark["at"])
            mark["step"] = journal.steps.rows[num_before - 1].step if num_before else 0
    return found


def _steps(journal: RunJournal, after: int) -> Iterator[JsonRow]:
    """The numbers of each step after `after`, with what the rest of the journal contains about it."""
    rows = journal.steps.rows
    first = bisect.bisect_right(rows, after, key=lambda row: row.step)
    for row, facts in zip(rows[first:], facts_of_steps(journal, first), strict=True):
        yield step_numbers(row) | facts


def step_numbers(row: StepRow) -> JsonRow:
    """The numbers of a step's row, those of its parts under names of their own."""
    numbers = {name: getattr(row, name) for name in StepRow.__struct_fields__ if name not in _NOT_NUMBERS}
    judging = structs.asdict(row.judging) if row.judging else {}
    named = {f"judging_{name}": value for name, value in judging.items()}
    taught = structs.asdict(row.distillation) if row.distillation else {}
    named |= {f"distill_{name}": value for name, value in taught.items()}
    return numbers | named | row.signal_numbers


def _marks(journal: RunJournal) -> Iterator[JsonRow]:
    for row in journal.publications.rows:
        yield _mark(row, "published", f"weight version {row.version}")
    for row in journal.starts.rows[1:]:
        yield _mark(row, "resumed", f"a new process goes on from step {row.step}")
    yield from _engines_out(journal.deliveries.rows)
    for row in journal.quarantines.rows:
        yield _mark(row, "quarantined", f"{row.task_id}: {row.reason}")
    for row in journal.staleness.rows:
        text = f"admission may run {row.ahead_versions} versions ahead: {row.reason}"
        yield _mark(row, "staleness", text)
    for row in journal.skipped_batches.rows:
        yield _mark(row, "skipped batch", f"the {row.what} was not finite")
    for row in journal.endings.rows:
        yield _mark(row, "ended", row.detail or row.reason)
    for row in journal.alarms.rows:
        text = f"{row.kind}: {row.text}"
        yield _mark(row, "alarm", f"over: {text}" if row.is_over else text)


def _engines_out(deliveries: Sequence[DeliveryRow]) -> Iterator[JsonRow]:
    """Yields a mark whenever further engines are taken out of routing."""
    before: set[str] = set()
    for row in deliveries:
        out = set(row.quarantined)
        if out - before:
            yield _mark(row, "outage", f"out of routing: {', '.join(sorted(out - before))}")
        before = out


def _mark(row: Any, kind: str, text: str) -> JsonRow:
    return {"at": row.at, "step": getattr(row, "step", None), "kind": kind, "text": text}


def _step(row: JsonRow | EvaluationRow | PublicationRow | DeliveryRow) -> int:
    return int((row.get("step") if isinstance(row, dict) else row.step) or 0)


@dataclass(slots=True)
class _StepEpisodes:
    """The training episodes of a step, and those that were settled in another way since the step before."""

    outcomes: Counter[str] = field(default_factory=Counter[str])
    fates: Counter[str] = field(default_factory=Counter[str])
    rewards: dict[str, list[float]] = field(default_factory=lambda: defaultdict[str, list[float]](list))
    num_played: int = 0
    num_turns: int = 0
    num_tokens: int = 0

    def add(self, episode: RolloutRow) -> None:
        self.outcomes[episode.outcome or "withdrawn"] += 1
        self.fates[episode.fate] += 1
        if episode.reward is not None:
            self.rewards[episode.group_id].append(episode.reward)
        if episode.num_turns:
            self.num_played += 1
            self.num_turns += episode.num_turns
            self.num_tokens += episode.sampled_tokens

    def facts(self) -> JsonRow:
        # One group says nothing about others, so its interval would be everything.
        rewards = intervals.mean(self.rewards.values()) if len(self.rewards) > 1 else None
        return {
            "outcomes": self.outcomes,
            "fates": self.fates,
            "reward_low": rewards and rewards.low,
            "reward_high": rewards and rewards.high,
            "mean_turns": self.num_turns / self.num_played if self.num_played else None,
            "mean_sampled_tokens": self.num_tokens / self.num_played if self.num_played else None,
        }


def facts_of_steps(journal: RunJournal, first: int = 0) -> list[JsonRow]:
    """The facts of the rows of `steps.jsonl` from the row `first` on, in their order."""
    times = [row.at for row in journal.steps.rows[first:]]
    since = journal.steps.rows[first - 1].at if first else -math.inf
    trained_by = {
        request_id: place - first
        for place, row in enumerate(journal.steps.rows)
        for request_id in row.request_ids
    }
    steps = [_StepEpisodes() for _ in times]
    # What was settled before the first of these steps was nowhere during them.
    episodes = [
        one for one in journal.episodes.rows if one.at > since or trained_by.get(one.request_id, -1) >= 0
    ]
    for episode in episodes:
        # The journal settles the fates of the trained requests after it has written the step's row.
        place = trained_by.get(episode.request_id, bisect.bisect_left(times, episode.at))
        if episode.purpose == "train" and 0 <= place < len(steps):
            steps[place].add(episode)
    places = places_of_rollouts(episodes, times, since)
    fleet = _fleet([one for one in journal.fleet.rows if one.at > since], times)
    return [
        step.facts() | {"places": where} | used
        for step, where, used in zip(steps, places, fleet, strict=True)
    ]


def places_of_rollouts(
    episodes: Iterable[RolloutRow], times: Sequence[float], since: float = -math.inf
) -> list[dict[str, float]]:
    """The average numbers of rollouts that were queued, played, or waiting for a step between each time and the one before; before the
    first time, since `since` or since the first was enqueued.

    Attempts that failed count as queued. Rollouts that are not settled yet are missing, so the newest steps show too few.
    """
    stamps = [_stamps(episode) for episode in episodes if episode.enqueued_at]
    if not stamps or not times:
        return [{} for _ in times]
    base = min(one[0] for one in stamps)
    edges = [since if math.isfinite(since) else min(base, times[0]), *times]
    totals = [_time_since([one[place] - base for one in stamps], edges, base) for place in range(4)]
    names = ("queued", "played", "waiting for a step")
    found: list[dict[str, float]] = []
    for place, (start, end) in enumerate(itertools.pairwise(edges)):
        spent = [totals[state][place] - totals[state + 1][place] for state in range(3)]
        found.append(
            {name: one / (end - start) for name, one in zip(names, spent, strict=True)} if end > start else {}
        )
    return found


def _stamps(episode: RolloutRow) -> tuple[float, float, float, float]:
    """Returns when it was enqueued, claimed, finished and settled, in Unix seconds. A missing time is replaced by that of settling."""
    claimed_at = episode.claimed_at or episode.at
    return episode.enqueued_at, claimed_at, max(claimed_at, episode.finished_at or episode.at), episode.at


def _time_since(moments: list[float], edges: Sequence[float], base: float) -> list[float]:
    """The seconds since these moments between each edge and the next, summed over all moments that have passed."""
    moments.sort()
    sums = [0.0, *itertools.accumulate(moments)]

    def until(time: float) -> float:
        num_passed = bisect.bisect_left(moments, time)
        return num_passed * time - sums[num_passed]

    return [end - start for start, end in itertools.pairwise([until(edge - base) for edge in edges])]


def _fleet(samples: Sequence[FleetRow], times: Sequence[float]) -> Iterator[JsonRow]:
    """The use of slots, and the share of the time for which admission was closed by each reason; empty without samples."""
    of_step: dict[int, list[FleetRow]] = defaultdict(list)
    for sample in samples:
        of_step[bisect.bisect_left(times, sample.at)].append(sample)
    for place in range(len(times)):
        yield _fleet_of_step(of_step.get(place, []))


def _fleet_of_step(samples: Sequence[FleetRow]) -> JsonRow:
    total_s = sum(one.span_s for one in samples)
    if not total_s:
        return {"slots": {}, "admission": {}}

    def mean(number_of: Callable[[FleetRow], int]) -> float:
        return sum(one.span_s * number_of(one) for one in samples) / total_s

    admission: dict[str, float] = defaultdict(float)
    for one in samples:
        admission[one.closed_by or OPEN] += one.span_s / total_s
    running, paused = mean(lambda one: one.running), mean(lambda one: one.paused)
    slots = {
        "running": running,
        "paused": paused,
        "idle": max(0.0, mean(lambda one: one.slots) - running - paused),
    }
    return {"slots": slots, "admission": dict(admission)}
