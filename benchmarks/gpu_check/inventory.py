"""What the check runs on: the machine, and the versions of driver and packages. Nothing is imported for it, so that it is known too where
an import is what fails.
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_check.steps import Machine

ROOT = Path(__file__).parents[2]
ENGINE_PYTHON = ROOT / ".venv-engine" / "bin" / "python"
"""`make setup-gpu` puts SGLang there, because it wants another torch than the learner."""

NONE = "none"
TIMEOUT_S = 30.0
PACKAGES = ("torch", "megatron-core", "transformers", "sglang", "smg", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


def machine() -> Machine:
    return Machine(
        gpus=nvidia_smi("name,memory.total"),
        host=f"{platform.system()} {platform.release()}, {platform.machine()}",
        cores=os.cpu_count() or 0,
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "driver": _first(nvidia_smi("driver_version"))}
    found |= {"CUDA of torch": cuda_of_torch()} | {name: version_of(name) for name in PACKAGES}
    if ENGINE_PYTHON.exists():
        found |= {f"{name} of .venv-engine": _in_engine(name) for name in ("sglang", "torch")}
    return found


def commit() -> str:
    """The commit of this checkout, and whether it was changed; "none" where it is no checkout."""
    described = _lines(["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"])
    return _first(described)


def nvidia_smi(query: str) -> list[str]:
    """A line for each GPU; empty without a driver."""
    return _lines(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"])


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NONE


def pinned(package: str) -> str:
    """The version that constraints.txt has."""
    (version,) = re.findall(
        rf"^{re.escape(package)}==([^\s+;]+)", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE
    )
    return version


def cuda_of_torch() -> str:
    """As torch was built."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return NONE
    text = (Path(found.origin).parent / "version.py").read_text()
    match = re.search(r"^cuda: .* = '([\d.]+)'", text, flags=re.MULTILINE)
    return match[1] if match else NONE


def engine_python() -> str | None:
    """The interpreter that has SGLang: this one, or that of .venv-engine."""
    if importlib.util.find_spec("sglang") is not None:
        return sys.executable
    return str(ENGINE_PYTHON) if ENGINE_PYTHON.exists() else None


def _in_engine(package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return _first(_lines([str(ENGINE_PYTHON), "-c", code]))


def _lines(command: list[str]) -> list[str]:
    """What a program prints; nothing if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1] if done.stdout else []


def _first(lines: list[str]) -> str:
    return lines[0].strip() if lines else NONE
