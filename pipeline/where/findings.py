"""The findings about the time of a run, from its directory: accounts of every role, the waits of rollouts, and the one change that would
help most.

The advice comes from a small model of what waits for what, which docs/where.md describes. Each rule takes the time that its change can
affect as the largest possible gain: time that overlaps with other work, or that only becomes shorter by a factor, gains less. Rules are
independent of each other, so gains do not add up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pipeline.journal.reading import journal_of, read, size_of
from pipeline.journal.rows import DeliveryRow, EndRow, EpisodeRow, FleetRow, RankUse, StartRow, StepRow
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.rollout_store.segment import segments_in
from pipeline.where.accounts import (
    BUSY,
    IDLE,
    LEARNER,
    NO_ROLLOUTS,
    NO_WORKER,
    NOT_READ,
    PAUSED,
    START,
    WAIT,
    Account,
    RolloutWaits,
    Span,
    Waiting,
    at_work,
    engines_account,
    gpu_use,
    pause_spans,
    rollout_waits,
    slots_account,
    spans_of,
    trainer_account,
    waiting_of,
    window_of,
)

WORTH_A_LINE = 0.01
"""The share of the wall time below which a gain is not printed."""


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A change, and the largest gain from it."""

    setting: str  # the key of the recipe, or the flag
    text: str  # what to change, in one sentence
    gain: float  # the largest share of the trainer's wall time that it can save


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The measurements that the rules read."""

    trainer: Account
    slots: Account
    waiting: Waiting | None  # None: nothing is known of what slots did while the trainer waited
    evaluation_share: float  # share of the time of all claims that held-out episodes took
    dropped_share: float  # share of the time of all claims that groups without signal took

    def spent_s(self, *parts: str) -> float:
        """The trainer's time in these parts."""
        return sum(self.trainer.parts_s.get(part, 0.0) for part in parts)

    def waited_s(self, part: str) -> float:
        """The time that the trainer waited for groups while slots did this."""
        return self.waiting.parts_s.get(part, 0.0) if self.waiting else 0.0


Rule = tuple[str, str, Callable[[Known], float]]
"""Setting, sentence, and the largest number of seconds that it can gain."""


def _busy_s(known: Known) -> float:
    """The time that the trainer waited for claims while processors had capacity left."""
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
        "tasks.train",
        "Leave out tasks whose tests take long; `swerve verify` has the seconds of each: the trainer waits for claims that are graded.",
        lambda known: known.waited_s(BUSY) * _at_work(known, GRADE),
    ),
    (
        "rollout.limits.command_s",
        "End long commands sooner: the trainer waits for claims that run the agent's commands.",
        lambda known: known.waited_s(BUSY) * _at_work(known, "command"),
    ),
    (
        "SWERVE_DOCKER_HOSTS",
        "Give Docker a faster disk, or images fewer and smaller layers: the trainer waits for containers that start and end.",
        lambda known: known.waited_s(BUSY) * _at_work(known, "container open", "container close"),
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
        "curriculum.kind",
        'Set it to "signal" if it is not, or leave out tasks always or never solved: groups without a signal take slots for nothing.',
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
    """The changes that would help, the largest gain first."""
    wall_s = known.trainer.wall_s
    found = [
        Advice(setting=setting, text=text, gain=min(1.0, gain_s(known) / wall_s))
        for setting, text, gain_s in RULES
        if wall_s
    ]
    worth = (one for one in found if one.gain >= WORTH_A_LINE)
    yield from sorted(worth, key=lambda one: -one.gain)


def is_waiting_explained(known: Known) -> bool:
    """False if the trainer waited for groups and no sample shows for what."""
    return known.waiting is not None or known.spent_s(WAIT) == 0


UNEXPLAINED = (
    "Why the trainer waited for groups is unknown: the journal has no samples of the fleet (fleet.jsonl)."
)


class WhereFindings(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one run's time, as far as its records contain them."""

    trainer: Account
    slots: Account
    engines: Account
    rollouts: RolloutWaits
    waiting: Waiting | None  # what slots did while the trainer waited for groups
    # The GPUs of the learner's ranks over the whole run; empty where none was sampled.
    gpus: tuple[RankUse, ...]
    advice: tuple[Advice, ...]  # what would help, the largest gain first
    unknown: tuple[str, ...] = ()


def where(run_dir: Path, *, max_rollout_bytes: float = math.inf) -> WhereFindings:
    """Read the journal of the run in `run_dir`, and the rollouts that it keeps, which takes longer, unless they are more than
    `max_rollout_bytes`. Raises MalformedJournal.
    """
    directory = journal_of(run_dir)
    is_read = sum(map(size_of, segments_in(run_dir / DIRECTORY))) <= max_rollout_bytes
    rows = list({row.request_id: row for row in read(directory, EpisodeRow)}.values())
    steps, starts = list(read(directory, StepRow)), list(read(directory, StartRow))
    endings, samples = list(read(directory, EndRow)), list(read(directory, FleetRow))
    deliveries = list(read(directory, DeliveryRow))
    trainer, slots = trainer_account(starts, steps, endings), slots_account(rows, samples)
    waiting = waiting_of(trainer.parts_s.get(WAIT, 0.0), samples)
    known = Known(
        trainer=trainer,
        slots=slots,
        waiting=waiting,
        evaluation_share=_share(rows, [row for row in rows if row.purpose == "eval"]),
        dropped_share=_share(rows, [row for row in rows if row.fate == "zero_variance"]),
    )
    return WhereFindings(
        trainer=trainer,
        slots=slots,
        engines=engines_account(
            [*_pauses(deliveries), *(_generated(run_dir) if is_read else ())],
            {url for row in deliveries for url in row.engines},
            window_of(starts, steps, endings),
            NO_ROLLOUTS if is_read else NOT_READ,
        ),
        rollouts=rollout_waits(rows, steps),
        waiting=waiting,
        gpus=gpu_use(steps),
        advice=tuple(advice_of(known)),
        unknown=() if is_waiting_explained(known) else (UNEXPLAINED,),
    )


def _share(rows: Sequence[EpisodeRow], of: Sequence[EpisodeRow]) -> float:
    """The share of these rows in the time of all claims."""
    whole_s = sum(at_work(rows).values())
    return sum(at_work(of).values()) / whole_s if whole_s else 0.0


def _pauses(deliveries: Sequence[DeliveryRow]) -> Iterator[Span]:
    for row in deliveries:
        yield from pause_spans(row.pauses)


def _generated(run_dir: Path) -> Iterator[Span]:
    """The generation spans of engines, from the rollouts that the run keeps."""
    for stored in RolloutStore(run_dir / DIRECTORY).rollouts(lambda head: not head.is_dead):
        if stored.rollout.trajectory is not None:
            yield from spans_of(stored.rollout.trajectory)
