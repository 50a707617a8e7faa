"""What a run is to be: one TOML file, in which every key is checked.

A recipe holds the experiment; where the machine's services are is read from the environment (`trainer/settings.py`).
"""

from trainer.recipe.alarms import AlarmsRecipe
from trainer.recipe.credit import CreditMethod, CreditRecipe
from trainer.recipe.judging import JudgeEndpointRecipe, JudgeRecipe
from trainer.recipe.loading import differences, load_recipe, to_toml
from trainer.recipe.overlong import OverlongRecipe
from trainer.recipe.schema import (
    AdmissionRecipe,
    AdvantageKind,
    AuditRecipe,
    BatchRecipe,
    CheckpointRecipe,
    EvaluationRecipe,
    GradingRecipe,
    LimitsRecipe,
    PauseMode,
    PlanRecipe,
    Recipe,
    Rollout,
    RolloutsRecipe,
    SamplingRecipe,
    StalenessRecipe,
    Stragglers,
    TaskFiles,
    Unverified,
    WeightsRecipe,
)
from trainer.recipe.sinks import MlflowRecipe, SinksRecipe, WandbRecipe

__all__ = [
    "AdmissionRecipe",
    "AdvantageKind",
    "AlarmsRecipe",
    "AuditRecipe",
    "BatchRecipe",
    "CheckpointRecipe",
    "CreditMethod",
    "CreditRecipe",
    "EvaluationRecipe",
    "GradingRecipe",
    "JudgeEndpointRecipe",
    "JudgeRecipe",
    "LimitsRecipe",
    "MlflowRecipe",
    "OverlongRecipe",
    "PauseMode",
    "PlanRecipe",
    "Recipe",
    "Rollout",
    "RolloutsRecipe",
    "SamplingRecipe",
    "SinksRecipe",
    "StalenessRecipe",
    "Stragglers",
    "TaskFiles",
    "Unverified",
    "WandbRecipe",
    "WeightsRecipe",
    "differences",
    "load_recipe",
    "to_toml",
]
