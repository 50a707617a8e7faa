"""`python -m trainer.warmstart` that kills itself after the step in the variable DIES_AFTER_STEP."""

import sys

from tests.trainer.imitation.mortal import let_die
from trainer.warmstart.__main__ import main

if __name__ == "__main__":
    let_die()
    sys.exit(main())
