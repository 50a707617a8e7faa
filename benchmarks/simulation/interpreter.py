"""Runs what the policy wrote in a Python file: in a child process, each time in a fork of it with little CPU time and memory.

`python -m benchmarks.simulation.interpreter` is the child; it reads and writes JSON lines, and has loaded nothing worth copying.
"""

import contextlib
import functools
import io
import json
import os
import resource
import subprocess
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

CPU_S = 1
MEMORY_BYTES = 512 * 2**20
PRINTED_CHARS = 10_000
CACHED = 50_000
MODULES = ("math", "os", "sys")
"""What the family's files import, without use; here these modules are empty."""


class Evaluated(NamedTuple):
    """What an expression printed before its value or error, and the value's or the error's text."""

    printed: str
    value: str | None  # None: it has no value
    error: str = ""  # the last line of the traceback; "" with no value: the time or memory was used up


class Interpreter:
    """A client of the child process."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self.evaluate = functools.lru_cache(CACHED)(self._evaluate)

    def _evaluate(self, source: str, expressions: tuple[str, ...]) -> tuple[Evaluated, ...]:
        """The values of expressions after the source has run, each alone; none after the first that used up its time."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps([source, expressions]) + "\n")
        self._child.stdin.flush()
        found = [Evaluated(*one) for one in json.loads(self._child.stdout.readline())]
        return tuple(found + [Evaluated("", None)] * (len(expressions) - len(found)))


@contextlib.contextmanager
def interpreter() -> Iterator[Interpreter]:
    """Start the child; it ends with the block."""
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield Interpreter(child)
        finally:
            child.kill()


def serve() -> None:
    """Evaluates, in the child, what arrives until the pipe is closed."""
    for line in sys.stdin:
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _evaluate_alone(writing, *json.loads(line))
        os.close(writing)
        with os.fdopen(reading) as pipe:
            lines = pipe.readlines()
        os.waitpid(pid, 0)
        whole = [json.loads(one) for one in lines if one.endswith("\n")]
        print(json.dumps(whole), flush=True)


def _evaluate_alone(writing: int, source: str, expressions: list[str]) -> None:
    """Evaluates in a fork, which does not return, and prints one line for each expression."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        for expression in expressions:
            os.write(writing, (json.dumps(_run(source, expression)) + "\n").encode())
    finally:
        os._exit(0)


def _run(source: str, expression: str) -> tuple[str, str | None, str]:
    printed, builtins = io.StringIO(), dict(cast(dict[str, Any], vars(sys.modules["builtins"])))
    for name in ("open", "input", "breakpoint", "exit", "quit"):
        builtins.pop(name, None)
    builtins["__import__"] = _import
    namespace: dict[str, object] = {"__name__": "module", "__builtins__": builtins}
    value, error = None, ""
    with contextlib.redirect_stdout(printed):
        try:
            exec(source, namespace)
            value = str(eval(expression, namespace))
        except MemoryError:
            pass
        except (Exception, SystemExit) as raised:
            error = traceback.format_exception_only(raised)[-1].strip()
    return printed.getvalue()[-PRINTED_CHARS:], value, error


def _import(name: str, *_: object) -> types.ModuleType:
    if name not in MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}")
    return types.ModuleType(name)


if __name__ == "__main__":
    serve()
