"""`python -m trainer.where RUN_DIR`: where the time of a run went, role by role, and the change that would help most.

Each table sums up to its wall. Reads the run's directory only, also while the run goes on.
"""

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from trainer.records.journal import MalformedJournal, journal_of
from trainer.where.findings import where
from trainer.where.text import text_of


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.where", description=__doc__)
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args(argv)
    if not (journal_of(arguments.run_dir) / "steps.jsonl").exists():
        parser.error(f"{arguments.run_dir} holds no steps.jsonl: give the directory of a run")
    try:
        found = where(arguments.run_dir)
    except MalformedJournal as error:
        parser.error(str(error))
    print(msgspec.json.encode(found).decode() if arguments.json else text_of(found, arguments.run_dir))
    return 0


if __name__ == "__main__":
    # A reader such as `head`, which stops early, ends this command silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
