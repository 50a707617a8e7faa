"""Values that a module of the tests makes and a test file compares are contradicted in the module."""

import pytest

from workers.verify.proposing import candidates_in, support_of

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
