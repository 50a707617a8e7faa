"""What a run left in its directory, as far as a replay needs it: rows of steps, rollouts, checkpoints. Needs neither Redis nor torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline.rollout_store.reading import DIRECTORY, RolloutStore
from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Batch, Sample
from trainer.batching.collate import make_batch
from trainer.batching.overlong import Overlong
from trainer.batching.provenance import AlteredReply
from trainer.batching.samples import samples_of
from trainer.learner.architecture import read_architecture
from trainer.loop.checkpoints import Checkpoints
from trainer.recipe import AdvantageKind, CreditRecipe, Recipe, load_recipe
from trainer.records import run_directory
from trainer.records.journal import Fate, StepRow, journal_of, read
from trainer.records.judgement_row import JudgementRow
from trainer.records.run_directory import RECIPE, RUN_FILE


@dataclass(frozen=True, slots=True)
class KeptMember:
    """A valid member of a group. `is_trained`: the step trained it; otherwise its reward counts in the baseline only."""

    head: TrajectoryHead
    samples: tuple[Sample, ...]
    is_trained: bool
    scores: Mapping[int, float] | None = None

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
    """One run. Its directory is only read."""

    def __init__(self, root: Path) -> None:
        """Raises ValueError if `root` holds no run that has taken a step."""
        if not (root / RUN_FILE).exists():
            raise ValueError(f"{root} holds no run: give the directory of one, as in runs/demo")
        self.root = run_directory.find(root).root
        self.recipe: Recipe = load_recipe(self.root / RECIPE)
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
        """Steps that the run has taken."""
        return max(self._rows)

    def row(self, step: int) -> StepRow:
        """Raises ValueError if the run has not taken the step."""
        if step not in self._rows:
            raise ValueError(f"{self.root} holds no step {step}: it has taken {self.num_steps}")
        return self._rows[step]

    def checkpoint_before(self, step: int) -> tuple[int, Path | None]:
        """The newest checkpoint before `step`, with its own step; 0 and None: the starting weights."""
        checkpoints = Checkpoints(self.root / "checkpoints", keep=self.recipe.checkpoint.keep)
        return checkpoints.before(step)

    def batch(self, step: int, advantage: AdvantageKind, credit: CreditRecipe) -> Batch:
        """What the step trained, with advantages of this kind and credit by the scores that it had.

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
            overlong=Overlong(self.recipe.overlong, self.recipe.rollout.limits.context_tokens),
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
        return KeptMember(stored.head.head, samples, is_trained, self._scores.get(request_id))
