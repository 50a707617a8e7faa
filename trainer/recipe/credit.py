"""The table `[credit]` of a recipe: how rewards and the judge's scores become advantages per token."""

from typing import Literal

from trainer.recipe.table import Table

CreditMethod = Literal["outcome", "outcome_plus_mean", "step_wise", "outcome_then_steps"]


class CreditRecipe(Table, frozen=True, kw_only=True):
    """How the scores of a judge move advantages: [judge.md](judge.md) has the formulas. Rewards are never altered."""

    # outcome: scores are recorded and not trained. outcome_plus_mean: the mean score of a trajectory is added to its outcome.
    # step_wise: each turn is compared with the same turn of the other members. outcome_then_steps: scores move credit between the
    # turns of a trajectory and leave its total as it is.
    method: CreditMethod = "outcome"
    # The weight of the scores; at 0 every method is the same as "outcome", bit for bit.
    coefficient: float = 0.1
