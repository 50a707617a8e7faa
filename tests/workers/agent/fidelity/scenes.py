"""Replies that lead an agent through every situation in which its prompts could differ from upstream's."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Replies = list[Any]  # texts, or messages with tool calls
MOST_COMMAND_S = 30  # a machine on which a command prints nothing for so long hangs

TASK = "add() subtracts.\n\nIt says {{ nothing }} of <|im_end|>, {% raw %} or caf\u00e9.  \n"
SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
DONE = f"printf '{SENTINEL}\\ndiff --git a/x b/x\\n+\\303\\251\\n'"

COMMANDS = (
    "cat calc.py",
    "echo to stderr >&2; cat nosuch; exit 3",
    "true",
    "",
    "printf 'no line end'",
    "printf 'a\\r\\nb\\rc\\n\\r\\r\\n'",
    "printf '\\377\\376 caf\\303\\251 \\303'",
    "printf '<|im_end|>{{ braces }} &<>\\t\\033[0m\\0\\f\\n'",
    "seq -s, 1 2000",
    "printf 'x%.0s' $(seq 9999)",
    "printf 'x%.0s' $(seq 10000)",
    "printf '\\303\\251%.0s' $(seq 12000)",
    "head -c 10000000 /dev/zero | tr '\\0' y",
    "pwd; echo $HOME; echo '</think>'",
    "cat <<'END'\n</think>\n``\nEND",
    f"echo x; echo {SENTINEL}",
    f"echo {SENTINEL} and more",
    "kill -9 $$",
)


@dataclass(frozen=True, slots=True)
class Scene:
    """Replies, and values that are merged into the agent file."""

    name: str
    replies: Replies
    values: Sequence[str] = ()
    command_s: int | None = None  # the limit of a command, if not the file's own
    prints: str = ""  # what a command prints before that limit; in the text of no command


def text_scenes(act: Callable[[str], str], *, has_time_limit: bool) -> list[Scene]:
    """For a text dialect; `act` is a reply with one command."""
    two = f"{act('ls')}\n{act('pwd')}"
    cut_short = {"content": "I was about to", "finish_reason": "length"}
    return [
        Scene("commands", [*map(act, COMMANDS), act(DONE)]),
        Scene("format errors", ["I am lost.", two, act("ls"), cut_short, "", act("ls"), two, act(DONE)]),
        Scene("format errors in a row", ["what?", two, cut_short, "what?", act(DONE)]),
        Scene(
            "thoughts",
            [f"<think>\n{act('rm x')}\n</think>\n{act('ls')}", f"hm</think>{act('ls')}", act(DONE)],
        ),
        Scene("thoughts beside the content", [_thoughtful(act("ls")), _thoughtful(""), act(DONE)]),
        _with_fields(act),
        *_endings(act),
        *(_timed(act) if has_time_limit else ()),
    ]


def tool_scenes() -> list[Scene]:
    """For tool calls."""

    def act(command: str) -> dict[str, Any]:
        return calls("Let me see.", command)

    wrong = [
        message(None, ("python", '{"command": "ls"}')),
        message("x", ("bash", '{"cmd": "ls"}')),
        act("ls"),
        message("x", ("bash", "{")),
        message("x", ("bash", '["ls"]')),
        act("ls"),
        message("x", ("bash", '{"command": "ls"}'), ("sh", "nothing")),
        "I am lost.",
        act("ls"),
        {"content": "cut", "finish_reason": "length"},
        {"content": "cut", "finish_reason": "tool_calls"},
    ]
    several = [
        calls("", "ls", "exit 3", "cat calc.py"),
        calls(None, *COMMANDS),
        calls("", "ls", DONE, "touch never"),
    ]
    return [
        Scene("commands", [*map(act, COMMANDS), act(DONE)]),
        Scene("several calls a reply", several),
        Scene("format errors", [*wrong, act("ls"), act(DONE)]),
        Scene("format errors in a row", [*wrong[:2], "what?", act(DONE)]),
        Scene("thoughts beside the content", [_thoughtful(act("ls")), _thoughtful("hm"), act(DONE)]),
        _with_fields(act),
        *_endings(act),
        *_timed(act),
    ]


def _thoughtful(reply: Any) -> dict[str, Any]:
    said: dict[str, Any] = {"content": reply} if isinstance(reply, str) else reply
    return {**said, "reasoning_content": "I wonder.\n"}


def _with_fields(act: Callable[[str], Any]) -> Scene:
    """An agent file that says what each request has to say."""
    said = (
        *("temperature=0.3", "seed=7", "top_p=null", "drop_params=true", 'reasoning_effort="low"'),
        *('chat_template_kwargs={"enable_thinking": false}', 'extra_body={"top_k": 5}', "num_retries=1"),
    )
    return Scene("fields of requests", [act(DONE)], [f"model.model_kwargs.{one}" for one in said])


def _timed(act: Callable[[str], Any]) -> list[Scene]:
    """For versions that have a limit of time."""
    slow = [act("sleep 3.1"), act("ls"), act(DONE)]
    return [Scene("the limit of time", slow, ["agent.wall_time_limit_seconds=3"])]


def _endings(act: Callable[[str], Any]) -> list[Scene]:
    """How commands and episodes end."""
    slow = f"printf 'be''gun\\r\\n'; exec sleep {10 * MOST_COMMAND_S}"
    submissions = {
        "with a status that is not 0": f"echo {SENTINEL}; exit 1",
        "with a form feed behind it": f"printf '{SENTINEL}\\fthe patch\\n'",
        "with a carriage return": f"printf '{SENTINEL}\\r\\n+a\\r\\n+b\\rc\\n'",
        "with blanks around it": f"printf ' \\n\\t{SENTINEL}  \\n\\n\\nrest'",
        "of nothing": f"echo {SENTINEL}",
        "of 1.x": "echo MINI_SWE_AGENT_FINAL_OUTPUT; echo patch",
    }
    return [
        Scene("a command that takes too long", [act(slow), act("ls"), act(DONE)], command_s=2, prints="begun"),
        Scene("the limit of steps", [act("ls"), act("pwd"), act(DONE)], ["agent.step_limit=2"]),
        Scene("the last steps", [act("ls")] * 3 + [act(DONE)], ["agent.step_limit=25"]),
        *(Scene(f"a submission {how}", [act(command), act("ls")]) for how, command in submissions.items()),
    ]


def calls(content: str | None, *commands: str) -> dict[str, Any]:
    """A reply that calls the tool for each command."""
    return message(content, *(("bash", _arguments(command)) for command in commands))


def message(content: str | None, *named: tuple[str, str]) -> dict[str, Any]:
    """A reply with calls of tools by name and arguments."""
    return {
        "content": content,
        "tool_calls": [
            {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(named)
        ],
    }


def _arguments(command: str) -> str:
    return json.dumps({"command": command})
