"""The command: which tasks it takes, what it keeps, what it refuses, how it ends."""

import os
import signal
import subprocess
import sys
import time

import docker
import pytest
from msgspec.structs import replace

from pipeline.taskfile import (
    Verification,
    fingerprint,
    read_tasks,
    read_verified,
    verified_path,
    write_tasks,
    write_verified,
)
from tests.workers.verify.spans import FIXED, TaskFile, verify
from workers.docker.host import FLEET
from workers.verify.__main__ import main

pytestmark = pytest.mark.docker


@pytest.mark.slow
def test_a_subset_keeps_what_is_known_of_the_others(file: TaskFile) -> None:
    file.add("a", FIXED)
    file.add("b", "exit 1")
    assert file.verify("--only", "test:a")[0] == 0
    status, lines = file.verify("--only", "test:b")
    assert (status, list(lines)) == (1, ["test:b"])
    assert {one.task: one.ok for one in read_verified(verified_path(file.path)).values()} == {
        "test:a": True,
        "test:b": False,
    }


@pytest.mark.slow
def test_what_stands_is_not_verified_again_until_the_task_changes(file: TaskFile) -> None:
    file.add("a", FIXED)
    file.add("b", "exit 1")
    passing = file.path.with_name("passing.jsonl")
    assert file.verify("--new", "--passing", str(passing))[0] == 1
    first = read_verified(verified_path(file.path))
    assert [task.id for task in read_tasks(passing)] == ["test:a"]
    assert verify(passing, "--new")[0] == 0
    file.verify("--new")
    second = read_verified(verified_path(file.path))
    assert second["test:a"] == first["test:a"]
    assert second["test:b"].verified_at > first["test:b"].verified_at, "it may have been mended"
    file.tasks[0] = replace(file.tasks[0], problem="Other words.")
    file.verify("--new", "--only", "test:b")
    write_tasks(file.path, file.tasks)
    file.verify("--new")
    assert read_verified(verified_path(file.path))["test:a"].verified_at > first["test:a"].verified_at


def test_without_an_engine_nothing_is_zero_and_nothing_is_forgotten(
    file: TaskFile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = file.add("known", FIXED)
    file.add("unknown", FIXED)
    before = Verification(
        task=known.id,
        fingerprint=fingerprint(known),
        states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 1, "agent": 1},
        ok=True,
        reason="",
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=1.0,
    )
    write_verified(verified_path(file.path), [before])
    monkeypatch.setenv("DOCKER_HOST", f"unix://{file.path.with_name('nobody.sock')}")
    status, lines = file.verify()
    assert status == 1
    assert {found for line in lines.values() for found in line["states"].values()} == {"infrastructure"}
    assert "no Docker host answers" in lines[known.id]["reason"]
    verified = read_verified(verified_path(file.path))
    assert verified[known.id] == before
    assert not verified["test:unknown"].ok
    closing = f"0 of 2 tasks are ok, 2 could not be verified now; {verified_path(file.path)} keeps what was found of them before"
    assert closing in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent.jsonl"], "absent.jsonl: No such file or directory"),
        (["broken.jsonl"], "broken.jsonl:1: not a Task"),
        (["empty.jsonl"], "holds no task"),
        (["tasks.jsonl", "--only", "test:other"], "holds no task 'test:other'"),
        (["tasks.jsonl", "--repeat", "0"], "--repeat and --partial-fixes must be 1 or more"),
        (["tasks.jsonl", "--partial-fixes", "0"], "--repeat and --partial-fixes must be 1 or more"),
        (["tasks.jsonl", "--jobs", "0"], "--jobs must be 1 or more, --cpu-s and --wall-s above 0"),
        (["tasks.jsonl", "--wall-s", "0"], "--jobs must be 1 or more, --cpu-s and --wall-s above 0"),
        (["tasks.jsonl", "--json", "gone/o.json"], "--json: gone/o.json cannot be written: No such file"),
        (["tasks.jsonl", "--json", "."], "--json: . cannot be written: Is a directory"),
        (
            ["tasks.jsonl", "--passing", "gone/p.jsonl"],
            "--passing: gone/p.jsonl cannot be written: No such file",
        ),
        (["tasks.jsonl", "--passing", "tests"], "--passing: tests cannot be written: Is a directory"),
        (["tasks.jsonl", "--logs", "README.md"], "--logs: README.md cannot be written: File exists"),
    ],
)
def test_misuse_is_refused(
    file: TaskFile, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    file.path.with_name("broken.jsonl").write_text("{}\n")
    file.path.with_name("empty.jsonl").touch()
    assert main([str(file.path.with_name(arguments[0])), *arguments[1:]]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert not said.out
    assert not verified_path(file.path).exists()


def test_a_task_file_beside_which_nothing_can_be_kept_is_refused_before_anything_is_graded(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    with file.path.open() as opened:  # as a shell's <(...) hands it over
        path = f"/dev/fd/{opened.fileno()}"
        assert main([path]) == 2
    said = capsys.readouterr()
    assert f"error: TASKS.jsonl: {path}.verified cannot be written: No such file or directory" in said.err
    assert not said.out


@pytest.mark.slow
def test_results_that_cannot_be_written_in_the_end_are_said_and_the_verifications_stay(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    task = file.add("a", FIXED)
    assert main([str(file.path), "--json", "/dev/full"]) == 2
    assert (
        f"error: --json: /dev/full cannot be written: No space left on device; {verified_path(file.path)}"
        in (capsys.readouterr().err)
    )
    assert read_verified(verified_path(file.path))[task.id].ok


@pytest.mark.slow
def test_a_disk_that_fills_up_on_the_way_is_said_and_earlier_verifications_stay(file: TaskFile) -> None:
    first = file.add("a", FIXED)
    assert main([str(file.path)]) == 0
    kept = verified_path(file.path).read_bytes()
    file.add("b", FIXED)
    there = set(file.path.parent.iterdir())
    run = subprocess.run(
        ["prlimit", f"--fsize={len(kept)}", sys.executable, "-m", "workers.verify", str(file.path), "--new"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert (
        run.stderr.splitlines()[-1] == f"error: TASKS.jsonl: {verified_path(file.path)} cannot be written: "
        f"File too large; {verified_path(file.path)} has what was verified"
    )
    assert "Traceback" not in run.stderr
    assert list(read_verified(verified_path(file.path))) == [first.id]
    assert set(file.path.parent.iterdir()) == there


@pytest.mark.slow_but_for("2-130")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_container(
    file: TaskFile, docker_client: docker.DockerClient, number: signal.Signals, status: int
) -> None:
    file.add("endless", "sleep 1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.verify", str(file.path)], env=os.environ, stdout=subprocess.DEVNULL
    )
    mine = {"label": f"{FLEET}=verify-{process.pid}"}
    while not docker_client.containers.list(ignore_removed=True, filters=mine | {"status": "running"}):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() == status
    assert docker_client.containers.list(all=True, ignore_removed=True, filters=mine) == []
