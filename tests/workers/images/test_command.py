"""The command line itself: what a terminal shows, what an interruption leaves, and what help needs."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys

import pytest

from tests.workers.images.conftest import ROOT, Place
from tests.workers.images.registry import PATIENCE_S, Gate, layer


def read_all(terminal: int) -> str:
    said = b""
    with contextlib.suppress(OSError):  # what Linux says at the end of a terminal
        while data := os.read(terminal, 65536):
            said += data
    return said.decode()


@pytest.mark.docker
def test_a_terminal_sees_bars_and_a_line_for_each_image(place: Place) -> None:
    images = [place.publish("shown"), f"{place.registry.host}/{place.hub}/absent:latest"]
    ours, theirs = pty.openpty()
    with place.start("pull", "--image", *images, stderr=theirs) as pull:
        os.close(theirs)
        said = read_all(ours)
        assert pull.wait(PATIENCE_S) == 1
    os.close(ours)
    assert "all images" in said
    assert f"pulled    {images[0]}" in said
    assert f"failed    {images[1]}" in said


@pytest.mark.docker
def test_an_interrupted_pull_ends_at_once_and_says_how_to_go_on(place: Place) -> None:
    gate = Gate(place.registry)
    place.publish("slow", layer("big", bytes(24 * 1024**2)))
    with place.start(
        "pull", "--image", f"{place.hub}/slow", "--proxy", gate.host, stderr=subprocess.PIPE
    ) as pull:
        assert gate.reached.wait(PATIENCE_S)
        pull.send_signal(signal.SIGINT)
        said = pull.communicate(timeout=PATIENCE_S)[1].decode()
    gate.close()
    assert (pull.returncode, said) == (
        130,
        "interrupted; the same command continues where this one stopped\n",
    )


@pytest.mark.docker
def test_json_is_an_object_a_line_on_standard_output(place: Place) -> None:
    image = place.publish("json")
    done = place.run("--json", "pull", "--image", image)
    (row,) = map(json.loads, done.stdout.splitlines())
    assert (row["image"], row["state"], row["via"], row["reason"]) == (image, "pulled", image, "")


@pytest.mark.docker
def test_a_docker_host_that_does_not_answer_is_said_in_a_line_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, place: Place
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    done = place.run("ls")
    assert (done.status, done.stderr.count("\n")) == (1, 1)
    assert "nobody listens at tcp://127.0.0.1:1" in done.stderr
    assert "start Docker, or set DOCKER_HOST" in done.stderr


@pytest.mark.docker
def test_a_file_that_cannot_be_written_is_misuse_in_a_line(place: Place) -> None:
    image = place.publish("unwritable")
    done = place.run("pull", "--json", "--image", image, "--failures", "/etc/passwd/failed.txt")
    assert (done.status, done.stderr.splitlines()[-1]) == (
        2,
        "/etc/passwd/failed.txt: Not a directory",
    )


def test_help_needs_no_docker_host_and_loads_no_client() -> None:
    code = (
        "import runpy, sys\n"
        "sys.argv = ['x', 'pull', '--help']\n"
        "try: runpy.run_module('workers.images', run_name='__main__')\n"
        "except SystemExit: print(*(m for m in ('docker', 'rich', 'requests') if m in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.split() == []
