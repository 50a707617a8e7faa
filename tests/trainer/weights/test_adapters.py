"""Adapters alone reach real engines, which sample from them beside the weights that the run began with."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from redis.asyncio import Redis

from benchmarks.scripted_fleet import alternating, fleet
from infra import processes
from pipeline.journal.reading import read
from pipeline.journal.rows import DeliveryRow, PublicationRow
from pipeline.message import unpack_float32s, unpack_int32s
from pipeline.request import RolloutRequest
from pipeline.tokenizer import put_tokenizer, read_bundle
from pipeline.trajectory import Turn, VersionSpan
from pipeline.weights import base_name, parse_version_name, version_name
from tests.conftest import Serving, answers_ok, free_ports, served
from tests.tiny_llama import VOCAB_SIZE, write_checkpoint
from tests.trainer.learner.tiny import config, train
from tests.trainer.processes import sets, start_anew, write_recipe
from tests.trainer.weights.receivers import Hosts
from tests.trainer.weights.run_of_weights import CONTROL_S, RUN, RunOfWeights, eventually_routed
from tests.workers.agent.episode import claim, opening, user
from trainer import convert
from trainer.batching.batch import Sample
from trainer.learner import backend
from trainer.learner.config import LORA_TARGETS, LoraConfig
from trainer.learner.megatron import Learner
from trainer.recipe import WeightsRecipe
from trainer.weights import adapters
from trainer.weights.engines import Engines
from trainer.weights.publish import open_transport
from trainer.weights.transport import WeightTransport
from workers.policy.conversation import Conversation
from workers.policy.sglang import EngineSettings, SglangPolicies, announced_tokenizers, recorded_served

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


class Reply(NamedTuple):
    """What an engine was fed and what it sampled from that, with an adapter."""

    fed: Sequence[int]
    sampled: Sequence[int]
    logprobs: Sequence[float]
    version: int


class Adapted:
    """A learner whose weights are other ones than the engines began with, and what exports its adapters."""

    def __init__(self, model: Path) -> None:
        self.learner = Learner(
            config(lora=LoraConfig(rank=RANK, alpha=8), lr=1e-2, micro_batch_tokens=4096, snapshots_kept=4),
            model_directory=model,
        )

    def train(self, version: int) -> None:
        """Change the adapters, and remember them as those of a version."""
        train(self.learner, 3, vocab_size=VOCAB_SIZE)
        self.learner.snapshot(version)

    def gap(self, replies: Sequence[Reply]) -> float:
        """The largest distance of a sampled token's log-prob to the learner's with the adapters of the token's version."""
        tokens, logprobs, versions = list[int](), list[float](), list[int]()
        for fed, sampled, sampled_logprobs, version in replies:
            tokens += [*fed, *sampled]
            logprobs += [0.0] * len(fed) + [*sampled_logprobs]
            versions += [-1] * len(fed) + [version] * len(sampled)
        behaviour, of_token = np.array(logprobs, np.float32), np.array(versions, np.int32)
        sample = Sample(
            request_id="request",
            group_id="group",
            branch=0,
            tokens_T=np.array(tokens, np.int32),
            trained_T=of_token >= 0,
            behaviour_logprobs_T=behaviour,
            advantages_T=np.zeros(len(tokens), np.float32),
            versions_T=of_token,
        )
        gaps = [
            np.abs(self.learner.logprobs_under(version, [sample], 1.0)[0] - behaviour)[of_token == version]
            for version in {*versions} - {-1}
        ]
        return float(max(gap.max() for gap in gaps))


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
async def run(redis: Redis, engines: Engines, policy: Adapted, tmp_path: Path) -> AsyncIterator[RunOfWeights]:
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


async def conversation(policies: SglangPolicies, redis: Redis, model: Path) -> Conversation:
    made = claim(tokenizer=await put_tokenizer(redis, read_bundle(model)), sampling={"max_new_tokens": 100})
    request = replace(made.request, run_id=RUN, names_adapter=True)
    return await policies.open(replace(made, request=request))


def played(turn: Turn | None) -> Reply:
    """The only version of a turn is that of all its tokens."""
    assert turn is not None
    (span,) = turn.versions
    sampled = unpack_int32s(turn.sampled)
    assert span == VersionSpan(span.version, 0, len(sampled))
    return Reply(unpack_int32s(turn.fed), sampled, unpack_float32s(turn.logprobs), span.version)


async def generate(url: str, adapter: str, num_tokens: int) -> Reply:
    body = {
        "input_ids": [5, 6, 7],
        "sampling_params": {"max_new_tokens": num_tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "lora_path": adapter,
    }
    async with (
        aiohttp.ClientSession(raise_for_status=True) as http,
        http.post(f"{url}/generate", json=body) as response,
    ):
        answer = await response.json()
    logprobs = [logprob for logprob, *_ in answer["meta_info"]["output_token_logprobs"]]
    return Reply([5, 6, 7], answer["output_ids"], logprobs, parse_version_name(adapter)[1])


async def test_tokens_are_those_of_the_adapter_of_their_version_which_never_changes_in_a_reply(
    run: RunOfWeights,
    engines: Engines,
    adapted: Serving,
    policies: SglangPolicies,
    redis: Redis,
    policy: Adapted,
) -> None:
    """The engine was started with other weights than the learner's: it gets the base first, and is paused once, for that."""
    policy.learner.snapshot(0)
    assert await run.serve(0)
    speaker = await conversation(policies, redis, adapted.model_dir)
    replies = [played(await speaker.begin(opening("be brief", "count")))]
    policy.train(1)
    assert await run.serve(1)
    replies.append(played(await speaker.answer(user("go on"))))
    asked = asyncio.create_task(generate(adapted.router_url, version_name(RUN, 1), LONG_TOKENS))
    await until_sampling(adapted.engine_url, asked)
    policy.train(2)
    assert await run.serve(2)
    replies.append(played(await speaker.answer(user("go on"))))
    assert not asked.done(), "the reply must be longer than the delivery"
    assert [reply.version for reply in replies] == [0, 1, 2]
    gaps = policy.gap(replies), policy.gap([await asked])
    num_tokens = sum(len(reply.sampled) for reply in replies)
    print(f"largest gap: {gaps[0]:.1e} (n = {num_tokens} tokens of three versions)")
    print(f"largest gap: {gaps[1]:.1e} (n = {LONG_TOKENS} tokens of a reply during which a version came)")
    assert max(gaps) < LONGEST_GAP
    assert len(run.deliveries.take_pauses()) == 1
    assert (await engines.served(adapted.engine_url)).weight_version == base_name(RUN)


@pytest.mark.usefixtures("engines")
async def test_a_run_publishes_adapters_alone_and_gives_whole_weights_in_the_end(
    redis_url: str, redis: Redis, adapted: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWERVE_ROUTER_URL", adapted.router_url)
    recipe, run = write_recipe(tmp_path, adapted.model_dir), tmp_path / "run"
    wishes = sets(
        "weights={adapters='alone'}", f"learner.lora={{rank={RANK}}}", "learner.lr=1e-2", "num_steps=2"
    )
    wishes += sets("evaluation.episodes=2", "audit.share=1.0")
    name_adapters = set[bool]()

    def verdict(request: RolloutRequest) -> float:
        name_adapters.add(request.names_adapter)
        return alternating(request)

    async with fleet(redis_url, verdict):
        trainer = start_anew(redis_url, recipe, "--run-dir", run, "--run-id", RUN, *wishes)
        assert await trainer.ended() == 0, trainer.output
    assert name_adapters == {True}
    rows = list(read(run / "journal", PublicationRow))
    assert [row.version for row in rows] == [0, 1, 2]
    assert max(row.num_bytes for row in rows) < 100_000
    assert [row.version for row in read(run / "journal", DeliveryRow)][-1] == 2
    alone, merged = run / "weights" / "v000002", tmp_path / "merged"
    assert convert.main([str(alone), str(merged), "--model", str(adapted.model_dir)]) == 0
    reply = await generate(adapted.router_url, version_name(RUN, 2), 200)
    whole = Adapted(merged)
    whole.learner.snapshot(2)
    assert whole.gap([reply]) < LONGEST_GAP
    monkeypatch.setenv("SWERVE_REDIS_URL", redis_url)
    name_adapters.clear()
    async with fleet(redis_url, verdict):
        words = [str(recipe), "--run-dir", str(run), "--temperature", "1", *wishes]
        evaluation = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "trainer.evaluate", *words), stdout=PIPE, stderr=PIPE
        )
        out, err = await evaluation.communicate()
    assert evaluation.returncode == 0, err.decode()
    assert "finished" in out.decode()
    assert name_adapters == {True}, "the newest checkpoint was published as adapters"


async def test_an_engine_that_restarts_gets_base_and_adapter_again(
    run: RunOfWeights, engines: Engines, adapted: Serving, policy: Adapted, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    policy.train(0)
    with engine(adapted.model_dir, port, tmp_path / "engine.log"):
        await engines.readmit(url)
        await eventually_routed(engines, {adapted.engine_url, url})
        assert await run.serve(0)
        assert set(run.reported[-1].engines) == {adapted.engine_url, url}
    with engine(adapted.model_dir, port, tmp_path / "again.log"):
        while version_name(RUN, 0) not in await engines.adapters(url):
            await run.another_look()
        assert policy.gap([await generate(url, version_name(RUN, 0), 100)]) < LONGEST_GAP


async def test_an_engine_that_takes_no_adapters_is_left_out_of_routing(
    run: RunOfWeights, engines: Engines, adapted: Serving, serving: Serving
) -> None:
    await engines.readmit(serving.engine_url)
    await eventually_routed(engines, {adapted.engine_url, serving.engine_url})
    try:
        await run.publish(0)
        while not run.reported or serving.engine_url not in run.reported[-1].quarantined:
            await run.another_look()
        await eventually_routed(engines, {adapted.engine_url})
        assert run.reported[-1].engines == (adapted.engine_url,)
    finally:
        await serving.name_weights("0")


async def test_what_no_turn_names_any_more_is_unloaded_also_that_of_a_trainer_that_died(
    run: RunOfWeights,
    engines: Engines,
    adapted: Serving,
    redis: Redis,
    policy: Adapted,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EngineSettings().request_timeout_s < adapters.UNUSED_S, "a request ends before its adapter does"
    for version in range(3):
        assert await run.serve(version)
    await run.another_look()
    loaded = await engines.adapters(adapted.engine_url)
    assert {*loaded} == {version_name(RUN, version) for version in range(3)}, "a turn may still name them"
    monkeypatch.setattr(adapters, "UNUSED_S", 0)
    async with AsyncExitStack() as stack:
        transport = await transport_of(policy, tmp_path / "weights", stack)
        restarted = RunOfWeights(redis, engines, tmp_path / "weights", transport=transport)
        async with restarted:
            assert await restarted.serve(3)
            while {*await engines.adapters(adapted.engine_url)} != {version_name(RUN, 3)}:
                await restarted.another_look()


async def test_with_delta_a_receiver_makes_the_directory_that_the_engine_loads(
    redis: Redis, engines: Engines, adapted: Serving, policy: Adapted, tmp_path: Path
) -> None:
    hosts = Hosts(tmp_path)
    host, recipe = hosts.new(), WeightsRecipe(adapters="alone", transport="delta", receiver_port=hosts.port)
    try:
        async with AsyncExitStack() as stack:
            transport = await transport_of(policy, tmp_path / "weights", stack, recipe)
            async with RunOfWeights(redis, engines, tmp_path / "weights", transport=transport) as run:
                for version in range(2):
                    policy.train(version)
                    assert await run.serve(version)
        loaded = await engines.adapters(adapted.engine_url)
        assert loaded[version_name(RUN, 1)] == str(host.directory_of(RUN, 1))
        replies = [
            await generate(adapted.engine_url, version_name(RUN, version), 100) for version in range(2)
        ]
        assert max(policy.gap([reply]) for reply in replies) < LONGEST_GAP
    finally:
        hosts.stop()


@contextmanager
def engine(model: Path, port: int, log: Path) -> Iterator[None]:
    """An engine that takes adapters; killed at the end."""
    command = [
        sys.executable,
        "-m",
        "infra.serving.engine",
        f"--model={model}",
        f"--port={port}",
        "--",
        *FLAGS,
    ]
    child = processes.start("engine", command, log=log)
    try:
        ready = partial(answers_ok, f"http://127.0.0.1:{port}/health")
        processes.wait_until(ready, child=child, timeout_s=300, log=log)
        yield
    finally:
        child.stop(grace_s=0)


async def until_sampling(engine_url: str, request: asyncio.Task[Reply]) -> None:
    """Return once the engine works on the request."""
    async with aiohttp.ClientSession(raise_for_status=True) as http:
        while not request.done():
            async with http.get(f"{engine_url}/v1/loads") as response:
                if (await response.json())["loads"][0]["num_running_reqs"]:
                    return
            await asyncio.sleep(0.02)
    raise AssertionError("the reply was over before it was seen")
