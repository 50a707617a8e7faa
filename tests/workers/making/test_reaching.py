"""What the plugin in a container says of tests: outcomes, functions reached, how one failed."""

from pathlib import Path

from tests.workers.making.shop import FILES, run_of, shop_at
from workers.making.reaching import RaisedIn, read_report

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
    report = b'{"test": "t", "path": 3}\n\xff\n[]\n{"test": "a", "path": "a.py", "codes": [7], "outcome": "passed"}\n'
    found = read_report(report)
    assert [*found.tests] == ["a"]
    assert found.tests["a"].reached == frozenset()
