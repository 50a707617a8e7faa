"""What an eval script runs and names is read out of its words, however they are put."""

import pytest

from workers.grading.defence.script_words import ScriptWords, imported_modules, loaded_plugins


def read(script: str, **variables: str) -> ScriptWords:
    words = ScriptWords()
    words.read(script, variables)
    return words


@pytest.mark.parametrize(
    "script",
    [
        "ci/run.sh -v",
        "RUN=ci/run.sh; $RUN",
        'CI=ci\nRUN="${CI}/run.sh"\n"$RUN"',
        "${RUNNER:-ci/run.sh}",
        'CMD="bash ci/run.sh"\n$CMD',
        "for one in run walk; do ci/$one.sh; done",
        "RUNS=(ci/run.sh)\n${RUNS[@]}",
        "timeout 60 ci/run.sh",
        "env -i A=b nice -n 5 ci/run.sh",
        "bash -e ci/run.sh",
        "sh -c 'true && ci/run.sh'",
        "some-wrapper --fast bash ci/run.sh",
        "if true; then ci/run.sh; fi",
        "! ci/run.sh || exit 1",
        "A=1 B='2 3' ci/run.sh",
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' ci/run.sh",
        "source ci/run.sh",
        ". ci/run.sh | tee log",
        "bash <<'EOF'\nci/run.sh\nEOF",
        "cat >/tmp/all.sh <<EOF\nci/run.sh\nEOF\nbash /tmp/all.sh",
        "python3 -W ignore ci/run.sh",
        "coverage run ci/run.sh",
        "python -m coverage run ci/run.sh",
        "node ci/run.sh",
        "xargs ci/run.sh <list",
    ],
)
def test_what_is_run_is_found(script: str) -> None:
    assert "ci/run.sh" in read(script).runs


def test_a_folder_that_nobody_knows_is_any_folder() -> None:
    assert read("$CI_FOLDER/run.sh").runs == {"./run.sh"}
    assert read('. "$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/env.sh"').runs == {"./env.sh"}


def test_variables_of_the_container_count() -> None:
    assert read("$RUN", RUN="ci/run.sh").runs == {"ci/run.sh"}
    assert read("true", PYTHONPATH="lib:src").on_python_path == {"lib", "src"}


@pytest.mark.parametrize(
    ("script", "module"),
    [
        ("python -m pkg.runner -v", "pkg.runner"),
        ("python3.9 -Bm pkg.runner", "pkg.runner"),
        ("python -m unittest pkg.runner.Test.test_it", "pkg.runner"),
        ("pytest -p pkg.runner", "pkg.runner"),
        ("PYTEST_PLUGINS=other,pkg.runner pytest", "pkg.runner"),
        ("PYTEST_ADDOPTS='-p pkg.runner' pytest", "pkg.runner"),
    ],
)
def test_modules_that_are_run_or_loaded_are_found(script: str, module: str) -> None:
    words = read(script)
    assert module in words.modules | words.names


@pytest.mark.parametrize(
    "script",
    [
        "pytest -c ci/list.txt",
        "pytest --config-file=ci/list.txt",
        "pytest -cci/list.txt",
        "pytest @ci/list.txt",
        "cat ci/list.txt | xargs pytest",
        "pytest $(cat ci/list.txt)",
        "while read -r one; do pytest $one; done <ci/list.txt",
        "cp ci/list.txt pytest.ini && pytest",
        "make -f ci/list.txt",
    ],
)
def test_what_decides_about_the_tests_is_named(script: str) -> None:
    assert "ci/list.txt" in read(script).names


@pytest.mark.parametrize(
    "script",
    [
        "grep -q done ci/list.txt",
        "test -s ci/list.txt",
        'test "$(cat ci/list.txt)" = x',
        "git diff HEAD -- ci/list.txt",
        "echo ci/list.txt",
        "# bash ci/list.txt",
        "git apply - <<'EOF'\n+++ b/ci/list.txt\n+bash ci/list.txt\nEOF",
        "cat >tests/test_x.py <<'EOF'\nopen('ci/list.txt')\nEOF\npytest tests/test_x.py",
    ],
)
def test_what_is_only_looked_at_is_not_named(script: str) -> None:
    words = read(script)
    assert "ci/list.txt" not in words.names | words.runs


def test_directories_that_the_script_enters_or_searches_are_found() -> None:
    words = read("cd /workspace/lib\npython -m unittest discover -s checks\nexport PATH=$PWD/bin:$PATH\n")
    assert words.entered >= {"/workspace/lib", "checks"}
    assert "./bin" in words.on_path
    assert read("PYTHONPATH=lib:$PWD/src pytest").on_python_path == {"lib", "./src"}


def test_imports_and_plugins_of_a_file_are_found() -> None:
    source = "import os, start as s\n    from .beside import one, two\nfrom pkg import runtests  # why\n"
    assert imported_modules(source) >= {"os", "start", "beside", "pkg.runtests"}
    conftest = 'pytest_plugins = [\n    "ci.one",\n    \'ci.two\',\n]\nother = "ci.three"\n'
    assert loaded_plugins(conftest) == {"ci.one", "ci.two"}
    assert loaded_plugins('pytest_plugins = "ci.one"\n') == {"ci.one"}


def test_a_script_of_any_shape_can_be_read() -> None:
    for script in (
        "<<",
        "$(",
        "${",
        "'",
        "a=$a$a\n$a$a$a",
        "<<EOF\n" * 3000,
        "$(dirname " * 300,
        "x" * 300_000,
    ):
        read(script)
    many = "".join(f"A={number}\nB={number}\nC={number}\n" for number in range(50))
    assert "x/1/1/2" in read(f"{many}x/$A/$B/$C\nx/1/1/2\n").runs
