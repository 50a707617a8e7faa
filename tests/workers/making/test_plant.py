"""Planted bugs as tasks: which are tried, what a task shows of them, and the whole way in containers, killed and not."""

import argparse
import asyncio
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pipeline.task import ExitCode
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
from tests.workers.making.pricing import with_history
from tests.workers.making.repositories import Repository
from tests.workers.making.shop import FILES, report_of, run_of, shop_at
from workers.making.candidates import CandidateBook
from workers.making.ecosystems.python import ECOSYSTEM as PYTHON
from workers.making.history import Fallen, History
from workers.making.plant import add_plant_parser, checked_settings
from workers.making.planting import REACHED, BugPlan, FailingTests, Planter
from workers.making.reaching import RanTest
from workers.making.stages import Stages
from workers.tasksets.__main__ import main
from workers.unqueued import limits_of


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What the tests of the shop reach."""
    return report_of(shop_at(tmp_path_factory.mktemp("report") / "shop").path)


def planter_of(repository: Repository, report: bytes, out: Path, *words: str) -> Planter:
    """A planter that knows what the tests reach."""
    parser = argparse.ArgumentParser()
    add_plant_parser(parser)
    options = parser.parse_args([str(repository.path), "--out", str(out), *words])
    settings = checked_settings(options)
    out.mkdir(exist_ok=True)
    book = CandidateBook.open(out / "candidates.jsonl", settings)
    (out / REACHED).write_bytes(report)
    history = History(repository.path, out / "history.git")
    planter = Planter(Stages(options, out, book, history, limits_of(options), PYTHON))
    asyncio.run(planter.learn())
    return planter


def failing_with(planter: Planter, plan: BugPlan) -> FailingTests:
    """The tests that fail on this machine with the bugs of a plan."""
    stages, folder = planter.stages, planter.stages.out / "work"
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", str(stages.history.repository), str(folder)], check=True)
    for path, text in planter.texts(planter.tidied(plan) or []).items():
        (folder / path).write_bytes(text)
    failing = tuple(test for test in run_of(folder).tests.values() if test.outcome == "failed")
    return FailingTests(failing, failing)


def plan_of(planter: Planter, kind: str, function: str, becomes: bytes) -> BugPlan:
    found = [(plan, *plan.bugs) for plan in planter.plans()]
    return next(
        plan
        for plan, bug in found
        if bug.kind == kind and bug.function.name == function and becomes in bug.becomes
    )


def test_bugs_are_planted_where_tests_reach_and_the_same_seed_draws_the_same(
    tmp_path: Path, report: bytes
) -> None:
    repository = shop_at(tmp_path / "shop")

    def plans(name: str, *words: str) -> list[BugPlan]:
        return list(planter_of(repository, report, tmp_path / name, *words).plans())

    found = plans("one")
    functions = ["discounted", "rounded", "shipped"]
    assert {name for plan in found for name in plan.functions} == {f"shop.py::{name}" for name in functions}
    assert len({plan.sha for plan in found}) == len(found)
    assert plans("same") == found
    other = plans("other", "--seed", "1")
    assert other != found
    assert {plan.sha for plan in other} == {plan.sha for plan in found}
    few = plans("few", "--kinds", "swap, return")
    assert {bug.kind for plan in few for bug in plan.bugs} == {"return", "swap"}
    pairs = plans("pairs", "--bugs", "2")
    assert pairs
    assert all(len({*plan.functions}) == 2 for plan in pairs)


def test_a_task_has_the_bug_in_its_base_and_hides_the_files_of_the_tests_that_fail(
    tmp_path: Path, report: bytes
) -> None:
    repository = shop_at(tmp_path / "shop")
    planter = planter_of(repository, report, tmp_path / "out")
    plan = plan_of(planter, "operator", "discounted", b"+")
    one = planter.candidate(plan, failing_with(planter, plan))
    assert (one.stage, one.outcome, one.reason) == ("problem", "open", "")
    assert (one.bugs, one.functions, one.licence) == (("operator",), ("shop.py::discounted",), "LICENSE")
    assert one.commit == repository.git("rev-parse", "HEAD")
    assert one.failing
    history = planter.stages.history
    base, head = history.files(one.base), history.files(one.commit)
    assert head.keys() - base.keys() == {"tests/test_discounts.py"}
    assert {path for path in base if base[path] != head[path]} == {"shop.py"}
    assert history.git("log", "--format=%P", one.base) == b"\n"
    assert one.task
    assert one.gold
    assert isinstance(one.task.verdict, ExitCode)
    assert one.modules == one.task.verdict.protected_paths == ("tests/test_discounts.py",)
    removed, added = (
        re.findall(rf"^[{sign}](?![{sign}]{{2}})(.*)$", one.gold.patch, re.MULTILINE) for sign in "-+"
    )
    assert added == ["    return cents * (100 - percent) // 100"]
    assert len(removed) == 1
    told = one.task.problem
    assert "discounted(1000, 10) == 900" in told
    assert not any(line.strip() in told for line in (*added, *removed))
    assert "diff" not in told
    assert not re.search("test_|TestLarge", told)
    assert told.startswith("# `discounted` gives a wrong result\n")


def test_two_bugs_of_a_function_that_fail_the_same_tests_are_one_task(tmp_path: Path, report: bytes) -> None:
    planter = planter_of(shop_at(tmp_path / "shop"), report, tmp_path / "out")
    first = plan_of(planter, "return", "discounted", b"None")
    second = plan_of(planter, "operator", "discounted", b"+")
    failing = failing_with(planter, first)
    made = planter.candidate(first, failing)
    assert made.outcome == "open"
    found = planter.candidate(second, failing)
    assert (found.outcome, found.reason) == ("fallen", "fails the same tests as another bug in its function")
    assert planter.candidate(second, replace(failing, chosen=failing.chosen[:1])).reason != found.reason
    for one in (made, found):
        planter.stages.book.enter(one)
    planter.stages.book.close()
    again = planter_of(Repository(planter.stages.history.repository), report, tmp_path / "out")
    assert again.candidate(first, failing).reason == found.reason, "another process knows what was found"


def test_a_function_with_a_single_test_is_spent_with_its_first_task(tmp_path: Path, report: bytes) -> None:
    planter = planter_of(shop_at(tmp_path / "shop"), report, tmp_path / "out")
    plans = list(planter.plans())
    assert not any(map(planter.is_spent, plans))
    shipping = plan_of(planter, "return", "shipped", b"None")
    assert planter.candidate(shipping, failing_with(planter, shipping)).outcome == "open"
    for is_shown in (False, True):
        rounding = plan_of(planter, "return", "rounded", b"None")
        failing = failing_with(planter, rounding)
        if not is_shown:
            silent = tuple(msgspec.structs.replace(test, failure=None) for test in failing.chosen)
            assert (
                planter.candidate(rounding, replace(failing, chosen=silent)).reason
                == "no failing call can be shown"
            )
            assert not any(map(planter.is_spent, plans)), "a bug that became no task uses up nothing"
        else:
            assert planter.candidate(rounding, failing).outcome == "open"
    spent = {name for plan in plans if planter.is_spent(plan) for name in plan.functions}
    assert spent == {"shop.py::rounded"}


@pytest.mark.parametrize("copy", ["old/prices.txt", "__pycache__/shop.cpython-311.pyc"])
def test_a_repository_with_a_copy_of_the_code_without_the_bug_makes_no_task(
    tmp_path: Path, report: bytes, copy: str
) -> None:
    code = str(FILES["shop.py"]).replace("def ", "  function ")
    repository = shop_at(tmp_path / "shop", {copy: code})
    planter = planter_of(repository, report, tmp_path / "out")
    plan = plan_of(planter, "return", "discounted", b"None")
    found = planter.candidate(plan, failing_with(planter, plan))
    assert (found.outcome, found.reason) == ("fallen", "another file has the code without the bug")


def test_a_repository_with_an_archive_of_the_code_without_the_bug_makes_no_task(
    tmp_path: Path, report: bytes
) -> None:
    repository = shop_at(tmp_path / "shop")
    with zipfile.ZipFile(repository.path / "shop.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("shop.py", str(FILES["shop.py"]))
        wheel.writestr("data.bin", b"\0\1")
    repository.commit("Build", {"shop.whl": (repository.path / "shop.whl").read_bytes()})
    planter = planter_of(repository, report, tmp_path / "out")
    plan = plan_of(planter, "return", "discounted", b"None")
    found = planter.candidate(plan, failing_with(planter, plan))
    assert (found.outcome, found.reason, found.detail) == (
        "fallen",
        "another file has the code without the bug",
        "shop.whl",
    )


def test_all_tests_that_fail_are_hidden_and_a_bug_that_fails_what_cannot_be_hidden_is_no_task(
    tmp_path: Path, report: bytes
) -> None:
    planter = planter_of(shop_at(tmp_path / "shop"), report, tmp_path / "out")
    plan = plan_of(planter, "return", "discounted", b"None")
    failing = failing_with(planter, plan)
    other = RanTest("tests/test_shipping.py::test_express", "tests/test_shipping.py")
    found = planter.candidate(plan, replace(failing, all=(*failing.all, other)))
    assert found.modules == ("tests/test_discounts.py", "tests/test_shipping.py")
    assert found.failing == tuple(sorted(test.name for test in failing.chosen))
    strange = RanTest("checks/discounts.py::test", "checks/discounts.py")
    plan = plan_of(planter, "return", "shipped", b"None")
    failing = failing_with(planter, plan)
    found = planter.candidate(plan, replace(failing, all=(*failing.all, strange)))
    assert (found.reason, found.detail) == ("fails a test that cannot be hidden", "checks/discounts.py")


def test_why_a_bug_becomes_no_task_is_in_its_line_of_the_book(tmp_path: Path, report: bytes) -> None:
    planter = planter_of(shop_at(tmp_path / "shop"), report, tmp_path / "out")
    plan = next(planter.plans())
    found = planter.candidate(plan, Fallen("no test notices it"))
    assert (found.stage, found.outcome, found.reason) == ("seen", "fallen", "no test notices it")


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_bugs_planted_in_a_package_become_verified_tasks_that_controls_confirm(
    tmp_path: Path, repository: Repository, task_image: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_history(repository)
    head, out = repository.git("rev-parse", "HEAD"), tmp_path / "out"
    command = ["plant", str(repository.path), "--out", str(out), "--repeat", "1", "--base", task_image]
    command += ["--most", "3", "--seed", "7"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    tasks, golds = read_tasks(out / "train.jsonl"), read_gold(gold_path(out / "train.jsonl"))
    assert 2 <= len(tasks) <= 3
    assert printed.splitlines()[-1] == f"{len(tasks):>7}  kept"
    assert {"return", "comparison"} < {kind for one in candidates(out) for kind in one.bugs}
    verified = read_verified(verified_path(out / "train.jsonl"))
    known = [standing(verified, task) for task in tasks]
    assert all(one and one.ok and one.control == "confirmed" and not one.leaking_paths for one in known)
    where = list(read_provenance(provenance_path(out / "train.jsonl")).values())
    assert [(one.commit, one.licence, one.seed, one.problem_source) for one in where] == [
        (head, "LICENSE.txt", 7, "planted bug")
    ] * len(tasks)
    kept = [one for one in candidates(out) if one.outcome == "kept"]
    assert [one.bugs for one in where] == [one.bugs for one in kept]
    assert len({(one.functions, one.failing) for one in kept}) == len(kept)
    for task in tasks:
        assert task.problem.startswith("# `")
        assert golds[task.id].patch.count("\n@@ ") == 1
    before = (out / "candidates.jsonl").read_bytes()
    assert main(command) == 0
    assert (out / "candidates.jsonl").read_bytes() == before
    capsys.readouterr()
    assert main(["plant", str(repository.path), "--out", str(out), "--report"]) == 0
    assert printed.endswith(capsys.readouterr().out)
    assert repository.git("status", "--porcelain") == ""


@pytest.mark.docker
@pytest.mark.slow
@pytest.mark.timeout(1400)
def test_a_command_that_is_killed_at_every_stage_plants_the_same_bugs(
    tmp_path: Path, repository: Repository, task_image: str
) -> None:
    repository.commit("Begin", FILES)

    def command(out: Path) -> list[str]:
        words = ["plant", str(repository.path), "--out", str(out), "--repeat", "1", "--base", task_image]
        return [*words, "--jobs", "1", "--most", "2"]

    out, whole = tmp_path / "killed", tmp_path / "whole"
    verified = verified_path(out / "tasks.jsonl")
    killed_when(command(out), lambda: (out / REACHED).exists())
    killed_when(command(out), lambda: bool(candidates(out)))
    killed_when(command(out), lambda: any(one.stage == "built" for one in candidates(out)))
    killed_when(command(out), lambda: verified.exists() and bool(read_verified(verified)))
    killed_when(command(out), lambda: any(one.outcome == "kept" for one in candidates(out)))
    finished(command(out))
    finished(command(whole))
    for name in ("tasks.jsonl", "tasks.gold.jsonl", "train.jsonl", "train.gold.jsonl", "train.provenance.jsonl"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    assert len(read_tasks(out / "train.jsonl")) == 2
    assert [one.sha for one in candidates(out)] == [one.sha for one in candidates(whole)]
    assert not (out / ".work").exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--most", "0"], "--most must be 1 or more, is 0"),
        (["--bugs", "-1"], "--bugs must be 1 or more, is -1"),
        (["--kinds", "swap,typo"], "--kinds: 'typo' is none of line, comparison, "),
        (["--kinds", ","], "--kinds: name one or more of line, comparison, "),
        (["--branch", "nowhere"], "--branch: .* has no commit 'nowhere'"),
        (["--report"], "--out: .*candidates.jsonl does not exist: make tasks first"),
        (["--jobs", "0"], "--jobs must be 1 or more"),
    ],
)
def test_misuse_is_one_line_that_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    made = shop_at(tmp_path / "shop")
    assert main(["plant", str(made.path), "--out", str(tmp_path / "out"), *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert re.search(why, said)
