"""What requests to an OpenAI-compatible server say: what somebody asked for, the same for every command."""

import argparse
from typing import Any

import pytest

from pipeline.agent.option import endpoint_of, read_agent
from pipeline.errors import RequestError
from pipeline.request import Endpoint
from trainer.evaluate.endpoint import endpoint_parser
from workers import play

WHERE = ("--api-base", "http://127.0.0.1:1/v1", "--model", "m")


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def agent(tmp_path: Any) -> str:
    (tmp_path / "agent.yaml").write_text("agent: {system_template: s, instance_template: u}\nmodel: {}\n")
    return str(tmp_path / "agent.yaml")


def evaluated(agent: str, *words: str) -> argparse.Namespace:
    return endpoint_parser(None).parse_args(["t", "--agent", agent, "--out", "o", *WHERE, *words])


def played(agent: str, *words: str) -> argparse.Namespace:
    return play._parser().parse_args(["t", "--only", "x", "--agent", agent, *WHERE, *words])


def asked(agent: str, *words: str, values: tuple[str, ...] = (), exact: bool = False) -> dict[str, Any]:
    """The fields that `evaluate` sends, which are those that `play` sends."""
    text = read_agent([agent, *values], exact=exact)
    found: list[Endpoint] = [endpoint_of(parse(agent, *words), text) for parse in (evaluated, played)]
    assert found[0] == found[1]
    return found[0].options


@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_sent_that_nobody_asked_for(agent: str, exact: bool) -> None:
    assert asked(agent, exact=exact) == {}


def test_options_win_over_the_agent_file_and_are_sent_as_they_are(agent: str) -> None:
    said = ("model.model_kwargs.temperature=0.2", "model.model_kwargs.seed=1", "model.model_kwargs.top_k=9")
    words = (
        *("--option", "seed=7", "--option", "reasoning_effort=low", "--max-tokens", "99"),
        *("--option", 'chat_template_kwargs={"enable_thinking": false}', "--option", "stop=null"),
    )
    assert asked(agent, *words, values=said) == {
        "temperature": 0.2,
        "top_k": 9,
        "seed": 7,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "stop": None,
        "max_tokens": 99,
    }
    limit = ("model.model_kwargs.max_completion_tokens=50",)
    assert asked(agent, "--max-tokens", "99", values=limit) == {"max_completion_tokens": 99}
    assert asked(agent, "--option", "max_completion_tokens=7") == {"max_completion_tokens": 7}


def test_what_litellm_keeps_to_itself_is_not_sent(agent: str) -> None:
    said = (
        *("model.model_kwargs.drop_params=true", "model.model_kwargs.api_base=http://elsewhere"),
        *("model.model_kwargs.api_key=secret", "model.model_kwargs.top_p=null"),
        'model.model_kwargs.extra_body={"min_p": 0.1}',
    )
    assert asked(agent, values=said) == {"min_p": 0.1}


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--option", "seed"), "write it as NAME=JSON"),
        (("--option", '=1'), "write it as NAME=JSON"),
        (("--option", "seed="), "is no JSON"),
        (("--option", 'chat_template_kwargs={"a": false'), "is no JSON"),
        (("--option", "seed=-Infinity"), "is no JSON"),
        (("--option", f"seed={2**70}"), "no request can carry it"),
        (("--option", 'stop="\\ud800"'), "no request can carry it"),
        (("--option", "messages=[]"), "no option sets it"),
        (("--option", "stream=true"), "no option sets it"),
        (("--option", "api_key=sk"), "--key-env or --key-file"),
        (("--option", "temperature=1", "--temperature", "0"), "give one of them"),
        (("--temperature", "-1"), "--temperature"),
        (("--temperature", "nan"), "--temperature"),
        (("--max-tokens", "0"), "--max-tokens"),
        (("--api-base", "http://"), "give a URL"),
        (("--api-base", "http://host:port/v1"), "give a URL"),
        (("--api-base", "http://host/v1?key=1"), "give a URL"),
        (("--api-base", "localhost:1"), "give a URL"),
    ],
)  # fmt: skip
def test_an_option_that_no_server_can_be_sent_is_refused_by_name(
    agent: str, words: tuple[str, ...], error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        asked(agent, *words)


def test_a_field_of_an_agent_file_that_no_request_can_carry_is_refused_by_name(agent: str) -> None:
    for value in ("2026-01-01", ".nan", str(2**70)):
        text = f"agent: {{system_template: s, instance_template: u}}\nmodel: {{model_kwargs: {{seed: {value}}}}}\n"
        with pytest.raises(RequestError, match=r"model\.model_kwargs\.seed: no request can carry it"):
            endpoint_of(evaluated(agent), text)
