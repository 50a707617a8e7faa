"""The end of a campaign: the trainer makes its last steps, then we look for what is left behind."""

import subprocess
import sys

import redis

from infra.chaos.injection import FaultInjector, NotRecovered
from infra.chaos.slo import Leftovers
from infra.chaos.system import RUN_ID, System

STOP_S = 90.0
LAST_STEPS = 1
LAST_STEPS_S = 300.0
CLEAN_WITHIN_S = 60.0


def finish_run(injector: FaultInjector) -> None:
    """Let the run end in order, also if its trainer has just been killed. Raises NotRecovered or EndRequested."""
    system, trainers = injector.system, injector.system.trainers
    system.limit_steps(injector.monitor.step + LAST_STEPS)
    trainer = system.child("trainer")
    if trainer.alive:
        trainer.process.terminate()
        if not injector.wait(lambda: not trainer.alive, STOP_S):
            raise NotRecovered(f"the trainer does not stop within {STOP_S:.0f} s")
    if trainers.exit_status("trainer") is not None:
        trainers.start(trainers.running["trainer"][0])
    if not injector.wait(lambda: trainers.exit_status("trainer") is not None, LAST_STEPS_S):
        raise NotRecovered(f"the run does not end within {LAST_STEPS_S:.0f} s")
    if status := trainers.exit_status("trainer"):
        raise NotRecovered(f"the trainer ended with status {status}; see {injector.evidence / 'trainer.log'}")


def leftovers(injector: FaultInjector) -> Leftovers:
    """What is left after everything has had a minute to clean up, and the workers have stopped."""
    docker = injector.system.docker
    injector.wait(lambda: not (docker.containers() or docker.shims()), CLEAN_WITHIN_S)
    injector.system.workers.stop()
    return Leftovers(
        containers=docker.containers(),
        networks=docker.networks(),
        volumes=docker.volumes(),
        processes=[f"{pid}, which holds a container" for pid in docker.shims()],
        temporary=_temporary_files(injector.system),
    )


def _temporary_files(system: System) -> list[str]:
    """Files and directories that no process will remove any more, because those that made them have ended. Redis and
    Docker still run; of theirs, what is in their temporary directories counts.
    """
    system.trainers.stop()
    system.serving.stop()
    running = system.services.pids()
    found = [path for path in system.temporary.iterdir() if path.name not in running]
    found += [path for name in running for path in (system.temporary / name).iterdir()]
    return sorted(str(path.relative_to(system.temporary)) for path in found)


def client(system: System) -> redis.Redis:
    return redis.Redis(port=system.arguments.redis_port)


def problems_in_report(system: System) -> list[str]:
    """What the trainer's own report finds wrong."""
    words = [sys.executable, "-m", "trainer.report", str(system.arguments.run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return []
    return [f"the report on {RUN_ID} ends with status {done.returncode}: {done.stderr}"]
