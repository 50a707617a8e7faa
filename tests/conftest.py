"""What the tests stand on, all of it real: a Redis of our own, this machine's Docker, an engine behind its
router.

Everything is started once per session, only when a test asks for it, and ends with the session. What is
missing is an error, never a skip.
"""

import itertools
import os
import resource
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import docker
import pytest
from hypothesis import HealthCheck, settings
from redis.asyncio import Redis

from infra import processes
from infra.images.build import IMAGES, ensure_image
from infra.redis_server import own_redis
from pipeline import census
from tests.scheduling import Scheduling, rank
from tests.suite import QUICK_TESTS, package_of
from tests.tiny_llama import write_checkpoint

# No test asserts a wall-clock time, and Hypothesis by itself would: of an example, and of thinking of one.
settings.register_profile(
    "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> Scheduling | None:
    return Scheduling(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.hookimpl(tryfirst=True)  # before cases are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test marked `slow_but_for`, every case is slow whose id the marker does not name; a `*` at the end stands for any end."""
    for item in items:
        mark = item.get_closest_marker("slow_but_for")
        if mark and not any(is_named(item.callspec.id, by=text) for text in mark.args):  # type: ignore[attr-defined]
            item.add_marker("slow")
    quick = (item.nodeid for item in items if not item.get_closest_marker("slow"))
    config.stash[QUICK_TESTS] = Counter(map(package_of, quick))
    items.sort(key=lambda item: rank(item.nodeid))


def is_named(case: str, *, by: str) -> bool:
    return case.startswith(by[:-1]) if by.endswith("*") else case == by


@dataclass(frozen=True, slots=True)
class Serving:
    """One SGLang engine on the CPU behind the router. Both are shared by all tests: leave them running and
    unpaused.
    """

    router_url: str
    engine_url: str
    model_dir: Path
    router_metrics_url: str

    async def load(self, model: Path, name: str) -> None:
        """Have the engine load this model and report its weights as `name`, as after a publication.

        The engine is paused meanwhile: one that has not quite finished an earlier request would end because its cache is in use.
        """
        update = {"model_path": str(model), "weight_version": name, "flush_cache": True}
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            for path, body in (
                ("pause_generation", {"mode": "retract"}),
                ("update_weights_from_disk", update),
                ("continue_generation", {}),
            ):
                async with session.post(f"{self.engine_url}/{path}", json=body) as response:
                    await response.read()

    async def name_weights(self, name: str) -> None:
        await self.load(self.model_dir, name)


FOREIGN = (
    *("DOCKER_CONFIG", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"),
    *("BASH_ENV", "CDPATH", "COLUMNS", "ENV", "LANGUAGE", "LINES", "NO_COLOR", "FORCE_COLOR"),
)
FOREIGN_BEGINNINGS = ("GIT_", "OTEL_", "SWERVE_")
"""Variables by which programs find settings of their user, or of the hook of git that has started us."""


@pytest.fixture(scope="session", autouse=True)
def _an_environment_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No settings of git, Docker, a shell or a terminal of whoever runs the tests reach them, and workers' notes do not reach that home.
    The home of the tests holds only the plugins of Docker's command, Compose among them.
    """
    home, docker_config = tmp_path_factory.mktemp("home"), os.environ.get("DOCKER_CONFIG")
    plugins = Path(docker_config or Path.home() / ".docker") / "cli-plugins"
    (home / ".docker").mkdir()
    if plugins.is_dir():
        (home / ".docker/cli-plugins").symlink_to(plugins)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name in FOREIGN or name.startswith(FOREIGN_BEGINNINGS)]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("SWERVE_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _as_many_descriptors_as_allowed() -> None:
    """Many shells allow 1,024 descriptors. The process groups of one learner keep 64 until their process ends, and its tests share one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 16_384 if hard == resource.RLIM_INFINITY else min(16_384, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, enough), hard))


@pytest.fixture(scope="session", autouse=True)
def _children_hear_ctrl_c() -> Iterator[None]:
    """What a script starts in the background ignores SIGINT, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with own_redis() as url:
        yield url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """A client of an empty database; it answers in bytes."""
    async with Redis.from_url(redis_url) as client:
        await client.flushdb()
        yield client


@pytest.fixture
def heartbeats_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test says once of a worker or of a trainer holds for an hour, however long pages and processes take to start."""
    monkeypatch.setattr(census, "KEEP_RUN_STATUS_S", census.KEEP_RUN_STATUS_S + 3600)
    monkeypatch.setattr(census, "STATUS_EXPIRES_S", 3600.0)


@pytest.fixture(scope="session")
def docker_client() -> Iterator[docker.DockerClient]:
    with closing(docker.from_env(timeout=600)) as client:  # of which it also waits for the end of a container
        client.ping()
        yield client


@pytest.fixture(scope="session")
def task_image(docker_client: docker.DockerClient) -> str:
    """The tag of the image that tasks without an image of their own run in."""
    ensure_image(IMAGES["task-base"])
    return IMAGES["task-base"].tag


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights, and a tokenizer with ChatML's tokens and template."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def serving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A real engine and a real router; some ten seconds to start."""
    with served(tiny_model, logs=tmp_path_factory.mktemp("serving")) as serving:
        yield serving


@contextmanager
def served(model_dir: Path, *engine_flags: str, logs: Path) -> Iterator[Serving]:
    """An engine of this checkpoint behind a router. The flags go to SGLang."""
    engine_port, router_port, metrics_port = free_ports(3)
    engine_url, router_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{router_port}"
    engine_command = [
        sys.executable,
        "-m",
        "infra.serving.engine",
        "--model",
        str(model_dir),
        f"--port={engine_port}",
        *(("--", *engine_flags) if engine_flags else ()),
    ]
    router_command = [
        sys.executable,
        "-m",
        "infra.serving.router",
        f"--engine={engine_url}",
        f"--port={router_port}",
    ]
    with ExitStack() as cleanup:
        engine = processes.start("engine", engine_command, log=logs / "engine.log")
        cleanup.callback(engine.stop, grace_s=1)
        router = processes.start(
            "router", [*router_command, f"--metrics-port={metrics_port}"], log=logs / "router.log"
        )
        cleanup.callback(router.stop, grace_s=1)

        def ready() -> bool:
            return answers_ok(f"{router_url}/readiness")

        # The router is ready once the engine is; a dead engine is the likelier reason to wait in vain.
        processes.wait_until(ready, child=engine, timeout_s=300, log=logs / "engine.log")
        yield Serving(router_url, engine_url, model_dir, f"http://127.0.0.1:{metrics_port}/metrics")


FIRST_PORT, PORTS_PER_WORKER, PORT_DISTANCE = 20_000, 1_500, 10
"""Below the ports that Linux gives to outgoing connections, of which it may take one between our look and the server's bind. Each of
pytest's worker processes has ports of its own, and the nine behind each are free too: a router has its metrics there.
"""
_turns = itertools.count(os.getpid())


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, all different, and not given out again soon."""
    return list(itertools.islice(filter(_is_free, map(_port, _turns)), count))


def _port(turn: int) -> int:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    return FIRST_PORT + worker * PORTS_PER_WORKER + turn * PORT_DISTANCE % PORTS_PER_WORKER


def _is_free(first: int) -> bool:
    """Whether nobody listens on this port and on those behind it, up to the next that we would give out."""
    with ExitStack() as held:
        try:
            for port in range(first, first + PORT_DISTANCE):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def answers_ok(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=60) as response:
            return response.status == 200
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False
