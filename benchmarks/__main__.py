"""Every benchmark, one after the other, each in its own process.

python -m benchmarks [--json] [--short]
"""

import subprocess
import sys

from benchmarks.report import arguments

NAMES = (
    "steps",
    "containers",
    "claims",
    "episodes",
    "scaling",
    "overlap",
    "hold",
    "relay",
    "tracing",
    "learner",
    "experts",
    "kept_tokens",
    "weight_patches",
    "adapters",
    "checkpoints",
    "web_table",
    "web_pages",
)


def main() -> int:
    """Exit status 0 if all of them ran."""
    arguments("", __doc__)
    failed = 0
    for name in NAMES:
        done = subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]], check=False)
        failed += done.returncode != 0
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
