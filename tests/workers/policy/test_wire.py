"""Engines and routers that answer late, wrongly, in pieces or not at all."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline.errors import EngineError, EngineRefused
from pipeline.message import pack_float32s, pack_int32s, unpack_float32s, unpack_int32s
from pipeline.telemetry import TelemetrySettings, current_traceparent, span, start_telemetry
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.trajectory import Turn, VersionSpan, reply_digest
from pipeline.weights import ServedWeights
from tests.workers.agent.episode import claim, opening
from tests.workers.policy.engines import Canned, Wire, generated, playing
from workers.policy.sglang import (
    FIRST_WAIT_S,
    MAX_BARREN_CUTS,
    EngineSettings,
    SglangPolicies,
    announced_tokenizers,
)

BRISK = EngineSettings(request_timeout_s=240.0, retry_budget_s=240.0, cut_wait_s=0.0)
END = 2


@pytest.fixture
async def tokenizer(redis: Redis, tiny_model: Any) -> str:
    return await put_tokenizer(redis, read_bundle(tiny_model))


async def turn_from(
    answers: Sequence[Canned],
    redis: Redis,
    tokenizer: str,
    settings: EngineSettings = BRISK,
    max_new_tokens: int = 8,
) -> tuple[Turn, Wire]:
    async with (
        playing(answers) as wire,
        SglangPolicies(wire.url, announced_tokenizers(redis), settings) as policies,
    ):
        conversation = await policies.open(
            claim(tokenizer=tokenizer, sampling={"max_new_tokens": max_new_tokens, "top_p": 0.9})
        )
        turn = await conversation.begin(opening("s", "u"))
    assert turn is not None
    return turn, wire


async def test_sampling_is_asked_for_as_the_request_says(redis: Redis, tokenizer: str) -> None:
    _, wire = await turn_from([Canned(generated([9, END], finish="stop"))], redis, tokenizer)
    body = wire.requests[0]
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": -1,
        "max_new_tokens": 8,
        "stop_token_ids": [END],
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    assert (body["return_logprob"], body["logprob_start_len"], body["stream"]) == (True, -1, False)


async def test_the_trace_goes_on_in_the_engine(redis: Redis, tokenizer: str) -> None:
    provider = start_telemetry("test", TelemetrySettings(otlp_endpoint=None, trace_file=None))
    with span("turn"):
        expected = current_traceparent()
        _, wire = await turn_from([Canned(generated([9]))], redis, tokenizer)
    provider.shutdown()
    assert expected
    assert wire.headers[0]["traceparent"] == expected


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b"", "truncated"),
        (b"<html>", "malformed"),
        (b'"\xff"', "engine response"),
        ({}, "output_ids"),
        ({"output_ids": [1]}, "meta_info"),
        ([generated([9])], "Expected `object`"),
        (generated([9], output_token_logprobs=[]), "not those of output_ids"),
        (generated([9], output_token_logprobs=[[-0.5, 8, None]]), "not those of output_ids"),
        (generated([9], output_token_logprobs=[[None, 9, None]]), "Expected `float`"),
        (generated([9], weight_versions=[]), "do not cover 1 tokens"),
        (
            generated([9, 9], weight_versions=[{"version": "run-1@5", "start": 1, "end": 2}]),
            "do not cover 2 tokens",
        ),
        (
            generated([9], weight_versions=[{"version": "run-1@5", "start": 0, "end": 2}]),
            "do not cover 1 tokens",
        ),
        (generated([9], weight_versions=None, weight_version=None), "names no weight version"),
        (generated([9], finish_reason=None), "finish_reason"),
        (generated([9], finish="banana"), "finish_reason"),
        (generated([]), "without a single token"),
        (generated([9] * 9), "9 tokens where 8 were allowed"),
        (generated([512]), "outside the 512"),
        (generated([-1]), "outside the 512"),
    ],
)
async def test_an_answer_that_makes_no_sense_is_an_engine_error_at_once(
    redis: Redis, tokenizer: str, body: Any, complaint: str
) -> None:
    with pytest.raises(EngineError, match=complaint) as caught:
        await turn_from([Canned(body)], redis, tokenizer)
    assert not isinstance(caught.value, EngineRefused)


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_refusal_is_final_and_says_why(redis: Redis, tokenizer: str, status: int) -> None:
    with pytest.raises(EngineRefused, match="too long"):
        await turn_from([Canned({"error": {"message": "too long"}}, status)], redis, tokenizer)


@pytest.mark.parametrize(
    "trouble",
    [
        Canned({}, 429),
        Canned({}, 500),
        Canned(b"busy", 503),
        Canned({"error": {"code": "model_not_found"}}, 404),
        Canned(generated([9]), cut_off=True),
    ],
)
async def test_a_busy_or_broken_engine_is_asked_again_under_another_id(
    redis: Redis, tokenizer: str, trouble: Canned
) -> None:
    turn, wire = await turn_from([trouble, Canned(generated([9, 8]))], redis, tokenizer)
    assert list(unpack_int32s(turn.sampled)) == [9, 8]
    assert [request["rid"] for request in wire.requests] == ["run-1.0.0.1.0", "run-1.0.0.1.0.1"]


async def test_patience_ends(redis: Redis, tokenizer: str) -> None:
    brief = EngineSettings(request_timeout_s=240.0, retry_budget_s=0.3)
    with pytest.raises(EngineError, match="HTTP 503: busy; gave up after 2 requests") as caught:
        await turn_from([Canned(b"busy", 503)], redis, tokenizer, brief)
    assert caught.value.transient


async def test_an_engine_that_never_answers_is_an_engine_error(redis: Redis, tokenizer: str) -> None:
    brief = EngineSettings(request_timeout_s=0.2, retry_budget_s=0.1)
    with pytest.raises(EngineError, match="TimeoutError"):
        await turn_from([Canned(never=True)], redis, tokenizer, brief)


FOREIGN = [
    generated([9], weight_versions=[{"version": name, "start": 0, "end": 1}])
    for name in ("default", "0", "other@5", "run-1@x")
]
FOREIGN += [generated([9], weight_versions=None, weight_version=0)]
FOREIGN += [
    generated(
        [9, 9],
        weight_versions=[
            {"version": "run-1@5", "start": 0, "end": 1},
            {"version": "other@6", "start": 1, "end": 2},
        ],
    )
]


@pytest.mark.parametrize("body", FOREIGN)
async def test_tokens_of_weights_that_another_run_or_nobody_published_are_never_used(
    redis: Redis, tokenizer: str, body: Any
) -> None:
    brief = EngineSettings(request_timeout_s=240.0, retry_budget_s=0.3)
    with pytest.raises(
        EngineError, match="which run run-1 has not published; gave up after 2 requests"
    ) as caught:
        await turn_from([Canned(body)], redis, tokenizer, brief)
    assert caught.value.transient, "the request is at no fault"


async def test_an_engine_that_has_just_started_is_asked_again_until_it_is_up_to_date(
    redis: Redis, tokenizer: str
) -> None:
    turn, _ = await turn_from([Canned(FOREIGN[0]), Canned(generated([9, 8]))], redis, tokenizer)
    assert list(unpack_int32s(turn.sampled)) == [9, 8]
    assert turn.versions == (VersionSpan(5, 0, 2),)


def adapted(*names: str) -> list[dict[str, Any]]:
    """Parts of a reply, each sampled with whole weights of this name."""
    return [{"version": name, "start": place, "end": place + 1} for place, name in enumerate(names)]


async def turn_with_adapter(
    answers: Sequence[Canned], redis: Redis, tokenizer: str, served: Sequence[int]
) -> tuple[Turn, Wire]:
    """A turn that names the adapter that is served; each request that it sends finds the next of the `served` versions."""
    versions = iter(served)

    async def next_served(run_id: str) -> ServedWeights:
        return ServedWeights(version=next(versions), engines=("e",))

    brief = EngineSettings(request_timeout_s=240.0, retry_budget_s=0.3, cut_wait_s=0.0)
    made = claim(tokenizer=tokenizer, sampling={"max_new_tokens": 8})
    async with (
        playing(answers) as wire,
        SglangPolicies(wire.url, announced_tokenizers(redis), brief, served=next_served) as policies,
    ):
        conversation = await policies.open(replace(made, request=replace(made.request, names_adapter=True)))
        turn = await conversation.begin(opening("s", "u"))
    assert turn is not None
    return turn, wire


LACKS = Canned({"error": {"message": "Got LoRA adapter that has never been loaded: run-1@4"}}, 400)


async def test_an_engine_that_lacks_the_adapter_is_asked_again_for_the_one_that_is_served_then(
    redis: Redis, tokenizer: str
) -> None:
    answers = [LACKS, Canned(generated([9, 8], weight_versions=adapted("run-1-base@0", "run-1-base@0")))]
    turn, wire = await turn_with_adapter(answers, redis, tokenizer, [4, 5])
    assert [request["lora_path"] for request in wire.requests] == ["run-1@4", "run-1@5"]
    assert turn.versions == (VersionSpan(5, 0, 2),)
    with pytest.raises(EngineError, match="never been loaded") as caught:
        await turn_with_adapter([LACKS], redis, tokenizer, [4, 5, 6, 7])
    assert caught.value.transient, "the request is at no fault"


@pytest.mark.parametrize("name", ["0", "run-1@5", "other-base@0"])
async def test_tokens_of_an_adapter_beside_other_weights_than_its_own_base_are_never_used(
    redis: Redis, tokenizer: str, name: str
) -> None:
    body = generated([9, 8], weight_versions=adapted("run-1-base@0", name))
    with pytest.raises(EngineError, match=f"has weights '{name}' and not 'run-1-base@0'") as caught:
        await turn_with_adapter([Canned(body)], redis, tokenizer, [5, 5, 5, 5])
    assert caught.value.transient


async def test_a_reply_that_is_cut_goes_on_with_the_adapter_that_is_served_then(
    redis: Redis, tokenizer: str
) -> None:
    answers = [
        Canned(generated([10], finish="abort", weight_versions=adapted("run-1-base@0"))),
        Canned(generated([11, END], finish="stop", weight_versions=adapted("run-1-base@0", "run-1-base@0"))),
    ]
    turn, _ = await turn_with_adapter(answers, redis, tokenizer, [4, 5])
    assert turn.versions == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))


def spans(*edges: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": f"run-1@{version}", "start": start, "end": end} for version, start, end in edges]


async def test_a_reply_cut_again_and_again_is_put_together(redis: Redis, tokenizer: str) -> None:
    answers = [
        Canned(generated([10, 11], finish="abort", weight_versions=spans(("4", 0, 1), ("5", 1, 2)))),
        Canned(generated([], finish="abort", weight_versions=[])),
        Canned(generated([12, 13], finish="abort", weight_versions=spans(("5", 0, 2)))),
        Canned(generated([14, END], finish="stop", weight_versions=spans(("5", 0, 1), ("6", 1, 2)))),
    ]
    turn, wire = await turn_from(answers, redis, tokenizer)
    assert list(unpack_int32s(turn.sampled)) == [10, 11, 12, 13, 14, END]
    assert list(unpack_float32s(turn.logprobs)) == [-0.5] * 6
    assert turn.versions == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 5), VersionSpan(6, 5, 6))
    assert turn.stop == "stop"
    prompt = wire.requests[0]["input_ids"]
    reported = pack_int32s([10, 11, 12, 13, 14, END]), pack_float32s([-0.5] * 6)
    assert turn.digest == reply_digest(pack_int32s(prompt), *reported)
    assert [request["input_ids"][len(prompt) :] for request in wire.requests] == [
        [],
        [10, 11],
        [10, 11],
        [10, 11, 12, 13],
    ]
    assert [request["sampling_params"]["max_new_tokens"] for request in wire.requests] == [8, 6, 6, 4]
    assert len({request["rid"] for request in wire.requests}) == 4


@pytest.mark.parametrize(
    ("ids", "stop"), [([9] * 7 + [END], "stop"), ([9, END], "stop"), ([9] * 8, "length")]
)
async def test_a_cut_reply_that_was_complete_is_not_continued(
    redis: Redis, tokenizer: str, ids: list[int], stop: str
) -> None:
    turn, wire = await turn_from([Canned(generated(ids, finish="abort"))], redis, tokenizer)
    assert len(wire.requests) == 1
    assert turn.stop == stop


async def test_an_engine_that_only_aborts_is_an_engine_error(redis: Redis, tokenizer: str) -> None:
    with pytest.raises(EngineError, match="aborts whatever it is asked"):
        await turn_from([Canned(generated([], finish="abort"))] * (MAX_BARREN_CUTS + 2), redis, tokenizer)


async def test_an_engine_without_spans_is_believed_for_the_whole_reply(redis: Redis, tokenizer: str) -> None:
    body = generated([9, 9], weight_versions=None, weight_version="run-1@6")
    turn, _ = await turn_from(
        [Canned(body, headers={"x-smg-routed-worker-id": "http://e:1"})], redis, tokenizer
    )
    assert turn.versions == (VersionSpan(6, 0, 2),)
    assert turn.engine == "http://e:1"


async def test_an_episode_that_nobody_trains_on_takes_any_weights(redis: Redis, tokenizer: str) -> None:
    foreign = generated([9, END], finish="stop", weight_version="default", weight_versions=None)
    async with (
        playing([Canned(foreign)]) as wire,
        SglangPolicies(wire.url, announced_tokenizers(redis), BRISK, any_weights=True) as policies,
    ):
        conversation = await policies.open(claim(tokenizer=tokenizer))
        turn = await conversation.begin(opening("s", "u"))
    assert turn is not None
    assert turn.versions == (VersionSpan(0, 0, 2),)


async def test_a_turn_says_how_long_it_waited_for_an_engine(redis: Redis, tokenizer: str) -> None:
    busy = generated([9, END], finish="stop")
    busy["meta_info"] |= {"e2e_latency": 0.0, "queue_time": 0.0}  # all of the time was spent on the way
    told, _ = await turn_from([Canned({}, 503), Canned(busy)], redis, tokenizer)
    assert FIRST_WAIT_S <= told.engine_wait_s <= told.generate_s
    silent, _ = await turn_from([Canned(generated([9, END], finish="stop"))], redis, tokenizer)
    assert 0 <= silent.engine_wait_s < silent.generate_s, "its round trip counts as work"
