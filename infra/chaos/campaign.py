"""Blows until as many are dead as was asked for, or until somebody asks us to end; then the accounts of what was done.

What has been measured so far stands in ``progress.json`` after every blow, with the books as they were last settled, lest a
long run that is cut off have measured nothing.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import redis

from infra.chaos.books import Books, settle
from infra.chaos.ending import client, run_out, second_opinion, what_is_left
from infra.chaos.recovery import Hopeless, Recovery, Ring
from infra.chaos.slo import Leftovers, Progress, Slo, amount_to
from infra.chaos.stopping import Stopped
from infra.chaos.victims import Kind, Temper, blows

SETTLE_EVERY_KILLS = 20
SECOND_LOOK_S = 5.0
"""What is neither owed nor settled may be on its way from the one to the other: so long it is given."""


@dataclass(slots=True)
class Campaign:
    """Against a system that runs. ``starts_s`` says how long each kind of process took to start in quiet."""

    ring: Ring
    starts_s: Mapping[Kind, float]
    wanted: int  # kills
    file: Path  # of the progress
    began_at: float = field(default_factory=time.monotonic)
    recoveries: list[Recovery] = field(default_factory=list[Recovery])
    faults: list[str] = field(default_factory=list[str])
    books: Books = field(default_factory=Books)
    settled_kills: int = 0

    @property
    def num_kills(self) -> int:
        return sum(len(one.victims) for one in self.recoveries)

    def wage(self, kinds: Sequence[Kind], *, seed: int, temper: Temper) -> Stopped | None:
        """Deal the blows. Returns what ended them early; a system that does not come back is a fault."""
        dice = random.Random(seed)
        try:
            while self.num_kills < self.wanted:
                before = self.num_kills
                for blow in blows(kinds, self.wanted - before, seed=dice.randrange(2**32), temper=temper):
                    recovery = self.ring.strike(blow, dice, self.starts_s)
                    if recovery is not None:
                        self._note(recovery)
                if self.num_kills == before:
                    raise Hopeless(f"nothing of {', '.join(kinds)} runs that could be killed")
        except Hopeless as error:
            self.faults.append(str(error))
        except Stopped as stopped:
            return stopped
        return None

    def conclude(self) -> Slo:
        """End the run, and add everything up. Raises Stopped if asked once more to end."""
        minutes = self._minutes
        try:
            run_out(self.ring)
        except Hopeless as error:
            self.faults.append(str(error))
        left = what_is_left(self.ring)
        system = self.ring.system
        with client(system) as redis_client:
            self.books = settle(redis_client, system.arguments.run_dir, self.ring.watch.asked, ended=True)
        self.faults += second_opinion(system)
        return amount_to(
            self.recoveries,
            self.starts_s,
            self.books,
            left,
            wanted=self.wanted,
            faults=self.faults,
            steps=self.ring.watch.step,
            minutes=minutes,
        )

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self.began_at) / 60

    def _note(self, recovery: Recovery) -> None:
        self.recoveries.append(recovery)
        names = " and ".join(recovery.victims)
        self.ring.say(f"{self.num_kills}: {names} killed, back after {recovery.total_s:.1f} s")
        if self.num_kills >= self.settled_kills + SETTLE_EVERY_KILLS:
            self._settle()
        self._write()

    def _settle(self) -> None:
        """The books of a run that goes on. Redis may be on its way out again: then after the next blow."""
        system, asked = self.ring.system, frozenset(self.ring.watch.asked)
        try:
            with client(system) as redis_client:
                books = settle(redis_client, system.arguments.run_dir, asked, ended=False)
                if books.lost:
                    self.ring.pause(SECOND_LOOK_S)
                    books = settle(redis_client, system.arguments.run_dir, asked, ended=False)
        except redis.RedisError:
            return
        self.books, self.settled_kills = books, self.num_kills

    def _write(self) -> None:
        progress = amount_to(
            self.recoveries,
            self.starts_s,
            self.books,
            Leftovers(),
            wanted=self.wanted,
            faults=self.faults,
            steps=self.ring.watch.step,
            minutes=self._minutes,
        )
        fields = msgspec.structs.asdict(progress)
        aside = self.file.with_suffix(".aside")
        aside.write_bytes(msgspec.json.encode(Progress(**fields, settled_kills=self.settled_kills)))
        aside.replace(self.file)
