"""What an author sees of a commit and of planted bugs, and which of its texts become the problem."""

import argparse
import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.workers.making.author_server import AuthorServer, author_serving, in_turn
from tests.workers.making.pricing import PRICING, ROUNDS, TEST, TEST_HALF
from tests.workers.making.repositories import Repository
from tests.workers.making.shop import report_of, shop_at
from tests.workers.making.test_plant import failing_with, plan_of, planter_of
from workers.making.author import NO_REPLY, author_of
from workers.making.candidates import CandidateBook, Settings, TaskCandidate
from workers.making.ecosystems.ecosystem import ecosystem
from workers.making.from_git import CommitWalk, ProblemAuthor, add_from_git_parser
from workers.making.history import History
from workers.making.planting import SOURCE, Planter
from workers.making.probing import MOST_FAILURE_BYTES, shown_failures
from workers.making.problems import added_lines
from workers.making.stages import Stages
from workers.unqueued import limits_of

FIX_LINE = "return (cents * (100 - percent) + 50) // 100"
NAMED = ROUNDS.replace("def discounted", "def _half_up(cents):\n    return cents + 50\n\n\ndef discounted")
LOG = b"""============ test session starts ============
collected 2 items

tests/test_pricing.py .F

================= FAILURES =================
______________ test_half_cents _____________

    def test_half_cents():
>       assert discounted(999, 50) == 500
E       assert 499 == 500

tests/test_pricing.py:9: AssertionError
========= 1 failed, 1 passed in 0.01s =======
"""
GOOD = "# Discounts\n\nA discount of 50 per cent on 999 cents gives 499 cents, and I expected 500 cents."


@pytest.fixture
def server() -> Iterator[AuthorServer]:
    with author_serving(in_turn(["never"])) as server:
        yield server


def walk_of(tmp_path: Path, message: str, server: AuthorServer) -> CommitWalk:
    """The walk over a small repository, in which all commits are entered."""
    made = Repository.at(tmp_path / "pricing")
    made.commit("Begin", {"pricing.py": PRICING, "tests/test_pricing.py": TEST})
    made.commit(message, {"pricing.py": NAMED, "tests/test_pricing.py": TEST + TEST_HALF})
    parser = argparse.ArgumentParser()
    add_from_git_parser(parser)
    out = tmp_path / "out"
    out.mkdir()
    options = parser.parse_args([str(made.path), "--out", str(out), *server.options])
    book = CandidateBook.open(out / "candidates.jsonl", Settings(repository="pricing", options={}))
    history = History(made.path, out / "history.git")
    stages = Stages(options, out, book, history, limits_of(options), ecosystem(options.language))
    walk = CommitWalk(stages, has_author=True)
    walk.enter_all()
    return walk


def with_problem(walk: CommitWalk) -> TaskCandidate:
    """The commit's candidate with the author's problem, after its tests have run."""
    one = next(one for one in walk.stages.book.candidates.values() if one.stage == "candidate")
    assert one.task
    one = replace(
        one,
        failing=("tests/test_pricing.py::test_half_cents",),
        failures=shown_failures(LOG),
        task=replace(one.task, image="made:1"),
    )
    author = author_of(walk.stages.options)
    assert author is not None

    async def write() -> TaskCandidate:
        async with author.opened():
            return await ProblemAuthor(walk, author).with_problem(one)

    return asyncio.run(write())


def test_a_commit_whose_message_is_too_short_is_not_left_out_and_gets_a_problem(
    tmp_path: Path, server: AuthorServer
) -> None:
    server.script = in_turn([GOOD])
    walk = walk_of(tmp_path, "Mend it", server)
    one = with_problem(walk)
    assert (one.stage, one.outcome, one.reason) == ("built", "open", "")
    assert one.task
    assert one.task.problem == GOOD
    assert one.problem_source == "author tiny: commit message, failing tests"
    assert one.author_saw == tuple(server.prompts)
    (prompt,) = server.prompts
    assert "<text>\nMend it\n</text>" in prompt
    assert "<tests>\ntests/test_pricing.py::test_half_cents\n</tests>" in prompt
    assert ">       assert discounted(999, 50) == 500\nE       assert 499 == 500" in prompt
    assert "collected 2 items" not in prompt


def test_the_author_sees_people_s_text_as_cleaned_and_no_line_of_the_fix(
    tmp_path: Path, server: AuthorServer
) -> None:
    server.script = in_turn([GOOD])
    message = f"Half cents are lost\n\nAdd `_half_up` for them. Write\nit as {FIX_LINE}\nSee #4, please"
    one = with_problem(walk_of(tmp_path, message, server))
    assert one.gold
    (prompt,) = server.prompts
    assert "Half cents are lost" in prompt
    assert not any(line in prompt for line in added_lines(one.gold.patch))
    assert "_half_up" not in prompt
    assert "from pricing import" not in prompt, "of the hidden tests it sees what the failure shows"
    assert "names what the fix brings: Add `_half_up` for them." in one.problem_removed


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (f"Discounts are wrong, half a cent is lost:\n\n    {FIX_LINE}\n", "it says how the code"),
        ("Discounts lose half a cent, because they do not call `_half_up` with it.", "it says how the code"),
        (
            "Discounts lose half a cent:\n\n```diff\n-old\n+new\n```\nThat would do it.",
            "it says how the code",
        ),
        ("Half cents are lost.", "it has 4 words, and 8 are the least"),
        ("Half cents of discounts are lost, as test_half_cents says about them.", "it names a test"),
        ("Half cents are lost here, which tests/test_pricing.py shows to all of us.", "it names a test"),
        (
            "Half cents are lost, since this does not hold: assert discounted(999, 50) == 500",
            "it repeats lines of a change or of tests",
        ),
    ],
)
def test_a_text_that_gives_something_away_or_is_short_is_asked_for_again(
    tmp_path: Path, server: AuthorServer, bad: str, why: str
) -> None:
    server.script = in_turn([bad, f"```markdown\n{GOOD}\n```"])
    one = with_problem(walk_of(tmp_path, "Mend it", server))
    assert one.task
    assert one.task.problem == GOOD
    assert len(server.prompts) == 2
    assert why in server.prompts[1]
    assert one.author_saw == (server.prompts[1],)
    assert one.gold
    for prompt in server.prompts:
        assert not any(line in prompt for line in added_lines(one.gold.patch))


def test_endless_texts_that_cannot_be_used_let_the_commit_fall_with_a_reason_of_its_own(
    tmp_path: Path, server: AuthorServer
) -> None:
    one = with_problem(walk_of(tmp_path, "Half cents are lost in discounts, and that is wrong", server))
    assert (one.stage, one.outcome) == ("candidate", "fallen")
    assert one.reason == "the author wrote no usable problem"
    assert one.detail == "it has 1 words, and 8 are the least"
    assert len(server.prompts) == 3


def test_an_endpoint_without_a_reply_lets_the_commit_fail_and_it_goes_on_from_there(
    tmp_path: Path, server: AuthorServer
) -> None:
    server.script = in_turn([401, GOOD])
    walk = walk_of(tmp_path, "Mend it", server)
    one = with_problem(walk)
    assert (one.stage, one.outcome, one.reason) == ("candidate", "failed", NO_REPLY)
    walk.stages.book.enter(one)
    assert walk.stages.to_do("candidate", "candidate") == [one]
    assert with_problem(walk).outcome == "open"


def test_failures_are_cut_in_their_middle_and_what_comes_before_them_is_left_out() -> None:
    assert shown_failures(LOG).startswith("================= FAILURES")
    long = LOG.replace(b">  ", b"x" * MOST_FAILURE_BYTES + b">  ")
    shown = shown_failures(long)
    assert len(shown.encode()) < MOST_FAILURE_BYTES + 100
    assert shown.startswith("================= FAILURES")
    assert "\n[...]\n" in shown
    assert shown.endswith("1 failed, 1 passed in 0.01s =======")
    assert shown_failures(b"FAIL: it broke\n") == "FAIL: it broke"


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return report_of(shop_at(tmp_path_factory.mktemp("reached") / "shop").path)


def planted(
    tmp_path: Path, reached: bytes, server: AuthorServer, *words: str
) -> tuple[Planter, TaskCandidate]:
    """A planter, and a candidate that it has entered, with the template's problem."""
    planter = planter_of(shop_at(tmp_path / "shop"), reached, tmp_path / "out", *server.options, *words)
    plan = plan_of(planter, "operator", "discounted", b"+")
    one = planter.candidate(plan, failing_with(planter, plan))
    planter.stages.book.enter(one)
    return planter, one


def told(planter: Planter, one: TaskCandidate) -> TaskCandidate:
    """The candidate in the book after the author was asked."""
    found = asyncio.run(planter.told({one.sha: one}))
    known = planter.stages.book.candidates[one.sha]
    assert found == ({} if known.reason == NO_REPLY else {one.sha: known})
    return known


def test_the_template_s_text_is_written_anew_and_asked_for_once(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    planter, one = planted(tmp_path, reached, server)
    assert one.task
    assert one.gold
    template = one.task.problem
    better = "# Too dear\n\nWe sell shoes, and see this.\n\n" + template.partition("\n")[2].lstrip()
    server.script = in_turn([better])
    known = told(planter, one)
    assert known.task
    assert (known.task.problem, known.stage, known.outcome) == (better, "problem", "open")
    assert known.problem_source == "author tiny: failing calls"
    (prompt,) = server.prompts
    assert known.author_saw == (prompt,)
    assert f"<text>\n{template}\n</text>" in prompt
    assert "return cents" not in prompt
    assert told(planter, known) == known
    assert len(server.prompts) == 1


def test_a_text_without_the_call_or_its_outcome_or_with_a_line_of_the_fix_or_a_test_is_asked_for_again(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    planter, one = planted(tmp_path, reached, server)
    assert one.task
    template = one.task.problem
    replies = [
        template.replace("discounted(1000, 10) == 900", "discounted(1000, 10)"),
        template.replace("AssertionError", "It is wrong"),
        template + "\nIt has to be\n\n    return cents * (100 - percent) // 100\n",
        template + "\nSee test_a_discount_is_taken",
        template + "\nSee tests/test_discounts.py",
    ]
    for number, reply in enumerate(replies):
        server.prompts.clear()
        server.script = in_turn([reply, template + f"\nThis is number {number}."])
        known = told(planter, one)
        assert known.task
        assert known.task.problem.endswith(f"This is number {number}."), reply
        assert len(server.prompts) == 2
        assert "return cents" not in server.prompts[1]


def test_the_template_s_text_stays_where_no_reply_can_be_used_and_the_book_says_so(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    planter, one = planted(tmp_path, reached, server)
    known = told(planter, one)
    assert len(server.prompts) == 3
    assert known.task == one.task
    assert (known.stage, known.outcome) == ("problem", "open")
    assert known.problem_source == "planted bug, because author tiny wrote nothing that can be used" != SOURCE
    assert known.problem_removed == (
        "of the author: a line of the code or of the output is missing or changed",
    )
    assert told(planter, known) == known
    assert len(server.prompts) == 3


def test_an_endpoint_without_a_reply_lets_the_bug_fail_and_it_waits_for_the_next_command(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    planter, one = planted(tmp_path, reached, server)
    assert one.task
    server.script = in_turn([404, one.task.problem + "\nReally."])
    known = told(planter, one)
    assert (known.stage, known.outcome, known.reason) == ("problem", "failed", NO_REPLY)
    assert planter.stages.to_do("problem") == [known]
    assert told(planter, known).problem_source == "author tiny: failing calls"


def test_a_command_that_gets_no_reply_for_any_bug_at_hand_ends_and_says_that_something_is_missing(
    tmp_path: Path, reached: bytes, server: AuthorServer
) -> None:
    server.script = in_turn([404])
    planter, one = planted(tmp_path, reached, server, "--most", "1")
    assert planter.plant()
    assert [(known.sha, known.outcome) for known in planter.stages.book.candidates.values()] == [
        (one.sha, "failed")
    ]
    assert len(server.prompts) == 1
