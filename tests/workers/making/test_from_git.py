"""The whole way from a repository's history to verified tasks, in containers, and what a kill at any stage leaves."""

import argparse
import re
from pathlib import Path

import msgspec
import pytest

from pipeline.request import Limits
from pipeline.taskfile import (
    gold_path,
    provenance_path,
    read_gold,
    read_provenance,
    read_tasks,
    read_verified,
    standing,
    verified_path,
)
from tests.workers.making.commands import candidates, finished, killed_when
from tests.workers.making.pricing import (
    PRICING,
    ROUNDS,
    SHIPS,
    TEST,
    TEST_HALF,
    TEST_SHIPPED,
    with_history,
)
from tests.workers.making.repositories import Repository
from workers.making import probing
from workers.making.candidates import CandidateBook, Settings, TaskCandidate
from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.fixes import PART
from workers.making.from_git import CommitWalk
from workers.making.history import History
from workers.making.stages import Stages
from workers.tasksets.__main__ import main


def entered(
    repository: Repository, directory: Path, *, only: str, pulls: Path | None = None
) -> list[TaskCandidate]:
    """The candidates in the book in `directory` after these commits were entered."""
    options = argparse.Namespace(
        repository=repository.path, pulls=pulls, only=only, max_files=20, min_words=1, branch="HEAD"
    )
    history = History(repository.path, directory / "borrowed.git")
    book = CandidateBook.open(directory / "candidates.jsonl", Settings(repository="", options={}))
    CommitWalk(Stages(options, directory, book, history, Limits(), PYTHON)).enter_all()
    book.close()
    return [*book.candidates.values()]


def test_a_message_does_not_name_the_tests_that_are_hidden(tmp_path: Path) -> None:
    repository = Repository.at(tmp_path / "pricing")
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    sha = repository.commit(
        "Half cents have to be rounded up, and test_half_cents asks for it.\n\nDiscounts of ten per cent lose one now.",
        {"pricing.py": ROUNDS, "tests/test_pricing.py": TEST + TEST_HALF},
    )
    (one,) = entered(repository, tmp_path, only=sha)
    assert one.task is not None
    assert one.task.problem == "Discounts of ten per cent lose one now."
    assert one.problem_removed[0].startswith("names what the fix brings: Half cents")


def test_a_message_does_not_name_a_file_that_the_fix_brings(tmp_path: Path) -> None:
    repository = Repository.at(tmp_path / "pricing")
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    sha = repository.commit(
        "Half cents are lost. Let `_half.py` round them.",
        {"pricing.py": ROUNDS, "_half.py": "from decimal import ROUND_HALF_UP as UP\n", "tests/test_pricing.py": TEST + TEST_HALF},
    )
    (one,) = entered(repository, tmp_path, only=sha)
    assert one.task is not None
    assert one.task.problem == "Half cents are lost."


def test_a_message_does_not_name_what_a_file_brings_that_cannot_be_parsed(tmp_path: Path) -> None:
    repository = Repository.at(tmp_path / "pricing")
    odd = "\ndef of a newer language:\n"
    repository.commit("Begin", {"pricing.py": PRICING + odd, "tests/test_pricing.py": TEST})
    sha = repository.commit(
        "Half cents are lost. Call `nearest_cent` everywhere.",
        {"pricing.py": f"{ROUNDS}{odd}nearest_cent = 1\n", "tests/test_pricing.py": TEST + TEST_HALF},
    )
    (one,) = entered(repository, tmp_path, only=sha)
    assert one.task is not None
    assert one.task.problem == "Half cents are lost."


def test_a_problem_has_what_the_hidden_tests_call_and_only_the_fix_brings(tmp_path: Path) -> None:
    repository = Repository.at(tmp_path / "pricing")
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    code = f"{PRICING}{SHIPS}\n\ndef _insured(cents):\n    return cents\n"
    sha = repository.commit(
        "Orders can be shipped for 4.90.", {"pricing.py": code, "tests/test_pricing.py": TEST + TEST_SHIPPED}
    )
    (one,) = entered(repository, tmp_path, only=sha)
    assert one.task is not None
    assert one.task.problem == (
        "Orders can be shipped for 4.90.\n\nExpected interface:\n\n- `def shipped(cents)` in `pricing.py`"
    )
    assert one.interface == ("- `def shipped(cents)` in `pricing.py`",)


def test_a_pull_request_that_was_cut_is_a_candidate_once_all_its_commits_are_chosen_in_any_order(
    tmp_path: Path,
) -> None:
    repository = Repository.at(tmp_path / "pricing")
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    older = repository.commit("Half cents have to be rounded up.", {"pricing.py": ROUNDS})
    newer = repository.commit("Half cents were lost.", {"tests/test_pricing.py": TEST + TEST_HALF})
    pulls = tmp_path / "pulls.jsonl"
    pulls.write_bytes(msgspec.json.encode({"number": 1, "title": "Half", "commits": [older, newer]}))
    for chosen, found in ((newer, ("fallen", 1)), (f"{older},{newer}", ("open", 2))):
        entries = entered(repository, tmp_path, only=chosen, pulls=pulls)
        assert [(one.outcome, one.num_commits) for one in entries] == [found]


def test_a_pull_request_whose_later_commits_are_left_out_becomes_no_task_until_they_are_chosen(
    tmp_path: Path,
) -> None:
    repository = Repository.at(tmp_path / "pricing")
    repository.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    tests = {"tests/test_pricing.py": TEST + TEST_HALF}
    older = repository.commit("Half cents have to be rounded up.", {"pricing.py": ROUNDS} | tests)
    newer = repository.commit("Orders can be shipped.", {"pricing.py": ROUNDS + SHIPS})
    pulls = tmp_path / "pulls.jsonl"
    pulls.write_bytes(msgspec.json.encode({"number": 1, "title": "Both", "commits": [older, newer]}))
    (cut,) = entered(repository, tmp_path, only=older, pulls=pulls)
    assert (cut.outcome, cut.reason) == ("fallen", PART)
    assert [one.outcome for one in entered(repository, tmp_path, only=f"{older},{newer}", pulls=pulls)] == ["fallen", "open"]


@pytest.mark.docker
@pytest.mark.slow
def test_tests_that_do_not_end_without_the_fix_become_no_task(
    tmp_path: Path, repository: Repository, task_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wrong attempt of a policy would keep a slot until the limit of the grading."""
    monkeypatch.setattr(probing, "LEAST_WALL_S", 0.5)
    waits = "import time\n\n\ndef shipped(cents):\n    time.sleep(100_000)\n    return cents\n"
    repository.commit("Begin", {"pricing.py": PRICING + waits, "tests/test_pricing.py": TEST})
    sha = repository.commit(
        "Shipping an order takes forever, whatever it costs, and it should not.",
        {"pricing.py": PRICING + SHIPS, "tests/test_pricing.py": TEST + TEST_SHIPPED},
    )
    out = tmp_path / "out"
    main(["from-git", str(repository.path), "--out", str(out), "--repeat", "1", "--base", task_image])
    end = CandidateBook.read(out / "candidates.jsonl").candidates[sha]
    assert (end.stage, end.outcome, end.reason) == ("problem", "fallen", "tests do not end without the fix")
    assert end.detail.startswith("waited without using CPU")


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
    where = list(read_provenance(provenance_path(out / "train.jsonl")).values())
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
        return [*words, "--jobs", "1"]

    out, whole = tmp_path / "killed", tmp_path / "whole"
    verified = verified_path(out / "tasks.jsonl")
    killed_when(command(out), lambda: (out / ".work").exists())
    killed_when(command(out), lambda: bool(candidates(out)))
    killed_when(command(out), lambda: any(one.stage == "built" for one in candidates(out)))
    killed_when(command(out), lambda: verified.exists() and bool(read_verified(verified)))
    killed_when(command(out), lambda: any(one.outcome == "kept" for one in candidates(out)))
    finished(command(out))
    finished(command(whole))
    for name in (
        "tasks.jsonl",
        "tasks.gold.jsonl",
        "train.jsonl",
        "train.gold.jsonl",
        "train.provenance.jsonl",
    ):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert len(read_tasks(out / "train.jsonl")) == 2
    assert [one.sha for one in candidates(out)] == [one.sha for one in candidates(whole)]
    assert not (out / ".work").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--max-files", "1"], "--max-files must be 2 or more, one for the fix and one for its tests, is 1"),
        (
            ["--requires", "git+https://x.invalid/y"],
            "--requires: 'git.https://x.invalid/y' is no package of an index",
        ),
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
