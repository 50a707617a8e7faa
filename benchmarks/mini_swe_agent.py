"""mini-swe-agent, the rival for steps and episodes, as it is published and as its own SWE-bench settings start it.

Its banner, its directory in the user's home and its log of containers are switched off. It gets `--network none`, which
makes its containers cheaper to start.
"""

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

from benchmarks.bug import EVAL, HIDDEN_TESTS, LABEL, OWNER, WORKDIR

RIVAL = "mini-swe-agent 2.4.6"
RUN_ARGUMENTS = ["--rm", "--network", "none", "--label", f"{LABEL}={OWNER}"]
HEREDOC = "END_OF_PATCH"


@cache
def parts() -> SimpleNamespace:
    """Its agent, its Docker environment and its replaying model."""
    with tempfile.TemporaryDirectory() as nowhere:
        os.environ |= {"MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": nowhere}
        from minisweagent.agents.default import DefaultAgent
        from minisweagent.environments.docker import DockerEnvironment
        from minisweagent.models.test_models import DeterministicModel, make_output
    logging.getLogger("minisweagent").setLevel(logging.ERROR)
    return SimpleNamespace(
        Agent=DefaultAgent, Environment=DockerEnvironment, Model=DeterministicModel, make_output=make_output
    )


def environment(image: str, *, timeout_s: int = 60) -> Any:
    """One of its containers, running."""
    return parts().Environment(
        image=image,
        cwd=WORKDIR,
        timeout=timeout_s,
        interpreter=["bash", "-c"],
        run_args=RUN_ARGUMENTS,
    )


@contextmanager
def environments(image: str, count: int) -> Iterator[list[Any]]:
    """Running containers, force-removed at the end: its own way takes ten seconds, because `sleep` as process 1 ignores SIGTERM."""
    opened: list[Any] = []
    try:
        for _ in range(count):
            opened.append(environment(image))
        yield opened
    finally:
        for one in opened:
            remove(one)


def remove(environment: Any) -> None:
    subprocess.run(["docker", "rm", "-f", environment.container_id], capture_output=True, check=False)
    environment.container_id = None  # or its destructor would stop it again


def play_and_grade(image: str, commands: Sequence[str]) -> bool:
    """One episode, whose patch is graded in a fresh container; returns whether it was resolved.

    The grading is the simplest possible: patch, hidden tests, script.
    """
    rival = parts()
    outputs = [rival.make_output("THOUGHT: the next thing to do.", [{"command": one}]) for one in commands]
    agent = rival.Agent(
        rival.Model(outputs=outputs),
        environment(image),
        cost_limit=0.0,
        system_template="You fix code.",
        instance_template="{{task}}",
    )
    patch = agent.run("discounted(200, 10) should be 180 and is -1800.")["submission"]
    agent.env.cleanup()
    agent.env.container_id = None
    grader = environment(image)
    steps = (_apply(patch), _apply(HIDDEN_TESTS.decode()), EVAL)
    resolved = all(grader.execute({"command": step})["returncode"] == 0 for step in steps)
    grader.cleanup()
    grader.container_id = None
    return resolved


def _apply(patch: str) -> str:
    ended = patch if patch.endswith("\n") else patch + "\n"
    return f"git apply - <<'{HEREDOC}'\n{ended}{HEREDOC}"
