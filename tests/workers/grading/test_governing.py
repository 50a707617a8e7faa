import pytest

from workers.grading.governing import GoverningFiles, hides_names, same_runner_settings


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
    ],
)
def test_files_that_govern_the_runner_are_seen_in_any_header(header: str) -> None:
    assert GoverningFiles("pytest\n", "/workspace").touched_by(f"junk\n{header}\n@@ -1 +1 @@\n".encode())


def test_an_ordinary_patch_touches_nothing_of_the_runner() -> None:
    assert not GoverningFiles("pytest\n", "/workspace").touched_by(
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
        "+++ b/argparse.py",
        "+++ b/src/json/__init__.py",
        "rename to pluggy.py",
        "+++ b/deep/_pytest/__init__.py",
        "+++ b/pluggy",
        "+++ b/evil.egg-info/entry_points.txt",
        "+++ b/src/evil-1.dist-info/METADATA",
        "+++ b/noxfile.py",
        "+++ b/.env",
        "+++ b/Makefile",
        "+++ b/ci/run_tests.sh",
        "+++ b/package.json",
    ],
)
def test_modules_that_python_may_take_for_the_runners_are_seen(header: str) -> None:
    governing = GoverningFiles(
        "make test\nnox -s tests\npipenv run bash ci/run_tests.sh\nbash ci/run_tests.sh\n", "/workspace"
    )
    assert governing.touched_by(f"{header}\n".encode())
    assert not GoverningFiles("pytest\n", "/workspace").touched_by(
        b"+++ b/Makefile\n+++ b/run_tests.sh\n+++ b/.env\n"
    )


def test_only_scripts_that_are_tests_by_their_name_are_the_runners() -> None:
    script = (
        "set -e\ncd /workspace\nsource activate testbed && ./ci/run_tests.sh -v; bash /workspace/check.sh\n"
    )
    script += "bash install.sh\n. tests/env.sh | tee log\nsource ./env\n"
    assert GoverningFiles(script, "/workspace").paths == ("check.sh", "ci/run_tests.sh", "tests/env.sh")


def test_of_python_projects_what_the_script_sources_and_what_chooses_its_tests_are_the_runners() -> None:
    sources = "source activate x\n. ./.env\nsource /opt/conda/bin/activate && . 'ci/env.sh'\n"
    assert GoverningFiles(f"{sources}python3.9 -m pytest\n", "/workspace").paths == (".env", "ci/env.sh")
    assert "*/tests/__init__.py" in GoverningFiles("python -m unittest\n", "/workspace").paths
    assert GoverningFiles("python -m unittest\n", "/workspace").touched_by(b"+++ b/lib/tests/__init__.py\n")


def test_directories_that_the_script_enters_or_runs_from_are_known() -> None:
    script = 'cd /workspace/lib\ncd "tests" && x\nexport PATH=$PWD/bin:/usr/bin:${PWD}/tools:$PATH\n'
    governing = GoverningFiles(script, "/workspace")
    assert governing.directories == (".", "lib", "src", "tests")
    assert governing.program_directories == ("bin", "tools")


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
