"""A trajectory in the shapes that other tools read."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline import artefacts
from pipeline.chat import ChatMessage, ToolCall
from pipeline.request import Claim, Endpoint
from pipeline.task import ExitCode
from pipeline.trajectory import Action, Cut, Exhausted, Failed, Outcome, Submitted, Trajectory
from tests.pipeline import samples

TOLD = (ChatMessage("system", "You fix bugs."), ChatMessage("user", "add() drops its second argument"))
LIST_FILES = ToolCall(name="bash", arguments='{"command": "ls"}', id="call-1")


def made(**fields: Any) -> Trajectory:
    request = samples.request(**fields.pop("request", {}))
    claim = Claim(request=request, attempt=1, worker="host/1", claimed_at=1.0)
    return samples.trajectory(claim, **fields)


def two_turns() -> Trajectory:
    first = samples.turn(told=TOLD)
    second = samples.turn(
        told=(ChatMessage("user", "<returncode>0</returncode>"),), text="```bash\nsubmit\n```", actions=()
    )
    return made(turns=(first, second))


def test_the_messages_are_what_was_told_and_said_in_order() -> None:
    assert [(one["role"], one["content"]) for one in artefacts.chat(two_turns().turns)] == [
        ("system", "You fix bugs."),
        ("user", "add() drops its second argument"),
        ("assistant", "THOUGHT: look at the file\n\n```bash\ncat calc.py\n```"),
        ("user", "<returncode>0</returncode>"),
        ("assistant", "```bash\nsubmit\n```"),
    ]


def test_a_reply_that_left_the_context_is_no_message_and_is_quoted_by_what_was_told_of_it() -> None:
    wrong = samples.turn(told=TOLD, text="no command", actions=())
    cut = Cut(forgot_reply=True)
    after = samples.turn(told=(ChatMessage("user", "Give one command."),), text="ls", actions=(), cut=cut)
    messages = artefacts.trajectory_json(made(turns=(wrong, after)))["messages"]
    assert [(one["role"], one["content"]) for one in messages[2:4]] == [
        ("user", "Give one command."),
        ("assistant", "ls"),
    ]
    assert messages[2]["extra"] == {"interrupt_type": "FormatError", "model_response": "no command"}


def test_a_tool_call_is_written_as_openai_writes_it() -> None:
    reply = ChatMessage("assistant", "", reasoning="Which files are there?", tool_calls=(LIST_FILES,))
    assert artefacts.chat_message(reply) == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Which files are there?",
        "tool_calls": [
            {
                "id": "call-1",
                "type": "function",
                "function": {"name": "bash", "arguments": '{"command": "ls"}'},
            }
        ],
    }
    assert artefacts.chat_message(ChatMessage("tool", "calc.py", tool_call_id="call-1")) == {
        "role": "tool",
        "content": "calc.py",
        "tool_call_id": "call-1",
    }


@pytest.mark.parametrize(
    ("outcome", "status", "source"),
    [
        (Submitted(patch=b"diff"), "Submitted", "submission"),
        (Submitted(patch=b" \n"), "Submitted", ""),
        (Exhausted(limit="turns", patch=b"diff"), "LimitsExceeded", "git_diff_fallback"),
        (Exhausted(limit="wall_s", patch=b""), "TimeExceeded", ""),
        (Exhausted(limit="format_errors", patch=b"diff"), "RepeatedFormatError", "git_diff_fallback"),
        (Exhausted(limit="context", patch=b"diff"), "ContextWindowExceededError", "git_diff_fallback"),
        (Exhausted(limit="sandbox", patch=b""), "SandboxRuined", ""),
        (Failed(boundary="engine", message="gone", transient=True), "EngineError", ""),
    ],
)
def test_an_outcome_has_mini_swe_agents_name(outcome: Outcome, status: str, source: str) -> None:
    assert artefacts.exit_status(outcome) == status
    assert artefacts.patch_source(outcome) == source


def test_the_file_ends_with_the_exit_and_its_submission() -> None:
    written = artefacts.trajectory_json(two_turns())
    assert written["trajectory_format"] == "mini-swe-agent-1.1"
    assert written["instance_id"] == "calc-7"
    assert written["info"]["exit_status"] == "Submitted"
    assert written["info"]["model_stats"]["api_calls"] == 2
    assert written["messages"][-1]["role"] == "exit"
    assert written["messages"][-1]["extra"]["submission"] == written["info"]["submission"] != ""


def test_a_message_that_tells_an_output_carries_it() -> None:
    messages = artefacts.trajectory_json(two_turns())["messages"]
    assert messages[2]["extra"]["actions"] == [{"command": "cat calc.py"}]
    assert messages[3]["extra"]["raw_output"] == "def add(a, b):\n    return a\n"
    assert messages[3]["extra"]["returncode"] == 0


def test_outputs_of_several_tool_calls_go_by_the_ids_of_the_calls() -> None:
    first = samples.action("ls", "calc.py")
    second = samples.action("pwd", "/workspace")
    actions = tuple(
        Action(command=one.command, observation=one.observation, tool_call_id=f"call-{number}")
        for number, one in enumerate((first, second), 1)
    )
    answers = (
        ChatMessage("tool", "told second", tool_call_id="call-2"),
        ChatMessage("tool", "told first", tool_call_id="call-1"),
    )
    turns = (samples.turn(told=TOLD, actions=actions), samples.turn(told=answers, actions=()))
    messages = artefacts.trajectory_json(made(turns=turns))["messages"]
    assert [one["extra"]["raw_output"] for one in messages if one["role"] == "tool"] == [
        "/workspace",
        "calc.py",
    ]


def test_an_output_that_no_reply_saw_is_marked() -> None:
    messages = artefacts.trajectory_json(made(outcome=Exhausted(limit="turns", patch=b"")))["messages"]
    assert messages[-2]["extra"]["was_shown"] is False
    assert "def add" in messages[-2]["content"]


def test_a_failure_has_its_own_name_and_an_empty_patch() -> None:
    failed = made(
        outcome=Failed(boundary="sandbox", message="no container", transient=True), reward=None, turns=()
    )
    info = artefacts.trajectory_json(failed)["info"]
    assert (info["exit_status"], info["submission"], info["exception_str"]) == (
        "SandboxError",
        "",
        "no container",
    )
    assert artefacts.patch_of(failed.outcome) == b""


def test_a_policy_is_named_by_its_weights_or_by_its_server() -> None:
    assert artefacts.model_name(two_turns()) == "laptop@4"
    endpoint = Endpoint(api_base="http://x/v1", model="qwen")
    assert artefacts.model_name(made(request={"endpoint": endpoint})) == "qwen"


def test_a_prediction_is_what_the_official_harness_reads() -> None:
    assert artefacts.prediction("calc-7", b"+a\xff\n", model="mine") == {
        "model_name_or_path": "mine",
        "instance_id": "calc-7",
        "model_patch": "+a\ufffd\n",
    }


def test_nothing_of_the_known_fix_or_the_hidden_tests_is_written() -> None:
    verdict = ExitCode(eval_script="SECRET-script", test_patch=b"SECRET-tests")
    task = replace(
        samples.TASK,
        verdict=verdict,
        setup_patch=b"SECRET-setup",
        hidden_paths=("SECRET-path",),
        calibration=b"SECRET-calibration",
        leaking_paths=("SECRET-leak",),
    )
    one = made(request={"task": task}, reward=samples.reward(log_tail="SECRET-log"))
    broken = made(
        outcome=Failed(boundary="grader", message="the log ends: SECRET", transient=True), reward=None
    )
    for written in map(artefacts.trajectory_json, (one, broken)):
        assert "SECRET" not in artefacts.dump(written)


def test_what_a_policy_writes_can_always_be_written() -> None:
    strange = made(turns=(samples.turn(text="\ud800 \x00 \u2028", told=TOLD),))
    assert json.loads(artefacts.dump(artefacts.trajectory_json(strange)))["messages"][2]["content"]
