"""Code under test cannot tell a control run from a real one: all that it can look at is the same but the contradicted text."""

import asyncio
import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from pipeline.request import Claim
from pipeline.task import Calibration, Contradiction, R2eExpected, pack
from pipeline.task import TestsJson as JsonVerdict  # pytest would take it for tests
from tests.workers.attacks.patches import edited_text
from tests.workers.attacks.scenes import ASSERTS as TESTS
from tests.workers.attacks.test_attacks import task_of
from tests.workers.claims import make_claim
from tests.workers.conftest import FILES, RepoImage
from tests.workers.contradictions import changing
from tests.workers.grading.controls.test_arrivals import WAYS
from workers.grading.grade import Grader
from workers.sandbox.docker import DockerSandboxes

pytestmark = pytest.mark.docker

# What code under test sees as it is imported, in one line.
LOOKS = r"""
import glob, json, os, resource, subprocess, sys


def shell(command):
    return subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace").stdout


def command(process):
    return open(f"/proc/{process}/cmdline").read()


def parent(process):
    (line,) = [line for line in open(f"/proc/{process}/status") if line.startswith("PPid")]
    return command(line.split()[1]) if line.split()[1] != "0" else ""


def links(process):
    found = []
    for number in os.listdir(f"/proc/{process}/fd"):
        try:
            found.append([number, os.readlink(f"/proc/{process}/fd/{number}")])
        except FileNotFoundError:  # of the list itself
            pass
    return sorted(found)


def fresh():
    start = os.stat("/etc/hosts").st_ctime  # process 1 writes there first
    for folder, folders, files in os.walk("/"):
        folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys", "/dev")]
        for name in folders + files:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            if about.st_ctime >= start:
                yield [path, about.st_mode, about.st_uid, about.st_gid, about.st_nlink, about.st_size]


processes = [name for name in os.listdir("/proc") if name.isdigit()]
git = ("status --porcelain", "diff", "diff --cached", "log --all -p", "reflog", "stash list", "ls-files -v")
git += ("fsck --unreachable", "count-objects -v")
print("\nSAW " + json.dumps({
    "environment": dict(os.environ),
    "arguments": [sys.argv, sys.orig_argv, sys.flags[:], sys.path, sorted(sys.modules)],
    "place": [os.getcwd(), os.getuid(), os.getgid(), os.umask(0o22)],
    "processes": sorted([command(name), parent(name)] for name in processes),
    "descriptors": [links("self"), links(os.getppid())],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "grading": {path: open(path).read() for path in sorted(glob.glob("/swerve-grade/**", recursive=True)) if os.path.isfile(path)},
    "git": {command: shell("git " + command) for command in git},
    "files": sorted(fresh()),
}))
"""
BEFORE = FILES["repo/calc.py"]
LOOKING = edited_text("calc.py", BEFORE, LOOKS + BEFORE.replace("a - b", "a + b", 1))
# What any two runs differ in: the container, the witness, marks, and where things lie. The numbers of processes differ too, because
# git's threads take some.
CHANCE = re.compile(
    r"(?i:swerve_[0-9a-f]{12})|<[0-9a-f]{16}>|\b[0-9a-f]{12}\b|(?:pipe|socket|anon_inode):\[?\w+\]?|/tmp/\w+|index [0-9a-f.]+"
)


def seen(log: bytes) -> dict[str, Any]:
    (line,) = [line for line in log.decode().splitlines() if line.startswith("SAW ")]
    return json.loads(CHANCE.sub("*", line.removeprefix("SAW ").replace("== 7", "== 4")))


def calibrated(image: RepoImage, name: str) -> tuple[Claim, Contradiction]:
    """The claim of a task with one control, which expects another sum."""
    verdict, setup = WAYS[name]
    verdict = replace(verdict, eval_script=verdict.eval_script.replace("-rA", "-rA -s"))
    if isinstance(verdict, JsonVerdict):
        (run,) = verdict.files
        verdict = replace(verdict, files=(replace(run, content=run.content.replace(b"-rA", b"-rA -s")),))
    path = "r2e_tests/test_calc.py" if isinstance(verdict, R2eExpected) else "tests/test_calc.py"
    one = changing(path, TESTS.index("== 4"), "== 4", "== 7", "test_add")
    task = task_of(image, verdict, setup_script=setup)
    packed = pack(Calibration(contradictions=(one,), test_files=(path,)))
    return make_claim(replace(task, calibration=packed)), one


@pytest.mark.slow_but_for("in-the-repository-already")
@pytest.mark.parametrize("name", WAYS, ids=[name.replace(" ", "-") for name in WAYS])
async def test_code_under_test_sees_the_same_in_a_control_run(
    sandboxes: DockerSandboxes, repo_image: RepoImage, name: str
) -> None:
    claim, one = calibrated(repo_image, name)
    grader = Grader(sandboxes)
    real, control = await asyncio.gather(
        grader.run_tests(claim, LOOKING), grader.run_tests(claim, LOOKING, [one])
    )
    assert (real.reward.value, control.reward.value) == (1.0, 0.0), real.log[-2000:]
    saw, sees = seen(real.log), seen(control.log)
    assert list(saw["grading"]) == ["/swerve-grade/eval.sh"]
    fresh = [path for path, *_ in saw["files"]]
    assert "/workspace/calc.py" in fresh
    assert "/workspace/windows.txt" not in fresh, "it is the image's"
    if name == "checked out by the script":  # in a control run, of another commit
        for sight in (saw, sees):
            sight["grading"] = re.sub("[0-9a-f]{40}", "*", json.dumps(sight["grading"]))
            sight["files"] = [file for file in sight["files"] if "/.git/objects" not in file[0]]
            del sight["git"]["fsck --unreachable"], sight["git"]["count-objects -v"]
    assert saw.keys() == sees.keys()
    for kind in saw:
        assert sees[kind] == saw[kind]
