"""Tasks that nobody has seen judged rightly are refused, unless the recipe says otherwise."""

import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.scripted_fleet import task
from pipeline.task import Task
from pipeline.taskfile import Verification, fingerprint, verified_path, write_tasks, write_verified
from trainer.inputs import describe, read_inputs
from trainer.recipe import Recipe, load_recipe

RECIPE = """
name = "r"
model = "{model}"
num_steps = 3
[tasks]
train = "train.jsonl"
heldout = "heldout.jsonl"
[rollout]
group_size = 4
agent = "agent.yaml"
[rollout.limits]
context_tokens = 128
[rollout.sampling]
max_new_tokens = 16
[batch]
groups_per_step = 2
[learner]
lr = 1e-6
micro_batch_tokens = 128
"""
TRAIN = [task("t0"), task("t1")]
HELDOUT = [task("h0")]


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(Path("trainer/recipes/demo_agent.yaml").read_text())
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model))
    write_tasks(tmp_path / "train.jsonl", TRAIN)
    write_tasks(tmp_path / "heldout.jsonl", HELDOUT)
    return tmp_path


def recipe(place: Path, unverified: str = "refuse") -> Recipe:
    return load_recipe(place / "recipe.toml", [f"tasks.unverified={unverified}"])


def verified(one: Task, *, reason: str = "") -> Verification:
    return Verification(
        task=one.id,
        fingerprint=fingerprint(one),
        states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 0 if reason else 1},
        ok=not reason,
        reason=reason,
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=1.0,
    )


def write(place: Path, name: str, *verifications: Verification) -> None:
    write_verified(verified_path(place / name), verifications)


def test_verified_tasks_are_taken_and_the_plan_says_so(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    write(place, "heldout.jsonl", *map(verified, HELDOUT))
    inputs = read_inputs(recipe(place))
    assert (inputs.num_unverified, inputs.train, inputs.heldout) == (0, TRAIN, HELDOUT)
    assert "1 held out; all verified" in describe(recipe(place), inputs)


def test_a_run_without_held_out_tasks_asks_for_no_verification_of_them(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    (place / "recipe.toml").write_text(
        (place / "recipe.toml").read_text().replace('heldout = "heldout.jsonl"', "")
    )
    assert read_inputs(recipe(place)).heldout == []


@pytest.mark.parametrize(
    ("known", "doubt"),
    [
        ([], "2 of the 2 tasks in {path} are not verified; the first, t0, was never verified"),
        ([verified(TRAIN[0])], "1 of the 2 tasks in {path} are not verified; the first, t1, was never"),
        (
            [verified(TRAIN[0]), verified(replace(TRAIN[1], problem="Else."))],
            "the first, t1, has changed since it was verified",
        ),
        (
            [verified(TRAIN[0], reason="gold: flaky"), verified(TRAIN[1])],
            "the first, t0, was found wrong (gold: flaky)",
        ),
    ],
)
def test_other_training_tasks_are_refused_with_what_to_do(
    place: Path, known: list[Verification], doubt: str
) -> None:
    write(place, "train.jsonl", *known)
    path = place / "train.jsonl"
    for unverified in ("refuse", "heldout"):
        with pytest.raises(ValueError, match=re.escape(doubt.format(path=path))) as refusal:
            read_inputs(recipe(place, unverified))
        assert str(refusal.value).startswith("tasks.train: ")
        assert f"`python -m workers.verify {path}`" in str(refusal.value)


def test_held_out_tasks_may_be_let_through_alone(place: Path) -> None:
    write(place, "train.jsonl", *map(verified, TRAIN))
    with pytest.raises(ValueError, match=r"tasks\.heldout: 1 of the 1 .* to 'heldout' or 'allow'"):
        read_inputs(recipe(place))
    assert read_inputs(recipe(place, "heldout")).num_unverified == 1


def test_everything_may_be_let_through_and_the_plan_says_so(place: Path) -> None:
    inputs = read_inputs(recipe(place, "allow"))
    assert inputs.num_unverified == 3
    assert '3 not verified, as tasks.unverified = "allow" allows' in describe(recipe(place, "allow"), inputs)
