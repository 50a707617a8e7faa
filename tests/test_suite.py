"""The suite itself: what a second run excuses, what ends a run that hangs, and how many tests it may lose."""

import math
import re
import subprocess
import threading
import time
from pathlib import Path

import pytest

from tests import suite
from tests.suite import NUM_EXCUSED, Results, run_pytest, verdict

README = Path(__file__).parent / "README.md"


def failures(*tests: str) -> dict[str, tuple[str, str]]:
    return {test: (f"assert {test}", f"the whole of {test}") for test in tests}


def test_what_passes_alone_is_printed_and_does_not_turn_a_run_red() -> None:
    failed = failures("tests/docs/test_pages.py::test_a")
    green, lines = verdict(failed, Results(ended=set(failed)))
    assert green
    assert "the whole of tests/docs/test_pages.py::test_a" in lines
    assert any("tests/flaky.md" in line for line in lines)


def test_what_fails_again_is_a_failure_and_named_with_its_assertion() -> None:
    failed = failures("tests/docs/test_pages.py::test_a")
    green, lines = verdict(failed, Results(ended=set(failed), failed=failed))
    assert not green
    assert lines == [
        "failed, fails alone too: tests/docs/test_pages.py::test_a",
        "    assert tests/docs/test_pages.py::test_a",
    ]


def test_a_failure_that_was_not_run_again_is_not_excused() -> None:
    assert not verdict(failures("tests/docs/test_pages.py::test_a"), None)[0]
    assert not verdict(failures("tests/docs/test_pages.py::test_a"), Results())[0]
    begun = Results(took_s={"tests/docs/test_pages.py::test_a": 1.0})
    assert not verdict(failures("tests/docs/test_pages.py::test_a"), begun)[0], "its process died in it"


def test_more_than_two_that_pass_only_alone_turn_a_run_red() -> None:
    failed = failures(*(f"tests/docs/test_pages.py::test_{number}" for number in range(NUM_EXCUSED + 1)))
    assert not verdict(failed, Results(ended=set(failed)))[0]


@pytest.mark.parametrize("part", suite.NEVER_EXCUSED)
def test_where_the_product_could_have_a_race_a_second_run_excuses_nothing(part: str) -> None:
    assert list(suite.ROOT.glob(f"{part}*")), f"{part} is no file or folder of tests any more"
    failed = failures(f"{part}::test_a")
    green, lines = verdict(failed, Results(ended=set(failed)))
    assert not green
    assert lines[0] == f"failed, passes alone: {part}::test_a"


FAILS = "def test_a():\n    left = 'what is found'\n    assert left == 'what is wanted'\n"
SKIPS = "import pytest\n\ndef test_a():\n    pytest.skip('no Docker here')\n"
DIES = "import os\n\ndef test_a():\n    os._exit(0)\n\ndef test_b():\n    pass\n"
HANGS = "import time\n\ndef test_a():\n    time.sleep(1000)\n"


def test_a_run_says_where_a_test_failed_and_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS)
    results = run_pytest([str(tmp_path)], tmp_path / "record.jsonl")
    [(assertion, text)] = results.failed.values()
    assert "test_it.py:3: AssertionError: assert 'what is found' == 'what is wanted'" in assertion
    assert "def test_a" in text
    assert results.status == 1


@pytest.mark.parametrize(("text", "says"), [(SKIPS, "no Docker here"), ("import nothing_of_ours", "nothing_of_ours")])
def test_what_is_skipped_or_cannot_be_imported_is_a_failure_and_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "test_it.py").write_text(text)
    [(assertion, _)] = run_pytest([str(tmp_path)], tmp_path / "record.jsonl").failed.values()
    assert says in assertion


@pytest.mark.parametrize("words", [[], ["--numprocesses=1", "--max-worker-restart=0"]], ids=["one process", "xdist"])
def test_a_test_with_which_its_process_ends_has_failed_and_what_follows_has_not_run(
    tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "test_it.py").write_text(DIES)
    results = run_pytest([str(tmp_path), *words], tmp_path / "record.jsonl")
    [failed] = results.failed
    [not_run] = results.not_run
    assert (failed.rpartition("::")[2], not_run.rpartition("::")[2]) == ("test_a", "test_b")


# Quick: a gate without tests is not green.
@pytest.mark.parametrize("text", ["", DIES.replace("def test_a", "import pytest\n@pytest.mark.alone\ndef test_a")], ids=["none", "dies"])
def test_a_run_that_lacks_a_test_is_red(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert not suite.run("all", [str(tmp_path)], tmp_path / "records")
    assert "the all suite is red" in capsys.readouterr().out


def test_a_phase_waits_longer_than_any_test_may_take() -> None:
    limits = [
        float(limit)
        for file in suite.ROOT.glob("tests/**/*.py")
        for limit in re.findall(r"mark\.timeout\((\d+)\)", file.read_text())
    ]
    assert limits
    assert max(limits) < suite.HANG_S


# Quick: a gate that hangs says where.
def test_a_run_in_which_no_test_ends_is_ended_and_names_what_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text(HANGS)
    monkeypatch.setattr(suite, "HANG_S", math.inf)
    record = tmp_path / "record.jsonl"

    def shorten() -> None:
        """Sets the limit once the test runs, which takes as long as the machine is busy."""
        while not (record.exists() and record.stat().st_size):
            time.sleep(0.05)
        suite.HANG_S = 2.0

    shortening = threading.Thread(target=shorten, daemon=True)
    shortening.start()
    results = run_pytest([str(tmp_path), "--numprocesses=1"], record)
    shortening.join()
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


@pytest.mark.parametrize(
    ("changed", "chosen"),
    [
        (["workers/claim.py"], ["tests/workers/test_claim.py"]),
        (["workers/claims/__init__.py"], ["tests/journeys/test_all.py"]),
        (["workers/limits/memory.py"], ["tests/workers/limits/test_memory.py", "tests/workers/test_limits.py"]),
        (["workers/limits/time.py"], ["tests/journeys/test_all.py", "tests/workers/test_limits.py"]),
        (["tests/workers/test_claim.py", "README.md"], ["tests/workers/test_claim.py", "tests/docs"]),
        (["tests/workers/claims.py"], ["tests/workers/test_claim.py"]),
        (
            ["tests/workers/conftest.py"],
            ["tests/workers/limits/test_memory.py", "tests/workers/test_claim.py", "tests/workers/test_limits.py"],
        ),
        (["workers/unnamed.py"], ["tests/workers/"]),
        (["Makefile", "infra/unnamed.py"], []),
    ],
)
def test_the_tests_of_a_change_import_what_changed(
    tmp_path: Path, changed: list[str], chosen: list[str]
) -> None:
    files = {
        "tests/workers/test_claim.py": "from tests.workers import claims\nfrom workers.claim import Claim\n",
        "tests/workers/test_limits.py": "import workers.limits.memory\nimport workers.limits.time\n",
        "tests/workers/limits/test_memory.py": "from workers.limits import memory\n",
        "tests/journeys/test_all.py": (
            "from workers import claims\nfrom workers.claim import Claim\nfrom workers.limits import memory, time\n"
        ),
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    assert suite.chosen_for(changed, tmp_path) == chosen


def test_a_change_is_everything_since_the_branch_left_main(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        settings = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *settings, *words], check=True, capture_output=True)

    git("init", "-b", "main")
    for number, name in enumerate(("old.py", "committed.py", "edited.py", "new.py")):
        if number == 1:
            git("switch", "-c", "next")
        (tmp_path / name).write_text("")
        if number < 3:
            git("add", name)
            git("commit", "-m", name)
    (tmp_path / "old.py").write_text("changed")
    assert suite.changed_paths(tmp_path) == ["committed.py", "edited.py", "new.py", "old.py"]
