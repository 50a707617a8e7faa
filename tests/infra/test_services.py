"""Services: started where none answers, and nothing is stopped that we did not start."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra import processes, services
from infra.services import Service
from tests.conftest import free_ports

SERVER = "import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(600)"


@pytest.fixture
def port() -> int:
    (free,) = free_ports(1)
    return free


@pytest.fixture
def service(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A program that listens on a port, with its notes in a directory of its own."""
    monkeypatch.setattr(services, "RUN", tmp_path)
    monkeypatch.setattr(services, "REDIS_DATA", tmp_path / "redis")
    monkeypatch.setattr(services, "OTHERS_START_S", 0.5)

    def answers() -> bool:
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", port)) == 0

    service = Service("listener", (sys.executable, "-c", SERVER.format(port=port)), answers)
    yield service
    services.take_down(service)


def test_a_service_that_does_not_answer_is_started_and_stopped_again(service: Service) -> None:
    assert services.bring_up(service, attached=True) is not None
    assert service.answers()
    assert services.take_down(service)
    assert not service.answers()


def test_what_an_earlier_process_started_is_stopped_by_down_and_not_as_ones_own(service: Service) -> None:
    assert services.bring_up(service, attached=False) is not None
    # As if another process of this checkout had started it.
    earlier = services.children.pop(service.name)
    assert not services.stop_own(service)
    assert service.answers()
    assert services.take_down(service)
    earlier.process.wait()
    assert not service.answers()


def test_a_port_held_by_something_else_is_an_error_that_names_it(service: Service, port: int) -> None:
    deaf = replace(service, answers=lambda: False, port=port)
    said = rf"port {port} is in use by process {os.getpid()} "
    with socket.create_server(("127.0.0.1", port)), pytest.raises(ValueError, match=said):
        services.bring_up(deaf, attached=True)


def test_down_stops_the_named_services_only(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(
        service, name="other", command=("sleep", "600"), answers=lambda: "other" in services.children
    )
    monkeypatch.setattr(services, "SERVICES", (service, other))
    for one in (service, other):
        services.bring_up(one, attached=True)
    assert services.main(["down", "other"]) == 0
    assert capsys.readouterr().out == "other: stopped\n"
    assert service.answers()


def test_a_service_that_answers_is_left_alone(service: Service, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert services.bring_up(service, attached=True) is None
        assert not services.take_down(service)
        assert service.answers()


def test_a_note_of_a_process_that_is_gone_stops_nobody_else(service: Service) -> None:
    with subprocess.Popen(["sleep", "60"]) as bystander:
        service.note.write_text(f"{bystander.pid} 1 0 0 0")  # the same number, given to another process since
        assert not services.take_down(service)
        assert bystander.poll() is None
        bystander.kill()


def test_a_service_that_cannot_be_started_says_what_is_missing(service: Service) -> None:
    missing = Service("missing", ("no-such-daemon",), lambda: False)
    with pytest.raises(RuntimeError, match="no-such-daemon is not installed"):
        services.bring_up(missing, attached=True)


def test_a_service_that_ends_at_once_is_an_error_with_the_end_of_its_log(service: Service) -> None:
    failing = Service("failing", (sys.executable, "-c", "raise SystemExit('out of luck')"), lambda: False)
    with pytest.raises(RuntimeError, match="out of luck"):
        services.bring_up(failing, attached=True)


def test_a_service_that_others_were_starting_just_then_is_theirs(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a dockerd of a run that was killed while it waited for it: a second one finds its place taken and ends."""
    others: list[bool] = []
    earlier = services.Note(pid=os.getpid(), ticks=1, owner_pid=0, owner_ticks=0)
    earlier.write(service.note)

    def wait_until(*words: object, **limits: object) -> float:
        others.append(True)
        raise RuntimeError("listener ended with status 1")

    monkeypatch.setattr(services.processes, "wait_until", wait_until)
    starting = replace(service, answers=lambda: bool(others))
    assert services.bring_up(starting, attached=False) is None
    assert services.read_note(service) == earlier


def test_ctrl_c_leaves_no_service_that_was_being_started(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def wait_until(*words: object, child: processes.Child, **limits: object) -> float:
        started.append(child.pid)
        if len(started) == 2:
            raise KeyboardInterrupt
        return 0.0

    monkeypatch.setattr(services.processes, "wait_until", wait_until)
    monkeypatch.setattr(services, "SERVICES", (service, replace(service, name="other")))
    with pytest.raises(KeyboardInterrupt):
        services.main(["up"])
    assert [services.began_at_ticks(pid) for pid in started] == [None, None]


def test_an_attached_service_ends_when_its_starter_is_killed(service: Service, port: int) -> None:
    code = f"""
import socket, sys, time
from pathlib import Path
from infra import services
services.RUN = Path({str(services.RUN)!r})
services.REDIS_DATA = services.RUN / "redis"
def answers():
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", {port})) == 0
listener = services.Service("listener", (sys.executable, "-c", {service.command[2]!r}), answers)
services.bring_up(listener, attached=True)
print("up", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"up\n"
        assert service.answers()
        starter.kill()
    while service.answers():
        time.sleep(0.1)


SLOW_SERVER = """
import signal, socket, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = socket.create_server(("127.0.0.1", {port}))
while not Path({may_end!r}).exists():
    time.sleep(0.02)
time.sleep(0.5)
"""


def test_a_service_that_is_being_stopped_is_replaced(service: Service, port: int, tmp_path: Path) -> None:
    may_end = tmp_path / "may-end"
    slow = SLOW_SERVER.format(port=port, may_end=str(may_end))
    leaving = replace(service, command=(sys.executable, "-c", slow))
    assert services.bring_up(leaving, attached=False) is not None
    old = services.started_pid(leaving)
    child = services.children.pop(leaving.name)  # another process stops it than starts its successor
    with ThreadPoolExecutor() as threads:
        stopping = threads.submit(services.take_down, leaving)
        while not services.read_note(service).stop_has_begun:  # type: ignore[union-attr]
            pass
        assert service.answers(), "it still answers, but will end"
        may_end.touch()
        assert services.bring_up(service, attached=True) is not None
        assert stopping.result()
    child.process.wait()
    assert services.started_pid(service) not in (None, old)
    assert service.answers()


def test_a_service_whose_owner_is_gone_is_waited_for_until_it_ends(service: Service) -> None:
    assert services.bring_up(service, attached=True) is not None
    note = services.read_note(service)
    assert note is not None
    replace(note, owner_ticks=1).write(service.note)  # the number belongs to another process since
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(services.wait_while_stopping, service)
        assert not waiting.done()
        services.children.pop(service.name).stop(10)
        waiting.result()
    assert not service.answers()


def test_a_killed_service_is_started_again_by_the_process_that_started_it(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "SERVICES", (service,))
    said: list[str] = []
    services.restart_dead(said.append)
    assert not said, "it was never started here"
    services.bring_up(service, attached=True)
    services.restart_dead(said.append)
    assert not said, "it lives"
    first = services.children[service.name]
    first.process.kill()
    first.process.wait()
    services.restart_dead(said.append)
    assert said == [f"listener died (status -9); starting it again, see {service.log}"]
    assert service.answers()
    assert services.started_pid(service) == services.children[service.name].pid != first.pid


def test_a_stop_is_announced_before_it_begins(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "SERVICES", (service,))
    services.bring_up(service, attached=True)
    note = services.read_note(service)
    assert note is not None
    assert not note.is_stopping
    services.announce_stop()
    announced = services.read_note(service)
    assert announced is not None
    assert announced.is_stopping
    assert service.answers()
