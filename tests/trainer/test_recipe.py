"""Recipes: what is refused, and how it is said."""

import re
from pathlib import Path

import pytest

from trainer.recipe import differences, load_recipe, to_toml

RECIPES = Path("trainer/recipes")

MINIMAL = """
name = "r"
model = "policy"
num_steps = 3
[tasks]
train = "tasks.jsonl"
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.limits]
context_tokens = 8000
[batch]
groups_per_step = 2
[learner]
lr = 1e-6
"""


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_loads(path: Path) -> None:
    assert load_recipe(path).name


def test_an_unknown_key_is_refused_with_its_path(minimal: Path) -> None:
    minimal.write_text(MINIMAL + "lrr = 1e-6\n")
    with pytest.raises(ValueError, match=r"unknown field `lrr` - at `\$\.learner`"):
        load_recipe(minimal)


def test_an_unknown_key_among_the_limits_is_refused_though_messages_accept_them(minimal: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown field `turn` - at `\$\.rollout\.limits`"):
        load_recipe(minimal, ["rollout.limits.turn=3"])


def test_an_override_reads_as_toml_and_else_as_text(minimal: Path) -> None:
    recipe = load_recipe(
        minimal, ["learner.lr=2e-6", "name=other", "weights.engines=none", "learner.betas=[0.8, 0.9]"]
    )
    assert recipe.learner.lr == 2e-6
    assert recipe.name == "other"
    assert recipe.weights.engines == "none"
    assert recipe.learner.betas == (0.8, 0.9)


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("learner.lrr=1", "unknown field `lrr`"),
        ("learner=1", "learner"),
        ("learner.lr.x=1", "`lr` is a value, not a table"),
        ("learner.lr", "write it as table.key=value"),
        ("num_steps=0", "num_steps is 0"),
        ("rollout.group_size=1", "group_size is 1; a baseline needs 2"),
        ("rollout.sampling.top_p=0.9", "training needs top_p = 1 and no top_k"),
        ("rollout.sampling.top_k=50", "training needs top_p = 1 and no top_k"),
        ("rollout.sampling.temperature=0", "temperature must be above 0"),
        ("rollout.sampling.max_new_tokens=8000", "below rollout.limits.context_tokens = 8000"),
        ("rollout.limits.wall_s=0", "rollout.limits.wall_s is 0"),
        ("rollout.limits.context_tokens=9000", "set it to rollout.limits.context_tokens = 9000 or more"),
        ("batch.min_valid_members=5", "must lie between 2 and rollout.group_size = 4"),
        ("learner.snapshots_kept=3", "set it to 6"),
        ("learner.lr=0", "learner.lr must be above 0"),
        ("evaluation.episodes=4", "tasks.heldout is missing"),
        ("tasks.unverified=ignore", "Invalid enum value 'ignore'"),
        ("weights.pause=freeze", "Invalid enum value 'freeze'"),
    ],
)
def test_a_mistake_is_refused_by_name_and_with_the_fix(minimal: Path, override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_recipe(minimal, [override])


def test_a_missing_file_and_broken_toml_are_named(minimal: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        load_recipe(minimal.with_name("absent.toml"))
    minimal.write_text("name = ")
    with pytest.raises(ValueError, match="not TOML"):
        load_recipe(minimal)


def test_paths_are_meant_from_the_recipes_own_directory(minimal: Path) -> None:
    recipe = load_recipe(minimal)
    assert recipe.model == str(minimal.parent / "policy")
    assert recipe.tasks.train == str(minimal.parent / "tasks.jsonl")
    assert recipe.tasks.heldout == "", "what is absent stays so"


def test_the_resolved_copy_loads_to_an_equal_recipe(minimal: Path, tmp_path: Path) -> None:
    recipe = load_recipe(minimal, ['name="quo\\"te \\\\ ü"', "learner.train_only=['.mlp.', '.attn.']"])
    copy = tmp_path / "resolved.toml"
    copy.write_text(to_toml(recipe))
    assert load_recipe(copy) == recipe
    assert "top_p = 1.0" in copy.read_text(), "defaults are spelled out"


def test_half_the_group_must_be_valid_unless_said_otherwise(minimal: Path) -> None:
    assert load_recipe(minimal).min_valid_members == 2
    assert load_recipe(minimal, ["rollout.group_size=7"]).min_valid_members == 4
    assert load_recipe(minimal, ["batch.min_valid_members=3"]).min_valid_members == 3


def test_differences_are_listed_by_key(minimal: Path) -> None:
    assert differences(load_recipe(minimal), load_recipe(minimal, ["learner.lr=2e-6"])) == [
        "learner.lr: 1e-06 -> 2e-06"
    ]
