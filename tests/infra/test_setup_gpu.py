"""`make setup-gpu` with stand-ins for the driver and for pip: which torch is installed where, and what is refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv")
    mkdir -p $3/bin
    printf '#!/bin/sh\\necho "%s $*" >>{calls}\\n[ -t 0 ] || cat >/dev/null\\n[ "$1" != -c ]\\n' $3 >$3/bin/python
    chmod +x $3/bin/python;;
*) exec {real} "$@";;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the script reads of a checkout, with stand-ins in `bin`."""
    shutil.copytree(ROOT / "infra/setup", tmp_path / "infra/setup")
    for name in ("constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    stand_in(tmp_path, "python3", PYTHON.format(calls=tmp_path / "calls", real=sys.executable))
    return tmp_path


def stand_in(checkout: Path, name: str, text: str) -> None:
    (checkout / "bin" / name).write_text(text)
    (checkout / "bin" / name).chmod(0o755)


def set_up(checkout: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'bin'}{os.pathsep}/usr/bin{os.pathsep}/bin"
    return subprocess.run(
        ["bash", checkout / "infra/setup/setup_gpu.sh"],
        env={"PATH": path, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


@pytest.mark.parametrize(("driver", "index"), [("580.65.06", "cu130"), ("550.54.15", "cu126")])
def test_the_learner_gets_a_torch_that_the_driver_can_run_and_sglang_its_own_environment(
    driver: str, index: str, checkout: Path
) -> None:
    stand_in(checkout, "nvidia-smi", f"#!/bin/sh\necho {driver}\n")
    done = set_up(checkout)
    assert done.returncode == 0, done.stderr
    (torch,) = (line for line in calls(checkout) if line.endswith("torch==2.13.0"))
    assert torch.startswith(".venv -m pip")
    assert f"--index-url https://download.pytorch.org/whl/{index} " in torch
    (sglang,) = (line for line in calls(checkout) if "sglang==" in line)
    assert sglang.startswith(".venv-engine ")


def test_another_index_can_be_chosen(checkout: Path) -> None:
    stand_in(checkout, "nvidia-smi", "#!/bin/sh\necho 580.65.06\n")
    done = set_up(checkout, SWERVE_TORCH_INDEX="https://mirror.example/cu130")
    assert done.returncode == 0, done.stderr
    assert any("--index-url https://mirror.example/cu130 " in line for line in calls(checkout))


@pytest.mark.parametrize(
    ("driver", "said"),
    [
        ("", "setup-gpu: nvidia-smi finds no GPU"),
        ("470.82.01", "setup-gpu: driver 470.82.01 is too old for torch 2.13: install 525 or newer"),
    ],
)
def test_a_machine_without_a_usable_gpu_is_refused_before_anything_is_installed(
    driver: str, said: str, checkout: Path
) -> None:
    stand_in(checkout, "nvidia-smi", f"#!/bin/sh\necho {driver}\n")
    done = set_up(checkout)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_machine_without_a_driver_is_told_what_to_install(checkout: Path) -> None:
    done = set_up(checkout)
    assert done.returncode == 1
    assert "nvidia-smi is missing: install the NVIDIA driver" in done.stderr
