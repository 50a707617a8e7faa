"""Memory of process trees."""

import os
import subprocess
import sys

from infra.memory import MemoryWatch, parts_bytes

HOLD = "import sys; held = bytearray(64_000_000); print('held', flush=True); sys.stdin.read()"


def test_the_memory_of_a_child_is_counted_with_its_parent() -> None:
    before = parts_bytes({"us": os.getpid()})["us"]
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = parts_bytes({"us": os.getpid(), "child": child.pid})
        child.communicate()
    assert after["child"] > 64_000_000
    assert after["us"] - before > 60_000_000


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
