"""`[[sources]]` of a recipe: what each says differently, what is refused, and what a resume may change."""

from pathlib import Path

import pytest

from pipeline.journal.reading import RECIPE as RECIPE_FILE
from trainer.recipe import differences, load_recipe, to_toml
from trainer.records import run_directory
from trainer.run import _resumed

RECIPE = """
name = "r"
model = "m"
num_steps = 3
[rollout]
group_size = 4
agent = "agent.yaml"
limits = { turns = 50, context_tokens = 8000, retries = { policy = { tries = 2 } } }
[batch]
groups_per_step = 2
[learner]
lr = 1e-6
micro_batch_tokens = 9000
"""
SOURCES = """
[[sources]]
name = "lang"
tasks = "lang.jsonl"
share = 2
limits = { turns = 7, retries = { grader = { tries = 9 } } }
[[sources]]
name = "tools"
tasks = "tools.jsonl"
share = 1
agent = ["tools.yaml", "agent.step_limit=5"]
group_size = 8
sampling.max_new_tokens = 100
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + SOURCES)
    return path


def test_what_a_source_does_not_give_is_as_in_the_table_rollout(path: Path) -> None:
    whole = load_recipe(path)
    lang, tools = whole.by_source["lang"], whole.by_source["tools"]
    assert (lang.tasks.train, tools.tasks.train) == (
        str(path.parent / "lang.jsonl"),
        str(path.parent / "tools.jsonl"),
    )
    assert (lang.rollout.agent, lang.rollout.group_size) == (str(path.parent / "agent.yaml"), 4)
    assert tools.rollout.agent == (str(path.parent / "tools.yaml"), "agent.step_limit=5")
    assert (tools.rollout.limits, tools.rollout.group_size) == (whole.rollout.limits, 8)
    assert (lang.rollout.limits.turns, lang.rollout.limits.context_tokens) == (7, 8000)
    retries = lang.rollout.limits.retries
    assert (retries.policy.tries, retries.grader.tries) == (2, 9)
    assert (lang.rollout.sampling.max_new_tokens, tools.rollout.sampling.max_new_tokens) == (4096, 100)


def test_a_recipe_without_sources_is_as_one_source_without_a_name(path: Path) -> None:
    path.write_text("tasks.train = 'train.jsonl'\n" + RECIPE)
    whole = load_recipe(path)
    assert whole.by_source == {"": whole}


def test_an_agent_of_its_own_plays_where_all_others_leave_it_to_a_program(path: Path) -> None:
    whole = load_recipe(path, ["rollout.harness=pi", "rollout.context.policy=stop"])
    assert {name: one.rollout.harness for name, one in whole.by_source.items()} == {"lang": "pi", "tools": ""}


def test_the_copy_in_the_runs_directory_loads_to_an_equal_recipe(path: Path) -> None:
    whole = load_recipe(path)
    copy = path.with_name("copy.toml")
    copy.write_text(to_toml(whole))
    assert load_recipe(copy) == whole
    assert differences(whole, load_recipe(copy)) == []


def test_an_override_names_a_source(path: Path) -> None:
    changed = load_recipe(path, ["sources.tools.share=3", "sources.lang.limits.turns=9"])
    assert differences(load_recipe(path), changed) == [
        "sources.lang.limits.turns: 7 -> 9",
        "sources.tools.share: 1.0 -> 3.0",
    ]


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("tasks.train=t.jsonl", "tasks.train and [[sources]]: both are given; one of the two must be given"),
        ("sources=[]", "tasks.train and [[sources]]: both are missing; one of the two must be given"),
        ("sources.lang.name=tools", 'sources.name: 2 sources have the name "tools"'),
        ("sources.lang.name=A", "it must be lower-case letters, digits, - and _, the first a letter"),
        ("sources.lang.share=0", "sources.share is 0; it must be a number above 0"),
        ("sources.lang.shar=1", "did you mean sources.share?"),
        ("sources.lang.limits.turns=0", "sources.lang.limits.turns is 0; it must be an integer of 1 or more"),
        ("sources.lang.limits.turn=3", "did you mean limits.turns?"),
        ("sources.tools.harness=pi", "sources.tools.agent and its harness are both given"),
        ("sources.lang.sampling.temperature=2", "sources.sampling.temperature is not a key"),
        ("sources.lang.limits.context_tokens=9001", "set it to rollout.limits.context_tokens = 9001 or more"),
        ("curriculum.max_group_size=7", "sources.tools, with [rollout] for the keys that it does not give: curriculum.max_group_size is 7"),
        ("sources.lang.group_size=1", "sources.lang, with [rollout] for the keys that it does not give: rollout.group_size is 1"),
        ("sources.other.share=1", "`sources` has no table with the name `other`"),
        ("sources.lang=1", "`sources` is a value, not a table"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_and_blamed_on_the_override(
    path: Path, override: str, complaint: str
) -> None:
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the text is compared below
        load_recipe(path, [override])
    assert str(refusal.value).startswith(f"--set {override}: ")
    assert complaint in str(refusal.value)


@pytest.fixture
def run(path: Path) -> Path:
    """The directory of a run with the recipe."""
    return run_directory.create(path.with_name("run"), "run", to_toml(load_recipe(path))).root


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("sources.lang.share=3", "sources.lang.share: 2.0 -> 3.0"),
        ("sources.lang.group_size=6", "sources.lang.group_size: None -> 6"),
        ("sources.lang.tasks=/other.jsonl", "sources.lang.tasks: .*lang.jsonl -> /other.jsonl"),
        ("sources.lang.name=slang", "sources.lang.name: lang -> None"),
    ],
)
def test_a_resumed_run_cannot_change_which_groups_come_next(
    path: Path, run: Path, override: str, change: str
) -> None:
    with pytest.raises(ValueError, match=f"a resumed run cannot change ({change})"):
        _resumed(load_recipe(path, [override]), run, None, {})


def test_a_resumed_run_cannot_publish_adapters_for_requests_that_expect_whole_weights(path: Path) -> None:
    adapted = ["learner.lora.rank=4"]
    run = run_directory.create(path.with_name("run"), "run", to_toml(load_recipe(path, adapted))).root
    with pytest.raises(ValueError, match=r'cannot change weights\.adapters: "?merged"? -> "?alone'):
        _resumed(load_recipe(path, [*adapted, "weights.adapters=alone"]), run, None, {})


def test_a_resumed_run_has_the_tasks_with_which_it_began(path: Path) -> None:
    recipe, digests = load_recipe(path), {"sources.lang.tasks": "a", "sources.tools.tasks": "b"}
    run = run_directory.create(path.with_name("run"), "run", to_toml(recipe), tasks=digests).root
    found, changes = _resumed(recipe, run, None, digests)
    assert (found.run_id, changes) == ("run", [])
    with pytest.raises(ValueError, match=r"^sources\.tools\.tasks: these are not the tasks with which"):
        _resumed(recipe, run, None, {**digests, "sources.tools.tasks": "c"})


def test_a_resumed_run_may_change_how_rollouts_of_a_source_are_played(
    path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = load_recipe(path, ["sources.lang.limits.turns=9", "sources.lang.harness=pi"])
    _resumed(changed, run, None, {})
    assert "changed since the run began: sources.lang.limits.turns: 7 -> 9" in capsys.readouterr().out
    assert load_recipe(run / RECIPE_FILE) == changed


def test_the_order_of_the_tables_says_nothing(path: Path, run: Path) -> None:
    first, second = SOURCES.split("[[sources]]")[1:]
    path.write_text(f"{RECIPE}[[sources]]{second}[[sources]]{first}")
    _resumed(load_recipe(path), run, None, {})
