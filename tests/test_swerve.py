"""The command `swerve`, and what is installed with it."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from pipeline.screen import READER_LEFT
from swerve import COMMANDS

ROOT = Path(__file__).parent.parent
PACKAGES = ("infra", "pipeline", "trainer", "workers")


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.slow_but_for("plan", "evaluate")
@pytest.mark.parametrize("word", COMMANDS)
def test_each_word_is_the_module_that_it_names(word: str) -> None:
    module, first, _ = COMMANDS[word]
    front = run(sys.executable, "swerve.py", word, "--help")
    itself = run(sys.executable, "-m", module, *first, "--help")
    assert (front.returncode, front.stderr) == (0, "")
    usage, rest = front.stdout.split("\n\n", 1)
    assert usage.startswith(f"usage: swerve {word} ")
    itself_usage, itself_rest = itself.stdout.split("\n\n", 1)
    assert itself_usage.startswith(f"usage: {' '.join(('python -m', module, *first))} ")
    assert rest == itself_rest


def test_what_is_misused_is_named_as_it_was_started() -> None:
    for words in (["report"], ["judge-report"], ["evaluate", "compare"], ["ls", "--reward"], ["trace"]):
        done = run(sys.executable, "swerve.py", *words)
        assert done.returncode == 2
        assert done.stderr.startswith(f"usage: swerve {' '.join(words[:1])}"), done.stderr
        assert "python -m" not in done.stderr


@pytest.mark.parametrize("verb", ["status", "judge-report", "tasks import", "rollouts export", "images ls"])
def test_an_argument_that_is_not_known_is_refused_with_the_usage_of_its_verb(
    verb: str, tmp_path: Path
) -> None:
    given = {
        "judge-report": [str(tmp_path)],
        "tasks import": ["fleet", str(tmp_path), "--out", "x"],
        "rollouts export": [str(tmp_path), "--format", "sft", "--out", "x"],
    }
    done = run(sys.executable, "swerve.py", *verb.split(), *given.get(verb, []), "--bogus")
    assert done.returncode == 2
    assert done.stderr.startswith(f"usage: swerve {verb} "), done.stderr
    assert done.stderr.endswith("error: unrecognized arguments: --bogus\n")


def test_the_overview_names_every_command_and_needs_no_package() -> None:
    done = run(sys.executable, "-S", "-E", "swerve.py", "--help")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(COMMANDS)


def test_arguments_and_exit_status_pass_through() -> None:
    done = run(sys.executable, "swerve.py", "report", "/nosuch/run")
    itself = run(sys.executable, "-m", "trainer.report", "/nosuch/run")
    assert done.returncode == itself.returncode != 0
    assert done.stderr.replace("swerve report", "python -m trainer.report") == itself.stderr != ""


def test_a_command_does_its_work(redis_url: str) -> None:
    done = run(sys.executable, "swerve.py", "ls", "--json", "--redis", redis_url)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_word_that_is_no_command_is_misuse() -> None:
    done = run(sys.executable, "swerve.py", "nosuch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: swerve has no command 'nosuch'; see swerve --help\n"
    assert run(sys.executable, "swerve.py").returncode == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("stats", "status"), ("trian", "train"), ("evalute", "evaluate"), ("--versoin", "--version")],
)
def test_a_mistyped_command_suggests_the_one_that_was_meant(typed: str, meant: str) -> None:
    done = run(sys.executable, "swerve.py", typed)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr == f"error: swerve has no command {typed!r}; did you mean swerve {meant}?\n"


def test_the_version_is_that_of_the_checkout() -> None:
    done = run(sys.executable, "swerve.py", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
        == f"swerve {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}\n"
    )


@pytest.mark.parametrize(
    "words",
    [["swerve.py", "--help"], ["-m", "pipeline", "--help"], ["swerve.py", "report", "--help"], ["swerve.py"]],
)
def test_a_reader_that_has_left_gets_no_traceback(words: list[str]) -> None:
    gone, pipe = os.pipe()
    os.close(gone)
    whole = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for environment, status in ((whole, {0, 2}), (whole | {"PYTHONUNBUFFERED": "1"}, {READER_LEFT})):
        with os.fdopen(os.dup(pipe), "w") as stdout:
            done = subprocess.run(
                [sys.executable, *words],
                cwd=ROOT,
                env=environment,
                stdout=stdout,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
        assert done.stderr == ""
        assert done.returncode in status
    os.close(pipe)


@pytest.mark.parametrize("words", ["--version", "status --help", "nosuch"])
def test_a_process_without_standard_output_gets_no_traceback(words: str) -> None:
    done = run("sh", "-c", f"exec {sys.executable} swerve.py {words} >&-")
    assert "Traceback" not in done.stderr
    assert done.returncode == (2 if words == "nosuch" else 0)


def test_set_up_installs_the_command() -> None:
    done = run(str(Path(sysconfig.get_path("scripts"), "swerve")), "--help", cwd=Path("/"))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: swerve COMMAND")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """Files of ours that an installation consists of."""
    names = run(
        "git",
        "ls-files",
        "-co",
        "--exclude-standard",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "swerve.py",
        *PACKAGES,
    )
    return [name for name in names.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, for a build writes into the directory that it builds."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return copy


def built(checkout: Path, kind: str, out: Path) -> zipfile.ZipFile:
    code = f"from setuptools import build_meta; build_meta.{kind}({str(out)!r})"
    done = run(sys.executable, "-W", "ignore", "-c", code, cwd=checkout)
    assert done.returncode == 0, done.stderr
    [wheel] = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.mark.slow
def test_an_installation_holds_every_file_of_the_packages(
    checkout: Path, tracked: list[str], tmp_path: Path
) -> None:
    inside = set(built(checkout, "build_wheel", tmp_path).namelist())
    ours = {name for name in tracked if name.startswith(PACKAGES) or name == "swerve.py"}
    assert ours <= inside
    assert {name for name in inside - ours if ".dist-info/" not in name} == set()


def test_an_editable_installation_gives_way_to_the_directory_in_which_python_is_started(
    checkout: Path, tmp_path: Path
) -> None:
    built(checkout, "build_editable", tmp_path).extractall(tmp_path / "site")
    where = "import pipeline, workers.agent, swerve; print(pipeline.__file__)"
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r}); {where}"
    other = tmp_path / "other worktree"
    shutil.copytree(checkout, other)
    assert run(sys.executable, "-c", code, cwd=other).stdout.startswith(str(other))
    elsewhere = run(sys.executable, "-S", "-c", code, cwd=Path("/"))
    assert elsewhere.stdout.startswith(str(checkout)), elsewhere.stderr
