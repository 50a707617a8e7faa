"""Episodes that are too long: the filter that leaves them out, and the soft penalty on the way there.

Both are of DAPO (arXiv 2503.14476); for agents the filter is known as compact filtering (DeepSWE). Both act before the learner, where
the field has them: the filter decides what a batch trains, the penalty shapes the reward before the baseline of the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.trajectory import TrajectoryHead
from trainer.batching.batch import Sample
from trainer.recipe import OverlongRecipe


@dataclass(frozen=True, slots=True)
class Overlong:
    """What a recipe says of long episodes."""

    recipe: OverlongRecipe
    context_tokens: int  # the limit of an episode's context

    def is_filtered(self, head: TrajectoryHead) -> bool:
        """Whether a limit ended the episode for which trajectories are not trained."""
        return head.outcome in {f"exhausted:{limit}" for limit in self.recipe.filter}

    def penalty(self, samples: Sequence[Sample]) -> float:
        """What is subtracted from the reward, by the longest context that the policy saw."""
        if not self.recipe.penalty:
            return 0.0
        longest = max((sample.num_tokens for sample in samples), default=0)
        beyond = longest - (self.context_tokens - self.recipe.buffer_tokens)
        return self.recipe.penalty * min(max(beyond / self.recipe.buffer_tokens, 0.0), 1.0)


ANY_LENGTH = Overlong(OverlongRecipe(), 0)
"""No episode is too long."""
