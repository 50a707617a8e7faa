"""`python -m workers.reap [--all] [--json]`: removes at once what crashed workers left behind on the Docker hosts of this machine.

It removes containers of this fleet whose lease has expired or whose deadline is over, on the Docker hosts of SWERVE_DOCKER_HOSTS or
DOCKER_HOST, and volumes of agent programs that are a week old and that no container uses (every worker removes these too, at its start and
every 15 s). Swerve creates no networks, no other volumes and no temporary files, and a container's anonymous volumes are removed with it,
so nothing else can be left behind.

With --all, every container of every fleet is removed, in use or not, and every such volume, without asking Redis. Use it on a machine on
which Swerve does not run, when the Redis that held the leases is gone.

Exit status: 0 nothing is left; 1 something is left, or a Docker host or Redis does not answer; 2 misuse.
"""

import argparse
import asyncio
import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from redis.exceptions import RedisError

from pipeline import census, connection, queue
from pipeline.commandline import FAILED, program
from pipeline.connection import RedisUnreachable
from pipeline.errors import SandboxError
from pipeline.message import json_line
from pipeline.settings import redis_settings
from workers.docker.host import DockerHost
from workers.settings import docker_hosts

if TYPE_CHECKING:
    from workers.sandbox.hosts import HasLease


@dataclass(frozen=True, slots=True)
class ReapedHost:
    """The removed containers and volumes of one Docker host. `left` are containers that should have been removed as well."""

    host: str
    removed: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class ReapReport:
    hosts: tuple[ReapedHost, ...]

    @property
    def clean(self) -> bool:
        return not any(host.left or host.failure for host in self.hosts)


async def reap_hosts(hosts: Sequence[DockerHost], *, everything: bool) -> ReapReport:
    """Reaps on all hosts. Raises RedisUnavailable if Redis is needed and absent."""
    if everything:
        found = [await _reaped(host, "", None) for host in hosts]
    else:
        url = redis_settings().url
        redis = await connection.connect(url, patience_s=0)
        async with contextlib.aclosing(redis):
            try:
                fleet = await census.fleet_id(redis)
                has_lease = functools.partial(queue.is_leased, redis)
                found = [await _reaped(host, fleet, has_lease) for host in hosts]
            except RedisError as error:
                raise connection.unavailable(url, error) from error
    return ReapReport(tuple(found))


async def _reaped(host: DockerHost, fleet: str, has_lease: "HasLease | None") -> ReapedHost:
    """Remove the orphans of `fleet` and old volumes, or, without `has_lease`, every container of every fleet and every volume."""
    from workers.harness.volumes import KEEP_S, remove_unused_volumes
    from workers.sandbox.docker import DockerSandboxes
    from workers.sandbox.hosts import orphans

    sandboxes = DockerSandboxes(fleet=fleet, host=host)

    async def unwanted() -> list[str]:
        if has_lease is None:
            return [name for name, _ in await sandboxes.api.labelled(None)]
        return await orphans(sandboxes, has_lease=has_lease)

    removed: list[str] = []
    try:
        for name in await unwanted():
            await sandboxes.api.remove(name)
            removed.append(name)
        removed += await remove_unused_volumes(sandboxes.api, keep_s=KEEP_S if has_lease else 0.0)
        return ReapedHost(host.url, tuple(removed), left=tuple(await unwanted()))
    except SandboxError as error:
        return ReapedHost(host.url, tuple(removed), failure=str(error))
    finally:
        await sandboxes.close()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=program("workers.reap"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--all", action="store_true", help="remove every fleet's containers, in use or not")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    try:
        report = asyncio.run(reap_hosts(docker_hosts(), everything=options.all))
    except RedisUnreachable as error:
        print(f"{error}; it holds the leases; without it, see --all", file=sys.stderr)
        return FAILED
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json_line({"clean": report.clean, **asdict(report)}))
    else:
        print("\n".join(_lines(report)))
    return 0 if report.clean else 1


def _lines(report: ReapReport) -> Iterator[str]:
    for host in report.hosts:
        yield from (f"removed  {name}  at {host.host}" for name in host.removed)
        yield from (f"left     {name}  at {host.host}" for name in host.left)
        if host.failure:
            yield f"failed   {host.host}: {host.failure}"
    num_removed = sum(len(host.removed) for host in report.hosts)
    yield f"{num_removed} containers and volumes removed: {'clean' if report.clean else 'not clean'}"


if __name__ == "__main__":
    sys.exit(main())
