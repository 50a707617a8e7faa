"""The agent that a recipe names is read, merged and tried before anything is enqueued, and the plan says what does not hold."""

import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from benchmarks.scripted_fleet import task
from pipeline.agent.config import load_agent
from pipeline.taskfile import write_tasks
from tests.trainer.test_inputs import RECIPE
from trainer.agent_file import agent_warnings, check_deadline, example_words
from trainer.inputs import describe, read_inputs
from trainer.recipe import Recipe, load_recipe, to_toml

AGENT = Path("trainer/recipes/demo_agent.yaml")


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "agent.yaml").write_text(AGENT.read_text().replace("cwd: /workspace", "cwd: /w"))
    (tmp_path / "recipe.toml").write_text(RECIPE.format(model=tiny_model))
    write_tasks(tmp_path / "train.jsonl", [task("t0", problem="it {{fails}}"), task("t1")])
    write_tasks(tmp_path / "heldout.jsonl", [task("h0")])
    return tmp_path


def recipe(place: Path, *overrides: str) -> Recipe:
    return load_recipe(place / "recipe.toml", ["tasks.unverified=allow", *overrides])


def warnings(chosen: Recipe) -> list[str]:
    inputs = read_inputs(chosen)
    return list(agent_warnings(chosen, inputs.agent_config, inputs.train))


def test_several_files_and_values_are_merged_in_the_order_of_the_recipe(place: Path) -> None:
    (place / "more.yaml").write_text("agent: {step_limit: 5}\nenvironment: {timeout: 7}\n")
    chosen = recipe(place, 'rollout.agent=["agent.yaml", "more.yaml", "agent.step_limit=6"]')
    agent = load_agent(read_inputs(chosen).agent_config)
    assert (agent.step_limit, agent.command_s, agent.exact) == (6, 7, False)
    again = place / "again.toml"
    again.write_text(to_toml(chosen))
    assert load_recipe(again) == chosen


def test_exact_is_a_key_of_the_recipe(place: Path) -> None:
    agent = load_agent(read_inputs(recipe(place, "rollout.exact=true")).agent_config)
    assert agent.exact
    assert agent.interpreter == ("/bin/sh", "-c"), "as upstream without a container"


def test_what_travels_holds_facts_of_this_machine(place: Path) -> None:
    tree = yaml.safe_load(read_inputs(recipe(place)).agent_config)
    assert tree["swerve"]["facts"]["system"] == "Linux"


def test_the_plan_names_the_version_and_the_keys_without_effect(place: Path) -> None:
    chosen = recipe(place)
    plan = describe(chosen, read_inputs(chosen))
    assert "agent: as mini-swe-agent 1.17 reads it" in plan
    assert "without effect here: agent.cost_limit, environment.cwd" in plan
    assert "warning" not in plan


def test_a_prompt_that_names_another_directory_than_the_tasks_is_warned_of(place: Path) -> None:
    agent = place / "agent.yaml"
    agent.write_text(
        agent.read_text().replace("ISSUE:", "The repository is in /testbed/src. See </testbed> ISSUE:")
    )
    (warning,) = warnings(recipe(place))
    assert "the prompt names the directory /testbed, but task t0 is in /w" in warning


def test_a_directory_of_the_file_other_than_the_tasks_is_warned_of(place: Path) -> None:
    (warning,) = warnings(recipe(place, 'rollout.agent=["agent.yaml", "environment.cwd=/testbed"]'))
    assert warning == "environment.cwd is /testbed, the directory of task t0 is /w: commands start in /w"


def test_sampling_of_the_file_that_the_recipe_overrides_is_warned_of(place: Path) -> None:
    (warning,) = warnings(recipe(place, 'rollout.agent=["agent.yaml", "model.model_kwargs.temperature=0.0"]'))
    assert "model.model_kwargs.temperature = 0 of the agent's file has no effect" in warning


def test_an_example_shows_the_opening_of_the_first_task(place: Path) -> None:
    chosen = recipe(place)
    inputs = read_inputs(chosen)
    shown = example_words(inputs.agent_config, inputs.train[0], chosen)
    assert "example: the opening of task t0" in shown
    assert "You mend small Python repositories." in shown
    assert "ISSUE: it {{fails}}" in shown


def test_an_opening_that_leaves_no_room_for_a_reply_is_refused(place: Path) -> None:
    write_tasks(place / "train.jsonl", [task("t0"), task("long", problem="word " * 1000)])
    with pytest.raises(ValueError, match=r"the opening of task long has \d+ tokens, but only 496 are left"):
        read_inputs(recipe(place))


def test_a_template_that_fails_on_one_task_is_refused_before_the_run(place: Path) -> None:
    agent = place / "agent.yaml"
    agent.write_text(agent.read_text().replace("{{task}}", "{{ 1 // (task | length - 1) }}"))
    with pytest.raises(
        ValueError, match=r"rollout\.agent: .*agent\.yaml: agent config: agent\.instance_template: integer"
    ):
        read_inputs(recipe(place))


def test_tool_calls_need_a_chat_template_that_has_them(place: Path, tiny_model: Path) -> None:
    model = place / "model"
    model.mkdir()
    for file in tiny_model.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "agent.yaml").write_text('agent: {system_template: "s", instance_template: "{{task}}"}\n')
    with pytest.raises(ValueError, match="does not describe the agent"):
        read_inputs(recipe(place, f"model={model}"))


@pytest.mark.parametrize("agent", ['["agent.step_limit=3"]', "[]"])
def test_values_without_a_file_are_refused(place: Path, agent: str) -> None:
    with pytest.raises(ValueError, match=r"rollout\.agent names no file"):
        recipe(place, f"rollout.agent={agent}")


def test_a_group_that_closes_before_its_longest_episodes_may_end_is_refused(place: Path) -> None:
    limits = ("rollout.limits.wall_s=600", "rollout.limits.grade_wall_s=300")
    text = read_inputs(recipe(place, *limits)).agent_config
    check_deadline(recipe(place, *limits), text)
    with pytest.raises(
        ValueError,
        match=r"^rollout\.group_deadline_s is 599, .* 600 s \(rollout\.limits\.wall_s\).* raise it to 900",
    ):
        check_deadline(recipe(place, *limits, "rollout.group_deadline_s=599"), text)


def test_a_group_that_closes_before_grading_may_end_is_warned_of(place: Path) -> None:
    limits = ("rollout.limits.wall_s=600", "rollout.limits.grade_wall_s=300")
    late = [
        one for one in warnings(recipe(place, *limits, "rollout.group_deadline_s=899")) if "deadline" in one
    ]
    assert len(late) == 1
    assert "be graded for 300 s (rollout.limits.grade_wall_s)" in late[0]
    assert "set it to 900, or lower a limit" in late[0]
    for enough in (("rollout.group_deadline_s=900",), ()):
        assert not any("deadline" in one for one in warnings(recipe(place, *limits, *enough)))


def test_the_wall_limit_of_the_agents_file_counts_where_it_is_the_shorter_one(place: Path) -> None:
    file = 'rollout.agent=["agent.yaml", "agent.wall_time_limit_seconds=100"]'
    chosen = recipe(place, file, "rollout.group_deadline_s=99")
    with pytest.raises(ValueError, match=r"100 s \(agent\.wall_time_limit_seconds of the agent's file\)"):
        check_deadline(chosen, read_inputs(chosen).agent_config)
    check_deadline(recipe(place, file, "rollout.group_deadline_s=100"), read_inputs(chosen).agent_config)


def tool_calling(place: Path) -> str:
    """A chat template that knows tools, as a value of the recipe."""
    source = Path("tests/chat_templates/Qwen-Qwen3-0.6B.jinja")
    (place / "tools.jinja").write_text(source.read_text())
    return "chat.template=tools.jinja"


PROGRAM = (
    "rollout.harness=pi",
    "rollout.context.policy=stop",
    "rollout.limits.context_tokens=8192",
    "learner.micro_batch_tokens=8192",
)


def test_the_plan_names_the_program_that_plays_and_tries_no_agent_file(place: Path) -> None:
    write_tasks(place / "train.jsonl", [task("t0"), task("long", problem="word " * 1000)])
    chosen = recipe(place, *PROGRAM, tool_calling(place))
    inputs = read_inputs(chosen)
    assert inputs.harness is not None
    plan = describe(chosen, inputs)
    assert "program: pi 0.73.1 plays, and rollout.agent has no effect" in plan
    assert "tool calls as hermes" in plan
    assert "example: the problem of task t0\nit {{fails}}" in example_words(
        inputs.agent_config, replace(inputs.train[0], problem="it {{fails}}"), chosen
    )
    assert list(agent_warnings(chosen, inputs.agent_config, inputs.train)) == []


@pytest.mark.parametrize(
    ("override", "error"),
    [
        ("rollout.harness=nosuch", r"rollout\.harness: .*nosuch: No such file"),
        ("rollout.context.policy=head_tail", r'rollout\.context\.policy: .* must be "stop"'),
        ("rollout.context.thinking=strip", r'rollout\.context\.thinking: .* must be "keep"'),
        ("rollout.exact=true", r"rollout\.exact: it is for the built-in loop"),
        (
            "rollout.limits.context_tokens=1000",
            r"rollout\.harness: pi begins with 1360 tokens before the task",
        ),
        ("chat.template=", r"model: .* does not describe the agent's tools to the policy"),
    ],
)
def test_a_program_that_cannot_play_as_the_recipe_says_is_refused_by_the_field(
    place: Path, override: str, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        read_inputs(recipe(place, *PROGRAM, tool_calling(place), override))
