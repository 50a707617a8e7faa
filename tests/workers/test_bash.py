"""The bash that runs in containers, as shellcheck reads it."""

import re

from tests.infra.cluster.programs import ROOT, run, tool
from workers.grading.steps import STEPS, step

SCRIPTS = sorted((ROOT / "workers").rglob("*.sh"))


def test_every_script_is_clean() -> None:
    checked = run(tool("shellcheck"), *SCRIPTS, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout
    assert STEPS in SCRIPTS


def test_a_step_comes_with_the_functions_that_it_needs_and_with_its_arguments_alone() -> None:
    sent = step(
        "save_governing", GOVERNING=["-name", "*.pth"], SETTINGS=["-name", "it's"], DIRECTORIES=["src"]
    )
    assert set(re.findall(r"^(\w+)\(\) \{", sent, re.MULTILINE)) == {"git", "save_governing", "find_files"}
    assert """SETTINGS=(-name 'it'"'"'s')\n""" in sent
    assert "\nDIRECTORIES=" not in sent
    assert sent.endswith("\nsave_governing\n")


def test_steps_are_nothing_but_functions() -> None:
    names = re.findall(r"^(\w+)\(\)", STEPS.read_text(), re.MULTILINE)
    outside = re.sub(r"^\w+\(\) \{\n.*?^\}\n", "", STEPS.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in outside.split("\n") if line and not line.startswith("#")] == []
    assert all(step(name).endswith(f"\n{name}\n") for name in names)
