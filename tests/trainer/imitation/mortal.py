"""`python -m trainer.run` that kills itself between two steps of fine-tuning: after the step in the variable DIES_AFTER_STEP."""

import os
import signal
import sys

from trainer.imitation.run import ImitationRun
from trainer.run import main


def let_die() -> None:
    """Has runs of this process end there."""
    take = ImitationRun._take  # pyright: ignore[reportPrivateUsage]

    async def take_and_die(run: ImitationRun) -> None:
        await take(run)
        if run._step == int(os.environ["DIES_AFTER_STEP"]):  # pyright: ignore[reportPrivateUsage]
            os.kill(os.getpid(), signal.SIGKILL)

    ImitationRun._take = take_and_die  # pyright: ignore[reportPrivateUsage]


if __name__ == "__main__":
    let_die()
    sys.exit(main())
