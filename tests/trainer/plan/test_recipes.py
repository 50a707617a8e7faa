"""The recipes that are shipped for GPUs fit their machines, by the plan."""

from pathlib import Path

import pytest

from trainer.plan.__main__ import describe, faults
from trainer.plan.planning import make_plan
from trainer.recipe import Recipe, load_any_recipe, load_recipe

PLANNED = [
    path
    for path in sorted(Path("trainer/recipes").glob("*.toml"))
    if isinstance(recipe := load_any_recipe(path), Recipe) and recipe.plan.gpus
]


def test_there_are_recipes_for_gpus() -> None:
    assert len(PLANNED) == 13


@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_every_recipe_for_gpus_fits_its_machines(path: Path) -> None:
    plan = make_plan(load_recipe(path))
    assert faults(plan) == ""
    assert plan.fleet is not None


def test_the_judge_of_a_recipe_has_gpus_and_the_plan_says_what_it_has_to_do() -> None:
    path = Path("trainer/recipes/qwen3_8b_judge_5node.toml")
    (line,) = (
        line for line in describe(make_plan(load_recipe(path))).splitlines() if line.startswith("judge")
    )
    # 32 groups of 8 episodes, which have half of the 50 turns that they may have.
    assert line.startswith(
        "judge: Qwen3-8B: 6,400 turns a step, 3 votes on each; at most 52,428,800 prompt tokens"
    )
    assert line.endswith("on the 8 reserved GPUs")
    without = make_plan(load_recipe(path, ["plan.reserved_gpus=0"]))
    assert "raise plan.reserved_gpus" in describe(without)
    assert "judge" not in describe(make_plan(load_recipe(path, ["judge.method=rule", "judge.name=commands"])))


@pytest.mark.parametrize(
    ("path", "context_tokens", "num_learner", "gib"),
    [("qwen3_8b_2node", 32768, 8, 80), ("qwen3_32b_8node", 32768, 32, 80)],
)
def test_contexts_of_32k_fit_gpus_of_80_gb(
    path: str, context_tokens: int, num_learner: int, gib: int
) -> None:
    plan = make_plan(load_recipe(Path("trainer/recipes") / f"{path}.toml"))
    assert plan.recipe.rollout.limits.context_tokens == context_tokens
    assert plan.recipe.learner.micro_batch_tokens >= context_tokens
    assert plan.gpus.learner.count == num_learner
    assert plan.gpus.learner.device.memory_bytes < gib * 2**30
    assert plan.rank.gpu_bytes < plan.usable_gpu_bytes
