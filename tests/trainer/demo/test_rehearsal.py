"""The stand-in sandbox says what bash says, on everything the teacher does."""

import random
import re
import subprocess
from pathlib import Path

import pytest

from trainer.demo.family import make_task
from trainer.demo.lessons import SUBMIT, EpisodeMessage, Habits, Rehearsal, Templates, teach

BLOCK = re.compile(r"```bash\s*\n(.*?)\n```", re.DOTALL)


def checked_out(files: dict[str, str], root: Path) -> Path:
    """The files as a git repository with one commit."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
    for command in (["init", "-q"], ["add", "-A"], [*identity, "commit", "-q", "-m", "start"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    return root


def bash(command: str, root: Path) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    return done.returncode, done.stdout


def commands_of(messages: list[EpisodeMessage]) -> list[str]:
    return [found[1] for message in messages if (found := BLOCK.search(message.content))]


@pytest.mark.parametrize("number", range(12))
def test_bash_shows_what_the_rehearsal_showed(number: int, tmp_path: Path) -> None:
    task = make_task(11, "warmstart", number)
    lesson = teach(task, random.Random(number), Templates(), Habits(tests=0.8, starts_over=0.8))
    root = checked_out(task.files, tmp_path)
    shown = [message for message in lesson.messages if message.role == "user"][1:]
    commands = commands_of(lesson.messages)
    assert commands[-1] == SUBMIT
    for command, message in zip(commands[:-1], shown, strict=True):
        assert Templates().observation(*bash(command, root)) == message


def test_submitting_prints_the_sentinel_and_then_the_patch(tmp_path: Path) -> None:
    task = make_task(11, "warmstart", 0)
    root = checked_out(task.files, tmp_path)
    (root / task.path).write_text(task.fixed_files()[task.path])
    status, output = bash(SUBMIT, root)
    first, patch = output.split("\n", 1)
    assert status == 0
    assert first == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
    assert f"+{task.good}\n" in patch


def test_a_command_of_no_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="command: 'rm -rf"):
        Rehearsal({}).run("rm -rf .")
