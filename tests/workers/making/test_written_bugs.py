"""Which functions an author is shown, which of its bugs are planted, and that they are asked for once."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.making.author_server import AuthorServer, author_serving, in_turn
from tests.workers.making.repositories import Repository
from tests.workers.making.shop import FILES, report_of, shop_at
from tests.workers.making.test_plant import failing_with, planter_of
from workers.making.author import NO_REPLY, Unusable
from workers.making.bugs import PlantedBug, functions_and_bugs, with_bugs
from workers.making.planting import BugPlan, Planter
from workers.making.written_bugs import function_of, request_of_bug, to_write, written

SOURCE = b'''class Shop:
    @staticmethod
    def total(cents, rates=(1,)):
        """The total."""
        # Rates are added up.
        found = """
  as it is
"""
        for rate in rates:
            cents += rate
        return cents, found
'''
SHOWN = '''@staticmethod
def total(cents, rates=(1,)):
    """The total."""
    # Rates are added up.
    found = """
  as it is
"""
    for rate in rates:
        cents += rate
    return cents, found
'''


def bug_in(source: bytes) -> PlantedBug:
    (bug,) = to_write(source, functions_and_bugs("shop.py", source)[0])
    return bug


def replied(text: str) -> str:
    return f"So be it:\n```python\n{text}```\nDone."


def test_a_function_is_shown_without_its_indentation_and_comes_back_into_its_place() -> None:
    bug = bug_in(SOURCE)
    assert f"```python\n{SHOWN}```" in request_of_bug(bug)
    assert with_bugs(SOURCE, [bug]) == SOURCE, "a bug that is to be written yet changes nothing"
    text = function_of(replied(SHOWN.replace("+= rate", "= rate")), SOURCE, bug)
    found = written(bug, text)
    assert found.becomes == b"            cents = rate\n"
    assert with_bugs(SOURCE, [found]) == SOURCE.replace(b"+= rate", b"= rate")


def test_line_ends_of_windows_and_other_lines_stay_as_they_are() -> None:
    source = SOURCE.replace(b"\n", b"\r\n")
    bug = bug_in(source)
    text = SHOWN.replace("for rate in rates:", "for rate in rates[1:]:").replace("cents +=", "cents -=")
    found = written(bug, function_of(replied(text), source, bug))
    assert with_bugs(source, [found]) == source.replace(b"in rates:", b"in rates[1:]:").replace(b"+=", b"-=")


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ("return cents", "it has no block of code"),
        (f"```python\n{SHOWN}", "it has no block of code"),
        (replied(SHOWN + "import os\n"), "the block does not parse as one function alone"),
        (replied(SHOWN.replace("+= rate", "+= (")), "the block does not parse"),
        (replied(SHOWN.replace("def total", "def sum")), "another name"),
        (replied(SHOWN.replace("+= rate", f"+= rate{' + 1' * 1500}")), "it is nested too deeply"),
        (replied(SHOWN.replace("(1,)", f"1{' + 1' * 1500}")), "it is nested too deeply"),
        (replied(SHOWN.replace("(1,)", "(2,)")), "another name, signature"),
        (replied(SHOWN.replace("@staticmethod\n", "")), "another name, signature, decorator"),
        (replied(SHOWN.replace("The total", "The wrong total")), "docstring"),
        (replied(SHOWN.replace("+= rate", "-= rate  # BUG")), "a comment that was not there"),
        (replied(SHOWN), "it means the same"),
        (replied(SHOWN.replace("cents += rate", "cents += (rate)")), "it means the same"),
        (
            replied(SHOWN.replace("    return", "    cents += 1\n" * 16 + "    return")),
            "it changes 16 lines, and 15 are the most",
        ),
    ],
)
def test_a_reply_that_is_no_small_bug_of_the_function_cannot_be_used(reply: str, why: str) -> None:
    with pytest.raises(Unusable, match=why):
        function_of(reply, SOURCE, bug_in(SOURCE))


def test_a_function_that_is_too_long_or_cannot_stand_alone_is_not_shown() -> None:
    long = b"def f():\n" + b"    x = 1\n" * 2000
    assert list(to_write(long, functions_and_bugs("a.py", long)[0])) == []
    assert list(to_write(b"func f() {}\n", ())) == []


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return report_of(shop_at(tmp_path_factory.mktemp("reached") / "shop").path)


@pytest.fixture
def server() -> Iterator[AuthorServer]:
    with author_serving(in_turn(["never"])) as server:
        yield server


ROUNDED = "def rounded(cents):\n    rest = cents % 5\n    cents -= rest\n    return cents\n"
WRONG = replied(ROUNDED.replace("cents -= rest", "cents += rest"))


def rounding_plan(planter: Planter) -> BugPlan:
    return next(plan for plan in planter.plans() if plan.functions == ("shop.py::rounded",))


def test_an_author_adds_its_kind_and_one_bug_of_each_function_that_tests_reach(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    shop = shop_at(tmp_path / "shop")
    every = list(planter_of(shop, reached, tmp_path / "every", *server.options).plans())
    without = list(planter_of(shop, reached, tmp_path / "without").plans())
    models = [plan for plan in every if plan.bugs[0].kind == "model"]
    assert {name for plan in models for name in plan.functions} == {
        f"shop.py::{name}" for name in ("discounted", "rounded", "shipped")
    }
    assert len(models) == 3
    assert {plan.sha for plan in every} - {plan.sha for plan in without} == {plan.sha for plan in models}
    orders = {
        name: [
            plan.functions
            for plan in planter_of(
                shop, reached, tmp_path / name, *server.options, "--kinds", "model", "--seed", name[-1]
            ).plans()
        ]
        for name in ("one 1", "same 1", "seed 2", "seed 3", "seed 4")
    }
    assert orders["one 1"] == orders["same 1"]
    assert len({*map(tuple, orders.values())}) > 1
    assert server.prompts == [], "nothing is asked before a bug's turn"


def test_a_written_bug_becomes_a_task_and_is_not_asked_for_again(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    server.script = in_turn(["no code", WRONG])
    words = (*server.options, "--kinds", "model")
    planter = planter_of(shop_at(tmp_path / "shop"), reached, tmp_path / "out", *words)
    plan = rounding_plan(planter)
    assert asyncio.run(planter.write_bugs([plan])) == {}
    assert len(server.prompts) == 2
    known = planter.stages.book.candidates[plan.sha]
    assert (known.stage, known.outcome, known.author_saw) == ("seen", "open", (server.prompts[1],))
    planter.stages.book.close()
    again = planter_of(Repository(planter.stages.history.repository), reached, tmp_path / "out", *words)
    assert rounding_plan(again) == plan
    assert asyncio.run(again.write_bugs([plan])) == {}
    assert len(server.prompts) == 2
    one = again.candidate(plan, failing_with(again, plan))
    assert (one.stage, one.outcome, one.bugs) == ("problem", "open", ("model",))
    assert one.gold
    assert one.gold.patch.endswith("-    cents += rest\n+    cents -= rest\n     return cents\n \n \n")
    assert one.author_saw == known.author_saw
    assert one.task
    assert one.task.problem.startswith("# `rounded` gives a wrong result")
    again.stages.book.enter(one)
    assert list(again.stages.book.candidates) == [plan.sha]


def test_a_written_bug_has_its_place_in_the_book_by_when_it_is_tried(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    server.script = in_turn([WRONG])
    planter = planter_of(shop_at(tmp_path / "shop"), reached, tmp_path / "out", *server.options)
    plans = list(planter.plans())
    other, plan = next(one for one in plans if one.bugs[0].kind != "model"), rounding_plan_of_model(plans)
    asyncio.run(planter.write_bugs([plan]))
    for one in (other, plan):
        planter.stages.book.enter(planter.candidate(one, failing_with(planter, one)))
    assert list(planter.stages.book.candidates) == [other.sha, plan.sha]


def rounding_plan_of_model(plans: list[BugPlan]) -> BugPlan:
    return next(
        one for one in plans if one.functions == ("shop.py::rounded",) and one.bugs[0].kind == "model"
    )


def test_an_author_without_a_usable_bug_lets_the_candidate_fall_and_one_without_a_reply_lets_it_fail(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    words = (*server.options, "--kinds", "model")
    planter = planter_of(shop_at(tmp_path / "shop"), reached, tmp_path / "out", *words)
    first, second, third = planter.plans()
    lost = asyncio.run(planter.write_bugs([first]))
    found = planter.candidate(first, lost[first.sha])
    assert (found.stage, found.outcome, found.reason, found.detail) == (
        "seen",
        "fallen",
        "the author wrote no usable bug",
        "it has no block of code",
    )
    assert len(server.prompts) == 3
    server.script = in_turn([404])
    lost = asyncio.run(planter.write_bugs([second, third]))
    for plan in (second, third):
        found = planter.candidate(plan, lost[plan.sha])
        assert (found.stage, found.outcome, found.reason) == ("seen", "failed", NO_REPLY)
        assert "HTTP 404" in found.detail


def test_no_function_but_that_of_the_bug_is_in_its_prompt(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    planter = planter_of(
        shop_at(tmp_path / "shop"), reached, tmp_path / "out", *server.options, "--kinds", "model"
    )
    asyncio.run(planter.write_bugs([rounding_plan(planter)]))
    assert f"```python\n{ROUNDED}```" in server.prompts[0]
    others = [line.strip() for line in str(FILES["shop.py"]).splitlines() if line.strip() not in ROUNDED]
    assert not any(line in server.prompts[0] for line in others if len(line) > 8)
