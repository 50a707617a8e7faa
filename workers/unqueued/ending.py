"""How commands end that grade tasks: the exit status, and what they say on standard error."""

import asyncio
import signal
import sys
from collections.abc import Callable

from pipeline.errors import describe_error
from workers.sandbox.protocol import Misconfigured
from workers.unqueued.outputs import Unwritable

MISUSE = 2


def exit_status(
    work: Callable[[], int], *, kept_if_stopped: Callable[[], str], kept_if_unwritable: Callable[[], str]
) -> int:
    """The exit status of `work`, or of what ends it: a signal, Misconfigured or Unwritable. The last two arguments tell where the
    results are then that there are already, "" if there are none.
    """
    try:
        return work()
    except KeyboardInterrupt:
        return _stopped(signal.SIGINT, kept_if_stopped())
    except asyncio.CancelledError:
        return _stopped(signal.SIGTERM, kept_if_stopped())
    except Misconfigured as error:
        return misuse(error)
    except Unwritable as error:
        return misuse(error, kept_if_unwritable())


def misuse(error: Exception, kept: str = "") -> int:
    """Says in one line what is wrong, and returns the exit status of misuse."""
    print(f"error: {_with(describe_error(error), kept)}", file=sys.stderr)
    return MISUSE


def _stopped(number: signal.Signals, kept: str) -> int:
    print(_with(f"{number.name}: stopped", kept), file=sys.stderr)
    return 128 + number


def _with(line: str, kept: str) -> str:
    return f"{line}; {kept}" if kept else line
