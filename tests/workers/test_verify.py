"""Verification, through the production grader in real containers, from imported files to exit status and reason."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from msgspec.structs import replace

from pipeline.request import Claim, Limits
from pipeline.task import ExitCode, R2eExpected, SwebenchLog, Task, Verdict
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from pipeline.taskfile import (
    Gold,
    Verification,
    fingerprint,
    gold_path,
    read_tasks,
    read_verified,
    verified_path,
    write_gold,
    write_tasks,
    write_verified,
)
from pipeline.trajectory import Reward
from tests.workers.claims import make_task
from tests.workers.conftest import RepoImage, built
from trainer.tasksets.__main__ import main as import_tasks
from workers.grading.grade import Grader
from workers.sandbox.containers import FLEET
from workers.sandbox.docker import DockerSandboxes
from workers.verify.__main__ import main
from workers.verify.judging import verification
from workers.verify.states import Prober, Tries, Try

pytestmark = pytest.mark.docker

EXPECTED = {"empty": 0, "useless": 0, "tests_only": 0, "gold": 1}
FILES = {
    "Dockerfile": """
FROM {base}
ENV PYTHONDONTWRITEBYTECODE=1 GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY repo /workspace
WORKDIR /workspace
RUN git init -q . && git config user.name t && git config user.email t@example.invalid \\
 && git add -A && git commit -qm base && cp -r /workspace /testbed
""",
    "repo/spans.py": '''def hours(text):
    """Hours in a span such as "3h" or "2d"."""
    number, unit = int(text[:-1]), text[-1]
    return number * {"h": 1, "d": 12}[unit]


def later(text):
    return hours(text) + 1
''',
    "repo/tests/test_spans.py": """import pytest

from spans import hours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1h", 1),
        ("3h", 3),
    ],
)
def test_hours(text, expected):
    assert hours(text) == expected
""",
}
FIX = """diff --git a/spans.py b/spans.py
--- a/spans.py
+++ b/spans.py
@@ -1,5 +1,5 @@
 def hours(text):
     \"\"\"Hours in a span such as "3h" or "2d".\"\"\"
     number, unit = int(text[:-1]), text[-1]
-    return number * {"h": 1, "d": 12}[unit]
+    return number * {"h": 1, "d": 24}[unit]
 
"""
MORE_CASES = """diff --git a/tests/test_spans.py b/tests/test_spans.py
--- a/tests/test_spans.py
+++ b/tests/test_spans.py
@@ -8,6 +8,8 @@
     [
         ("1h", 1),
         ("3h", 3),
+        ("1d", 24),
+        ("2d", 48),
     ],
 )
 def test_hours(text, expected):
"""
NEW_TEST = """diff --git a/tests/test_days.py b/tests/test_days.py
new file mode 100644
--- /dev/null
+++ b/tests/test_days.py
@@ -0,0 +1,5 @@
+from spans import later
+
+
+def test_a_day_has_24_hours():
+    assert later("1d") == 25
"""
PYTEST = "#!/bin/bash\nset -e\ncd /workspace\npython3 -m pytest {}\n"
ROW_SCRIPT = """#!/bin/bash
set -uxo pipefail
cd /testbed
git checkout {commit} {checked_out}
git apply -v - <<'EOF_114329324912'
{test_patch}EOF_114329324912
: '>>>>> Start Test Output'
python3 -m pytest -rA {path}
: '>>>>> End Test Output'
git checkout {commit} {checked_out}
"""


@dataclass(frozen=True, slots=True)
class Shape:
    """A way in which hidden tests relate to the tests that the image has."""

    name: str
    path: str
    test_patch: str
    command: str  # pytest's arguments in the published eval script
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]


SHAPES = (
    Shape(
        "new-cases",
        "tests/test_spans.py",
        MORE_CASES,
        "tests/test_spans.py",
        ("tests/test_spans.py::test_hours[1d-24]", "tests/test_spans.py::test_hours[2d-48]"),
        ("tests/test_spans.py::test_hours[1h-1]", "tests/test_spans.py::test_hours[3h-3]"),
    ),
    Shape(
        "new-test",
        "tests/test_days.py",
        NEW_TEST,
        "tests/test_days.py::test_a_day_has_24_hours",
        ("tests/test_days.py::test_a_day_has_24_hours",),
        (),
    ),
)


@pytest.fixture(scope="module")
def image(docker_client: docker.DockerClient, task_image: str) -> Iterator[RepoImage]:
    """A repository in which a day has 12 hours, in /workspace and in /testbed."""
    with built(docker_client, FILES, task_image) as built_image:
        yield built_image


@pytest.fixture
def fleet_directory(tmp_path: Path, image: RepoImage) -> Path:
    """Both shapes as swe-task-generator publishes tasks: eval scripts without the hidden tests, diffs without last newlines."""
    for number, shape in enumerate(SHAPES, 1):
        record = {
            "instance_id": f"acme-spans-{number}",
            "repo": "acme/spans",
            "base_commit": image.commit,
            "problem_statement": "A day has 12 hours.",
            "gold_patch": FIX + shape.test_patch,
            "fix_patch": FIX.rstrip("\n"),
            "test_patch": shape.test_patch.rstrip("\n"),
            "test_files": [shape.path],
            "image_name": image.tag,
            "eval_script": PYTEST.format(shape.command),
        }
        folder = tmp_path / f"tasks/task_{number:03d}"
        folder.mkdir(parents=True)
        (folder / "task.json").write_text(json.dumps(record))
    return tmp_path / "tasks"


@pytest.fixture
def swe_bench_rows(tmp_path: Path, image: RepoImage) -> Path:
    """Both shapes as rows of a SWE-bench dataset, with the harness's own scripts."""
    rows: list[str] = []
    for shape in SHAPES:
        checked_out = shape.path if shape.pass_to_pass else "spans.py"  # the harness leaves new files out
        script = ROW_SCRIPT.format(
            commit=image.commit, checked_out=checked_out, test_patch=shape.test_patch, path=shape.path
        )
        row = {
            "instance_id": f"acme__spans-{shape.name}",
            "repo": "acme/spans",
            "version": "1.0",
            "base_commit": image.commit,
            "problem_statement": "A day has 12 hours.",
            "patch": FIX,
            "test_patch": shape.test_patch,
            "FAIL_TO_PASS": json.dumps(shape.fail_to_pass),
            "PASS_TO_PASS": json.dumps(shape.pass_to_pass),
            "image": image.tag,
            "eval_script": script.replace(f" {checked_out}\n", "\n") if not shape.pass_to_pass else script,
            "log_parser": "parse_log_pytest",
            "eval_type": "pass_and_fail",
        }
        rows.append(json.dumps(row))
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(rows) + "\n")
    return path


@dataclass(slots=True)
class TaskFile:
    """Tasks graded by the exit status of a line of shell, to be verified by the command line."""

    path: Path
    image: RepoImage
    tasks: list[Task] = field(default_factory=list[Task])
    golds: list[Gold] = field(default_factory=list[Gold])

    def add(self, name: str, script: str, *, gold: str | None = FIX, image: str = "") -> Task:
        task = make_task(
            image or self.image.tag, id=f"test:{name}", verdict=ExitCode(eval_script=script + "\n")
        )
        self.tasks.append(task)
        if gold is not None:
            self.golds.append(Gold(id=task.id, patch=gold))
        write_tasks(self.path, self.tasks)
        write_gold(gold_path(self.path), self.golds)
        return task

    def verify(self, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
        """Exit status, and what --json says by task."""
        return verify(self.path, *arguments)


@pytest.fixture
def file(tmp_path: Path, image: RepoImage) -> TaskFile:
    return TaskFile(tmp_path / "tasks.jsonl", image)


def verify(tasks: Path, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    out = tasks.with_name("out.json")
    status = main([str(tasks), "--json", str(out), *arguments])
    return status, {line["task"]: line for line in json.loads(out.read_text())}


FIXED = "grep -q '\"d\": 24' spans.py"


@pytest.mark.parametrize(("source", "kind"), [("fleet", "exit_code"), ("swe-bench", "swebench_log")])
def test_tasks_as_published_are_worth_something_for_the_fix_alone(
    source: str, kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    published = request.getfixturevalue("fleet_directory" if source == "fleet" else "swe_bench_rows")
    tasks = tmp_path / "tasks.jsonl"
    assert import_tasks(["import", source, str(published), "--out", str(tasks)]) == 0
    status, lines = verify(tasks)
    assert [(line["states"], line["reason"], line["verdict_kind"]) for line in lines.values()] == [
        (EXPECTED, "", kind),
        (EXPECTED, "", kind),
    ]
    assert status == 0
    assert list(lines) == [task.id for task in read_tasks(tasks)], "in the order of the file"
    verified = read_verified(verified_path(tasks))
    assert {task.id: fingerprint(task) for task in read_tasks(tasks)} == {
        one.task: one.fingerprint for one in verified.values()
    }
    assert all(one.ok and one.verified_at > 0 for one in verified.values())


def test_what_is_wrong_with_a_task_is_said_of_it(file: TaskFile, capsys: pytest.CaptureFixture[str]) -> None:
    file.add("fine", FIXED)
    file.add("gold-fails", "echo no luck; exit 3")
    file.add("weak", "test -e spans.py")
    file.add("no-image", FIXED, image="swerve-test:never")
    file.add(
        "gold-does-not-apply",
        FIXED,
        gold=FIX.replace('-    return number * {"h": 1, "d": 12}', "-    return nothing"),
    )
    file.add("no-gold", FIXED, gold=None)
    file.tasks[-1] = replace(file.tasks[-1], id="test:not-a-repository", workdir="/usr")
    file.golds.append(Gold(id="test:not-a-repository", patch=FIX))
    file.add("no-gold", FIXED, gold=None)
    status, lines = file.verify()
    assert status == 1
    broken = "infrastructure"
    assert {name.removeprefix("test:"): list(line["states"].values()) for name, line in lines.items()} == {
        "fine": [0, 0, 0, 1],
        "gold-fails": [0, 0, 0, 0],
        "weak": [0, 1, 1, 1],
        "no-image": [broken] * 4,
        "gold-does-not-apply": [0, 0, 0, 0],
        "not-a-repository": [broken] * 4,
        "no-gold": [0, 0, 0, broken],
    }
    reasons = {
        "fine": "",
        "gold-fails": "gold: 0 instead of 1 (exit status 3)",
        "weak": "useless, tests_only: 1 instead of 0 (exit status 0): its tests pass without the fix",
        "no-image": f"no image swerve-test:never on this host: `python -m workers.images pull {file.path}`",
        "gold-does-not-apply": "gold: 0 instead of 1 (patch does not apply)",
        "not-a-repository": "not a git repository",
        "no-gold": "gold: infrastructure: its solution is not in the gold file",
    }
    for name, reason in reasons.items():
        assert reason in lines[f"test:{name}"]["reason"]
        assert lines[f"test:{name}"]["ok"] == (name == "fine")
    printed = capsys.readouterr().out
    assert "| no luck" in printed, "the log of what went wrong"
    assert "1 of 7 tasks are ok" in printed


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
    file: TaskFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = file.add("known", FIXED)
    file.add("unknown", FIXED)
    before = Verification(
        task=known.id,
        fingerprint=fingerprint(known),
        states={"empty": 0, "useless": 0, "tests_only": 0, "gold": 1},
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
    assert "no Docker engine answers" in lines[known.id]["reason"]
    verified = read_verified(verified_path(file.path))
    assert verified[known.id] == before
    assert not verified["test:unknown"].ok


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["absent.jsonl"], "No such file"),
        (["broken.jsonl"], "broken.jsonl:1: not a Task"),
        (["empty.jsonl"], "holds no task"),
        (["tasks.jsonl", "--only", "test:other"], "holds no task 'test:other'"),
        (["tasks.jsonl", "--repeat", "0"], "--repeat and --jobs must be 1 or more"),
        (["tasks.jsonl", "--json", "gone/o.json"], "--json: gone/o.json cannot be written: No such file"),
        (["tasks.jsonl", "--json", "."], "--json: . cannot be written: Is a directory"),
        (
            ["tasks.jsonl", "--passing", "gone/p.jsonl"],
            "--passing: gone/p.jsonl cannot be written: No such file",
        ),
        (["tasks.jsonl", "--passing", "tests"], "--passing: tests cannot be written: Is a directory"),
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


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interruption_leaves_no_container(
    file: TaskFile, docker_client: docker.DockerClient, number: signal.Signals, status: int
) -> None:
    file.add("endless", "sleep 1000")
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.verify", str(file.path)], env=os.environ, stdout=subprocess.DEVNULL
    )
    mine = {"label": f"{FLEET}=verify-{process.pid}"}
    while not docker_client.containers.list(filters=mine | {"status": "running"}):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    assert process.wait() == status
    assert docker_client.containers.list(all=True, filters=mine) == []


class Moody:
    """The production grader, for a task whose tests pass every other time."""

    def __init__(self, grader: Grader) -> None:
        self._grader = grader
        self._num_calls = 0

    async def grade(self, claim: Claim, patch: bytes) -> Reward:
        if not patch:
            return await self._grader.grade(claim, patch)
        self._num_calls += 1
        verdict = ExitCode(eval_script=f"exit {self._num_calls % 2}\n")
        task = replace(claim.request.task, verdict=verdict)
        return await self._grader.grade(replace(claim, request=replace(claim.request, task=task)), patch)


async def test_a_state_that_is_judged_two_ways_is_flaky(image: RepoImage, sandboxes: DockerSandboxes) -> None:
    task = make_task(image.tag)
    prober = Prober(grader=Moody(Grader(sandboxes)), limits=Limits(), num_repeats=3, image_fix="")
    tries = await prober.probe(task, Gold(id=task.id, patch=FIX, test_patch=MORE_CASES), on_state=_ignore)
    found = verification(task, tries, seconds=1.0, verified_at=1.0)
    assert (found.ok, found.states) == (False, {"empty": 0, "useless": 1, "tests_only": 1, "gold": 0})
    assert "gold: flaky, 0 1 0 in 3 tries" in found.reason


def _ignore(state: object) -> None:
    return


def judged(verdict: Verdict, *, tests: dict[str, str] | None = None, log: str = "") -> Verification:
    """A task whose states are all as they should be, with this told of the gold run."""
    reward = Reward(value=1.0, resolved=True, decided_by="", tests=tests or {}, log_tail=log)
    zero, one = Try(0, "", None), Try(1, "", reward)
    tries: Tries = {"empty": [zero], "useless": [zero], "tests_only": [zero], "gold": [one]}
    return verification(make_task("none", verdict=verdict), tries, seconds=1.0, verified_at=1.0)


NAMED = (
    SwebenchLog(eval_script="x", log_parser="parse_log_pytest", fail_to_pass=("a",), pass_to_pass=("b",)),
    R2eExpected(eval_script="x", expected={"a": "PASSED", "b": "FAILED"}),
    JsonVerdict(eval_script="x", parser="x", tests=("a", "b")),
)


@pytest.mark.parametrize("verdict", NAMED, ids=lambda verdict: type(verdict).__name__)
def test_every_test_that_a_verdict_names_must_show_in_the_gold_run(verdict: Verdict) -> None:
    assert judged(verdict, tests={"a": "PASSED", "b": "FAILED"}).ok
    lacking = judged(verdict, tests={"a": "PASSED", "b": ""})
    assert (lacking.ok, lacking.reason) == (
        False,
        "gold: 1 of 2 expected tests do not appear in the log: b",
    )


@pytest.mark.parametrize(
    ("log", "ok"),
    [
        ("Ran 0 tests in 0.000s\n\nOK\n", False),
        ("Ran 3 tests in 0.001s\n\nOK\n", True),
        ("===== no tests ran in 0.01s =====\n", False),
        ("===== test session starts =====\n===== 2 passed in 0.01s =====\n", True),
        ("all is well\n", True),
    ],
)
def test_an_eval_script_whose_runner_ran_nothing_is_no_proof(log: str, ok: bool) -> None:
    assert judged(ExitCode(eval_script="./check"), log=log).ok == ok
