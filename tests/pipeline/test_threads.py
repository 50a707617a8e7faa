"""Messages that several threads decode at once, of types that were not decoded before."""

import subprocess
import sys

SCRIPT = """
import sys, threading, msgspec
from pipeline.message import decode

sys.setswitchinterval(1e-6)
for _ in range(100):
    inner = msgspec.defstruct("Inner", [(f"field_{number}", int | None, None) for number in range(20)])
    outer = msgspec.defstruct("Outer", [("inner", list[inner])])
    data = msgspec.msgpack.encode({"inner": [{"field_1": 1}]})
    gate = threading.Barrier(8)

    def run():
        gate.wait()
        assert decode(data, outer).inner[0].field_1 == 1

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_decode_a_type_for_the_first_time_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False)
    assert done.returncode == 0
