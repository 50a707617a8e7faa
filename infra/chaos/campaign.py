"""Injects faults until enough processes were killed or a signal asks for the end, then adds up what was measured.

`progress.json` is written after every recovery, with the last accounts, so that a long campaign that is cut off keeps its
measurements.

At the end the trainer makes its last steps, and what is left is counted.
"""

import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis

from infra.chaos.accounts import Accounts, Leftovers, PartialSlo, Slo, audit, summarize
from infra.chaos.faults import Kind, Pace, draw_faults
from infra.chaos.injection import EndRequested, FaultInjector, MeasuredRecovery, NotRecovered
from infra.chaos.system import RUN_ID, System

AUDIT_EVERY_KILLS = 20
SECOND_LOOK_S = 5.0
"""A request that is neither outstanding nor settled may be in transition; it is looked at again after this time."""


@dataclass(slots=True)
class Campaign:
    """A series of faults that are injected into a running system.

    `starts_s` is the time that each kind of process takes to start undisturbed.
    """

    injector: FaultInjector
    starts_s: Mapping[Kind, float]
    num_wanted: int  # number of kills to make
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
        """Account for the run while it continues. If Redis is away again, wait for the next recovery."""
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


STOP_S = 90.0
LAST_STEPS = 1
LAST_STEPS_S = 300.0
CLEAN_WITHIN_S = 60.0


def finish_run(injector: FaultInjector) -> None:
    """Let the run end in order, even if its trainer has just been killed. Raises NotRecovered or EndRequested."""
    system, trainers = injector.system, injector.system.trainers
    system.limit_steps(injector.monitor.step + LAST_STEPS)
    trainer = system.child("trainer")
    if trainer.alive:
        trainer.process.terminate()
        if not injector.wait(lambda: not trainer.alive, STOP_S):
            raise NotRecovered(f"the trainer does not stop within {STOP_S:.0f} s")
    if trainers.exit_status("trainer") is not None:
        trainers.start(trainers.running["trainer"][0])
    if not injector.wait(lambda: trainers.exit_status("trainer") is not None, LAST_STEPS_S):
        raise NotRecovered(f"the run does not end within {LAST_STEPS_S:.0f} s")
    if status := trainers.exit_status("trainer"):
        raise NotRecovered(f"the trainer ended with status {status}; see {injector.evidence / 'trainer.log'}")


def leftovers(injector: FaultInjector) -> Leftovers:
    """The names of things that are left after everything has had a minute to clean up, and the workers have stopped."""
    docker = injector.system.docker
    injector.wait(lambda: not (docker.containers() or docker.shims()), CLEAN_WITHIN_S)
    injector.system.workers.stop()
    return Leftovers(
        containers=docker.containers(),
        networks=docker.networks(),
        volumes=docker.volumes(),
        processes=[f"{pid}, which holds a container" for pid in docker.shims()],
        temporary=_temporary_files(injector.system),
    )


def _temporary_files(system: System) -> list[str]:
    """Files and directories that no process will remove, because the processes that made them have ended.

    Redis and Docker still run; of their files, those in their temporary directories count.
    """
    system.trainers.stop()
    system.serving.stop()
    running = system.services.pids()
    found = [path for path in system.temporary.iterdir() if path.name not in running]
    found += [path for name in running for path in (system.temporary / name).iterdir()]
    return sorted(str(path.relative_to(system.temporary)) for path in found)


def client(system: System) -> redis.Redis:
    return redis.Redis(port=system.arguments.redis_port)


def problems_in_report(system: System) -> list[str]:
    """The problems that the trainer's own report names."""
    words = [sys.executable, "-m", "trainer.report", str(system.arguments.run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return [f"the report on {RUN_ID} ends with status {done.returncode}: {done.stderr}"]
