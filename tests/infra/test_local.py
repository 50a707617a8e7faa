"""The system on one machine: what it checks before it starts anything, and what it leaves alone at its end."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import docker
import pytest

from infra import services
from infra.local import __main__ as local
from infra.local import commands
from infra.local.commands import parse_arguments
from infra.processes import Child, SupervisedProcess, Supervisor
from infra.redis_server import FORGETFUL, own_redis
from infra.services import Service
from infra.serving.engine import parse_arguments as parse_engine
from tests.conftest import free_ports
from trainer.learner.config import LORA_TARGETS


def arguments(tmp_path: Path, *more: str, recipe: str = "") -> argparse.Namespace:
    (tmp_path / "recipe.toml").write_text(recipe)
    return parse_arguments(None, [str(tmp_path / "recipe.toml"), f"--run-dir={tmp_path / 'run'}", *more])


ADAPTED = "[weights]\nadapters = 'alone'\n[learner.lora]\nrank = 16\n"


@pytest.mark.parametrize(
    ("recipe", "flags", "rank", "targets"),
    [
        ("[learner.lora]\nrank = 16\n", [], None, []),
        (ADAPTED, ["--set", "weights.adapters=merged"], None, []),
        ("[weights]\nadapters = 'alone'\n", [], None, []),  # the trainer refuses it
        (ADAPTED, [], "16", list(LORA_TARGETS)),
        (
            ADAPTED,
            ["--set", "learner.lora.rank=8", "--set=learner.lora.targets=['q_proj', 'v_proj']"],
            "8",
            ["q_proj", "v_proj"],
        ),
        ("[weights]\nadapters = 'alone'\n", ["--set", "learner.lora={rank=4}"], "4", list(LORA_TARGETS)),
    ],
)
def test_the_engine_takes_adapters_if_the_recipe_with_the_trainers_overrides_publishes_them_alone(
    tmp_path: Path, tiny_model: Path, recipe: str, flags: list[str], rank: str | None, targets: list[str]
) -> None:
    engine, _ = commands.serving(arguments(tmp_path, "--", *flags, recipe=recipe), tiny_model)
    words = list(engine.command())
    if rank is None:
        assert "--enable-lora" not in words
        return
    passed_on = parse_engine(words[3:]).passed_on
    assert passed_on == ["--enable-lora", f"--max-lora-rank={rank}", "--lora-target-modules", *targets]


def test_what_was_running_keeps_running_and_is_said_to_have_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(services, "RUN", tmp_path)
    monkeypatch.setattr(services, "REDIS_DATA", tmp_path / "redis")
    (port,) = free_ports(1)

    def answers() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"
    service = Service("listener", (sys.executable, "-c", code), answers)
    monkeypatch.setattr(services, "SERVICES", (service,))
    services.bring_up(service, attached=False)  # `python -m infra.services up` in the same checkout
    earlier = services.children.pop(service.name)
    try:
        with ExitStack() as cleanup:
            local.bring_up_services(arguments(tmp_path), cleanup)
        assert capsys.readouterr().out == "local: listener was running\n"
        assert answers()
    finally:
        earlier.stop(10)
    with ExitStack() as cleanup:
        local.bring_up_services(arguments(tmp_path), cleanup)
        assert answers()
    assert not answers()


@pytest.mark.docker
def test_only_the_containers_of_its_own_workers_are_removed(
    docker_client: docker.DockerClient, task_image: str
) -> None:
    host = socket.gethostname()
    with subprocess.Popen(["sleep", "600"]) as process, ExitStack() as cleanup:
        cleanup.callback(process.kill)
        made = {}
        for owner in (f"{host}/{process.pid}", f"{host}/1"):
            labels = {"swerve.fleet": "one-redis", "swerve.worker": owner}
            made[owner] = docker_client.containers.create(
                task_image, "true", labels=labels, network_mode="none"
            )
            cleanup.callback(remove_if_there, docker_client, made[owner].id)
        said: list[str] = []
        local.remove_containers([Child("worker-1", process), Child("engine", process)], said.append)
        left = {one.id for one in docker_client.containers.list(all=True, ignore_removed=True)}
        assert [container.id in left for container in made.values()] == [False, True]
        assert said == ["removed 1 containers that were left"]


def remove_if_there(client: docker.DockerClient, container: str) -> None:
    if container in [one.id for one in client.containers.list(all=True, ignore_removed=True)]:
        client.containers.get(container).remove(force=True)


def refused(tmp_path: Path, *more: str, recipe: str = "") -> str:
    """What `python -m infra.local` says to a user's mistake: one line, and status 2."""
    given = arguments(tmp_path, *more, recipe=recipe)
    command = [sys.executable, "-m", "infra.local", str(given.recipe), f"--run-dir={given.run_dir}", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (line,) = done.stderr.splitlines()
    assert not given.run_dir.exists()
    return line


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    engine, router = free_ports(2)
    flags = [f"--engine-port={engine}", f"--router-port={router}"]
    for port, who, flag in [
        (engine, "engine", "--engine-port"),
        (router, "router", "--router-port"),
        (router + 9, "router's metrics", "--router-port"),
    ]:
        with socket.create_server(("127.0.0.1", port)):
            line = refused(tmp_path, *flags)
        assert line.startswith(f"error: {who}: port {port} is in use by process {os.getpid()} (")
        assert flag in line


@pytest.mark.parametrize(
    ("recipe", "more", "said"),
    [
        ("model = 'nowhere'", [], "there is no such directory"),
        ("", [], "it names no model"),
        ("model =", [], "not a readable TOML file"),
        ("", ["--model=/nowhere"], "error: --model: /nowhere: there is no such directory"),
    ],
)
def test_a_model_that_is_missing_is_named_before_anything_starts(
    tmp_path: Path, recipe: str, more: list[str], said: str
) -> None:
    engine, router = free_ports(2)
    more = [*more, f"--engine-port={engine}", f"--router-port={router}"]
    assert said in refused(tmp_path, *more, recipe=recipe)


@pytest.mark.docker
def test_a_refused_password_is_one_line_that_does_not_show_it(
    tmp_path: Path, tiny_model: Path, task_image: str
) -> None:
    port, engine, router = free_ports(3)
    with own_redis({**FORGETFUL, "requirepass": "right-secret", "port": str(port)}):
        given = arguments(tmp_path, recipe=f"model = '{tiny_model}'")
        command = [sys.executable, "-m", "infra.local", str(given.recipe), f"--run-dir={given.run_dir}"]
        command += [f"--engine-port={engine}", f"--router-port={router}"]
        command += [f"--redis-url=redis://:wrong-secret@127.0.0.1:{port}/0"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stdout == "local: docker was running\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"error: --redis-url: Redis at redis://:***@127.0.0.1:{port}/0 refuses the password"
    )
    assert "secret" not in line


@pytest.mark.parametrize("victim", ["router", "worker-1"])
def test_a_process_that_ends_while_the_others_start_is_an_error_with_the_end_of_its_log(
    tmp_path: Path, victim: str
) -> None:
    def process(name: str) -> SupervisedProcess:
        code = "raise SystemExit('no room')" if name == victim else "import time; time.sleep(600)"
        command = [sys.executable, "-c", code]
        log = tmp_path / f"{name}.log"
        return SupervisedProcess(name, lambda: command, dict(os.environ), log, 10, signal.SIGKILL)

    supervisor = Supervisor(lambda line: None)
    wanted = [process(name) for name in ("engine", "router", "worker-1")]
    (port,) = free_ports(1)
    try:
        local.start(supervisor, wanted)
        with pytest.raises(RuntimeError, match=f"{victim} ended with status 1:\nno room"):
            local.wait_for_engine(supervisor, "engine", port)
    finally:
        supervisor.stop()
