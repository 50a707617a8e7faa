"""The result of a campaign: the outcome of every request, and the numbers that are published, as JSON and as a table.

The accounts are made of three independent sources: a request's events in Redis, the run's journal, and the stream.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import redis

from infra.chaos.faults import KINDS, Kind
from infra.chaos.injection import MeasuredRecovery
from infra.chaos.system import RUN_ID
from pipeline import keys
from pipeline.deadletters import DeadLetter
from pipeline.journal.reading import journal_of, read
from pipeline.journal.rows import EpisodeRow, JudgementRow, StepRow
from pipeline.judge import judge_request_id
from pipeline.kinds import JUDGE, ROLLOUT, AnyKind
from pipeline.message import decode
from pipeline.request_store import Event
from pipeline.stream import GROUP

WITHDRAWN = "withdrawn"


class Accounts(msgspec.Struct, frozen=True):
    """`lost`, `trained_twice` and `judged_twice` contain one line for each such request, with the reason."""

    fates: dict[str, int] = {}
    lost: list[str] = []
    trained_twice: list[str] = []
    judge_fates: dict[str, int] = {}  # number of judge requests by fate
    judged_twice: list[str] = []


def audit(client: redis.Redis, run_dir: Path, seen: Iterable[str], *, ended: bool) -> Accounts:
    """The accounts of a run; `seen` are ids of requests that were observed while it ran.

    While the run continues, outstanding requests are not lost. The journal is read last, because a request is journalled
    before it stops being outstanding.
    """
    judged = _audit_judgements(client, run_dir, ended=ended)
    lives = _events_by_request(client, ROLLOUT)
    outstanding = _outstanding(client, ROLLOUT)
    dead = _dead_letters(client, ROLLOUT)
    episodes = list(read(journal_of(run_dir), EpisodeRow))
    steps = list(read(journal_of(run_dir), StepRow))
    trained = Counter(request_id for step in steps for request_id in step.request_ids)
    fates: dict[str, str] = {row.request_id: row.fate for row in episodes}
    fates |= dict.fromkeys(trained, "trained")
    known = sorted({*lives, *seen, *fates}.difference(() if ended else outstanding))
    lost = [*_unaccounted(known, fates, lives, dead), *judged.lost]
    if ended:
        lost += [*_left_by_ended_run(client, outstanding, ROLLOUT), *judged.without_row(trained)]
    return Accounts(
        fates=dict(Counter(fates.values()).most_common()),
        lost=lost,
        trained_twice=[*_trained_again(trained, steps, lives), *_members_trained_twice(episodes, trained)],
        judge_fates=dict(Counter(judged.fates.values()).most_common()),
        judged_twice=judged.twice,
    )


@dataclass(frozen=True, slots=True)
class _JudgeAccounts:
    """The outcome of each judge request, by its id."""

    fates: dict[str, str]
    lost: list[str]
    twice: list[str]

    def without_row(self, trained: Iterable[str]) -> Iterator[str]:
        """Rollouts that were trained although nothing is known of a request to judge them."""
        if self.fates:
            for rollout_id in sorted(trained):
                if judge_request_id(rollout_id) not in self.fates:
                    yield f"{rollout_id}: trained, and nothing tells of a request to judge it"


def _audit_judgements(client: redis.Redis, run_dir: Path, *, ended: bool) -> _JudgeAccounts:
    lives = _events_by_request(client, JUDGE)
    outstanding = _outstanding(client, JUDGE)
    dead = _dead_letters(client, JUDGE)
    rows = list(read(journal_of(run_dir), JudgementRow))
    fates: dict[str, str] = {judge_request_id(row.rollout_id): row.fate for row in rows}
    known = sorted({*lives, *fates}.difference(() if ended else outstanding))
    lost = list(_unaccounted(known, fates, lives, dead))
    if ended:
        lost += _left_by_ended_run(client, outstanding, JUDGE)
    twice = [
        f"{judge_request_id(rollout_id)}: {times} rows in the journal"
        for rollout_id, times in Counter(row.rollout_id for row in rows).items()
        if times > 1
    ]
    return _JudgeAccounts(fates, lost, [*twice, *_published_again(lives)])


def _unaccounted(
    known: Iterable[str],
    fates: dict[str, str],
    lives: dict[str, list[Event]],
    dead: dict[str, DeadLetter],
) -> Iterator[str]:
    """Yields requests whose fate no source tells. Adds to `fates` what Redis knows."""
    for request_id in known:
        letter = dead.get(request_id)
        if letter is not None and letter.failures:
            fates[request_id] = "dead"
        elif lives.get(request_id) and lives[request_id][-1].what == WITHDRAWN:
            fates.setdefault(request_id, WITHDRAWN)
        if request_id not in fates:
            last = [event.what for event in lives.get(request_id, [])][-3:]
            yield f"{request_id}: not in the journal, no dead letter; its last events: {', '.join(last) or 'none'}"


def _left_by_ended_run(client: redis.Redis, outstanding: list[str], kind: AnyKind) -> Iterator[str]:
    """Yields what an ended run must not leave behind: outstanding requests, and results that were not acknowledged."""
    for request_id in outstanding:
        yield f"{request_id}: still outstanding"
    stream = keys.stream(RUN_ID, kind)
    if not client.exists(stream):
        return
    pending = cast(dict[str, int], client.xpending(stream, GROUP))["pending"]
    if pending:
        yield f"{pending} {'trajectories' if kind is ROLLOUT else 'judgements'} are not acknowledged"


def _published_again(lives: dict[str, list[Event]]) -> Iterator[str]:
    for request_id, events in lives.items():
        num_published = sum(event.what == "published" for event in events)
        if num_published > 1:
            yield f"{request_id}: published {num_published} times"


def _trained_again(
    trained: Counter[str], steps: list[StepRow], lives: dict[str, list[Event]]
) -> Iterator[str]:
    """Yields requests that were trained in two steps, in a step number that was made twice, or after a checkpoint had settled them."""
    for request_id, times in trained.items():
        if times > 1:
            yield f"{request_id}: in {times} steps"
    for number, times in Counter(step.step for step in steps).items():
        if times > 1:
            yield f"step {number} was made {times} times"
    for step in steps:
        for request_id in step.request_ids:
            events = lives.get(request_id, [])
            acknowledged = [event.at for event in events if event.what == "acknowledged"]
            if acknowledged and acknowledged[0] < step.at:
                yield f"{request_id}: step {step.step} trained it after a checkpoint had settled it"
    yield from _published_again({name: lives.get(name, []) for name in trained})


def _members_trained_twice(episodes: list[EpisodeRow], trained: Counter[str]) -> Iterator[str]:
    """Yields members of groups that were enqueued again under another id although the first request was trained."""
    rows = {row.request_id: row for row in episodes if row.request_id in trained}
    places = Counter((row.cursor, row.member) for row in rows.values())
    for (cursor, member), times in places.items():
        if times > 1:
            yield f"member {member} of group {cursor}: {times} requests for it were trained"


def _outstanding(client: redis.Redis, kind: AnyKind) -> list[str]:
    found = cast(list[bytes], client.zrange(keys.open_requests(RUN_ID, kind), 0, -1))
    return [request_id.decode() for request_id in found]


def _dead_letters(client: redis.Redis, kind: AnyKind) -> dict[str, DeadLetter]:
    rows = cast(dict[bytes, bytes], client.hgetall(keys.dead(RUN_ID, kind)))
    return {name.decode(): decode(row, DeadLetter) for name, row in rows.items()}


def _events_by_request(client: redis.Redis, kind: AnyKind) -> dict[str, list[Event]]:
    """The events of every request that Redis knows of, oldest first."""
    found = list(client.scan_iter(match=keys.events("*", kind), count=1000))
    with client.pipeline(transaction=False) as pipe:
        for key in found:
            pipe.lrange(key, 0, -1)
        rows: list[Any] = pipe.execute()
    names = [key.decode().removeprefix(keys.events("", kind)) for key in found]
    return {name: [decode(row, Event) for row in life] for name, life in zip(names, rows, strict=True)}


PAIR = "two at once"


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The recoveries of one kind of process, or of all pairs. They are counted from faults that killed that kind alone, in seconds beyond
    its start.
    """

    kills: int  # number of kills of this kind, including kills in pairs
    faults: int  # number of faults from which the recoveries were measured
    start_s: float | None  # time of an undisturbed start; None for pairs, whose starts differ
    recovery_s_p50: float | None
    recovery_s_max: float | None
    hangs: int


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """The names of containers, networks and other things that still exist a minute after the end."""

    containers: list[str] = []
    networks: list[str] = []
    volumes: list[str] = []
    processes: list[str] = []
    temporary: list[str] = []


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but kills, requests, steps and times must be zero."""

    kills: int
    wanted: int  # number of kills that the campaign was to make
    lost: int
    trained_twice: int
    judged_twice: int
    containers_left: int
    networks_left: int
    volumes_left: int
    processes_left: int
    temporary_left: int
    hangs: int
    recovery_s_p50: float | None
    recovery_s_max: float | None
    by_process: dict[str, RecoveryTimes]
    requests: dict[str, int]  # number of requests by fate
    judge_requests: dict[str, int]  # number of judge requests by fate
    steps: int
    minutes: float
    problems: list[str]  # one line each

    @property
    def is_kept(self) -> bool:
        counted = (self.lost, self.trained_twice, self.judged_twice, self.hangs)
        left = (self.containers_left, self.networks_left, self.volumes_left, self.processes_left)
        return not any((*counted, *left, self.temporary_left, self.problems))


class PartialSlo(Slo, frozen=True, kw_only=True):
    """The result while the campaign continues, when its leftovers are not known yet."""

    audited_kills: int  # number of kills made by the time of the last audit


def summarize(
    recoveries: Sequence[MeasuredRecovery],
    starts_s: Mapping[Kind, float],
    accounts: Accounts,
    left: Leftovers,
    *,
    num_wanted: int,
    problems: Sequence[str],
    steps: int,
    minutes: float,
) -> Slo:
    every = [one.beyond_s for one in recoveries]
    return Slo(
        kills=sum(len(one.victims) for one in recoveries),
        wanted=num_wanted,
        lost=len(accounts.lost),
        trained_twice=len(accounts.trained_twice),
        judged_twice=len(accounts.judged_twice),
        containers_left=len(left.containers),
        networks_left=len(left.networks),
        volumes_left=len(left.volumes),
        processes_left=len(left.processes),
        temporary_left=len(left.temporary),
        hangs=sum(one.hung for one in recoveries),
        recovery_s_p50=_percentile(every, 50),
        recovery_s_max=_percentile(every, 100),
        by_process=dict(_by_process(recoveries, starts_s)),
        requests=accounts.fates,
        judge_requests=accounts.judge_fates,
        steps=steps,
        minutes=round(minutes, 1),
        problems=[*problems, *accounts.lost, *accounts.trained_twice, *accounts.judged_twice, *_named(left)],
    )


def table(slo: Slo) -> str:
    """The result as Markdown, for people and for the README."""
    lines = [
        "| killed | kills | alone | starts in | recovery, median | worst | hangs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [_row(name, times) for name, times in slo.by_process.items()]
    requests, judge_requests = _counted(slo.requests), _counted(slo.judge_requests)
    lines += [
        "",
        f"{slo.kills} of {slo.wanted} kills in {slo.minutes:.0f} minutes, {slo.steps} steps; requests: {requests}",
        *([f"judge requests: {judge_requests}"] if judge_requests else []),
        f"{slo.lost} lost, {slo.trained_twice} trained twice, {slo.judged_twice} judged twice, {slo.hangs} hangs; "
        f"left: {slo.containers_left} containers, "
        f"{slo.networks_left} networks, {slo.volumes_left} volumes, {slo.processes_left} processes, "
        f"{slo.temporary_left} temporary files",
        f"recovery: {_seconds(slo.recovery_s_p50)} (median), {_seconds(slo.recovery_s_max)} (worst), "
        "beyond a process's own start",
        *slo.problems,
    ]
    return "\n".join(lines)


def _counted(fates: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in fates.items())


def _row(name: str, times: RecoveryTimes) -> str:
    alone = "-" if name == PAIR else str(times.faults)
    recovery = f"{_seconds(times.recovery_s_p50)} | {_seconds(times.recovery_s_max)}"
    return f"| {name} | {times.kills} | {alone} | {_seconds(times.start_s)} | {recovery} | {times.hangs} |"


def _by_process(
    recoveries: Sequence[MeasuredRecovery], starts_s: Mapping[Kind, float]
) -> Iterable[tuple[str, RecoveryTimes]]:
    for kind in KINDS:
        num_kills = sum(one.victims.count(kind) for one in recoveries)
        if num_kills:
            alone = [one for one in recoveries if one.victims == (kind,)]
            yield kind, _times(alone, num_kills, round(starts_s[kind], 1))
    pairs = [one for one in recoveries if len(one.victims) > 1]
    if pairs:
        yield PAIR, _times(pairs, sum(len(one.victims) for one in pairs), None)


def _times(recoveries: Sequence[MeasuredRecovery], num_kills: int, start_s: float | None) -> RecoveryTimes:
    beyond = [one.beyond_s for one in recoveries]
    return RecoveryTimes(
        kills=num_kills,
        faults=len(recoveries),
        start_s=start_s,
        recovery_s_p50=_percentile(beyond, 50),
        recovery_s_max=_percentile(beyond, 100),
        hangs=sum(one.hung for one in recoveries),
    )


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that is not exceeded by `percent` percent of all values."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 1) if ordered else None


def _named(left: Leftovers) -> list[str]:
    return [f"left: {kind}: {name}" for kind, names in msgspec.structs.asdict(left).items() for name in names]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
