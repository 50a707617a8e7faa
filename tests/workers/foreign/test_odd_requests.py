"""No request breaks an episode: a policy could send such a request from a command, and get no reward instead of a 0."""

import json
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from tests.workers.foreign.program import BASH, LS, Json, playing

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
REQUESTS: dict[str, Json] = {
    "chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "u"}]},
            {
                "role": "assistant",
                "content": "w",
                "reasoning_content": "t",
                "tool_calls": [
                    {"id": "a", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "r"},
        ],
        "tools": [BASH],
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
    },
    "messages": {
        "model": "m",
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "u"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": "s"},
                    {"type": "text", "text": "w"},
                    {"type": "tool_use", "id": "a", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "r"}]},
                    {"type": "text", "text": "x"},
                ],
            },
        ],
        "tools": [{"name": "bash", "description": "d", "input_schema": SCHEMA}],
        "max_tokens": 50,
    },
    "responses": {
        "model": "m",
        "instructions": "i",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "u"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}], "content": None},
            {"type": "function_call", "name": "bash", "namespace": "n", "arguments": "{}", "call_id": "a"},
            {"type": "function_call_output", "call_id": "a", "output": "r"},
            {"type": "custom_tool_call", "name": "f", "input": "x", "call_id": "b"},
            {"type": "custom_tool_call_output", "call_id": "b", "output": "r"},
        ],
        "tools": [
            {"type": "function", "name": "bash", "description": "d", "parameters": SCHEMA},
            {"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "g"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "bash"}]},
        ],
        "max_output_tokens": 50,
    },
}
ODD = ([], {"a": []}, 5.5, "\ud800", None)


def changed(value: Any, odd: Any) -> Iterator[Any]:
    """The value with `odd` in the place of one of its parts, for each part."""
    yield odd
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for other in changed(part, odd):
            made = value.copy()
            made[key] = other
            yield made


def no_json(constant: str) -> NoReturn:
    raise AssertionError(f"{constant} is no JSON")


@pytest.mark.slow_but_for("chat/completions", "messages")
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_request_with_an_odd_part_is_answered_or_refused(path: str) -> None:
    bodies = [body for odd in ODD for body in changed(REQUESTS[path], odd)]
    async with playing(*[LS] * len(bodies), turns=len(bodies)) as program:
        for body in bodies:
            async with program.post(path, json.dumps(body).encode()) as response:
                assert response.status in (200, 400), body
                json.loads(await response.read(), parse_constant=no_json)
            assert not program.episode.is_over, body
