"""Renders eval scripts for SWE-bench rows that have none, with swebench 4.1.0.

That release and the one that grades cannot share an environment, so it is installed in a directory of its own inside the
Python environment: by `python -m workers.tasksets.rendering`, or by the first import that needs it.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from workers.tasksets.rows import Fields

DIRECTORY = Path(sys.prefix, "share", "swerve", "swebench-4.1.0")
REQUIREMENTS = ("swebench==4.1.0", "unidiff==1.0.1")
RENDERED = ("eval_script", "log_parser")
_RENDERER = Path(__file__).with_name("swebench_4.py")
_NEEDED = ("instance_id", "repo", "version", "base_commit", "test_patch")


def rendered(rows: Sequence[Fields], directory: Path = DIRECTORY) -> list[Fields]:
    """`rows` with `eval_script` and `log_parser`; those of a row itself are kept.

    A row that cannot be rendered is returned as broken, with the reason. Raises ValueError if the release cannot be
    installed.
    """
    broken: dict[int, Fields] = {}
    questions: dict[int, dict[str, str]] = {}
    for number, fields in enumerate(rows):
        try:
            questions[number] = {name: fields.text(name) for name in _NEEDED}
        except ValueError as error:
            broken[number] = fields.broken_by(error)
    answers = dict(zip(questions, _ask(list(questions.values()), directory), strict=True))
    return [
        broken[number] if number in broken else _answered(fields, answers[number])
        for number, fields in enumerate(rows)
    ]


def install(directory: Path = DIRECTORY) -> None:
    """Installs the release into `directory` if it is missing, completely or not at all. Raises ValueError."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        target = Path(scratch, "new")
        done = subprocess.run(_pip(target), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ValueError(
                f"rows without eval_script are rendered by {REQUIREMENTS[0]}, which cannot be installed here; where a"
                f" package index can be reached, run: {' '.join(_pip(directory))}\n{done.stderr.strip()[-500:]}"
            )
        target.rename(directory)


def _pip(target: Path) -> list[str]:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    return [*pip, "--no-deps", "--target", str(target), *REQUIREMENTS]


def _ask(questions: list[dict[str, str]], directory: Path) -> list[dict[str, str]]:
    if not questions:
        return []
    install(directory)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(_RENDERER), str(directory)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ValueError(
            f"{directory}: {REQUIREMENTS[0]} does not run; remove it: {done.stderr.strip()[-500:]}"
        )
    return json.loads(done.stdout)


def _answered(fields: Fields, answer: dict[str, str]) -> Fields:
    if "refused" in answer:
        absent = ", ".join(name for name in RENDERED if not fields.values.get(name))
        return Fields(fields.where, {}, broken=f"{absent}: absent, and cannot be made: {answer['refused']}")
    return fields.having(**{name: fields.values.get(name) or answer[name] for name in RENDERED})


if __name__ == "__main__":
    try:
        install()
    except ValueError as reason:
        sys.exit(str(reason))
