"""Prompts of both mini-swe-agent dialects, and every way in which a file of them can be wrong."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.agent.config import load_agent
from pipeline.errors import RequestError

LIVE: dict[str, Any] = {
    "task": "it {{fails}}",
    "cwd": "/testbed",
    "timeout": 60,
    "step_limit": 10,
    "n_model_calls": 3,
    "model_cost": 0.0,
    "elapsed_seconds": 1.5,
}
FIRST = """
agent:
  system_template: "You are at {{cwd}} on {{system}} {{machine}}."
  instance_template: |
    <pr>{{task}}</pr>
  action_observation_template: |
    <returncode>{{output.returncode}}</returncode>
    {% if output.output | length < 10000 -%}
    <output>
    {{ output.output -}}
    </output>
    {%- else -%}
    <warning>Too long.</warning>
    {%- set elided_chars = output.output | length - 10000 -%}
    <head>
    {{ output.output[:5000] }}
    </head>
    <elided>{{ elided_chars }} characters elided</elided>
    <tail>
    {{ output.output[-5000:] }}
    </tail>
    {%- endif -%}
  format_error_template: |
    EXACTLY ONE action, found {{actions|length}} actions.
  timeout_template: |
    <command>{{action['action']}}</command> timed out: {{output}}
  step_limit: 250
  cost_limit: 3.
environment:
  timeout: 60
  cwd: /somewhere
  env: {PAGER: cat}
  image: ignored
model:
  model_name: anything
  model_kwargs: {drop_params: true}
"""
SECOND = """
agent:
  system_template: "Answer with one ```mswea_bash_command block."
  instance_template: "{{task}} {{n_model_calls}}/{{step_limit}}"
  mode: confirm
model:
  observation_template: |
    {% if output.exception_info -%}
    <exception>{{output.exception_info}}</exception>
    {% endif -%}
    <returncode>{{output.returncode}}</returncode>
    <output>
    {{output.output}}</output>
  format_error_template: "{{error}}{% if finish_reason == 'length' %} (cut){% endif %}{{ actions | length }}"
"""


def test_the_shipped_prompts_can_be_used() -> None:
    path = Path("workers/agent/prompts/default.yaml")
    agent = load_agent(path.read_text())
    system, task = agent.opening(LIVE)
    assert "```bash" in system
    assert "it {{fails}}" in task
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in task
    assert agent.shows_chars is None


def test_the_task_is_inserted_verbatim_and_one_trailing_newline_goes() -> None:
    system, task = load_agent(FIRST).opening(LIVE)
    assert task == "<pr>it {{fails}}</pr>"
    assert system.startswith("You are at /testbed on Linux ")


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("", "<output>\n</output>"),
        ("ok\n", "<output>\nok\n</output>"),
        ("x" * 9999, "<output>\n" + "x" * 9999 + "</output>"),
    ],
)
def test_a_short_output_is_shown_in_full(output: str, shown: str) -> None:
    text = load_agent(FIRST).observation(LIVE, command="c", exit_code=0, output=output)
    assert text == "<returncode>0</returncode>\n" + shown


@pytest.mark.parametrize(("length", "elided"), [(10_000, 0), (25_000, 15_000)])
def test_a_template_of_five_and_five_thousand_characters_cuts_as_upstream_does(
    length: int, elided: int
) -> None:
    output = "a" * 5000 + "b" * (length - 10_000) + "c" * 5000
    text = load_agent(FIRST).observation(LIVE, command="c", exit_code=2, output=output)
    head, tail = "a" * 5000, "c" * 5000
    assert text == (
        "<returncode>2</returncode>\n<warning>Too long.</warning><head>\n"
        f"{head}\n</head>\n<elided>{elided} characters elided</elided>\n<tail>\n{tail}\n</tail>"
    )


def test_a_templates_own_limit_is_known() -> None:
    assert load_agent(FIRST).shows_chars == 10_000
    assert load_agent(SECOND).shows_chars is None


def test_the_first_dialect_has_a_text_of_its_own_for_a_timeout() -> None:
    agent = load_agent(FIRST)
    told = agent.observation(LIVE, command="sleep 9", exit_code=None, output="so far")
    assert told == "<command>sleep 9</command> timed out: so far"
    assert agent.format_error(LIVE, reason="", actions=("a", "b"), finish_reason="stop") == (
        "EXACTLY ONE action, found 2 actions."
    )


def test_the_second_dialect_shows_a_timeout_as_an_exception_with_return_code_minus_one() -> None:
    told = load_agent(SECOND).observation(LIVE, command="sleep 9", exit_code=None, output="so far")
    assert told == (
        "<exception>the command was stopped after 60 seconds</exception>\n"
        "<returncode>-1</returncode>\n<output>\nso far</output>"
    )


def test_the_second_dialects_format_error_knows_why_sampling_ended() -> None:
    agent = load_agent(SECOND)
    assert agent.format_error(LIVE, reason="none", actions=(), finish_reason="length") == "none (cut)0"
    assert agent.action.findall("```mswea_bash_command\nls\n```") == ["ls"]


def test_limits_and_variables_of_the_file_are_kept() -> None:
    agent = load_agent(FIRST)
    assert (agent.step_limit, agent.command_s, agent.env) == (250, 60.0, {"PAGER": "cat"})
    assert load_agent(SECOND).step_limit is None


def test_an_action_expression_of_the_files_own_is_used() -> None:
    agent = load_agent(SECOND + '  action_regex: "<run>(.*?)</run>"\n')
    assert agent.action.findall("<run>ls\npwd</run>") == ["ls\npwd"]


def test_a_name_that_the_template_tests_for_may_be_absent() -> None:
    text = SECOND.replace("{{error}}", "{% if hint is defined %}{{hint}}{% endif %}")
    assert load_agent(text).format_error(LIVE, reason="", actions=(), finish_reason="stop") == "0"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("{{actions|length}}", "{{ations|length}}", "agent.format_error_template: unknown variable 'ations'"),
        (
            "{{ elided_chars }}",
            "{{ elided }}",
            "agent.action_observation_template: unknown variable 'elided'",
        ),
        ("output.returncode", "output.returnkode", "agent.action_observation_template: .*returnkode"),
        ("{{task}}", "{{task", "agent.instance_template: "),
        ("{{task}}", "{{task.title.nope}}", "agent.instance_template: "),
        ("{{task}}", "{{1 // 0}}", "agent.instance_template: "),
        ("step_limit: 250", "step_limit: many", "agent.step_limit: expected a number"),
        ("  timeout: 60", "  timeout: soon", "environment.timeout: expected a number"),
        (
            "  instance_template",
            "  instance_templat",
            "agent.instance_templat: .* did you mean instance_template",
        ),
        ("  action_observation_template", "  other", "agent.other: mini-swe-agent 1.17 has no such key"),
        ("agent:", "agent: [", "not YAML"),
        ("  step_limit", "  action_regex: '('\n  step_limit", "agent.action_regex: "),
        ("  step_limit", "  action_regex: '(l)(s)'\n  step_limit", "agent.action_regex: 2 groups"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_key(old: str, new: str, complaint: str) -> None:
    assert old in FIRST
    with pytest.raises(RequestError, match=complaint):
        load_agent(FIRST.replace(old, new, 1))


@pytest.mark.parametrize("text", ["", "[]", "agent:", "just words", "model: {}", "\t"])
def test_a_file_that_is_no_agent_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="agent config"):
        load_agent(text)


def test_a_file_of_2x_without_a_sign_of_text_speaks_in_tool_calls() -> None:
    agent = load_agent(SECOND.replace("```mswea_bash_command", "tool call"))
    assert agent.dialect == "tool_calls"
    assert [tool["function"]["name"] for tool in agent.tools] == ["bash"]
    assert load_agent(SECOND).tools == ()


def test_a_template_cannot_reach_into_the_worker() -> None:
    with pytest.raises(RequestError, match=r"agent\.instance_template"):
        load_agent(FIRST.replace("{{task}}", "{{ ''.__class__.__mro__ }}"))
