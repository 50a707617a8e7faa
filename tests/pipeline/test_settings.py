"""Variables of the environment: which are ours, and what becomes of one that is mistyped."""

import re
import subprocess
from pathlib import Path

import pytest

from pipeline.settings import VARIABLES, check_variables

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("SWERVE_SLOT", "SWERVE_SLOTS"),
        ("SWERVE_REDISURL", "SWERVE_REDIS_URL"),
        ("SWERVE_METRIC_PORT", "SWERVE_METRICS_PORT"),
    ],
)
def test_a_mistyped_variable_is_refused_with_the_one_that_was_meant(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=rf"^{typed}: no program .* did you mean {meant}\?$"):
        check_variables({"PATH": "/bin", meant: "right", typed: "1"})


def test_what_kubernetes_sets_for_a_service_of_ours_is_no_mistake() -> None:
    check_variables(
        {
            "SWERVE_REDIS_SERVICE_HOST": "10.0.0.1",
            "SWERVE_REDIS_SERVICE_PORT": "6379",
            "SWERVE_REDIS_PORT": "tcp://10.0.0.1:6379",
            "SWERVE_REDIS_PORT_6379_TCP_ADDR": "10.0.0.1",
        }
    )
    with pytest.raises(ValueError, match="SWERVE_REDIS_PORT"):
        check_variables({"SWERVE_REDIS_PORT": "6379"})


def test_the_variables_that_are_known_are_those_that_are_read() -> None:
    files = ["*.py", "*.sh", "*.sbatch", "*.yml", "*.yaml", "*.service", "Makefile", "*.Dockerfile"]
    command = ["git", "grep", "-ohE", r"\bSWERVE_[A-Z_]*[A-Z]\b", "--", *files, ":!tests", ":!benchmarks"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    inside_containers = {"SWERVE_TESTS_STATUS"}
    read = {name for name in found if re.fullmatch(r"SWERVE_\w+", name)} - inside_containers
    assert read == VARIABLES
