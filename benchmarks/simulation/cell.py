"""One cell of an experiment: one training run in simulation, from the demo's policy to its held-out success.

Every step plays as many groups with weights that are `lag` versions old, and updates once with the groups that have a signal.
Cells of one seed have the same tasks in the same order; as long as they sample from the starting weights they also have the
same episodes, which are played once.
"""

import random
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import msgspec
import torch

from benchmarks.simulation import oracle
from benchmarks.simulation.episodes import CONTEXT_TOKENS, Episode, Player
from benchmarks.simulation.failures import Failures, failed
from benchmarks.simulation.groups import group
from benchmarks.simulation.interpreter import interpreter
from benchmarks.simulation.llama import Llama, Weights, read_weights
from trainer.batching.batch import Batch
from trainer.batching.collate import make_batch
from trainer.batching.credit import has_signal
from trainer.demo.family import DemoTask, make_tasks
from trainer.learner import backend
from trainer.learner.config import LearnerConfig, LossConfig, LossKind, StepMetrics
from trainer.learner.megatron import Learner
from trainer.learner.objectives.registry import OBJECTIVES
from trainer.recipe import AdmissionRecipe, CreditMethod, CreditRecipe, CurriculumRecipe
from trainer.rollouts.admission import StalenessController, bounds_of
from trainer.rollouts.curriculum import Curriculum, TaskOrder
from trainer.rollouts.groups import Group

POLICY = Path(__file__).parents[2] / "trainer" / "demo" / "policy"
MIN_VALID_MEMBERS = 2


class Cell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is varied."""

    objective: LossKind
    lag: int  # versions between the weights that sample and those that are trained
    seed: int
    failures: Failures = "none"
    credit: CreditMethod = "outcome"
    coefficient: float = 0.1  # of the judge's scores, where the method uses them
    accuracy: float = 1.0  # of the judge: how many of its scores are right
    # Updates of a step. The proximal policy, by which ratios are clipped, is that before the first.
    num_minibatches: int = 1
    num_epochs: int = 1  # passes of a step over its batch, with an update after each
    # Whether tasks are drawn by their signal, as under curriculum.kind = "signal", and not in turn.
    is_curriculum: bool = False
    # Largest size of a group, as curriculum.max_group_size has it; 0: all groups have `Settings.group_size` members.
    max_group_size: int = 0
    is_controlled: bool = False  # `lag` is the largest, and a run's controller of staleness decides how far below it samples are


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What all cells have in common."""

    num_steps: int = 40
    groups_per_step: int = 4
    group_size: int = 4
    lr: float = 1e-3
    warmup_steps: int = 4
    # What "constant" divides by, for each trajectory: about the tokens of an episode, so that its steps are as large as the others'.
    constant_tokens: int = 50
    failure_share: float = 0.1
    num_tasks: int = 0  # tasks that are played again and again; 0: each group has a new task
    num_heldout: int = 128
    evaluate_every: int = 10  # steps
    final_episodes: int = 2  # of each held-out task, after the last step

    def learner(self, objective: LossKind) -> LearnerConfig:
        """The learner of the demo's recipe, with one update a step and a constant learning rate, the same for every objective."""
        loss = LossConfig(kind=objective)
        if OBJECTIVES[objective].aggregation == "constant":
            loss = msgspec.structs.replace(loss, constant_tokens=self.constant_tokens)
        return LearnerConfig(
            lr=self.lr,
            lr_min=self.lr,
            warmup_steps=self.warmup_steps,
            betas=(0.9, 0.95),
            eps=1e-3,
            micro_batch_tokens=2048,
            dtype="fp32",
            loss=loss,
        )


class Steps(msgspec.Struct, kw_only=True):
    """What the steps of a cell did: an entry for each."""

    reward: list[float] = []  # mean over the step's episodes, failed ones included
    # Groups that were trained; the others had no signal, or too few valid members. The rest is 0 where no group was.
    num_groups: list[int] = []
    entropy: list[float] = []
    ess_share: list[float] = []
    masked_share: list[float] = []
    behaviour_kl: list[float] = []
    grad_norm: list[float] = []
    # The lag of each step's samples, and the shares by signal; empty in rows older than these fields.
    lag: list[int] = []
    signal_ess_share: list[float] = []
    signal_masked_share: list[float] = []
    signal_vetoed_share: list[float] = []
    signal_behaviour_kl: list[float] = []
    num_episodes: list[int] = []  # empty in rows older than this field, where each step has as many

    def add(
        self, reward: float, num_groups: int, num_episodes: int, lag: int, metrics: StepMetrics | None
    ) -> None:
        """Put a step behind the others."""
        self.num_episodes.append(num_episodes)
        self.reward.append(round(reward, 4))
        self.lag.append(lag)
        self.num_groups.append(num_groups)
        for name in ("entropy", "ess_share", "masked_share", "behaviour_kl", "grad_norm"):
            getattr(self, name).append(float(f"{getattr(metrics, name, 0.0):.3g}"))
        signal = metrics.signal if metrics else None
        for name in ("ess_share", "masked_share", "vetoed_share", "behaviour_kl"):
            getattr(self, f"signal_{name}").append(float(f"{getattr(signal, name, 0.0):.3g}"))


class Evaluated(msgspec.Struct, frozen=True, kw_only=True):
    """The held-out tasks after a step."""

    step: int
    success: float
    num_episodes: int


class CellRow(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell."""

    cell: Cell
    settings: Settings
    evaluations: list[Evaluated]
    steps: Steps
    num_failed: int
    unknown_share: float  # of the commands: not simulated
    format_error_share: float  # of the turns
    cpu_s: float

    @property
    def final(self) -> Evaluated:
        return self.evaluations[-1]

    def episodes_until(self, step: int) -> int:
        """The number of training episodes of the first `step` steps."""
        told = self.steps.num_episodes
        return sum(told[:step]) if told else step * self.settings.groups_per_step * self.settings.group_size


class Workbench:
    """What cells of one process share."""

    def __init__(self, player: Player, *, exports: Path) -> None:
        self.player = player
        self.exports = exports
        self.start = read_weights(POLICY)
        self._played: dict[tuple[object, ...], list[Episode]] = {}

    def play(
        self,
        tasks: list[DemoTask],
        weights: Weights,
        *,
        version: int,
        draw: tuple[object, ...],
        forced: Callable[[Episode], str] = lambda _: "",
    ) -> list[Episode]:
        """Play the tasks; `draw` seeds the sampling, `forced` is as in `Player.play`."""
        if version == 0 and draw in self._played:
            return self._played[draw]
        generator = torch.Generator().manual_seed(random.Random(repr(draw)).getrandbits(48))
        episodes = self.player.play(tasks, weights, version=version, generator=generator, forced=forced)
        if version == 0:
            self._played[draw] = episodes
        return episodes


@contextmanager
def workbench() -> Iterator[Workbench]:
    """Set up this process, as one learner with one thread."""
    torch.set_num_threads(1)
    backend.join()
    with interpreter() as child, tempfile.TemporaryDirectory() as exports:
        yield Workbench(Player(Llama(POLICY, max_tokens=CONTEXT_TOKENS), child), exports=Path(exports))
    backend.leave()


class CellRun:
    """A cell under way."""

    def __init__(self, cell: Cell, settings: Settings, bench: Workbench) -> None:
        self._cell, self._settings, self._bench = cell, settings, bench
        config = msgspec.structs.replace(
            settings.learner(cell.objective),
            seed=cell.seed,
            num_minibatches=cell.num_minibatches,
            num_epochs=cell.num_epochs,
        )
        self._learner = Learner(config, model_directory=POLICY)
        num_tasks = settings.num_tasks or settings.num_steps * settings.groups_per_step
        self._tasks = {task.name: task for task in make_tasks(cell.seed, "train", num_tasks)}
        self._curriculum = Curriculum(
            TaskOrder([*self._tasks], seed=cell.seed),
            CurriculumRecipe(
                kind="signal" if cell.is_curriculum else "plain", max_group_size=cell.max_group_size or None
            ),
            seed=cell.seed,
            group_size=settings.group_size,
        )
        self._heldout = make_tasks(cell.seed, "heldout", settings.num_heldout)
        rule = "controlled" if cell.is_controlled else "fixed"
        self._staleness = StalenessController(
            bounds_of(AdmissionRecipe(max_lag_versions=cell.lag, staleness=rule))
        )
        # The newest version last; at a fixed lag the first is the one that samples.
        self._versions: deque[tuple[int, Weights]] = deque([(0, bench.start)], maxlen=cell.lag + 1)
        self._failing = random.Random(f"failures/{cell.seed}")
        self._num_commands = self._num_unknown = self._num_turns = self._num_format_errors = 0
        self._judging = random.Random(f"judge/{cell.seed}")
        self._num_failed = 0
        self._steps = Steps()

    def run(self) -> CellRow:
        """Train and evaluate."""
        began_s = time.process_time()
        evaluations = [self._evaluate(0)]
        for step in range(1, self._settings.num_steps + 1):
            self._step(step)
            if step % self._settings.evaluate_every == 0 or step == self._settings.num_steps:
                evaluations.append(self._evaluate(step))
        return CellRow(
            cell=self._cell,
            settings=self._settings,
            evaluations=evaluations,
            steps=self._steps,
            num_failed=self._num_failed,
            unknown_share=self._num_unknown / max(1, self._num_commands),
            format_error_share=self._num_format_errors / self._num_turns,
            cpu_s=round(time.process_time() - began_s, 1),
        )

    def _step(self, step: int) -> None:
        """Play, train what can be trained, and make a version."""
        settings = self._settings
        versions_back = min(self._staleness.ahead_versions, len(self._versions) - 1)
        version, weights = self._versions[-1 - versions_back]
        first = (step - 1) * settings.groups_per_step
        tasks = self._choose(first)
        sizes = [self._curriculum.size(task.name) for task in tasks]
        asked = [task for task, size in zip(tasks, sizes, strict=True) for _ in range(size)]
        # Episodes are shared by cells that play the same tasks as often.
        told = sizes if {*sizes} != {settings.group_size} else []
        draw = ("train", self._cell.seed, step, *(task.name for task in tasks if settings.num_tasks), *told)
        episodes = self._bench.play(asked, weights, version=version, draw=draw)
        for task, episode in zip(asked, episodes, strict=True):
            self._curriculum.add(task.name, episode.reward)
        usable = [one for one in self._groups(first, sizes, episodes, version) if _is_usable(one)]
        metrics = self._learner.step(self._batch(step, usable)) if usable else None
        trained = metrics if isinstance(metrics, StepMetrics) else None
        self._versions.append((step, self._export() if trained else self._versions[-1][1]))
        if trained:
            self._staleness.observe(step, trained.by_lag)
        reward = sum(episode.reward for episode in episodes) / len(episodes)
        num_trained = len(usable) if trained else 0
        self._steps.add(reward, num_trained, len(episodes), step - 1 - version, trained)

    def _choose(self, first: int) -> list[DemoTask]:
        """The tasks of a step whose first group is at the cursor `first`."""
        cursors = range(first, first + self._settings.groups_per_step)
        if not self._settings.num_tasks:
            return [[*self._tasks.values()][cursor] for cursor in cursors]
        chosen: list[str] = []
        for cursor in cursors:
            chosen.append(self._curriculum.choose(cursor, live=chosen, quarantined=()))
        return [self._tasks[one] for one in chosen]

    def _groups(self, first: int, sizes: list[int], episodes: list[Episode], version: int) -> list[Group]:
        """Decide which episodes fail, and group all of them."""
        cell = self._cell
        num_turns = [len(episode.turns) for episode in episodes]
        broken = failed(cell.failures, self._settings.failure_share, num_turns, self._failing)
        without = 0.0 if cell.failures == "as_zero" else None
        rewards = [without if bad else one.reward for one, bad in zip(episodes, broken, strict=True)]
        self._num_failed += sum(broken)
        self._count(episodes)
        scores = [self._scores(episode) for episode in episodes]
        return [
            group(
                first + number,
                episodes[start : start + size],
                rewards[start : start + size],
                scores[start : start + size],
                version=version,
                vocab_size=len(self._bench.start.embedding_VE),
            )
            for number, (start, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False))
        ]

    def _scores(self, episode: Episode) -> dict[int, float] | None:
        if self._cell.credit == "outcome":
            return None
        return oracle.scores(episode, accuracy=self._cell.accuracy, rng=self._judging)

    def _count(self, episodes: list[Episode]) -> None:
        for episode in episodes:
            self._num_turns += len(episode.turns)
            self._num_format_errors += episode.num_format_errors
            self._num_unknown += episode.repository.num_unknown
            self._num_commands += len(episode.turns) - episode.num_format_errors

    def _batch(self, step: int, groups: list[Group]) -> Batch:
        newest = step - 1
        batch, _ = make_batch(
            groups,
            step=step,
            lag_of=lambda version: newest - version,
            temperature=1.0,
            kind="leave_one_out",
            credit=CreditRecipe(method=self._cell.credit, coefficient=self._cell.coefficient),
            withhold_beyond=None,
        )
        return batch

    def _export(self) -> Weights:
        """The learner's weights, by way of the files that engines would load."""
        with tempfile.TemporaryDirectory(dir=self._bench.exports) as directory:
            self._learner.export(Path(directory) / "version")
            return read_weights(Path(directory) / "version")

    def _evaluate(self, step: int) -> Evaluated:
        repeats = self._settings.final_episodes if step == self._settings.num_steps else 1
        version, weights = self._versions[-1]
        draw = ("heldout", self._cell.seed, step)
        episodes = self._bench.play(self._heldout * repeats, weights, version=version, draw=draw)
        success = sum(episode.reward for episode in episodes) / len(episodes)
        return Evaluated(step=step, success=success, num_episodes=len(episodes))


def _is_usable(group: Group) -> bool:
    rewards = list(group.rewards.values())
    return len(rewards) >= MIN_VALID_MEMBERS and has_signal(rewards)
