"""Steps in a grading container that fail, and what is known then of whose fault it is."""

from pipeline.errors import GraderError
from workers.sandbox.protocol import CommandResult, is_starved

TAIL_BYTES = 500


class StepFailed(GraderError):
    """A step in a container with a patch failed, or took too long on a machine that had CPU for it.

    It is the patch's fault if the same steps succeed without the patch. `output` is the end of what the step printed.
    """

    def __init__(self, how: str, output: str = "", cpu_s: float = 0.0) -> None:
        super().__init__(f"{how}: {output}" if output else how)
        self.how = how
        self.output = output
        self.cpu_s = cpu_s


def failed_step(doing: str, result: CommandResult) -> GraderError:
    """The error of a step that did not succeed: StepFailed, unless the machine had no CPU for it."""
    if result.exit_code is not None:
        return StepFailed(f"{doing} ended with status {result.exit_code}", tail(result))
    if is_starved(result):
        return GraderError(f"{doing} took too long on a machine without CPU for it: {tail(result)}")
    return StepFailed(f"{doing} took too long", tail(result))


def tail(result: CommandResult) -> str:
    """The end of the step's output."""
    return result.output[-TAIL_BYTES:].decode("utf-8", "replace").strip()
