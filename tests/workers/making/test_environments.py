"""What the metadata of a repository declares, and what makes a period."""

from pathlib import Path

import pytest

from tests.workers.making.repositories import Repository
from workers.making.ecosystems.ecosystem import Declared
from workers.making.ecosystems.python import declared
from workers.making.environments import _end_of_month
from workers.making.history import History


def declared_in(tmp_path: Path, files: dict[str, str | bytes | None], *extra: str) -> Declared:
    repository = Repository.at(tmp_path / "calc")
    sha = repository.commit("Begin", files)
    return declared(History(repository.path, tmp_path / "borrowed.git"), sha, extra)


def test_a_pyproject_brings_its_requirements_test_extras_and_backend(tmp_path: Path) -> None:
    found = declared_in(
        tmp_path,
        {
            "pyproject.toml": '[project]\nname = "Calc_X"\ndependencies = ["attrs>=22,<30", "web @ https://x.invalid/w.whl"]\n'
            '[project.optional-dependencies]\ntest = ["pytest", "calc-x[fast]"]\ndocs = ["sphinx"]\n'
            '[dependency-groups]\ndev = ["hypothesis; python_version>\'3\'", {include-group = "x"}]\n'
            '[build-system]\nrequires = ["hatchling"]\n'
        },
        "numpy<2",
    )
    assert found.requirements == ("attrs>=22,<30", "hypothesis; python_version>'3'", "numpy<2", "pytest")
    assert found.build == ("pip", "hatchling", "wheel", "editables")
    assert found.left_out == ("web @ https://x.invalid/w.whl",)


def test_setup_files_and_requirement_files_are_read_without_running_them(tmp_path: Path) -> None:
    found = declared_in(
        tmp_path,
        {
            "setup.py": "import os; os.abort()\nfrom setuptools import setup\n"
            "setup(name='calc', install_requires=['six'], extras_require={'dev': ['mock']}, tests_require=wanted())\n",
            "setup.cfg": "[options]\ninstall_requires =\n    click>=8\n",
            "requirements-test.txt": "-r requirements.txt\npyyaml==6.0 --hash=sha256:0 \\\n  --hash=sha256:1\n"
            "--index-url https://evil.invalid\ngit+https://x.invalid/y\n# no\n",
            "docs/requirements.txt": "sphinx\n",
        },
    )
    assert found.requirements == ("click>=8", "mock", "pyyaml==6.0", "six")
    assert found.build == ("pip", "setuptools", "wheel")
    assert found.left_out == ("--index-url https://evil.invalid", "git+https://x.invalid/y")


def test_a_repository_without_metadata_is_not_installed(tmp_path: Path) -> None:
    found = declared_in(
        tmp_path, {"calc.py": "", "pyproject.toml": "[tool.ruff]\nline-length = 9\n", "setup.cfg": b"\xff["}
    )
    assert (found.requirements, found.build) == ((), ())


@pytest.mark.parametrize("text", ["a = " + "[" * 100_000, "a = " + "9" * 5000, "a = ["])
def test_a_pyproject_that_cannot_be_read_stops_nothing(tmp_path: Path, text: str) -> None:
    found = declared_in(tmp_path, {"pyproject.toml": text, "requirements.txt": "six\n"})
    assert found.requirements == ("six",)


def test_a_period_ends_where_the_metadata_changes(tmp_path: Path) -> None:
    repository = Repository.at(tmp_path / "calc")
    history_at = tmp_path / "borrowed.git"
    shas = [
        repository.commit("Begin", {"calc.py": "a = 1\n", "requirements.txt": "six\n"}),
        repository.commit("Code", {"calc.py": "a = 2\n"}),
        repository.commit("Needs", {"uv.lock": "x\n"}),
    ]
    history = History(repository.path, history_at)
    first, second, third = (declared(history, sha).fingerprint for sha in shas)
    assert first == second
    assert second != third


def test_versions_are_limited_by_the_end_of_the_month() -> None:
    assert _end_of_month("2024-12-31T23:59:59+00:00") == "2025-01-01"
    assert _end_of_month("2024-02-01T00:00:00+00:00") == "2024-03-01"
