"""Adapters alone reach real engines, which sample from them beside the weights that the run began with."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from redis.asyncio import Redis

from infra import processes
from pipeline import weights
from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.request import Claim
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.trajectory import Turn, VersionSpan
from pipeline.weights import base_name, version_name
from tests.conftest import Serving, answers_ok, free_ports, served
from tests.tiny_llama import VOCAB_SIZE, write_checkpoint
from tests.trainer.learner.tiny import config, train
from tests.trainer.weights.receivers import Hosts
from tests.trainer.weights.run_of_weights import CONTROL_S, RUN, RunOfWeights, eventually_routed
from tests.workers.agent.episode import claim, opening, user
from trainer.batching.batch import Sample
from trainer.learner import backend
from trainer.learner.config import LORA_TARGETS, LoraConfig
from trainer.learner.megatron import Learner
from trainer.recipe import WeightsRecipe
from trainer.weights import adapters
from trainer.weights.engines import EngineFailure, Engines
from trainer.weights.publish import open_transport
from trainer.weights.transport import WeightTransport
from workers.policy.conversation import Conversation
from workers.policy.sglang import SglangPolicies, announced_tokenizers, recorded_served

pytestmark = [pytest.mark.slow, pytest.mark.cpu_only]

RANK = 4
FLAGS = ("--enable-lora", f"--max-lora-rank={RANK}", "--lora-target-modules", *LORA_TARGETS)
LONGEST_GAP = 1e-3
LONG_TOKENS = 2000


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """This process is the whole learner; one thread, for the machine is shared with other tests."""
    torch.set_num_threads(1)
    backend.join()
    yield
    backend.leave()


@pytest.fixture(scope="module")
def adapted(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """An engine that takes adapters, behind a router."""
    with served(tiny_model, *FLAGS, logs=tmp_path_factory.mktemp("adapted")) as serving:
        yield serving


@pytest.fixture
async def engines(adapted: Serving) -> AsyncIterator[Engines]:
    async with Engines(adapted.router_url, control_s=CONTROL_S) as engines:
        yield engines
        for engine in await engines.routed():
            if engine.url != adapted.engine_url:
                await engines.quarantine(engine)
        await eventually_routed(engines, {adapted.engine_url})
        for name in await engines.adapters(adapted.engine_url):
            await engines.unload(adapted.engine_url, name)


class Adapted:
    """A learner whose weights are other ones than the engines began with, and what exports its adapters."""

    def __init__(self, model: Path) -> None:
        self.learner = Learner(
            config(lora=LoraConfig(rank=RANK, alpha=8), lr=1e-2, micro_batch_tokens=4096, snapshots_kept=4), model_directory=model
        )

    def train(self, version: int) -> None:
        """Change the adapters, and remember them as those of a version."""
        train(self.learner, 3, vocab_size=VOCAB_SIZE)
        self.learner.snapshot(version)

    def gap(self, turns: list[Turn]) -> float:
        """The largest distance of a sampled token's log-prob to the learner's with the adapters of the token's version."""
        fed, logprobs, versions = list[int](), list[float](), list[int]()
        for turn in turns:
            fed += unpack_int32s(turn.fed)
            logprobs += [0.0] * (len(fed) - len(logprobs))
            versions += [-1] * (len(fed) - len(versions))
            fed += unpack_int32s(turn.sampled)
            logprobs += unpack_float32s(turn.logprobs)
            for span in turn.versions:
                versions += [span.version] * (span.end - span.start)
        of_token = np.array(versions, np.int32)
        sample = Sample(
            request_id="r",
            group_id="g",
            branch=0,
            tokens_T=np.array(fed, np.int32),
            trained_T=of_token >= 0,
            behaviour_logprobs_T=np.array(logprobs, np.float32),
            advantages_T=np.zeros(len(fed), np.float32),
            versions_T=of_token,
        )
        gaps = [
            np.abs(self.learner.logprobs_under(version, [sample], 1.0)[0] - sample.behaviour_logprobs_T)[
                of_token == version
            ].max()
            for version in sorted({*versions} - {-1})
        ]
        return float(max(gaps))


@pytest.fixture
def policy(tmp_path: Path) -> Adapted:
    return Adapted(write_checkpoint(tmp_path / "model", seed=9))


async def transport_of(
    policy: Adapted, directory: Path, stack: AsyncExitStack, recipe: WeightsRecipe | None = None
) -> WeightTransport:
    return await open_transport(
        recipe or WeightsRecipe(adapters="alone"),
        RUN,
        directory=directory,
        export=lambda name, path: getattr(policy.learner, name)(path),
        keep=2,
        stack=stack,
    )


@pytest.fixture
async def run(
    redis: Redis, engines: Engines, policy: Adapted, tmp_path: Path
) -> AsyncIterator[RunOfWeights]:
    async with AsyncExitStack() as stack:
        transport = await transport_of(policy, tmp_path / "weights", stack)
        run = RunOfWeights(redis, engines, tmp_path / "weights", transport=transport)
        yield await stack.enter_async_context(run)


@pytest.fixture
async def policies(adapted: Serving, redis: Redis) -> AsyncIterator[SglangPolicies]:
    async with SglangPolicies(
        adapted.router_url, announced_tokenizers(redis), served=recorded_served(redis)
    ) as policies:
        yield policies


async def conversation(
    policies: SglangPolicies, redis: Redis, model: Path, *, num_tokens: int = 100
) -> Conversation:
    made: Claim = claim(
        tokenizer=await put_tokenizer(redis, read_bundle(model)), sampling={"max_new_tokens": num_tokens}
    )
    request = replace(made.request, run_id=RUN, names_adapter=True)
    return await policies.open(replace(made, request=request))


def played(turn: Turn | None) -> Turn:
    assert turn is not None
    return turn


def version_of(turn: Turn) -> int:
    (span,) = turn.versions
    assert span == VersionSpan(span.version, 0, len(unpack_int32s(turn.sampled)))
    return span.version


async def test_tokens_are_those_of_the_adapter_of_their_version_which_never_changes_in_a_turn(
    run: RunOfWeights,
    engines: Engines,
    adapted: Serving,
    policies: SglangPolicies,
    redis: Redis,
    policy: Adapted,
    tiny_model: Path,
) -> None:
    """The engine was started with other weights than the learner's: it gets the base first, and is paused once, for that."""
    policy.learner.snapshot(0)
    assert await run.serve(0)
    speaker = await conversation(policies, redis, tiny_model)
    turns = [played(await speaker.begin(opening("be brief", "count")))]
    policy.train(1)
    assert await run.serve(1)
    turns.append(played(await speaker.answer(user("go on"))))
    long = await conversation(policies, redis, tiny_model, num_tokens=LONG_TOKENS)
    asked = asyncio.create_task(long.begin(opening("be long", "count")))
    await until_sampling(adapted.engine_url, asked)
    policy.train(2)
    assert await run.serve(2)
    assert not asked.done(), "the reply must be longer than the delivery"
    turns.append(played(await speaker.answer(user("go on"))))
    assert [version_of(turn) for turn in turns] == [0, 1, 2]
    assert version_of(long_turn := played(await asked)) == 1
    gap, long_gap = policy.gap(turns), policy.gap([long_turn])
    print(f"largest gap of {sum(len(one.sampled) // 4 for one in turns)} tokens of three versions: {gap:.1e}")
    print(f"largest gap of {len(long_turn.sampled) // 4} tokens under version 1, of which 2 was loaded: {long_gap:.1e}")
    assert max(gap, long_gap) < LONGEST_GAP
    assert len(run.deliveries.take_pauses()) == 1
    assert (await engines.served(adapted.engine_url)).weight_version == base_name(RUN)
    version = await weights.newest_version(redis, RUN)
    assert version is not None
    assert version.num_bytes < 200_000
    assert {path.name for path in Path(version.directory).iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


async def until_sampling(engine_url: str, request: asyncio.Task[Turn | None]) -> None:
    """Return once the engine works on the request."""
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        while not request.done():
            async with http.get(f"{engine_url}/v1/loads") as response:
                if (await response.json())["loads"][0]["num_running_reqs"]:
                    return
            await asyncio.sleep(0.02)
    raise AssertionError("the reply was over before it was seen")
