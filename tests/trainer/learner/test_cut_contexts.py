"""Cut trajectories from a real engine to the learner: every sampled token is trained once, under the log-probs of what it saw."""

from collections.abc import Iterable
from dataclasses import replace as with_arrays
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from redis.asyncio import Redis
from transformers import GPT2Config, GPT2LMHeadModel

from pipeline.request import Context
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.trajectory import Submitted, Trajectory, Turn
from tests.conftest import Serving
from tests.trainer.learner.tiny import config, make_batch, relative_difference, take_step
from tests.trainer.trajectories import trajectory, turn
from tests.workers.agent.episode import claim, opening, user
from trainer.batching.audit import measure_gap
from trainer.batching.batch import Sample
from trainer.batching.samples import samples_of
from trainer.learner.megatron import Learner
from workers.policy.sglang import SglangPolicies, announced_tokenizers

CONTEXT_TOKENS = 200
NUM_TURNS = 8


async def sampled(serving: Serving, redis: Redis, **context: Any) -> Trajectory:
    """An episode whose replies the engine draws, longer than its context."""
    await serving.name_weights("run-1@0")
    bundle = read_bundle(serving.model_dir)
    if "thinking" in context:  # every reply is a thought then: its end is never sampled
        bundle = replace(
            bundle, chat_template=bundle.chat_template.replace("assistant\n", "assistant\n<think>\n")
        )
    tokenizer = await put_tokenizer(redis, bundle)
    given = claim(tokenizer=tokenizer, context_tokens=CONTEXT_TOKENS, sampling={"max_new_tokens": 16})
    request = replace(given.request, context=Context(**({"policy": "head_tail"} | context)))
    given = replace(given, request=request)
    async with SglangPolicies(serving.router_url, announced_tokenizers(redis)) as policies:
        conversation = await policies.open(given)
        turns = [await conversation.begin(opening("be brief", "mend it"))]
        for number in range(1, NUM_TURNS):
            turns.append(await conversation.answer(user(f"def function_{number}(self):\n")))
    played = tuple(turn for turn in turns if isinstance(turn, Turn))
    assert len(played) == NUM_TURNS
    return Trajectory(
        claim=given, turns=played, outcome=Submitted(patch=b""), reward=None, started_at=0, finished_at=0
    )


def samples(played: Trajectory) -> tuple[Sample, ...]:
    return samples_of(played, vocab_size=512, max_tokens=CONTEXT_TOKENS)


# Quick: engine and learner agree about every token of a context that was cut.
@pytest.mark.slow_but_for("head_tail")
@pytest.mark.parametrize(
    "context",
    [{}, {"every_step": True}, {"marker": "message", "refill_to": 1.0}, {"thinking": "strip"}],
    ids=lambda context: ",".join(map(str, context)) or "head_tail",
)
async def test_engine_and_learner_agree_about_every_token_of_a_cut_trajectory(
    serving: Serving, redis: Redis, context: dict[str, Any]
) -> None:
    episode = await sampled(serving, redis, **context)
    assert sum(turn.cut is not None for turn in episode.turns) >= 2
    made = samples(episode)
    assert len(made) >= (NUM_TURNS if context.get("every_step") else 2)
    num_sampled = sum(len(turn.sampled) // 4 for turn in episode.turns)
    assert sum(sample.num_trained_tokens for sample in made) == num_sampled
    learner = Learner(
        config(micro_batch_tokens=CONTEXT_TOKENS, snapshots_kept=2), model_directory=serving.model_dir
    )
    learner.snapshot(0)
    batch = make_batch(with_advantage(made, 0.7))
    take_step(learner, batch.samples)
    gap = measure_gap(batch, learner.versions_held, learner.logprobs_under)
    assert gap.num_tokens == num_sampled
    assert gap.max is not None
    assert gap.max <= 1e-4


async def test_samples_of_single_turns_have_the_gradient_of_unbroken_ones(
    serving: Serving, redis: Redis
) -> None:
    episode = await sampled(serving, redis)
    request = replace(episode.claim.request, context=Context(policy="head_tail", every_step=True))
    single = replace(episode, claim=replace(episode.claim, request=request))
    learners = [
        Learner(config(micro_batch_tokens=CONTEXT_TOKENS, clip_grad=0.0), model_directory=serving.model_dir)
        for _ in range(2)
    ]
    unbroken, apart = samples(episode), samples(single)
    assert len(unbroken) < len(apart) == NUM_TURNS
    reports = [
        take_step(learner, with_advantage(made, 0.7))
        for learner, made in zip(learners, (unbroken, apart), strict=True)
    ]
    assert reports[0].num_trained_tokens == reports[1].num_trained_tokens
    assert reports[0].loss == pytest.approx(reports[1].loss, rel=1e-4)
    assert relative_difference(*learners) <= 1e-4


def gradient(model: GPT2LMHeadModel, made: Iterable[Sample]) -> torch.Tensor:
    """The gradient of the sum of the trained tokens' log-probs, each sample computed by itself."""
    model.zero_grad()
    for sample in made:
        tokens_1T = torch.from_numpy(sample.tokens_T.astype(np.int64))[None]
        logprobs_TV = model(tokens_1T).logits[0, :-1].log_softmax(-1)
        logprobs_T = logprobs_TV.gather(1, tokens_1T[0, 1:, None])[:, 0]
        logprobs_T[torch.from_numpy(sample.trained_T[1:])].sum().backward()
    return torch.cat([one.grad.ravel() for one in model.parameters() if one.grad is not None])


def test_branches_have_the_gradient_of_all_replies_by_themselves() -> None:
    """In double precision, with a reply that two others follow, a retry, and a second conversation."""
    torch.manual_seed(11)
    # Its norms and positions are computed in double precision too.
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    model.double().eval()
    given = trajectory(
        turn([1, 2, 3], [4, 5, 6], kept=0),
        replace(turn([9, 9], [8], kept=0), after=-1),
        replace(turn([7], [8, 9], kept=6), after=0),
        replace(turn([10, 11], [12], kept=6), after=0),
        replace(turn([10, 11], [13, 14], kept=6), after=0),
        replace(turn([15], [16], kept=9), after=2),
    )
    request = replace(given.claim.request, context=Context(every_step=True))
    apart = replace(given, claim=replace(given.claim, request=request))
    branches, replies = (samples_of(one, vocab_size=64, max_tokens=1000) for one in (given, apart))
    assert (len(branches), len(replies)) == (4, 6)
    assert sum(one.num_trained_tokens for one in branches) == 10
    expected = gradient(model, replies)
    assert expected.abs().max() > 1
    assert torch.allclose(gradient(model, branches), expected, rtol=1e-10, atol=1e-12)


def with_advantage(made: tuple[Sample, ...], advantage: float) -> tuple[Sample, ...]:
    return tuple(with_arrays(one, advantages_T=np.float32(advantage) * one.trained_T) for one in made)
