"""`python -m trainer.judge report RUN_DIR`: what the judge of a run is worth, also while the run goes on.

Exit status: 0 there is no warning; 1 there is one; 2 misuse.
"""

import argparse
import signal
import sys
from pathlib import Path

import msgspec

from trainer.judge.lines import quality_lines
from trainer.judge.quality import judge_quality
from trainer.records.journal import EpisodeRow, MalformedJournal, journal_of, read
from trainer.records.judgement_row import JudgementRow


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.judge", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    report = verbs.add_parser("report", help="compare the scores of a run's judge with the rewards")
    report.add_argument(
        "run_dir", type=Path, metavar="RUN_DIR", help="the directory of a run, as in runs/demo"
    )
    report.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    options = parser.parse_args(argv)
    directory = journal_of(options.run_dir)
    if not (directory / "episodes.jsonl").exists():
        parser.error(f"{options.run_dir} holds no episodes.jsonl: give the directory of a run")
    try:
        quality = judge_quality(read(directory, JudgementRow), read(directory, EpisodeRow))
    except MalformedJournal as error:
        parser.error(str(error))
    if quality is None:
        parser.error(
            f"{options.run_dir} holds no judgement: set [judge] method in the recipe, and start `python -m workers.judge`"
        )
    if options.json:
        print(msgspec.json.encode(quality).decode())
    else:
        print("\n".join(quality_lines(quality)))
    return 1 if quality.warnings else 0


if __name__ == "__main__":
    # A reader such as `head`, which stops early, ends this command silently.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
