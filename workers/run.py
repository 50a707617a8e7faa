"""`python -m workers.run`: one worker process. Builds its tools, takes requests from the queue, sends heartbeats.

Workers are interchangeable: each needs Redis, the router and a Docker host, and no recipe. After SIGTERM, running episodes get a grace
time; then unfinished episodes return to the queue, where the next worker takes them at once.

Exit status: 0 after SIGTERM or SIGINT; 1 if Redis or every Docker host is absent at the start; 2 if a setting is wrong. If a service fails
later, that is an outage: the worker waits and reports it in its heartbeat.

Variables, with their defaults:
  SWERVE_REDIS_URL          queue and stream: redis://127.0.0.1:6379/0
  SWERVE_ROUTER_URL         the router of the engines: http://127.0.0.1:30000; empty: no engines
  DOCKER_HOST               where containers run: unix:///var/run/docker.sock
  SWERVE_DOCKER_HOSTS       several instead, as in "unix:///var/run/docker.sock tcp://a:2376=8"
  SWERVE_DOCKER_CERTS       a folder with a folder of certificates for each host
  SWERVE_SLOTS              episodes at once: 4
  SWERVE_WORKER_NAME        host/pid
  SWERVE_CONTAINER_RUNTIME  that of the Docker host
  SWERVE_MAX_STARTING       containers that start at once: 4
  SWERVE_DRAIN_S            seconds after SIGTERM for running episodes: 5
  SWERVE_REAP_EVERY_S       seconds between searches for orphan containers: 15
  SWERVE_MIN_FREE_BYTES     a Docker host with less free disk gets no claims: 2GB
  SWERVE_MAX_WRITTEN_BYTES  the most that one container may write: 10GB
  SWERVE_PREFETCH, SWERVE_IMAGE_PROXIES, SWERVE_IMAGE_BUDGET, SWERVE_STATE_DIR
                            images: whether this worker pulls them, mirrors, budget, and the directory of their record
  SWERVE_METRICS_PORT, SWERVE_METRICS_HOST, SWERVE_OTLP_ENDPOINT, SWERVE_OTLP_METRICS, SWERVE_TRACE_FILE
                            metrics and traces: none
workers/README.md has each in full.
"""

import argparse
import contextlib
import functools
import sys

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.commandline import program
from pipeline.errors import SandboxError
from pipeline.kinds import ROLLOUT
from pipeline.request import Claim, EpisodeStatus
from pipeline.settings import redis_settings
from pipeline.telemetry import span
from pipeline.trajectory import Trajectory
from workers.breaker import Breaker, Breakers, Gate
from workers.claim import Claimer, Obstacle, no_obstacle
from workers.policy.requested import (
    NoEngines,
    PoliciesOfTheirRun,
    RequestedPolicies,
    engines_of_other_runs,
    served_run,
)
from workers.process import (
    REDIS_PATIENCE_S,
    CannotStart,
    HostsNotAnswering,
    background,
    beat,
    run_process,
    work,
)
from workers.rollout import Policies, run_rollout
from workers.sandbox.backend import WorkerHosts, worker_hosts
from workers.sandbox.disk import check_temporary
from workers.sandbox.protocol import Misconfigured
from workers.settings import SandboxSettings, WorkerSettings, sandbox_settings, worker_settings

# The longest wait at the start for a Docker host, which may be starting together with the worker.
DOCKER_PATIENCE_S = 5.0


async def serve(settings: WorkerSettings, sandboxes: SandboxSettings) -> None:
    """Works until a signal. Raises CannotStart, RedisUnavailable."""
    from workers.policy.endpoint import EndpointPolicies
    from workers.policy.sglang import SglangPolicies, announced_tokenizers, recorded_served

    async with contextlib.AsyncExitStack() as cleanup:
        redis = await connection.connect(redis_settings().url, patience_s=REDIS_PATIENCE_S)
        cleanup.push_async_callback(redis.aclose)
        fleet = await _fleet(redis)
        hosts = worker_hosts(redis, fleet=fleet, worker=settings, settings=sandboxes)
        cleanup.push_async_callback(hosts.close)
        try:
            await hosts.start(patience_s=DOCKER_PATIENCE_S)
        except SandboxError as error:
            wrong = CannotStart if isinstance(error, Misconfigured) else HostsNotAnswering
            raise wrong(str(error)) from error
        if settings.router_url:
            tokenizers = announced_tokenizers(redis)
            engines = await cleanup.enter_async_context(
                SglangPolicies(settings.router_url, tokenizers, served=recorded_served(redis))
            )
            gate: Gate = Breaker("engine", engines.check)
            obstacle = engines_of_other_runs(redis, functools.partial(served_run, settings.router_url))
        else:
            engines = gate = NoEngines()
            obstacle = no_obstacle
        endpoints = await cleanup.enter_async_context(EndpointPolicies())
        policies = RequestedPolicies(PoliciesOfTheirRun(engines, redis), endpoints)
        claimer = _claimer(redis, settings, sandboxes, hosts, policies, gate, obstacle)
        beats = beat(redis, claimer, slots=settings.slots, hosts=hosts.statuses)
        async with background(beats, claimer.breakers.watch(), hosts.maintain()):
            await work(claimer, slots=settings.slots, drain_s=settings.drain_s)
        with contextlib.suppress(RedisError):
            await census.forget_worker(redis, settings.name)


async def _fleet(redis: ArqRedis) -> str:
    url = redis_settings().url
    try:
        return await census.fleet_id(redis)
    except (RedisError, OSError) as error:
        raise connection.unavailable(url, error) from error


def _claimer(
    redis: ArqRedis,
    settings: WorkerSettings,
    sandboxes: SandboxSettings,
    hosts: WorkerHosts,
    policies: Policies,
    engine_gate: Gate,
    obstacle: Obstacle,
) -> Claimer:
    """A claimer that plays rollouts on `hosts`, guarded by a breaker for each dependency of the worker."""
    from workers.grading.defence.survey import Surveys
    from workers.grading.grade import Grader

    surveys = Surveys()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        async with contextlib.AsyncExitStack() as stack:
            with span("choose Docker host"):  # choosing includes bringing the task's image to the host
                opened = await stack.enter_async_context(hosts.using(claim, status))
            grader = Grader(opened, surveys=surveys)
            return await run_rollout(claim, status, policies=policies, sandboxes=opened, grader=grader)

    probes = {
        "redis": lambda: connection.check(redis),
        "disk space": functools.partial(check_temporary, sandboxes.disk.min_free_bytes),
    }
    breakers = Breakers(probes, gates={"docker": hosts.gate, "engine": engine_gate})
    return Claimer(
        kind=ROLLOUT,
        redis=redis,
        worker=settings.name,
        stage=stage,
        breakers=breakers,
        obstacle=obstacle,
    )


def main() -> int:
    argparse.ArgumentParser(
        prog=program("workers.run"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    try:
        settings, sandboxes = worker_settings(), sandbox_settings()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return run_process("worker", lambda: serve(settings, sandboxes))


if __name__ == "__main__":
    sys.exit(main())
