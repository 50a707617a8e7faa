import pytest

from workers.grading.defence.governing import GoverningFiles, hides_names, same_runner_settings
from workers.grading.defence.survey import Surveyed


@pytest.mark.parametrize(
    "header",
    [
        "+++ b/conftest.py",
        "+++ b/a b/conftest.py\t2025-01-01",
        "diff --git a/tests/conftest.py b/tests/conftest.py",
        "rename from tests/conftest.py",
        "--- a/lib/evil.pth",
        "+++ b/.gitattributes\r",
        'diff --git "a/\\303\\251/x.py" "b/\\303\\251/x.py"',
        '+++ "b/with \\" quote/pyproject.toml"',
        "Index: setup.cfg",
        "+++ b/src/__mocks__/fs.js",
        "+++ b/vitest.workspace.ts",
        "+++ b/.npmrc",
    ],
)
def test_files_that_govern_the_runner_are_seen_in_any_header(header: str) -> None:
    assert GoverningFiles("pytest\n", Surveyed()).touched_by(f"junk\n{header}\n@@ -1 +1 @@\n".encode())


@pytest.mark.parametrize(
    "path",
    [
        *(".cargo/config", ".cargo/config.toml", "crates/a/.cargo/config.toml", "rust-toolchain"),
        *("rust-toolchain.toml", "crates/a/rust-toolchain.toml", ".config/nextest.toml"),
    ],
)
def test_settings_of_cargo_govern_scripts_that_run_it(path: str) -> None:
    patch = f"--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n".encode()
    assert GoverningFiles("cargo test --offline\n", Surveyed()).touched_by(patch)
    assert not GoverningFiles("pytest\n", Surveyed()).touched_by(patch)


@pytest.mark.parametrize(
    "path", ["src/main/java/org/junit/jupiter/api/Assertions.java", "a/.mvn/jvm.config", "gradle/wrapper/x.jar"]
)
def test_a_file_anywhere_in_a_governing_folder_counts(path: str) -> None:
    patch = f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n".encode()
    script = "./gradlew test && mvn test\n"
    assert GoverningFiles(script, Surveyed()).touched_by(patch)
    assert not GoverningFiles("pytest\n", Surveyed()).touched_by(patch)


def test_an_ordinary_patch_touches_nothing_of_the_runner() -> None:
    assert not GoverningFiles("pytest\n", Surveyed()).touched_by(
        b"--- a/myconftest.py\n+++ b/docs/pytest.ini.rst\n@@ -1 +1 @@\n-import conftest.py\n+x\n"
    )


@pytest.mark.parametrize(
    ("name", "old", "new", "same"),
    [
        ("pyproject.toml", None, b"[tool.ruff]\n", True),
        ("pyproject.toml", b"[project]\nname='a'\n", b"[project]\nname='b'\n", True),
        ("pyproject.toml", None, b"[tool.pytest.ini_options]\naddopts='-k x'\n", False),
        ("pyproject.toml", b"", b'tool."pyt\\u0065st".ini_options.addopts="-k x"\n', False),
        ("pyproject.toml", b"[tool.pytest.ini_options]\nx=1\n", None, False),
        ("pyproject.toml", b"", b"[broken", False),
        ("setup.cfg", b"[metadata]\nname=a\n", b"[metadata]\nname=b\n[options]\nrequires=pytest\n", True),
        ("setup.cfg", b"", b"[tool:pytest]\naddopts=-k x\n", False),
        ("setup.cfg", b"[tool:pytest]\n", b"[tool:pytest]\naddopts=-k x\n", False),
        ("setup.cfg", b"[tool:pytest]\n", None, False),
        ("setup.cfg", None, b"\xff", False),
    ],
)  # fmt: skip
def test_only_what_is_said_to_pytest_counts(
    name: str, old: bytes | None, new: bytes | None, same: bool
) -> None:
    assert same_runner_settings(name, old, new) is same


@pytest.mark.parametrize(
    "header",
    [
        "+++ b/evil.egg-info/entry_points.txt",
        "+++ b/src/evil-1.dist-info/METADATA",
        "+++ b/noxfile.py",
        "+++ b/.env",
        "+++ b/Makefile",
        "+++ b/ci/run_tests.sh",
        "+++ b/ci",
        "+++ b/tests/pyvenv.cfg",
        "+++ b/tests/bin/activate",
        "+++ b/package.json",
    ],
)
def test_files_that_the_scripts_programs_read_are_seen(header: str) -> None:
    script = "make test\nnox -s tests\npipenv run bash ci/run_tests.sh\nbash ci/run_tests.sh\n"
    governing = GoverningFiles(script, Surveyed(paths=("ci/run_tests.sh",)))
    assert governing.touched_by(f"{header}\n".encode())
    assert not GoverningFiles("pytest\n", Surveyed()).touched_by(
        b"+++ b/Makefile\n+++ b/run_tests.sh\n+++ b/.env\n"
    )


def test_what_chooses_the_tests_of_unittest_is_the_runners() -> None:
    governing = GoverningFiles("python -m unittest\n", Surveyed())
    assert "*/tests/__init__.py" in governing.paths
    assert governing.touched_by(b"+++ b/lib/tests/__init__.py\n")


MAKEFILE = "CC = gcc\nTESTS = tests\n\nall: a.o\n\tgcc a.o\n\ntest: all\n\tpytest $(TESTS)\n"


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("all: a.o", "all: a.o b.o", True),
        ("CC = gcc", "CC = clang", True),
        ("pytest $(TESTS)", "true", False),
        ("TESTS = tests", "TESTS = --version", False),
        ("CC = gcc", "SHELL = /bin/true", False),
        ("CC = gcc", "-include evil.mk", False),
        ("CC = gcc", "export PYTEST_ADDOPTS = -k sub", False),
        ("all: a.o", "test:\n\ttrue\n\nall: a.o", False),
    ],
)
def test_of_a_makefile_only_what_is_made_counts(old: str, new: str, same: bool) -> None:
    changed = MAKEFILE.replace(old, new)
    assert same_runner_settings("Makefile", MAKEFILE.encode(), changed.encode(), "make -s test\n") is same


def test_what_is_no_settings_file_any_more_is_not_the_same() -> None:
    for name, text in (
        ("pyproject.toml", "tool = 3"),
        ("package.json", "[" * 100_000),
        ("package.json", "[]"),
    ):
        assert isinstance(same_runner_settings(name, b"", text.encode()), bool)
    scripts = b'{"scripts": {"test": "jest"}}'
    assert same_runner_settings("package.json", scripts, b'{"scripts": {"test": "jest"}, "version": "2"}')
    assert not same_runner_settings("package.json", scripts, b'{"scripts": {"test": "exit 0"}}')
    entry_points = b"[options.entry_points]\npytest11 =\n  evil = evil\n"
    assert not same_runner_settings("setup.cfg", b"[metadata]\n", entry_points)
    assert not same_runner_settings(
        "pyproject.toml", b"", b"[project.entry-points.pytest11]\nevil = 'evil'\n"
    )


def test_letters_written_as_numbers_are_seen() -> None:
    assert hides_names(b'+++ "b/\\056git/config"\n')
    assert not hides_names(b'+++ "b/\\303\\251.py"\n')
