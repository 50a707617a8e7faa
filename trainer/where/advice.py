"""The one change that would help most, from a small model of what waits for what. docs/where.md describes it.

Each rule takes the time that its change can touch for the most that it can gain: what is overlapped by something else, or only
becomes faster by some factor, gains less. Rules do not know of each other, so gains do not add up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from trainer.where.account import Account
from trainer.where.slots import IDLE, PAUSED
from trainer.where.trainer_time import LEARNER, START, WAIT
from trainer.where.waiting import BUSY, NO_WORKER, Waiting

WORTH_A_LINE = 0.01
"""Of the wall: what gains less is not said."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and the most that it can gain."""

    setting: str  # the key of the recipe, or the flag
    text: str  # what to change, in one sentence
    gain: float  # at most so much of the trainer's wall


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the rules look at."""

    trainer: Account
    slots: Account
    waiting: Waiting | None  # None: nothing is known of what slots did while the trainer waited
    evaluation_share: float  # of the time of all claims, for held-out episodes
    dropped_share: float  # of the time of all claims, for groups without signal

    def spent_s(self, *parts: str) -> float:
        """Of the trainer."""
        return sum(self.trainer.parts_s.get(part, 0.0) for part in parts)

    def waited_s(self, part: str) -> float:
        """For groups, while slots did this."""
        return self.waiting.parts_s.get(part, 0.0) if self.waiting else 0.0


Rule = tuple[str, str, Callable[[Known], float]]
"""Setting, sentence, and the seconds that it can gain at most."""


def _busy_s(known: Known) -> float:
    """Waited for claims, on processors with time to spare."""
    return 0.0 if known.waiting and known.waiting.are_processors_busy else known.waited_s(BUSY)


def _at_work(known: Known, *parts: str) -> float:
    """The share of these parts in the time of all claims."""
    work_s = sum(known.slots.parts_s.get(part, 0.0) for part in WORK)
    return sum(known.slots.parts_s.get(part, 0.0) for part in parts) / work_s if work_s else 0.0


ENGINE_WAIT, GENERATE, GRADE = "waiting for the engine", "generate", "grade"
WORK = ("container open", ENGINE_WAIT, GENERATE, "command", "container close", GRADE, "other")

RULES: tuple[Rule, ...] = (
    (
        "--slots",
        "Start more workers, or workers with more slots: the trainer waits while every slot has a claim, and the engines have room.",
        lambda known: _busy_s(known) * (1 - _at_work(known, ENGINE_WAIT)),
    ),
    (
        "swerve engine",
        "Start more engines, or faster ones: the trainer waits for claims that wait for an engine.",
        lambda known: _busy_s(known) * _at_work(known, ENGINE_WAIT, GENERATE),
    ),
    (
        "SWERVE_DOCKER_HOSTS",
        "Move workers, Docker or engines to another machine: the trainer waits for claims while this machine's processors are busy.",
        lambda known: known.waited_s(BUSY) - _busy_s(known),
    ),
    (
        "swerve work",
        "Start workers: the trainer waits while none is alive.",
        lambda known: known.waited_s(NO_WORKER),
    ),
    (
        "swerve status",
        "Repair what pauses the workers; the status says what it is: the trainer waits while slots are paused.",
        lambda known: known.waited_s(PAUSED),
    ),
    (
        "admission.max_lag_versions",
        "Raise the limit of the lag: the trainer waits while slots are idle, because more groups could be trained too late.",
        lambda known: known.waited_s(IDLE["lag"]),
    ),
    (
        "weights.transport",
        "Bring weights to the engines faster: the trainer waits while slots are idle until the newest weights are served.",
        lambda known: known.waited_s(IDLE["weights"]),
    ),
    (
        "evaluation.episodes",
        "Evaluate less: fewer episodes, or less often. Training waits for evaluations, or for slots that play them.",
        lambda known: (
            known.spent_s("evaluation")
            + known.waited_s(IDLE["evaluation"])
            + known.waited_s(BUSY) * known.evaluation_share
        ),
    ),
    (
        "tasks.train",
        "Leave out tasks that are always or never solved: groups without a signal take slots and are thrown away.",
        lambda known: known.waited_s(BUSY) * known.dropped_share,
    ),
    (
        "judge.required",
        "Start judges, or let groups be trained without them: the trainer waits while slots are idle, because no judge works.",
        lambda known: known.waited_s(IDLE["judge"]),
    ),
    (
        "admission.max_queue_bytes",
        "Let Redis hold more trajectories, or write checkpoints more often: the trainer waits while Redis is full of them.",
        lambda known: known.waited_s(IDLE["redis"]),
    ),
    (
        "admission.max_held_bytes",
        "Let the trainer hold more trajectories: it waits while its memory is full of them.",
        lambda known: known.waited_s(IDLE["memory"]),
    ),
    (
        "swerve dead",
        "Repair what makes groups fail; dead letters say why: the trainer waits through pauses after failed groups.",
        lambda known: known.waited_s(IDLE["failures"]),
    ),
    (
        "--nproc-per-node",
        "Train on more devices: the learner computes while nothing else happens in the loop.",
        lambda known: known.spent_s(*LEARNER),
    ),
    (
        "checkpoint.every_steps",
        "Write checkpoints less often: training waits for them.",
        lambda known: known.spent_s("checkpoint"),
    ),
    (
        "audit.share",
        "Audit fewer tokens: training waits for the audit.",
        lambda known: known.spent_s("audit"),
    ),
    (
        "--run-dir",
        "Put the run's directory on faster storage: training waits for exports of weights.",
        lambda known: known.spent_s("export", "engines"),
    ),
    (
        "num_steps",
        "Take more steps in one process: much of the time passed before the first.",
        lambda known: known.spent_s(START),
    ),
)


def advice_of(known: Known) -> Iterator[Advice]:
    """What would help, the most first."""
    wall_s = known.trainer.wall_s
    found = [
        Advice(setting=setting, text=text, gain=min(1.0, gain_s(known) / wall_s))
        for setting, text, gain_s in RULES
        if wall_s
    ]
    worth = (one for one in found if one.gain >= WORTH_A_LINE)
    yield from sorted(worth, key=lambda one: -one.gain)


def is_waiting_explained(known: Known) -> bool:
    """False where the trainer waited for groups and no sample says for what."""
    return known.waiting is not None or known.spent_s(WAIT) == 0
