"""Right fixes of odd shape: each is paid, and the control fails as it must, so that none is taken for an attack."""

import asyncio
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.task import ExitCode, File, Task, pack
from tests.workers.attacks.stage import RunOnce
from tests.workers.claims import make_claim, make_task
from tests.workers.conftest import FILES, RepoImage
from tests.workers.grading.patches import FIX
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes
from workers.verify.calibrating import Calibrator

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(900)]

TESTS = """from calc import add, sub


def test_numbers():
    assert add(3, 1) == 4


def test_words():
    assert add("on", "ly") == "only"


def test_sub():
    assert sub(3, 1) == 2
"""
SUB = "def sub(a, b):\n    return a - b\n"
FIXED = f"def add(a, b):\n    return a + b\n\n\n{SUB}"
BROKEN = FILES["repo/calc.py"]
BEHIND_A_LINK = "behind a link"
AT_ONCE = 3

Texts = dict[str, str | None]  # content by path, None: the file is deleted

# How the code may be fixed, several ways in one patch.
CODE: dict[str, Texts] = {
    "the module renamed, its old name exporting the same, with other line ends": {
        "sums.py": FIXED.replace("\n", "\r\n"),
        "calc.py": "from sums import *  # noqa: F403\n",
    },
    "a package in the module's place that exports what a new module has from a vendored base class": {
        "calc.py": None,
        "calc/__init__.py": "from ._sums import add, sub\n\n__all__ = ['add', 'sub']\n",
        "calc/_sums.py": "from vendor.opers import Base\n\n\nclass Calc(Base):\n    pass\n\n\n"
        f"add = Calc().add\n\n\n{SUB}",
        "vendor/opers/__init__.py": "class Base:\n    def add(self, a, b):\n        return a + b\n",
    },
    "replaced at import by what a descriptor gives": {
        "mended.py": "import calc\n\n\nclass Adder:\n    def __get__(self, instance, owner):\n"
        "        return lambda a, b: a + b\n\n\nclass Calc:\n    add = Adder()\n\n\ncalc.add = Calc().add\n",
        "calc.py": f"{BROKEN}\n\nimport mended  # noqa: E402, F401\n",
    },
    "generated code behind __getattr__ of the module": {
        "generate.py": "SOURCE = 'def {name}(a, b):\\n    return a {sign} b\\n'\n",
        "calc.py": "from generate import SOURCE\n\nmade = {}\nfor name, sign in {'add': '+', 'sub': '-'}.items():\n"
        "    exec(compile(SOURCE.format(name=name, sign=sign), '<generated>', 'exec'), made)\n\n\n"
        "def __getattr__(name):\n    if name in ('add', 'sub'):\n        return made[name]\n"
        "    raise AttributeError(name)\n",
    },
    "another algorithm in a folder called test": {
        "lib/test/adding.py": "from functools import lru_cache\nfrom itertools import accumulate\n\n\n"
        "@lru_cache(maxsize=None)\ndef add(a, b):\n    *_, total = accumulate((a, b))\n    return total\n",
        "calc.py": f"from lib.test.adding import add\n\n\n{SUB}",
    },
    "subclasses of the types that are expected": {
        "calc.py": "class Number(int):\n    pass\n\n\nclass Word(str):\n    pass\n\n\ndef add(a, b):\n    total = a + b\n"
        f"    return Word(total) if isinstance(total, str) else Number(total)\n\n\n{SUB}",
    },
    "a dataclass that equals its value": {
        "calc.py": "from dataclasses import dataclass\n\n\n@dataclass(eq=False)\nclass Total:\n    value: object\n\n"
        "    def __eq__(self, other):\n        return self.value == getattr(other, 'value', other)\n\n\n"
        f"def add(a, b):\n    return Total(a + b)\n\n\n{SUB}",
    },
    BEHIND_A_LINK: {"lib/calc.py": FIXED, "calc.py": None},
    "moved, and found by setup.cfg": {
        "calc.py": None,
        "src/calc.py": FIXED,
        "setup.cfg": FILES["repo/setup.cfg"] + "pythonpath = src\n",
    },
    "moved, and found by conftest.py": {
        "calc.py": None,
        "src/calc/__init__.py": FIXED,
        "conftest.py": "import sys\nfrom pathlib import Path\n\nsys.path.insert(0, str(Path(__file__).parent / 'src'))\n",
    },
}
# What a fix may have beside it.
BESIDE: list[Texts] = [
    {"tests/test_calc.py": "from calc import add\n\n\ndef test_add():\n    assert add(1, 1) == 2\n"},
    {"tests/test_own.py": "from calc import add\n\n\ndef test_own():\n    assert add(2, 2) == 4\n"},
    {"conftest.py": '"""Nothing to be set up."""\n'},
    {"pyproject.toml": '[project]\nname = "calc"\nversion = "2"\n', "Makefile": "test:\n\tpytest\n"},
    {".gitattributes": "*.txt text\n", "long.txt": None},
    {"windows.txt": "one\r\n2\r\nthree\r\n"},
    {"naïve/größe.py": "größe = 1\n", "naïve/日本.txt": "日本\n"},
    {"calc.pyi": "def add(a, b): ...\ndef sub(a, b): ...\n", "py.typed": ""},
    {"logo.bin": "\0\1\2another logo\0", "image.bin": "\0" * 300},
]


@pytest.fixture
def diff(tmp_path: Path) -> Callable[[str, Texts], bytes]:
    """Makes a patch as git writes it for the changed texts, another file's mode, and a link."""
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    base = tmp_path / "base"

    def write(root: Path, texts: Texts) -> None:
        for path, text in texts.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                (root / path).unlink()
            else:
                (root / path).write_bytes(text.encode())

    def git(root: Path, *words: str) -> bytes:
        said = ("-c", "user.name=t", "-c", "user.email=t@example.invalid")
        return subprocess.run(
            ("git", *said, *words), cwd=root, env=environment, check=True, capture_output=True
        ).stdout

    def made(name: str, texts: Texts) -> bytes:
        root = tmp_path / name
        shutil.copytree(base, root)
        write(root, texts)
        if name == BEHIND_A_LINK:
            (root / "calc.py").symlink_to("lib/calc.py")
        (root / "windows.txt").chmod(0o755)
        git(root, "add", "--all")
        return git(root, "diff", "--cached", "--binary", "--find-renames")

    write(
        base, {path.removeprefix("repo/"): text for path, text in FILES.items() if path.startswith("repo/")}
    )
    git(base, "init", "-q")
    git(base, "add", "--all", "--force")
    git(base, "commit", "-qm", "base")
    return made


async def calibrated(sandboxes: DockerSandboxes, image: RepoImage) -> Task:
    path = "tests/test_calc.py"
    verdict = ExitCode(
        eval_script=f"set -e\npython3 -m pytest {path}\n",
        protected_paths=(path,),
        files=(File(path=path, content=TESTS.encode()),),
    )
    task = make_task(image.tag, base_commit=image.commit, verdict=verdict)
    calibrator = Calibrator(RunOnce(Grader(sandboxes)), sandboxes, 1, chance=random.Random(0))
    return replace(task, calibration=pack(await calibrator.calibrate(make_claim(task), FIX)))


async def test_right_fixes_of_odd_shape_are_paid_and_fail_their_control(
    sandboxes: DockerSandboxes, repo_image: RepoImage, diff: Callable[[str, Texts], bytes]
) -> None:
    task = await calibrated(sandboxes, repo_image)
    places = asyncio.Semaphore(AT_ONCE)

    async def outcome(patch: bytes) -> tuple[float, str, str]:
        async with places:
            reward = await Grader(sandboxes).grade(make_claim(task), patch)
        return reward.value, reward.control, reward.decided_by

    patches = {
        name: diff(name, BESIDE[number % len(BESIDE)] | texts)
        for number, (name, texts) in enumerate(CODE.items())
    }
    found = await asyncio.gather(*map(outcome, patches.values()))
    assert {
        name: said for name, said in zip(patches, found, strict=True) if said[:2] != (1.0, "confirmed")
    } == {}
