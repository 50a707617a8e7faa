"""The batch files, as a Slurm controller plans them."""

import getpass
import os
import re
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra import processes
from tests.conftest import free_ports
from tests.infra.cluster.programs import CLUSTER, ROOT, run

BATCH_FILES = sorted((CLUSTER / "slurm").glob("*.sbatch"))


SLURM_CONF = """
ClusterName=planned
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={place}/state
SlurmctldPidFile={place}/pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
NodeName=gpu[1-4] NodeAddr=127.0.0.1 CPUs=128 RealMemory=1000000 Gres=gpu:8 State=CLOUD
PartitionName=all Nodes=gpu[1-4] Default=YES MaxTime=INFINITE State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A Slurm controller for nodes that do not exist: it plans jobs and runs none. Yields the environment for sbatch."""
    place, (port, node_port) = tmp_path_factory.mktemp("slurm"), free_ports(2)
    (place / "state").mkdir()
    places = {"host": socket.gethostname().split(".")[0], "user": getpass.getuser(), "place": place}
    settings = SLURM_CONF.format(port=port, node_port=node_port, **places)
    (place / "slurm.conf").write_text(settings)
    (place / "gres.conf").write_text("NodeName=gpu[1-4] Name=gpu Count=8\n")
    environment = dict(os.environ) | {"SLURM_CONF": str(place / "slurm.conf")}
    log = place / "log"
    with ExitStack() as cleanup:
        child = processes.start(
            "slurmctld", ["slurmctld", "-D", "-i", "-c"], log=log, environment=environment
        )
        cleanup.callback(child.stop, grace_s=5)

        def answers() -> bool:
            return " is UP" in run("scontrol", "ping", env=environment).stdout

        processes.wait_until(answers, child=child, timeout_s=240, log=log)
        yield environment


def planned(batch_file: Path, slurm: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return run("sbatch", "--test-only", batch_file, env=slurm, cwd=ROOT)


@pytest.mark.parametrize("batch_file", BATCH_FILES, ids=lambda path: path.stem)
def test_slurm_would_run_every_batch_file(batch_file: Path, slurm: dict[str, str]) -> None:
    plan = planned(batch_file, slurm)
    assert re.search(r"Job \d+ to start at", plan.stderr), plan.stderr


def test_slurm_would_not_run_what_it_does_not_understand(slurm: dict[str, str], tmp_path: Path) -> None:
    text = (CLUSTER / "slurm/worker.sbatch").read_text()
    for right, wrong, said in [
        ("--requeue", "--requeueing", "unrecognized option"),
        ("--signal=B:USR1@180", "--signal=B:USR9@180", "Invalid --signal"),
        ("--mem=64G", "--mem=64T", "not available"),
    ]:
        assert right in text
        (tmp_path / "wrong.sbatch").write_text(text.replace(right, wrong))
        assert said in planned(tmp_path / "wrong.sbatch", slurm).stderr


def test_a_judges_router_and_engines_take_the_judges_settings(tmp_path: Path) -> None:
    folder = tmp_path / "infra/cluster/slurm"
    folder.mkdir(parents=True)
    settings = {
        "ROUTER_URL": "http://a",
        "MODEL": "/policy",
        "JUDGE_ROUTER_URL": "http://b",
        "JUDGE_MODEL": "/judge",
    }
    lines = [f"export SWERVE_{name}={value}" for name, value in settings.items()]
    (folder / "site.local.sh").write_text("\n".join([*lines, "export SWERVE_SHARED=/shared"]))

    def given(**more: str) -> list[str]:
        script = f". {CLUSTER}/slurm/site.sh; echo $SWERVE_ROUTER_URL $SWERVE_MODEL $SWERVE_SHARED"
        return run("bash", "-c", script, cwd=tmp_path, env=dict(os.environ) | more).stdout.split()

    assert given() == ["http://a", "/policy", "/shared"]
    assert given(SWERVE_FOR="judge") == ["http://b", "/judge", "/shared/judge"]


@pytest.mark.parametrize("batch_file", BATCH_FILES, ids=lambda path: path.stem)
def test_every_job_comes_back_after_its_time_is_up(batch_file: Path) -> None:
    text = batch_file.read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)$", text, re.MULTILINE))
    assert {"requeue", "signal", "time", "output"} <= {*options}
    assert options["open-mode"] == "append", "otherwise the second run overwrites the output of the first"
    assert options["signal"].startswith("B:USR1@"), "for the batch shell, and different from scancel's TERM"
    assert "USR1" in re.findall(r"^trap .* (\w+)$", text, re.MULTILINE)
