"""A private redis-server is there when its URL is given out."""

import shutil
import sys
from pathlib import Path

import pytest
import redis

from infra.redis_server import DURABLE, own_redis, start_in, url_in

# The kernel may let a server wait between the making of its socket and its first connection.
SLOW = """#!{python}
import os, socket, sys, time
socket.socket(socket.AF_UNIX).bind(sys.argv[sys.argv.index("--unixsocket") + 1])
time.sleep(1)
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""


@pytest.mark.slow
def test_a_socket_that_nobody_listens_to_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "redis-server"
    slow.write_text(SLOW.format(python=sys.executable, real=shutil.which("redis-server")))
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with own_redis() as url, redis.Redis.from_url(url) as client:
        assert client.ping()


def test_what_was_written_before_a_kill_is_there_at_the_next_start(tmp_path: Path) -> None:
    for number in (1, 2):
        server = start_in(tmp_path, DURABLE)
        try:
            with redis.Redis.from_url(url_in(tmp_path)) as client:
                assert client.incr("starts") == number
        finally:
            server.process.kill()
            server.process.wait()
