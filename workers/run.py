"""`python -m workers.run`: one worker process. Builds its tools, takes requests from the queue, sends heartbeats.

Workers are interchangeable: each needs Redis, the router and a Docker host, and no recipe. After SIGTERM, running episodes get a grace
time; then unfinished episodes return to the queue, where the next worker takes them at once.

Exit status: 0 after SIGTERM or SIGINT; 2 if a setting is wrong, or if Redis or every Docker host is absent at the start. What goes away
later is an outage: the worker waits and says so in its heartbeat.
"""

import argparse
import contextlib
import functools
import sys

from arq.connections import ArqRedis
from redis.exceptions import RedisError

from pipeline import census, connection
from pipeline.errors import SandboxError
from pipeline.kinds import ROLLOUT
from pipeline.request import Claim
from pipeline.settings import redis_settings
from pipeline.telemetry import span
from pipeline.trajectory import Trajectory
from workers.breaker import Breaker, Breakers, Gate
from workers.claim import Claimer, Obstacle, no_obstacle
from workers.policy.no_engines import NoEngines
from workers.policy.other_runs import PoliciesOfTheirRun, engines_of_other_runs, served_run
from workers.policy.requested import RequestedPolicies
from workers.process import REDIS_PATIENCE_S, CannotStart, background, beat, run_process, work
from workers.rollout import Policies, run_rollout
from workers.sandbox.backend import WorkerHosts, worker_hosts
from workers.sandbox.free_space import check_temporary
from workers.settings import SandboxSettings, WorkerSettings, sandbox_settings, worker_settings
from workers.status import EpisodeStatus

# How long to wait at the start for a Docker host, which may be starting together with the worker.
DOCKER_PATIENCE_S = 5.0


async def serve(settings: WorkerSettings, sandboxes: SandboxSettings) -> None:
    """Work until told to stop. Raises CannotStart, RedisUnavailable."""
    from workers.policy.endpoint import EndpointPolicies
    from workers.policy.sglang import SglangPolicies, announced_tokenizers

    async with contextlib.AsyncExitStack() as cleanup:
        redis = await connection.connect(redis_settings().url, patience_s=REDIS_PATIENCE_S)
        cleanup.push_async_callback(redis.aclose)
        fleet = await _fleet(redis)
        hosts = worker_hosts(redis, fleet=fleet, worker=settings, settings=sandboxes)
        cleanup.push_async_callback(hosts.close)
        try:
            await hosts.start(patience_s=DOCKER_PATIENCE_S)
        except SandboxError as error:
            raise CannotStart(str(error)) from error
        if settings.router_url:
            tokenizers = announced_tokenizers(redis)
            engines = await cleanup.enter_async_context(SglangPolicies(settings.router_url, tokenizers))
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
    """Plays rollouts on `hosts`, guarded by a breaker for each thing that the worker depends on."""
    from workers.grading.grade import Grader
    from workers.grading.survey import Surveys

    surveys = Surveys()

    async def stage(claim: Claim, status: EpisodeStatus) -> Trajectory:
        async with contextlib.AsyncExitStack() as stack:
            with span("choose Docker host"):  # and bring the task's image there
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
        prog="python -m workers.run",
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
