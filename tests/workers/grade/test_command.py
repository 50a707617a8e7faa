"""The command: what it prints and writes, what it refuses, and how it goes on after an interruption."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import docker
import pytest
from msgspec.structs import replace

from pipeline.task import Calibration, pack
from pipeline.taskfile import Verification, fingerprint, verified_path, write_verified
from tests.workers.grade.predicting import grade, write_predictions
from tests.workers.verify.spans import FIX, FIXED, TaskFile
from workers.docker.host import FLEET
from workers.grade import main

pytestmark = pytest.mark.docker

WRONG = FIX.replace('"d": 24', '"d": 48')
SLEEPER = FIX.replace('"d": 24', '"d": 240')
SLEEPS = f"if grep -q 240 spans.py; then sleep 1000; fi; {FIXED}"


def test_each_patch_gets_a_line_and_an_element_of_the_list(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("right", "wrong", "elsewhere", "empty", "nothing", "unused"):
        file.add(name, f"echo checking; {FIXED}")
    elsewhere = FIX.replace("spans.py", "absent.py")
    preds = write_predictions(
        file.path.with_name("preds.json"),
        {"right": FIX, "test:wrong": WRONG, "elsewhere": elsewhere, "empty": "", "nothing": None},
    )
    status, lines = grade(file.path, str(preds), "--logs", str(file.path.with_name("logs")))
    assert status == 0
    assert [(one["task"], one["value"], one["decided_by"], one["applied_by"]) for one in lines.values()] == [
        ("test:right", 1.0, "exit status 0", "git apply"),
        ("test:wrong", 0.0, "exit status 1", "git apply"),
        ("test:elsewhere", 0.0, "patch does not apply", ""),
        ("test:empty", 0.0, "empty patch", ""),
        ("test:nothing", 0.0, "empty patch", ""),
    ]
    for one in lines.values():
        assert set(one) == {
            *("task", "value", "decided_by", "applied_by", "tests", "control", "seconds", "error")
        }
        assert (one["error"], one["control"]) == ("", "none" if one["value"] else "")
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("test:")}
    assert rows["test:right"][:5] == ["1", "git", "apply", "-", "none"]
    assert rows["test:wrong"][:5] == ["0", "git", "apply", "-", "-"]
    assert rows["test:empty"][-2:] == ["empty", "patch"]
    assert printed.endswith("1 of 5 patches are worth 1\n")
    assert "checking" in (file.path.with_name("logs") / "test:wrong/patch.log").read_text()
    assert not list(file.path.parent.glob("*.unfinished.jsonl")), "nothing is left to go on with"


def test_one_patch_may_be_given_as_a_file(file: TaskFile, capsys: pytest.CaptureFixture[str]) -> None:
    file.add("a", FIXED)
    patch = file.path.with_name("a.diff")
    patch.write_text(FIX)
    assert grade(file.path, "--only", "a", "--patch", str(patch))[1]["test:a"]["value"] == 1
    with patch.open() as opened:  # as a shell's <(...) hands it over
        assert main([str(file.path), "--only", "test:a", "--patch", f"/dev/fd/{opened.fileno()}"]) == 0
    assert "1 of 1 patches are worth 1" in capsys.readouterr().out


def test_an_infrastructure_failure_is_no_value_and_is_tried_again(
    file: TaskFile, docker_client: docker.DockerClient, capsys: pytest.CaptureFixture[str]
) -> None:
    image = "swerve-test:pulled-later"
    file.add("here", FIXED)
    file.add("missing", FIXED, image=image)
    preds = write_predictions(file.path.with_name("preds.json"), {"here": FIX, "missing": FIX})
    status, lines = grade(file.path, str(preds))
    assert status == 1
    assert [one["value"] for one in lines.values()] == [1.0, None]
    assert (
        f"no image {image} on this host: `python -m workers.images pull {file.path}`"
        in (lines["test:missing"]["error"])
    )
    printed = capsys.readouterr().out
    assert ["test:missing", "infrastructure"] in [line.split()[:2] for line in printed.splitlines()]
    assert "1 of 2 patches are worth 1; 1 could not be graded" in printed
    docker_client.images.get(file.image.tag).tag("swerve-test", "pulled-later")
    try:
        again, logs = file.path.with_name("again"), lines["test:here"]
        status, lines = grade(file.path, str(preds), "--logs", str(again))
    finally:
        docker_client.images.remove(image)
    assert (status, [one["value"] for one in lines.values()]) == (0, [1.0, 1.0])
    assert lines["test:here"] == logs, "a verdict that was reached stands"


def test_without_a_docker_host_nothing_is_zero(file: TaskFile, monkeypatch: pytest.MonkeyPatch) -> None:
    file.add("a", FIXED)
    preds = write_predictions(file.path.with_name("preds.json"), {"a": WRONG})
    monkeypatch.setenv("DOCKER_HOST", f"unix://{file.path.with_name('nobody.sock')}")
    status, lines = grade(file.path, str(preds))
    assert (status, lines["test:a"]["value"]) == (1, None)
    assert "no Docker host answers" in lines["test:a"]["error"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_command_goes_on_where_it_was(
    file: TaskFile, docker_client: docker.DockerClient, number: signal.Signals, status: int
) -> None:
    file.add("quick", SLEEPS)
    file.add("slow", SLEEPS)
    out = file.path.with_name("graded.json")
    journal, preds = Path(f"{out}.unfinished.jsonl"), file.path.with_name("preds.json")
    write_predictions(preds, {"quick": FIX, "slow": SLEEPER})
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "workers.grade",
            str(file.path),
            str(preds),
            "--json",
            str(out),
            "--jobs",
            "2",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    mine = {"label": f"{FLEET}=grade-{process.pid}"}
    while not (
        journal.exists()
        and docker_client.containers.list(ignore_removed=True, filters=mine | {"status": "running"})
    ):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == status
    assert said.endswith(f"{number.name}: stopped; the same command goes on where it was, by {journal}\n")
    assert not out.exists()
    assert docker_client.containers.list(all=True, ignore_removed=True, filters=mine) == []
    (kept,) = [json.loads(line) for line in journal.read_text().splitlines() if line]
    write_predictions(preds, {"quick": FIX, "slow": WRONG})
    found, lines = grade(file.path, str(preds), "--logs", str(file.path.with_name("logs")))
    assert found == 0
    assert lines["test:quick"] == kept["result"], "it was not graded again"
    assert [one["value"] for one in lines.values()] == [1.0, 0.0]
    assert not journal.exists()


def test_a_verdict_of_another_patch_or_task_is_not_taken_over(file: TaskFile) -> None:
    file.add("a", FIXED)
    file.add("missing", FIXED, image="swerve-test:never")
    preds, out = file.path.with_name("preds.json"), file.path.with_name("graded.json")
    write_predictions(preds, {"a": WRONG, "missing": FIX})
    assert grade(file.path, str(preds))[1]["test:a"]["value"] == 0
    with Path(f"{out}.unfinished.jsonl").open("ab") as journal:
        journal.write(b'{"key": "cut sho')
    write_predictions(preds, {"a": FIX, "missing": FIX})
    assert grade(file.path, str(preds))[1]["test:a"]["value"] == 1
    file.tasks.clear()
    file.golds.clear()
    file.add("a", "exit 3")
    file.add("missing", FIXED, image="swerve-test:never")
    assert grade(file.path, str(preds))[1]["test:a"]["decided_by"] == "exit status 3"


def verified(file: TaskFile, calibration: bytes) -> Verification:
    return Verification(
        task=file.tasks[0].id,
        fingerprint=fingerprint(file.tasks[0]),
        states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 1, "agent": 1},
        ok=True,
        reason="",
        verdict_kind="exit_code",
        seconds=1.0,
        verified_at=1.0,
        calibration=calibration,
    )


@pytest.mark.slow
def test_patches_are_graded_with_the_calibration_of_the_task_as_it_is(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    preds = write_predictions(file.path.with_name("preds.json"), {"a": FIX})
    demanding = verified(file, pack(Calibration(passing=("tests/test_days.py::test_a_day",))))
    said = "1 of 1 tasks were never calibrated, so that their passes are graded without controls"
    write_verified(verified_path(file.path), [demanding])
    assert grade(file.path, str(preds))[1]["test:a"]["value"] == 0, "a test of the known fix did not run"
    assert said not in capsys.readouterr().err
    for known in ([replace(demanding, fingerprint="of another task")], [verified(file, b"")], []):
        write_verified(verified_path(file.path), known)
        assert grade(file.path, str(preds))[1]["test:a"]["value"] == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(said)
        assert line.endswith(f"`python -m workers.verify {file.path}` calibrates them")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent.jsonl", "{preds}"], "absent.jsonl: No such file or directory"),
        (["tasks.jsonl"], "give either PREDICTIONS, or --only ID with --patch FILE"),
        (["tasks.jsonl", "{preds}", "--patch", "README.md"], "give either PREDICTIONS, or --only"),
        (["tasks.jsonl", "absent.json"], "absent.json: No such file or directory"),
        (["tasks.jsonl", "README.md"], "README.md:1: not JSON"),
        (["tasks.jsonl", "{unknown}"], "'b': no such task in"),
        (["tasks.jsonl", "{twice}"], "two predictions for test:a: leave one of them out"),
        (["tasks.jsonl", "{preds}", "--only", "b"], "--only: 'b': no such task in"),
        (["tasks.jsonl", "{unknown}", "--only", "a"], "holds no prediction for test:a"),
        (["tasks.jsonl", "--patch", "README.md"], "--patch: name the one task"),
        (["tasks.jsonl", "--only", "a", "--patch", "absent.diff"], "absent.diff: No such file"),
        (["tasks.jsonl", "{preds}", "--jobs", "0"], "--jobs must be 1 or more"),
        (["tasks.jsonl", "{preds}", "--cpu-s", "0"], "--cpu-s and --wall-s above 0"),
        (["tasks.jsonl", "{preds}", "--json", "gone/o.json"], "--json: gone/o.json cannot be written"),
        (["tasks.jsonl", "{preds}", "--json", "."], "--json: . cannot be written: Is a directory"),
        (["tasks.jsonl", "{preds}", "--logs", "README.md"], "--logs: README.md cannot be written"),
    ],
)
def test_misuse_is_refused_in_one_line(
    file: TaskFile, arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    here = file.path.parent
    places = {
        "{preds}": write_predictions(here / "preds.json", {"a": FIX}),
        "{unknown}": write_predictions(here / "unknown.json", {"b": FIX}),
        "{twice}": write_predictions(here / "twice.json", {"a": FIX, "test:a": FIX}),
    }
    words = [str(places.get(word, word)) for word in arguments[1:]]
    before = set(here.iterdir())
    assert main([str(here / arguments[0]), *words]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert (said.err.count("\n"), said.out) == (1, "")
    assert set(here.iterdir()) == before


def test_predictions_beside_which_nothing_can_be_kept_need_a_place_for_results(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    preds = write_predictions(file.path.with_name("preds.json"), {"a": FIX})
    with preds.open() as opened:
        path = f"/dev/fd/{opened.fileno()}"
        assert main([str(file.path), path]) == 2
        assert "; --json OUT keeps this file beside OUT" in capsys.readouterr().err
        opened.seek(0)
        assert grade(file.path, path)[0] == 0


def test_results_that_cannot_be_written_in_the_end_leave_the_verdicts(
    file: TaskFile, capsys: pytest.CaptureFixture[str]
) -> None:
    file.add("a", FIXED)
    preds = write_predictions(file.path.with_name("preds.json"), {"a": FIX})
    full = file.path.with_name("full.json")
    full.symlink_to("/dev/full")
    assert main([str(file.path), str(preds), "--json", str(full)]) == 2
    journal = Path(f"{full}.unfinished.jsonl")
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: --json: {full} cannot be written: No space left on device; {journal} has the verdicts"
    )
    assert journal.exists()
