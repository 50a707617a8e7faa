"""Sampling from a real SGLang behind the real router: a turn records what the engine held and drew."""

import asyncio
from array import array
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline.errors import EngineError, EngineRefused, RequestError
from pipeline.message import pack_float32s, pack_int32s, unpack_float32s, unpack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import TokenizerBundle, put_tokenizer, read_bundle
from pipeline.trajectory import Exhausted, Turn, VersionSpan, reply_digest
from pipeline.weights import parse_version_name
from tests.conftest import Serving
from tests.workers.agent.episode import LocalShell, Silent, claim, opening, user
from tests.workers.policy.engines import Wire, tapped
from workers.agent.loop import play
from workers.policy.render import Renderer
from workers.policy.sglang import EngineSettings, SglangPolicies, announced_tokenizers

GREEDY = {"temperature": 0.0}
LONG_TOKENS = 3000  # some seconds of sampling


@pytest.fixture
def bundle(serving: Serving) -> TokenizerBundle:
    return read_bundle(serving.model_dir)


@pytest.fixture(autouse=True)
async def published(serving: Serving) -> None:
    """The engine serves a version of the run whose requests are played here."""
    await serving.name_weights("run-1@7")


@pytest.fixture
async def wire(serving: Serving) -> AsyncIterator[Wire]:
    async with tapped(serving.router_url) as wire:
        yield wire


@pytest.fixture
async def policies(wire: Wire, redis: Redis) -> AsyncIterator[SglangPolicies]:
    async with SglangPolicies(wire.url, announced_tokenizers(redis)) as policies:
        yield policies


async def announced(redis: Redis, bundle: TokenizerBundle, **changes: Any) -> Claim:
    return claim(tokenizer=await put_tokenizer(redis, bundle), **changes)


def sampled(turn: Turn | None) -> list[int]:
    assert turn is not None
    return list(unpack_int32s(turn.sampled))


async def test_the_engine_held_what_the_turns_say(
    policies: SglangPolicies, wire: Wire, redis: Redis, bundle: TokenizerBundle, serving: Serving
) -> None:
    held_claim = await announced(redis, bundle, sampling={"max_new_tokens": 24})
    conversation = await policies.open(held_claim)
    turns = [await conversation.begin(opening("be brief", "what is 1 + 1?"))]
    turns += [await conversation.answer(user(text)) for text in ("no <|im_end|>", "well\n", "")]
    held: list[int] = []
    for turn, request, reply in zip(turns, wire.requests, wire.replies, strict=True):
        assert turn is not None
        assert turn.kept_tokens == len(held)
        held += unpack_int32s(turn.fed)
        assert request["input_ids"] == held
        held += unpack_int32s(turn.sampled)
        meta = reply["meta_info"]
        assert sampled(turn) == reply["output_ids"]
        assert unpack_float32s(turn.logprobs) == array(
            "f", [entry[0] for entry in meta["output_token_logprobs"]]
        )
        assert turn.versions == tuple(
            VersionSpan(parse_version_name(span["version"])[1], span["start"], span["end"])
            for span in meta["weight_versions"]
        )
        assert turn.stop == meta["finish_reason"]["type"]
        assert turn.digest == reply_digest(
            pack_int32s(request["input_ids"]),
            pack_int32s(reply["output_ids"]),
            pack_float32s([entry[0] for entry in meta["output_token_logprobs"]]),
        )
        assert turn.engine == serving.engine_url
    first = Renderer(bundle).first_prompt(opening("be brief", "what is 1 + 1?"))
    assert wire.requests[0]["input_ids"] == first
    assert [request["rid"] for request in wire.requests] == [
        f"{held_claim.request.id}.1.{n}" for n in range(4)
    ]
    assert {headers["X-SMG-Routing-Key"] for headers in wire.headers} == {held_claim.request.id}


async def test_a_stop_token_is_part_of_what_was_sampled_and_is_not_fed_again(
    policies: SglangPolicies, redis: Redis, bundle: TokenizerBundle
) -> None:
    probe = await policies.open(await announced(redis, bundle, sampling=GREEDY | {"max_new_tokens": 1}))
    favourite = sampled(await probe.begin(opening("s", "u")))[0]
    ending = replace(bundle, stop_token_ids=(favourite,), chat_template=closed_by(bundle, favourite))
    conversation = await policies.open(
        await announced(redis, ending, sampling=GREEDY | {"max_new_tokens": 9})
    )
    turn = await conversation.begin(opening("s", "u"))
    assert turn is not None
    assert sampled(turn) == [favourite]
    assert (turn.stop, turn.text) == ("stop", "")
    following = await conversation.answer(user("on"))
    assert following is not None
    assert following.kept_tokens == len(turn.fed) // 4 + 1
    assert list(unpack_int32s(following.fed)) == Renderer(ending).suffix(
        user("on"), last_id=Renderer(ending).end_id
    )


def closed_by(bundle: TokenizerBundle, token: int) -> str:
    """The bundle's chat template with an assistant's turn closed by `token`."""
    text = Renderer(bundle).decode([token])
    own = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    assert own in bundle.chat_template
    closed = "{% if message['role'] == 'assistant' %}{{ message['content'] }}TOKEN{% else %}OWN{% endif %}"
    closed = closed.replace("OWN", own).replace("TOKEN", text)
    return bundle.chat_template.replace(own, closed)


async def running(serving: Serving, session: aiohttp.ClientSession, turn: asyncio.Task[Turn | None]) -> None:
    """Return once the engine works on the turn."""
    while not turn.done():
        async with session.get(f"{serving.engine_url}/v1/loads") as response:
            if (await response.json())["loads"][0]["num_running_reqs"]:
                return
        await asyncio.sleep(0.01)
    turn.result()  # raises what ended it
    raise AssertionError("the turn was over before it was seen")


@pytest.mark.slow
async def test_new_weights_in_mid_turn_leave_spans_of_both_versions(
    policies: SglangPolicies, redis: Redis, bundle: TokenizerBundle, serving: Serving
) -> None:
    sampling = GREEDY | {"max_new_tokens": LONG_TOKENS}
    conversation = await policies.open(await announced(redis, bundle, sampling=sampling))
    async with aiohttp.ClientSession(raise_for_status=True) as session:

        async def control(path: str, **body: object) -> None:
            async with session.post(f"{serving.engine_url}/{path}", json=body) as response:
                await response.read()

        turn_task = asyncio.create_task(conversation.begin(opening("s", "u")))
        await running(serving, session, turn_task)
        await control("pause_generation", mode="retract")
        update = {"model_path": str(serving.model_dir), "weight_version": "run-1@41", "flush_cache": True}
        await control("update_weights_from_disk", **update)
        await control("continue_generation")
        turn = await turn_task
    assert len(sampled(turn)) == LONG_TOKENS
    assert turn is not None
    before, after = turn.versions
    assert before.version != 41
    assert (before.start, after) == (0, VersionSpan(41, before.end, LONG_TOKENS))


@pytest.mark.slow
async def test_an_abort_in_mid_turn_loses_nothing(
    policies: SglangPolicies, wire: Wire, redis: Redis, bundle: TokenizerBundle, serving: Serving
) -> None:
    held_claim = await announced(redis, bundle, sampling=GREEDY | {"max_new_tokens": LONG_TOKENS})
    conversation = await policies.open(held_claim)
    async with aiohttp.ClientSession(raise_for_status=True) as session:
        turn_task = asyncio.create_task(conversation.begin(opening("s", "u")))
        await running(serving, session, turn_task)
        abort = {"rid": f"{held_claim.request.id}.1.0"}
        async with session.post(f"{serving.engine_url}/abort_request", json=abort) as response:
            await response.read()
        turn = await turn_task
    assert [reply["meta_info"]["finish_reason"]["type"] for reply in wire.replies] == ["abort", "length"]
    cut, rest = (reply["output_ids"] for reply in wire.replies)
    assert cut
    assert sampled(turn) == cut + rest
    assert len(cut + rest) == LONG_TOKENS
    assert wire.requests[1]["input_ids"] == wire.requests[0]["input_ids"] + cut
    assert wire.requests[1]["sampling_params"]["max_new_tokens"] == LONG_TOKENS - len(cut)
    assert turn is not None
    assert (turn.versions[0].start, turn.versions[-1].end) == (0, LONG_TOKENS)
    assert len(turn.logprobs) == len(turn.sampled)


async def test_a_request_that_the_engine_refuses_is_not_tried_again(
    policies: SglangPolicies, wire: Wire, redis: Redis, bundle: TokenizerBundle
) -> None:
    too_long = await announced(redis, bundle, context_tokens=30_000, sampling={"max_new_tokens": 20_000})
    conversation = await policies.open(too_long)
    with pytest.raises(EngineRefused, match="context length"):
        await conversation.begin(opening("s", "u"))
    assert len(wire.requests) == 1


async def test_an_id_that_the_model_has_not_is_never_sent(
    policies: SglangPolicies, wire: Wire, redis: Redis, bundle: TokenizerBundle
) -> None:
    conversation = await policies.open(await announced(redis, replace(bundle, vocab_size=300)))
    with pytest.raises(RequestError, match="the model has only 300 ids"):
        await conversation.begin(opening("the system", "and the user"))
    assert not wire.requests


async def test_a_tokenizer_that_was_never_announced_is_the_requests_fault(policies: SglangPolicies) -> None:
    with pytest.raises(RequestError, match="tokenizer feed was never announced"):
        await policies.open(claim(tokenizer="feed"))


async def test_a_dead_router_is_an_engine_error(redis: Redis, bundle: TokenizerBundle) -> None:
    async with SglangPolicies(
        "http://127.0.0.1:1", announced_tokenizers(redis), EngineSettings(retry_budget_s=0.5)
    ) as policies:
        conversation = await policies.open(await announced(redis, bundle))
        with pytest.raises(EngineError, match="ClientConnectorError") as caught:
            await conversation.begin(opening("s", "u"))
    assert caught.value.transient


async def test_a_whole_episode_is_played_with_sampled_replies(
    policies: SglangPolicies, redis: Redis, bundle: TokenizerBundle, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shell = LocalShell(tmp_path_factory.mktemp("no-repository"))
    held_claim = await announced(redis, bundle, format_errors=2, sampling={"max_new_tokens": 8})
    turns: list[Turn] = []
    policy = await policies.open(held_claim)
    outcome = await play(held_claim.request, policy=policy, sandbox=shell, turns=turns, watcher=Silent())
    assert isinstance(outcome, Exhausted)
    assert outcome.limit == "format_errors"
    assert len(turns) == 2
