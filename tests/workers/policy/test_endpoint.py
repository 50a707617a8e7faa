"""Replies of OpenAI-compatible servers, of well-behaved and of broken ones."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.chat import ChatMessage, ToolCall
from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.message import decode, encode
from pipeline.request import Claim, Endpoint
from pipeline.trajectory import Turn, Usage
from tests.conftest import free_ports
from tests.workers.agent.episode import AGENT, claim, opening, user
from tests.workers.policy.engines import Canned, Wire, completed, playing
from workers.policy.endpoint import EndpointPolicies, EndpointSettings, read_key
from workers.policy.requested import RequestedPolicies

PATIENT = EndpointSettings(request_timeout_s=240.0, retry_budget_s=240.0, first_reply_s=240.0)
HURRIED = EndpointSettings(request_timeout_s=0.3, retry_budget_s=0.0, first_reply_s=0.0)
IMPATIENT = EndpointSettings(retry_budget_s=0.0, first_reply_s=0.0)
KEY = "sk-secret-0123456789"
AGENT_OF_2 = "agent: {system_template: s, instance_template: u}\nmodel: {}\n"


def claim_of(wire: Wire, *, agent: str = AGENT, **endpoint: Any) -> Claim:
    claimed = claim(agent=agent)
    named = Endpoint(api_base=f"{wire.url}/v1", model="m", **endpoint)
    return replace(claimed, request=replace(claimed.request, endpoint=named))


async def first_turn(
    answers: Sequence[Canned], settings: EndpointSettings = PATIENT, **endpoint: Any
) -> tuple[Turn | None, Wire]:
    async with playing(answers) as wire, EndpointPolicies(settings) as policies:
        conversation = await policies.open(claim_of(wire, **endpoint))
        return await conversation.begin(opening("s", "u")), wire


async def test_the_conversation_is_sent_whole_and_grows() -> None:
    answers = [Canned(completed("one")), Canned(completed("two", finish="length"))]
    async with playing(answers) as wire, EndpointPolicies(PATIENT) as policies:
        asked = {"seed": 7, "chat_template_kwargs": {"enable_thinking": False}}
        conversation = await policies.open(claim_of(wire, options=asked))
        first = await conversation.begin(opening("s", "u"))
        second = await conversation.answer(user("more"))
    assert first is not None
    assert second is not None
    assert (first.text, first.stop, first.usage) == (
        "one",
        "stop",
        Usage(prompt_tokens=7, completion_tokens=3),
    )
    assert first.told == tuple(opening("s", "u"))
    assert (second.text, second.stop, second.told) == ("two", "length", tuple(user("more")))
    assert (second.fed, second.sampled, second.versions) == (b"", b"", ())
    assert [message["content"] for message in wire.requests[1]["messages"]] == ["s", "u", "one", "more"]
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert wire.requests[0] == {"model": "m", "messages": messages} | asked, "and nothing else is sent"


async def test_tool_calls_and_thoughts_are_told_apart_from_content() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    answers = [Canned(completed(None, tool_calls=[call], reasoning_content="hm")), Canned(completed("done"))]
    async with playing(answers) as wire, EndpointPolicies(PATIENT) as policies:
        conversation = await policies.open(claim_of(wire))
        turn = await conversation.begin(opening("s", "u"))
        await conversation.answer([ChatMessage("tool", "files", tool_call_id="c1")])
    assert turn is not None
    assert turn.said == ChatMessage(
        "assistant",
        "",
        reasoning="hm",
        tool_calls=(ToolCall(id="c1", name="bash", arguments='{"command": "ls"}'),),
    )
    assert wire.requests[1]["messages"][2:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "files", "tool_call_id": "c1"},
    ]


THOUGHTS = {"told apart": completed("b", reasoning="a"), "in the content": completed("<think>a</think>b")}


@pytest.mark.parametrize("body", THOUGHTS.values(), ids=list(THOUGHTS))
@pytest.mark.parametrize(("agent", "returned"), [(AGENT_OF_2, {"reasoning_content": "a"}), (AGENT, {})])
async def test_thoughts_go_back_to_the_server_as_the_version_of_the_agent_sends_them(
    agent: str, returned: dict[str, str], body: Any
) -> None:
    async with playing([Canned(body)]) as wire, EndpointPolicies(PATIENT) as policies:
        conversation = await policies.open(claim_of(wire, agent=agent))
        await conversation.begin(opening("s", "u"))
        await conversation.answer(user("more"))
    assert wire.requests[1]["messages"][2] == {"role": "assistant", "content": "b"} | returned


async def test_thoughts_that_a_server_leaves_in_the_content_are_taken_out_of_it() -> None:
    turn, _ = await first_turn([Canned(completed("<think>a\nb</think>\n\nthe reply </think>"))])
    assert turn is not None
    assert turn.said == ChatMessage("assistant", "the reply </think>", reasoning="a\nb")


BROKEN = {
    "busy": Canned({"error": "slow down"}, status=429, headers={"Retry-After": "0"}),
    "failing": Canned(b"oops", status=500),
    "away": Canned(b"<html>bad gateway</html>", status=502),
    "cut": Canned(completed("half"), cut_off=True),
    "no JSON": Canned(b"{'choices'"),
    "no choice": Canned({"choices": []}),
    "another shape": Canned({"choices": [{"message": "hello"}]}),
    "a stream": Canned(b'data: {"choices": []}\n\ndata: [DONE]\n\n'),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=list(BROKEN))
async def test_a_server_that_is_broken_for_a_moment_is_asked_again(broken: Canned) -> None:
    turn, wire = await first_turn([broken, Canned(completed("well"))])
    assert turn is not None
    assert turn.text == "well"
    assert len(wire.requests) == 2


@pytest.mark.parametrize("broken", [*BROKEN.values(), Canned(never=True)], ids=[*BROKEN, "silent"])
async def test_a_server_that_stays_broken_is_an_infrastructure_failure(broken: Canned) -> None:
    settings = HURRIED if broken.never else IMPATIENT
    with pytest.raises(EngineError, match=r"gave up after \d request") as raised:
        await first_turn([broken], settings)
    assert raised.value.transient


async def test_a_server_that_wants_no_pause_again_and_again_is_not_flooded() -> None:
    async with playing([BROKEN["busy"]]) as wire:
        async with EndpointPolicies(EndpointSettings(retry_budget_s=0.8)) as policies:
            conversation = await policies.open(claim_of(wire))
            with pytest.raises(EngineError, match="gave up"):
                await conversation.begin(opening("s", "u"))
        assert len(wire.requests) <= 3


HALF = "\ud800"
HOSTILE = {
    "halves of surrogate pairs": completed(HALF, finish=HALF, reasoning_content=HALF) | {HALF: HALF},
    "parts of content": completed(None) | {"choices": [{"message": {"content": [{"text": HALF}, {"text": 3}, {}]}}]},
    "counts that are none": completed("x") | {"usage": {"prompt_tokens": 2**70, "completion_tokens": float("nan")}},
    "no counts": completed("x") | {"usage": [HALF]},
    "thoughts that are no text": completed("x", reasoning_content={"a": 1}, reasoning=7),
    "an ending that is no text": {"choices": [{"message": {"content": "x"}, "finish_reason": {"type": HALF}}]},
    "calls": completed(None, tool_calls=[{"id": 7, "function": {"name": HALF, "arguments": {HALF: float("inf")}}}]),
    "arguments of arguments": completed(None, tool_calls=[{"id": HALF, "function": {"name": "bash", "arguments": [2**70]}}]),
    "an integer of many digits": b'{"choices": [{"message": {"content": "x"}}], "usage": {"prompt_tokens": %s}}' % (b"9" * 9000),
}  # fmt: skip


@pytest.mark.parametrize("body", HOSTILE.values(), ids=list(HOSTILE))
async def test_every_reply_of_a_server_can_be_stored_and_read_again(body: Any) -> None:
    turn, wire = await first_turn([Canned(body)])
    assert turn is not None
    assert decode(encode(turn), Turn) == turn
    assert len(wire.requests) == 1


@pytest.mark.parametrize("body", [b"[" * 100_000, {"choices": [None]}, completed(7)])  # type: ignore[arg-type]
async def test_what_is_no_completion_is_an_infrastructure_failure(body: Any) -> None:
    with pytest.raises(EngineError, match="not a chat completion"):
        await first_turn([Canned(body)], IMPATIENT)


async def test_a_greedy_request_is_not_repeated_once_the_same_nonsense_came_twice() -> None:
    broken = Canned(b'{"choices": 7}')
    async with playing([broken]) as wire, EndpointPolicies(PATIENT) as policies:
        conversation = await policies.open(claim_of(wire, options={"temperature": 0.0}))
        with pytest.raises(EngineRefused, match="the same again at temperature 0"):
            await conversation.begin(opening("s", "u"))
    assert len(wire.requests) == 2


async def test_a_server_that_never_replied_is_soon_given_up_and_its_first_failure_is_said_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hurried = EndpointSettings(first_reply_s=0.0, retry_budget_s=240.0)
    [port] = free_ports(1)
    nowhere = Wire(url=f"http://127.0.0.1:{port}")
    async with EndpointPolicies(hurried) as policies:
        for _ in range(3):
            with pytest.raises(EngineError, match="gave up after 1 request"):
                await policies.open(claim_of(nowhere))
    assert [record.getMessage().count("it is asked again") for record in caplog.records] == [1]
    async with playing([Canned(b"<html>hello</html>")]) as wire, EndpointPolicies(hurried) as policies:
        conversation = await policies.open(claim_of(wire))
        with pytest.raises(EngineError, match="not a chat completion"):
            await conversation.begin(opening("s", "u"))


async def test_a_server_that_replied_once_has_its_whole_budget_when_it_breaks() -> None:
    answers = [Canned(completed("one")), Canned(b"oops"), Canned(completed("two"))]
    settings = EndpointSettings(first_reply_s=0.0, retry_budget_s=240.0)
    async with playing(answers) as wire, EndpointPolicies(settings) as policies:
        conversation = await policies.open(claim_of(wire))
        await conversation.begin(opening("s", "u"))
        second = await conversation.answer(user("more"))
    assert second is not None
    assert second.text == "two"


async def test_a_refused_request_is_not_repeated() -> None:
    async with (
        playing([Canned({"error": "no such model"}, status=404)]) as wire,
        EndpointPolicies() as policies,
    ):
        with pytest.raises(EngineRefused, match="no such model"):
            await (await policies.open(claim_of(wire))).begin(opening("s", "u"))
    assert len(wire.requests) == 1


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"code": "context_length_exceeded", "message": "..."}},
        {"message": "The input (70000 tokens) is longer than the model's context length (32768 tokens)."},
        {"error": {"message": "This model's maximum context length is 8192 tokens."}},
    ],
)
async def test_a_conversation_too_long_for_the_server_ends_for_want_of_context(body: Any) -> None:
    turn, _ = await first_turn([Canned(body, status=400)])
    assert turn is None


async def test_the_key_reaches_the_server_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_KEY", KEY)
    caplog.set_level(logging.DEBUG)
    canned = Canned({"error": f"wrong key {KEY}"}, status=401)
    async with playing([canned]) as wire, EndpointPolicies() as policies:
        claimed = claim_of(wire, key_env="MY_KEY")
        conversation = await policies.open(claimed)
        with pytest.raises(EngineRefused, match=r"wrong key \[key\].*MY_KEY") as raised:
            await conversation.begin(opening("s", "u"))
    assert wire.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert (
        KEY
        not in f"{raised.value!r}{raised.value.__context__!r}{conversation!r}{vars(conversation)}{caplog.text}"
    )
    assert KEY.encode() not in encode(claimed)


def test_a_key_is_read_from_a_file_and_a_missing_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "key"
    named = Endpoint(api_base="http://x/v1", model="m", key_file=str(place))
    with pytest.raises(RequestError, match="cannot be read"):
        read_key(named)
    place.write_text(" \n")
    with pytest.raises(RequestError, match="is empty"):
        read_key(named)
    place.write_text(f"{KEY}\n")
    assert read_key(named) == KEY
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(RequestError, match="NOT_SET is not set"):
        read_key(Endpoint(api_base="http://x/v1", model="m", key_env="NOT_SET"))


async def test_a_request_chooses_between_endpoint_and_engines() -> None:
    class Absent:
        async def open(self, claim: Claim) -> Any:
            raise RequestError("the engines were chosen")

        voice = open

    async with playing([Canned(completed("hello"))]) as wire, EndpointPolicies() as endpoints:
        policies = RequestedPolicies(Absent(), endpoints)
        turn = await (await policies.open(claim_of(wire))).begin(opening("s", "u"))
        assert turn is not None
        assert turn.text == "hello"
        with pytest.raises(RequestError, match="the engines were chosen"):
            await policies.open(claim())


async def test_an_exact_agent_of_tool_calls_is_told_of_its_tool_and_hears_thoughts() -> None:
    agent = "agent: {system_template: s, instance_template: u}\nmodel: {}\nswerve: {exact: true, upstream: '2.4'}\n"
    async with (
        playing([Canned(completed("<think>a</think>b"))]) as wire,
        EndpointPolicies(PATIENT) as policies,
    ):
        claimed = claim_of(wire)
        claimed = replace(claimed, request=replace(claimed.request, agent_config=agent))
        conversation = await policies.open(claimed)
        turn = await conversation.begin(opening("s", "u"))
        assert turn is not None
        assert turn.said.content == "<think>a</think>b"
        again = await conversation.answer(user("what?"), forget_reply=True)
        assert again is not None
        assert again.cut is not None
    assert wire.requests[0]["tools"][0]["function"]["name"] == "bash"
    assert [one["content"] for one in wire.requests[1]["messages"]] == ["s", "u", "what?"]
