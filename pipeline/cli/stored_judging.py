"""Judge requests as the directory of their run has them: listed from the trainer's journal, shown with the rollout that they judge."""

from collections.abc import Collection, Iterator
from pathlib import Path

from pipeline.cli import journal, stored
from pipeline.cli.finding import Found, FoundJudging
from pipeline.cli.journal import JUDGEMENT_FATES, JudgementFate
from pipeline.cli.listing import LineFilter, RequestLine, State
from pipeline.judge import judge_request_id, judged_rollout_id
from pipeline.kinds import JUDGE


def find(run_dirs: Collection[Path], request_id: str) -> FoundJudging:
    """Raises LookupError if no store of these directories has the judgement."""
    rollout_id = judged_rollout_id(request_id)
    kept = stored.find_stored(run_dirs, rollout_id) if rollout_id is not None else None
    judgement = kept[0].rollout.judgement if kept is not None else None
    if kept is None or judgement is None:
        raise stored.unknown(run_dirs, request_id)
    return Found(
        request_id=request_id,
        state="answered" if judgement.failed is None else "dead",
        request=judgement.claim.request,
        lease=None,
        result=judgement,
        failures=(),
        source=str(kept[1]),
    )


def lines(
    run_dir: Path, states: Collection[State], wanted: LineFilter, *, only_run: str | None
) -> Iterator[RequestLine]:
    """The judge requests that the trainer has settled, newest first; withdrawn ones are not among them. Raises LookupError for a
    directory without a journal.
    """
    run_id = stored.run_id_of(run_dir)
    rows = list(journal.judgements(journal.directory_in(run_dir)))
    settled = (_line(run_id, row) for row in reversed(rows) if row.turns or row.fate == "failed")
    of_run = only_run is None or only_run == run_id
    return (line for line in settled if of_run and line.state in states and wanted.matches(line))


def _line(run_id: str, row: JudgementFate) -> RequestLine:
    is_failed = row.fate == "failed"
    return RequestLine(
        run_id=run_id,
        request_id=judge_request_id(row.rollout_id),
        state="dead" if is_failed else "answered",
        task_id=row.task_id,
        purpose="train",
        at=row.at,
        detail=row.error if is_failed else f"{row.scored}; {JUDGEMENT_FATES.get(row.fate, row.fate)}",
        group_id=row.group_id,
        outcome=f"failed:{row.error.partition(':')[0]}" if is_failed else "judged",
        kind=JUDGE.name,
    )
