"""The real releases of mini-swe-agent, which set-up installs, and questions to them, each answered by a process of its own."""

import importlib.metadata
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

RELEASES = {"1.12": "1.12.0", "1.17": "1.17.5", "2.4": "2.4.6"}
ASKING = Path(__file__).with_name("asking.py")


def directory_of(version: str) -> Path:
    """What has to be first in sys.path to import the release."""
    release = RELEASES[version]
    if release == importlib.metadata.version("mini-swe-agent"):
        return Path(str(importlib.metadata.distribution("mini-swe-agent").locate_file("")))
    return Path(sys.prefix) / "share" / "mini-swe-agent" / release


def shipped_files(version: str) -> list[Path]:
    return sorted((directory_of(version) / "minisweagent" / "config").rglob("*.yaml"))


@cache
def asked(version: str, question: str, argument: str = "null") -> Any:
    """The answer of `asking.py` with this release."""
    done = subprocess.run(
        [sys.executable, str(ASKING), question],
        input=argument,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(directory_of(version)),
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_GLOBAL_CONFIG_DIR": os.devnull + "-none",
            "HOME": "/nonexistent",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
