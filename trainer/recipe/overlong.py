"""The table `[overlong]` of a recipe: what becomes of episodes that are too long."""

from typing import Literal

from trainer.recipe.table import Table

EndingLimit = Literal["turns", "context", "wall_s", "format_errors", "sandbox"]
"""What may end an episode before the policy does, as in `pipeline.trajectory.Exhausted`."""


class OverlongRecipe(Table, frozen=True, kw_only=True):
    """What becomes of episodes that are too long, or about to be: [learning.md](learning.md). Rewards are never altered."""

    # Limits such as ["turns", "context", "wall_s"]: a trajectory that one of them ended is not trained, though its reward still counts in
    # the baseline of its group.
    filter: tuple[EndingLimit, ...] = ()
    # What is subtracted from the reward of a full context where advantages are computed; 0: nothing.
    penalty: float = 0.0
    # The penalty grows from 0 over the last so many tokens before rollout.limits.context_tokens.
    buffer_tokens: int = 4096
