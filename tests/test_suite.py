"""The suite itself: what a second run excuses, what ends a run that hangs, and how many tests it may lose."""

import re
from pathlib import Path

import pytest

from tests import suite
from tests.suite import NUM_EXCUSED, Results, run_pytest, verdict

README = Path(__file__).parent / "README.md"


def failures(*tests: str) -> dict[str, tuple[str, str]]:
    return {test: (f"assert {test}", f"the whole of {test}") for test in tests}


def test_what_passes_alone_is_printed_and_does_not_turn_a_run_red() -> None:
    failed = failures("tests/docs/test_pages.py::test_a")
    green, lines = verdict(failed, Results(took_s=dict.fromkeys(failed, 1.0)))
    assert green
    assert "the whole of tests/docs/test_pages.py::test_a" in lines
    assert any("tests/flaky.md" in line for line in lines)


def test_what_fails_again_is_a_failure_and_named_with_its_assertion() -> None:
    failed = failures("tests/docs/test_pages.py::test_a")
    green, lines = verdict(failed, Results(took_s=dict.fromkeys(failed, 1.0), failed=failed))
    assert not green
    assert lines == [
        "failed, fails alone too: tests/docs/test_pages.py::test_a",
        "    assert tests/docs/test_pages.py::test_a",
    ]


def test_a_failure_that_was_not_run_again_is_not_excused() -> None:
    assert not verdict(failures("tests/docs/test_pages.py::test_a"), None)[0]
    assert not verdict(failures("tests/docs/test_pages.py::test_a"), Results())[0]


def test_more_than_two_that_pass_only_alone_turn_a_run_red() -> None:
    failed = failures(*(f"tests/docs/test_pages.py::test_{number}" for number in range(NUM_EXCUSED + 1)))
    assert not verdict(failed, Results(took_s=dict.fromkeys(failed, 1.0)))[0]


@pytest.mark.parametrize("part", suite.NEVER_EXCUSED)
def test_where_the_product_could_have_a_race_a_second_run_excuses_nothing(part: str) -> None:
    assert list(suite.ROOT.glob(f"{part}*")), f"{part} is no file or folder of tests any more"
    failed = failures(f"{part}::test_a")
    green, lines = verdict(failed, Results(took_s=dict.fromkeys(failed, 1.0)))
    assert not green
    assert lines[0] == f"failed, passes alone: {part}::test_a"


FAILS = "def test_a():\n    left = 'what is found'\n    assert left == 'what is wanted'\n"
HANGS = "import time\n\ndef test_a():\n    time.sleep(1000)\n"


def test_a_run_says_where_a_test_failed_and_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS)
    results = run_pytest([str(tmp_path)], tmp_path / "record.jsonl")
    [(assertion, text)] = results.failed.values()
    assert "test_it.py:3: AssertionError: assert 'what is found' == 'what is wanted'" in assertion
    assert "def test_a" in text
    assert results.status == 1


# Quick: a gate that hangs says where.
def test_a_run_in_which_no_test_ends_is_ended_and_names_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    monkeypatch.setattr(suite, "HANG_S", 2.0)
    results = run_pytest([str(tmp_path), "--numprocesses=1"], tmp_path / "record.jsonl")
    [(assertion, _)] = results.failed.values()
    assert assertion == "no test ended for 2 s while this one ran"
    assert results.status != 0


def test_no_package_has_fewer_quick_tests_than_its_page_says(request: pytest.FixtureRequest) -> None:
    said = {name: int(number) for name, number in re.findall(r"^\| `(tests.*)` \| (\d+) \|$", README.read_text(), re.M)}
    found = request.config.stash[suite.QUICK_TESTS]
    if not said.keys() <= found.keys():  # this run is of a part of the tests
        found = suite.quick_tests()
    assert said.keys() <= found.keys()
    assert {name: found[name] for name, number in said.items() if found[name] < number} == {}, (
        "python -m tests.suite count prints the table; a number that falls wants a line below it that says why"
    )
