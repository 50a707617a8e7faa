"""Memory of process trees."""

import os
import subprocess
import sys

from infra.processes import MemoryWatch, parts_bytes
from infra.services import children_of

HOLD = "import sys; held = bytearray(64_000_000); print('held', flush=True); sys.stdin.read()"
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}])"


def test_the_memory_of_a_child_is_counted_with_its_parent() -> None:
    # Not of the test's own process: its share of a library changes when another process loads that, and it may itself hold as much.
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        (child,) = children_of(parent.pid)
        held = parts_bytes({"parent": parent.pid, "child": child})
        parent.communicate()
    assert held["child"] > 64_000_000
    assert held["parent"] > 64_000_000


def test_a_process_that_is_gone_holds_nothing() -> None:
    gone = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    assert parts_bytes({"gone": int(gone.stdout)})["gone"] == 0


def test_the_watch_keeps_the_peak() -> None:
    with MemoryWatch(lambda: {"us": os.getpid()}, every_s=0.01) as watch:
        held = bytearray(32_000_000)
        while watch.peak.parts_bytes.get("us", 0) < len(held):
            pass
    assert watch.peak.total_bytes == sum(watch.peak.parts_bytes.values())
