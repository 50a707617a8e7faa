"""The end of a run of blows: the trainer stops and is started for a last few steps, and then we look at what is left."""

import subprocess
import sys

import redis

from infra.chaos.recovery import Hopeless, Ring
from infra.chaos.slo import Leftovers
from infra.chaos.system import RUN_ID, System

STOP_S = 90.0
LAST_STEPS = 1
LAST_STEPS_S = 300.0
CLEAN_WITHIN_S = 60.0


def run_out(ring: Ring) -> None:
    """Let the run end in good order, also if its trainer has just been killed. Raises Hopeless or Stopped."""
    system, trainers = ring.system, ring.system.trainers
    system.run_out(ring.watch.step + LAST_STEPS)
    trainer = system.child("trainer")
    if trainer.alive:
        trainer.process.terminate()
        if not ring.wait(lambda: not trainer.alive, STOP_S):
            raise Hopeless(f"the trainer does not stop within {STOP_S:.0f} s")
    if trainers.exit_status("trainer") is not None:
        trainers.start(trainers.running["trainer"][0])
    if not ring.wait(lambda: trainers.exit_status("trainer") is not None, LAST_STEPS_S):
        raise Hopeless(f"the run does not end within {LAST_STEPS_S:.0f} s")
    if status := trainers.exit_status("trainer"):
        raise Hopeless(f"the trainer ended with status {status}; see {ring.evidence / 'trainer.log'}")


def what_is_left(ring: Ring) -> Leftovers:
    """After everything has had a minute to tidy up, and the workers have gone home."""
    ring.wait(lambda: not (ring.system.docker.containers() or ring.system.docker.shims()), CLEAN_WITHIN_S)
    ring.system.workers.stop()
    docker = ring.system.docker
    return Leftovers(
        containers=docker.containers(),
        networks=docker.networks(),
        volumes=docker.volumes(),
        processes=[f"{pid}, which holds a container" for pid in docker.shims()],
        temporary=_temporary(ring.system),
    )


def _temporary(system: System) -> list[str]:
    """Files and directories that nobody will come back for: their makers have ended, or been killed. Redis and Docker
    run on; of theirs, what is in their directories.
    """
    system.trainers.stop()
    system.serving.stop()
    running = system.services.pids()
    found = [path for path in system.temporary.iterdir() if path.name not in running]
    found += [path for name in running for path in (system.temporary / name).iterdir()]
    return sorted(str(path.relative_to(system.temporary)) for path in found)


def client(system: System) -> redis.Redis:
    return redis.Redis(port=system.arguments.redis_port)


def second_opinion(system: System) -> list[str]:
    """What the trainer's own report finds wrong."""
    words = [sys.executable, "-m", "trainer.report", str(system.arguments.run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (
        [f"the report on {RUN_ID} ends with status {done.returncode}: {done.stderr}"]
        if done.returncode
        else []
    )
