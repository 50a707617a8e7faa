"""Every key of a recipe of kind "sft": supervised fine-tuning on rows of a file. Tables that both kinds have are in `schema.py`.

The comments are written for users, as there.
"""

from typing import Literal

import msgspec

from pipeline.message import Count, PositiveCount
from trainer.learner.config import LearnerConfig, LossConfig
from trainer.recipe.schema import (
    ChatRecipe,
    CheckpointRecipe,
    PathText,
    RunName,
    SinksRecipe,
    Table,
)


class DataRecipe(Table, frozen=True, kw_only=True):
    """Rows to imitate, JSON lines: [imitation.md](imitation.md) describes a row."""

    # Files of rows to train on, such as the sft.jsonl of `python -m trainer.rollouts export --format sft`.
    train: tuple[PathText, ...]
    heldout: tuple[PathText, ...] = ()  # files of rows to measure the loss on
    # Number of tokens beyond which a sample of a row is too long; learner.micro_batch_tokens by default.
    max_tokens: PositiveCount | None = None
    # Treatment of rows that are too long. "refuse": the run does not begin. "leave_out": they are left out, counted and reported.
    too_long: Literal["refuse", "leave_out"] = "refuse"

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train is empty; give one file of rows at least")


class ImitationBatchRecipe(Table, frozen=True, kw_only=True):
    """Rows that an optimizer step takes. Their order is drawn anew in each epoch, by seed and epoch alone."""

    rows_per_step: PositiveCount  # number of rows that one optimizer step trains


class HeldoutLossRecipe(Table, frozen=True, kw_only=True):
    """Measurements of the loss on held-out rows, and of the share of their tokens that greedy decoding gives."""

    # Steps from one measurement to the next; 0 measures only as before and after say.
    every_steps: Count = 0
    before: bool = True  # measure the starting weights
    after: bool = True  # measure the last weights


class ImitationLoss(LossConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss that a step minimises: the mean of -log(pi) over the trained tokens, unless `aggregation` or an addition is set."""

    kind: Literal["sft"] = "sft"  # name of the objective


class ImitationLearner(LearnerConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Optimizer, schedule, memory and layout."""

    loss: ImitationLoss = msgspec.field(default_factory=ImitationLoss)


class ImitationRecipe(Table, frozen=True, kw_only=True):
    """Keys of the run as a whole. Relative paths are relative to the recipe's own directory."""

    kind: Literal["sft"]  # kind of the recipe: "sft" trains on rows
    name: RunName  # first part of the run's id
    model: PathText  # directory of the starting policy, in the format of Hugging Face
    data: DataRecipe
    batch: ImitationBatchRecipe
    learner: ImitationLearner
    num_steps: PositiveCount | None = None  # number of optimizer steps of the run; give this or num_epochs
    # Number of times that every row is trained; give this or num_steps. The last step may have fewer rows than the others, and a resume
    # with more epochs leaves out the rows that it was short of.
    num_epochs: PositiveCount | None = None
    seed: Count = 0  # seed of the order of the rows
    chat: ChatRecipe = ChatRecipe()
    evaluation: HeldoutLossRecipe = HeldoutLossRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    sinks: SinksRecipe = SinksRecipe()

    @property
    def max_tokens(self) -> int:
        return self.data.max_tokens or self.learner.micro_batch_tokens
