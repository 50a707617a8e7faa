"""A reward model behind a real SGLang and the real router: the output of its head is the score."""

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis

from pipeline.chat import ChatMessage
from pipeline.judge import Judge
from pipeline.request import EpisodeStatus
from pipeline.tokenizer import put_tokenizer, read_bundle
from tests.conftest import Serving, served
from tests.pipeline import samples
from tests.workers.judge.reward_checkpoint import write_reward_checkpoint
from tests.workers.judge.rollouts import judge_claim, trajectory
from tests.workers.judge.test_stage import One
from workers.judge.engines import JudgeEngines, http_session
from workers.judge.prompts import JudgeTokenizers
from workers.judge.reward_model import RewardVoters
from workers.judge.stage import finished_rollout, judge_rollout
from workers.judge.votes import VoteJudge
from workers.policy.render import Renderer
from workers.policy.sglang import announced_tokenizers


@pytest.fixture(scope="module")
def rewarding(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    model = write_reward_checkpoint(tmp_path_factory.mktemp("reward-model"))
    with served(model, "--is-embedding", logs=tmp_path_factory.mktemp("rewarding")) as serving:
        yield serving


@pytest.mark.slow
@pytest.mark.parametrize("place", ["router_url", "engine_url"])
async def test_a_score_is_the_squashed_output_of_the_head(
    rewarding: Serving, redis: Redis, place: str
) -> None:
    url: str = getattr(rewarding, place)
    bundle = read_bundle(rewarding.model_dir)
    tokenizer = await put_tokenizer(redis, bundle)
    judge = Judge(method="reward_model", name="tiny-rm", tokenizer=tokenizer, prompt_tokens=6000)
    request = samples.request()
    rollout = finished_rollout(trajectory(request))
    async with http_session() as session:
        engines = JudgeEngines(session, url)
        await engines.check()
        methods = {
            "reward_model": VoteJudge(
                RewardVoters(engines, JudgeTokenizers(announced_tokenizers(redis))), asyncio.Semaphore(8)
            )
        }
        judgement = await judge_rollout(
            judge_claim(request.id, judge), EpisodeStatus(), rollouts=One(rollout), methods=methods
        )
    assert judgement.failed is None
    assert judgement.judge == "tiny-rm@0"
    assert list(judgement.scores) == [0, 2, 3]
    for step in (judgement.steps[turn] for turn in judgement.scores):
        (vote,) = step.votes
        reward = float(vote.text.removeprefix("reward "))
        assert step.score == pytest.approx(math.tanh(reward / 2), abs=1e-4)
    assert len(set(judgement.scores.values())) == 3


async def test_a_model_that_scores_conversations_gets_the_step_as_the_last_message(tiny_model: Path) -> None:
    renderer = Renderer(read_bundle(tiny_model))
    ids = renderer.conversation([ChatMessage("user", "issue"), ChatMessage("assistant", "<|im_end|>step")])
    assert renderer.decode(ids).startswith("<|im_start|>user\nissue<|im_end|>\n<|im_start|>assistant\n")
    assert ids.count(renderer.end_id) == 2
