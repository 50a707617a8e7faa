"""A small task directory of Harbor, and changes of it."""

from pathlib import Path

BASE = "swerve/task-base:1"
TOML = """schema_version = "1.4"

[task]
name = "acme/sums"
keywords = ["python"]

[metadata]
difficulty = "easy"

[metadata.made]
by = "hand"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60
env = { LEVEL = "a 'b'" }

[environment]
memory_mb = 512
cpus = 1
network_mode = "no-network"
build_timeout_sec = 60.0

[environment.env]
GREETING = "good day"
"""
TEST_SH = """#!/bin/bash
cd /app
[ "$LEVEL" = "a 'b'" ] && [ "$GREETING" = "good day" ] || exit 7
python3 -m pytest -q -p no:cacheprovider "$(dirname "$0")/test_sums.py"
if [ $? -eq 0 ]; then echo 1 >/logs/verifier/reward.txt; else echo 0 >/logs/verifier/reward.txt; fi
"""
FILES = {
    "task.toml": TOML,
    "instruction.md": "`add` of sums.py subtracts. Mend it.\n",
    "environment/Dockerfile": f"FROM {BASE}\nENV PYTHONDONTWRITEBYTECODE=1\nCOPY app /app\nWORKDIR /app\n",
    "environment/app/sums.py": "def add(a, b):\n    return a - b\n",
    "tests/test.sh": TEST_SH,
    "tests/test_sums.py": "import sys\n\nsys.path.insert(0, '/app')\nfrom sums import add\n\n\n"
    "def test_add():\n    assert add(3, 1) == 4\n\n\ndef test_nothing():\n    assert add(5, 0) == 5\n",
    "solution/solve.sh": '#!/bin/bash\ncd /app && sed -i "s/a - b/a + b/" sums.py\n',
}


def write_task(directory: Path, **changes: str | bytes | None) -> Path:
    """The directory with these `changes`; a file that is None is left out. Scripts may be executed."""
    for path, text in (FILES | changes).items():
        if text is None:
            continue
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        file.chmod(0o755 if path.endswith(".sh") else 0o644)
    return directory


def content_of(directory: Path) -> dict[str, tuple[bytes, bool]]:
    """The bytes of each file, and whether it may be executed."""
    return {
        str(file.relative_to(directory)): (file.read_bytes(), bool(file.stat().st_mode & 0o100))
        for file in directory.rglob("*")
        if file.is_file()
    }
