"""Votes that fail, come late or are refused are kept as such; none of them is ever a 0."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from pipeline.chat import ChatMessage
from pipeline.errors import RequestError
from pipeline.judge import Judge, Judgement
from pipeline.request import Endpoint, EpisodeStatus
from pipeline.tokenizer import TokenizerBundle, put_tokenizer, read_bundle
from tests.pipeline import samples
from tests.workers.judge.rollouts import judge_claim, ran, trajectory, turn
from tests.workers.judge.servers import Replier, Server, serving_judge
from tests.workers.judge.test_stage import One
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.prompts import JudgeTokenizers
from workers.judge.stage import finished_rollout, judge_rollout
from workers.judge.votes import EndpointVoters, EngineVoters, RequestedVoters, VoteJudge, vote_seed
from workers.policy.render import Renderer
from workers.policy.requested import NoEngines
from workers.policy.sglang import TokenizerSource, announced_tokenizers, one_tokenizer

TURNS = (turn(ran("ls", "calc.py\n")), turn(ran("cat calc.py", "def add\n")), turn(ran("true")))
KEY = "sk-not-to-be-seen"
PATIENCE_S = 240.0


def said(content: str, **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": content} | message}]}


async def no_tokenizer(name: str) -> TokenizerBundle | None:
    return None


async def voted(
    reply: Replier, *, concurrency: int = 8, tokenizers: TokenizerSource = no_tokenizer, **fields: Any
) -> tuple[Judgement, Server]:
    """The judgement of an endpoint that replies so."""
    request = samples.request()
    async with serving_judge(reply) as server, http_session() as session:
        endpoints = EndpointVoters(session, JudgeTokenizers(tokenizers))
        endpoint = Endpoint(api_base=f"{server.url}/v1", model="judge-7b", key_env=fields.pop("key_env", ""))
        judge = Judge(method="votes", endpoint=endpoint, **fields)
        rollout = finished_rollout(trajectory(request, (*TURNS, turn(ran("submit")))))
        methods = {
            "votes": VoteJudge(RequestedVoters(NoEngines(), endpoints), asyncio.Semaphore(concurrency))
        }
        claim = judge_claim(request.id, judge)
        judgement = await judge_rollout(claim, EpisodeStatus(), rollouts=One(rollout), methods=methods)
    return judgement, server


async def test_an_endpoint_is_sent_the_prompt_and_a_seed_of_its_own_for_each_vote() -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, said("fine. \\boxed{+1}")

    judgement, server = await voted(reply, num_votes=2, max_new_tokens=99, temperature=0.7)
    assert judgement.scores == {0: 1.0, 1: 1.0, 2: 1.0}
    assert judgement.judge == "judge-7b"
    assert len(server.requests) == 6
    assert len({body["seed"] for body in server.requests}) == 6
    first = server.requests[0]
    assert (first["model"], first["max_tokens"], first["temperature"]) == ("judge-7b", 99, 0.7)
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert samples.TASK.problem in first["messages"][1]["content"]
    assert first["messages"][1]["content"].endswith("\\boxed{+1} or \\boxed{-1}.")


async def test_the_prompt_for_an_endpoint_is_measured_by_the_judges_tokenizer_where_it_is_known(
    tiny_model: Path,
) -> None:
    bundle = read_bundle(tiny_model)

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, said("\\boxed{+1}")

    judgement, server = await voted(reply, num_votes=1, tokenizer="tiny", tokenizers=one_tokenizer(bundle))
    system, user = server.requests[0]["messages"]
    sent = [ChatMessage("system", system["content"]), ChatMessage("user", user["content"])]
    assert judgement.steps[0].prompt_tokens == len(Renderer(bundle).first_prompt(sent))
    guessed, _ = await voted(reply, num_votes=1)
    assert guessed.steps[0].prompt_tokens != judgement.steps[0].prompt_tokens
    unknown, _ = await voted(reply, num_votes=1, tokenizer="feed")
    assert unknown.failed is not None
    assert "feed was never announced" in unknown.failed.message


async def test_the_first_vote_of_a_step_is_in_before_its_others_are_sent() -> None:
    # The first step's first vote, then its two others together, and only then the other steps.
    together, num_sent = {1: 1, 2: 3, 3: 3, 4: 5, 5: 5}, 0
    arrived = asyncio.Condition()

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal num_sent
        async with asyncio.timeout(PATIENCE_S), arrived:
            number = num_sent = num_sent + 1
            arrived.notify_all()
            await arrived.wait_for(lambda: num_sent >= together.get(number, 0))
        await asyncio.sleep(0.05)  # for what is sent too early to arrive before the reply
        return 200, said("\\boxed{-1}")

    judgement, server = await voted(reply, num_votes=3)
    assert len(judgement.scores) == 3
    assert server.num_replied[:3] == [0, 1, 1]
    assert all(number >= 3 for number in server.num_replied[3:])
    last = [message["messages"][1]["content"] for message in server.requests[3:5]]
    assert server.num_replied[3:5] == [3, 3]
    assert last[0] != last[1]


async def test_all_rollouts_of_a_process_share_one_limit_of_votes_under_way() -> None:
    under_way: list[int] = []
    running, two_at_once = 0, asyncio.Event()

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal running
        running += 1
        under_way.append(running)
        if running == 2:
            two_at_once.set()
        if len(under_way) > 1:  # the first vote of all is sent alone
            async with asyncio.timeout(PATIENCE_S):
                await two_at_once.wait()
        await asyncio.sleep(0.01)  # for a third that is sent too early to arrive before the reply
        running -= 1
        return 200, said("\\boxed{-1}")

    await voted(reply, concurrency=2, num_votes=4)
    assert max(under_way) == 2


@pytest.mark.slow_but_for("an error", "no verdict")
@pytest.mark.parametrize(
    "failure", ["refused", "late", "garbage"], ids=["an error", "a timeout", "no verdict"]
)
async def test_a_vote_without_a_verdict_is_none_and_the_mean_is_of_the_others(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a vote is to be late, the clock of the loop is put forward by its limit."""
    replied, ahead_s = 0, 0.0
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + ahead_s)

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        nonlocal replied, ahead_s
        replied += 1
        if replied % 3 == 1:
            return 200, said("\\boxed{-1}")
        if replied % 3 == 2:
            return 200, said("<think>\\boxed{+1}</think> so: \\boxed{-1}")
        if failure == "late":
            ahead_s += PATIENCE_S
            await asyncio.sleep(100 * PATIENCE_S)  # beyond all that the clock is put forward
        return (400, {"error": "no"}) if failure == "refused" else (200, said("perhaps \\boxed{0}"))

    judgement, _ = await voted(reply, concurrency=1, num_votes=3, vote_s=PATIENCE_S)
    assert judgement.failed is None
    assert judgement.scores == {0: -1.0, 1: -1.0, 2: -1.0}
    votes = [vote for step in judgement.steps for vote in step.votes]
    lost = [vote for vote in votes if vote.value is None]
    assert len(lost) == 3
    errors = {"refused": "HTTP 400", "late": f"no answer within {PATIENCE_S:g} s", "garbage": ""}
    assert all(errors[failure] in vote.error for vote in lost)
    assert {bool(vote.error) for vote in lost} == {failure != "garbage"}
    assert "<think>\\boxed{+1}</think> so: \\boxed{-1}" in {vote.text for vote in votes}


async def test_a_step_whose_votes_all_abstain_has_no_score() -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, said("I cannot say.")

    judgement, _ = await voted(reply)
    assert judgement.failed is None
    assert judgement.scores == {}
    assert [step.unscored for step in judgement.steps] == [*["no_valid_vote"] * 3, "submission"]


@pytest.mark.parametrize(("status", "transient"), [(400, False), (401, False), (503, True)])
async def test_a_judge_all_of_whose_votes_fail_makes_no_judgement(
    status: int, transient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.judge.votes.RETRY_BUDGET_S", 0.0)

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return status, {"error": "no"}

    judgement, _ = await voted(reply, num_votes=2)
    assert judgement.failed is not None
    assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", transient)
    assert judgement.steps == ()


async def test_the_endpoints_key_is_sent_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 401, {"error": f"wrong key {KEY}"}

    monkeypatch.setenv("JUDGE_KEY", KEY)
    judgement, server = await voted(reply, key_env="JUDGE_KEY")
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(judgement)
    monkeypatch.delenv("JUDGE_KEY")
    judgement, server = await voted(reply, key_env="JUDGE_KEY")
    assert judgement.failed is not None
    assert judgement.failed.boundary == "request"
    assert "JUDGE_KEY is not set" in judgement.failed.message
    assert server.requests == []


async def test_engines_that_break_off_in_the_middle_make_no_judgement_of_what_came_before(
    redis: Redis, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.judge.engines.RETRY_BUDGET_S", 0.0)
    bundle: TokenizerBundle = read_bundle(tiny_model)
    request = samples.request()
    rollout = finished_rollout(trajectory(request, (*TURNS, turn(ran("submit")))))
    judge = Judge(method="votes", tokenizer=await put_tokenizer(redis, bundle), num_votes=1)

    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if len(server.requests) > 1:
            return 503, {"error": "gone"}
        return 200, {"text": "\\boxed{+1}", "meta_info": {"weight_version": "default"}}

    async with serving_judge(reply) as server, http_session() as session:
        engines = JudgeEngines(session, server.url)
        methods = {
            "votes": VoteJudge(
                EngineVoters(engines, JudgeTokenizers(announced_tokenizers(redis))), asyncio.Semaphore(8)
            )
        }
        claim = judge_claim(request.id, judge)
        for ready in (True, False):
            server.requests.clear()
            server.ready = ready
            judgement = await judge_rollout(claim, EpisodeStatus(), rollouts=One(rollout), methods=methods)
            if ready:  # something else than an outage: the steps that have votes keep them
                assert judgement.failed is None
                assert judgement.scores == {0: 1.0}
                assert [step.unscored for step in judgement.steps[1:3]] == ["no_valid_vote"] * 2
                assert judgement.judge == "model@default"
            else:
                assert judgement.failed is not None
                assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", True)


async def test_a_judge_without_engines_leaves_requests_that_need_some_to_others() -> None:
    request = samples.request()
    absent = NoEngines("SWERVE_JUDGE_ROUTER_URL")
    claim = judge_claim(request.id, Judge(method="votes"))
    judgement = await judge_rollout(
        claim,
        EpisodeStatus(),
        rollouts=One(finished_rollout(trajectory(request))),
        methods={"votes": VoteJudge(RequestedVoters(absent, absent), asyncio.Semaphore(8))},
    )
    assert judgement.failed is not None
    assert judgement.failed.boundary == "engine"
    assert await absent.blamed(claim.request.id, judgement.failed.message)


async def test_templates_that_cannot_be_used_are_the_requests_fault() -> None:
    async def reply(body: dict[str, Any]) -> tuple[int, Any]:
        raise AssertionError

    judgement, _ = await voted(reply, templates="step: '{{ reward }}'")
    assert judgement.failed is not None
    assert judgement.failed.boundary == RequestError.boundary
    assert "judge templates: step: unknown variable 'reward'" in judgement.failed.message


def test_a_seed_is_of_the_run_the_rollout_the_turn_and_the_vote() -> None:
    names = [
        (seed, rollout, turn, vote)
        for seed in (0, 1)
        for rollout in "ab"
        for turn in (0, 1)
        for vote in (0, 1)
    ]
    seeds = {vote_seed(*name) for name in names}
    assert len(seeds) == 16
    assert vote_seed(0, "a", 0, 0) == vote_seed(0, "a", 0, 0)
    assert all(0 <= seed < 2**31 for seed in seeds)
