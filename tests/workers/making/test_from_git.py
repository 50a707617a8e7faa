"""The whole way from a repository's history to verified tasks, in containers, and what a kill at any stage leaves."""

import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import msgspec
import pytest

from pipeline.taskfile import gold_path, read_gold, read_tasks, read_verified, standing, verified_path
from tests.workers.making.repositories import Repository
from workers.making.candidates import CandidateBook, TaskCandidate
from workers.making.stages import TaskProvenance
from workers.tasksets.__main__ import main

PRICING = "def discounted(cents, percent):\n    return cents * (100 - percent) // 100\n"
ROUNDS = PRICING.replace("cents * (100 - percent)", "(cents * (100 - percent) + 50)")
SHIPS = "\n\ndef shipped(cents):\n    return cents + 490\n"
SHIPS_FREE = "\n\ndef shipped(cents):\n    return cents if cents >= 5000 else cents + 490\n"
TEST = "from pricing import discounted\n\n\ndef test_discounted():\n    assert discounted(1000, 10) == 900\n"
TEST_HALF = "\n\ndef test_half_cents():\n    assert discounted(999, 50) == 500\n"
TEST_SHIPPED = "from pricing import shipped\n\n\ndef test_shipped():\n    assert shipped(1000) == 1490\n"
TEST_FREE = "\n\ndef test_free():\n    assert shipped(6000) == 6000\n"
TEST_NETWORK = (
    "\n\ndef test_network():\n    import socket\n    socket.create_connection(('192.0.2.1', 80), 1)\n"
)
TEST_FLAKY = "import os\nfrom rates import rate\n\n\ndef test_rate():\n    assert rate() == 7 and os.urandom(1)[0] > 250\n"
PYPROJECT = (
    '[project]\nname = "pricing"\nversion = "1"\ndependencies = ["iniconfig"]\n'
    '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    '[tool.setuptools]\npy-modules = ["pricing", "rates"]\n'
)


@pytest.fixture
def repository(tmp_path: Path, docker_client: docker.DockerClient) -> Iterator[Repository]:
    """A repository with a name of its own; images that are made of it are removed."""
    made = Repository.at(tmp_path / f"t{secrets.token_hex(6)}")
    yield made
    for image in docker_client.images.list():
        for tag in (tag for tag in image.tags if tag.startswith(f"swerve-git/{made.path.name}")):
            docker_client.images.remove(tag, force=True)


def with_history(made: Repository) -> dict[str, str]:
    """Commits of every kind, by name."""
    shas: dict[str, str] = {}
    rates = {
        "rates.py": "def rate():\n    return 6\n",
        "tests/test_rates.py": "def test_nothing():\n    assert 1\n",
    }
    files: dict[str, str | bytes | None] = {
        "pricing.py": PRICING,
        "tests/test_pricing.py": TEST,
        "LICENSE.txt": "MIT\n",
    }
    made.commit("Begin", {**files, **rates})
    shas["docs"] = made.commit("docs: say what it is", {"README.md": "Prices\n"})
    shas["fix"] = made.commit(
        "Half cents are lost in discounts (#3)\n\nHalf of 999 cents is 499.5 cents, and half a cent is rounded up.\n",
        {"pricing.py": ROUNDS, "tests/test_pricing.py": TEST + TEST_HALF + TEST_NETWORK},
    )
    shas["refactoring"] = made.commit(
        "refactor: a name for one hundred per cent, which was written twice",
        {
            "pricing.py": f"WHOLE = 100\n\n\n{ROUNDS.replace('100', 'WHOLE')}",
            "tests/test_pricing.py": TEST + TEST_HALF,
        },
    )
    shas["format"] = made.commit(
        "style: one line fewer in the code and in its tests, and nothing else",
        {
            "pricing.py": f"WHOLE = 100\n\n{ROUNDS.replace('100', 'WHOLE')}",
            "tests/test_pricing.py": TEST + TEST_HALF.lstrip("\n"),
        },
    )
    shas["bot"] = made.commit(
        "Bump the rate of something to the newest one",
        {
            "rates.py": "def rate():\n    return 5\n",
            "tests/test_rates.py": "def test_nothing():\n    assert 2\n",
        },
        "renovate[bot] <renovate@example.invalid>",
    )
    return shas | with_odd_ends(made)


def with_odd_ends(made: Repository) -> dict[str, str]:
    """Further commits: tests that say nothing, a message that says all, a flaky test, a merge, and a package."""
    shas: dict[str, str] = {}
    shas["useless test"] = made.commit(
        "Rates are those of this year now, and so are the tests of them",
        {
            "rates.py": "def rate():\n    return 6\n",
            "tests/test_rates.py": "def test_nothing():\n    assert 3\n",
        },
    )
    shas["given away"] = made.commit(
        "Use `_half_up(cents)` in discounts instead of adding fifty in two places of it",
        {
            "pricing.py": "def _half_up(cents):\n    return (cents + 50) // 100\n\n\n"
            "def discounted(cents, percent):\n    return _half_up(cents * (100 - percent))\n",
            "tests/test_pricing.py": TEST + TEST_HALF.replace("999", "997").replace("500", "499"),
        },
    )
    shas["flaky"] = made.commit(
        "The rate is seven, as the law has it since the first of January",
        {"rates.py": "def rate():\n    return 7\n", "tests/test_rates.py": TEST_FLAKY},
    )
    made.git("checkout", "-q", "-b", "topic")
    made.commit("Ship", {"pricing.py": ROUNDS + SHIPS})
    made.commit("Test it", {"tests/test_pricing.py": TEST, "tests/test_shipped.py": TEST_SHIPPED})
    made.git("checkout", "-q", "main")
    made.git(
        *("merge", "-q", "--no-ff", "topic", "-m"),
        "Merge branch 'topic'\n\nThere is no `shipped`, which adds 490 cents to an order's price.",
        number=20,
    )
    shas["merge"] = made.git("rev-parse", "HEAD")
    shas["package"] = made.commit("Package it", {"pyproject.toml": PYPROJECT})
    shas["packaged fix"] = made.commit(
        "Shipping should be free from 5000 cents on, but an order of 6000 cents pays it",
        {"pricing.py": ROUNDS + SHIPS_FREE, "tests/test_shipped.py": TEST_SHIPPED + TEST_FREE},
    )
    return shas


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_history_becomes_verified_tasks_and_every_commit_has_its_reason(
    tmp_path: Path, repository: Repository, task_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shas, out = with_history(repository), tmp_path / "out"
    command = ["from-git", str(repository.path), "--out", str(out), "--repeat", "1", "--base", task_image]
    assert main(command) == 0
    printed = capsys.readouterr().out
    book = CandidateBook.read(out / "candidates.jsonl")
    ends = {name: book.candidates[sha] for name, sha in shas.items()}
    assert {name: (one.stage, one.outcome, one.reason) for name, one in ends.items() if name != "flaky"} == {
        "docs": ("seen", "fallen", "changes no tests"),
        "fix": ("strong", "kept", ""),
        "refactoring": ("built", "fallen", "tests pass without the fix"),
        "format": ("seen", "fallen", "moves or formats code only"),
        "bot": ("seen", "fallen", "by a bot"),
        "useless test": ("built", "fallen", "tests pass without the fix"),
        "given away": ("candidate", "fallen", "problem too short"),
        "merge": ("strong", "kept", ""),
        "package": ("seen", "fallen", "changes no tests"),
        "packaged fix": ("strong", "kept", ""),
    }
    assert ends["flaky"].outcome == "fallen"
    assert ends["fix"].deselected == ("tests/test_pricing.py::test_network",)
    assert ends["given away"].detail.startswith("0 words")
    tasks = read_tasks(out / "train.jsonl")
    kept = [ends[name] for name in ("packaged fix", "merge", "fix")]
    assert tasks == [one.task for one in kept]
    assert read_gold(gold_path(out / "train.jsonl")) == {one.gold.id: one.gold for one in kept if one.gold}
    verified = read_verified(verified_path(out / "train.jsonl"))
    assert all(
        (known := standing(verified, task)) and known.ok and known.control == "confirmed" for task in tasks
    )
    assert tasks[2].problem == (
        "Half cents are lost in discounts\n\nHalf of 999 cents is 499.5 cents, and half a cent is rounded up."
    )
    where = msgspec.json.Decoder(TaskProvenance).decode_lines((out / "provenance.jsonl").read_bytes())
    assert [(one.commit, one.licence) for one in where] == [
        (shas["packaged fix"], "LICENSE.txt"),
        (shas["merge"], "LICENSE.txt"),
        (shas["fix"], "LICENSE.txt"),
    ]
    assert printed.splitlines()[-1] == "      3  kept"
    before = (out / "candidates.jsonl").read_bytes()
    assert main(command) == 0
    assert (out / "candidates.jsonl").read_bytes() == before
    assert main(["from-git", str(repository.path), "--out", str(out), "--report"]) == 0
    assert printed.endswith(capsys.readouterr().out.split("kept\n")[0] + "kept\n")
    assert repository.git("status", "--porcelain") == ""


def candidates(out: Path) -> list[TaskCandidate]:
    path = out / "candidates.jsonl"
    return list(CandidateBook.read(path).candidates.values()) if path.exists() and path.stat().st_size else []


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_command_that_is_killed_at_every_stage_makes_the_same_tasks(
    tmp_path: Path, repository: Repository, task_image: str
) -> None:
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    repository.commit(
        "Half cents are lost in discounts, and they have to be rounded up",
        {"pricing.py": ROUNDS, "tests/test_pricing.py": TEST + TEST_HALF},
    )
    repository.commit(
        "Shipping costs nothing yet, although it should cost 490 cents, by `shipped`",
        {"pricing.py": ROUNDS + SHIPS, "tests/test_shipped.py": TEST_SHIPPED},
    )

    def command(out: Path) -> list[str]:
        words = ["from-git", str(repository.path), "--out", str(out), "--repeat", "1", "--base", task_image]
        return [sys.executable, "-m", "workers.tasksets", *words, "--jobs", "1"]

    def killed_when(out: Path, reached: Callable[[], bool]) -> None:
        """Starts the command and kills it as soon as `reached`."""
        process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not reached():
            time.sleep(0.02)
        process.kill()
        assert process.wait() == -signal.SIGKILL, "it ended before the stage was reached"

    out, whole = tmp_path / "killed", tmp_path / "whole"
    verified = verified_path(out / "tasks.jsonl")
    killed_when(out, lambda: bool(candidates(out)))
    killed_when(out, lambda: any(one.stage == "built" for one in candidates(out)))
    killed_when(out, lambda: verified.exists() and bool(read_verified(verified)))
    killed_when(out, lambda: any(one.outcome == "kept" for one in candidates(out)))
    subprocess.run(command(out), check=True, stdout=subprocess.DEVNULL)
    subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
    for name in ("tasks.jsonl", "tasks.gold.jsonl", "train.jsonl", "train.gold.jsonl", "provenance.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert len(read_tasks(out / "train.jsonl")) == 2
    assert [one.sha for one in candidates(out)] == [one.sha for one in candidates(whole)]
    assert not (out / ".work").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--max-files", "0"], "--max-files must be 1 or more, is 0"),
        (["--max-weakness", "2"], "--max-weakness must be between 0 and 1, is 2.0"),
        (["--since", "soon"], "--since: 'soon' must be a date"),
        (["--branch", "nowhere"], "--branch: .* has no commit 'nowhere'"),
        (["--only", "abc"], "--only: .* has no commit 'abc'"),
        (["--report"], "--out: .*candidates.jsonl does not exist: make tasks first"),
        (["--pulls", "/nowhere"], "/nowhere"),
    ],
)
def test_misuse_is_one_line_that_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    made = Repository.at(tmp_path / "calc")
    made.commit("Begin", {"calc.py": ""})
    assert main(["from-git", str(made.path), "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert re.search(why, said)
