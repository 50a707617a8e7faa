"""What the plugin in a container says of tests: outcomes, functions reached, how one failed."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.errors import GraderError
from pipeline.task import File
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import RepoImage
from tests.workers.making.shop import FILES, run_of, shop_at
from workers.making.reaching import RaisedIn, RanTest, TestBench, TestsRun, read_report
from workers.sandbox.docker import DockerSandboxes
from workers.sandbox.protocol import CommandResult

DISCOUNT = "tests/test_discounts.py::test_a_discount_is_taken"
HALF = "tests/test_discounts.py::TestLarge::test_half"


def test_each_test_names_the_functions_of_the_repository_that_it_reaches(tmp_path: Path) -> None:
    found = run_of(shop_at(tmp_path / "shop").path)
    assert found.is_whole
    assert {test.outcome for test in found.tests.values()} == {"passed"}
    assert found.tests[DISCOUNT].path == "tests/test_discounts.py"
    assert {place for place in found.tests[DISCOUNT].reached if place[0] == "shop.py"} == {("shop.py", 6)}
    parcels = found.tests["tests/test_shipping.py::test_parcels[6000-6000]"]
    assert {place for place in parcels.reached if place[0] == "shop.py"} == {("shop.py", 13)}
    assert len(found.tests) == 7


def test_a_failure_has_its_exception_lines_and_parameters_and_only_the_wanted_tests_run(
    tmp_path: Path,
) -> None:
    shop = str(FILES["shop.py"]).replace("return total", "return total.cents").replace("// 100", "// 99")
    path = shop_at(tmp_path / "shop", {"shop.py": shop}).path
    parcel = "tests/test_shipping.py::test_parcels[1000-1490]"
    found = run_of(path, [DISCOUNT, parcel])
    assert {*found.tests} == {DISCOUNT, parcel}
    failure = found.tests[parcel].failure
    assert failure
    assert (failure.exception, failure.message) == ("AttributeError", "'int' object has no attribute 'cents'")
    assert failure.frames[-2:] == (
        RaisedIn("tests/test_shipping.py", 7, "test_parcels"),
        RaisedIn("shop.py", 19, "shipped"),
    )
    assert failure.parameters == {"cents": "1000", "total": "1490"}
    failure = found.tests[DISCOUNT].failure
    assert failure
    assert failure.exception == "AssertionError"
    assert failure.message.splitlines() == ["assert 909 == 900", " +  where 909 = discounted(1000, 10)"]


def test_tests_that_fail_in_a_fixture_are_skipped_or_may_fail_are_told_apart(tmp_path: Path) -> None:
    text = """import pytest

@pytest.fixture
def gone():
    yield 1
    raise OSError

def test_gone(gone): pass

@pytest.mark.skip
def test_skipped(): pass

@pytest.mark.xfail
def test_expected(): assert 0
"""
    found = run_of(shop_at(tmp_path / "shop", {"tests/test_odd.py": text}).path)
    odd = {name.partition("::")[2]: test.outcome for name, test in found.tests.items() if "odd" in name}
    assert odd == {"test_gone": "failed", "test_skipped": "", "test_expected": ""}


def test_a_file_that_cannot_be_imported_makes_a_run_incomplete(tmp_path: Path) -> None:
    broken = shop_at(tmp_path / "broken", {"tests/test_odd.py": "import nothing\n"})
    assert not run_of(broken.path).is_whole


def test_lines_that_code_under_test_has_written_into_a_report_are_passed_over() -> None:
    deep = b'{"frames":' + b"[" * 100_000
    test = b'{"test": "a", "path": "a.py", "codes": [7], "outcome": "passed", "seconds": %s}\n'
    found = read_report(
        b'{"test": "t", "path": 3}\n\xff\n[]\n' + deep + b"\n" + test % b"-1e308" + b'{"finished": true}\n'
    )
    assert [*found.tests] == ["a"]
    assert found.tests["a"].reached == frozenset()
    assert found.tests["a"].seconds == 0
    assert found.is_whole
    assert read_report(test % b"2").tests["a"].seconds == 2


def test_a_run_has_the_tests_that_were_asked_for_and_is_whole_if_it_has_all() -> None:
    asked = [RanTest("a", "a.py"), RanTest("b", "b.py")]
    ran = {name: RanTest(name, "/forged", outcome="failed") for name in ("a", "b", "forged")}
    found = TestsRun(ran).of(asked)
    assert found == TestsRun({name: RanTest(name, f"{name}.py", outcome="failed") for name in ("a", "b")})
    assert not TestsRun(ran).of([*asked, RanTest("c", "c.py")]).is_whole
    assert not TestsRun(ran, is_whole=False).of(asked).is_whole


def test_a_run_that_ends_early_is_not_whole_and_hostile_tests_are_reported(tmp_path: Path) -> None:
    text = """import os, time

class Loud(list):
    def __repr__(self): raise OSError

def test_environment(): os.environ.clear()

def test_clock(monkeypatch):
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    monkeypatch.setattr(time, "time", lambda: 0.0)

def test_surrogate(): raise ValueError("\\ud800")
"""
    found = run_of(shop_at(tmp_path / "shop", {"tests/test_odd.py": text}).path)
    assert found.is_whole
    odd = {name.partition("::")[2]: test for name, test in found.tests.items() if "odd" in name}
    assert {name: test.outcome for name, test in odd.items()} == {
        "test_environment": "passed",
        "test_clock": "passed",
        "test_surrogate": "failed",
    }
    failure = odd["test_surrogate"].failure
    assert failure
    assert failure.message == "?"
    ended = shop_at(tmp_path / "ended", {"tests/test_odd.py": "import os\ndef test_odd(): os._exit(1)\n"})
    assert not run_of(ended.path).is_whole


class AnsweringSandbox:
    """A sandbox whose commands have these results, by a word in them."""

    def __init__(self, **results: CommandResult) -> None:
        self.results = results

    async def put(self, files: Sequence[File]) -> None:
        pass

    async def run(self, command: str, **_: object) -> CommandResult:
        return next(
            (one for word, one in self.results.items() if word in command), CommandResult(0, b"", 0, 1.0)
        )


@pytest.mark.parametrize(
    "results",
    [
        {"pytest": CommandResult(None, b"", 0, 65.0, starved_s=60.0)},
        {"cat": CommandResult(None, b"", 0, 300.0)},
        {"cat": CommandResult(1, b"no space", 0, 1.0)},
        {"checkout": CommandResult(1, b"no space", 0, 1.0)},
    ],
)
async def test_a_run_that_the_machine_prevents_says_nothing_about_a_bug(
    results: dict[str, CommandResult],
) -> None:
    bench = TestBench(AnsweringSandbox(**results))  # type: ignore[arg-type]
    with pytest.raises(GraderError):
        await bench.run({}, [RanTest("a", "a.py")], most_s=60)


async def test_a_report_without_its_middle_is_that_of_a_run_without_an_end() -> None:
    test, end = b'{"test": "a", "path": "a.py", "outcome": "passed"}\n', b'{"finished": true}\n'
    asked = [RanTest("a", "a.py")]
    for dropped, is_whole in ((0, True), (1, False)):
        bench = TestBench(AnsweringSandbox(cat=CommandResult(0, test + end, dropped, 1.0)))  # type: ignore[arg-type]
        assert (await bench.run({}, asked, most_s=60)).is_whole is is_whole


@pytest.mark.docker
async def test_what_tests_leave_with_one_bug_is_gone_with_the_next(
    sandboxes: DockerSandboxes, repo_image: RepoImage
) -> None:
    claim = make_claim(make_task(repo_image.tag, base_commit=repo_image.commit))
    leaving = b"""import os, sys
def add(a, b): return a + b
def sub(a, b):
    for path in ("kept.log", "left.log", "/tmp/left", "calc.txt", "tests/left/deep.log"):
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "a") as file: file.write("left")
    return 2
"""
    asked = [RanTest("tests/test_calc.py::test_sub", "tests/test_calc.py")]
    async with sandboxes.open(claim, role="grade") as sandbox:
        await sandbox.run("echo kept > kept.log; touch /tmp/kept", timeout_s=60)
        bench = TestBench(sandbox)
        await bench.install()
        before = await sandbox.run("find . /tmp -not -path './.git/*' | sort; cat kept.log", timeout_s=60)
        found = await bench.run({"calc.py": leaving}, asked, most_s=60)
        assert (found.is_whole, found.tests[asked[0].name].outcome) == (True, "passed")
        after = await sandbox.run("find . /tmp -not -path './.git/*' | sort; cat kept.log", timeout_s=60)
        assert after.output == before.output
        found = await bench.run({"calc.py": b"def sub(a, b): return 3\n"}, asked, most_s=60)
        assert (found.is_whole, found.tests[asked[0].name].outcome) == (True, "failed")
        found = await bench.run({"calc.py": b"import os\nos._exit(1)\n"}, asked, most_s=60)
        assert not found.is_whole
