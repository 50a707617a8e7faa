"""Functions that tests have carried out in other processes."""

import os
import re
import signal
import sys
import time
from pathlib import Path

from pipeline.errors import TaskBroken
from pipeline.task import File

_kept: list[bytearray] = []


def squared(number: int) -> int:
    return number * number


def process_id() -> int:
    return os.getpid()


def with_content(file: File, content: bytes | None) -> File:
    return File(path=file.path, content=content or file.content)


def never_ends(text: str) -> bool:
    return re.fullmatch(r"(a+)+b", text) is not None


def fills_memory(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def keeps_memory(num_bytes: int) -> int:
    _kept.append(bytearray(num_bytes))
    return sum(map(len, _kept))


def nests(depth: int) -> int:
    return nests(depth - 1) + 1 if depth else 0


def returns_much(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def ends_by(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


def sleeps(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def writes_and_sleeps(path: str) -> None:
    Path(path).touch()
    time.sleep(3600.0)


def burns(cpu_s: float) -> int:
    ends_at = time.process_time() + cpu_s
    while time.process_time() < ends_at:
        pass
    return os.getpid()


def breaks_the_task(text: str) -> None:
    raise TaskBroken(text)


def has_a_bug() -> None:
    raise KeyError("a bug")


def prints_and_reads() -> str:
    print("printed by a library")
    os.write(1, b"and written\n")
    return sys.stdin.read()
