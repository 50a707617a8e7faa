"""The cluster's shell scripts as shellcheck reads them."""

from tests.infra.cluster.programs import CLUSTER, ROOT, run, tool

BATCH_FILES = sorted((CLUSTER / "slurm").glob("*.sbatch"))
SCRIPTS = sorted([*CLUSTER.rglob("*.sh"), *BATCH_FILES])


def test_every_script_is_clean() -> None:
    checked = run(tool("shellcheck"), *SCRIPTS, cwd=ROOT)
    assert checked.returncode == 0, checked.stdout
    assert len(SCRIPTS) == 10
