"""The command that says of each task what of the answer an agent could find."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from pipeline.task import ExitCode, Task
from pipeline.taskfile import Gold, gold_path, write_gold, write_tasks
from tests.workers.claims import make_task
from tests.workers.leaks.giveaways import GIVEAWAYS, built, making
from workers.leaks.__main__ import main
from workers.leaks.answers import answers_in_problem

FIX = "diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -2 +2 @@\n-    return a - b\n+    return sum((a, b))\n"
TESTS = "diff --git a/t.py b/t.py\n--- /dev/null\n+++ b/t.py\n@@ -0,0 +1,2 @@\n+def test_add():\n+    assert add(1, 2) == 3\n"
EVAL = "python -m pytest t.py\n"
# What no rule of cleaning can know of.
LEFT_BEHIND = """
cd /kinds/clean; mkdir build; echo '    return sum((a, b))  # as released' >build/calc.py; echo build >.git/info/exclude
printf 'python -m pytest t.py\\n' >/root/check; mkdir /home/x; echo '    assert add(1, 2) == 3' >/home/x/notes
cp -r /kinds/branch /home/copy; touch /home/eval.sh
"""


@pytest.fixture(scope="module")
def image(docker_client: docker.DockerClient, task_image: str) -> Iterator[str]:
    kinds = {name: GIVEAWAYS[name] for name in ("clean", "branch")}
    script = making(kinds) + LEFT_BEHIND
    instructions = "COPY make.sh /make.sh\nRUN bash /make.sh && rm -r /make.sh /kinds/branch\n"
    with built(docker_client, task_image, {"make.sh": script}, instructions) as tag:
        yield tag


@pytest.fixture(scope="module")
def clean_image(docker_client: docker.DockerClient, task_image: str) -> Iterator[str]:
    kinds = {name: GIVEAWAYS[name] for name in ("clean", "branch")}
    instructions = "COPY make.sh /make.sh\nRUN bash /make.sh && mv /kinds/branch /branch && rm /make.sh\n"
    with built(docker_client, task_image, {"make.sh": making(kinds)}, instructions) as tag:
        yield tag


def run(path: Path, tasks: list[Task], *options: str) -> tuple[int, dict[str, Any]]:
    write_tasks(path / "tasks.jsonl", tasks)
    write_gold(gold_path(path / "tasks.jsonl"), [Gold(id=t.id, patch=FIX, test_patch=TESTS) for t in tasks])
    status = main([str(path / "tasks.jsonl"), "--json", str(path / "out.json"), *options])
    return status, {one["task"]: one for one in json.loads((path / "out.json").read_bytes())}


@pytest.mark.slow
@pytest.mark.docker
def test_clean_and_cleaned_images_have_nothing_to_find(
    clean_image: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [
        make_task(clean_image, id="as-is", workdir="/kinds/clean", hidden_paths=("/branch",)),
        make_task(clean_image, id="cleaned", workdir="/branch", hidden_paths=("/bases",)),
    ]
    status, findings = run(tmp_path, tasks)
    assert [one["leaks"] + [one["failure"]] for one in findings.values()] == [[""], [""]]
    assert findings["as-is"]["agent_image"] == clean_image
    assert findings["cleaned"]["agent_image"].startswith("swerve/agent:")
    assert status == 0
    assert "2 tasks, 0 with something to find" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.docker
def test_what_was_left_behind_is_named(image: str, tmp_path: Path) -> None:
    verdict = ExitCode(eval_script=EVAL)
    tasks = [
        make_task(image, id="left", workdir="/kinds/clean", verdict=verdict, problem="x\n## Files Changed\n"),
        make_task("swerve-test:absent", id="absent"),
    ]
    status, findings = run(tmp_path, tasks)
    assert status == 1
    assert "No such image" in findings["absent"]["failure"]
    assert not findings["absent"]["ok"]
    assert findings["left"]["leaks"] == [
        "problem (lists the files changed)",
        "eval script (/home/eval.sh)",
        "hidden file (/root/check)",
        "hidden tests in a file (/home/x/notes)",
        "other repository (/home/copy/.git, 1 commits after the base)",
        "solution in a file (/kinds/clean/build/calc.py)",
    ]


@pytest.mark.parametrize(
    ("problem", "leaks"),
    [
        ("add() is wrong: add(1, 2) gives -1", []),
        ("Replace it by `return sum((a, b))`.", ["problem (has 1 of 1 lines of the solution)"]),
        ("This fails:\n    assert add(1, 2) == 3", ["problem (has 1 of 1 lines of the hidden tests)"]),
        (f"Do this:\n{FIX}", ["problem (holds a diff)", "problem (has 1 of 1 lines of the solution)"]),
        ("## Files changed\n- calc.py", ["problem (lists the files changed)"]),
    ],
)
def test_a_problem_that_tells_the_answer_is_named(problem: str, leaks: list[str]) -> None:
    task = make_task("image", problem=problem)
    assert [
        str(leak) for leak in answers_in_problem(task, Gold(id=task.id, patch=FIX, test_patch=TESTS))
    ] == leaks


def test_misuse_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "absent.jsonl")]) == 2
    (tmp_path / "bad.jsonl").write_text('{"id": 3}\n')
    assert main([str(tmp_path / "bad.jsonl")]) == 2
    (tmp_path / "empty.jsonl").write_text("")
    assert main([str(tmp_path / "empty.jsonl")]) == 2
    assert "bad.jsonl:1" in capsys.readouterr().err
