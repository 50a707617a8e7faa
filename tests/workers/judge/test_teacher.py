"""A teacher's log-probs: one for each token that the policy sampled, given exactly what its engine held, or no judgement."""

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from benchmarks import chat_tokenizer
from pipeline.judge import Judge, Judgement
from pipeline.message import pack_float32s, pack_int32s, unpack_float32s, unpack_int32s
from pipeline.request import EpisodeStatus
from pipeline.tokenizer import TokenizerBundle, read_bundle
from pipeline.trajectory import Turn, parents_of
from tests.conftest import Serving
from tests.pipeline import samples
from tests.workers.judge.rollouts import judge_claim, trajectory, tree
from tests.workers.judge.servers import Server, serving_judge
from tests.workers.judge.test_stage import One
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.stage import finished_rollout, judge_rollout
from workers.judge.teacher import TeacherJudge
from workers.policy.requested import NoEngines
from workers.policy.sglang import one_tokenizer

BUNDLE = replace(chat_tokenizer.bundle(), vocab_size=100)
TEACHER = Judge(method="teacher", name="big", tokenizer="t")


def turn(fed: list[int], sampled: list[int], *, kept: int = 0, **fields: Any) -> Turn:
    given = {"logprobs": pack_float32s([-0.5] * len(sampled)), "versions": (), "actions": ()}
    return samples.turn(
        kept_tokens=kept, fed=pack_int32s(fed), sampled=pack_int32s(sampled), **(given | fields)
    )


# The context is cut before the third turn, and two turns follow the first: the third run begins as the first one does.
TURNS = (
    turn([1, 2, 3], [10, 11]),
    turn([4], [12], kept=5),
    turn([5, 6], [13, 14, 15], kept=2),
    turn([7], [16], kept=5, after=0),
    turn([8], [17], kept=5, after=0, aside=True),
)


def logprob(before: Sequence[int], token: int) -> float:
    """A log-prob that depends on the token and on everything before it, and is exact in float32."""
    return -float((sum((place + 1) * one for place, one in enumerate(before)) + 7 * token) % 1024) / 64


def answer(
    body: dict[str, Any], value: Callable[[Sequence[int], int], float | None] = logprob
) -> dict[str, Any]:
    """What SGLang answers about a prompt: the first token from `logprob_start_len` on has no log-prob."""
    ids, first = body["input_ids"], body["logprob_start_len"]
    rows = [[value(ids[:place], ids[place]), ids[place], None] for place in range(first + 1, len(ids))]
    return {
        "output_ids": [],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 0},
            "weight_version": "7",
            "input_token_logprobs": [[None, ids[first], None], *rows],
        },
    }


async def as_asked(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, answer(body)


async def judged(
    turns: Sequence[Turn],
    reply: Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]] = as_asked,
    judge: Judge = TEACHER,
) -> tuple[Judgement, Server]:
    async with serving_judge(reply) as server:
        return await judged_by(server.url, turns, judge), server


async def judged_by(
    url: str, turns: Sequence[Turn], judge: Judge = TEACHER, bundle: TokenizerBundle = BUNDLE
) -> Judgement:
    request = samples.request()
    rollout = finished_rollout(trajectory(request, turns))
    async with http_session() as session:
        engines = JudgeEngines(session, url) if url else NoEngines("SWERVE_JUDGE_ROUTER_URL")
        teacher = TeacherJudge(engines, one_tokenizer(bundle), asyncio.Semaphore(2))
        claim = judge_claim(request.id, judge)
        return await judge_rollout(
            claim, EpisodeStatus(), rollouts=One(rollout), methods={"teacher": teacher}
        )


def contexts(turns: Sequence[Turn]) -> list[list[int]]:
    """The ids that the policy's engine held after each turn, by their definition."""
    held: list[list[int]] = []
    for number, parent in zip(range(len(turns)), parents_of(turns), strict=True):
        kept = held[parent][: turns[number].kept_tokens] if parent >= 0 else []
        held.append([*kept, *unpack_int32s(turns[number].fed), *unpack_int32s(turns[number].sampled)])
    return held


@pytest.mark.parametrize("turns", [TURNS, tree("mend add()")], ids=["cut", "agent program"])
async def test_each_sampled_token_has_one_log_prob_given_exactly_what_the_engine_held(
    turns: tuple[Turn, ...],
) -> None:
    judgement, server = await judged(turns)
    assert judgement.failed is None
    assert [step.turn for step in judgement.steps] == list(range(len(turns)))
    for step, one, ids in zip(judgement.steps, turns, contexts(turns), strict=True):
        start = len(ids) - len(unpack_int32s(one.sampled))
        expected = [logprob(ids[:place], ids[place]) for place in range(start, len(ids))]
        assert list(unpack_float32s(step.logprobs)) == ([] if one.aside else expected)
        assert (step.score, step.unscored) == (None, "aside" if one.aside else None)
    num_trained = sum(len(unpack_int32s(one.sampled)) for one in turns if not one.aside)
    assert judgement.num_logprobs == num_trained
    assert judgement.judge == "big@7"
    assert all(body["sampling_params"]["max_new_tokens"] == 0 for body in server.requests)


async def test_a_run_is_asked_about_once_and_from_its_first_trained_token_on() -> None:
    judgement, server = await judged(TURNS)
    assert [body["input_ids"] for body in server.requests] == [
        [1, 2, 3, 10, 11, 4, 12],
        [1, 2, 5, 6, 13, 14, 15],
        [1, 2, 3, 10, 11, 7, 16],
    ]
    assert [body["logprob_start_len"] for body in server.requests] == [2, 3, 5]
    rollout_id = judgement.claim.request.rollout_id
    assert {headers["X-SMG-Routing-Key"] for headers in server.headers} == {rollout_id}


async def test_a_turn_without_a_command_and_the_submission_are_taught_as_others_are() -> None:
    judgement, _ = await judged([turn([1], [2]), turn([3], [4], kept=2)])
    assert all(step.logprobs for step in judgement.steps)


def without_last(body: dict[str, Any]) -> dict[str, Any]:
    made = answer(body)
    made["meta_info"]["input_token_logprobs"].pop()
    return made


def of_other_ids(body: dict[str, Any]) -> dict[str, Any]:
    made = answer(body)
    made["meta_info"]["input_token_logprobs"][-1][1] += 1
    return made


def without_any(body: dict[str, Any]) -> dict[str, Any]:
    made = answer(body)
    del made["meta_info"]["input_token_logprobs"]
    return made


def saying(value: float | None) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: answer(body, lambda before, token: value if token == 14 else -1.0)


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        (saying(None), "turn 2: 2 log-probs for 3 sampled tokens"),
        (saying(0.01), "turn 2: a log-prob of 0.0100, above 0"),
        # JSON has no such numbers, and what writes them all the same is not understood.
        (saying(math.nan), "engine response: JSON is malformed"),
        (saying(-math.inf), "engine response: JSON is malformed"),
        (without_last, "input_token_logprobs are not those of the 5 ids that were asked about"),
        (of_other_ids, "input_token_logprobs are not those of the 5 ids that were asked about"),
        (without_any, "input_token_logprobs are not those of the 5 ids that were asked about"),
    ],
)
async def test_an_answer_that_lacks_one_usable_log_prob_is_a_failed_judgement(
    made: Callable[[dict[str, Any]], dict[str, Any]], complaint: str
) -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, made(body)

    judgement, _ = await judged(TURNS, reply)
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", True)
    assert complaint in judgement.failed.message
    assert (judgement.steps, judgement.num_logprobs) == ((), 0)


async def test_a_token_outside_of_the_teachers_vocabulary_fails_before_anything_is_asked() -> None:
    judgement, server = await judged([turn([1, 2], [99]), turn([3], [100], kept=3)])
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("request", False)
    assert "token id 100 is outside of the teacher's vocabulary of 100" in judgement.failed.message
    assert server.requests == []


@pytest.mark.parametrize("served", ["same", "other", "elsewhere"])
async def test_engines_of_a_model_with_another_vocabulary_are_not_believed(
    served: str, tmp_path: Path
) -> None:
    vocabulary = json.loads(BUNDLE.tokenizer_json)
    if served == "other":
        vocabulary["added_tokens"][0]["content"] = "<|another|>"
    if served != "elsewhere":  # there this machine cannot read the model's directory
        (tmp_path / "tokenizer.json").write_text(json.dumps(vocabulary))
    async with serving_judge(as_asked) as server:
        server.info = {"is_generation": True, "model_path": str(tmp_path)}
        judgement = await judged_by(server.url, TURNS)
    if served != "other":
        assert judgement.failed is None
        return
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", True)
    assert (
        f"judge.tokenizer: the teacher's engines serve {tmp_path}, which has another"
        in judgement.failed.message
    )
    assert "for judge.tokenizer and '<|another|>' there; start them with" in judgement.failed.message
    assert server.requests == []


async def test_a_teacher_that_refuses_a_context_is_not_asked_again() -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 400, {"error": {"message": "the input is longer than the context"}}

    judgement, server = await judged(TURNS, reply)
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", False)
    assert "longer than the context" in judgement.failed.message
    assert len(server.requests) == 1


async def test_an_answer_that_takes_longer_than_a_vote_may_is_a_failed_judgement() -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        await asyncio.sleep(60)
        raise AssertionError

    judgement, _ = await judged(TURNS, reply, replace(TEACHER, vote_s=0.05))
    assert judgement.failed is not None
    assert judgement.failed.message == "no answer within 0.05 s"


async def test_a_judge_without_engines_refuses_a_teachers_request_as_an_outage() -> None:
    judgement = await judged_by("", TURNS)
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", True)
    assert "SWERVE_JUDGE_ROUTER_URL" in judgement.failed.message


async def sampled(url: str, prompt: list[int], *, kept: int, fed: list[int]) -> Turn:
    """A turn of twelve tokens that the engine itself draws at temperature 1."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json=body) as response:
        reply = await response.json()
    logprobs = [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
    return turn(fed, reply["output_ids"], kept=kept, logprobs=pack_float32s(logprobs))


@pytest.mark.slow  # its engine is one of its own
async def test_a_teacher_with_the_policys_weights_gives_the_policys_own_log_probs(serving: Serving) -> None:
    bundle, url = read_bundle(serving.model_dir), serving.router_url
    opening = list(range(20, 60))
    turns = [await sampled(url, opening, kept=0, fed=opening)]
    held = [*opening, *unpack_int32s(turns[0].sampled)]
    turns.append(await sampled(url, [*held, 30, 31], kept=52, fed=[30, 31]))
    turns.append(await sampled(url, [*opening, 40, 41, 42], kept=40, fed=[40, 41, 42]))
    turns.append(replace(await sampled(url, [*held, 50], kept=52, fed=[50]), after=0))
    judgement = await judged_by(serving.router_url, turns, bundle=bundle)
    assert judgement.failed is None
    for step, one in zip(judgement.steps, turns, strict=True):
        behaviour = unpack_float32s(one.logprobs)
        assert len(behaviour) == 12
        assert list(unpack_float32s(step.logprobs)) == pytest.approx(list(behaviour), abs=1e-4)
