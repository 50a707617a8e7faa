"""The result of a campaign: the numbers that are published, as JSON and as a table."""

import math
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from infra.chaos.accounts import Accounts
from infra.chaos.faults import KINDS, Kind
from infra.chaos.injection import MeasuredRecovery

PAIR = "two at once"


class RecoveryTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Of one kind of process, or of all pairs. Recoveries are from faults that killed that kind alone, in seconds beyond its
    start.
    """

    kills: int  # of this kind, those in pairs included
    faults: int  # that the recoveries are from
    start_s: float | None  # undisturbed; None for pairs, where it differs
    recovery_s_p50: float | None
    recovery_s_max: float | None
    hangs: int


class Leftovers(msgspec.Struct, frozen=True, kw_only=True):
    """What exists a minute after the end, by name."""

    containers: list[str] = []
    networks: list[str] = []
    volumes: list[str] = []
    processes: list[str] = []
    temporary: list[str] = []


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but kills, requests, steps and times must be zero."""

    kills: int
    wanted: int  # kills
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
    requests: dict[str, int]  # by fate
    judge_requests: dict[str, int]  # by fate
    steps: int
    minutes: float
    problems: list[str]  # a line each

    @property
    def is_kept(self) -> bool:
        counted = (self.lost, self.trained_twice, self.judged_twice, self.hangs)
        left = (self.containers_left, self.networks_left, self.volumes_left, self.processes_left)
        return not any((*counted, *left, self.temporary_left, self.problems))


class PartialSlo(Slo, frozen=True, kw_only=True):
    """While the campaign goes on: what it leaves behind is not known yet."""

    audited_kills: int  # how many there had been at the last audit


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
    """As Markdown, for people and for the README."""
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
    """The smallest value that `percent` percent of all do not exceed."""
    ordered = sorted(values)
    return round(ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)], 1) if ordered else None


def _named(left: Leftovers) -> list[str]:
    return [f"left: {kind}: {name}" for kind, names in msgspec.structs.asdict(left).items() for name in names]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} s"
