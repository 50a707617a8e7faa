"""Receivers for tests: real processes at one port of several loopback addresses, as on the hosts of a fleet."""

import sys
from pathlib import Path

from infra import processes
from tests.conftest import answers_ok, free_ports


class ReceiverHost:
    """One engine host: its address, its local disk, and its receiver, which can be killed and started again."""

    def __init__(self, address: str, port: int, disk: Path) -> None:
        self.address, self.port = address, port
        self.engine_url = f"http://{address}:1"
        self.disk = disk
        self._command = [
            *(sys.executable, "-m", "infra.serving.receiver", f"--host={address}"),
            *(f"--port={port}", f"--directory={disk}", "--keep=3"),
        ]
        self._health = f"http://{address}:{port}/health"
        self._log = disk.with_suffix(".log")

    def start(self) -> None:
        self._child = processes.start("receiver", self._command, log=self._log)
        processes.wait_until(
            lambda: answers_ok(self._health), child=self._child, timeout_s=300, log=self._log
        )

    def kill(self) -> None:
        self._child.process.kill()
        self._child.process.wait()

    def stop(self) -> None:
        self._child.stop(grace_s=5)

    def directory_of(self, run_id: str, version: int) -> Path:
        return self.disk / f"{run_id}@v{version:06d}"

    def is_receiving(self) -> bool:
        return any(self.disk.glob(".*.partial"))


class Hosts:
    """Engine hosts, each with an address of its own and the same receiver port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._hosts: list[ReceiverHost] = []
        (self.port,) = free_ports(1)

    def new(self) -> ReceiverHost:
        address = f"127.0.0.{len(self._hosts) + 1}"
        host = ReceiverHost(address, self.port, self._directory / address)
        host.start()
        self._hosts.append(host)
        return host

    def stop(self) -> None:
        for host in self._hosts:
            host.stop()


def content_of(directory: Path) -> dict[str, bytes]:
    """The files; a folder of adapters is never sent."""
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}
