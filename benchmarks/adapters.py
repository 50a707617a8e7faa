"""What a weight version costs with adapters alone, against merged weights: `python -m benchmarks.adapters [--json] [--short]`.

A learner with adapters (rank 16 on every projection) takes optimizer steps of a random model of SmolLM2-135M's shape, and publishes after
each: whole weights with the adapters merged, or the adapters alone. A real SGLang engine samples one long reply the whole time, and gets
each version by the deliveries of a run, from a disk that both share. Both kinds take turns in the same engine. The reply has a prompt of
500 tokens, which whole weights make the engine compute again (`weights.pause = "retract"`).

Bytes are those of a version's weights, and those of the patch that `weights.transport = "delta"` sends. Sampling stands still for the
longest time between two tokens of the reply, from the offer of a version until the engine has confirmed it and some tokens more have come;
the mean time between two tokens before the offer is shown too. --short takes a small model and fewer versions.
"""

import asyncio
import contextlib
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import aiohttp
import msgspec
from redis.asyncio import Redis

from benchmarks.learner_methods import LearnerRun, make_batch, write_model
from benchmarks.report import Comparison, compared, main, p50, shuffled
from infra import ports, processes
from infra.redis_server import own_redis
from pipeline.weights import WeightVersion, version_name
from trainer.learner.config import LORA_TARGETS, LearnerConfig, LoraConfig, LossConfig
from trainer.recipe import WeightsRecipe
from trainer.weights import delta
from trainer.weights.deliveries import Deliveries
from trainer.weights.engines import Engines
from trainer.weights.publish import Publisher, open_transport

Kind = Literal["merged", "alone"]
KINDS: tuple[Kind, ...] = ("merged", "alone")
RANK, LR = 16, 1e-5
LONGEST_TOKENS, NUM_SAMPLES = 128, 4
WARM_TOKENS, LATER_TOKENS = 10, 5
"""The tokens that are seen before a version is offered, and after it is confirmed."""

PROMPT_TOKENS, LONGEST_REPLY_TOKENS = 500, 3000
DEADLINE_S = 600.0
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
SMALL: dict[str, Any] = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(slots=True)
class Measured:
    """What the versions of one kind cost, a list for each round."""

    whole_bytes: list[int] = field(default_factory=list[int])
    patch_bytes: list[int] = field(default_factory=list[int])
    still_s: list[list[float]] = field(default_factory=list[list[float]])
    usual_s: list[list[float]] = field(default_factory=list[list[float]])
    served_s: list[list[float]] = field(default_factory=list[list[float]])


async def benchmark(short: bool) -> list[Comparison]:
    num_rounds, num_versions = (1, 2) if short else (3, 3)
    with tempfile.TemporaryDirectory(prefix="swerve-adapters-") as temporary, own_redis() as redis_url:
        directory = Path(temporary)
        write_model(directory / "model", SMALL if short else SHAPE)
        with serving(directory / "model", directory) as (engine_url, router_url):
            config = LearnerConfig(
                lr=LR,
                micro_batch_tokens=LONGEST_TOKENS,
                dtype="bf16",
                lora=LoraConfig(rank=RANK),
                loss=LossConfig(kind="reinforce"),
            )
            learner = await asyncio.to_thread(LearnerRun, config, directory / "model")
            found = {kind: Measured() for kind in KINDS}
            async with Redis.from_url(redis_url) as redis, Engines(router_url) as engines:
                for number in range(num_rounds):
                    for kind in shuffled(KINDS):
                        block = Block(
                            learner, redis, engines, engine_url, directory, kind, number, found[kind]
                        )
                        await block.measure(num_versions)
    return comparisons(found["alone"], found["merged"])


@dataclass(frozen=True, slots=True)
class Block:
    """A run of its own, whose first version is not measured: with adapters alone it brings the base, too."""

    learner: LearnerRun
    redis: Redis
    engines: Engines
    engine_url: str
    directory: Path
    kind: Kind
    number: int
    into: Measured

    @property
    def run_id(self) -> str:
        return f"{self.kind}-{self.number}"

    async def measure(self, num_versions: int) -> None:
        for samples in (self.into.still_s, self.into.usual_s, self.into.served_s):
            samples.append([])
        async with AsyncExitStack() as stack:
            transport = await open_transport(
                WeightsRecipe(adapters=self.kind),
                self.run_id,
                directory=self.directory / self.run_id,
                export=self.learner.write,
                keep=2,
                stack=stack,
            )
            publisher = Publisher(self.redis, self.run_id, transport=transport)
            deliveries = Deliveries(
                self.redis,
                self.run_id,
                transport=transport,
                engines=self.engines,
                mode="retract",
                deadline_s=DEADLINE_S,
                at_once=0,
            )
            delivering = asyncio.create_task(deliveries.run(lambda served, seconds: None))
            stack.push_async_callback(_ended, delivering)
            before: WeightVersion | None = None
            for number in range(num_versions + 1):
                version = await self._published(publisher, number)
                if before is None:
                    deliveries.offer(version)
                    assert await deliveries.settled(number), deliveries.trouble
                else:
                    await self._deliver(deliveries, version)
                    self.into.whole_bytes.append(version.num_bytes)
                    self.into.patch_bytes.append(await asyncio.to_thread(patch_bytes, before, version))
                before = version

    async def _published(self, publisher: Publisher, number: int) -> WeightVersion:
        vocab_size = msgspec.json.decode((self.directory / "model/config.json").read_bytes())["vocab_size"]
        batch = make_batch(NUM_SAMPLES, LONGEST_TOKENS, vocab_size, step=number)
        await asyncio.to_thread(self.learner.step, batch)
        version = await publisher.prepare(number, number)
        await publisher.announce(version)
        return version

    async def _deliver(self, deliveries: Deliveries, version: WeightVersion) -> None:
        """Deliver the version while the engine samples a reply, with the version before where that is an adapter."""
        adapter = version_name(self.run_id, version.version - 1) if self.kind == "alone" else ""
        seen: list[float] = []
        sampling = asyncio.create_task(sample(self.engine_url, adapter, seen))
        try:
            await tokens(seen, WARM_TOKENS, sampling)
            offered_at, first = time.perf_counter(), len(seen) - 1
            deliveries.offer(version)
            assert await deliveries.settled(version.version), deliveries.trouble
            self.into.served_s[-1].append(time.perf_counter() - offered_at)
            await tokens(seen, len(seen) + LATER_TOKENS, sampling)
        finally:
            await _ended(sampling)
        self.into.still_s[-1].append(max(later - earlier for earlier, later in pairwise(seen[first:])))
        self.into.usual_s[-1].append((seen[first] - seen[0]) / first)


def patch_bytes(before: WeightVersion, version: WeightVersion) -> int:
    """The size of the patch that a receiver with the version before would get."""
    base, target = (
        (delta.manifest_of(Path(one.directory), one.run_id, one.version), Path(one.directory))
        for one in (before, version)
    )
    with tempfile.TemporaryDirectory() as temporary:
        return delta.write_patch(Path(temporary) / "patch", target, base)


async def sample(engine_url: str, adapter: str, seen: list[float]) -> None:
    """Sample one long reply, and append the time of each token to `seen`."""
    sampling = {"max_new_tokens": LONGEST_REPLY_TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [*range(5, 5 + PROMPT_TOKENS)], "sampling_params": sampling, "stream": True}
    body |= {"lora_path": adapter} if adapter else {}
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(raise_for_status=True, timeout=timeout) as http,
        http.post(f"{engine_url}/generate", json=body) as response,
    ):
        async for line in response.content:
            if line.startswith(b"data: {"):
                seen.append(time.perf_counter())


async def tokens(seen: list[float], count: int, sampling: "asyncio.Task[None]") -> None:
    """Return when so many tokens have come."""
    while len(seen) < count:
        assert not sampling.done(), "the reply is longer than what is measured"
        await asyncio.sleep(0.005)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


@contextlib.contextmanager
def serving(model: Path, logs: Path) -> Iterator[tuple[str, str]]:
    """An engine on the CPU that takes adapters, and a router: their URLs."""
    engine_port, router_port = ports.next_free(31700), ports.next_free(31720)
    lora = ["--enable-lora", f"--max-lora-rank={RANK}", "--lora-target-modules", *LORA_TARGETS]
    commands = {
        "engine": [f"--model={model}", f"--port={engine_port}", "--", *lora],
        "router": [
            f"--engine=http://127.0.0.1:{engine_port}",
            f"--port={router_port}",
            f"--metrics-port={router_port + 9}",
        ],
    }
    with contextlib.ExitStack() as cleanup:
        for name, words in commands.items():
            command = [sys.executable, "-m", f"infra.serving.{name}", *words]
            child = processes.start(name, command, log=logs / f"{name}.log")
            cleanup.callback(child.stop, grace_s=1)
            port = {"engine": engine_port, "router": router_port}[name]
            path = {"engine": "health", "router": "readiness"}[name]
            url = f"http://127.0.0.1:{port}/{path}"
            processes.wait_until(
                lambda url=url: _answers(url), child=child, timeout_s=DEADLINE_S, log=logs / f"{name}.log"
            )
        yield f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def comparisons(alone: Measured, merged: Measured) -> list[Comparison]:
    count = sum(len(one) for one in alone.still_s)
    return [
        Comparison(
            "adapters", p50(alone.whole_bytes), p50(merged.whole_bytes), "merged", "bytes of a version"
        ),
        Comparison(
            "adapters",
            p50(alone.patch_bytes),
            p50(merged.patch_bytes),
            "merged",
            "bytes that delta sends of a version",
        ),
        *(
            compared("adapters", ours, theirs, p50, rival_name="merged", unit=f"{what}, n = {count}")
            for ours, theirs, what in (
                (alone.still_s, merged.still_s, "s without a token while a version comes"),
                (alone.served_s, merged.served_s, "s until a version is served"),
                (alone.usual_s, merged.usual_s, "s a token before a version comes"),
            )
        ),
    ]


if __name__ == "__main__":
    sys.exit(main("adapters", __doc__, benchmark))
