"""The shell scripts that run in containers, as shellcheck reads them."""

from pathlib import Path

from tests.infra.cluster.programs import ROOT, run, tool

SCRIPTS = sorted((ROOT / "workers").rglob("*.sh"))


def test_every_script_is_clean() -> None:
    checked = run(tool("shellcheck"), *SCRIPTS, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout
    assert Path("workers/leaks/find.sh") in [script.relative_to(ROOT) for script in SCRIPTS]
