"""What the rest of the journal says of each step: its episodes, where rollouts were meanwhile, and how the fleet was used."""

import bisect
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from infra.web.journal_files import JsonRow, RunJournal
from infra.web.rollout_row import RolloutRow

OPEN = "open"


@dataclass(slots=True)
class _StepEpisodes:
    """The training episodes that a step trained, or that were settled otherwise since the step before."""

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
        return {
            "outcomes": self.outcomes,
            "fates": self.fates,
            "reward_error": error_of_mean(list(self.rewards.values())),
            "mean_turns": self.num_turns / self.num_played if self.num_played else None,
            "mean_sampled_tokens": self.num_tokens / self.num_played if self.num_played else None,
        }


def facts_of_steps(journal: RunJournal) -> list[JsonRow]:
    """One for each row of `steps.jsonl`, in their order."""
    times = [float(row.get("at") or 0.0) for row in journal.steps.rows]
    trained_by = {
        request_id: place
        for place, row in enumerate(journal.steps.rows)
        for request_id in row.get("request_ids", ())
    }
    steps = [_StepEpisodes() for _ in times]
    for episode in journal.episodes.rows:
        # What a step trained is settled after its row.
        place = trained_by.get(episode.request_id, bisect.bisect_left(times, episode.at))
        if episode.purpose == "train" and place < len(steps):
            steps[place].add(episode)
    places = places_of_rollouts(journal.episodes.rows, times)
    fleet = _fleet(journal.fleet.rows, times)
    return [
        step.facts() | {"places": where} | used
        for step, where, used in zip(steps, places, fleet, strict=True)
    ]


def error_of_mean(groups: Sequence[Sequence[float]]) -> float | None:
    """The standard error of the mean of all values. None: fewer than two groups.

    Members of a group are not independent, so groups are what varies. Where few groups happen to be alike, the values themselves say more.
    """
    num_values = sum(map(len, groups))
    if len(groups) < 2:
        return None
    mean = sum(map(sum, groups)) / num_values
    of_groups = sum((sum(group) - len(group) * mean) ** 2 for group in groups)
    of_values = sum((value - mean) ** 2 for group in groups for value in group)
    variance = max(_unbiased(of_groups, len(groups)), _unbiased(of_values, num_values))
    return math.sqrt(variance) / num_values


def _unbiased(squares: float, count: int) -> float:
    return squares * count / (count - 1)


def places_of_rollouts(episodes: Iterable[RolloutRow], times: Sequence[float]) -> list[dict[str, float]]:
    """How many rollouts were queued, played, or waiting for a step, on average between a time and the one before.

    Attempts that failed count as queued. Rollouts that are not settled yet are missing, so the newest steps show too few.
    """
    stamps = [_stamps(episode) for episode in episodes if episode.enqueued_at]
    if not stamps or not times:
        return [{} for _ in times]
    base = min(one[0] for one in stamps)
    totals = [_time_since([one[place] - base for one in stamps], times, base) for place in range(4)]
    names = ("queued", "played", "waiting for a step")
    starts = [min(base, times[0]), *times]
    found: list[dict[str, float]] = []
    for place, (start, end) in enumerate(itertools.pairwise(starts)):
        spent = [totals[state][place] - totals[state + 1][place] for state in range(3)]
        found.append(
            {name: one / (end - start) for name, one in zip(names, spent, strict=True)} if end > start else {}
        )
    return found


def _stamps(episode: RolloutRow) -> tuple[float, float, float, float]:
    """When it was enqueued, claimed, finished and settled; what never happened, happened when it was settled."""
    claimed_at = episode.claimed_at or episode.at
    return episode.enqueued_at, claimed_at, max(claimed_at, episode.finished_at or episode.at), episode.at


def _time_since(moments: list[float], times: Sequence[float], base: float) -> list[float]:
    """Between each time and the one before: the seconds since these moments, summed over all that have passed."""
    moments.sort()
    sums = [0.0, *itertools.accumulate(moments)]

    def until(time: float) -> float:
        num_passed = bisect.bisect_left(moments, time)
        return num_passed * time - sums[num_passed]

    ends = [until(time - base) for time in times]
    return [end - start for start, end in itertools.pairwise([0.0, *ends])]


def _fleet(samples: Sequence[JsonRow], times: Sequence[float]) -> Iterator[JsonRow]:
    """The use of slots, and the share of the time for which admission was closed by each reason; empty without samples."""
    of_step: dict[int, list[JsonRow]] = defaultdict(list)
    for sample in samples:
        of_step[bisect.bisect_left(times, float(sample.get("at") or 0.0))].append(sample)
    for place in range(len(times)):
        yield _fleet_of_step(of_step.get(place, []))


def _fleet_of_step(samples: Sequence[JsonRow]) -> JsonRow:
    spans = [float(one.get("span_s") or 0.0) for one in samples]
    total_s = sum(spans)
    if not total_s:
        return {"slots": {}, "admission": {}}

    def mean(name: str) -> float:
        return (
            sum(span * float(one.get(name) or 0) for span, one in zip(spans, samples, strict=True)) / total_s
        )

    admission: dict[str, float] = defaultdict(float)
    for span, one in zip(spans, samples, strict=True):
        admission[str(one.get("closed_by") or OPEN)] += span / total_s
    running, paused = mean("running"), mean("paused")
    slots = {"running": running, "paused": paused, "idle": max(0.0, mean("slots") - running - paused)}
    return {"slots": slots, "admission": dict(admission)}
