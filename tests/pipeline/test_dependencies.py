"""Commands without their packages: a Python that has none but its own standard library."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.commandline import missing_package

ROOT = Path(__file__).parents[2]
BARE = (sys.executable, "-S", "-E")  # no site-packages, no PYTHONPATH
RUN = ["trainer/recipes/demo.toml"]
COMMANDS = [
    ("pipeline", ["status"]),
    ("workers.run", []),
    ("workers.verify", ["tasks.jsonl"]),
    ("workers.images", ["ls"]),
    ("workers.leaks", ["tasks.jsonl"]),
    ("workers.reap", []),
    ("trainer.run", RUN),
    ("trainer.evaluate", RUN),
    ("workers.episodes", []),
    ("trainer.report", ["runs/demo"]),
    ("trainer.curve", ["runs/demo"]),
    ("workers.tasksets", ["import", "--help"]),
    ("trainer.recipe", ["--reference"]),
    ("trainer.warmstart", ["--out", "policy"]),
    ("infra.local", RUN),
    ("infra.services", ["up"]),
    ("infra.serving.engine", ["--model", "trainer/demo/policy"]),
    ("infra.serving.router", []),
    ("infra.chaos", []),
    ("benchmarks.steps", []),
]


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("module", "arguments"), COMMANDS, ids=[module for module, _ in COMMANDS])
def test_a_command_without_its_packages_says_so_in_one_line(module: str, arguments: list[str]) -> None:
    done = run(*BARE, "-m", module, *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith(" is not installed: enter the environment (. .venv/bin/activate) or run make setup")


def test_the_front_command_says_so_too() -> None:
    done = run(*BARE, "swerve.py", "train", *RUN)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: msgspec is not installed: ")


def test_the_module_that_lacks_a_package_may_name_the_fix() -> None:
    code = "raise ModuleNotFoundError('nosuch is not installed: do this', name='nosuch')"
    done = run(sys.executable, "-c", f"import sys; sys.argv = ['-m']; import pipeline; {code}")
    assert (done.returncode, done.stderr) == (2, "error: nosuch is not installed: do this\n")


# Packages whose own metadata is not used, and that a worker's grader imports.
OF_GRADERS = {"swebench": "swebench", "multi_swe_bench": "multi-swe-bench", "swesmith": "swesmith"}


@pytest.mark.parametrize("package", OF_GRADERS)
def test_a_worker_without_a_data_sets_package_is_told_how_it_is_installed(package: str) -> None:
    hide = f"import sys; sys.argv = ['-m']; sys.modules['{package}'] = None; import workers.grading.swebench_rules"
    done = run(sys.executable, "-c", hide)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {package} is not installed: pip install --no-deps ")


@pytest.mark.parametrize(
    "path", ["infra/setup/no-deps.txt", "infra/docker/worker.Dockerfile", "infra/cluster/node_setup.sh"]
)
def test_every_way_to_install_a_worker_has_the_packages_of_data_sets(path: str) -> None:
    words = re.findall(r"[\w-]+", (ROOT / path).read_text())
    assert {*OF_GRADERS.values()} <= {*words}


def test_every_other_error_keeps_its_traceback() -> None:
    for broken in ("import trainer.nosuch", "import json.nosuch", "1 / 0"):
        done = run(sys.executable, "-c", f"import sys; sys.argv = ['-m']; import pipeline; {broken}")
        assert done.returncode == 1
        assert done.stderr.startswith("Traceback"), done.stderr


def test_a_program_that_imports_us_gets_the_exception_itself() -> None:
    done = run(
        *BARE, "-c", "import sys, pipeline; assert sys.excepthook is sys.__excepthook__; import pipeline.task"
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ModuleNotFoundError: No module named 'msgspec'")


@pytest.mark.parametrize(
    ("error", "package"),
    [
        (ModuleNotFoundError("No module named 'nosuch.part'", name="nosuch.part"), "nosuch"),
        (ModuleNotFoundError("No module named 'pipeline.nosuch'", name="pipeline.nosuch"), None),
        (ModuleNotFoundError("No module named 'json.nosuch'", name="json.nosuch"), None),
        (ImportError("cannot import name 'x'", name="nosuch"), None),
        (ModuleNotFoundError("nothing is named"), None),
    ],
    ids=str,
)
def test_only_what_is_not_installed_at_all_is_a_missing_package(
    error: BaseException, package: str | None
) -> None:
    assert missing_package(error) == package
