"""A worker fetches what the queue will ask for next, and waits for what a claim needs; what it cannot have is ImageMissing."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable

import pytest
from msgspec.structs import replace as changed
from redis.asyncio import Redis

from pipeline import connection, queue
from pipeline.errors import ImageMissing
from pipeline.request import EpisodeStatus
from tests.workers.claims import make_claim, make_task
from tests.workers.images.conftest import Place
from tests.workers.images.registry import PATIENCE_S, Gate, layer
from workers.images.eviction import evict
from workers.images.names import parse_proxy
from workers.images.prefetch import HostImages
from workers.sandbox.docker import DockerSandboxes
from workers.settings import ImageSettings, docker_host, image_settings

pytestmark = pytest.mark.docker


@pytest.fixture
async def pool(redis: Redis, redis_url: str) -> AsyncIterator[Redis]:
    pool = await connection.connect(redis_url)
    yield pool
    await pool.aclose()


def settings(
    place: Place, *proxies: str, prefetch: bool = True, budget_bytes: int | None = None
) -> ImageSettings:
    return ImageSettings(
        state_dir=place.shelf.path.parent,
        proxies=tuple(map(parse_proxy, proxies)),
        budget_bytes=budget_bytes,
        prefetch=prefetch,
    )


@contextlib.asynccontextmanager
async def fetching(images: HostImages, redis: Redis) -> AsyncIterator[None]:
    ahead = asyncio.create_task(images.fetch_ahead(redis))
    yield
    ahead.cancel()
    await asyncio.gather(ahead, return_exceptions=True)
    await images.close()


async def ask_for(redis: Redis, *images: str) -> None:
    """One request an image, due one after the other."""
    for number, image in enumerate(images):
        request = make_claim(make_task(image), request_id=f"request-{number}").request
        await queue.enqueue(redis, changed(request, enqueued_at=time.time() - 60 + number))


async def until(condition: Callable[[], bool]) -> None:
    while True:
        if await asyncio.to_thread(condition):
            return
        await asyncio.sleep(0.05)


async def arrival(place: Place, image: str) -> None:
    await until(lambda: place.api.find(image) is not None)


async def test_what_the_queue_will_ask_for_is_pulled_in_its_order(place: Place, pool: Redis) -> None:
    names = [place.publish(name) for name in ("first", "second")]
    await ask_for(pool, names[0], f"{place.registry.host}/{place.hub}/absent", names[0], names[1])
    images = await HostImages.open(settings(place), docker_host())
    async with fetching(images, pool), asyncio.timeout(PATIENCE_S):
        await arrival(place, names[1])
    since = {name: entry.since for name, entry in place.shelf.entries().items()}
    assert sorted(since, key=lambda name: since[name]) == names


async def test_what_is_claimed_already_is_not_looked_at(pool: Redis) -> None:
    await ask_for(pool, "team/claimed", "team/next", "team/next", "team/later")
    await queue.claim(pool, "request-0", "host/1")
    assert await queue.waiting_images(pool) == ["team/next", "team/later"]
    assert await queue.waiting_images(pool, num_requests=2) == ["team/next"]


async def test_nothing_is_pulled_unless_the_settings_say_so(
    place: Place, pool: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SWERVE_PREFETCH", raising=False)
    await ask_for(pool, place.publish("unasked"))
    images = await HostImages.open(image_settings(), docker_host())
    await images.fetch_ahead(pool)  # ends at once
    await images.close()
    assert place.shelf.entries() == {}


async def test_what_waits_is_not_evicted_for_what_waits_longer(place: Place, pool: Redis) -> None:
    names = [
        place.publish(name, layer(name, secrets.token_bytes(1_000_000))) for name in ("old", "next", "later")
    ]
    assert place.puller().pull(names[0]).state == "pulled"
    await ask_for(pool, *names[1:])
    images = await HostImages.open(settings(place, budget_bytes=1_500_000), docker_host())
    async with fetching(images, pool), asyncio.timeout(PATIENCE_S):
        await arrival(place, names[1])
        await until(lambda: names[2] in images._not_before)
    assert [place.api.find(name) is not None for name in names] == [False, True, False]


async def test_a_claim_waits_for_the_pull_that_is_under_way(place: Place, pool: Redis) -> None:
    gate = Gate(place.registry)
    place.publish("slow", layer("big", secrets.token_bytes(24 * 1024**2)))
    image = f"{place.hub}/slow:latest"
    await ask_for(pool, image)
    images = await HostImages.open(settings(place, gate.host), docker_host())
    status, entered = EpisodeStatus(), asyncio.Event()

    async def play() -> None:
        async with images.using(make_claim(make_task(image)), status):
            entered.set()

    async with fetching(images, pool), asyncio.timeout(PATIENCE_S):
        assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        playing = asyncio.create_task(play())
        await until(lambda: status.phase == "pulling")
        assert not entered.is_set()
        gate.opened.set()
        await playing
    assert (status.phase, place.api.find(image) is not None) == ("opening", True)
    gate.close()


async def test_an_image_is_held_while_an_episode_uses_it(place: Place) -> None:
    image = place.publish("held")
    assert place.puller().pull(image).state == "pulled"
    images = await HostImages.open(settings(place, prefetch=False), docker_host())
    async with images.using(make_claim(make_task(image)), EpisodeStatus()):
        assert evict(place.api, place.shelf, 0).evicted == ()
    assert len(evict(place.api, place.shelf, 0).evicted) == 1
    await images.close()


@pytest.mark.parametrize("prefetch", [True, False])
async def test_an_image_that_cannot_be_had_is_missing_to_the_sandbox(
    place: Place, sandboxes: DockerSandboxes, prefetch: bool
) -> None:
    claim = make_claim(make_task(f"{place.registry.host}/{place.hub}/absent"))
    images = await HostImages.open(settings(place, prefetch=prefetch), docker_host())
    with pytest.raises(ImageMissing):
        async with images.using(claim, EpisodeStatus()), sandboxes.open(claim, role="agent"):
            pass
    await images.close()


async def test_a_worker_that_stops_does_not_wait_for_a_registry(place: Place, pool: Redis) -> None:
    gate = Gate(place.registry)
    place.publish("stuck", layer("big", secrets.token_bytes(24 * 1024**2)))
    await ask_for(pool, f"{place.hub}/stuck")
    images = await HostImages.open(settings(place, gate.host), docker_host())
    async with asyncio.timeout(PATIENCE_S):
        async with fetching(images, pool):
            assert await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
    assert not gate.opened.is_set()
    gate.close()


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SWERVE_PREFETCH", "maybe"), ("SWERVE_IMAGE_BUDGET", "much"), ("SWERVE_IMAGE_PROXIES", "UPPER/")],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable):
        image_settings()
