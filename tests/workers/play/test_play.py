"""The command: a whole episode with the production loop, containers and grader."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.workers.agent.episode import AGENT, SUBMIT, bash
from tests.workers.grade.conftest import file, image
from tests.workers.policy.engines import Canned, completed, playing
from tests.workers.verify.spans import FIXED, TaskFile
from workers import play as command
from workers.play import main

pytestmark = pytest.mark.docker
__all__ = ["file", "image"]

FIX = "sed -i 's/12/24/' spans.py"


@pytest.fixture
def tasks(file: TaskFile) -> Path:
    file.add("day", FIXED)
    return file.path


def play(tasks: Path, replies: object, *arguments: str) -> int:
    given, agent = tasks.with_name("replies.json"), tasks.with_name("agent.yaml")
    given.write_text(json.dumps(replies))
    agent.write_text(AGENT)
    return main([str(tasks), "--only", "day", "--agent", str(agent), "--replies", str(given), *arguments])


def test_given_replies_are_played_shown_and_graded(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(tasks, [bash("cat spans.py"), {"content": bash(FIX)}, "no command", bash(SUBMIT)]) == 0
    shown = capsys.readouterr().out
    places = [
        "system ─",
        "You fix code.",
        "user ─",
        "Fix this: Mend it.",
        "reply 1 ─",
        "cat spans.py",
        "<returncode>0</returncode>",
        "def hours(text):",
        "reply 2 ─",
        "reply 3 ─",
        "REFUSED",
        "reply 4 ─",
        "patch ─",
        '+    return number * {"h": 1, "d": 24}[unit]',
        "end ─",
        "submitted after 4 turns",
        "reward 1: exit status 0",
    ]
    found = [shown.find(place) for place in places]
    assert -1 not in found
    assert found == sorted(found)


def test_a_directory_that_is_not_the_task_s_is_warned_of(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(tasks, [bash(SUBMIT)], "--agent", "environment.cwd=/elsewhere") == 0
    assert "warning: environment.cwd is /elsewhere" in capsys.readouterr().err


def test_a_wrong_patch_is_a_reward_of_0_and_no_failure(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(tasks, [bash("echo x > new.py"), bash("pwd")], "--step-limit", "2") == 0
    shown = capsys.readouterr().out
    assert "exhausted:turns after 2 turns (the repository's diff is graded)" in shown
    assert "output that the policy was not shown" in shown
    assert "/workspace" in shown
    assert "reward 0" in shown


@pytest.mark.slow
def test_the_trajectory_is_written_and_played_again(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, again = tasks.with_name("traj.json"), tasks.with_name("again.json")
    assert play(tasks, [bash("wc -l spans.py"), bash(FIX), bash(SUBMIT)], "--out", str(out)) == 0
    written = json.loads(out.read_text())
    assert written["trajectory_format"] == "mini-swe-agent-1.1"
    assert [message["role"] for message in written["messages"]] == [
        *("system", "user", "assistant", "user", "assistant", "user", "assistant", "exit")
    ]
    assert written["info"]["exit_status"] == "Submitted"
    assert play(tasks, written, "--out", str(again)) == 0
    replayed = json.loads(again.read_text())
    contents = [[message["content"] for message in one["messages"]] for one in (written, replayed)]
    assert contents[0] == contents[1]


def test_a_file_that_cannot_be_written_is_said_before_anything_is_played(
    tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert play(tasks, [bash(SUBMIT)], "--out", str(tasks.with_name("no") / "traj.json")) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "--out" in printed.err


@pytest.mark.slow
async def test_a_server_replies(tasks: Path) -> None:
    agent = tasks.with_name("agent.yaml")
    agent.write_text(AGENT)
    answers = [Canned(completed(bash(FIX))), Canned(completed(bash(SUBMIT)))]
    async with playing(answers) as wire:
        server = ("--api-base", f"{wire.url}/v1", "--model", "some-model", "--max-tokens", "99")
        command = (sys.executable, "-m", "workers.play", str(tasks), "--only", "day", "--agent", str(agent))
        player = await asyncio.create_subprocess_exec(*command, *server, stdout=asyncio.subprocess.PIPE)
        shown, _ = await player.communicate()
    assert player.returncode == 0
    assert [len(request["messages"]) for request in wire.requests] == [2, 4]
    assert {(one["model"], one["max_tokens"]) for one in wire.requests} == {("some-model", 99)}
    assert "reward 1" in shown.decode()


def test_replies_that_end_too_early_are_no_verdict(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert play(tasks, [bash("pwd")]) == 1
    shown = capsys.readouterr().out
    assert "failed:engine after 1 turn: the given replies end after 1" in shown
    assert "no reward" in shown


def test_what_a_terminal_would_obey_is_made_visible(tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    play(tasks, [bash("printf '\\033[2Jgone'"), bash(SUBMIT)])
    shown = capsys.readouterr().out
    assert "\33" not in shown
    assert "\u241b[2Jgone" in shown


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--only", "nosuch"], "--only: 'nosuch': no such task in"),
        (["--only", "day"], "say who replies: give one of --replies FILE.json"),
        (["--only", "day", "--router", "http://127.0.0.1:1"], "--router needs --tokenizer"),
        (["--only", "day", "--api-base", "http://127.0.0.1:1"], "--api-base and --model belong together"),
        (
            ["--only", "day", "--api-base", "http://127.0.0.1:1", "--model", "m", "--key-env", "NOSUCH"],
            "the environment variable NOSUCH is not set",
        ),
        (["--only", "day", "--replies", "REPLIES", "--step-limit", "0"], "--step-limit"),
        (["--only", "day", "--replies", "TASKS"], "give a JSON list of replies"),
    ],
)
def test_misuse_is_one_line_that_names_the_option(
    tasks: Path, arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    replies = tasks.with_name("replies.json")
    replies.write_text('["x"]')
    files = {"REPLIES": str(replies), "TASKS": str(tasks)}
    assert main([str(tasks), *(files.get(one, one) for one in arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert error in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(("flags", "policy"), [([], "head_tail"), (["--exact"], "stop")])
def test_a_full_context_of_our_engines_is_cut_but_not_in_an_exact_episode(
    tasks: Path, flags: list[str], policy: str
) -> None:
    tasks.with_name("agent.yaml").write_text(AGENT.replace("{{error}}", ""))
    given = tasks.with_name("replies.json")
    given.write_text(json.dumps([bash(SUBMIT)]))
    words = ["--only", "day", "--agent", str(given.with_name("agent.yaml")), "--replies", str(given), *flags]
    episode = command._read(command._parser().parse_args([str(tasks), *words]))
    assert episode.claim.request.context.policy == policy
