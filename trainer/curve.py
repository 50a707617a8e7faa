"""`python -m trainer.curve RUN_DIR`: draws the reward curve of a run as a PNG picture, from the run's journal."""

import argparse
import sys
from pathlib import Path

from trainer.records.journal import MalformedJournal, journal_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.curve", description=__doc__)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument("-o", "--output", type=Path, help="the picture to write; default RUN_DIR/curve.png")
    arguments = parser.parse_args(argv)
    picture = arguments.output or arguments.run_dir / "curve.png"

    from trainer.records.reward_curve import draw

    try:
        draw(journal_of(arguments.run_dir), picture, title=arguments.run_dir.resolve().name)
    except (ValueError, MalformedJournal) as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{picture} cannot be written: {error.strerror}; choose another --output")
    print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
