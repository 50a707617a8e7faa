"""The files under test, and how the programs that check them are run."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
CLUSTER = ROOT / "infra/cluster"


def tool(name: str) -> str:
    """A program from a Python package of the development environment."""
    return str(Path(sys.executable).with_name(name))


def run(*command: object, **options: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=240, **options)
