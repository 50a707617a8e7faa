"""What is contradicted for a task: values in other modules of the tests, and what the base does not meet."""

import pytest

from pipeline.task import Contradiction, TextChange
from workers.verify.proposing import Proposed, candidates_in, met_by_log, support_of
from workers.verify.trials import Trial

PATH = "tests/unit/test_calc.py"
TABLE = "TOTALS = {(3, 1): 4, 'large': 15}\n"
FIXTURES = "import pytest\n\n\n@pytest.fixture\ndef total():\n    return 4\n"


def changes(test: str, **support: str) -> set[tuple[str, str]]:
    """The paths of modules that are changed, and the text that is changed there."""
    files = {
        path.replace("_in_", "/").replace("__", "/") + ".py": text.encode() for path, text in support.items()
    }
    found = support_of(PATH, test.encode(), files)
    made = candidates_in(found, PATH, test.encode(), 1, [], [])
    return {
        (path, files[path][edit.start : edit.end].decode())
        for path, _, candidate in made
        for edit in candidate.edits
    }


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from totals import TOTALS", "TOTALS"),
        ("from .totals import TOTALS", "TOTALS"),
        ("from tests.unit.totals import TOTALS", "TOTALS"),
        ("from . import totals", "totals.TOTALS"),
        ("from tests.unit import totals as them", "them.TOTALS"),
        ("import tests.unit.totals as them", "them.TOTALS"),
        ("import totals", "totals.TOTALS"),
    ],
)
def test_a_table_is_changed_however_the_test_file_imports_it(line: str, name: str) -> None:
    test = f"{line}\nfrom calc import add\n\n\ndef test_add():\n    assert add(3, 1) == {name}[3, 1]\n"
    assert changes(test, tests__unit__totals=TABLE) == {("tests/unit/totals.py", "4")}


@pytest.mark.parametrize("folder", ["", "tests__", "tests__unit__"])
def test_a_fixture_is_changed_in_any_conftest_above_the_test_file(folder: str) -> None:
    test = "from calc import add\n\n\ndef test_add(total):\n    assert add(3, 1) == total\n"
    place = folder.replace("__", "/")
    assert changes(test, **{f"{folder}conftest": FIXTURES}) == {(f"{place}conftest.py", "4")}
    assert changes(test, other__conftest=FIXTURES) == set()


def test_a_value_that_the_code_gets_too_is_not_changed_where_it_is_made() -> None:
    test = "from calc import add, sub\n\n\ndef test_add(total):\n    assert add(3, 1) == total\n    assert sub(total, 1) == 3\n"
    assert changes(test, tests__conftest=FIXTURES) == set()


def test_a_module_is_followed_through_another() -> None:
    test = "from .totals import LARGE\nfrom calc import add\n\n\ndef test_add():\n    assert add(10, 5) == LARGE\n"
    more = {"tests__unit__totals": "from .numbers_of_tests import FIFTEEN\n\nLARGE = FIFTEEN\n"}
    assert changes(test, tests__unit__numbers_of_tests="FIFTEEN = 15\n", **more) == {
        ("tests/unit/numbers_of_tests.py", "15")
    }


def test_what_a_module_checks_itself_and_what_no_test_uses_is_left_alone() -> None:
    test = "from .checking import check\nfrom calc import add\n\n\ndef test_add():\n    check(add(3, 1))\n"
    checking = "UNUSED = 7\n\n\ndef check(total):\n    assert total == 4\n"
    assert changes(test, tests__unit__checking=checking) == set()


async def test_in_another_language_what_the_log_of_the_base_names_is_not_met() -> None:
    text = b"package a\n\nif x != 1 {\n\tt.Error()\n}\nif y != 2 {\n\tt.Error()\n}\n"

    def trial(value: bytes) -> Trial:
        start = text.index(value)
        change = TextChange(offset_bytes=start, was=value.decode(), becomes="7")
        found = Trial(Contradiction(path="a/a_test.go", changes=(change,), fails=("TestA",)), frozenset({"TestA"}))
        found.checked = ((text.index(b"if " + (b"x" if value == b"1" else b"y")), text.index(b"}", start) + 1),)
        found.checked_in = "a/a_test.go"
        return found

    trials = [trial(b"1"), trial(b"2")]
    proposed = Proposed(trials, {"a/a_test.go": text}, {})
    place = text.index(b"1"), text.index(b"1") + 1
    log = b"--- FAIL: TestA (0.00s)\n    a_test.go:7: wrong\nFAIL\n"
    met = await met_by_log(proposed, log)
    assert met == {"a/a_test.go": [place]}
    assert proposed.telling(met, ["TestA"]) == [trials[1]]
    for silent in (b"", b"b_test.go:7: wrong", b"a_test.go:71: x".replace(b"a_", b"aa_")):
        assert await met_by_log(proposed, silent) == {}
