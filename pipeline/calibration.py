"""What verification measured of a task's tests with the known fix: which pass, and under which contradictions each fails.

The grader reads it to decide whether a pass proves anything: the tests that the known fix passes must have passed, and the
same tests must fail once what they expect is contradicted. Like hidden tests it is kept from the agent: the trainer puts it
into requests in packed form, and only the grader unpacks it.
"""

from typing import Annotated

import msgspec

from pipeline.message import Count, Message, decode_body, encode_body


class Contradiction(Message, frozen=True, kw_only=True):
    """One expectation of a test file, made wrong: at `offset_bytes` of `path`, the text `was` becomes `becomes`.

    Code that passes the original must fail what it becomes, whatever that code is. `fails` are the tests that were seen to
    fail under it with the known fix, by the names that the runner gives them.
    """

    path: str  # in the workdir, or absolute
    offset_bytes: Count
    was: str
    becomes: str
    fails: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]


class Calibration(Message, frozen=True, kw_only=True):
    """The outcomes of the known fix and the contradictions that its tests fail under."""

    # Names of the tests that passed in every run of the known fix; a pass needs all of them, passed. Names that differ from run
    # to run are left out.
    passing: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()  # names that passed in some runs only
    witnessed: bool = False  # whether the witness reported the runs
    stops_early: bool = False  # whether the eval script ends its run at the first failure
    contradictions: tuple[Contradiction, ...] = ()
    # Files in the repository that hold these tests and that the known fix leaves alone: restored before the tests run.
    test_files: tuple[str, ...] = ()
    # Parts of the test runner that became something else in its runs, and ways of failing in which a test did not fail there.
    replaced: tuple[str, ...] = ()
    # So many tests may fail in one control run, because more failures take too long; 0: all. Then tests that the base does not
    # pass, `needing_fix`, are controlled first.
    most_controlled: Count = 0
    needing_fix: tuple[str, ...] = ()
    control_cpu_s: float = 0.0  # CPU time of the slowest control run with the known fix
    control_wall_s: float = 0.0  # wall time of the slowest one
    # Files in the repository that the known fix changes: they are under test, so no patch has them restored because the eval
    # script runs or names them.
    fix_paths: tuple[str, ...] = ()


def pack(calibration: Calibration) -> bytes:
    """The calibration as it travels in a task."""
    return encode_body(calibration)


def unpack(packed: bytes) -> Calibration | None:
    """The calibration in `packed`; None if that is empty: the task was never calibrated. Raises MalformedMessage."""
    return decode_body(packed, Calibration) if packed else None
