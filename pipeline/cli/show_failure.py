"""How `show` and `dead` print the evidence of a failed try."""

from pipeline.cli.ink import Ink, clock, indented, shortened
from pipeline.deadletters import AttemptFailure
from pipeline.visible import visible


def failure_block(failure: AttemptFailure, ink: Ink, *, full: bool) -> str:
    """The evidence of one try."""
    again = "another try might help" if failure.transient else "no other try would help"
    where_and_when = (
        f"{failure.boundary}, {clock(failure.failed_at)}, {visible(failure.worker) or 'no worker'}"
    )
    title = f"attempt {failure.attempt} failed at {where_and_when}"
    rows = [ink.bad(title), indented(f"{visible(failure.message)} ({again})")]
    if failure.detail:
        rows.append(indented(shortened(visible(failure.detail), full=full)))
    return "\n".join(rows)
