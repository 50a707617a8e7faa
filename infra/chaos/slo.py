"""What a run of blows amounts to: the numbers that are published, as JSON and as a table."""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.chaos.books import Books
from infra.chaos.recovery import Recovery
from infra.chaos.victims import KINDS, Kind

PAIR = "two at once"


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of process, or of all pairs. Recoveries are from blows of that kind alone, in seconds beyond the start."""

    kills: int  # of a kind, those in pairs included
    blows: int  # that recoveries are of
    start_s: float | None  # in quiet; None where it depends on who it was
    recovery_s_p50: float | None
    recovery_s_max: float | None
    hangs: int


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """A minute after the end, by name."""

    containers: list[str] = []
    networks: list[str] = []
    volumes: list[str] = []
    processes: list[str] = []
    temporary: list[str] = []


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but kills, requests, steps and the times must be zero."""

    kills: int
    wanted: int  # kills
    lost: int
    trained_twice: int
    containers_left: int
    networks_left: int
    volumes_left: int
    processes_left: int
    temporary_left: int
    hangs: int
    recovery_s_p50: float | None
    recovery_s_max: float | None
    by_process: dict[str, Times]
    requests: dict[str, int]  # by what became of them
    steps: int
    minutes: float
    faults: list[str]  # what is wrong, one by one

    @property
    def is_kept(self) -> bool:
        zeros = (self.lost, self.trained_twice, self.containers_left, self.networks_left, self.volumes_left)
        return not any((*zeros, self.processes_left, self.temporary_left, self.hangs, self.faults))


class Progress(Slo, frozen=True, kw_only=True):
    """Of a run that goes on: nothing is known yet of what it leaves."""

    settled_kills: int  # after so many the books were last settled


def amount_to(
    recoveries: Sequence[Recovery],
    starts_s: Mapping[Kind, float],
    books: Books,
    left: Leftovers,
    *,
    wanted: int,
    faults: Sequence[str],
    steps: int,
    minutes: float,
) -> Slo:
    every = [one.beyond_s for one in recoveries]
    return Slo(
        kills=sum(len(one.victims) for one in recoveries),
        wanted=wanted,
        lost=len(books.lost),
        trained_twice=len(books.trained_twice),
        containers_left=len(left.containers),
        networks_left=len(left.networks),
        volumes_left=len(left.volumes),
        processes_left=len(left.processes),
        temporary_left=len(left.temporary),
        hangs=sum(one.hung for one in recoveries),
        recovery_s_p50=_percentile(every, 50),
        recovery_s_max=_percentile(every, 100),
        by_process=dict(_by_process(recoveries, starts_s)),
        requests=books.fates,
        steps=steps,
        minutes=round(minutes, 1),
        faults=[*faults, *books.lost, *books.trained_twice, *_named(left)],
    )


def table(slo: Slo) -> str:
    """For people, and for the README."""
    lines = [
        "| killed | kills | alone | starts in | back after, median | at worst | hangs |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {name} | {times.kills} | {'-' if name == PAIR else times.blows} | {_seconds(times.start_s)} | {_seconds(times.recovery_s_p50)} "
        f"| {_seconds(times.recovery_s_max)} | {times.hangs} |"
        for name, times in slo.by_process.items()
    ]
    fates = ", ".join(f"{count} {fate.replace('_', ' ')}" for fate, count in slo.requests.items())
    lines += [
        "",
        f"{slo.kills} of {slo.wanted} kills in {slo.minutes:.0f} minutes, {slo.steps} steps; requests: {fates}",
        f"{slo.lost} lost, {slo.trained_twice} trained twice, {slo.hangs} hangs; left: {slo.containers_left} containers, "
        f"{slo.networks_left} networks, {slo.volumes_left} volumes, {slo.processes_left} processes, "
        f"{slo.temporary_left} temporary files",
        f"back after {_seconds(slo.recovery_s_p50)} (median), {_seconds(slo.recovery_s_max)} (worst), beyond a process's own start",
        *slo.faults,
    ]
    return "\n".join(lines)


def _by_process(
    recoveries: Sequence[Recovery], starts_s: Mapping[Kind, float]
) -> Iterable[tuple[str, Times]]:
    for kind in KINDS:
        num_kills = sum(one.victims.count(kind) for one in recoveries)
        if num_kills:
            alone = [one for one in recoveries if one.victims == (kind,)]
            yield kind, _times(alone, num_kills, round(starts_s[kind], 1))
    pairs = [one for one in recoveries if len(one.victims) > 1]
    if pairs:
        yield PAIR, _times(pairs, sum(len(one.victims) for one in pairs), None)


def _times(recoveries: Sequence[Recovery], num_kills: int, start_s: float | None) -> Times:
    beyond = [one.beyond_s for one in recoveries]
    return Times(
        kills=num_kills,
        blows=len(recoveries),
        start_s=start_s,
        recovery_s_p50=_percentile(beyond, 50),
        recovery_s_max=_percentile(beyond, 100),
        hangs=sum(one.hung for one in recoveries),
    )


def _percentile(values: Sequence[float], percent: int) -> float | None:
    """The smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 1) if ordered else None


def _named(left: Leftovers) -> list[str]:
    return [f"left: {kind}: {name}" for kind, names in msgspec.structs.asdict(left).items() for name in names]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
