"""Draws from a seed which processes are killed, and when."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal[
    "worker", "judge", "trainer", "engine", "router", "redis", "dockerd", "containerd", "container", "program"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Processes that dockerd starts and no supervisor restarts: its containerd, the first process of a container, an agent program in one.
OF_DOCKERD: tuple[Kind, ...] = ("containerd", "container", "program")

MAX_APART_S = 1.5  # longest time between the two kills of a pair
MAX_PAUSE_S = 6.0


@dataclass(frozen=True, slots=True)
class Fault:
    """The first victim is killed after `pause_s`; the second, if there is one, `apart_s` later."""

    victims: tuple[Kind, ...]
    pause_s: float
    apart_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """The mean pause between a recovery and the next fault, and the share of faults that kill two processes."""

    mean_pause_s: float
    pairs_share: float


LONG = Pace(mean_pause_s=1.0, pairs_share=0.35)
SHORT = Pace(mean_pause_s=0.3, pairs_share=0.8)


def draw_faults(kinds: Sequence[Kind], num_kills: int, *, seed: int, pace: Pace) -> Iterator[Fault]:
    """Faults with `num_kills` kills in all: every kind in turn, in an order shuffled for each round, some in pairs."""
    rng = random.Random(seed)
    waiting: list[Kind] = []
    num_left = num_kills
    while num_left:
        if not waiting:
            waiting = rng.sample(kinds, len(kinds))
        victims: list[Kind] = [waiting.pop()]
        if num_left > 1 and rng.random() < pace.pairs_share and (other := _partner(victims[0], waiting)):
            waiting.remove(other)
            victims.append(other)
        num_left -= len(victims)
        pause_s = min(rng.expovariate(1 / pace.mean_pause_s), MAX_PAUSE_S)
        yield Fault(tuple(victims), pause_s, rng.uniform(0, MAX_APART_S))


def _partner(first: Kind, waiting: Sequence[Kind]) -> Kind | None:
    """The kind of process to kill with `first`. The two kinds of Docker are never paired: they die together in any case."""
    possible: list[Kind] = [kind for kind in waiting if {first, kind} != {"dockerd", "containerd"}]
    return possible[-1] if possible else None
