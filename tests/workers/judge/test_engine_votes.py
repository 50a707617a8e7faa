"""Votes of a real SGLang behind the real router."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from pipeline.judge import Judge, Judgement
from pipeline.judge_templates import read_templates
from pipeline.request import EpisodeStatus
from pipeline.tokenizer import TokenizerBundle, put_tokenizer, read_bundle
from tests.conftest import Serving
from tests.pipeline import samples
from tests.workers.judge.rollouts import judge_claim, trajectory
from tests.workers.judge.test_stage import One
from tests.workers.judge.verdict_model import write_verdict_checkpoint
from tests.workers.policy.engines import Wire, tapped
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.prompts import JudgeTokenizers
from workers.judge.reward_model import RewardVoters
from workers.judge.stage import finished_rollout, judge_rollout
from workers.judge.votes import EngineVoters, VoteJudge
from workers.policy.render import Renderer
from workers.policy.sglang import announced_tokenizers

pytestmark = pytest.mark.slow  # its engine is one of its own

RECIPES = Path(__file__).parents[3] / "trainer/recipes"


@pytest.fixture
def bundle(serving: Serving) -> TokenizerBundle:
    return read_bundle(serving.model_dir)


@pytest.fixture
async def weights(serving: Serving, tmp_path: Path) -> AsyncIterator[Any]:
    """Loads a model that draws the sign of its verdict from some signs; the engine's own weights are back afterwards."""

    async def load(signs: str) -> None:
        model = write_verdict_checkpoint(tmp_path / f"signs{signs}", signs)
        await serving.load(model, f"verdicts-{len(signs)}")

    yield load
    await serving.load(serving.model_dir, "0")


@pytest.fixture
async def wire(serving: Serving) -> AsyncIterator[Wire]:
    async with tapped(serving.router_url) as wire:
        yield wire


async def judged(redis: Redis, url: str, judge: Judge) -> Judgement:
    """The tests' rollout as the engines at `url` judge it."""
    request = samples.request()
    rollout = finished_rollout(trajectory(request))
    async with http_session() as session:
        engines = JudgeEngines(session, url)
        methods = {
            "votes": VoteJudge(
                EngineVoters(engines, JudgeTokenizers(announced_tokenizers(redis))), asyncio.Semaphore(8)
            ),
            "reward_model": VoteJudge(
                RewardVoters(engines, JudgeTokenizers(announced_tokenizers(redis))), asyncio.Semaphore(8)
            ),
        }
        claim = judge_claim(request.id, judge)
        return await judge_rollout(claim, EpisodeStatus(), rollouts=One(rollout), methods=methods)


async def model_judge(redis: Redis, bundle: TokenizerBundle, **fields: Any) -> Judge:
    given: dict[str, Any] = {
        "method": "votes",
        "name": "tiny",
        "tokenizer": await put_tokenizer(redis, bundle),
        "max_new_tokens": 16,
        "prompt_tokens": 6000,
    }
    return Judge(**(given | fields))


async def test_a_score_is_the_mean_of_votes_that_were_drawn_with_different_seeds(
    wire: Wire, redis: Redis, bundle: TokenizerBundle, weights: Any
) -> None:
    await weights("+-")
    judgement = await judged(redis, wire.url, await model_judge(redis, bundle, num_votes=6))
    assert judgement.failed is None
    assert judgement.judge == "tiny@verdicts-2"
    assert [step.unscored for step in judgement.steps] == [None, "format_error", None, None, "submission"]
    votes = [vote for step in judgement.steps for vote in step.votes]
    assert {vote.text: vote.value for vote in votes} == {"\\boxed{+1}": 1.0, "\\boxed{-1}": -1.0}
    for step in judgement.steps:
        values = [vote.value for vote in step.votes if vote.value is not None]
        assert step.score == (pytest.approx(sum(values) / 6) if values else None)
    assert len({vote.seed for vote in votes}) == len(votes) == 18
    sent = [request["sampling_params"]["sampling_seed"] for request in wire.requests]
    assert sorted(sent) == sorted(vote.seed for vote in votes)
    rollout_id = judgement.claim.request.rollout_id
    assert {headers["X-SMG-Routing-Key"] for headers in wire.headers} == {rollout_id}
    prompts = {step.prompt_tokens for step in judgement.steps if step.votes}
    assert prompts == {len(request["input_ids"]) for request in wire.requests}


async def test_a_vote_that_is_opened_for_the_judge_is_the_opening_and_what_the_judge_adds(
    wire: Wire, redis: Redis, bundle: TokenizerBundle, weights: Any
) -> None:
    await weights("+-")
    templates = read_templates(RECIPES / "judge_small.yaml")
    judge = await model_judge(redis, bundle, num_votes=8, templates=templates)
    judgement = await judged(redis, wire.url, judge)
    votes = [vote for step in judgement.steps for vote in step.votes]
    assert {vote.text: vote.value for vote in votes} == {"\\boxed{+1}": 1.0, "\\boxed{-1}": -1.0}
    renderer = Renderer(bundle)
    for request, reply in zip(wire.requests, wire.replies, strict=True):
        assert renderer.decode(request["input_ids"]).endswith("assistant\n\\boxed{")
        assert renderer.decode(reply["output_ids"]).startswith(("+1}", "-1}"))


@pytest.mark.parametrize("method", ["votes", "reward_model"])
async def test_a_judge_whose_reply_begins_with_a_thought_cannot_have_its_verdict_begun_for_it(
    serving: Serving, redis: Redis, bundle: TokenizerBundle, method: str
) -> None:
    template = bundle.chat_template.replace("assistant\n", "assistant\n<think>\n")
    thinking = replace(bundle, chat_template=template)
    templates = read_templates(RECIPES / "judge_small.yaml")
    judge = await model_judge(redis, thinking, templates=templates, method=method)
    judgement = await judged(redis, serving.router_url, judge)
    assert judgement.failed is not None
    assert judgement.failed.boundary == "request"
    assert "begins a thought" in judgement.failed.message


async def test_the_votes_of_a_step_find_its_prompt_in_the_engines_cache(
    wire: Wire, redis: Redis, bundle: TokenizerBundle, weights: Any
) -> None:
    await weights("+")
    await judged(redis, wire.url, await model_judge(redis, bundle))
    meta = [reply["meta_info"] for reply in wire.replies]
    computed = sorted(each["prompt_tokens"] - each["cached_tokens"] for each in meta)
    # Two of three votes compute a token of their prompt, and the prompts of later steps begin like the first.
    assert computed[:6] == [1] * 6
    assert max(computed[6:8]) < computed[8] * 2 / 3


async def test_a_model_that_writes_no_verdict_abstains_and_scores_no_0(
    wire: Wire, redis: Redis, bundle: TokenizerBundle
) -> None:
    judgement = await judged(redis, wire.url, await model_judge(redis, bundle, num_votes=2))
    assert judgement.failed is None
    assert judgement.scores == {}
    judged_steps = [step for step in judgement.steps if step.votes]
    assert {step.unscored for step in judged_steps} == {"no_valid_vote"}
    assert all(vote.value is None and not vote.error for step in judged_steps for vote in step.votes)


async def test_a_language_model_scores_by_the_log_probs_of_its_verdict(
    redis: Redis, bundle: TokenizerBundle, serving: Serving, weights: Any
) -> None:
    judge = await model_judge(redis, bundle, method="reward_model")
    await weights("+-")
    undecided = await judged(redis, serving.router_url, judge)
    assert undecided.scores == pytest.approx({0: 0.0, 2: 0.0, 3: 0.0}, abs=1e-3)
    await weights("-")
    sure = await judged(redis, serving.router_url, judge)
    assert sure.scores == pytest.approx({0: -1.0, 2: -1.0, 3: -1.0}, abs=1e-3)
    assert sure.judge == "tiny@verdicts-1"
    (vote,) = sure.steps[0].votes
    assert vote.text.startswith("log-prob of + ")


async def test_a_judge_without_a_known_tokenizer_is_the_requests_fault(
    redis: Redis, serving: Serving, bundle: TokenizerBundle
) -> None:
    for tokenizer, fault in {
        "": "they need the judge's tokenizer",
        "feed": "feed was never announced",
    }.items():
        judge = await model_judge(redis, bundle, tokenizer=tokenizer)
        judgement = await judged(redis, serving.router_url, judge)
        assert judgement.failed is not None
        assert (judgement.failed.boundary, judgement.failed.transient) == ("request", False)
        assert fault in judgement.failed.message


async def test_engines_that_are_away_are_an_outage_and_no_judgement(
    redis: Redis, bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.judge.engines.RETRY_BUDGET_S", 0.2)
    for method in ("votes", "reward_model"):
        judge = await model_judge(redis, bundle, method=method)
        judgement = await judged(redis, "http://127.0.0.1:1", judge)
        assert judgement.failed is not None
        assert (judgement.failed.boundary, judgement.failed.transient) == ("engine", True)
        assert judgement.steps == ()
