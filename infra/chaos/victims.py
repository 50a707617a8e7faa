"""Who is killed, and when: drawn from a seed."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["worker", "trainer", "engine", "router", "redis", "dockerd", "containerd"]
KINDS: tuple[Kind, ...] = get_args(Kind)

PAIR_APART_S = 1.5  # at most
LONGEST_QUIET_S = 6.0


@dataclass(frozen=True, slots=True)
class Blow:
    """After ``quiet_s`` the first victim is killed, and the other, if there is one, ``apart_s`` later."""

    victims: tuple[Kind, ...]
    quiet_s: float
    apart_s: float


@dataclass(frozen=True, slots=True)
class Temper:
    """How blows are dealt: the mean pause after a recovery, and the share of blows that meet two processes."""

    quiet_s: float
    pairs_share: float


LONG = Temper(quiet_s=1.0, pairs_share=0.35)
SHORT = Temper(quiet_s=0.3, pairs_share=0.8)


def blows(kinds: Sequence[Kind], num_kills: int, *, seed: int, temper: Temper) -> Iterator[Blow]:
    """``num_kills`` kills: every kind in turn, in an order shuffled anew each round, some two at a time."""
    dice = random.Random(seed)
    waiting: list[Kind] = []
    left = num_kills
    while left:
        if not waiting:
            waiting = dice.sample(kinds, len(kinds))
        victims = [waiting.pop()]
        if left > 1 and dice.random() < temper.pairs_share and (other := _other(victims[0], waiting)):
            waiting.remove(other)
            victims.append(other)
        left -= len(victims)
        quiet_s = min(dice.expovariate(1 / temper.quiet_s), LONGEST_QUIET_S)
        yield Blow(tuple(victims), quiet_s, dice.uniform(0, PAIR_APART_S))


def _other(first: Kind, waiting: Sequence[Kind]) -> Kind | None:
    """Whom to kill with ``first``. Docker's two processes die together in any case."""
    fit = [kind for kind in waiting if {first, kind} != {"dockerd", "containerd"}]
    return fit[-1] if fit else None
