"""The whole system on one machine: `make demo` is this.

    python -m infra.local RECIPE.toml --run-dir runs/demo [--workers 2] [--slots 6] [-- TRAINER FLAGS]

First it checks its ports. Then it starts what is missing, in this order: Redis and Docker, the base image, the engine
and the router, then, after the commands of --prepare, the workers, pages of the run for a browser, whose address it
prints, and last the trainer, which resumes the run in the run directory if there is one. The trainer writes to the
screen, everything else to RUN_DIR/logs/. What dies is started again, and a line says so: engine, router, workers and
pages always, the trainer if a signal ended it, Redis and Docker if this process started them.

When the trainer ends by itself, or on Ctrl-C or SIGTERM, everything that this process started is stopped in the
opposite order, the containers of its workers are removed, and the peak of memory is written to RUN_DIR/memory.json.
Services that were running before keep running. The trainer is waited for while it ends its optimizer step and writes a
checkpoint, unless a second signal comes. If this process is killed, the kernel ends what it started.

Exit status: the trainer's; 1 if something could not be started; 2 misuse, with what to change; 130 after Ctrl-C,
143 after SIGTERM.
"""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import FrameType

from infra import services
from infra.images.build import BuildError
from infra.local.commands import parse_arguments
from infra.local.run import run, say
from infra.processes import Supervisor


class StopRequested(BaseException):
    """A signal asked this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def raise_on_signals(numbers: Sequence[signal.Signals], *, afterwards: Callable[[], None]) -> None:
    """Makes the first of `numbers` raise StopRequested from now on, and each further one call `afterwards`."""

    def stop(number: int, frame: FrameType | None) -> None:
        call_on_signals(numbers, afterwards)
        raise StopRequested(number)

    for number in numbers:
        signal.signal(number, stop)


def call_on_signals(numbers: Sequence[signal.Signals], called: Callable[[], None]) -> None:
    for number in numbers:
        signal.signal(number, lambda number, frame: called())


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(__doc__, argv)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    trainers = Supervisor(say)
    raise_on_signals(numbers, afterwards=trainers.hurry)
    with ExitStack() as cleanup:
        try:
            status = run(arguments, cleanup, trainers)
        except StopRequested as stop:
            say(f"{signal.Signals(stop.number).name}: stopping")
            status = 128 + stop.number
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
        except (RuntimeError, OSError, BuildError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        finally:
            call_on_signals(numbers, trainers.hurry)
            services.announce_stop()
    return status


if __name__ == "__main__":
    sys.exit(main())
