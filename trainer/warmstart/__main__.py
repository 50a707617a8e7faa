"""``python -m trainer.warmstart --out DIR``: a policy that imitates the demonstration's teacher, as a Hugging Face directory.

With ``--model DIR`` a pretrained model imitates, in its own tokenizer and chat template; otherwise a tiny Llama from random weights
does. Exit status: 0 the directory is complete; 1 the training was stopped, or failed; 2 a user's mistake.
"""

import argparse
import sys
from pathlib import Path

from pipeline.commandline import program

DESCRIPTION = "Train a policy to imitate the demonstration's teacher, and write its Hugging Face directory."


def main() -> int:
    parser = argparse.ArgumentParser(prog=program("trainer.warmstart"), description=DESCRIPTION)
    parser.add_argument("--out", type=Path, required=True, help="the Hugging Face directory to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--model",
        type=Path,
        help="the directory of a pretrained Llama, which imitates instead of a policy from random weights; if killed, "
        "the same command goes on",
    )
    parser.add_argument(
        "--lessons", type=int, help="number of the teacher's episodes that the model of --model sees"
    )
    options = parser.parse_args()
    if options.lessons is not None and options.model is None:
        parser.error("--lessons needs --model: the policy from random weights has its own number")
    try:
        if options.model is None:
            from trainer.warmstart.scratch import make_policy

            make_policy(options.out, seed=options.seed)
        else:
            from trainer.warmstart.pretrained import Warmstart, imitate

            settings = Warmstart(seed=options.seed)
            if options.lessons is not None:
                settings = Warmstart(seed=options.seed, num_lessons=options.lessons)
            return imitate(options.model, options.out, settings)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
