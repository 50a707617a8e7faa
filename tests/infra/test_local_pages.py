"""The pages that `python -m infra.local` starts beside a run."""

import json
import socket
import time
import urllib.request
from pathlib import Path

from infra import ports
from infra.local import commands
from infra.processes import Supervisor
from tests.conftest import free_ports
from tests.infra.test_local import arguments
from tests.infra.web.example_run import NO_REDIS


def test_the_pages_show_the_run_on_the_next_free_port_and_end_with_it(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    given = arguments(tmp_path, f"--web-port={port}", f"--redis-url={NO_REDIS}")
    (given.run_dir / "journal").mkdir(parents=True)
    (given.run_dir / "run.json").write_text(json.dumps({"run_id": "mine"}))
    said: list[str] = []
    supervisor = Supervisor(said.append)
    with socket.create_server(("127.0.0.1", port)):
        next_port = ports.next_free(port)
        supervisor.start(commands.pages(given, said.append))
    address = f"http://127.0.0.1:{next_port}/"
    assert said == [f"the run in a browser: {address} (port {port} is in use)"]
    log = given.run_dir / "logs" / "web.log"
    while address not in log.read_text():
        supervisor.check_alive()
        time.sleep(0.1)
    with urllib.request.urlopen(f"{address}api/runs") as response:
        assert [run["id"] for run in json.load(response)["runs"]] == ["mine"]
    supervisor.stop()
    assert ports.next_free(next_port) == next_port
