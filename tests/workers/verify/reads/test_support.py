"""Which files are the tests' own, by what a run read."""

from collections.abc import Iterable

from workers.verify.fixed import Read, ReadRecord
from workers.verify.reads import Support

TEST = "pkg/tests/test_a.py"


def run(path: str, by: str = "", *, is_direct: bool = True) -> Read:
    return Read("run", path, by, is_direct)


def opened(path: str, by: str = "", *, kind: str = "opened") -> Read:
    return Read(kind, path, by, is_direct=True)


def support(
    *reads: Read, tests: Iterable[str] = (TEST,), fix: Iterable[str] = ("pkg/core.py",), absent: str = ""
) -> Support:
    tracked = {read.path for read in reads if read.kind != "missing"} - {absent}
    return Support(ReadRecord(reads, frozenset(tracked)), frozenset(tests), frozenset(fix))


def test_modules_in_folders_of_tests_are_the_tests_own_and_those_of_the_package_are_not() -> None:
    found = support(
        run("pkg/__init__.py"),
        run("pkg/core.py", "pkg/__init__.py"),
        run(TEST),
        run("pkg/other.py", TEST),
        run("pkg/tests/helper.py", TEST),
        run("pkg/tests/deeper/more.py", "pkg/tests/helper.py"),
        run("pkg/testing/cases.py", TEST),
        run("conftest.py"),
    )
    own = {"conftest.py", TEST, "pkg/tests/helper.py", "pkg/tests/deeper/more.py"}
    assert found.modules == own
    assert own <= set(found.restored)


def test_a_module_in_a_folder_of_tests_that_the_package_imports_is_the_packages() -> None:
    found = support(
        run("pkg/__init__.py"),
        run("pkg/tests/runner.py", "pkg/__init__.py"),
        run("pkg/tests/command.py", "pkg/tests/runner.py"),
        run(TEST),
        run("pkg/tests/models.py", "pkg/apps.py", is_direct=False),
        run("pkg/apps.py", "pkg/__init__.py"),
    )
    assert not {"pkg/tests/runner.py", "pkg/tests/command.py"} & set(found.restored)
    assert "pkg/tests/models.py" in found.restored, "the package was told its name"


def test_a_script_that_starts_the_tests_is_not_the_package() -> None:
    script = Read("script", "run_tests.py", "", is_direct=True)
    found = support(script, run("tests/suite.py", "run_tests.py"), tests=["tests/suite.py"])
    assert "tests/suite.py" in found.restored


def test_a_package_of_the_name_test_is_no_folder_of_tests() -> None:
    found = support(
        run("tests/test_client.py"),
        run("django/test/client.py", "tests/test_client.py"),
        run("numpy/testing/__init__.py", "tests/test_client.py"),
        tests=["tests/test_client.py"],
    )
    assert found.folders == {"tests"}
    assert not {"django/test/client.py", "numpy/testing/__init__.py"} & set(found.restored)


def test_of_folders_of_tests_within_each_other_one_without_the_fix_counts() -> None:
    reads = [
        run("pkg/tests/tests/test_runner.py"),
        run("pkg/tests/runner.py", "pkg/tests/tests/test_runner.py"),
    ]
    tests = ["pkg/tests/tests/test_runner.py"]
    assert support(*reads, tests=tests).folders == {"pkg/tests"}
    assert support(*reads, tests=tests, fix=["pkg/tests/runner.py"]).folders == {"pkg/tests/tests"}
    assert support(run("tests/a.py"), tests=["tests/a.py"], fix=["tests/b.py"]).folders == {"tests"}


def test_folders_that_speak_of_tests_count_if_they_hold_no_fix() -> None:
    reads = [run("testing/test_a.py"), run("testing/helper.py", "testing/test_a.py")]
    assert "testing/helper.py" in support(*reads, tests=["testing/test_a.py"]).restored
    fixed = support(*reads, tests=["testing/test_a.py"], fix=["testing/cases.py"])
    assert fixed.restored == ("testing/test_a.py",)


def test_beside_the_package_only_files_with_tests_are_the_tests_own() -> None:
    found = support(
        run("pkg/test_core.py"),
        run("pkg/helper.py", "pkg/test_core.py"),
        run("pkg/checked.py", "pkg/__init__.py"),
        tests=["pkg/test_core.py", "pkg/checked.py"],
    )
    assert found.restored == ("pkg/test_core.py",)


def test_data_is_restored_where_only_tests_read_it_outside_of_the_package() -> None:
    found = support(
        run("pkg/core.py"),
        run(TEST),
        opened("golden/a.txt", TEST),
        opened("shared/b.txt", TEST),
        opened("shared/b.txt", "pkg/core.py"),
        opened("pkg/tables/c.json", TEST),
        opened("pkg/tests/d.json", "pkg/core.py"),
        opened("pkg/tests/table.py", TEST),
        opened("pyproject.toml", TEST),
        opened("pkg/other.py", TEST),
        opened("written.txt", TEST),
        absent="written.txt",
    )
    data = set(found.restored) - found.modules
    assert data == {"golden/a.txt", "pkg/tests/d.json", "pkg/tests/table.py", "pkg/tests/__init__.py"}
    assert {read.path for read in found.unprotected_data} == {
        "shared/b.txt",
        "pkg/tables/c.json",
        "pyproject.toml",
    }


def test_what_the_fix_changes_is_not_restored() -> None:
    found = support(
        run(TEST),
        run("pkg/tests/helper.py", TEST),
        opened("golden/a.txt", TEST),
        fix=["pkg/tests/helper.py", "golden/a.txt"],
    )
    assert not {"pkg/tests/helper.py", "golden/a.txt"} & set(found.restored)
    assert [read.path for read in found.unprotected_data] == ["golden/a.txt"]


def test_what_tests_look_for_in_vain_is_not_to_be_added() -> None:
    found = support(
        run(TEST),
        opened("pkg/tests/local.json", TEST, kind="missing"),
        opened("pkg/tests/cache.json", "pkg/core.py", kind="missing"),
        opened("local.json", TEST, kind="missing"),
    )
    assert set(found.restored) == {TEST, "pkg/tests/local.json", "pkg/tests/__init__.py"}
