"""Injects faults until enough processes were killed or a signal asks for the end, then adds up what was measured.

`progress.json` is written after every recovery, with the last accounts, so that a long campaign that is cut off keeps its
measurements.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis

from infra.chaos.accounts import Accounts, audit
from infra.chaos.faults import Kind, Pace, draw_faults
from infra.chaos.injection import FaultInjector, MeasuredRecovery, NotRecovered
from infra.chaos.signals import EndRequested
from infra.chaos.slo import Leftovers, PartialSlo, Slo, summarize
from infra.chaos.teardown import client, finish_run, leftovers, problems_in_report

AUDIT_EVERY_KILLS = 20
SECOND_LOOK_S = 5.0
"""A request that is neither outstanding nor settled may be between the two; it is looked at again after this time."""


@dataclass(slots=True)
class Campaign:
    """Faults against a running system. `starts_s` says how long each kind of process takes to start undisturbed."""

    injector: FaultInjector
    starts_s: Mapping[Kind, float]
    num_wanted: int  # kills
    file: Path  # progress.json
    began_at: float = field(default_factory=time.monotonic)
    recoveries: list[MeasuredRecovery] = field(default_factory=list[MeasuredRecovery])
    problems: list[str] = field(default_factory=list[str])
    accounts: Accounts = field(default_factory=Accounts)
    audited_kills: int = 0

    @property
    def num_kills(self) -> int:
        return sum(len(one.victims) for one in self.recoveries)

    def inject_faults(self, kinds: Sequence[Kind], *, seed: int, pace: Pace) -> EndRequested | None:
        """Inject all faults. Returns the signal that ended them early; a system that does not recover is a problem."""
        rng = random.Random(seed)
        try:
            while self.num_kills < self.num_wanted:
                before = self.num_kills
                wanted = self.num_wanted - before
                for fault in draw_faults(kinds, wanted, seed=rng.randrange(2**32), pace=pace):
                    recovery = self.injector.inject(fault, rng, self.starts_s)
                    if recovery is not None:
                        self._record(recovery)
                if self.num_kills == before:
                    raise NotRecovered(f"none of {', '.join(kinds)} runs, so there is nothing to kill")
        except NotRecovered as error:
            self.problems.append(str(error))
        except EndRequested as request:
            return request
        return None

    def conclude(self) -> Slo:
        """End the run and add everything up. Raises EndRequested at another signal."""
        minutes = self._minutes
        try:
            finish_run(self.injector)
        except NotRecovered as error:
            self.problems.append(str(error))
        left = leftovers(self.injector)
        system, monitor = self.injector.system, self.injector.monitor
        with client(system) as redis_client:
            self.accounts = audit(redis_client, system.arguments.run_dir, monitor.seen_requests, ended=True)
        self.problems += problems_in_report(system)
        return self._summary(left, minutes)

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self.began_at) / 60

    def _summary(self, left: Leftovers, minutes: float) -> Slo:
        return summarize(
            self.recoveries,
            self.starts_s,
            self.accounts,
            left,
            num_wanted=self.num_wanted,
            problems=self.problems,
            steps=self.injector.monitor.step,
            minutes=minutes,
        )

    def _record(self, recovery: MeasuredRecovery) -> None:
        self.recoveries.append(recovery)
        names = " and ".join(recovery.victims)
        self.injector.say(f"{self.num_kills}: {names} killed, recovered after {recovery.total_s:.1f} s")
        if self.num_kills >= self.audited_kills + AUDIT_EVERY_KILLS:
            self._audit()
        self._write()

    def _audit(self) -> None:
        """Account for the run while it goes on. If Redis is away again, wait for the next recovery."""
        system, seen = self.injector.system, frozenset(self.injector.monitor.seen_requests)
        try:
            with client(system) as redis_client:
                accounts = audit(redis_client, system.arguments.run_dir, seen, ended=False)
                if accounts.lost:
                    self.injector.pause(SECOND_LOOK_S)
                    accounts = audit(redis_client, system.arguments.run_dir, seen, ended=False)
        except redis.RedisError:
            return
        self.accounts, self.audited_kills = accounts, self.num_kills

    def _write(self) -> None:
        fields = msgspec.structs.asdict(self._summary(Leftovers(), self._minutes))
        aside = self.file.with_suffix(".aside")
        aside.write_bytes(msgspec.json.encode(PartialSlo(**fields, audited_kills=self.audited_kills)))
        aside.replace(self.file)
