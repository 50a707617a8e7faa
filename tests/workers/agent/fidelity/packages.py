"""The releases of mini-swe-agent that agent files are for, as they were published."""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path

RELEASES = {"1.12": "1.12.0", "1.17": "1.17.5", "2.4": "2.4.6"}
"""The release that stands for each version."""

# Set-up installs the older releases there, each by itself: only one can be in an environment.
OLDER = Path(sys.prefix) / "share" / "mini-swe-agent"


def directory_of(version: str) -> Path:
    """What has to be first in sys.path to import the release that stands for `version`. Raises LookupError if it is not installed."""
    release = RELEASES[version]
    if importlib.metadata.version("mini-swe-agent") == release:
        spec = importlib.util.find_spec("minisweagent")
        assert spec is not None
        assert spec.origin is not None
        return Path(spec.origin).parent.parent
    found = OLDER / release
    if not (found / "minisweagent").is_dir():
        raise LookupError(
            f"mini-swe-agent {release} is not in {found}: `bash infra/setup/setup.sh tests` installs it there"
        )
    return found


def shipped_files(version: str) -> list[Path]:
    """The agent files that come with the release, without those that hold nothing of an agent."""
    config = directory_of(version) / "minisweagent" / "config"
    return sorted(config.rglob("*.yaml"))
