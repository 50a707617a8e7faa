"""Task directories of Harbor in containers: images, solutions, and the verdicts on patches."""

import asyncio
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import docker
import pytest

from pipeline.errors import GraderError
from pipeline.task import Task
from pipeline.taskfile import Gold, gold_path, read_gold, read_tasks, write_gold, write_tasks
from tests.workers.claims import make_claim
from tests.workers.conftest import RepoImage
from tests.workers.conftest import init as init
from tests.workers.conftest import repo_image as repo_image
from tests.workers.conftest import sandboxes as sandboxes
from tests.workers.grading.conftest import grader as grader
from tests.workers.grading.conftest import task as exit_code_task
from tests.workers.grading.patches import FIX, NOTE, edited
from tests.workers.tasksets.harbor_tasks import TOML, content_of, write_task
from workers.grading.grade import Grader
from workers.tasksets.__main__ import main

pytestmark = pytest.mark.docker
exit_code_task = exit_code_task

ADDS = "#!/bin/bash\nsed -i '0,/return a - b/s//return a + b/' /workspace/calc.py\n"
JUDGES = """#!/bin/bash
python3 -c 'import calc; assert calc.add(3, 1) == 4' && echo '{"right": 1, "speed": 0.5}' >/logs/verifier/reward.json
[ -e /logs/verifier/reward.json ] || echo '{"right": 0, "speed": 0}' >/logs/verifier/reward.json
"""


@pytest.fixture
def name(docker_client: docker.DockerClient) -> Iterator[str]:
    """The name of a task of the test's own; images that are built for it are removed."""
    name = f"t{secrets.token_hex(6)}"
    yield name
    for image in docker_client.images.list():
        for tag in (tag for tag in image.tags if tag.startswith(f"harbor/{name}:")):
            docker_client.images.remove(tag, force=True)


async def imported(directory: Path, *options: str) -> tuple[Task, Gold]:
    out = directory.parent / "out.jsonl"
    assert (
        await asyncio.to_thread(main, ["import", "harbor", str(directory), "--out", str(out), *options]) == 0
    )
    (task,) = read_tasks(out)
    return task, read_gold(gold_path(out))[task.id]


async def refused(directory: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    out = directory.parent / "out.jsonl"
    assert (
        await asyncio.to_thread(main, ["import", "harbor", str(directory), "--out", str(out), *options]) == 1
    )
    assert not out.exists()
    return capsys.readouterr().err


def in_image(directory: Path, image: str, **changes: str | None) -> Path:
    """A task in an image that is there, whose reward.json has two numbers."""
    toml = f'[environment]\ndocker_image = "{image}"\n[solution]\nenv = {{ WORD = "a \'b\'" }}\n'
    files = {
        "task.toml": toml,
        "solution/solve.sh": ADDS,
        "tests/test.sh": JUDGES,
        "tests/test_sums.py": None,
    }
    return write_task(directory, **files | changes)


# Quick: a known fix comes from the solution, and the chosen number decides.
async def test_the_solution_is_the_known_fix_and_a_named_number_the_reward(
    tmp_path: Path, repo_image: RepoImage, grader: Grader
) -> None:
    task, gold = await imported(in_image(tmp_path / "sums", repo_image.tag), "--reward", "right")
    assert gold.patch.endswith("-    return a - b\n+    return a + b\n \n \n def sub(a, b):\n")
    assert task.resources.network is False
    reward = await grader.grade(make_claim(task), gold.patch.encode())
    assert (reward.resolved, reward.decided_by, reward.control) == (True, "right 1 in reward.json", "none")
    assert (await grader.grade(make_claim(task), NOTE)).value == 0


@pytest.mark.slow
async def test_fractions_count_and_a_name_that_is_absent_is_a_failure(
    tmp_path: Path, repo_image: RepoImage, grader: Grader
) -> None:
    directory = in_image(tmp_path / "sums", repo_image.tag)
    task, _ = await imported(directory, "--reward", "speed", "--fractions", "--network", "task")
    assert task.resources.network is True
    reward = await grader.grade(make_claim(task), FIX)
    assert (reward.value, reward.resolved, reward.control) == (0.5, False, "")
    task, _ = await imported(directory, "--reward", "speed")
    assert (await grader.grade(make_claim(task), FIX)).value == 0
    task, _ = await imported(directory)
    with pytest.raises(GraderError, match=r"reward.json: reward: absent, it has right, speed"):
        await grader.grade(make_claim(task), FIX)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            '#!/bin/bash\necho "$WORD" >/opt/out; cat /opt/out; exit 3\n',
            "ended with status 3: it changes nothing .*: a 'b'",
        ),
        ("#!/bin/bash\nsleep 100\n", "took too long"),
        ("#!/bin/bash\nprintf '\\377\\n' >>calc.py\n", "changes text that is not UTF-8"),
    ],
)
async def test_a_solution_that_is_no_patch_of_the_workdir_is_refused(
    tmp_path: Path, repo_image: RepoImage, capsys: pytest.CaptureFixture[str], script: str, why: str
) -> None:
    directory = in_image(tmp_path / "sums", repo_image.tag, **{"solution/solve.sh": script})
    toml = directory / "task.toml"
    toml.write_text(f"[agent]\ntimeout_sec = 2.0\n{toml.read_text()}")
    said = await refused(directory, capsys)
    assert re.search(f"sums: solution/solve.sh: .*{why}", said), said


@pytest.mark.slow
async def test_an_image_that_is_not_there_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = await refused(in_image(tmp_path / "sums", "swerve-test:never"), capsys)
    assert "sums: " in said
    assert "swerve-test:never" in said


@pytest.mark.slow
async def test_the_oracle_gets_1_and_doing_nothing_0_in_an_image_that_is_built(
    tmp_path: Path, name: str, grader: Grader
) -> None:
    directory = write_task(tmp_path / "sums", **{"task.toml": TOML.replace("acme/sums", name)})
    task, gold = await imported(directory, "--build")
    wrong = gold.patch.replace("+    return a + b", "+    return a * b")
    patches = (gold.patch.encode(), b"", NOTE, wrong.encode())
    assert [(await grader.grade(make_claim(task), patch)).value for patch in patches] == [1, 0, 0, 0]
    tasks = tmp_path / "out.jsonl"
    assert main(["export", "harbor", str(tasks), "--out", str(tmp_path / "exported")]) == 0
    assert content_of(tmp_path / "exported" / name) == content_of(directory)
    assert await imported(tmp_path / "exported" / name, "--build") == (task, gold)


@pytest.mark.slow
async def test_a_workdir_that_is_no_repository_becomes_one_only_in_an_image_that_is_built(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str], grader: Grader
) -> None:
    toml = TOML.replace("acme/sums", name).replace(
        "[environment]\n", '[environment]\nworkdir = "/srv"\ndocker_image = "swerve/task-base:1"\n'
    )
    solve = "#!/bin/bash\necho 4 >/srv/answer\n"
    test = '#!/bin/bash\n[ "$(cat answer)" = 4 ]; echo $((1 - $?)) >/logs/verifier/reward.txt\n'
    files = {"task.toml": toml, "solution/solve.sh": solve, "tests/test.sh": test}
    directory = write_task(tmp_path / "sums", **files)
    said = await refused(directory, capsys)
    assert "environment.workdir: workdir: /srv of swerve/task-base:1 is not a git repository" in said
    assert "--build makes an image in which it is one" in said
    task, gold = await imported(directory, "--build")
    assert task.image.startswith(f"harbor/{name}:")
    assert [(await grader.grade(make_claim(task), patch)).value for patch in (gold.patch.encode(), NOTE)] == [
        1,
        0,
    ]


@pytest.mark.slow
async def test_an_exported_exit_status_gives_the_same_verdicts_in_harbors_form(
    tmp_path: Path, exit_code_task: Task, grader: Grader
) -> None:
    """Without the task that the export wrote beside them, the files of the directory alone decide."""
    tasks = tmp_path / "tasks.jsonl"
    write_tasks(tasks, [exit_code_task])
    write_gold(gold_path(tasks), [Gold(id=exit_code_task.id, patch=FIX.decode())])
    assert main(["export", "harbor", str(tasks), "--out", str(tmp_path / "exported")]) == 0
    directory = tmp_path / "exported/task"
    assert (await imported(directory))[0] == exit_code_task
    (directory / "tests/task.json").unlink()
    task, gold = await imported(directory)
    assert task.id == "harbor:task"
    wrong = edited("calc.py", "return a - b", "return a * b")
    for patch in (
        FIX,
        gold.patch.encode(),
        NOTE,
        wrong,
        b"",
        edited("tests/test_calc.py", "import sub", "import sub "),
    ):
        first, second = [await grader.grade(make_claim(one), patch) for one in (exit_code_task, task)]
        assert (first.value, first.resolved) == (second.value, second.resolved), patch
