"""Recipes: what is refused, and how it is said."""

import re
from pathlib import Path

import pytest

from pipeline.agent.config import load_agent
from trainer.recipe import differences, load_recipe, to_toml
from trainer.recipe.reference import meanings, reference
from trainer.recipe.schema import Recipe, Rollout

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


CONTROLLED = "admission={staleness='controlled', control={%s}}"


@pytest.fixture
def minimal(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(MINIMAL)
    return path


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_loads(path: Path) -> None:
    assert load_recipe(path).name


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_that_is_shipped_names_an_agent_that_is_shipped(path: Path) -> None:
    assert load_agent(Path(load_recipe(path).rollout.agent_specs[0]).read_text())


def test_the_template_for_own_tasks_marks_exactly_what_is_not_shipped() -> None:
    text = (RECIPES / "own_tasks.toml").read_text()
    recipe = load_recipe(RECIPES / "own_tasks.toml")
    for path in (recipe.model, recipe.tasks.train, recipe.tasks.heldout):
        assert not Path(path).exists()
    paths = [line for line in text.splitlines() if " = " in line and '"../' in line.partition("#")[0]]
    to_fill_in = [line.split()[0] for line in paths if "# FILL IN: " in line]
    assert to_fill_in == ["model", "train", "heldout"]
    assert [line.split()[0] for line in paths if line.split()[0] not in to_fill_in] == ["agent"]


def test_the_reference_of_keys_is_up_to_date() -> None:
    made = "made by `python -m trainer.recipe --reference > docs/recipe.md`"
    assert Path("docs/recipe.md").read_text() == reference(), f"docs/recipe.md is {made}: do so"


def test_every_key_has_a_meaning_in_the_reference() -> None:
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert len(rows) > 80
    assert [row for row in rows if not row.rstrip("| ").rpartition("|")[2].strip()] == []
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_reference_gives_a_keys_type_default_unit_and_comment() -> None:
    rows = reference().splitlines()
    assert any(row.startswith("| `group_size` | integer |  |  | Rollouts of one task") for row in rows)
    assert any(
        row.startswith("| `queue_s` | number | *none* | s | How long a group may wait") for row in rows
    )
    assert any(row.startswith('| `dtype` | `"fp32"`, `"bf16"` | `"bf16"` |') for row in rows)
    assert "## `[rollout.limits.retries.grader]`" in rows
    assert (
        "| `tries` | integer | `3` |  | With this many failures" in reference().partition("retries.grader")[2]
    )


def test_a_meaning_may_stand_above_its_field_in_several_lines() -> None:
    meaning = meanings(Rollout)["group_deadline_s"]
    assert meaning.startswith("Time from a group's first claim")
    assert meaning.endswith("limits.wall_s + limits.grade_wall_s.")
    assert meanings(Recipe)["name"] == "The first part of the run's id"


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
        ("rollout.context.head_share=1.5", "rollout.context.head_share"),
        ("rollout.context.refill_to=0", "rollout.context.refill_to"),
        ("rollout.context.policy=end", "Invalid enum value 'end'"),
        ("rollout.context={policy='stop', refill_to=0.5}", "refill_to is 0.5, which has no effect"),
        ("rollout.context={policy='stop', thinking='strip_on_cut'}", 'thinking is "strip_on_cut", which has'),
        ("batch.min_valid_members=5", "must lie between 2 and rollout.group_size = 4"),
        ("learner.snapshots_kept=3", "set it to 6"),
        ("learner.lr=0", "learner.lr must be above 0"),
        ("evaluation.episodes=4", "tasks.heldout is missing"),
        ("tasks.unverified=ignore", "Invalid enum value 'ignore'"),
        ("weights.pause=freeze", "Invalid enum value 'freeze'"),
        ("weights={transport='delta', engines='none'}", 'has no effect with weights.engines = "none"'),
        ("weights={transport='delta', receiver_port=70000}", "a port lies between 1 and 65535"),
        ("weights.receiver_port=30301", 'of use with weights.transport = "delta" only'),
        ('rollouts.keep="some"', "rollouts.keep"),
        (
            "rollouts.keep=1.5",
            'rollouts.keep is 1.5; it must be "all", "none", or a share above 0 and below 1',
        ),
        ("credit.coefficient=-0.1", "credit.coefficient is -0.1; it weighs"),
        ("credit.coefficient=0.2", 'has no effect with credit.method = "outcome"'),
        ("credit.method=outcome_then_steps", 'because judge.method is "none"'),
        ("overlong.penalty=-1", "overlong.penalty is -1; it is subtracted"),
        ("overlong={penalty=1, buffer_tokens=9000}", "between 1 and rollout.limits.context_tokens = 8000"),
        ("overlong.buffer_tokens=7", "of use with overlong.penalty only"),
        ("overlong.filter=['length']", "Invalid enum value 'length'"),
        ("learner.loss.kind=ppo", "Invalid enum value 'ppo'"),
        ("learner.loss={kind='cispo', objective='my.py:f'}", "remove one of the two"),
        ("admission.staleness=adaptive", "Invalid enum value 'adaptive'"),
        (
            "admission.control.max_behaviour_kl=0.2",
            'has no effect with admission.staleness = "fixed": set that to "controlled", or remove it',
        ),
        (CONTROLLED % "most_versions=9", "set it to admission.max_lag_versions = 4 at most"),
        (CONTROLLED % "least_versions=5", "it must lie between 0 and most_versions = 4"),
        (CONTROLLED % "min_ess_share=1.5", "admission.control.min_ess_share is 1.5; it is a share of tokens"),
        (CONTROLLED % "max_masked_share=0", "admission.control.max_masked_share is 0; it is a share"),
        (CONTROLLED % "max_behaviour_kl=0", "admission.control.max_behaviour_kl is 0; it must be above 0"),
        (CONTROLLED % "patience_steps=0", "admission.control.patience_steps is 0; it must be 1 or more"),
        ("admission={max_lag_versions=40, staleness='controlled'}", "lags above 30 are not told apart"),
        ("rollouts.max_bytes=1000", "rollouts.max_bytes is 1000; it must be 1048576 or more"),
    ],
)
def test_a_mistake_is_refused_by_name_and_with_the_fix(minimal: Path, override: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        load_recipe(minimal, [override])


def test_step_wise_credit_needs_a_baseline_that_divides_by_deviations(minimal: Path) -> None:
    judged = ["judge={method='rule', name='commands'}", "credit.method=step_wise"]
    with pytest.raises(ValueError, match=re.escape('set batch.advantage = "group_mean_std"')):
        load_recipe(minimal, judged)
    assert load_recipe(minimal, [*judged, "batch.advantage=group_mean_std"]).credit.coefficient == 0.1


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
    own = load_recipe(minimal, ["learner.loss.objective=my.py:name"])
    assert own.learner.loss.objective == f"{minimal.parent}/my.py:name"


def test_the_resolved_copy_loads_to_an_equal_recipe(minimal: Path, tmp_path: Path) -> None:
    loss = "learner.loss={objective='my.py:f', geometric_mask=[0.5, 2.0], clip_low=0.1}"
    recipe = load_recipe(minimal, [loss, 'name="quo\\"te \\\\ ü"', "learner.train_only=['.mlp.', '.attn.']"])
    copy = tmp_path / "resolved.toml"
    copy.write_text(to_toml(recipe))
    assert load_recipe(copy) == recipe
    assert "top_p = 1.0" in copy.read_text(), "defaults are spelled out"


def test_half_the_group_must_be_valid_unless_said_otherwise(minimal: Path) -> None:
    assert load_recipe(minimal).min_valid_members == 2
    assert load_recipe(minimal, ["rollout.group_size=7"]).min_valid_members == 4
    assert load_recipe(minimal, ["batch.min_valid_members=3"]).min_valid_members == 3


def test_a_full_context_is_cut_unless_the_recipe_says_stop(minimal: Path) -> None:
    assert load_recipe(minimal).rollout.context.policy == "head_tail"
    stopping = load_recipe(minimal, ["rollout.context={policy='stop', thinking='strip'}"])
    assert (stopping.rollout.context.policy, stopping.rollout.context.thinking) == ("stop", "strip")


def test_differences_are_listed_by_key(minimal: Path) -> None:
    assert differences(load_recipe(minimal), load_recipe(minimal, ["learner.lr=2e-6"])) == [
        "learner.lr: 1e-06 -> 2e-06"
    ]
