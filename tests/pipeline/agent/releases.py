"""Questions to the real releases of mini-swe-agent, each answered by a process of its own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from tests.workers.agent.fidelity.packages import directory_of

ASKING = Path(__file__).with_name("asking.py")


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
