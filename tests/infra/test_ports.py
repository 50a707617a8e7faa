"""Ports that are free, and processes that hold the others."""

import os
import socket
import subprocess
import sys

import pytest

from infra import ports
from tests.conftest import free_ports

LISTEN = """
import socket, sys
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
sys.stdin.read()
"""


def test_a_free_port_is_accepted() -> None:
    (port,) = free_ports(1)
    ports.check_free(port, needed_by="engine", fix="give another --port")


def test_a_port_in_use_is_an_error_that_names_the_process_and_the_fix() -> None:
    (port,) = free_ports(1)
    command = [sys.executable, "-c", LISTEN, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(
            ValueError, match=f"engine: port {port} is in use by process {other.pid} "
        ) as caught:
            ports.check_free(port, needed_by="engine", fix="give another --port")
        other.communicate()
    assert sys.executable in str(caught.value)
    assert str(caught.value).endswith("; give another --port")
    assert "\n" not in str(caught.value)


def test_a_port_that_was_in_use_a_moment_ago_is_free() -> None:
    (port,) = free_ports(1)
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        socket.create_connection(("127.0.0.1", port)),
    ):
        server.accept()[0].close()  # our side closes first, so the port lingers in TIME_WAIT
    ports.check_free(port, needed_by="engine", fix="wait")


def test_a_port_held_on_all_addresses_is_in_use_on_each() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert f"process {os.getpid()} " in ports.holder(server.getsockname()[1])
        with pytest.raises(ValueError, match="in use"):
            ports.check_free(server.getsockname()[1], needed_by="engine", fix="stop it")


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("no-such-host.invalid", 1, "is not an address"),
        ("192.0.2.1", 1, "cannot listen on"),
        ("127.0.0.1", 70000, "between"),
    ],
)
def test_an_address_that_cannot_be_listened_on_is_an_error(host: str, port: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ports.check_free(port, host=host, needed_by="router", fix="give another --host")
