"""`python -m trainer.report RUN_DIR`: what a run achieved, how it ended, and whether every request is accounted for.

Exit status: 0 every request is accounted for; 1 a request was lost or a trajectory trained twice; 2 misuse.
"""

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from trainer.records.drift import drift_lines
from trainer.records.journal import MalformedJournal, journal_of
from trainer.records.summary import summarize
from trainer.records.summary_table import table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.report", description=__doc__)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument(
        "--drift",
        action="store_true",
        help="print where learner and engine disagree about log-probs, by weight version, position and kind of token",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    arguments = parser.parse_args(argv)
    if not (journal_of(arguments.run_dir) / "episodes.jsonl").exists():
        parser.error(f"{arguments.run_dir} holds no episodes.jsonl: give the directory of a run")
    try:
        summary = summarize(arguments.run_dir)
    except MalformedJournal as error:
        parser.error(str(error))
    if arguments.json:
        print(msgspec.json.encode(summary).decode())
    elif arguments.drift:
        print("\n".join(drift_lines(summary.drift)))
    else:
        print(table(summary, arguments.run_dir))
    return 0 if summary.is_accounted_for else 1


if __name__ == "__main__":
    # A reader such as `head`, which stops early, ends this command silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
