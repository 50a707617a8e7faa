"""`python -m workers.reap [--all] [--json]`: removes at once what crashed workers left on this host's Docker engines.

That is containers of this fleet whose claim breathes no more or whose deadline is over, which every worker also does at its
start and every 15 s, on the engines of SWERVE_DOCKER_HOSTS or DOCKER_HOST; and temporary files of workers, an hour old. Swerve makes
no networks and no volumes of its own, and a container's anonymous volumes go with it: there is nothing of these to remove.

With --all every container of every fleet goes, whether at work or not, and Redis is not asked: for a host where nothing of Swerve
runs, when the Redis that knew the claims is gone.

Exit status: 0 nothing is left that should not be; 1 something is, or an engine or Redis does not answer; 2 misuse.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from pipeline import census, connection, queue
from pipeline.connection import RedisUnreachable
from pipeline.errors import SandboxError
from pipeline.settings import redis_settings
from workers.docker.host import DockerHost
from workers.settings import docker_hosts

if TYPE_CHECKING:
    from workers.sandbox.orphans import Alive


@dataclass(frozen=True, slots=True)
class Reaped:
    """What became of one engine. `left` should have gone as well."""

    engine: str
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    engines: tuple[Reaped, ...]
    files: tuple[str, ...]  # temporary ones that were removed

    @property
    def clean(self) -> bool:
        return not any(engine.left or engine.failure for engine in self.engines)


async def reap_hosts(hosts: Sequence[DockerHost], *, everything: bool) -> Report:
    """Raises RedisError, OSError or ValueError if Redis has to be asked and cannot be."""
    from workers.temporary import remove_stale

    if everything:
        found = [await _reaped(host, "", None) for host in hosts]
    else:
        redis = await connection.connect(redis_settings().url, patience_s=0)
        async with contextlib.aclosing(redis):
            fleet = await census.fleet_id(redis)
            found = [await _reaped(host, fleet, functools.partial(queue.is_leased, redis)) for host in hosts]
    return Report(tuple(found), tuple(map(str, remove_stale())))


async def _reaped(host: DockerHost, fleet: str, alive: "Alive | None") -> Reaped:
    """Without `alive`, of all fleets."""
    from workers.sandbox.docker import DockerSandboxes
    from workers.sandbox.orphans import orphans

    sandboxes = DockerSandboxes(fleet=fleet, host=host)

    async def strays() -> list[str]:
        if alive is None:
            return [name for name, _ in await sandboxes.engine.labelled(None)]
        return await orphans(sandboxes, alive=alive)

    removed: list[str] = []
    try:
        for name in await strays():
            await sandboxes.engine.remove(name)
            removed.append(name)
        return Reaped(host.url, tuple(removed), left=tuple(await strays()))
    except SandboxError as error:
        return Reaped(host.url, tuple(removed), failure=str(error))
    finally:
        await sandboxes.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m workers.reap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="every fleet's containers, at work or not")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    try:
        report = asyncio.run(reap_hosts(docker_hosts(), everything=options.all))
    except RedisUnreachable as error:
        print(f"{error}; it knows which claims are in force: see --all", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except (RedisError, OSError) as error:
        print(
            f"Redis, which knows which claims are in force, does not answer: {error}; see --all",
            file=sys.stderr,
        )
        return 1
    if options.json:
        print(json.dumps({"clean": report.clean, **asdict(report)}))
    else:
        print("\n".join(_lines(report)))
    return 0 if report.clean else 1


def _lines(report: Report) -> Iterator[str]:
    for engine in report.engines:
        yield from (f"removed  {name}  at {engine.engine}" for name in engine.removed)
        yield from (f"left     {name}  at {engine.engine}" for name in engine.left)
        if engine.failure:
            yield f"failed   {engine.engine}: {engine.failure}"
    yield from (f"removed  {file}" for file in report.files)
    num_removed = sum(len(engine.removed) for engine in report.engines)
    yield f"{num_removed} containers and {len(report.files)} files removed: {'clean' if report.clean else 'not clean'}"


if __name__ == "__main__":
    sys.exit(main())
