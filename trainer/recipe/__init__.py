"""What a run is to be: one TOML file, in which every key is checked.

A recipe holds the experiment; where the machine's services are is read from the environment (`trainer/settings.py`).
"""

from trainer.recipe.loading import differences, load_recipe, to_toml
from trainer.recipe.schema import (
    AdmissionRecipe,
    AdvantageKind,
    BatchRecipe,
    CheckpointRecipe,
    EvaluationRecipe,
    GradingRecipe,
    LimitsRecipe,
    PauseMode,
    Recipe,
    Rollout,
    RolloutsRecipe,
    SamplingRecipe,
    Stragglers,
    TaskFiles,
    Unverified,
    WeightsRecipe,
)

__all__ = [
    "AdmissionRecipe",
    "AdvantageKind",
    "BatchRecipe",
    "CheckpointRecipe",
    "EvaluationRecipe",
    "GradingRecipe",
    "LimitsRecipe",
    "PauseMode",
    "Recipe",
    "Rollout",
    "RolloutsRecipe",
    "SamplingRecipe",
    "Stragglers",
    "TaskFiles",
    "Unverified",
    "WeightsRecipe",
    "differences",
    "load_recipe",
    "to_toml",
]
