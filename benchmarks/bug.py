"""One bug in one small repository: its image, its task, and a script of 20 replies that finds and fixes it.

The commands are like an agent's: mostly reading, a few runs, one edit. They are cheap themselves, so that the comparison
measures what carries them.
"""

import io
import os
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

import docker
from docker.errors import ImageNotFound
from msgspec.structs import replace

from pipeline.request import Claim, Limits, RolloutRequest, Sampling
from pipeline.task import ExitCode, Resources, Task

BASE = "swerve/task-base:1"
# The image of this process, so that two benchmarks at once leave each other's alone.
IMAGE = f"swerve-bench/pricing:{os.getpid()}"
LABEL, OWNER = "swerve.bench", str(os.getpid())
WORKDIR = "/workspace"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git add -A && git diff --cached"

FILES = {
    "Dockerfile": f"""
FROM {BASE}
LABEL {LABEL}={OWNER}
ENV PYTHONDONTWRITEBYTECODE=1 GIT_AUTHOR_DATE=2025-01-01T00:00:00Z GIT_COMMITTER_DATE=2025-01-01T00:00:00Z
COPY repo {WORKDIR}
WORKDIR {WORKDIR}
RUN git init -q . && git config user.name t && git config user.email t@example.invalid \\
 && git add -A && git commit -qm base
""",
    "repo/pricing/__init__.py": "",
    "repo/pricing/discount.py": "def discounted(price, percent):\n    return price - price * percent\n",
    "repo/pricing/total.py": "from pricing.discount import discounted\n\n\n"
    "def total(lines):\n    return sum(discounted(price, percent) for price, percent in lines)\n",
    "repo/tests/__init__.py": "",
    "repo/tests/test_total.py": "import unittest\n\nfrom pricing.total import total\n\n\n"
    "class Total(unittest.TestCase):\n    def test_nothing_costs_nothing(self):\n"
    "        self.assertEqual(total([]), 0)\n",
    "repo/README.md": "# pricing\n\nTotals with discounts in percent.\n",
}

HIDDEN_TESTS = b"""diff --git a/tests/test_discount.py b/tests/test_discount.py
new file mode 100644
--- /dev/null
+++ b/tests/test_discount.py
@@ -0,0 +1,8 @@
+import unittest
+
+from pricing.discount import discounted
+
+
+class Discount(unittest.TestCase):
+    def test_it_is_in_percent(self):
+        self.assertEqual(discounted(200, 10), 180)
"""
EVAL = f"cd {WORKDIR}\npython3 -m unittest tests.test_discount tests.test_total\n"

COMMANDS = (
    "ls -la",
    "git log --oneline | head",
    "find . -name '*.py' -not -path './.git/*'",
    "cat README.md",
    "cat pricing/discount.py",
    "cat pricing/total.py",
    "cat tests/test_total.py",
    "grep -rn 'percent' --include=*.py .",
    "git status --short",
    "cat >/tmp/reproduce.py <<'END'\nfrom pricing.discount import discounted\nprint(discounted(200, 10))\nEND",
    "PYTHONPATH=. python3 /tmp/reproduce.py",
    "sed -n '1,40p' pricing/discount.py",
    "sed -i 's/price \\* percent/price * percent \\/ 100/' pricing/discount.py",
    "git diff",
    "PYTHONPATH=. python3 /tmp/reproduce.py",
    "wc -l pricing/*.py tests/*.py",
    "python3 -m unittest tests.test_total 2>&1 | tail -3",
    "rm /tmp/reproduce.py",
    "git status --short && git diff --stat",
    SUBMIT,
)
FIX = COMMANDS[12]
WRONG_COMMANDS = tuple(FIX.replace("100", "10") if command == FIX else command for command in COMMANDS)
KNOWN_FIX = b"""diff --git a/pricing/discount.py b/pricing/discount.py
--- a/pricing/discount.py
+++ b/pricing/discount.py
@@ -1,2 +1,2 @@
 def discounted(price, percent):
-    return price - price * percent
+    return price - price * percent / 100
"""


def replies(commands: Sequence[str]) -> tuple[str, ...]:
    """What the scripted policy says to have them run."""
    return tuple(f"THOUGHT: the next thing to do.\n\n```bash\n{command}\n```" for command in commands)


@contextmanager
def image() -> Iterator[str]:
    """The task's image, removed at the end. Raises ValueError if its base image is missing."""
    with closing(docker.from_env(timeout=300)) as client:
        try:
            client.images.get(BASE)
        except ImageNotFound as error:
            raise ValueError(
                f"{BASE} is not on this machine: run python -m infra.images.build task-base"
            ) from error
        client.images.build(fileobj=_context(), custom_context=True, tag=IMAGE, rm=True, network_mode="none")
        try:
            yield IMAGE
        finally:
            for container in client.containers.list(
                all=True, ignore_removed=True, filters={"label": f"{LABEL}={OWNER}"}
            ):
                container.remove(force=True, v=True)
            client.images.remove(IMAGE, force=True)


def task() -> Task:
    return Task(
        id="bench:pricing-1",
        repo="bench/pricing",
        base_commit="",
        image=IMAGE,
        workdir=WORKDIR,
        problem="discounted(200, 10) should be 180 and is -1800.",
        verdict=ExitCode(eval_script=EVAL, test_patch=HIDDEN_TESTS),
        resources=Resources(memory_bytes=1024**3),
    )


def claim(
    number: int = 0, *, agent_config: str = "", calibration: bytes = b"", control_share: float = 1.0
) -> Claim:
    request = RolloutRequest(
        id=f"bench-{number}",
        run_id="bench",
        purpose="train",
        task=replace(task(), calibration=calibration),
        group_id="g00000000",
        member=number,
        group_size=1,
        version_at_enqueue=0,
        sampling=Sampling(),
        limits=Limits(),
        agent_config=agent_config,
        tokenizer="",
        enqueued_at=time.time(),
        control_share=control_share,
    )
    return Claim(request=request, attempt=1, worker="bench/1", claimed_at=time.time())


def _context() -> io.BytesIO:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for name, text in FILES.items():
            data = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    context.seek(0)
    return context
