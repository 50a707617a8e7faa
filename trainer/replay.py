"""`python -m trainer.replay RUN_DIR --steps 10..20`: trains on the kept rollouts of a run again, without a fleet.

With the run's own recipe, on a CPU and in the layout of the run, the steps are bit-identical. With `--set`, as in `--set
learner.loss.kind=cispo`, they are taken with both recipes, from the same weights, and shown side by side. The replay begins at the newest
checkpoint before the first step, or at the starting weights, and takes the steps in between with the run's recipe.

The rollouts are those of the run in any case: the further recipe B moves from the weights that sampled them, the lower its ess_share, and
the weaker the evidence. Exit status: 0 done; 1 a step differs from the run's; 2 misuse.
"""

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from pipeline.commandline import directory, program
from pipeline.journal.reading import RECIPE, RUN_FILE, journal_of, read
from pipeline.journal.rows import Fate, JudgementRow, StartRow, StepRow
from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.trajectory import TrajectoryHead
from trainer import process
from trainer.batching.batch import Batch, Sample
from trainer.batching.collate import Overlong, make_batch
from trainer.batching.credit import logprobs_of
from trainer.batching.samples import AlteredReply, samples_of
from trainer.learner.config import NotFinite, StepMetrics
from trainer.learner.families.registry import read_architecture
from trainer.loop.checkpoints import Checkpoints
from trainer.process import TrainerSettings
from trainer.recipe import AdvantageKind, CreditRecipe, Recipe, differences, load_recipe
from trainer.records import run_directory
from trainer.rollouts.curriculum import context_limits

if TYPE_CHECKING:
    from trainer.feed import Feed


@dataclass(frozen=True, slots=True)
class KeptMember:
    """A valid member of a group. `is_trained`: the step trained it; otherwise its reward only counts in the baseline."""

    head: TrajectoryHead
    samples: tuple[Sample, ...]
    is_trained: bool
    scores: Mapping[int, float] | None = None
    logprobs: Mapping[int, npt.NDArray[np.float32]] | None = None

    @property
    def lag_from(self) -> int:
        first = self.head.version_first
        return self.head.version_at_enqueue if first is None else first


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """The valid members of a group, in the order in which the step trained them."""

    members: Mapping[int, KeptMember]

    @property
    def rewards(self) -> dict[int, float]:
        rewards = {number: member.head.reward for number, member in sorted(self.members.items())}
        return {number: reward for number, reward in rewards.items() if reward is not None}

    def fates(self, valid: Fate) -> dict[int, Fate]:
        return {number: valid if member.is_trained else "late" for number, member in self.members.items()}


class KeptRun:
    """A run whose directory is only read."""

    def __init__(self, root: Path) -> None:
        """Raises ValueError if `root` holds no run that has taken a step."""
        if not (root / RUN_FILE).exists():
            raise ValueError(f"{root} holds no run: give the directory of one, as in runs/demo")
        self.root = run_directory.find(root).root
        self.recipe: Recipe = load_recipe(self.root / RECIPE)
        self._overlong = Overlong(self.recipe.overlong, context_limits(self.recipe))
        self._rows = {row.step: row for row in read(journal_of(self.root), StepRow)}
        # A judgement that came too late changed nothing then, so it counts for nothing here.
        self._scores = {
            row.rollout_id: row.scores
            for row in read(journal_of(self.root), JudgementRow)
            if row.fate == "joined"
        }
        self._store = RolloutStore(self.root / DIRECTORY)
        self._architecture = read_architecture(Path(self.recipe.model))
        if not self._rows:
            raise ValueError(f"{root} holds no step yet: there is nothing to replay")

    @property
    def num_steps(self) -> int:
        """The number of steps that the run has taken."""
        return max(self._rows)

    def row(self, step: int) -> StepRow:
        """The row of a step. Raises ValueError if the run has not taken the step."""
        if step not in self._rows:
            raise ValueError(f"{self.root} holds no step {step}: it has taken {self.num_steps}")
        return self._rows[step]

    def num_threads(self, steps: range) -> int:
        """The number of threads that computed the first of these steps; 0: not recorded.

        Raises ValueError if other steps had another number.
        """
        starts = list(read(journal_of(self.root), StartRow))
        found = {
            step: next((row.num_threads for row in reversed(starts) if row.step < step), 0) for step in steps
        }
        first = found[steps[0]]
        other = next((step for step, number in found.items() if number != first), None)
        if other is not None:
            raise ValueError(
                f"the run took step {steps[0]} on {first} threads and step {other} on {found[other]}, and a replay has one number; it "
                f"begins at the newest checkpoint before the first step: replay the steps before {other} and those from {other} on apart"
            )
        return first

    def checkpoint_before(self, step: int) -> tuple[int, Path | None]:
        """The newest checkpoint before `step`, with its own step; 0 and None: the starting weights."""
        checkpoints = Checkpoints(self.root / "checkpoints", keep=self.recipe.checkpoint.keep)
        return checkpoints.before(step)

    def batch(self, step: int, advantage: AdvantageKind, credit: CreditRecipe) -> Batch:
        """The batch that the step trained, with advantages of this kind, and credit from the scores at that time.

        Raises ValueError naming a rollout that is not kept.
        """
        row = self.row(step)
        groups: dict[str, dict[int, KeptMember]] = {}
        for request_id in (*row.request_ids, *row.baseline_ids):
            member = self._member(step, request_id, is_trained=request_id in row.request_ids)
            groups.setdefault(member.head.group_id, {})[member.head.member] = member
        batch, _ = make_batch(
            [KeptGroup(members) for members in groups.values()],
            step=step,
            lag_of=lambda version: max(row.version - version, 0),
            temperature=self.recipe.rollout.sampling.temperature,
            kind=advantage,
            credit=credit,
            overlong=self._overlong,
            withhold_beyond=None,
        )
        if batch.request_ids != row.request_ids:
            raise ValueError(f"step {step}: the rollouts in {self.root} are not those that the step trained")
        return batch

    def _member(self, step: int, request_id: str, *, is_trained: bool) -> KeptMember:
        stored = self._store.find(request_id)
        trajectory = None if stored is None else stored.rollout.trajectory
        if stored is None or trajectory is None:
            reason = "is not kept" if stored is None or not stored.fault else stored.fault
            raise ValueError(
                f"step {step}: the rollout {request_id} {reason}; a replay needs every rollout that the step trained, "
                'so set rollouts.keep = "all" and a large enough rollouts.max_bytes before the run'
            )
        try:
            samples = samples_of(
                trajectory,
                vocab_size=self._architecture.vocab_size,
                max_tokens=self.recipe.learner.micro_batch_tokens,
                routing_width=self._architecture.reported_experts(self.recipe.learner),
            )
        except AlteredReply:
            if is_trained:
                raise
            samples = ()
        scores, judgement = self._scores.get(request_id), stored.rollout.judgement
        logprobs = None
        if self.recipe.credit.distills and scores is not None:
            if judgement is None:
                raise ValueError(f"step {step}: the log-probs that a teacher gave {request_id} are not kept")
            logprobs = logprobs_of(judgement)
        return KeptMember(stored.head.head, samples, is_trained, scores, logprobs)


COMPARED = (
    "loss",
    "grad_norm",
    "lr",
    "num_trained_tokens",
    "entropy",
    "ratio_mean",
    "ratio_max",
    "ess_share",
    "masked_share",
    "vetoed_share",
)
"""The learner's metrics in the row of a step: with the same recipe, each must have the same value."""

SHOWN = ("loss", "grad_norm", "entropy", "ess_share", "masked_share", "vetoed_share", "behaviour_kl")
"""The metrics that are shown for two recipes."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step of the run, and the learner's metrics for its rollouts."""

    row: StepRow
    metrics: StepMetrics | NotFinite

    @property
    def differing(self) -> tuple[str, ...]:
        """The metrics that differ from those of the run."""
        if isinstance(self.metrics, NotFinite):
            return (f"{self.metrics.what} not finite",)
        return tuple(name for name in COMPARED if getattr(self.metrics, name) != getattr(self.row, name))


def beside_the_run(steps: Sequence[ReplayedStep]) -> Iterator[str]:
    """A line for each step, and the number of identical steps."""
    yield f"{'step':>6}{'loss':>14}{'replayed':>14}{'grad norm':>14}{'replayed':>14}   differs in"
    for step in steps:
        row, found = step.row, step.metrics
        replayed = (
            ("-", "-") if isinstance(found, NotFinite) else (f"{found.loss:+.6g}", f"{found.grad_norm:.6g}")
        )
        yield (
            f"{row.step:>6}{row.loss:>+14.6g}{replayed[0]:>14}{row.grad_norm:>14.6g}{replayed[1]:>14}   "
            f"{', '.join(step.differing) or '-'}"
        )
    num_same = sum(not step.differing for step in steps)
    yield f"{num_same} of {len(steps)} steps are bit for bit those of the run"


def side_by_side(
    ours: Sequence[ReplayedStep], others: Sequence[ReplayedStep], changes: Sequence[str]
) -> Iterator[str]:
    """Two lines for each step, one for each recipe, and their means."""
    yield "A: as the run was"
    yield f"B: {'; '.join(changes)}"
    yield f"{'step':>6}  " + "".join(f"{name:>14}" for name in SHOWN)
    for one, other in zip(ours, others, strict=True):
        yield _line(str(one.row.step), "A", [one])
        yield _line("", "B", [other])
    yield _line("mean", "A", ours)
    yield _line("", "B", others)
    num_same = sum(not step.differing for step in ours)
    yield f"A: {num_same} of {len(ours)} steps are bit for bit those of the run"


def _line(label: str, recipe: str, steps: Sequence[ReplayedStep]) -> str:
    """One line of the table: the means over the steps whose loss and gradient are finite, or "-" if there is no such step."""
    finite = [step.metrics for step in steps if isinstance(step.metrics, StepMetrics)]
    values = [f"{fmean(getattr(one, name) for one in finite):.6g}" if finite else "-" for name in SHOWN]
    return f"{label:>6} {recipe}" + "".join(f"{value:>14}" for value in values)


REPLAYABLE = ("learner.", "batch.advantage:", "credit.")
"""The keys that a replay may change: everything else was decided when the rollouts were played."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return process.exit_status(lambda settings: _replay(options, settings))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program("trainer.replay"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run_dir", type=directory, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument(
        "--steps", default="..", metavar="FIRST..LAST", help="10..20, 10.., ..20 or 10; default all"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a key of learner or credit, or batch.advantage, and compare; may be repeated",
    )
    parser.add_argument(
        "--export",
        type=Path,
        metavar="DIR",
        help="write the weights after the last step, with --set those of B",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per step instead of the table"
    )
    return parser


def _replay(options: argparse.Namespace, settings: TrainerSettings) -> int:
    run = KeptRun(options.run_dir)
    changed = load_recipe(run.root / RECIPE, options.set)
    changes = differences(run.recipe, changed)
    for change in changes:
        if not change.startswith(REPLAYABLE):
            raise ValueError(
                f"a replay cannot change {change}: the rollouts are played; it can change learner.*, credit.* and batch.advantage"
            )
    if options.set and not changes:
        raise ValueError(f"--set {' '.join(options.set)}: the run was like that already")
    recipes = [_without_snapshots(recipe) for recipe in ([run.recipe, changed] if changes else [run.recipe])]
    for recipe in recipes:
        process.check_processes(recipe, settings)
    steps = _steps(options.steps, run.num_steps)
    num_threads = run.num_threads(range(run.checkpoint_before(steps[0])[0] + 1, steps[-1] + 1))
    if settings.rank != 0:
        return [process.follow(recipe, settings, num_threads=num_threads) for recipe in recipes][-1]
    if not num_threads:
        print(
            "warning: the run did not record its number of threads; with another number than OMP_NUM_THREADS gives, its last digits differ",
            file=sys.stderr,
        )
    replayed = _replayed(run, recipes, steps, settings, options.export, num_threads=num_threads)
    if options.json:
        for name, found in zip("AB", replayed, strict=False):
            for step in found:
                print(
                    msgspec.json.encode(
                        {"recipe": name, "step": step.row.step, "metrics": step.metrics}
                    ).decode()
                )
    elif changes:
        print("\n".join(side_by_side(replayed[0], replayed[1], changes)))
    else:
        print("\n".join(beside_the_run(replayed[0])))
    return 1 if any(step.differing for step in replayed[0]) else 0


def _without_snapshots(recipe: Recipe) -> Recipe:
    """The recipe without snapshots, because a replay audits nothing."""
    return replace(recipe, learner=replace(recipe.learner, snapshots_kept=0))


def _steps(text: str, last: int) -> range:
    """The steps of "10..20", "10..", "..20" or "10". Raises ValueError."""
    first, dots, end = text.partition("..")
    if not dots:
        end = first
    if not all(part.isdecimal() for part in (first, end) if part) or text == "":
        raise ValueError(f"--steps {text!r}: write it as 10..20, 10.., ..20 or 10")
    chosen = range(int(first or 1), int(end or last) + 1)
    if not chosen or chosen[0] < 1 or chosen[-1] > last:
        raise ValueError(f"--steps {text}: the run has taken the steps 1..{last}")
    return chosen


def _replayed(
    run: KeptRun,
    recipes: Sequence[Recipe],
    steps: range,
    settings: TrainerSettings,
    export: Path | None,
    *,
    num_threads: int,
) -> list[list[ReplayedStep]]:
    """The steps under each recipe, from the same weights."""
    begin, start = run.checkpoint_before(steps[0])
    replayed: list[list[ReplayedStep]] = []
    with contextlib.ExitStack() as stack:
        for recipe in recipes:
            feed = process.make_feed(recipe, settings, num_threads=num_threads)
            if start is not None:
                feed.call("restore", start)
            lead = range(begin + 1, steps[0])
            if lead:
                print(f"taking steps {lead[0]} to {lead[-1]} first, as the run did", file=sys.stderr)
                list(_take(feed, run, recipe, lead))
                if len(recipes) > 1:
                    begin, start = lead[-1], _saved(feed, Path(stack.enter_context(_directory_in(run.root))))
            replayed.append(list(_take(feed, run, recipe, steps)))
            if export is not None and recipe is recipes[-1]:
                feed.call("export", export)
            feed.stop()
    return replayed


def _take(feed: "Feed", run: KeptRun, recipe: Recipe, steps: range) -> Iterator[ReplayedStep]:
    for step in steps:
        batch = run.batch(step, recipe.batch.advantage, recipe.credit)
        yield ReplayedStep(run.row(step), feed.call("step", batch))


def _directory_in(root: Path) -> "tempfile.TemporaryDirectory[str]":
    """A directory for a checkpoint that all ranks read; it is removed afterwards."""
    try:
        return tempfile.TemporaryDirectory(prefix=".replay-", dir=root)
    except OSError as error:
        raise ValueError(
            f"{root} cannot be written ({error.strerror}); a checkpoint for B belongs there"
        ) from error


def _saved(feed: "Feed", directory: Path) -> Path:
    place = directory / "checkpoint"
    feed.call("begin_save", place, b"")
    feed.call("finish_save")
    return place


if __name__ == "__main__":
    sys.exit(main())
