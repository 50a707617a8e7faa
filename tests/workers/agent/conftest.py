import subprocess
from pathlib import Path

import pytest

from tests.workers.agent.episode import LocalShell


@pytest.fixture
def shell(tmp_path: Path) -> LocalShell:
    (tmp_path / "calc.py").write_text("def add(a, b):\n    return a - b\n")
    setup = "git init -q . && git add -A && git -c user.name=t -c user.email=t@t commit -qm start"
    subprocess.run(["bash", "-c", setup], cwd=tmp_path, check=True)
    return LocalShell(tmp_path)
